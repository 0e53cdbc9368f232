"""Workers that cannot reach each other: the supervisor finds out who, and the others go on without one side."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import limits
from supervised import Stage
from test_supervisor import job

from kfuse.elastic.cuts import Pair, to_leave
from kfuse.elastic.reach import unreached


def lies_between(*sides: Sequence[int]) -> list[Pair]:
    """The pairs of workers on different sides."""
    return [(a, b) for one, other in combinations(sides, 2) for a in one for b in other]


@pytest.mark.parametrize(
    ("workers", "pairs", "gone"),
    [
        ([0, 1, 2], [(0, 1)], [1]),  # the leader stays
        ([1, 0, 2], [(0, 1)], [0]),
        ([0, 1, 2], lies_between([0], [1, 2]), [0]),  # the side with the most workers does
        ([0, 2, 1, 3], lies_between([0, 1], [2, 3]), [3, 2]),
        ([0, 1, 2, 3, 4], lies_between([0, 1, 2], [3], [4]), [4, 3]),
        ([0, 1], [], []),
    ],
)
def test_the_largest_side_stays(workers: list[int], pairs: list[Pair], gone: list[int]) -> None:
    assert to_leave(workers, pairs) == gone


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1])))
def test_those_who_stay_reach_each_other(pairs: set[Pair]) -> None:
    """Worker 8 and 9 may have ended meanwhile. Nobody goes whom all others reach."""
    workers = [*range(8)]
    gone = to_leave(workers, sorted(pairs))
    left = {*workers} - {*gone}
    assert not any({*pair} <= left for pair in pairs)
    assert all(any(worker in pair for pair in pairs) for worker in gone)


def test_whom_a_worker_reaches() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = {4: there.getsockname(), 7: gone.getsockname()}
        gone.close()
        assert unreached(addresses, 10) == [7]
        assert unreached({5: ("192.0.2.1", 9)}, 0.1) == [5]  # an address that nobody has
        assert unreached({6: ("255.255.255.255", 9)}, 10) == [6]  # refused at once


@job(limits(3, 1, 3, max_failures=2), cut=1, failure=1)
async def test_the_others_go_on_without_one_that_they_do_not_reach(stage: Stage) -> None:
    """Where all reach each other all go on. The one that goes is lost like any other, and is replaced."""
    await stage.train(0, 1, 2)
    stage.supervisor.processes.workers[1].host = "there"
    await stage.lose_contact(2, 1)
    await stage.cut()
    assert stage.workers[0].view == [0, 1, 2] and not stage.events("cut")
    await stage.lose_contact(0, 2)  # the view was not even formed
    await stage.cut((0, 1))
    assert [worker.killed for worker in stage.workers] == [False, True, False, False]
    assert stage.workers[0].view == stage.workers[2].view == [0, 2]
    [event] = stage.events("cut")
    assert (event["workers"], event["hosts"], event["evicted"]) == ([[0, 1]], [["here", "there"]], [1])
    assert "did not reach worker 0 on here" in stage.events("failure")[0]["how"]
    await stage.join(0, 2)
    await stage.boot(3)
    assert stage.workers[0].view == [0, 2, 3]
    await stage.join(0, 2, 3)
    await stage.end_well(0, 2, 3)


@job(limits(3, 1, 3, replace=False), cut=0, failure=1)
async def test_one_that_hangs_while_its_heartbeats_go_on_is_ended(stage: Stage) -> None:
    """All reach its process, and it comes to no view. Those that wait for it time out one after the other."""
    await stage.train(0, 1, 2)
    for generation in (1, 2):
        await stage.lose_contact(0, generation)
        await stage.cut()
    await stage.settle(3)
    await stage.lose_contact(2, 2)
    assert not any(worker.killed for worker in stage.workers)
    await stage.settle(4)
    assert [worker.killed for worker in stage.workers] == [False, True, False]
    how = stage.events("failure")[0]["how"]
    assert "did not come to view 2" in how and "a longer comm.timeout_s" in how
    assert stage.workers[0].view == [0, 2]
    await stage.join(0, 2)
    await stage.end_well(0, 2)


@job(limits(4, 1, 4, replace=False), cut=1, failure=2)
async def test_a_whole_side_goes_at_once(stage: Stage) -> None:
    await stage.train(0, 1, 2, 3)
    await stage.lose_contact(0, 1)
    await stage.cut(*lies_between([0, 1], [2, 3]))
    assert stage.workers[0].view == stage.workers[1].view == [0, 1]
    assert stage.workers[0].of_kind("view")[-1]["view"]["generation"] == 2
    await stage.join(0, 1)
    await stage.end_well(0, 1)


@job(limits(2, 1, 2), cut=2)
async def test_a_new_worker_on_that_host_joins_once_it_reaches_the_others(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.lose_contact(0, 1)
    await stage.cut((0, 1))
    await stage.join(0)
    await stage.boot(2)
    for _ in range(30):
        await stage.cut((0, 2))
        assert stage.workers[0].view == [0]
        await stage.says(0, "alive")
        await stage.says(2, "alive")
        await stage.settle(1)
    assert len(stage.workers[2].of_kind("reach")) > 2, "it tries again and again"
    for _ in range(12):
        await stage.cut()
        await stage.settle(1)
    assert stage.workers[2].view == [0, 2]
    await stage.join(0, 2)
    await stage.end_well(0, 2)


@job(limits(3, 1, 3, replace=False), cut=0, failure=1)
async def test_one_that_ends_meanwhile_answers_the_question(stage: Stage) -> None:
    """No answer comes from it, and the others form a view without it: nobody has to go."""
    await stage.train(0, 1, 2)
    await stage.lose_contact(0, 1)
    await stage.lose(1)
    await stage.cut((0, 1))
    assert stage.workers[0].view == stage.workers[2].view == [0, 2]
    await stage.join(0, 2)
    await stage.end_well(0, 2)
