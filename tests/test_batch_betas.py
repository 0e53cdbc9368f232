"""AdamW's betas follow the batch size (`lr_betas`), and its bias correction follows the betas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import network, problem
from torch import nn

import kfuse as kf
from kfuse.data import EpochSampler
from kfuse.kernels import AdamOptions
from kfuse.optim.batch_betas import (
    BatchBetas,
    correct_for_update,
    corrections_after,
    largest_batch,
    scaled_betas,
)
from kfuse.train.evaluation import params_sha256

OPTIONS = AdamOptions(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
LIMITS: dict[str, Any] = {"batch_size": 8, "max_batch_size": 64}


class Sizes(kf.BasePolicy):
    """Asks for batch sizes: {step that is measured: samples}. Notes what each step had."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes, self.seen = dict(sizes), []
        self.seen: list[kf.Signals]

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append(signals)
        return kf.Decision(batch_size=self.sizes[signals.step]) if signals.step in self.sizes else None

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("rule", "ratio", "beta1", "beta2", "eps"),
    [
        ("malladi", 4.0, 0.6, 0.996, 0.5e-8),
        ("malladi", 0.25, 0.975, 0.99975, 2e-8),
        ("malladi", 10.0, 0.0, 0.99, 1e-8 / math.sqrt(10)),
        ("marek", 4.0, 0.9, 0.996005996001, 1e-8),  # 0.999^4
        ("marek", 0.5, 0.9, 0.9994998749374609, 1e-8),
    ],
)
def test_decision_table(rule: Any, ratio: float, beta1: float, beta2: float, eps: float) -> None:
    made = BatchBetas(rule, ratio).of(OPTIONS)
    assert (made.beta1, made.beta2, made.eps) == pytest.approx((beta1, beta2, eps), rel=1e-12, abs=1e-15)
    assert (made.lr, made.weight_decay) == (OPTIONS.lr, OPTIONS.weight_decay)
    assert BatchBetas(rule, 1.0).of(OPTIONS) == OPTIONS


def test_the_bias_correction_is_the_product_of_all_betas() -> None:
    corrections = corrections_after(torch.full((3,), 100.0), OPTIONS.beta1, OPTIONS.beta2)
    made = BatchBetas("malladi", 8.0).of(OPTIONS)
    correct_for_update(corrections, made.beta1, made.beta2, None)
    assert corrections.shape == (3, 2) and corrections.dtype == torch.float64
    first, second = corrections[1].tolist()
    assert first == pytest.approx(1 - 0.9**100 * 0.2, rel=1e-12)
    assert second == pytest.approx(1 - 0.999**100 * 0.992, rel=1e-12)
    assert second == pytest.approx(0.1025, rel=1e-3)  # the figures of the docstring
    assert pytest.approx(0.556, rel=1e-3) == 1 - 0.992**101
    assert math.sqrt(0.556 / 0.1025) == pytest.approx(2.3, rel=0.02)
    # A beta of 0 has forgotten everything: the correction is 1 from there on.
    gone = BatchBetas("malladi", 10.0).of(OPTIONS)
    for beta1, beta2 in ((gone.beta1, gone.beta2), (OPTIONS.beta1, OPTIONS.beta2)):
        correct_for_update(corrections, beta1, beta2, None)
        assert corrections[0, 0].item() == pytest.approx(1.0, abs=1e-15)
    # An update that is left out is not counted.
    kept = corrections.clone()
    correct_for_update(corrections, 0.5, 0.5, torch.tensor(1.0))
    assert torch.equal(corrections, kept)
    correct_for_update(corrections[2], 0.5, 0.5, torch.tensor(0.0))
    assert torch.equal(corrections[:2], kept[:2]) and corrections[2].tolist() == (kept[2] * 0.5 + 0.5).tolist()


def exact(steps: list[int], rule: str, product: bool = True, lr: float = 0.01) -> nn.Module:
    """AdamW in float64 over these batch sizes, from the papers' formulas. product: of the bias correction."""
    net, (x, y) = network().double(), problem(4096)
    sampler, cursor = EpochSampler(len(x), 0), 0
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()]
    products = [1.0, 1.0]
    for t, size in enumerate(steps, 1):
        k = size / steps[0]
        betas = (1 - k * 0.1, 1 - k * 0.001) if rule == "malladi" else (0.9, 0.999**k)
        eps = 1e-8 / math.sqrt(k) if rule == "malladi" else 1e-8
        products = [before * beta for before, beta in zip(products, betas, strict=True)]
        weights = products if product else [beta**t for beta in betas]
        indices = torch.from_numpy(sampler.indices(0, cursor, size))
        cursor += size
        gradients = torch.autograd.grad(F.cross_entropy(net(x[indices].double()), y[indices]), list(net.parameters()))
        rate = lr * math.sqrt(k)
        with torch.no_grad():
            for p, g, (m, v) in zip(net.parameters(), gradients, state, strict=True):
                m.mul_(betas[0]).add_((1 - betas[0]) * g)
                v.mul_(betas[1]).add_((1 - betas[1]) * g * g)
                p.mul_(1 - rate * 0.01)
                p.sub_(rate * (m / (1 - weights[0])) / ((v / (1 - weights[1])).sqrt() + eps))
    return net


def distance(net: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter."""
    return max((p.double() - q).abs().max().item() for p, q in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("rule", ["malladi", "marek"])
@pytest.mark.parametrize("sizes", [{2: 64}, {2: 64, 20: 4}, {10: 2}], ids=str)
def test_training_follows_the_recursion_in_float64(rule: Any, sizes: dict[int, int]) -> None:
    net, policy = network(), Sizes(sizes)
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    kf.fit(net, problem(4096), opt, kf.Hook(policy), steps=40, micro_batch=2, lr_betas=rule, **LIMITS)
    steps = [signals.batch_size for signals in policy.seen]
    assert len(steps) == 40 and set(steps) == {8, *sizes.values()}
    assert distance(net, exact(steps, rule)) < 2e-5
    assert distance(net, exact(steps, rule, product=False)) > 1e-3  # by 1 - beta^t it is another training
    assert opt.param_groups[0]["betas"] == (0.9, 0.999) and opt.param_groups[0]["eps"] == 1e-8  # the user's
    assert opt.batch_betas is None  # what the user does next is theirs


def test_without_a_change_of_the_batch_the_bits_are_those_of_keep() -> None:
    def train(**options: Any) -> str:
        net = network()
        kf.fit(net, problem(), kf.FusedAdamW(net.parameters(), lr=0.01), steps=12, **options, **LIMITS)
        return params_sha256(net)

    assert train() == train(lr_betas="malladi") == train(lr_betas="marek") == train(lr_betas="keep")


@pytest.mark.parametrize("at", [7, 12, 20])
@pytest.mark.parametrize("rule", ["malladi", "marek"])
def test_a_resumed_training_has_the_bits_of_one_that_was_not_interrupted(rule: Any, at: int, tmp_path: Path) -> None:
    """In the middle of the warm-up after a change, and before and after it."""

    def train(steps: int, **where: Any) -> str:
        net = network()
        opt = kf.FusedAdamW(net.parameters(), lr=0.01)
        options: dict[str, Any] = {"change_warmup_steps": 100, "lr_betas": rule, "micro_batch": 2, **LIMITS, **where}
        kf.fit(net, problem(4096), opt, kf.Hook(Sizes({2: 64, 12: 16})), steps=steps, **options)
        return params_sha256(net)

    whole = train(30)
    train(at, checkpoint=tmp_path, save_model=False)
    assert train(30, checkpoint=tmp_path, resume="auto", save_model=False) == whole


def fit_with(opt: Any, net: nn.Module, **options: Any) -> None:
    kf.fit(net, problem(), opt, steps=1, **{**LIMITS, **options})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda net: kf.FusedSGD(net.parameters(), lr=0.1), "FusedSGD"),
        (lambda net: kf.FusedLAMB(net.parameters()), "FusedLAMB"),
        (lambda net: kf.Optimizer(torch.optim.AdamW(net.parameters())), "AdamW"),
    ],
)
def test_other_optimizers_refuse(make: Any, name: str) -> None:
    net = network()
    with pytest.raises(ValueError, match=rf"^lr_betas=marek: must be keep with {name}; kf.FusedAdamW alone takes it$"):
        fit_with(make(net), net, lr_betas="marek")
    with pytest.raises(ValueError, match=rf"^lr_betas=marek: must be keep with {name};"):
        kf.DataLoader(problem(), net, make(net), lr_betas="marek", **LIMITS)


def test_what_malladis_rule_does_not_cover_is_refused() -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters())
    with pytest.raises(ValueError, match=r"^lr_betas=malladi: must be keep or marek with lr_scaling=linear"):
        fit_with(opt, net, lr_betas="malladi", lr_scaling="linear")
    with pytest.raises(ValueError, match=r"^max_batch_size=81: must be at most 80 with lr_betas=malladi"):
        fit_with(opt, net, lr_betas="malladi", max_batch_size=81)
    fit_with(opt, net, lr_betas="malladi", max_batch_size=80)
    with pytest.raises(ValueError, match=r"^lr_betas=half: must be one of keep, malladi, marek$"):
        fit_with(opt, net, lr_betas="half")
    assert largest_batch("malladi", [(0.9, 0.999), (0.95, 0.8)], 32) == 160
    assert largest_batch("marek", [(0.9, 0.999)], 32) == math.inf


def test_keep_is_no_rule() -> None:
    with pytest.raises(ValueError, match=r"^scaling=keep: must be one of malladi, marek$"):
        scaled_betas("keep", 0.9, 0.999, 2.0)  # type: ignore[arg-type]
