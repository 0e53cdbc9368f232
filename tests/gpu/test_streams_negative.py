"""What the recorder is for: each bug here, put back on purpose, is found in a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu.order import RecordedDevice, RecordedEvent, RecordedStream
from gpu.steps import SMALL_BUCKETS, TINY_BUCKETS, Job, job
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.nccl import NcclPending
from kfuse.comm.reduction import Reduction
from kfuse.comm.transports.all_to_all import AllToAll
from kfuse.comm.transports.tree import Tree

pytestmark = pytest.mark.full


def found(act: Callable[[Job], Any], *texts: str, **arguments: Any) -> None:
    """Some error of the job has all of these texts."""
    with job(**arguments) as it:
        act(it)
        it.group.abort()
        gc.collect()
        it.recorder.end_step()
        errors = it.recorder.take_errors()
    assert any(all(text in error for text in texts) for error in errors), errors


def steps(it: Job) -> None:
    for _ in range(2):
        it.bare_step()


@pytest.mark.parametrize("schedule", ["allreduce", "all_to_all", "tree"])
def test_a_wait_that_returns_before_the_stream_waits(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclPending, "wait_on_stream", lambda pending: None)
    monkeypatch.setattr(RecordedStream, "wait_stream", lambda stream, other: None)
    found(steps, "no order between", "a collective", schedule=schedule)


def test_a_missing_record_stream_in_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream's addition may still run when the buffers are dropped."""

    def abort(it: Job) -> None:
        it.opt.engine.on_last_micro_batch = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            it.step()
        it.opt.engine.abort()
        it.next_group()
        it.opt.engine.on_last_micro_batch = it.opt.synchronize
        it.step()

    monkeypatch.setattr(RecordedDevice, "keep", lambda device, tensors, stream: None)
    found(abort, "memory is dropped", "all_to_all.py", schedule="all_to_all", state="sharded", width=2100)


def test_a_device_that_nobody_made_current() -> None:
    found(steps, "a kernel is launched on cuda:0", size=1, current=False)


def test_a_stream_of_whichever_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedDevice, "event", lambda device, timing=False: torch.cuda.Event(enable_timing=timing))
    with pytest.raises(RuntimeError, match=r"torch\.cuda\.Event"):
        found(steps)


@pytest.mark.parametrize("bucket_mb", [TINY_BUCKETS, 25.0])
def test_hooks_on_a_second_stream_without_an_order(bucket_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_two_streams(it: Job) -> None:
        it.forwards_on_two_streams()
        it.step()

    monkeypatch.setattr(devices.StreamOrder, "go_on_here", lambda order, reads=(): None)
    found(on_two_streams, "no order between", bucket_mb=bucket_mb, all_used=True)


def test_gradients_of_another_stream_that_are_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_two_streams(it: Job) -> None:
        it.forwards_on_two_streams()
        it.step()

    monkeypatch.setattr(RecordedDevice, "keep", lambda device, tensors, stream: None)
    found(on_two_streams, "memory is dropped", "comm/steps.py", bucket_mb=25.0, all_used=True)


def test_a_record_that_is_read_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedEvent, "query", lambda event: True)
    monkeypatch.setattr(RecordedEvent, "synchronize", lambda event: None)
    found(steps, "no order between", "step_stats.py", "on the host")


def test_pinned_memory_that_is_written_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    plain = RecordedDevice.pinned

    def pinned(device: Any, shape: Any, dtype: Any) -> Any:
        return kept.setdefault((tuple(shape), dtype), plain(device, shape, dtype))

    monkeypatch.setattr(RecordedDevice, "pinned", pinned)
    found(steps, "no order between", "tail.py", "writes on the host")


def test_a_side_stream_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding up what has not arrived."""
    plain = NcclPending.wait_on_stream

    def wait_on_stream(pending: Any) -> None:
        if "exchange" not in pending.what:
            plain(pending)

    monkeypatch.setattr(NcclPending, "wait_on_stream", wait_on_stream)
    found(steps, "no order between a collective", "all_to_all.py", schedule="all_to_all")


def test_a_receive_buffer_that_is_used_again_before_it_was_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AllToAll._take

    def take(self: AllToAll, numel: int, dtype: torch.dtype) -> Tensor:
        taken = plain(self, numel, dtype)
        self._free.append(taken)
        return taken

    monkeypatch.setattr(AllToAll, "_take", take)
    wide = {"size": 3, "width": 40, "bucket_mb": SMALL_BUCKETS}
    found(steps, "no order between", "all_to_all.py", "a collective", schedule="all_to_all", **wide)


def test_an_exchange_that_does_not_wait_for_an_earlier_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is received where the side stream still reads: with sharded state no share comes between, which would wait.

    The width: three layers have a shard for both ranks, of 4096 elements at least.
    """

    def exchange(self: Reduction, run: Any, outgoing: list[Tensor]) -> None:
        self._transport_of[run.bucket.index].launch(run.bucket.index, outgoing, self._name(run.bucket))
        run.flat = run.sum = outgoing[0]
        run.at += 1

    monkeypatch.setattr(Reduction, "_exchange", exchange)
    found(
        steps, "no order between", "all_to_all.py", "a collective", schedule="all_to_all", state="sharded", width=2100
    )


def test_only_the_first_of_a_messages_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share has two: the all-gather, and the broadcast of what the last rank has more."""
    monkeypatch.setattr(NcclPending, "wait_on_stream", lambda pending: pending.works[0][0].synchronize())
    found(steps, "no order between a collective", size=3, width=40, bucket_mb=SMALL_BUCKETS, schedule="all_to_all")


def test_a_receive_buffer_of_another_stream_that_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gradient, and so the message, comes on a side stream; the sum is used on the caller's."""

    def on_two_streams(it: Job) -> None:
        it.forwards_on_two_streams("sometimes")
        it.step()

    monkeypatch.setattr(Tree, "_take", _take_without_keeping)
    found(on_two_streams, "memory is dropped", "nccl.py", schedule="tree", size=3, all_used=True)


def _take_without_keeping(self: Tree, received: Tensor, places: Sequence[Tensor], parent: int) -> None:
    for place, brought in zip(places, received.split([place.numel() for place in places]), strict=True):
        place.add_(brought)
