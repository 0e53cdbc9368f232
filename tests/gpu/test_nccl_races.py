"""A group over NCCL in one process: its thread ends it at the worst moment, or NCCL does; and what counts as late."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gpu.recorder import Recorder
from gpu.stand_in import StandInProcessGroup, StandInWork, nccl_stood_in

from kfuse.comm import group as groups
from kfuse.comm.group import CommError
from kfuse.comm.nccl import NcclGroup

DEVICE = torch.device("cpu")
LOST = "a worker was lost"


@pytest.fixture
def group() -> Iterator[NcclGroup]:
    with Recorder() as recorder, nccl_stood_in(recorder):
        made = NcclGroup(0, 2, dist.HashStore(), DEVICE, check=lambda: None)
        yield made
        made.abort()


def test_it_is_ended_as_a_message_is_started(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the failure and the enqueueing."""
    event = SimpleNamespace(record=lambda stream=None: group._fail(LOST), query=lambda: True)
    monkeypatch.setattr(group._device, "event", lambda timing=False: event)
    with pytest.raises(CommError, match=LOST):
        group.all_reduce(torch.zeros(3, device=DEVICE), "bucket 1").wait()
    assert not group.under_way


@pytest.mark.parametrize("waits", ["a message", "the step"])
def test_it_is_ended_as_a_message_seems_to_have_come_through(
    waits: str, group: NcclGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the failure and the look at the message, which is gone with the group."""
    message = group.all_reduce(torch.zeros(3, device=DEVICE), "bucket 1")
    plain = group.raise_failure

    def raise_failure() -> None:
        plain()
        monkeypatch.setattr(group, "raise_failure", plain)
        group._fail(LOST)

    monkeypatch.setattr(group, "_look", lambda: None)
    monkeypatch.setattr(group, "raise_failure", raise_failure)
    with pytest.raises(CommError, match=LOST):
        group.wait_until(lambda: message not in group.under_way) if waits == "a message" else group.settle()


def test_it_is_ended_at_the_end_of_its_view(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the barrier: the next view's group finds out what has happened."""
    monkeypatch.setattr(group, "barrier", lambda what: group._fail(LOST))
    group.finish()
    with pytest.raises(CommError, match=LOST):
        group.settle()


def test_an_error_as_a_message_is_started_names_the_message(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def aborted(*_: object) -> None:
        raise RuntimeError("NCCL communicator was aborted on rank 0.")

    monkeypatch.setattr(StandInProcessGroup, "allreduce", aborted)
    said = r"^bucket 7: connecting to rank 1: .* was aborted"
    with pytest.raises(CommError, match=said):
        group.all_reduce(torch.zeros(3, device=DEVICE), "bucket 7")
    with pytest.raises(CommError, match=said):
        group.settle()


def test_time_that_the_device_computes_does_not_count_as_waiting(
    group: NcclGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[bool] = []
    ready = SimpleNamespace(record=lambda stream=None: None, query=lambda: bool(computed))
    over = SimpleNamespace(record=lambda stream=None: None, query=lambda: False)
    events = iter([ready, over])
    monkeypatch.setattr(group._device, "event", lambda timing=False: next(events))
    monkeypatch.setattr(StandInWork, "is_completed", lambda work: False)
    monkeypatch.setattr(groups, "GRACE_S", 0.0)
    group.timeout_s = 0.0
    message = group.all_reduce(torch.zeros(3, device=DEVICE), "bucket 1")
    for _ in range(3):
        group._look()
        group.raise_failure()
    computed.append(True)
    with pytest.raises(CommError, match=r"bucket 1: waited 0\.. s for rank 1"):
        group.wait_until(lambda: message not in group.under_way)


def test_a_message_that_is_over_is_dropped_as_the_next_one_starts(
    group: NcclGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the memory that it holds: the thread looks ten times a second only."""
    event = SimpleNamespace(record=int, query=lambda: True, wait=int)
    monkeypatch.setattr(group._device, "event", lambda timing=False: event)
    tensor = torch.zeros(3, device=DEVICE)
    kept = weakref.ref(tensor)
    group.all_reduce(tensor, "bucket 1")
    del tensor
    assert kept() is not None, "torch lets go of it: the stream that records the event has waited"
    later = torch.zeros(3, device=DEVICE)
    kept_later = weakref.ref(later)
    message = group.all_reduce(later, "bucket 2")
    del later
    assert kept() is None and kept_later() is not None
    message.wait_on_stream()
    assert kept_later() is None, "its memory can be used again behind what has waited"
