"""What the supervisor does where workers are given notice, without waiting for it: see `supervised`."""

from __future__ import annotations

import pytest
from limits import limits
from supervised import Stage
from test_supervisor import job

THREE = limits(3, 1, 3)


@pytest.mark.parametrize("leavers", [(0,), (1, 2)])
@job(THREE, failure=0)
async def test_those_with_notice_leave_by_a_planned_view_and_others_are_started(
    stage: Stage, leavers: tuple[int, ...]
) -> None:
    await stage.train(0, 1, 2)
    for number in leavers:
        await stage.says(number, "notice")
        await stage.says(number, "notice")
    await stage.settle()
    rest = [number for number in range(3) if number not in leavers]
    views = [view["view"] for view in stage.workers[rest[0]].of_kind("view")]
    assert [view["reason"] for view in views] == ["start", "notice"], "they leave together"
    await stage.join(*rest)
    assert len(stage.workers) == 3, "the start of others takes nothing from those that take over"
    for number in leavers:
        await stage.says(number, "left")
        stage.workers[number].end(0)
    await stage.settle()
    newcomers = [3 + index for index in range(len(leavers))]
    await stage.boot(*newcomers)
    assert stage.workers[rest[0]].view == [*rest, *newcomers]
    assert [event["worker"] for event in stage.events("notice")] == [*leavers]
    assert len(stage.workers) == 3 + len(leavers)
    await stage.end_well(*rest, *newcomers)


@job(limits(2, 1, 2, replace=False), failure=1, notice=1)
async def test_after_the_grace_it_is_lost(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.says(1, "notice")
    for second in range(25):
        await stage.says(0, "alive")
        if not stage.workers[1].killed:
            await stage.says(1, "alive")
        assert stage.workers[1].killed == (second >= 20)
        await stage.settle(1)
    assert stage.events("failure")[0]["how"] == "did not leave within 20 s of its notice and was killed"
    await stage.join(0)
    assert stage.workers[0].view == [0] and len(stage.workers) == 2
    await stage.end_well(0)


@job(limits(2, 1, 2, replace=False, script=True), failure=1, notice=1)
async def test_one_that_is_lost_is_no_failure_of_a_job_that_has_trained_to_the_end_without_it(stage: Stage) -> None:
    """The report of its end comes late, as from another host."""
    await stage.train(0, 1)
    stage.workers[1].hangs = True
    await stage.says(1, "notice")
    await stage.settle()
    await stage.join(0)
    while not stage.workers[1].killed:
        await stage.says(0, "alive")
        await stage.says(1, "alive")
        await stage.settle(0.5)
    await stage.says(0, "record", kind="summary", data={})
    await stage.settle()
    stage.workers[1].end(-9)
    stage.workers[0].end(0)


@job(limits(2, 1, 2))
async def test_where_nobody_can_take_over_the_job_stops_with_a_last_checkpoint(stage: Stage) -> None:
    stage.starts_fail = True
    await stage.train(0, 1)
    await stage.says(0, "notice")
    await stage.says(1, "notice")
    await stage.settle()
    assert [message["reason"] for message in stage.workers[0].of_kind("stop")] == ["terminated"]
    for _ in range(12):  # the checkpoint takes more than half of the grace
        for number in (0, 1):
            await stage.says(number, "alive")
        await stage.settle(1)
    assert not any(worker.killed for worker in stage.workers)
    await stage.end_well(0, 1)


@job(limits(2, 1, 2, grace_s=20), failure=0)
async def test_where_nobody_has_taken_over_in_time_the_job_stops_with_a_last_checkpoint(stage: Stage) -> None:
    await stage.train(0, 1)
    for number in (0, 1):
        await stage.says(number, "notice")
    for _ in range(12):  # the others still boot
        for number in (0, 1):
            await stage.says(number, "alive")
        await stage.settle(1)
    assert len(stage.workers) == 4
    assert [message["reason"] for message in stage.workers[0].of_kind("stop")] == ["terminated"]
    await stage.end_well(0, 1)


@job(limits(1, 1, 1, grace_s=20), failure=0)
async def test_one_that_waits_for_a_node_may_get_it_in_time(stage: Stage) -> None:
    await stage.train(0)
    stage.has_room = False
    await stage.says(0, "notice")
    await stage.settle(5)
    assert not stage.workers[0].of_kind("stop")
    stage.workers[1].running = True
    await stage.hand_over(0, 1)


@job(limits(2, 1, 2, grace_s=20), failure=0)
async def test_one_that_has_left_but_does_not_end_is_no_loss(stage: Stage) -> None:
    await stage.train(0, 1)
    await stage.says(1, "notice")
    await stage.settle()
    await stage.join(0)
    await stage.says(1, "left")
    for second in range(25):
        for number in (0, 1):
            await stage.says(number, "alive")
        assert stage.workers[1].killed == (second >= 20)
        await stage.settle(1)
    await stage.boot(2)
    await stage.join(0, 2)
    await stage.end_well(0, 2)


@job(limits(2, 1, 2), failure=0, notice=1)
async def test_one_that_boots_is_replaced(stage: Stage) -> None:
    """It cannot catch the signal yet, which ends it."""
    await stage.boot(0)
    stage.workers[1].end(-15)
    await stage.settle()
    await stage.boot(2)
    assert stage.workers[2].view == [0, 2]
    await stage.join(0, 2)
    await stage.end_well(0, 2)
