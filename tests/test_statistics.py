"""`opt.stats` agrees with closed forms, through the real engine between real workers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from problems import update
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.measurement import TAIL_SLOTS
from kfuse.statistics.step_stats import Statistics, StepStats

Array = NDArray[np.float64]
TINY_BUCKETS = 4 / 2**20  # MB: every tensor travels alone


# -- problems whose statistics are known -----------------------------------------------------------------------------
# All are linear models with a loss, so that a sample's gradient is its residual (dloss/doutput) times its input.


@dataclass(frozen=True)
class Problem:
    loss: str
    inputs: int
    weight: float  # of every parameter
    steps: int
    sizes: tuple[int, ...]  # of a step's micro-batches, over all workers
    grad_sq: float
    """|G|^2"""
    variance: float
    """tr(Sigma)"""
    separation: float = 0.0  # |m|, of logistic regression's two classes


def logistic(noise_scale: float, steps: int) -> Problem:
    """At w = 0, with labels s = +-1 and x|s ~ N(s m, I): the noise scale is d / |m|^2."""
    d, sizes = 10, (8, 8, 8, 8, 8, 4)
    return Problem("logistic", d, 0.0, steps, sizes, d / noise_scale / 4, d / 4, math.sqrt(d / noise_scale))


PROBLEMS = {
    "linear regression": Problem("linear", 20, 0.3, 200, (8, 8, 8, 8, 8, 5), 3.18553, 84.4355),
    "logistic regression": logistic(noise_scale=60, steps=300),
    "high noise": logistic(noise_scale=400, steps=450),
}


def draw(problem: Problem, step: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """The samples of a step, the same on every worker."""
    rng, count = np.random.default_rng([problem.steps, step]), sum(problem.sizes)
    x = rng.standard_normal((count, problem.inputs))
    if problem.loss == "linear":
        x *= np.sqrt(np.linspace(0.5, 2, problem.inputs))
        y = rng.standard_normal(count)
    else:
        y = rng.integers(0, 2, count).astype(np.float64)
        x += (2 * y - 1)[:, None] * problem.separation / math.sqrt(problem.inputs)
    return x.astype(np.float32), y.astype(np.float32)


def gradients_by_hand(problem: Problem, step: int) -> Array:
    """Each sample's gradient, float64 [samples, parameters]."""
    x, y = draw(problem, step)
    if problem.loss == "linear":
        residual = x.sum(axis=1, dtype=np.float64) * problem.weight - y
    else:
        residual = 0.5 - y.astype(np.float64)
    return residual[:, None] * x.astype(np.float64)


class Halves(nn.Module):
    """A linear model in two tensors, which travel in a bucket each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.cut = problem.inputs // 2
        self.left = nn.Linear(self.cut, 1, bias=False)
        self.right = nn.Linear(problem.inputs - self.cut, 1, bias=False)
        for p in self.parameters():
            nn.init.constant_(p, problem.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x[:, : self.cut]) + self.right(x[:, self.cut :])
        return out


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda out, y: 0.5 * F.mse_loss(out[:, 0], y),
    "logistic": lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y),
}


def measure(problem: Problem, steps: int) -> list[StepStats]:
    """Runs steps whose micro-batches are shared out between the workers; what each one measured."""
    net = Halves(problem)
    opt = kf.FusedSGD(net.parameters(), lr=0.0)
    ends = np.cumsum(problem.sizes)
    mine = np.array_split(np.arange(len(ends)), kf.size())[kf.rank()]
    found = []
    for step in range(steps):
        x, y = (torch.from_numpy(values) for values in draw(problem, step))
        for j in mine:
            part = slice(int(ends[j]) - problem.sizes[j], int(ends[j]))
            with opt.micro_batch(samples=problem.sizes[j], last=j == mine[-1]) as micro_batch:
                loss = LOSSES[problem.loss](net(x[part]), y[part])
                micro_batch.loss = loss.detach()
                loss.backward()
        opt.step()
        assert opt.stats is not None
        found.append(opt.stats)
        opt.zero_grad()
    return found


def measure_all() -> dict[str, list[StepStats]]:
    kf.init(comm_schedule="all_to_all", comm_bucket_mb=TINY_BUCKETS)
    return {name: measure(problem, problem.steps) for name, problem in PROBLEMS.items()}


Ranks = list[dict[str, list[StepStats]]]


@pytest.fixture(scope="module")
def measured() -> Ranks:
    return run_workers(3, measure_all)


def test_every_step_is_the_formula(measured: Ranks) -> None:
    """Each micro-batch's own gradient is squared, and weighs as much as it has samples."""
    assert repr(measured[0]) == repr(measured[1]) == repr(measured[2])
    for name, problem in PROBLEMS.items():
        for step in range(problem.steps - 10, problem.steps):
            gradients = gradients_by_hand(problem, step)
            parts = np.split(gradients, np.cumsum(problem.sizes)[:-1])
            mean, samples = gradients.mean(axis=0), len(gradients)
            weighted = sum(len(part) * float((part.mean(axis=0) ** 2).sum()) for part in parts)
            variance = (weighted - samples * float(mean @ mean)) / (len(parts) - 1)
            stats = measured[0][name][step]
            assert (stats.step, stats.samples, stats.micro_batches) == (step, samples, len(parts))
            assert stats.unit == "samples"
            assert stats.grad_norm == pytest.approx(math.sqrt(mean @ mean), rel=1e-5)
            assert stats.grad_variance == pytest.approx(variance, rel=1e-5)
            error = variance / samples
            assert stats.grad_sq == pytest.approx(float(mean @ mean) - error, abs=1e-5 * error)
            assert not stats.skipped
            if name == "linear regression":  # the mean over samples, not over micro-batches
                x, y = draw(problem, step)
                losses = 0.5 * (x.sum(axis=1, dtype=np.float64) * problem.weight - y) ** 2
                assert stats.loss == pytest.approx(losses.mean(), rel=1e-6)


def test_known_answers(measured: Ranks) -> None:
    for name in PROBLEMS:
        problem = PROBLEMS[name]
        for figure, truth, precision in (
            ("grad_variance", problem.variance, 0.05),
            ("grad_sq", problem.grad_sq, 0.25 if name == "high noise" else 0.1),
        ):
            values = np.array([getattr(stats, figure) for stats in measured[0][name]], float)
            error = values.std(ddof=1) / math.sqrt(len(values))
            assert abs(values.mean() - truth) < 5 * error
            assert error < precision * truth, "too few steps to say anything"
        if name != "high noise":
            last, truth = measured[0][name][-1], problem.variance / problem.grad_sq
            assert last.noise_scale_low is not None and last.noise_scale_high is not None
            assert last.noise_scale_low < truth < last.noise_scale_high < 3 * truth
            assert last.noise_scale == pytest.approx(truth, rel=0.35)


# -- what is not known, and in which unit ----------------------------------------------------------------------------


def regression(seed: int = 0, count: int = 16) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    x = torch.randn(count, 5, generator=generator)
    return net, x, x[:, :2].sin() + torch.randn(count, 2, generator=generator)


def backward(opt: Any, net: nn.Module, x: Tensor, y: Tensor, samples: bool = True, parts: int = 4) -> None:
    """One step's backward passes, over `parts` equal micro-batches."""
    for j, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with opt.micro_batch(samples=len(a) if samples else None, last=j == parts - 1):
            F.mse_loss(net(a), b).backward()


def test_without_sample_counts_a_micro_batch_takes_the_samples_place() -> None:
    def measured(samples: bool) -> Any:
        net, x, y = regression(count=32)
        opt = kf.FusedSGD(net.parameters(), lr=0.0)
        for _ in range(20):
            backward(opt, net, x, y, samples, parts=8)
            update(opt)
        return opt.stats

    by_sample, by_micro_batch = measured(True), measured(False)
    assert (by_sample.unit, by_sample.samples, by_sample.micro_batches) == ("samples", 32, 8)
    assert (by_micro_batch.unit, by_micro_batch.samples, by_micro_batch.micro_batches) == ("micro-batches", 8, 8)
    assert by_micro_batch.grad_norm == pytest.approx(by_sample.grad_norm, rel=1e-6)
    assert by_micro_batch.grad_variance == pytest.approx(by_sample.grad_variance / 4, rel=1e-5)
    assert by_micro_batch.noise_scale == pytest.approx(by_sample.noise_scale / 4, rel=1e-4)


def test_one_micro_batch_tells_no_variance() -> None:
    net, x, y = regression()
    opt = kf.FusedSGD(net.parameters(), lr=0.0)
    for _ in range(25):
        F.mse_loss(net(x), y).backward()
        update(opt)
    stats = opt.stats
    assert stats is not None and stats.micro_batches == 1
    assert stats.grad_variance is stats.grad_sq is stats.mean_grad_variance is stats.mean_grad_sq is None
    assert stats.noise_scale is stats.noise_scale_low is stats.noise_scale_high is None
    assert math.isnan(kf.grad_variance()) and math.isnan(kf.grad_noise_scale())
    assert kf.grad_norm() == stats.grad_norm and kf.grad_norm() > 0


# -- what rounding leaves of S ----------------------------------------------------------------------------------------


def per_sample_gradients(dtype: str, noise_scales: list[float]) -> list[tuple[StepStats, float]]:
    """A loss whose gradient in each sample is the sample itself: N(m, noise scale), where the mean square of m is 1.

    Two micro-batches of 8 a worker. The statistics after 24 steps, and the mean S from the samples in float64.
    """
    kf.init(comm_dtype=dtype)
    found = []
    for seed, noise_scale in enumerate(noise_scales):
        net = nn.Linear(500, 1, bias=False)
        opt = kf.FusedSGD(net.parameters(), lr=0.0)
        rng, exact = np.random.default_rng(seed), []
        middle = rng.standard_normal(500)
        middle /= math.sqrt((middle**2).mean())
        for _ in range(24):
            x = (middle + math.sqrt(noise_scale) * rng.standard_normal((kf.size() * 2, 8, 500))).astype(np.float32)
            means = x.astype(np.float64).mean(axis=1)
            exact.append(8 * ((means - means.mean(axis=0)) ** 2).sum() / (len(means) - 1))
            for j in (0, 1):
                with opt.micro_batch(samples=8, last=j == 1):
                    net(torch.from_numpy(x[2 * kf.rank() + j])).mean().backward()
            update(opt)
        assert opt.stats is not None
        found.append((opt.stats, float(np.mean(exact))))
    return found


def test_noise_scales_below_the_wires_precision_are_unknown() -> None:
    """In micro-batches of 8: 0, 0.001 and 0.5. fp32 tells the last two, bf16 the last. What is left of S where samples
    are all alike is rounding: it says nothing, not even a low end.
    """
    scales = [0.0, 0.008, 4.0]
    for dtype, told in (("fp32", 2), ("bf16", 1)):
        found = run_workers(2, per_sample_gradients, dtype, scales)[0]
        for stats, _ in found[: 3 - told]:
            assert stats.noise_scale is stats.noise_scale_low is stats.noise_scale_high is None
        for stats, exact in found[3 - told :]:
            assert stats.noise_scale == pytest.approx(exact / 500, rel=0.1)
        last = found[-1][0]
        assert last.noise_scale_low is not None and last.noise_scale_high is not None
        assert last.noise_scale_low < scales[-1] < last.noise_scale_high
        assert found[0][1] == 0.0 and found[0][0].mean_grad_sq == pytest.approx(500, rel=1e-6 if told == 2 else 1e-2)


def test_verbs_are_nan_until_known_in_a_loop_of_ones_own() -> None:
    """Without reading `opt.stats`, nothing waits: the verbs are a step behind."""

    def ask() -> tuple[float, float, float]:
        return kf.grad_norm(), kf.grad_variance(), kf.grad_noise_scale()

    numbers = [ask()]
    net, x, y = regression()
    opt = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.0))
    for step in range(24):
        backward(opt, net, x * (1 + step / 100), y)
        update(opt)
        numbers.append(ask())
    unknown = [[math.isnan(value) for value in values] for values in numbers]
    assert unknown == [[True] * 3] * 2 + [[False, False, True]] * 19 + [[False] * 3] * 4, "the last needs 20 steps"
    assert opt.stats is not None and opt.stats.step == 23
    assert ask() != numbers[-1]
    assert ask() == (opt.stats.grad_norm, opt.stats.grad_variance, opt.stats.noise_scale)


# -- before clipping, after loss scaling is undone -------------------------------------------------------------------


@pytest.mark.parametrize("by", ["clip_norm", "clip_grad_norm_"])
def test_statistics_are_from_before_clipping(by: str) -> None:
    stats, moved = [], []
    for clip in (None, 1e-3):
        net, x, y = regression()
        before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        opt = kf.FusedSGD(net.parameters(), lr=1.0, clip_norm=clip if by == "clip_norm" else None)
        backward(opt, net, x, y)
        if clip is not None and by == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        stats.append(opt.stats)
        moved.append(float((nn.utils.parameters_to_vector(net.parameters()).detach() - before).norm()))
    assert repr(stats[1]) == repr(stats[0])
    assert moved == pytest.approx([stats[0].grad_norm, 1e-3], rel=1e-2)


def with_grad_scaler(scale: float, steps: int = 10, bad_step: int = 4) -> list[str]:
    """Statistics and parameters after each step. In one the last rank's loss overflows."""
    kf.init()
    net, x, y = regression(count=16 * kf.size())
    opt = kf.FusedAdamW(net.parameters(), lr=0.01, clip_norm=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    found = []
    for step in range(steps):
        mine = slice(kf.rank(), None, kf.size())
        bad = step == bad_step and kf.rank() == kf.size() - 1
        for j, (p, q) in enumerate(zip((x[mine] + step).chunk(2), y[mine].chunk(2), strict=True)):
            with opt.micro_batch(samples=len(p), last=j == 1):
                scaler.scale(F.mse_loss(net(p), q) * (math.inf if bad else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        stats = opt.stats
        assert stats is not None and stats.skipped == (stats.grad_norm is None) == (step == bad_step)
        assert step != bad_step or stats.grad_sq is stats.grad_variance is None
        found.append(repr((stats, [p.tolist() for p in net.parameters()])))
    return found


def test_loss_scaling_leaves_no_trace_and_an_overflow_on_one_rank_is_unknown_on_all() -> None:
    """The scale is a power of two, so it must cancel without any rounding, also where it grows or is halved."""
    plain = run_workers(2, with_grad_scaler, 1.0)
    assert plain[0] == plain[1] and run_workers(2, with_grad_scaler, 2.0**12) == plain


def test_gradients_unscaled_by_hand_are_unknown_not_wrong() -> None:
    """The squares were taken of scaled gradients, with a scale that the optimizer is not told."""
    net, x, y = regression()
    opt, scaler = kf.FusedSGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(F.mse_loss(net(x), y)).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    stats = opt.stats
    assert stats is not None and not stats.skipped
    assert stats.grad_norm is stats.grad_sq is stats.grad_variance is None


# -- state -----------------------------------------------------------------------------------------------------------


def push(statistics: Statistics, step: int, seed: int) -> None:
    """A step's record as the engine makes it: now and then not finite, or of a single micro-batch."""
    rng = np.random.default_rng([seed, step])
    record = torch.zeros(TAIL_SLOTS + 2 + 3, dtype=torch.float64)  # three workers
    squared_norm, skipped = TAIL_SLOTS, TAIL_SLOTS + 1
    micro_batches = int(rng.integers(1, 5))
    samples = 7.0 * micro_batches
    record[:4] = torch.tensor([samples * rng.gamma(2.0), samples, samples * rng.normal(), micro_batches])
    record[4:6] = torch.from_numpy(rng.random(2))  # the leader's times
    record[6:11] = torch.tensor([rng.integers(0, 100), rng.random(), 0, 0, 1])  # the control word
    record[squared_norm] = rng.gamma(2.0) / 2
    record[TAIL_SLOTS + 2 :] = torch.from_numpy(rng.random(3))
    if local := rng.random() < 0.3:
        record[squared_norm] = math.nan
    statistics.wire = ("bf16", "bf16 sums", "int8")[rng.integers(3)]
    if rng.random() < 0.1:
        record[0] = record[2] = record[squared_norm] = math.inf
        record[skipped] = 1.0
    statistics.push(step, "samples", record, local)


@settings(max_examples=25)
@given(before=st.integers(0, 250), unread=st.integers(0, 4), lag=st.integers(0, 2), seed=st.integers(0, 10**6))
def test_state_carries_on_bitwise(before: int, unread: int, lag: int, seed: int) -> None:
    """Through JSON: the state is of plain values. Records under way and steps not yet read are part of it."""
    original = Statistics()
    original.begin_run()
    for step in range(before):
        push(original, step, seed)
        if step < before - unread:
            original.read(lag)
    copy = Statistics()
    copy.begin_run()
    copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert repr(copy.state_dict()) == repr(original.state_dict())
    for step in range(before, before + 30):
        for statistics in (original, copy):
            push(statistics, step, seed)
        assert copy.arrived == original.arrived  # which steps had a gradient that was not finite
        assert repr(copy.read(lag)) == repr(original.read(lag))
    assert repr(copy.wait()) == repr(original.wait())
    assert repr(copy.state_dict()) == repr(original.state_dict())
