"""The benchmark's truth has the closed forms' values, and its estimators give what their formulas give by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from kfuse.models import MLP
from kfuse.statistics.noise_scale import Estimate

TRACE, GRAD_SQ = 84.4355, 3.18553  # of linear regression, x ~ N(0, diag linspace(.5, 2, 20)), w - w* = 0.3, noise 1
ESTIMATORS = ("Kfuse", "KungFu", "FairScale", "AdaptDL", "KDiffusion")


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        import noise_quality

        return noise_quality


def linear_regression(samples: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A model with w - w* = 0.3, in float64."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.linspace(0.5, 2.0, 20, dtype=torch.float64).sqrt()
    x = torch.randn(samples, 20, generator=generator, dtype=torch.float64) * scale
    model = nn.Linear(20, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.3)
    return model, x, torch.randn(samples, generator=generator, dtype=torch.float64)


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0] - y).square().mean() / 2


# -- truth -----------------------------------------------------------------------------------------------------------


def test_truth_of_softmax_regression_on_digits(quality: ModuleType) -> None:
    data, labels = load_digits(return_X_y=True)
    model = nn.Linear(64, 10, bias=False)
    nn.init.zeros_(model.weight)
    x, y = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)
    exact = quality.moments_of(quality.SampleGradients(model), x, y)
    assert float(exact.mean.square().sum()) == pytest.approx(0.19747316, rel=1e-6)
    assert float(exact.variance.sum()) == pytest.approx(13.31530595, rel=1e-6)
    assert exact.noise_scale() == pytest.approx(13.31530595 / 0.19747316, rel=1e-6)


def test_truth_of_linear_regression(quality: ModuleType) -> None:
    model, x, y = linear_regression(20_000)
    exact = quality.moments_of(quality.SampleGradients(model, half_square), x, y)
    each = (0.3 * x.sum(1) - y)[:, None] * x  # by hand
    assert torch.allclose(exact.mean, each.mean(0), rtol=1e-9)
    assert torch.allclose(exact.variance, each.var(0, unbiased=False), rtol=1e-9)
    assert exact.noise_scale() == pytest.approx(TRACE / GRAD_SQ, rel=0.08)  # of the population


def test_weighted_truth_is_the_truth_of_weighted_gradients(quality: ModuleType) -> None:
    model, x, y = linear_regression(500)
    exact = quality.moments_of(quality.SampleGradients(model, half_square), x, y)
    divisor = torch.linspace(0.1, 3.0, 20, dtype=torch.float64)
    each = (0.3 * x.sum(1) - y)[:, None] * x / divisor
    by_hand = each.var(0, unbiased=False).sum() / each.mean(0).square().sum()
    assert exact.noise_scale(1 / divisor.square()) == pytest.approx(float(by_hand), rel=1e-9)


def test_directions_of_known_noise(quality: ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    spread = torch.tensor([4.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    exact = quality.Moments(torch.ones(5, dtype=torch.float64), spread)
    each = 1 + torch.randn(4000, 5, generator=generator, dtype=torch.float64) * spread.sqrt()
    assert quality.directions(each, exact) == pytest.approx(100 / 26, rel=0.05)  # 10^2 / (16 + 4 + 4 + 1 + 1)


def test_adams_divisor_is_that_of_torch(quality: ModuleType) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = torch.optim.AdamW([parameter], lr=0.1)
    for gradient in ([1.0, 3.0], [2.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]):
        assert quality.adam_divisor(opt, 4) is None
        parameter.grad = torch.tensor(gradient)
        opt.step()
    weights = 0.001 * 0.999 ** np.arange(4, -1, -1)
    v = [float(weights @ squares) / weights.sum() for squares in ([1, 4, 1, 1, 1], [9, 1, 1, 1, 1])]
    assert quality.adam_divisor(opt, 5).tolist() == pytest.approx([math.sqrt(each) + 1e-8 for each in v], rel=1e-6)


# -- estimators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("parts", [2, 4, 8, 32])
def test_each_formula_is_exact_for_expected_squares(quality: ModuleType, name: str, parts: int) -> None:
    size = 4
    squares, total = [GRAD_SQ + TRACE / size] * parts, GRAD_SQ + TRACE / (parts * size)
    estimator = getattr(quality, name)()
    for _ in range(2):
        estimator.update(squares, total, size)
    found = estimator.estimate()
    number = found.mean_grad_variance / found.mean_grad_sq if name == "Kfuse" else found.noise_scale
    assert number == pytest.approx(TRACE / GRAD_SQ, rel=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_formula_on_linear_regression(quality: ModuleType, name: str) -> None:
    """1000 steps of 64 samples in 8 micro-batches, long means over them: within 10 % of the closed form."""
    _, x, y = linear_regression(64_000)
    each = ((0.3 * x.sum(1) - y)[:, None] * x).numpy().reshape(1000, 8, 8, 20).mean(2)
    squares, totals = np.square(each).sum(2), np.square(each.mean(1)).sum(1)
    long = {"Kfuse": 0.995, "KungFu": 0.995, "FairScale": 0.999, "AdaptDL": 0.999, "KDiffusion": 0.9998}[name]
    estimator = getattr(quality, name)(long)
    for of_parts, total in zip(squares.tolist(), totals.tolist(), strict=True):
        estimator.update(of_parts, total, 8)
    found = estimator.estimate()
    assert found.noise_scale == pytest.approx(TRACE / GRAD_SQ, rel=0.1)
    if name == "Kfuse":
        assert found.low < TRACE / GRAD_SQ < found.high


STEPS = (((3.0, 1.0), 1.5), ((2.0, 2.0), 0.5))  # |g_1|^2 and |g_2|^2, |gbar|^2; 4 samples a micro-batch
BY_HAND = {
    # After each step: the noise scale, or None where the source gives a negative or infinite one.
    "Kfuse": (None, None),  # before 20 steps
    "KungFu": (None, None),  # 12 / 0, then 12 / (0.9 * 0 + 0.1 * -1)
    "FairScale": (4.0, 4 * (0.998 * 1 + 3) / (0.998 * 1 + 0)),  # -1 is raised to 0
    "AdaptDL": (4.0, None),  # 3.998 / max(0.998 * 1 - 1, 0)
    "KDiffusion": (4.0, 0.0002 * (0.9998 * 4 + 12) / 1e-8),  # 0.9998 * 1 - 1 is raised to eps
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_steps_by_hand(quality: ModuleType, name: str) -> None:
    estimator = getattr(quality, name)()
    for (squares, total), expected in zip(STEPS, BY_HAND[name], strict=True):
        estimator.update(squares, total, 4)
        found = estimator.estimate().noise_scale
        assert found is None if expected is None else found == pytest.approx(expected, rel=1e-9)


def test_kfuse_and_kungfu_average_without_clamping(quality: ModuleType) -> None:
    ours, theirs = quality.Kfuse(), quality.KungFu()
    for squares, total in (*STEPS, ((6.0, 2.0), 3.0)):
        ours.update(squares, total, 4)
        theirs.update(squares, total, 4)
    weights = np.array([0.99**2, 0.99, 1.0])
    found = ours.estimate()
    assert found.mean_grad_variance == pytest.approx(weights @ [4.0, 12.0, 8.0] / weights.sum())
    assert found.mean_grad_sq == pytest.approx(weights @ [1.0, -1.0, 2.0] / weights.sum())
    # KungFu's S of the first micro-batch: 12, 12, 24; its G2: 0, -1, 0. The first step's values are the first means.
    assert theirs.variance.mean == pytest.approx(0.9 * 12 + 0.1 * 24)
    assert theirs.grad_sq.mean == pytest.approx(0.9 * -0.1)


# -- what the estimators get -----------------------------------------------------------------------------------------


def test_micro_batches_of_the_same_samples(quality: ModuleType) -> None:
    each = torch.randn(12, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares, total, size = quality.split(each @ each.T, batch=8, parts=4)
    means = each[:8].view(4, 2, 7).mean(1)
    assert squares == pytest.approx(means.square().sum(1).tolist())
    assert total == pytest.approx(float(means.mean(0).square().sum()))
    assert size == 2


def test_the_optimizers_estimate_is_of_the_same_gradients(quality: ModuleType) -> None:
    """What kfuse's engine measured agrees with the estimator that got the products of samples' gradients."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(300, 6, generator=generator)
    problem = quality.Problem("tiny", "rows", lambda: MLP((6,), 3, (8,)), x, x[:, :3].argmax(1), batch=64, runs=1)
    run = quality.train(problem, seed=0, steps=76, every=4)
    assert sorted(run.truth) == list(range(4, 76, 4))
    scores = {name: quality.score([run], name) for name in run.course}
    assert scores["kfuse"]["checkpoints"] == 18
    assert scores["AdaptDL's for Adam, D^2"]["checkpoints"] == 17  # not of step 4: Adam's v is not yet known
    shown = [(a, b) for a, b in zip(run.course["kfuse"], run.course["kfuse, M = 8"], strict=True) if a.low is not None]
    assert shown
    for ours, same in shown:
        assert (ours.noise_scale, ours.low, ours.high) == pytest.approx(
            (same.noise_scale, same.low, same.high), rel=1e-3
        )
    assert run.losses[-1] < run.losses[0]


def test_scores_of_known_estimates(quality: ModuleType) -> None:
    run = quality.Run(0)
    run.truth = {
        1: {"noise_scale": 10.0, "trace": 10.0, "grad_sq": 1.0},
        2: {"noise_scale": 20.0, "trace": 40.0, "grad_sq": 2.0},
        3: {"noise_scale": 40.0, "trace": 40.0, "grad_sq": 1.0},
    }
    found = [Estimate(), Estimate(5.0, 4.0, 12.0, 5.0, 1.0), Estimate(None, 25.0, None, 3.0, -1.0)]
    found.append(Estimate(80.0, 50.0, 200.0, 80.0, 1.0))
    run.course = {"kfuse": found, "KungFu": found}
    scores = quality.score([run], "kfuse")
    assert (scores["checkpoints"], scores["shown"], scores["held"]) == (3, 2, 1)
    assert (scores["low_shown"], scores["low_held"]) == (3, 1)
    assert (scores["steps"], scores["steps_shown"], scores["steps_low_alone"]) == (4, 2, 1)
    # Lines through 10, 40, 40 and 1, 2, 1 end at 45 and 4 / 3. The interval there is from 50 to 200.
    assert quality.trend(run.truth, 3) == pytest.approx(33.75)
    assert (scores["trend_shown"], scores["trend_held"]) == (1, 0)
    assert scores["ratio"] == pytest.approx((0.5 + 2) / 2)
    assert scores["factor"] == pytest.approx(2)
    assert scores["ends"] == pytest.approx([(4 / 5 + 50 / 80) / 2, (12 / 5 + 200 / 80) / 2])
    assert (scores["means_shown"], scores["means_factor"]) == (2, pytest.approx(2))
    assert "held" not in quality.score([run], "KungFu")
