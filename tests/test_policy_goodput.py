"""Pollux' model of a step's time, and the policy that maximises goodput."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from policy_signals import BOUNDS, knowing, run, signals

from kfuse.policies import GoodputPolicy
from kfuse.policies.goodput import efficiency
from kfuse.policies.signals import Bounds, Decision, Signals
from kfuse.policies.step_time import StepTime, fit

# -- the model, and its fit ------------------------------------------------------------------------------------------


FITTED = StepTime(0.121, 0.00568, 0.0236, 0.00634, 1.14)
OVERLAPPED = StepTime(0.01, 0.002, 0.05, 0.01, 5.0)


def test_the_figures_of_adaptdls_goodput_function() -> None:
    """What petuum/adaptdl's GoodputFunction (adaptdl/goodput.py) gives for these parameters, with one replica a node.

    Its atomic batch is a worker's micro-batches here, its GradParams (sqr, var) the noise scale var / sqr * base.
    """
    for model, workers, samples_each, noise, base, throughput, of_a_sample in [
        (FITTED, 1, 32, 0.000502 / 0.00136 * 128, 128, 105.69427902253693, 2.2114014251781473),
        (FITTED, 2, 128, 0.000502 / 0.00136 * 128, 128, 297.47886299439773, 0.5779019242706394),
        (FITTED, 16, 256, 0.000502 / 0.00136 * 128, 128, 2493.0291469403155, 0.04229703330153105),
        (OVERLAPPED, 8, 64, 2.0 / 0.5 * 16, 16, 3508.799914362508, 0.1388888888888889),
    ]:
        batch_size = workers * samples_each
        assert batch_size / model.seconds(samples_each, workers) == pytest.approx(throughput, rel=1e-6)
        assert efficiency(batch_size, base, noise) == pytest.approx(of_a_sample)


def test_a_fit_predicts_settings_that_it_has_not_seen() -> None:
    """Times with one percent of noise, as in adaptdl's fit_test.py; predictions reach to twice the workers."""
    for gamma in [1.0, 1.2, 3.0]:
        rng = np.random.default_rng(0)
        true = StepTime(0.1, 0.01, 0.2, 0.03, gamma)
        k, n = np.meshgrid([4, 8, 16, 32], [1, 2, 3, 4])
        seconds = true.seconds(k, n) * np.exp(rng.normal(0, 0.01, k.shape))
        points = [(int(a), int(b), float(c)) for a, b, c in zip(k.flat, n.flat, seconds.flat, strict=True)]
        model = fit(points)
        assert model == fit(points)
        k, n = np.meshgrid([4, 16, 64], [1, 2, 6, 8])
        assert np.abs(model.seconds(k, n) / true.seconds(k, n) - 1).max() < 0.06


def test_what_points_do_not_tell_is_assumed_to_scale() -> None:
    one = fit([(8, 1, 0.09)])
    assert (one.constant, one.micro_batch) == pytest.approx((0.045, 0.045 / 8))  # half of the time each
    assert (one.sync, one.more) == (0.0, 0.0)
    two = fit([(8, 1, 0.09), (4, 1, 0.05), (4, 2, 0.06)])
    assert (two.constant, two.micro_batch, two.sync) == pytest.approx((0.01, 0.01, 0.01), rel=1e-3)
    assert two.more == 0.0
    assert fit([(8, 1, 0.05), (4, 1, 0.05), (2, 1, 0.05)]).seconds(1, 1) == pytest.approx(0.05, rel=1e-2)
    with pytest.raises(ValueError, match="there are no points"):
        fit([])


# -- the policy ------------------------------------------------------------------------------------------------------


def seen(policy: GoodputPolicy, k: int, n: int, seconds: float, count: int = 8, **changes: Any) -> Signals:
    """The policy sees so many steps of n workers, with k micro-batches of 8 each; returns the last step's signals."""
    given: dict[str, Any] = {"workers": n, "previous_step_time_s": seconds, **changes}
    for step in range(policy.last_step + 1, policy.last_step + 1 + count):
        at = signals(k * n * 8, step=policy.every * step + 1, **given)
        assert policy.decide(at) is None
    return at


def decided(policy: GoodputPolicy, last: Signals, noise: tuple[float, ...] = (), **changes: Any) -> Decision | None:
    step = (last.step // policy.every + 1) * policy.every
    given: dict[str, Any] = {"step": step, "previous_step_time_s": None, **changes}
    now = signals(last.batch_size, workers=last.workers, **given)
    return knowing(policy, *noise).decide(now)


def test_decisions_by_hand() -> None:
    """One worker: 8 micro-batches of 8 in 90 ms, 4 in 67.5 ms: 45 ms, and 5.625 ms for each.

    Goodput of one worker, noise scale 200, by batch size: 64: 711.1; 104: 104 / 0.118125 x 264 / 304 = 764.6;
    112: 112 / 0.12375 x 264 / 312 = 765.8; 120: 120 / 0.129375 x 264 / 320 = 765.2; 128: 763.1. The gain is 7.69 %.
    Two workers, 160: 160 / 0.10125 x 264 / 360 = 1158.9, which is best for them.

    Where 4 take 50 ms: 10 ms, and 10 ms for each. 64 samples: 711.1 a second. 32 samples with the noise scale 20:
    640 x 84 / 52 = 1033.8; with 150: 640 x 214 / 182 = 752.5, a gain of 5.8 %; with 250: 640 x 314 / 282 = 712.6.
    """
    alone = Bounds(8, 1024, 1, 1)
    table: list[tuple[float, dict[str, Any], tuple[float, ...], Bounds, Decision | None]] = [
        (0.0675, {}, (200, 200), BOUNDS, Decision(batch_size=112, workers=2)),
        (0.0675, {}, (), BOUNDS, Decision(workers=2)),  # the noise scale is unknown: the batch size stays
        (0.0675, {}, (200,), BOUNDS, Decision(batch_size=112, workers=2)),
        (0.0675, {}, (200, 5000), BOUNDS, Decision(batch_size=112, workers=2)),  # the low end counts
        (0.0675, {"margin": 0.076}, (200,), BOUNDS, Decision(batch_size=112, workers=2)),
        (0.0675, {"margin": 0.078}, (200,), BOUNDS, Decision(workers=2)),
        (0.0675, {"margin": 0.62}, (200,), BOUNDS, Decision(workers=2)),  # 1158.9 / 711.1 = 1.6297
        (0.0675, {"margin": 0.64}, (200,), BOUNDS, None),
        (0.0675, {}, (200,), Bounds(8, 104, 1, 1), Decision(batch_size=104)),
        (0.0675, {}, (200,), Bounds(57, 63, 1, 8), Decision(workers=2)),  # no whole micro-batches in there
        (0.05, {}, (5, 150), alone, Decision(batch_size=32)),
        (0.05, {}, (5, 250), alone, None),  # the high end counts
        (0.05, {}, (5,), alone, None),  # it is unknown
    ]
    for seconds, options, noise, bounds, expected in table:
        policy = GoodputPolicy(every=10, **options)
        seen(policy, 4, 1, seconds)
        assert decided(policy, seen(policy, 8, 1, 0.09), noise, bounds=bounds) == expected


def test_another_batch_size_is_tried_once_where_one_alone_is_measured() -> None:
    """For as many steps as tell its time; then what was before is compared with it."""
    for bounds, noise, seconds, expected in [
        (Bounds(8, 1024, 1, 1), (400.0,), 0.1, None),  # the goodput is 1,280 x 464 / 528 = 1,125, before 711
        (Bounds(8, 1024, 1, 1), (400.0,), 0.17, 64),  # 753 x 464 / 528 = 662
        (Bounds(8, 100, 1, 1), (1, 20.0), 0.09, 64),  # smaller ones, where twice as many are too many: 356 x 84 / 52
        (Bounds(8, 100, 1, 1), (1, 20.0), 0.045, None),  # 711 x 84 / 52
    ]:
        policy = GoodputPolicy(every=20)
        other = 128 if bounds.batch_max > 128 else 32
        assert decided(policy, seen(policy, 8, 1, 0.09, bounds=bounds), noise, bounds=bounds) == Decision(other)
        last = seen(policy, other // 8, 1, seconds, bounds=bounds)
        change = None if expected is None else Decision(batch_size=expected)
        assert decided(policy, last, noise, bounds=bounds) == change
        assert decided(policy, seen(policy, (expected or other) // 8, 1, seconds, bounds=bounds), bounds=bounds) is None
    policy = GoodputPolicy(every=10)
    assert decided(policy, seen(policy, 8, 1, 0.09, bounds=Bounds(64, 64, 1, 1)), bounds=Bounds(64, 64, 1, 1)) is None


def test_workers_that_do_not_pay_are_given_back_and_not_tried_again() -> None:
    """64 samples: 711 a second by one worker; 533 by two, where a step takes 120 ms."""
    policy = GoodputPolicy(every=10)
    seen(policy, 4, 1, 0.0675)
    assert decided(policy, seen(policy, 8, 1, 0.09)) == Decision(workers=2)
    assert decided(policy, seen(policy, 4, 2, 0.12)) == Decision(workers=1)
    for _ in range(5):
        assert decided(policy, seen(policy, 8, 1, 0.09)) is None


def test_a_further_worker_must_pay_as_with_autoscale() -> None:
    """A batch of 64 takes 90 ms with one worker; its goodput is that over the time with two, which is measured too."""
    bounds = Bounds(64, 64, 1, 2)
    for seconds, threshold, before, expected in [
        (0.082, 0.1, 2, None),  # 9.8 % more, and half of the threshold keeps what is there
        (0.087, 0.1, 2, Decision(workers=1)),  # 3.4 %
        (0.082, 0.1, 1, None),
        (0.081, 0.1, 1, Decision(workers=2)),  # 11.1 %
        (0.081, 0.2, 1, None),
    ]:
        policy = GoodputPolicy(every=10, threshold=threshold)
        settings = {1: (8, 1, 0.09), 2: (4, 2, seconds)}
        seen(policy, *settings[3 - before], bounds=bounds)
        assert decided(policy, seen(policy, *settings[before], bounds=bounds), bounds=bounds) == expected


def simulate(
    policy: GoodputPolicy, true: StepTime, noise: float, steps: int, bounds: Bounds = BOUNDS
) -> list[tuple[int, int]]:
    """(batch size, workers) of each step in a run with these step times, from 64 and 1 on."""

    def seen(step: int, now: Any, before: Any) -> Signals:
        took = float(true.seconds(-(-now.batch_size // (8 * now.workers)), now.workers)) if now == before else None
        return signals(now.batch_size, step=step, workers=now.workers, previous_step_time_s=took, bounds=bounds)

    made = run(knowing(policy, 0.9 * noise, 1.1 * noise), seen, Decision(batch_size=64, workers=1), range(steps))
    return [(each.batch_size, each.workers) for each in made[:-1]]


@pytest.mark.parametrize(
    ("true", "noise"),
    [
        (StepTime(0.05, 0.001, 0.02, 0.01), 300.0),
        (StepTime(0.0, 0.002, 0.05, 0.05, 2.0), 3000.0),
        (StepTime(0.02, 0.01, 0.01, 0.002, 3.0), 10.0),
    ],
)
def test_it_settles_near_the_best_setting(true: StepTime, noise: float) -> None:
    made = simulate(GoodputPolicy(every=10, threshold=0.001), true, noise, 300)
    assert len(set(made[-60:])) == 1

    def goodput(batch_size: int, workers: int) -> float:
        seconds = true.seconds(-(-batch_size // (8 * workers)), workers)
        return float(batch_size / seconds * efficiency(batch_size, 64, noise))

    best = max(goodput(8 * m, n) for m in range(1, 129) for n in range(1, 9))
    assert goodput(*made[-1]) > best / 1.05**2


@pytest.mark.parametrize(("true", "noise"), [(StepTime(0.05, 0.08), 100.0), (StepTime(0.3, 0.008), 64.0)])
def test_it_leaves_a_batch_size_that_is_far_from_the_best(true: StepTime, noise: float) -> None:
    """One worker, from 64 on; 22 and 139 are best, which a step's time by its batch alone does not tell."""
    made = simulate(GoodputPolicy(), true, noise, 300, Bounds(8, 1024, 1, 1))

    def cost(batch_size: int) -> float:
        return float(true.seconds(batch_size / 8, 1)) * (1 + noise / batch_size)

    assert cost(made[-1][0]) < 1.03 * min(map(cost, range(1, 1024)))


def test_a_trial_in_which_workers_change_or_the_noise_scale_is_first_seen() -> None:
    """It goes back where it cannot compare; with one micro-batch it lasts until the noise scale is known."""
    policy = GoodputPolicy(every=20)
    assert decided(policy, seen(policy, 8, 1, 0.09)) == Decision(128)
    assert decided(policy, seen(policy, 8, 2, 0.09), (400.0,)) == Decision(batch_size=64)
    policy = GoodputPolicy(every=4)
    last = seen(policy, 1, 1, 0.09)
    began = (last.step // 4 + 1) * 4
    assert decided(policy, last) == Decision(16)
    assert policy.tried_until == began + 4 + 20
