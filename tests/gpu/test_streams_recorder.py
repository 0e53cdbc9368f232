"""The recorder's own rules: what is in order passes, what is not is found, in operations and in whole steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.order import RecordedDevice, RecordedEvent, RecordedStream
from gpu.recorder import Recorder
from gpu.stand_in import StandInWork
from gpu.steps import Job, job
from gpu.test_streams_steps import WIDE, fail_in_a_step
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.nccl import NcclPending
from kfuse.kernels import sum_partials

DEVICE = torch.device("cpu")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as made:
        made.device.make_current()
        yield made


def zeros(numel: int = 4) -> Tensor:
    return torch.zeros(numel, device=DEVICE)


def test_uses_on_two_streams_need_an_order(recorder: Recorder) -> None:
    x, y, side = zeros(), zeros(), recorder.device.new_stream()
    event = recorder.device.event()
    event.record()
    y.add_(1)
    event.wait(side)
    with recorder.device.on(side):
        x[:2].add_(1)
    x[2:].add_(1)  # another part is other memory
    z = zeros()
    side.wait_stream(recorder.main)
    with recorder.device.on(side):
        z.mul(2)
    z.mul(2)  # reads need no order
    assert recorder.errors == []
    x.add_(1)
    assert len(recorder.errors) == 1
    with recorder.device.on(side):
        torch.utils.dlpack.from_dlpack(x[:2]).add_(1)  # as the fused optimizers' parameters: a storage of its own
    assert len(recorder.errors) == 3 and all("no order" in error for error in recorder.errors)


@pytest.mark.parametrize("remedy", ["none", "record_stream", "wait_stream"])
def test_memory_of_another_stream_that_is_dropped(recorder: Recorder, remedy: str) -> None:
    x, side = zeros(), recorder.device.new_stream()
    side.wait_stream(recorder.main)
    with recorder.device.on(side):
        x.add_(1)
    if remedy == "record_stream":
        recorder.device.keep([x], side)
    if remedy == "wait_stream":
        recorder.main.wait_stream(side)
    del x
    recorder.end_step()
    assert (recorder.errors != []) == (remedy == "none")


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_uses_pinned_memory_after_the_copy(recorder: Recorder, waits: bool) -> None:
    host, event = recorder.device.pinned((4,), torch.float32), recorder.device.event()
    host.copy_(zeros(), non_blocking=True)
    event.record()
    assert recorder.host_waits == [] and not event.query()
    if waits:
        event.synchronize()
    host.tolist()
    host.zero_()
    assert (len(recorder.errors), len(recorder.host_waits)) == ((0, 1) if waits else (2, 0))


def test_what_makes_the_host_wait(recorder: Recorder) -> None:
    x, index = zeros(), torch.zeros(4, dtype=torch.bool, device=DEVICE)
    acts = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool(x.isfinite().all()),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[index],
        "tensor": lambda: torch.tensor([1.0], device=DEVICE),
        "upload": lambda: torch.zeros(4).to(DEVICE),
        "synchronize": recorder.device.synchronize,
    }
    assert {name: len(recorder.waits_of(act)) for name, act in acts.items()} == dict.fromkeys(acts, 1)
    free = {
        "fill": lambda: torch.full((4,), 3.0, device=DEVICE),
        "number": lambda: x.__setitem__(0, 3.0),
        "host": lambda: torch.tensor([1.0, 2.0]).tolist(),
        "number on the host": lambda: x * torch.tensor(2.0),
        "kernel": lambda: sum_partials(x, torch.zeros((), dtype=torch.float64, device=DEVICE)),
    }
    assert {name: recorder.waits_of(act) for name, act in free.items()} == {name: [] for name in free}
    assert recorder.errors == []


def test_operands_and_launches_belong_on_the_device() -> None:
    with Recorder() as recorder:
        partials, out = zeros(), torch.zeros((), dtype=torch.float64, device=DEVICE)
        out.add_(1)  # torch's own operations go where their tensors are
        assert recorder.errors == []
        sum_partials(partials, out)
        zeros() + torch.zeros(4)
        zeros().numpy()
        with pytest.raises(RuntimeError, match=r"torch\.cuda\.current_stream"):
            torch.cuda.current_stream()
    for error, text in zip(
        recorder.errors, ("launched on cuda:0", "lies on the host", "numpy()", "not the seam"), strict=True
    ):
        assert text in error


def test_a_collective_runs_on_a_stream_of_its_own_and_keeps_its_memory(recorder: Recorder) -> None:
    x, work = zeros(), StandInWork(recorder, None)
    recorder.enqueued(work, [x], [x])
    work.synchronize()
    x.add_(1)
    work = StandInWork(recorder, None)
    recorder.enqueued(work, [zeros()], [])
    zeros()
    assert recorder.errors == []
    del work
    recorder.enqueued(StandInWork(recorder, None), [x], [x])
    x.add_(1)
    assert [error[:8] for error in recorder.errors] == ["memory i", "no order"]


# -- bugs put back on purpose -----------------------------------------------------------------------------------------


def steps(it: Job) -> None:
    for _ in range(2):
        it.bare_step()


def on_two_streams(it: Job) -> None:
    it.forwards_on_two_streams()
    it.step()


def abort(it: Job) -> None:
    it.step()
    fail_in_a_step(it, "before the update")
    it.step()


Bug = tuple[list[tuple[Any, str, Any]], Callable[[Job], None], str, dict[str, Any]]
BUGS: dict[str, Bug] = {
    "sums are used before they have arrived": (
        [(NcclPending, "wait_on_stream", None), (RecordedStream, "wait_stream", None)],
        steps,
        "a collective",
        {},
    ),
    "a missing record_stream": (
        [(RecordedDevice, "keep", None)],
        abort,
        "all_to_all.py",
        {"schedule": "all_to_all", "state": "sharded", "width": WIDE},
    ),
    "a missing set_device": ([], steps, "launched on cuda:0", {"size": 1, "current": False}),
    "hooks on a second stream": (
        [(devices.StreamOrder, "go_on_here", None)],
        on_two_streams,
        "no order between",
        {"all_used": True},
    ),
    "a record that is read too early": (
        [(RecordedEvent, "query", True), (RecordedEvent, "synchronize", None)],
        steps,
        "step_stats.py",
        {},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_is_put_back_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, act, text, arguments = BUGS[bug]
    for owner, name, result in patches:
        monkeypatch.setattr(owner, name, lambda *_, result=result, **__: result)
    with job(**arguments) as it:
        act(it)
        it.group.abort()
        gc.collect()
        it.recorder.end_step()
        errors = it.recorder.take_errors()
    assert any(text in error for error in errors), errors
