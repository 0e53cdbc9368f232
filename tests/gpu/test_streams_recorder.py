"""The recorder finds bugs that are put back on purpose, and sees where the host waits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.order import RecordedDevice, RecordedEvent, RecordedStream
from gpu.recorder import Recorder
from gpu.steps import Job, job
from gpu.test_streams_steps import UPDATE, WIDE, fail_in_a_step

from kfuse.comm import devices
from kfuse.comm.communicator import NcclPending
from kfuse.kernels import sum_partials

DEVICE = torch.device("cpu")


def test_what_makes_the_host_wait() -> None:
    with Recorder() as recorder:
        recorder.device.make_current()
        x, mask = torch.zeros(4, device=DEVICE), torch.zeros(4, dtype=torch.bool, device=DEVICE)
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        waits: list[Callable[[], Any]] = [
            lambda: x[0].item(),
            lambda: bool(x.isfinite().all()),
            lambda: x.tolist(),
            lambda: x.cpu(),
            lambda: x.nonzero(),
            lambda: x[mask],
            lambda: torch.tensor([1.0], device=DEVICE),
            lambda: torch.zeros(4).to(DEVICE),
            recorder.device.synchronize,
        ]
        does_not: list[Callable[[], Any]] = [
            lambda: torch.full((4,), 3.0, device=DEVICE),
            lambda: x.__setitem__(0, 3.0),
            lambda: torch.tensor([1.0, 2.0]).tolist(),
            lambda: x * torch.tensor(2.0),
            lambda: sum_partials(x, total),
        ]
        assert [len(recorder.waits_of(act)) for act in waits] == [1] * len(waits)
        assert [recorder.waits_of(act) for act in does_not] == [[]] * len(does_not)
    assert recorder.errors == []


def steps(it: Job) -> None:
    it.bare_step()
    it.bare_step()


def on_two_streams(it: Job) -> None:
    it.forwards_on_two_streams()
    it.step()


def abort(it: Job) -> None:
    it.step()
    fail_in_a_step(it, UPDATE)
    it.step()


EVENTS = [(RecordedEvent, "query", True), (RecordedEvent, "synchronize", None)]
STREAMS = [(NcclPending, "wait_on_stream", None), (RecordedStream, "wait_stream", None)]
SHARDED = {"schedule": "all_to_all", "state": "sharded", "width": WIDE}
BUGS: dict[str, tuple[list[Any], Callable[[Job], None], dict[str, Any], str]] = {
    "sums are used before they have arrived": (STREAMS, steps, {}, "a collective"),
    "a missing record_stream": ([(RecordedDevice, "keep", None)], abort, SHARDED, "all_to_all.py"),
    "a missing set_device": ([], steps, {"size": 1, "current": False}, "launched on cuda:0"),
    "hooks on a second stream": (
        [(devices.StreamOrder, "go_on_here", None)],
        on_two_streams,
        {"all_used": True},
        "no order between",
    ),
    "a record that is read too early": (EVENTS, steps, {}, "step_stats.py"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_back_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the text of an error. A bug: methods that do nothing but return a value, what is run, and its settings."""
    patches, act, settings, text = BUGS[bug]
    for owner, name, result in patches:
        monkeypatch.setattr(owner, name, lambda *_, result=result, **__: result)
    with job(**settings) as it:
        act(it)
        it.group.abort()
        gc.collect()
        it.recorder.end_step()
        errors = it.recorder.take_errors()
    assert any(text in error for error in errors), errors
