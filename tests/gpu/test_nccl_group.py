"""Groups over NCCL keep its rules: errors become CommError in time, nothing blocks for ever, torch kills no process."""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import nccl_double
import pytest
import torch
from distributed import WorkersFailed, run_workers
from gpu.stand_in import StandInProcessGroup
from nccl_double import Faults, installed, messages, records
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore

from kfuse.comm import communicator, topology
from kfuse.comm import group as groups
from kfuse.comm.communicator import NcclPending
from kfuse.comm.group import CommError
from kfuse.comm.nccl import NcclGroup
from kfuse.elastic.rendezvous import Rendezvous

PLENTY_S = 60.0  # no test waits for it
BRIEF_S = 3.0  # for those that wait until a timeout: longer than a busy machine delays a message


def connect(timeout_s: float = PLENTY_S, name: str = "view", **arguments: Any) -> NcclGroup:
    place = Rendezvous.of_environment()
    assert place is not None
    store = PrefixStore(name, place.store(PLENTY_S))
    return NcclGroup(place.rank, place.size, store, torch.device("cpu"), timeout_s, **arguments)


def threads_left(prefix: str) -> list[str]:
    deadline = time.monotonic() + PLENTY_S
    while (left := [t.name for t in threading.enumerate() if t.name.startswith(prefix)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return left


def others_stay() -> None:
    place = Rendezvous.of_environment()
    assert place is not None
    place.await_others_at_end(PLENTY_S)


# -- collectives ---------------------------------------------------------------------------------------------------


def everything(log: Path) -> dict[str, Any]:
    with installed(log):
        group = connect()
        r, n = group.rank, group.size
        flat, top = torch.arange(300.0) * (r + 1), torch.tensor([float(r)])
        group.all_reduce(flat, "sum").wait()
        group.all_reduce(top, "max", "max").wait()
        sent = torch.tensor([r], dtype=torch.uint8)
        group.broadcast(sent, "from the last", n - 1).wait()
        gathered = [t.tolist() for t in group.all_gather(torch.tensor([[r], [-r]]), "gather")]
        numbers = [t.item() for t in group.all_gather(torch.tensor(2.0**40 + r, dtype=torch.float64), "a scalar")]
        shared = []
        unequal, short = ([slice(a, b), slice(b, c), slice(c, 1000)] for a, b, c in ((0, 0, 700), (0, 400, 800)))
        for numel, cuts in ((5, None), (64 * n, None), (1000, None), (1000, unequal), (1000, short)):
            parts = torch.full((numel + 64 * n,), -1.0)[:numel]  # with room for equal parts
            cuts = cuts or group.shards(numel)
            parts[cuts[r]] = torch.arange(float(numel))[cuts[r]]
            pending = group.share(parts, "parts", cuts)
            pending.wait()
            shared.append(torch.equal(parts, torch.arange(float(numel))) and pending.done())
        into, cut = [n - 1 if s == 0 else 0 for s in range(n)], [n - 1 if r == 0 else 0] * n
        out = torch.zeros(sum(into))
        group.all_to_all(out, into, torch.arange(float(sum(cut))), cut, "only rank 0 sends").wait()
        links = topology.measure(group)  # one rank is idle in each round
        measured = [[rate is not None and rate > 0 for rate in row] for row in links.throughputs]
        group.finish()
        group.retire()
        others_stay()
        return {
            "sum, max": (torch.equal(flat, torch.arange(300.0) * 6), top.item()),
            "broadcast": sent.item(),
            "gathered": (gathered, numbers),
            "shared": shared,
            "all_to_all": out.tolist(),
            "links": measured,
            "left": (threads_left("kfuse-nccl"), os.environ.get("TORCH_NCCL_BLOCKING_WAIT")),
        }


def test_every_collective_brings_what_it_should_and_nothing_is_left_behind(tmp_path: Path) -> None:
    for r, result in enumerate(run_workers(3, everything, tmp_path)):
        assert result == {
            "sum, max": (True, 2.0),
            "broadcast": 2,
            "gathered": ([[[0], [0]], [[1], [-1]], [[2], [-2]]], [2.0**40 + k for k in range(3)]),
            "shared": [True] * 5,
            "all_to_all": [2.0 * r, 2.0 * r + 1],
            "links": [[r != s for s in range(3)] for r in range(3)],
            "left": ([], None),
        }
    made = [(line["watchdog"], line["high_priority"]) for line in records(tmp_path, "constructed")]
    assert made == [(False, True)] * 3
    assert [line["blocking"] for line in records(tmp_path, "init")] == [False] * 3
    assert len(records(tmp_path, "ended")) == 3 and not records(tmp_path, "abort"), "finish shuts a healthy group down"
    (logs,) = messages(tmp_path).values()
    assert logs[0] == logs[1] == logs[2]
    assert len([m for m in logs[0] if m.startswith("allgather")]) == 3 + 3, "one for each share of equal parts"


def test_the_doubles_of_a_group_of_messages_take_what_torch_takes() -> None:
    """A ProcessGroupNCCL is a Backend, whose methods take no device; those of a ProcessGroup do."""
    for name in ("_start_coalescing", "_end_coalescing"):
        assert re.match(rf"{name}\(self: [\w.]+\)", str(getattr(Backend, name).__doc__))
        for double in (nccl_double.ProcessGroupNCCL, StandInProcessGroup):
            assert list(inspect.signature(getattr(double, name)).parameters) == ["self"]


# -- failures -------------------------------------------------------------------------------------------------------


def failure_of(act: Any) -> tuple[str, float]:
    began = time.monotonic()
    try:
        act()
    except CommError as error:
        return str(error), time.monotonic() - began
    return "nothing", time.monotonic() - began


def reduce_until_failure(log: Path, faults: Faults, timeout_s: float, elastic: bool) -> tuple[str, float, str]:
    """A step's reductions; the error, the seconds until then, and what a later call says."""
    groups.GRACE_S = 0.3
    with installed(log, faults):
        group = connect(check=(lambda: None) if elastic else None)
        group.timeout_s = timeout_s

        def steps() -> None:
            for _ in range(20):
                for k in range(3):
                    group.all_reduce(torch.ones(100), f"bucket {k}").wait_on_stream()
                group.settle()

        error, seconds = failure_of(steps)
        later, _ = failure_of(lambda: group.barrier("kf.barrier"))
        group.retire()
        return error, seconds, later


@pytest.mark.full
def test_an_error_of_nccl_becomes_commerror_and_ends_the_group(tmp_path: Path) -> None:
    """The failed work counts as completed; its data are not there. The other rank just waits, until the timeout."""
    results = run_workers(2, reduce_until_failure, tmp_path, Faults(error_on={0: 6}), BRIEF_S, True)
    error, _, later = results[0]
    assert error.startswith("bucket 1: lost contact with rank 1: NCCL error: unhandled system error"), error
    assert later == error
    error, seconds, _ = results[1]
    assert "bucket 1: waited" in error and "for rank 0 (comm.timeout_s)" in error and seconds < 10 * BRIEF_S
    assert not records(tmp_path, "unhandled error")


def believe_what_is_completed(log: Path) -> tuple[str, float, str]:
    NcclPending.failed = lambda self: None  # type: ignore[method-assign]
    nccl_double.HOST_IS_STREAM = False
    return reduce_until_failure(log, Faults(error_on={0: 6, 1: 6}), BRIEF_S, True)


@pytest.mark.full
def test_the_double_finds_an_error_that_nobody_looked_at(tmp_path: Path) -> None:
    """Negative: a group that takes `is_completed` for success."""
    run_workers(2, believe_what_is_completed, tmp_path)
    assert {line["rank"] for line in records(tmp_path, "unhandled error")} == {0, 1}


def survivors_report(log: Path, noticed: bool, elastic: bool) -> None:
    faults = Faults(lost_in=(2, 9), loss_is_noticed=noticed)
    error, seconds, _ = reduce_until_failure(log, faults, BRIEF_S, elastic)
    nccl_double.record("survived", error=error, seconds=seconds)


@pytest.mark.full
@pytest.mark.parametrize(("noticed", "elastic"), [(True, True), (False, False)], ids=["network", "nvlink"])
def test_a_killed_rank_ends_the_others_waits_within_the_timeout(tmp_path: Path, noticed: bool, elastic: bool) -> None:
    """Fixed: the host is blocked in a wait of its stream (as where the device's queue is full). The thread frees it."""
    with pytest.raises(WorkersFailed) as told:
        run_workers(3, survivors_report, tmp_path, noticed, elastic)
    assert "1 of 3 workers" in str(told.value) and "exit code -9" in str(told.value)
    reports = records(tmp_path, "survived")
    assert len(reports) == 2
    for report in reports:
        assert "bucket" in report["error"] and report["seconds"] < 10 * BRIEF_S, report
        assert ("incomplete sums" in report["error"]) is not elastic
        assert "rank 2" in report["error"] or "the other 2 ranks" in report["error"]


def watched_in_a_hurry(log: Path) -> str:
    """The thread looks all the time, and ends the group while the other one launches without a pause."""
    communicator._WATCH_S, nccl_double.LAUNCH_S = 0.0005, 0.01
    with installed(log, Faults(slow_s={1: 0.002})):
        ends = time.monotonic() + 60.0

        def check() -> None:
            if time.monotonic() > ends and threading.current_thread() is not threading.main_thread():
                raise CommError("another view")

        group = connect(check=check)
        for _ in range(10):
            for k in range(3):
                group.all_reduce(torch.ones(100), f"bucket {k}")
            group.settle()
        ends = time.monotonic() + 0.05

        def launch() -> None:
            while True:
                group.all_reduce(torch.ones(100), "bucket")

        told, _ = failure_of(launch)
        others_stay()
        return told


@pytest.mark.full
def test_one_thread_at_a_time_is_in_the_communicator(tmp_path: Path) -> None:
    assert run_workers(2, watched_in_a_hurry, tmp_path) == ["another view"] * 2
    assert not records(tmp_path, "two threads")


def first_of_its_kind(log: Path, kind: str) -> tuple[str, float]:
    """Rank 1 is lost before its first message of this kind, and the supervisor tells a second later."""
    with installed(log):
        ends = time.monotonic() + 60.0

        def check() -> None:
            if time.monotonic() > ends:
                raise CommError("another view")

        group = connect(check=check)
        if group.rank == 1:
            others_stay()
            return "", 0.0
        ends = time.monotonic() + 1.0
        flat, out = torch.zeros(128), torch.zeros(128)
        told = failure_of(
            {
                "share": lambda: group.share(flat, "bucket", group.shards(128)).wait(),
                "all_to_all": lambda: group.all_to_all(out, [64, 64], flat, [64, 64], "bucket").wait(),
                "exchange": lambda: group.exchange(flat, out, 1, "bucket"),
            }[kind]
        )
        others_stay()
        return told


@pytest.mark.full
@pytest.mark.parametrize("kind", ["share", "all_to_all", "exchange"])
def test_a_launch_that_waits_to_connect_is_left_with_the_view(tmp_path: Path, kind: str) -> None:
    (error, seconds), _ = run_workers(2, first_of_its_kind, tmp_path, kind)
    assert error == "another view" and seconds < 10.0
    assert len(records(tmp_path, "abort")) == 1 and not records(tmp_path, "two threads")


def end_that_hangs(log: Path, faults: Faults) -> tuple[str, float]:
    communicator._END_S = 0.3
    with installed(log, faults):
        group = connect(check=lambda: None)
        began = time.monotonic()
        if faults.abort_blocks:
            group.all_reduce(torch.ones(3), "bucket")
        error, _ = failure_of(group.settle if faults.abort_blocks else group.finish)
        group.retire()
        seconds = time.monotonic() - began
        others_stay()
        return error, seconds


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "said"),
    [(Faults(error_on={0: 2, 1: 2}, abort_blocks=True), "lost contact"), (Faults(shutdown_blocks=True), "nothing")],
    ids=["abort", "shutdown"],
)
def test_an_end_that_hangs_holds_nobody_up(tmp_path: Path, faults: Faults, said: str) -> None:
    """It hangs for ever. An abort would wait for a shutdown that does."""
    for error, seconds in run_workers(2, end_that_hangs, tmp_path, faults):
        assert said in error and seconds < 10 * BRIEF_S
    assert len(records(tmp_path, "abort")) == (2 if faults.abort_blocks else 0)


# -- init -----------------------------------------------------------------------------------------------------------


class Given(CommError):
    """As the session's check raises it: there is another view."""


def never_there(log: Path, gives_up: bool) -> tuple[str, float, list[str]]:
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "1.5"  # by default ten times the limit
    with installed(log, Faults(absent=1)):
        began = time.monotonic()

        def check() -> None:
            if gives_up and time.monotonic() - began > 0.5:
                raise Given("another view")

        error, seconds = failure_of(lambda: connect(1.5, check=check))
        left = threads_left("kfuse-connect")
        others_stay()
        return error, seconds, left


@pytest.mark.full
@pytest.mark.parametrize("gives_up", [True, False], ids=["another view", "timeout"])
def test_a_communicator_that_never_comes_up_leaves_no_thread_and_is_aborted(tmp_path: Path, gives_up: bool) -> None:
    results = run_workers(2, never_there, tmp_path, gives_up)
    for error, seconds, left in results:
        assert seconds < 10 * BRIEF_S and left == []
        assert ("another view" in error) if gives_up else ("connect" in error)
    assert len(records(tmp_path, "abort")) == 2


# -- a planned change of the view -------------------------------------------------------------------------------------


def change_the_view(log: Path) -> str:
    """Rank 1 is slower: as rank 0 has its data, and goes on, rank 1 still waits for what rank 0 sends."""
    with installed(log, Faults(slow_s={1: 0.4})):
        group = connect(check=lambda: None)

        group.all_reduce(torch.ones(5), "the last bucket").wait()
        told, _ = failure_of(group.finish)
        others_stay()
        return told


def test_a_planned_change_ends_a_healthy_group_by_shutdown(tmp_path: Path) -> None:
    assert run_workers(2, change_the_view, tmp_path) == ["nothing"] * 2
    assert not records(tmp_path, "bytes lost") and not records(tmp_path, "abort")
    assert len(records(tmp_path, "ended")) == 2
