"""What may run at once on a GPU: a message beside the rest of backward, shared parameters beside the next update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from gpu.order import Clock, patched
from gpu.recorder import Recorder
from gpu.steps import job
from torch import nn

import kfuse as kf

AHEAD = 2  # steps for which the device is behind the host


class Action(NamedTuple):
    """An operation, or a message, the `number`-th of its stream, and what has happened before it."""

    stream: int
    number: int
    clock: Clock
    what: str

    @property
    def is_message(self) -> bool:
        return self.what.startswith("a collective")

    def is_before(self, other: Action) -> bool:
        return other.clock.get(self.stream, 0) >= self.number


@contextmanager
def actions(recorder: Recorder) -> Iterator[list[Action]]:
    """Context: collects what is enqueued meanwhile, in the host's order."""
    found: list[Action] = []
    plain = recorder.enqueue

    def enqueue(stream: Any, reads: Any, writes: Any, what: str) -> None:
        plain(stream, reads, writes, what)
        found.append(Action(stream.number, stream.clock[stream.number], dict(stream.clock), what))

    with patched(recorder, "enqueue", enqueue):
        yield found


@contextmanager
def a_step(width: int, **options: Any) -> Iterator[tuple[Recorder, Callable[[], None], Any]]:
    """Context: a chain of layers and its optimizer, with a bucket for each parameter, after a step."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    with job(lambda params: None, size=3, lag=AHEAD, **options) as it:
        opt = kf.FusedAdamW(net.parameters())
        x = torch.ones(8, width, device=torch.device("cpu"))
        net(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        it.recorder.end_step()
        yield it.recorder, lambda: net(x).square().mean().backward(), opt
        it.recorder.end_step()


def between(found: list[Action], messages: list[Action]) -> Iterator[tuple[Action, list[Action]]]:
    """Each message but the last, and the operations until the next one starts."""
    for message, after in pairwise(messages):
        place = found.index(message)
        yield message, [each for each in found[place : found.index(after)] if not each.is_message]


@pytest.mark.parametrize("schedule", ["allreduce", "all_to_all", "reduce_scatter"])
def test_backward_goes_on_beside_each_message(schedule: str) -> None:
    with a_step(6, schedule=schedule) as (recorder, backward, opt):
        with actions(recorder) as found:
            backward()
        opt.step()
    messages = [action for action in found if action.is_message]
    beside = [operation for message, operations in between(found, messages) for operation in operations]
    assert len(messages) >= 8 and sum("mm" in each.what for each in beside) >= 6, "of the 7 matrix products"
    for message, operations in between(found, messages):
        assert not any(message.is_before(operation) for operation in operations), "backward waits"


def test_a_buckets_parameters_are_shared_beside_the_next_ones_update() -> None:
    with a_step(130, schedule="reduce_scatter", state="sharded") as (recorder, backward, opt):
        backward()
        with actions(recorder) as found:
            opt.step()
    first = next(place for place, action in enumerate(found) if "optim/rules" in action.what)
    shares = [action for action in found[first:] if action.is_message]  # one or two for each bucket
    beside = list(between(found, shares))
    assert sum(bool(operations) for _, operations in beside) >= len(opt.engine.gradient_buckets) - 1
    for share, operations in beside:
        assert not any(share.is_before(operation) for operation in operations), "the next bucket's update waits"
