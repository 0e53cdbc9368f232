"""The rules that policies decide by, against figures computed by hand and what their papers publish."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import run_workers
from policy_signals import BOUNDS, knowing, run, signals
from problems import Seen, network, problem

import kfuse as kf
from kfuse.policies import (
    AutoscalePolicy,
    ComposePolicy,
    CriticalBatchPolicy,
    GNSPolicy,
    NormTestPolicy,
    SeesawPolicy,
    SyncSwitchPolicy,
)
from kfuse.policies.signals import Decision, Signals

Rows = Iterator[tuple[kf.BasePolicy, Signals, Decision | None]]


# -- rules that keep no state ----------------------------------------------------------------------------------------


def by_noise_scale() -> Rows:
    """gns: the batch doubles above sqrt(2) times it; 64 sqrt(2) is 90.51, 64 / sqrt(2) is 45.25.

    A micro-batch is 8, and a worker has four of them.
    """
    plain, shrinks = GNSPolicy, partial(GNSPolicy, allow_shrink=True)
    two, doubled = signals(64, workers=2), Decision(batch_size=128, workers=4)
    for noise, expected in [((90.4, 300), None), ((90.6, 120), doubled), ((90.6,), doubled)]:
        yield knowing(plain(), *noise), two, expected
    yield knowing(plain(factor=0.1), 906, 1100), two, doubled
    yield knowing(plain(factor=0.1), 904, 1100), two, None
    yield knowing(plain(), 10, 30), two, None
    yield knowing(shrinks(), 10, 45.3), two, None
    yield knowing(shrinks(), 10, 45.2), two, Decision(batch_size=32, workers=1)
    yield knowing(shrinks(), 10), two, None
    yield knowing(shrinks(factor=0.5), 20, 90.4), two, Decision(batch_size=32, workers=1)
    yield knowing(plain()), signals(64, workers=1), None  # nothing is known
    yield knowing(plain(), 60, 70), signals(64, workers=1), Decision(workers=2)  # those that are missing
    # Whole micro-batches, and the bounds.
    yield knowing(plain(), 900), signals(60, workers=4), Decision(batch_size=120)
    yield knowing(plain(), 900), signals(64, workers=4, bounds=replace(BOUNDS, batch_max=100)), Decision(batch_size=96)
    yield knowing(plain(), 9000), signals(1024, workers=8), None
    yield knowing(shrinks(), 1, 3), signals(60, workers=2, bounds=replace(BOUNDS, batch_min=58)), None


def by_critical_batch() -> Rows:
    for factor, batch_size, low, expected in (
        # B* = 1 * low = 128 does not exceed 2 * 64; 129 does, and 300 doubles once at a time.
        (1.0, 64, 128.0, None),
        (1.0, 64, 129.0, 128),
        (1.0, 64, 300.0, 128),
        # Half of B* is the noise scale: 0.5 * 250 = 125 is not enough, 0.5 * 260 = 130 is.
        (0.5, 64, 250.0, None),
        (0.5, 64, 260.0, 128),
        # 512 doubles to batch.max = 1024; 520 would double beyond it, and stays. It never shrinks.
        (1.0, 512, 5000.0, 1024),
        (1.0, 520, 5000.0, None),
        (1.0, 512, 1.0, None),
        (1.0, 64, math.nan, None),
    ):
        decision = None if expected is None else Decision(batch_size=expected)
        yield knowing(CriticalBatchPolicy(factor), low), signals(batch_size), decision


def by_norm_test() -> Rows:
    for theta, batch_size, variance, grad_sq, expected in (
        # theta 0.5: S / (0.25 G2) = 100 / (0.25 * 4) = 100 samples, 12.5 micro-batches of 8, so 13.
        (0.5, 64, 100.0, 4.0, 104),
        (0.5, 100, 100.0, 4.0, None),  # it holds exactly
        # theta 1: 100 / 4 = 25 samples; theta 0.1: 100 / (0.01 * 4) = 2500, of which 64 may double only.
        (1.0, 16, 100.0, 4.0, 32),
        (0.1, 64, 100.0, 4.0, 128),
        (0.1, 1000, 1e6, 1.0, 1024),  # batch.max
        (0.5, 60, 15.5, 1.0, 64),  # 62 samples, in whole micro-batches
        (0.5, 64, 100.0, 0.0, None),  # a mean that is not above zero tells nothing
        # AdAdaGrad's norm_test (tests.py) is ceil(S / (eta^2 |gbar|^2)): 12 / (0.25 * 0.5) = 96, 12 / 0.5 = 24.
        (0.5, 64, 12.0, 0.5, 96),
        (1.0, 64, 12.0, 0.5, None),
    ):
        decision = None if expected is None else Decision(batch_size=expected)
        seen = signals(batch_size, mean_grad_variance=variance, mean_grad_sq=grad_sq)
        yield NormTestPolicy(theta), seen, decision


def by_seesaw() -> Rows:
    def at(done: float | None, batch_size: int = 32, **changes: Any) -> Signals:
        """A step of a run that began with 32 samples a step, when `done` of it is over."""
        return signals(batch_size, done=done, base_batch_size=changes.pop("base_batch_size", 32), **changes)

    halves, tenths, quarter = SeesawPolicy(cut=2), SeesawPolicy(), SeesawPolicy(2, "quarter_cosine")
    # (1 + cos(pi d)) / 2: 0.516 at 0.49, 0.5 at 0.5, 0.25 at 2/3.
    yield halves, at(0.49), None
    yield halves, at(0.5), Decision(batch_size=64, lr_scale=0.5)
    yield halves, at(2 / 3), Decision(batch_size=128, lr_scale=0.25)
    # cos(pi d / 2): 0.707 at 0.5, 0.5 at 2/3.
    yield quarter, at(0.5), None
    yield quarter, at(2 / 3), Decision(batch_size=64, lr_scale=0.5)
    # 0.9045 at 0.2 is below 1 / 1.1 and above 1 / 1.21; 32 * 1.1 = 35.2 is still four micro-batches of 8.
    yield tenths, at(0.2), Decision(lr_scale=1.1**-1)
    # 0.6545 at 0.4: 4.45, four cuts; 32 * 1.4641 = 46.85, five micro-batches.
    yield tenths, at(0.4), Decision(batch_size=40, lr_scale=1.1**-4)
    # A first batch that is not of whole micro-batches stays until the first cut.
    yield halves, at(0.1, 20, base_batch_size=20), None
    yield halves, at(0.5, 20, base_batch_size=20), Decision(batch_size=40, lr_scale=0.5)
    yield SeesawPolicy(cut=3), at(0.7, 96, lr_scale=float(np.float32(1 / 3))), None  # 1/3 is rounded
    # batch.max = 100 is 96 in micro-batches of 8, three times 32: c = 1/8, so that the rate is sqrt(3) / 8.
    yield halves, at(0.77, bounds=replace(BOUNDS, batch_max=100)), Decision(batch_size=96, lr_scale=0.125)


@pytest.mark.parametrize("rows", [by_noise_scale, by_critical_batch, by_norm_test, by_seesaw])
def test_decisions_by_hand(rows: Any) -> None:
    for number, (policy, seen, expected) in enumerate(rows()):
        assert policy.decide(seen) == expected, f"row {number}: {seen}"


# -- the noise scale that decisions rest on --------------------------------------------------------------------------


def after(pairs: Any) -> CriticalBatchPolicy:
    """A policy that has seen steps with these pairs of S and G2, each twice, as after a failure."""
    policy = CriticalBatchPolicy()
    for step, (variance, grad_sq) in enumerate(pairs):
        for _ in range(2):
            policy.decide(signals(step=step, grad_variance=variance, grad_sq=grad_sq))
    return policy


def test_the_ends_are_two_standard_errors_from_the_newest_steps() -> None:
    """At an end r the mean of S - r G2 is two of its own standard errors from zero."""
    rng = np.random.default_rng(0)
    pairs = np.column_stack([rng.gamma(4, 25, 300), rng.normal(1, 2, 300)])
    low, high = after(pairs).noise_interval()
    newest = pairs[-60:]
    for end, sign in ((low, 1), (high, -1)):
        differences = newest @ [1, -end]
        assert differences.mean() == pytest.approx(sign * 2 * differences.std(ddof=1) / math.sqrt(60), rel=1e-6)
    unclear = pairs * [1, 0.2]  # G2 may be zero: the noise scale has no upper end
    unclear[:, 1] -= unclear[-60:, 1].mean()
    low, high = after(unclear).noise_interval()
    assert low > 0 and math.isnan(high)


def test_the_interval_is_unknown_before_twenty_known_steps() -> None:
    known, unknown = [(100.0, 1.0), (90.0, 2.0)] * 10, [(None, None), (math.nan, 1.0), (1.0, math.inf)]
    assert math.isnan(after(known[:19] + unknown).noise_interval().low)
    assert after(unknown + known).noise_interval() == after(known).noise_interval()
    assert after(known).noise_interval().low > 0
    assert after(known * 3 + unknown * 13).noise_interval().low > 0  # 39 steps: 21 of 60 are left
    assert math.isnan(after(known * 3 + unknown * 14).noise_interval().low)
    assert math.isnan(after([(-a, b) for a, b in known]).noise_interval().low)


# -- seesaw ----------------------------------------------------------------------------------------------------------


def test_seesaw_cuts_where_the_authors_do() -> None:
    """Their StepCosineHalfWithWarmup.get_decay_tokens (olmo/optim.py), with alpha_f=0, no warm-up and 10,000 tokens.

    Its k-th milestone is round(10,000 acos(2 f^k - 1) / pi) with f = lr_decay_factor.
    """
    for cut, milestones in {2.0: [5000, 6667, 7699, 8391], 1.1: [1950, 2736, 3324, 3807]}.items():
        left = [SeesawPolicy(cut).left(token / 10_000) for token in range(10_000)]
        ours = [next(t for t, c in enumerate(left) if c < cut ** (0.5 - k)) for k in range(1, 5)]
        assert all(abs(a - b) <= 1 for a, b in zip(ours, milestones, strict=True)), (cut, ours)


# -- sync_switch -----------------------------------------------------------------------------------------------------


def test_sync_switch_asks_once_so_that_the_step_is_the_first() -> None:
    """A decision on step s applies from step s + 4 on. The last: it was resumed with another policy before."""
    for step, first, asked_at in [(1, 0, 0), (4, 0, 0), (5, 0, 1), (20, 0, 16), (20, 100, 100)]:
        policy = SyncSwitchPolicy(step)
        assert policy.initial() == Decision(sync="sma")
        asked = {now: policy.decide(signals(step=now)) for now in range(first, first + 40)}
        assert {now: each for now, each in asked.items() if each} == {asked_at: Decision(sync="ssgd")}


def switched(step: int) -> tuple[list[bool], bytes]:
    """In which steps the mean gradient's norm is known, which it is with ssgd; the model."""
    kf.init()
    net, seen = network(), Seen()
    both = ComposePolicy(SyncSwitchPolicy(step), seen)
    kf.fit(net, problem(), kf.FusedAdamW(net.parameters()), both, batch_size=16, steps=24)
    known = [each.grad_norm is not None for each in seen.signals]
    return known, b"".join(param.detach().numpy().tobytes() for param in net.parameters())


def test_workers_average_models_up_to_the_step_and_gradients_from_it_on() -> None:
    results = run_workers(2, switched, 14)
    assert results[0] == results[1]
    assert results[0][0] == [False] * 14 + [True] * 10


# -- autoscale -------------------------------------------------------------------------------------------------------


def scaled(policy: AutoscalePolicy, rates: dict[int, float], start: int, steps: int = 120, **changes: Any) -> list[int]:
    """The worker counts of a run in which n workers make rates[n] steps a second, and one that is asked for comes."""

    def seen(step: int, now: Any, before: Any) -> Signals:
        took = 1 / rates[now.workers] if now == before else None
        return signals(step=step, workers=now.workers, previous_step_time_s=took, **changes)

    first = policy.last_step + 1
    *made, then = run(policy, seen, Decision(workers=start), range(first, first + steps))
    assert all(each == Decision(workers=each.workers) for each in made), "it asks for workers only"
    assert policy.decide(signals(step=first + steps, workers=then.workers, **changes)) is None
    return [each.workers for each in made]


def path(counts: list[int]) -> list[int]:
    """The counts without repetitions."""
    return [n for i, n in enumerate(counts) if i == 0 or n != counts[i - 1]]


def windowed(**arguments: Any) -> AutoscalePolicy:
    return AutoscalePolicy(window=4, settle=2, **arguments)


def test_autoscale_by_hand() -> None:
    for rates, start, expected in [
        # The scaling efficiency of the 2nd, 3rd and 4th: 0.8; (2.1 / 1.8 - 1) 2 = 0.33; (2.16 / 2.1 - 1) 3 = 0.086.
        ({1: 1.0, 2: 1.8, 3: 2.1, 4: 2.16}, 1, [1, 2, 3, 4, 3]),
        ({1: 1.0, 2: 1.8, 3: 2.1, 4: 2.18}, 1, [1, 2, 3, 4, 5, 4]),  # 0.114; a fifth adds nothing
        ({2: 1.8, 3: 2.1, 4: 2.0}, 3, [3, 4, 2, 3]),  # neither pays; 0.33 would be lost
        ({1: 1.0, 2: 1.04, 3: 1.05, 4: 1.0}, 3, [3, 4, 2, 1]),  # 0.019 and 0.04: given up
        ({1: 1.0, 2: 1.2, 3: 1.21, 4: 1.0}, 3, [3, 4, 2, 1, 2]),  # 0.017 given up, 0.2 is not
    ]:
        assert path(scaled(windowed(), {5: rates[4]} | rates, start)) == expected


def test_the_median_of_a_window_of_known_times_counts() -> None:
    """Of 2 + 4 steps; the first one with other workers has no time."""
    assert scaled(windowed(), {1: 1.0, 2: 0.9}, 1)[:15] == [1] * 7 + [2] * 7 + [1]
    policy = AutoscalePolicy(window=5, settle=2)
    for step, seconds in enumerate([9.0, 9.0, 0.5, 0.5, 9.0, 0.5, 9.0]):
        policy.decide(signals(step=step, workers=2, previous_step_time_s=seconds))
    assert policy.rates == {"2": 128.0}


def test_it_stops_asking_when_settled_and_measures_anew_after_a_change_or_a_loss() -> None:
    policy = windowed()
    rates, more = {1: 1.0, 2: 1.5, 3: 1.55}, {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0}
    assert path(scaled(policy, rates, 1)) == [1, 2, 3, 2]
    assert path(scaled(policy, rates, 2, steps=500)) == [2]
    assert path(scaled(policy, more, 2, batch_size=128)) == [2, 3, 4, 3]
    assert path(scaled(policy, more, 2, batch_size=128)) == [2, 3, 4, 3], "one is lost"


def test_workers_that_do_not_come_are_given_up() -> None:
    """Steps take 0.5 s: it asks for 10 s of them."""
    policy = windowed(patience_s=10)
    seen = [signals(step=step, workers=2, previous_step_time_s=0.5) for step in range(60)]
    assert [policy.decide(each) is not None for each in seen] == [False] * 5 + [True] * 20 + [False] * 35
