"""The worker count by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policy_signals import signals

from kfuse.policies import AutoscalePolicy
from kfuse.policies.signals import Decision

WINDOW = {"window": 4, "settle": 2}
Rates = Callable[[int], float] | dict[int, float]


def run(policy: AutoscalePolicy, rates: Rates, start: int, steps: int = 120, **changes: Any) -> list[int]:
    """The worker counts of a run in which n workers make rates[n] steps a second, and one that is asked for comes."""
    workers, counts, before = start, [], None
    for step in range(policy.last_step + 1, policy.last_step + 1 + steps):
        rate = rates(workers) if callable(rates) else rates[workers]
        took = 1 / rate if workers == before else None
        seen = signals(step=step, workers=workers, previous_step_time_s=took, **changes)
        counts.append(workers)
        before = workers
        decision = policy.decide(seen)
        assert decision == policy.decide(seen)
        if decision is not None:
            assert decision.clipped(seen.bounds) == (decision, []) and decision == Decision(workers=decision.workers)
            workers = decision.workers or workers
    assert policy.decide(signals(step=step + 1, workers=workers, **changes)) is None
    return counts


def path(counts: list[int]) -> list[int]:
    """The counts without repetitions."""
    return [n for i, n in enumerate(counts) if i == 0 or n != counts[i - 1]]


def test_decisions_by_hand() -> None:
    for rates, start, expected in [
        # The scaling efficiency of the 2nd, 3rd and 4th: 0.8; (2.1 / 1.8 - 1) 2 = 0.33; (2.16 / 2.1 - 1) 3 = 0.086.
        ({1: 1.0, 2: 1.8, 3: 2.1, 4: 2.16}, 1, [1, 2, 3, 4, 3]),
        ({1: 1.0, 2: 1.8, 3: 2.1, 4: 2.18}, 1, [1, 2, 3, 4, 5, 4]),  # 0.114; a fifth adds nothing
        ({2: 1.8, 3: 2.1, 4: 2.0}, 3, [3, 4, 2, 3]),  # neither pays; 0.33 would be lost
        ({1: 1.0, 2: 1.04, 3: 1.05, 4: 1.0}, 3, [3, 4, 2, 1]),  # 0.019 and 0.04: given up
        ({1: 1.0, 2: 1.2, 3: 1.21, 4: 1.0}, 3, [3, 4, 2, 1, 2]),  # 0.017 given up, 0.2 is not
    ]:
        rates.setdefault(5, rates.get(4, 0.0))
        assert path(run(AutoscalePolicy(**WINDOW), rates, start)) == expected


def test_the_median_of_a_window_of_known_times_counts() -> None:
    """Of 2 + 4 steps; the first one with other workers has no time."""
    assert run(AutoscalePolicy(**WINDOW), {1: 1.0, 2: 0.9}, 1)[:15] == [1] * 7 + [2] * 7 + [1]
    policy = AutoscalePolicy(window=5, settle=2)
    for step, seconds in enumerate([9.0, 9.0, 0.5, 0.5, 9.0, 0.5, 9.0]):
        policy.decide(signals(step=step, workers=2, previous_step_time_s=seconds))
    assert policy.rates == {"2": 128.0}


def test_it_stops_asking_when_settled_and_measures_anew_after_a_change_or_a_loss() -> None:
    policy = AutoscalePolicy(**WINDOW)
    rates = {1: 1.0, 2: 1.5, 3: 1.55}
    assert path(run(policy, rates, 1)) == [1, 2, 3, 2]
    assert path(run(policy, rates, 2, steps=500)) == [2]
    assert path(run(policy, {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0}, 2, batch_size=128)) == [2, 3, 4, 3]
    assert path(run(policy, {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0}, 2, batch_size=128)) == [2, 3, 4, 3], "one is lost"


def test_workers_that_do_not_come_are_given_up() -> None:
    """Steps take 0.5 s: it asks for 10 s of them."""
    policy, asked = AutoscalePolicy(**WINDOW, patience_s=10), []
    for step in range(60):
        decision = policy.decide(signals(step=step, workers=2, previous_step_time_s=0.5))
        asked.append(decision is not None)
    assert asked == [False] * 5 + [True] * 20 + [False] * 35
