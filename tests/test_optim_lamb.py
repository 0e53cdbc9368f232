"""On one worker kf.FusedLAMB makes the updates of the paper's algorithm, written as a plain float64 optimizer."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfuse as kf
from kfuse.session import reset


class PlainLAMB(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, a tensor at a time; gradients of all tensors clipped to a norm first."""

    def __init__(self, params: Any, clip_norm: float = math.inf, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01} | options)
        self.clip_norm = clip_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(p.grad.square().sum().item() for p, _ in pairs))
        for p, group in pairs:
            state, (beta1, beta2) = self.state[p], group["betas"]
            g = p.grad * min(1.0, self.clip_norm / (norm + 1e-6))
            state["t"] = state.get("t", 0) + 1
            state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
            state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
            m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
            u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
            ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
            p -= group["lr"] * ratio * u


class Net(nn.Module):
    """Two layers (biases start at zero), a scalar, and a layer used only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(6, 90), nn.Linear(90, 6), nn.Linear(6, 6, bias=False)
        nn.init.zeros_(self.first.bias)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.use_extra = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.gain * self.second(torch.tanh(self.first(x)))
        return out + self.extra(x) if self.use_extra else out


def twins() -> tuple[Net, Net]:
    torch.manual_seed(7)
    net = Net()
    return net, copy.deepcopy(net).double()


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 6, generator=generator)
        yield x, x.roll(1, 1).tanh() + 0.1 * torch.randn(16, 6, generator=generator)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    dtype = next(net.parameters()).dtype
    for x, y in itertools.islice(batches(seed), steps):
        F.mse_loss(net(x.to(dtype)), y.to(dtype)).backward()
        opt.step()
        opt.zero_grad()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def groups(net: Net, *options: dict[str, Any]) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[k :: len(options)], **option} for k, option in enumerate(options)]


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_matches_the_paper_with_several_groups(clip_norm: float | None) -> None:
    ours, theirs = twins()
    options = [
        {"lr": 0.02},
        {"lr": 0.01, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"lr": 0.03, "weight_decay": 0.2, "eps": 1e-3},
    ]
    train(ours, kf.FusedLAMB(groups(ours, *options), clip_norm=clip_norm), 30)
    train(theirs, PlainLAMB(groups(theirs, *options), clip_norm=clip_norm or math.inf), 30)
    assert_same(ours, theirs)


def test_parameters_without_a_gradient_are_left_alone_and_catch_up() -> None:
    ours, theirs = twins()
    opt, plain = kf.FusedLAMB(ours.parameters(), lr=0.02), PlainLAMB(theirs.parameters(), lr=0.02)
    before = ours.extra.weight.clone()
    train(ours, opt, 4)
    assert torch.equal(ours.extra.weight, before) and ours.extra.weight not in opt.state
    train(theirs, plain, 4)
    ours.use_extra = theirs.use_extra = True
    train(ours, opt, 4, seed=1)
    train(theirs, plain, 4, seed=1)
    assert opt.state[ours.extra.weight]["step"] == 4 and opt.state[ours.gain]["step"] == 8
    assert_same(ours, theirs)


def test_state_dict_resumes_bitwise() -> None:
    ours, _ = twins()
    opt = kf.FusedLAMB(ours.parameters(), lr=0.02)
    train(ours, opt, 5)
    copied = copy.deepcopy(ours)
    saved = copy.deepcopy(opt.state_dict())
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq", "step"}
    assert saved["state"][0]["exp_avg"].shape == ours.gain.shape
    train(ours, opt, 5, seed=1)
    reset()
    resumed = kf.FusedLAMB(copied.parameters(), lr=0.5)
    resumed.load_state_dict(saved)
    train(copied, resumed, 5, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), copied.parameters(), strict=True))


def test_skip_nonfinite_leaves_the_step_out() -> None:
    ours, theirs = twins()
    opt, plain = kf.FusedLAMB(ours.parameters(), lr=0.02), PlainLAMB(theirs.parameters(), lr=0.02)
    for k, (x, y) in enumerate(itertools.islice(batches(), 6)):
        bad = k in (0, 3)
        (F.mse_loss(ours(x), y) * (math.nan if bad else 1.0)).backward()
        opt.step()
        opt.zero_grad()
        assert opt.stats is not None and opt.stats.skipped == bad
        if not bad:
            F.mse_loss(theirs(x.double()), y.double()).backward()
            plain.step()
            plain.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, r"lr=-1\.0: must be 0 or more"),
        ({"eps": math.nan}, "eps=nan: must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\): each must be in \[0, 1\)"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kf.FusedLAMB(Net().parameters(), **options)
