"""What may run at once on a GPU: a message beside the rest of backward, shared parameters beside the next update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from gpu.order import Clock, patched
from gpu.recorder import Recorder
from gpu.steps import job

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


@pytest.mark.parametrize("schedule", ["allreduce", "all_to_all", "reduce_scatter"])
def test_backward_goes_on_beside_each_message(schedule: str) -> None:
    with job(size=3, lag=AHEAD, all_used=True, schedule=schedule) as it:
        it.bare_step()  # its gradients' order is that of the buckets now
        with actions(it.recorder) as found:
            it.loss().backward()
        it.end_step()
    messages = [place for place, action in enumerate(found) if action.is_message]
    assert len(messages) >= 3
    for place, after in zip(messages, messages[1:], strict=False):
        between = [each for each in found[place + 1 : after] if not each.is_message]
        assert between, "the next bucket's gradients are computed after this message has started"
        for operation in between:
            assert not found[place].is_before(operation), f"{operation.what} waits for {found[place].what}"


def test_a_buckets_parameters_are_shared_beside_the_next_ones_update() -> None:
    with job(size=3, lag=AHEAD, all_used=True, width=2100, schedule="reduce_scatter", state="sharded") as it:
        it.bare_step()
        it.loss().backward()
        with actions(it.recorder) as found:
            it.opt.step()
        it.opt.zero_grad()
        it.recorder.end_step()
    messages = [place for place, action in enumerate(found) if action.is_message]
    shares = messages[-len(it.opt.engine.gradient_buckets) :]
    for place, after in zip(shares, shares[1:], strict=False):
        between = [each for each in found[place + 1 : after] if not each.is_message]
        assert between and not any(found[place].is_before(each) for each in between)
