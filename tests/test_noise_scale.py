"""Noise scale: closed forms, unbiasedness by simulation, and the interval's coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from kfuse.noise_scale import Estimate, NoiseScale, moments

Array = NDArray[np.float64]
Pairs = list[tuple[float | None, float | None]]


def step_moments(gradients: Array, sizes: list[int]) -> tuple[float | None, float | None]:
    """Moments of one step from the gradients of single samples, cut into micro-batches of `sizes`."""
    assert len(gradients) == sum(sizes)
    means = [part.mean(axis=0) for part in np.split(gradients, np.cumsum(sizes)[:-1])]
    sum_weighted_sq = sum(b * float(g @ g) for b, g in zip(sizes, means, strict=True))
    mean = gradients.mean(axis=0)
    return moments(sum_weighted_sq, float(mean @ mean), sum(sizes), len(sizes))


def gaussian_moments(
    rng: np.random.Generator, steps: int, dim: int, noise_scale: float, sizes: list[int]
) -> tuple[Array, Array]:
    """S and G2 of `steps` steps whose samples' gradients are N(G, I) with dim / |G|^2 = noise_scale.

    This is logistic regression at w = 0 with x|s ~ N(s m, I), up to a factor 1/2 on gradients.
    """
    b = np.array(sizes, dtype=np.float64)
    g = rng.standard_normal((steps, len(b), dim)) / np.sqrt(b)[:, None] + 1 / math.sqrt(noise_scale)
    mean = np.einsum("j,sjd->sd", b / b.sum(), g)
    sums, totals = np.einsum("j,sjd->s", b, g**2), (mean**2).sum(axis=1)
    pairs = [moments(float(a), float(t), float(b.sum()), len(b)) for a, t in zip(sums, totals, strict=True)]
    result = np.array(pairs, dtype=np.float64)
    return result[:, 0], result[:, 1]


def assert_mean(values: Array, expected: float) -> None:
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - expected) < 5 * error, (values.mean(), expected, error)
    assert error < 0.1 * abs(expected), "the simulation is too short to say anything"


@pytest.fixture(scope="module")
def digits_gradients() -> Array:
    """Per-sample gradients of softmax regression on digits (X / 16, no bias) at w = 0."""
    x, y = load_digits(return_X_y=True)
    residual = 0.1 - np.eye(10)[y]
    gradients: Array = np.einsum("ni,nc->nic", x / 16, residual).reshape(len(x), -1)
    return gradients


def test_digits_closed_form(digits_gradients: Array) -> None:
    n = len(digits_gradients)
    variance, grad_sq = step_moments(digits_gradients, [1] * n)
    assert variance is not None and grad_sq is not None
    assert variance * (n - 1) / n == pytest.approx(13.31530595, rel=1e-9)  # divided by N, as stated
    assert grad_sq + variance / n == pytest.approx(0.19747316, rel=1e-7)


def test_digits_unbiased_with_unequal_micro_batches(digits_gradients: Array) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 16, 3, 8, 4]
    pairs = [
        step_moments(digits_gradients[rng.integers(0, len(digits_gradients), sum(sizes))], sizes) for _ in range(2000)
    ]
    variance, grad_sq = np.array(pairs, dtype=np.float64).T
    assert_mean(variance, 13.31530595)
    assert_mean(grad_sq, 0.19747316)


@pytest.mark.parametrize("sizes", [[1, 1], [7, 1, 2], [4] * 8, [1, 2, 3, 4, 5, 6]])
def test_linear_regression_unbiased(sizes: list[int]) -> None:
    """x ~ N(0, diag(scale)), w - w* = 0.3, noise 1: both moments have closed forms."""
    rng = np.random.default_rng(1)
    steps, scale = 6000, np.linspace(0.5, 2, 20)
    x = rng.standard_normal((steps, sum(sizes), 20)) * np.sqrt(scale)
    gradients = x * (x.sum(axis=2) * 0.3 - rng.standard_normal((steps, sum(sizes))))[:, :, None]
    pairs = [step_moments(g, sizes) for g in gradients]
    variance, grad_sq = np.array(pairs, dtype=np.float64).T
    assert_mean(variance, 84.4355)
    assert_mean(grad_sq, 3.18553)


@pytest.mark.parametrize(
    "arguments",
    [(1.0, 1.0, 8, 1), (math.nan, 1.0, 8, 2), (1.0, math.inf, 8, 2), (1.0, 1.0, 0, 2)],
    ids=["one micro-batch", "nan", "infinite", "no samples"],
)
def test_moments_unknown(arguments: tuple[float, float, float, int]) -> None:
    assert moments(*arguments) == (None, None)


@pytest.mark.parametrize("micro_batches", [2, 16, 1024])
def test_moments_precision_of_fp32_inputs(micro_batches: int) -> None:
    """The docstring's promise: a relative error of S near eps * b / B_simple, for any M."""
    b, variance, grad_sq = 1000.0, 1.0, 1.0  # B_simple is 1e-3 of a micro-batch
    rng = np.random.default_rng(2)
    for _ in range(200):
        samples, unit = b * micro_batches, float(rng.uniform(1, 2))
        total = unit * (grad_sq + variance / samples)
        weighted = unit * (samples * grad_sq + micro_batches * variance)
        measured, measured_sq = moments(float(np.float32(weighted)), float(np.float32(total)), samples, micro_batches)
        assert measured == pytest.approx(unit * variance, rel=4 * 6e-8 * b)
        assert measured_sq == pytest.approx(unit * grad_sq, rel=1e-6)


def test_high_noise_needs_unclamped_averages() -> None:
    """Where G2 of one step is mostly noise, clamping it before averaging ruins the ratio."""
    variance, grad_sq = gaussian_moments(np.random.default_rng(3), 6000, 200, 2000.0, [16] * 4)
    plain, clamped = NoiseScale(decay=0.9995), NoiseScale(decay=0.9995)
    for s, g2 in zip(variance, grad_sq, strict=True):
        plain.update(float(s), float(g2))
        clamped.update(float(s), max(float(g2), 0.0))
    ours, theirs = plain.estimate(), clamped.estimate()
    assert ours.noise_scale is not None and ours.low is not None and ours.high is not None
    assert theirs.noise_scale is not None
    assert ours.low < 2000 < ours.high
    assert ours.noise_scale == pytest.approx(2000, rel=0.2)
    assert theirs.noise_scale < 1400


@pytest.mark.parametrize("steps", [30, 100, 450], ids=["blocks of one step", "filling window", "steady"])
def test_interval_coverage(steps: int) -> None:
    """The 95 % interval holds the truth about that often, at every stage of the window."""
    rng = np.random.default_rng(4)
    trials, covered, bounded = 800, 0, 0
    variance, grad_sq = gaussian_moments(rng, trials * steps, 10, 50.0, [4, 8, 12, 8])
    for trial in range(trials):
        noise = NoiseScale(decay=0.99)
        for i in range(trial * steps, (trial + 1) * steps):
            noise.update(float(variance[i]), float(grad_sq[i]))
        estimate = noise.estimate()
        if estimate.low is not None and estimate.high is not None:
            bounded += 1
            covered += estimate.low <= 50.0 <= estimate.high
    assert bounded > 0.95 * trials
    assert 0.92 <= covered / bounded <= 0.975


def weighted_means(variance: Array, grad_sq: Array, decay: float) -> tuple[float, float, float]:
    """Normalised EMA by its definition: both means, and the sum of squared weights."""
    weights = decay ** np.arange(len(variance) - 1, -1, -1.0)
    weights /= weights.sum()
    return float(weights @ variance), float(weights @ grad_sq), float((weights**2).sum())


@pytest.mark.parametrize(("steps", "block"), [(20, 1), (65, 3), (333, 10), (1000, 10)])
def test_interval_is_fiellers(steps: int, block: int) -> None:
    """Both ends are where the t statistic of mean(S) - r mean(G2) reaches the 97.5 % quantile."""
    variance, grad_sq = gaussian_moments(np.random.default_rng(5), steps, 50, 20.0, [8] * 4)
    noise = NoiseScale(decay=0.99)
    for s, g2 in zip(variance, grad_sq, strict=True):
        noise.update(float(s), float(g2))
    estimate = noise.estimate()
    mean_s, mean_g2, weight_sq = weighted_means(variance, grad_sq, 0.99)
    assert estimate.mean_grad_variance == pytest.approx(mean_s, rel=1e-9)
    assert estimate.mean_grad_sq == pytest.approx(mean_g2, rel=1e-9)
    assert estimate.noise_scale == pytest.approx(mean_s / mean_g2, rel=1e-9)
    blocks = np.stack([variance, grad_sq])[:, -20 * block :].reshape(2, 20, block).mean(axis=2)
    covariance = np.cov(blocks) * block * weight_sq
    assert estimate.low is not None and estimate.high is not None and estimate.low > 0
    for end in (estimate.low, estimate.high):
        contrast = np.array([1.0, -end])
        t = (mean_s - end * mean_g2) / math.sqrt(contrast @ covariance @ contrast)
        assert abs(t) == pytest.approx(2.0930, rel=1e-4)  # from a table, for 19 degrees of freedom


def fed(pairs: Pairs, decay: float = 0.99) -> NoiseScale:
    noise = NoiseScale(decay)
    for pair in pairs:
        noise.update(*pair)
    return noise


def test_too_few_steps_is_unknown() -> None:
    assert NoiseScale().estimate() == Estimate()
    nineteen = fed([(8.0, 2.0)] * 19).estimate()
    assert nineteen.noise_scale is nineteen.low is nineteen.high is None
    assert nineteen.mean_grad_variance == pytest.approx(8.0)
    assert nineteen.mean_grad_sq == pytest.approx(2.0)
    twenty = fed([(8.0, 2.0)] * 20).estimate()
    assert (twenty.noise_scale, twenty.low, twenty.high) == pytest.approx((4.0, 4.0, 4.0))


@pytest.mark.parametrize(
    "pairs",
    [
        [(8.0, 0.01 + (-1.0) ** i) for i in range(100)],
        [(8.0, -1.0)] * 100,
        [(8.0, 0.0)] * 100,
        [(-1e-9, 2.0)] * 100,
    ],
    ids=["G2 not significant", "G2 negative", "G2 zero", "S negative"],
)
def test_a_number_that_means_nothing_is_unknown(pairs: Pairs) -> None:
    estimate = fed(pairs).estimate()
    assert estimate.noise_scale is estimate.low is estimate.high is None
    assert estimate.mean_grad_variance is not None and estimate.mean_grad_sq is not None


def test_lower_end_is_not_negative() -> None:
    estimate = fed([(0.1 + 3 * (-1.0) ** (i * i // 3), 1.0) for i in range(200)]).estimate()
    assert estimate.low == 0.0
    assert estimate.noise_scale is not None and estimate.high is not None
    assert 0 < estimate.noise_scale < estimate.high


def test_unknown_steps_are_counted_and_ignored() -> None:
    known: Pairs = [(8.0 + i % 5, 2.0 + i % 3) for i in range(60)]
    gaps: Pairs = [
        (None, None),
        (1.0, None),
        (math.nan, 1.0),
        (1.0, math.inf),
    ]
    expected, noise = fed(known), fed(known[:30] + gaps + known[30:])
    assert noise.estimate() == expected.estimate()
    assert (noise.known_steps, noise.unknown_steps) == (60, 4)


def test_estimate_expires_when_nothing_is_measured() -> None:
    """A run that has gone down to one micro-batch a step measures nothing more; a short step is no matter."""
    noise = fed([(8.0, 2.0)] * 100 + [(None, None)] * 10)
    assert noise.estimate().noise_scale == pytest.approx(4.0)
    noise.update(None, None)
    assert noise.estimate().noise_scale is None
    noise.update(8.0, 2.0)
    assert noise.estimate().noise_scale == pytest.approx(4.0)


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 900), after=st.integers(0, 500), seed=st.integers(0, 2**32 - 1))
def test_state_round_trip_is_bitwise(before: int, after: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs: Pairs
    pairs = [(None, None) if rng.random() < 0.1 else (rng.gamma(2.0), rng.normal(1.0, 2.0)) for _ in range(1400)]
    original, copy = fed(pairs[:before]), NoiseScale()
    copy.load_state_dict(original.state_dict())
    for pair in pairs[before : before + after]:
        original.update(*pair)
        copy.update(*pair)
    assert copy.estimate() == original.estimate()
    assert copy.state_dict() == original.state_dict()


@settings(max_examples=50, deadline=None)
@given(
    decay=st.floats(0, 0.999),
    steps=st.integers(20, 300),
    unit=st.integers(-20, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_estimate_is_ordered_and_scale_free(decay: float, steps: int, unit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [(float(rng.normal(3, 1)), float(rng.normal(1, 1))) for _ in range(steps)]
    estimate = fed([*pairs], decay).estimate()
    scaled = fed([(s * 2.0**unit, g2 * 2.0**unit) for s, g2 in pairs], decay).estimate()
    known = [value is not None for value in (estimate.noise_scale, estimate.low, estimate.high)]
    assert all(known) or not any(known)
    assert (scaled.noise_scale, scaled.low, scaled.high) == (
        estimate.noise_scale,
        estimate.low,
        estimate.high,
    )
    if estimate.noise_scale is not None and estimate.low is not None and estimate.high is not None:
        slack = 1e-9 * estimate.noise_scale
        assert 0 <= estimate.low <= estimate.noise_scale + slack
        assert estimate.noise_scale <= estimate.high + slack
        assert math.isfinite(estimate.high)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_decay_out_of_range(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay=.*allowed is 0 <= decay < 1"):
        NoiseScale(decay)
