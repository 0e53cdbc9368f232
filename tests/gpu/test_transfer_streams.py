"""Snapshots and transfers of state between steps, looked at by the recorder: every use of memory has its order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from gpu.steps import Job, job

from kfuse.checkpoint import Snapshots, snapshot
from kfuse.comm import chunks
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
    chunks.share(it.group, 0, state(it).capture, None)


def receives(it: Job) -> None:
    """From rank 1. The double of the process group sends no bytes: the structure is this rank's own."""
    own = state(it)
    with as_sent(own):
        received = chunks.share(it.group, 1, own.capture, own.room_for)
    own.restore(received)


def stands_by(it: Job) -> None:
    with as_sent(state(it)):
        assert chunks.share(it.group, 1, dict, None) is None


@contextlib.contextmanager
def as_sent(own: TrainingState) -> Iterator[None]:
    structure, descriptions, tensors = chunks._take_apart(own.capture())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_share_bytes", lambda *_: (b"", [each.nbytes for each in descriptions]))
        patch.setattr(chunks, "decode", lambda *_: (structure, descriptions, [False] * len(tensors)))
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
