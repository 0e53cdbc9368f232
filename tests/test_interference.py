"""Interference is found by vote: told once, refreshed, and not mistaken for a worker that computes slowly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from distributed import run_workers
from problems import Seen, network, problem, recorded_events
from torch import Tensor

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.comm.measurement import AS_BEFORE, REFERENCE, SLOW, SLOWER, UNKNOWN, WINDOW, Voter, verdict
from kfuse.comm.transports import AllReduce


def votes(seconds: Sequence[float]) -> list[float]:
    """After each step."""
    voter, out = Voter(), []
    for each in seconds:
        voter.take(each)
        out.append(voter.vote)
    return out


def test_a_slow_down_is_voted_for_until_it_is_the_reference() -> None:
    found = votes([0.010] * 100 + [0.020] * 200)
    assert set(found[:31]) == {UNKNOWN} and set(found[31:107]) == {AS_BEFORE}
    slower = [step for step, vote in enumerate(found) if vote == SLOWER]
    assert slower == list(range(slower[0], slower[-1] + 1)), "in one piece"
    assert 100 <= slower[0] <= 100 + WINDOW and slower[-1] <= 100 + WINDOW + REFERENCE
    assert found[-1] == AS_BEFORE


def test_what_changes_a_vote() -> None:
    """A recovery raises the reference. A throughput about the threshold, a share of it, changes no vote back and
    forth, nor do single steps and unknown ones.
    """
    found = votes([0.020] * 100 + [0.010] * 100 + [0.020] * 20)
    assert SLOWER not in found[:200] and found[-1] == SLOWER
    for factor, vote in ((0.99 / SLOW, AS_BEFORE), (1.01 / SLOW, SLOWER)):
        assert votes([0.010] * 80 + [0.010 * factor] * WINDOW)[-1] == vote
    about = [0.0122, 0.0128] * 40
    assert votes([0.010] * 80 + [0.020] * 16 + about)[80 + 16 + 8] == SLOWER  # 0.8 of the reference is not recovered
    assert votes([0.010] * 80 + about)[80 + 16] == AS_BEFORE
    steps = [0.010] * 200
    steps[50::10] = [1.0] * 15
    steps[55::10] = [0.0] * 15
    assert set(votes(steps)[40:]) == {AS_BEFORE}


def test_the_verdict() -> None:
    for given, throughput, found in [
        ([UNKNOWN, SLOWER], [1.0, 1.0], None),
        ([AS_BEFORE, AS_BEFORE], [1.0, 1.0], False),
        ([SLOWER, SLOWER], [1.0, 0.5], True),
        ([SLOWER, SLOWER], [None, None], None),
        ([SLOWER, AS_BEFORE], [0.5, 1.0], None),  # a half is no majority
        ([SLOWER, SLOWER, AS_BEFORE], [0.5, 1.0, 1.0], True),
        ([SLOWER, SLOWER, AS_BEFORE], [1.0, 1.0, 0.5], None),  # they wait for rank 2, which computes slowly
        ([SLOWER, AS_BEFORE, AS_BEFORE], [0.5, 1.0, 1.0], False),
        ([SLOWER, SLOWER, UNKNOWN], [1.0, 1.0, None], True),  # rank 2 had no micro-batch
    ]:
        assert verdict(given, throughput) is found, (given, throughput)


QUICK_S, SLOW_S = 0.1, 0.3  # noise of a busy machine must be small beside both
CHANGE, STEPS = 38, 60


class SlowLater(AllReduce):
    """All-reduces over a network that becomes slow after some steps."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.steps = 0

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        super().launch(key, slots, what)
        self.steps += 1

    def wait(self, key: int) -> None:
        super().wait(key)
        time.sleep(SLOW_S if self.steps > CHANGE else QUICK_S)


def train() -> tuple[list[bool | None], list[dict[str, Any]]]:
    """What each step's signals said, and the events."""
    kf.init(comm_schedule="test_interference.SlowLater")
    events, net, policy = recorded_events(), network(), Seen()
    opt = kf.FusedSGD(net.parameters(), lr=0.01)
    kf.fit(net, problem(8 * STEPS), opt, kf.Hook(policy), batch_size=8, batch_micro=4)
    told = [event for event in events if event["kind"] == "interference"]
    return [signals.under_interference for signals in policy.signals], told


@pytest.mark.full
def test_a_slow_network_is_told_once() -> None:
    """A worker that computes slowly is none: see test_the_verdict."""
    results = run_workers(2, train)
    assert results[0] == results[1]
    found, [event] = results[0]
    assert len(found) >= STEPS - 2 and set(found[:30]) == {None} and True not in found[:CHANGE]
    assert True in found[CHANGE:] and event["ranks"] == [0, 1] and event["step"] > CHANGE
