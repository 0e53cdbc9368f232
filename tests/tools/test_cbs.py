"""The critical batch size by branches: its interval covers the truth of a known model, and nothing is changed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kfuse as kf
from kfuse.tools.cbs import in_script
from kfuse.tools.cbs.estimate import (
    CriticalBatch,
    Plan,
    Trace,
    calibration,
    estimate,
    measure,
    noise_scale,
    smoothed,
)

DIMENSIONS = 40
CURVATURES = 1 / np.arange(1, DIMENSIONS + 1)
RULES: dict[str, Callable[[float], float]] = {"linear": lambda k: k, "sqrt": math.sqrt}


class Quadratic:
    """The noisy quadratic model (Zhang et al. 2019, arXiv 1907.04164), trained by SGD from a fixed point.

    The loss is sum_i h_i x_i^2 / 2. A sample's gradient is h_i x_i with noise of variance c_i = noise * h_i.
    """

    def __init__(self, rule: str, start: float, noise: float, lr: float = 0.05) -> None:
        self.rate, self.start, self.noise, self.lr = RULES[rule], start, noise * CURVATURES, lr

    def exact(self, plan: Plan, k: float) -> Trace:
        """The expected losses: E[x^2] <- (1 - a h)^2 E[x^2] + a^2 c / B."""
        batch, a, squares, trace = plan.batch(k), self.lr * self.rate(k), np.full(DIMENSIONS, self.start**2), Trace()
        for step in range(plan.steps(k)):
            trace.append(((step + 1) * batch, (CURVATURES * squares).sum() / 2, None, None, None))
            squares = (1 - a * CURVATURES) ** 2 * squares + a**2 * self.noise / batch
        return trace

    def sampled(self, plan: Plan, k: float, noise: np.ndarray) -> Trace:
        """The losses of one training. noise: [samples, dimensions], of variance 1, in the order of the data."""
        batch, a, x, trace = plan.batch(k), self.lr * self.rate(k), np.full(DIMENSIONS, self.start), Trace()
        means = noise.reshape(-1, batch, DIMENSIONS).mean(axis=1) * np.sqrt(self.noise)
        for step, mean in enumerate(means):
            figures = self.noise.sum(), (CURVATURES**2 * x**2).sum()
            trace.append(((step + 1) * batch, (CURVATURES * x * x).sum() / 2, *figures, None))
            x = x - a * (CURVATURES * x + mean)
        return trace

    def truth(self, plan: Plan, factors: tuple[float, ...]) -> float:
        """B* of the exact recursion: where its smoothed loss crosses the tolerance, linear in k between `factors`."""
        losses = np.array([smoothed(self.exact(plan, k), plan.branch_samples, plan.window) for k in factors])
        over = losses - losses[0] * (1 + plan.tolerance)
        i = int(np.flatnonzero(over > 0)[0])
        part = -over[i - 1] / (over[i] - over[i - 1])
        return plan.batch_size * (factors[i - 1] + part * (factors[i] - factors[i - 1]))

    def measured(self, plan: Plan, seed: int) -> CriticalBatch:
        """The measurement, on sampled branches. All branches of a repetition see the same samples."""
        noise = np.random.default_rng(seed).normal(size=(plan.repetitions, plan.branch_samples, DIMENSIONS))
        return measure(lambda k, repetition: self.sampled(plan, k, noise[repetition]), plan)


LINEAR = Quadratic("linear", 0.3, 1.0), Plan(4, (1, 2, 4, 8, 16, 32), 5, 1024, 0.05)
NOISY = Quadratic("sqrt", 0.3, 1.0), Plan(4, (1, 2, 4, 8, 16), 5, 2048, 0.3)
TWICE = Quadratic("sqrt", 0.5, 1.0), Plan(4, (1, 2, 4, 8), 2, 2048, 0.4)


@pytest.mark.parametrize(
    ("problem", "plan", "seeds", "least", "most"),
    [
        (*NOISY, 10, 0.9, 1.0),
        *(pytest.param(*each, 200, 0.91, 0.99, marks=pytest.mark.full) for each in (LINEAR, TWICE)),
    ],
)
def test_the_interval_covers_the_truth_as_often_as_it_promises(
    problem: Quadratic, plan: Plan, seeds: int, least: float, most: float
) -> None:
    """That of the exact recursion. 95 % are promised: of 200 seeds 0.91 to 0.99 is within 2.6 standard errors."""
    truth = problem.truth(plan, plan.factors)
    found = [problem.measured(plan, seed) for seed in range(seeds)]
    inside = [each.low <= truth <= (math.inf if each.high is None else each.high) for each in found]
    assert least <= sum(inside) / seeds <= most
    assert seeds > 10 or sum(each.high is not None for each in found) >= 9, "without an upper end all is covered"


def test_fiellers_interval_is_the_set_that_the_test_does_not_refuse() -> None:
    s, g = [3.0, 4.0, 3.5, 4.4], [1.0, 1.1, 0.8, 1.2]
    found = noise_scale([trace_of(s=a, g=b) for a, b in zip(s, g, strict=True)])
    assert found is not None
    ratio, low, high = found
    assert ratio == pytest.approx(sum(s) / sum(g))
    for r, refused in ((low * 0.99, True), (low * 1.01, False), (high * 0.99, False), (high * 1.01, True)):
        d = np.array(s) - r * np.array(g)
        assert (abs(d.mean()) / (d.std(ddof=1) / 2) > 3.1824) == refused
    assert noise_scale([trace_of(s=1.0, g=b) for b in (1.0, -0.9)]) is None  # not bounded
    assert noise_scale([trace_of(s=math.nan, g=1.0)] * 2) is None
    with_unknown = [trace_of(s=a, g=b) for a, b in zip(s, g, strict=True)]
    with_unknown[0].append((10, 1.0, None, None, None))
    assert noise_scale(with_unknown) == found


def trace_of(s: float = math.nan, g: float = math.nan, loss: float = 1.0) -> Trace:
    return [(8, loss, s, g, None)]


# -- the estimate, by hand ------------------------------------------------------------------------------------------

PLAN = Plan(4, (1, 2, 4), 2, 64, 0.1)


def test_the_crossing_is_linear_in_k_and_the_interval_is_a_t_test() -> None:
    """d at k = 1: -0.1, -0.1; at 2: -0.04, -0.06; at 4: 0.14, 0.16. Its mean is -0.05 at 2, 0.15 at 4: 0 at 2.5."""
    found = estimate([[1.0, 1.0], [1.06, 1.04], [1.24, 1.26]], PLAN)
    assert found.critical == pytest.approx(4 * 2.5)
    # With two repetitions the half-width is t / 2 times their difference: 12.7062 * 0.01 = 0.127 at 2 and at 4. From 1
    # to 2 the upper end goes from -0.1 to -0.05 + 0.127 = 0.0771, and is 0 at 1 + 0.1 / 0.1771.
    assert found.low == pytest.approx(4 * (1 + 0.1 / (0.1 - 0.05 + 0.127062)), rel=1e-4)
    # From 2 to 4 the difference of both goes from +0.02 to -0.02, and its size to 0 at 3: at lambda = (k - 2) / 2,
    # -0.05 + 0.2 lambda = 0.127062 |1 - 2 lambda| has its lower end 0 at lambda = 0.177062 / 0.454124.
    assert found.high == pytest.approx(4 * (2 + 2 * 0.177062 / 0.454124), rel=1e-3)
    mean, low, high = found.excess()[1]
    assert (mean, low, high) == pytest.approx((0.05, 0.05 - 0.127062, 0.05 + 0.127062))


def test_without_a_branch_beyond_the_tolerance_only_a_lower_end_is_known() -> None:
    found = estimate([[1.0, 1.0], [1.0, 1.001], [1.02, 1.021]], PLAN)
    assert (found.critical, found.low, found.high) == (None, 16, None)


def test_a_branch_that_diverges_is_beyond_the_tolerance() -> None:
    found = estimate([[1.0, 1.0], [1.0, 1.001], [1.0, math.nan]], PLAN)
    assert (found.critical, found.low, found.high) == (8, 8, 16)
    found = estimate([[1.0, 1.0], [math.nan, math.nan]], PLAN)
    assert (found.critical, found.low, found.high) == (4, 4, 8)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["losses"] == [[1.0, 1.0], [None, None]]
    found = estimate([[0.0, 0.0], [0.0, 0.0], [0.25, 0.25]], PLAN)  # the reference has nothing to compare with
    assert (found.critical, found.low, found.high) == (8, 8, 8) and found.as_dict()["excess"] == [[None] * 3] * 3
    with pytest.raises(ValueError, match="the smallest batch, 4, diverges"):
        measure(lambda k, repetition: trace_of(loss=math.nan), PLAN)


def test_it_ends_with_the_first_k_beyond_the_tolerance() -> None:
    asked = []

    def branch(k: float, repetition: int) -> Trace:
        asked.append((k, repetition))
        return [(64, 1.0 + 0.3 * (k > 1) + 0.001 * repetition, None, None, None)]

    assert measure(branch, PLAN).factors == (1, 2)
    assert asked == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_smoothed_loss_counts_steps_by_their_samples_in_the_window() -> None:
    unknown = None, None, None
    trace: Trace = [(40, 5.0, *unknown), (60, 1.0, *unknown), (90, 2.0, *unknown), (110, 4.0, *unknown)]
    # The last half of 100 samples: 10 of the second step, 30 of the third, 10 of the fourth.
    assert smoothed(trace, 100, 0.5) == pytest.approx((10 * 1 + 30 * 2 + 10 * 4) / 50)
    assert math.isnan(smoothed(trace, 120, 0.5)), "it has fewer samples"
    trace[2] = (90, math.nan, *unknown)
    assert math.isnan(smoothed(trace, 100, 0.5))
    assert smoothed(trace, 60, 0.3) == pytest.approx(1.0)


def test_steps_of_a_branch_count_the_short_last_step_of_an_epoch() -> None:
    plan = Plan(8, (1, 2), 2, 64)
    assert plan.steps(2) == 4
    assert plan.steps(2, cursor=4, length=30) == 5  # 16, 10 to the epoch's end; 16, 14; 8 of the last
    with pytest.raises(ValueError, match="a batch of 16 samples: must be at most the data's 12"):
        plan.steps(2, length=12)
    for samples in (64, 95, 97):
        for length in (16, 30, 100):
            for cursor in (0, 4, 333):
                used = steps = 0
                while used < samples:
                    used += min(16, length - (cursor + used) % length)
                    steps += 1
                assert Plan(8, (1, 2), 2, samples).steps(2, cursor, length) == steps


def test_calibration_is_the_geometric_mean_of_the_known_ratios() -> None:
    def found(critical: float | None, noise: float | None) -> CriticalBatch:
        scale = None if noise is None else (noise, noise, noise)
        return CriticalBatch(PLAN, (1,), ((1.0, 1.0),), critical, 1.0, None, scale)

    assert calibration([found(8, 2), found(None, 2), found(8, None), found(1, 1)]) == pytest.approx(2.0)
    assert calibration([found(None, 1)]) is None


def test_a_plan_that_cannot_be_measured_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"factors": (2, 1)}, r"factors=\(2, 1\): must be at least two finite numbers above 0 that ascend"),
        ({"factors": (1, 1.3)}, r"factors=\(1, 1.3\): must be whole where multiplied by the batch size 4"),
        ({"repetitions": 1}, "repetitions=1: must be at least 2"),
        ({"samples": 100}, "samples=100: must be at least 512"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            Plan(4, **arguments)


# -- kf.critical_batch ----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], kf.Optimizer | kf.FusedAdamW]] = {
    "FusedAdamW": lambda net: kf.FusedAdamW(net.parameters(), lr=0.01),
    "torch's SGD": lambda net: kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)),
    "bf16, masters": lambda net: kf.FusedAdamW(net.to(torch.bfloat16).parameters(), lr=0.01),
}
ARGUMENTS = {"batch_size": 8, "micro_batch": 4, "factors": (1, 2, 4), "repetitions": 2, "samples": 128}
ARGUMENTS["tolerance"] = 0.05


class Net(nn.Module):
    """With all that a measurement might leave changed: BatchNorm, dropout, a buffer that is not saved."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 2)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.layers(x.to(self.head.weight.dtype)))  # type: ignore[no-any-return]


def problem(name: str) -> tuple[Net, kf.Optimizer | kf.FusedAdamW, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    net = Net(norm="bf16" not in name)
    x = torch.randn(256, 6)
    return net, OPTIMIZERS[name](net), (x, (x[:, 0] + torch.randn(256) > 0).long())


@pytest.mark.parametrize(("name", "trained"), [("FusedAdamW", True), ("torch's SGD", False), ("bf16, masters", True)])
def test_critical_batch_leaves_model_optimizer_and_random_state_as_they_were(name: str, trained: bool) -> None:
    precision = "bf16-true" if "bf16" in name else "fp32"

    def run(measured: bool) -> tuple[list[bytes], list[float]]:
        net, opt, data = problem(name)
        if trained:
            kf.fit(net, data, opt, steps=20, batch_size=8, micro_batch=2, train_precision=precision)
        net.layers[2].eval()
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        if measured:
            before, stats, pointers = state(net, opt), opt.stats, [p.data_ptr() for p in net.parameters()]
            modes = [module.training for module in net.modules()]
            found = kf.critical_batch(net, data, opt, train_precision=precision, **ARGUMENTS)  # type: ignore[arg-type]
            assert len(found.losses) >= 2 and np.isfinite(found.losses).all()
            assert state(net, opt) == before and opt.stats == stats
            assert [p.data_ptr() for p in net.parameters()] == pointers
            assert [module.training for module in net.modules()] == modes
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        net.layers[2].train()
        for x, y in zip(data[0].split(16), data[1].split(16), strict=True):
            nn.functional.cross_entropy(net(x).float(), y).backward()
            opt.step()
            opt.zero_grad()
        # Without the statistics' records: they have times in them.
        return [part for part in state(net, opt) if b"noise_scale" not in part], drawn

    assert run(measured=True) == run(measured=False)


def state(net: nn.Module, opt: kf.Optimizer | kf.FusedAdamW) -> list[bytes]:
    """All of model and optimizer, bit by bit."""
    tensors = [*net.parameters(), *net.buffers()]
    saved = copy.deepcopy(opt.state_dict())
    found = [repr(saved.pop("param_groups")).encode(), repr(saved.pop("kfuse")).encode()]
    for index, of in sorted(saved["state"].items()):
        for key, value in sorted(of.items()):
            found.append(f"{index} {key}".encode())
            tensors.append(torch.as_tensor(value))
    return found + [t.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def test_its_branches_are_trainings_by_kf_fit(tmp_path: Path) -> None:
    net, opt, data = problem("FusedAdamW")
    curved: Any = {"micro_batch": 2, "statistics_curvature_every": 1}
    found = kf.critical_batch(net, data, opt, seed=8, **{**ARGUMENTS, **curved})  # type: ignore[arg-type]
    scales = []
    for seed in (0, 1):
        rows = []
        for k in (1, 2):
            net, opt, data = problem("FusedAdamW")
            opt.param_groups[0]["lr"] *= math.sqrt(k)
            opt.param_groups[0]["betas"] = (0.9**k, 0.999**k)
            own: Any = {"batch_size": 8 * k, "steps": 16 // k, "run_dir": tmp_path / f"{seed}-{k}", **curved}
            kf.fit(net, data, opt, seed=8 + seed, lr_scaling="none", **own)
            rows.append([json.loads(line) for line in (own["run_dir"] / "metrics.jsonl").read_text().splitlines()])
        # The last quarter of 128 samples: two steps of 16.
        assert found.losses[1][seed] == pytest.approx((rows[1][6]["loss"] + rows[1][7]["loss"]) / 2, rel=1e-6)
        scales.append(rows[0][-1]["curvature_noise_scale"])
    known = [scale for scale in scales if scale is not None]
    assert found.curvature_noise_scale == pytest.approx(sum(known) / len(known))


def test_a_measurement_that_fails_leaves_them_as_they_were_too() -> None:
    net, opt, data = problem("FusedAdamW")
    before, calls = state(net, opt), []

    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        if len(calls) == 9:
            raise KeyboardInterrupt
        calls.append(len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(KeyboardInterrupt):
        kf.critical_batch(net, data, opt, step_fn=fail, **ARGUMENTS)  # type: ignore[arg-type]
    assert state(net, opt) == before


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt, data = problem("FusedAdamW")
    with pytest.raises(ValueError, match="lr_scaling=adascale: must be one of none, linear, sqrt"):
        kf.critical_batch(net, data, opt, lr_scaling="adascale")
    with pytest.raises(ValueError, match="micro_batch=8: must be at most 4"):
        kf.critical_batch(net, data, opt, batch_size=8, micro_batch=8, factors=(0.5, 1, 2))
    net.head.weight.grad = torch.zeros_like(net.head.weight)
    with pytest.raises(ValueError, match=r"after opt.zero_grad\(\)"):
        kf.critical_batch(net, data, opt, **ARGUMENTS)  # type: ignore[arg-type]

    monkeypatch.setattr(in_script, "current", lambda: SimpleNamespace(elastic=True))
    with pytest.raises(RuntimeError, match="under kfuse-run workers may change"):
        kf.critical_batch(net, data, opt, **ARGUMENTS)  # type: ignore[arg-type]


# -- kfuse cbs: what is refused, before anything is trained -----------------------------------------------------------


def test_wrong_arguments_end_in_one_line(command: Callable[..., tuple[int, str, str]]) -> None:
    for words, message in (
        ([], "run=: must be the directory of a run"),
        (["ruin=x"], "ruin=x: must be one of run=, steps=, "),
        (["run=x", "workers=2"], "workers=2: must be one of run="),
        (["run=x", "factors=2"], "factors=2: must be a list, each a number"),
    ):
        status, _, said = command("cbs", *words)
        assert status == 2 and said.startswith("kfuse: error: ") and message in said and said.count("\n") == 1, said
