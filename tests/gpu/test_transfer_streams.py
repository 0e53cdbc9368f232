"""Snapshots and transfers of state between steps, looked at by the recorder: every use of memory has its order."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu.recorder import RecordedEvent, RecordedStream
from gpu.steps import Job, job

from kfuse.checkpoint.snapshot import Snapshots, snapshot
from kfuse.comm import chunks
from kfuse.comm.nccl import NcclPending
from kfuse.train import state as training_state
from kfuse.train.state import TrainingState


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this small model has large tensors, and several chunks of small ones."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)


def state(it: Job) -> TrainingState:
    return TrainingState({"model": it.model, "optimizer": it.opt})


def snapshots(it: Job) -> None:
    """Two, each between two steps; the second takes the first one's memory, once that has been read."""
    taker = Snapshots()
    for _ in range(2):
        taken = taker.take(state(it).capture(), "state")
        it.step()
        for _, arrived in taken.on_the_way:
            arrived.synchronize()
        assert taken.value["optimizer"]["state"]


def sends(it: Job) -> None:
    training_state.share(it.group, 0, state(it).capture, None)


def receives(it: Job) -> None:
    """From rank 1. The double of the process group sends no bytes: the structure is this rank's own."""
    own = state(it)
    with as_sent(own):
        received = training_state.share(it.group, 1, own.capture, own.room_for)
    own.restore(received)


def stands_by(it: Job) -> None:
    with as_sent(state(it)):
        assert training_state.share(it.group, 1, dict, None) is None


@contextlib.contextmanager
def as_sent(own: TrainingState) -> Iterator[None]:
    structure, descriptions, tensors = training_state._take_apart(own.capture())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_state, "_share_bytes", lambda *_: b"")
        patch.setattr(training_state, "decode", lambda *_: (structure, descriptions, [False] * len(tensors)))
        yield


@pytest.mark.parametrize("elastic", [False, True])
def test_steps_before_and_after_are_ordered(elastic: bool) -> None:
    with job(size=3, elastic=elastic, batch_norm=True) as it:
        it.step()
        for act in (snapshots, sends, receives, stands_by):
            act(it)
            it.step()


def test_a_checkpoint_makes_the_host_wait_for_nothing() -> None:
    with job(batch_norm=True) as it:
        it.step()
        taker, own = Snapshots(), state(it).capture()
        assert it.recorder.waits_of(lambda: taker.take(own, "state")) == []
        assert it.recorder.waits_of(lambda: snapshot(own, "state")) != [], "kf.state_dict is complete"


def found(act: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch, kind: Any, name: str) -> list[str]:
    """The errors where this method does nothing."""
    with job(size=3, batch_norm=True) as it:
        it.step()
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, lambda *_: None)
            act(it)
        it.step()
        it.group.abort()
        gc.collect()
        errors = it.recorder.take_errors()
    return errors


def take_one(it: Job) -> None:
    captured = state(it).capture()  # waits for the step's statistics
    it.model.norm.running_mean.add_(1.0)
    taken = Snapshots().take(captured, "state")
    it.model.norm.running_mean.add_(1.0)
    assert taken.on_the_way


def test_a_transfer_or_snapshot_without_an_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = found(receives, monkeypatch, NcclPending, "wait")
    assert any("no order between a collective" in error for error in errors), errors
    for kind, name in ((RecordedEvent, "wait"), (RecordedStream, "wait_stream")):
        errors = found(take_one, monkeypatch, kind, name)
        assert any("no order between" in error for error in errors), errors
