"""The curvature along the update, against Hessians in float64 and closed forms."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import Seen
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfuse as kf
from kfuse.data import EpochSampler
from kfuse.models import GPT, MLP
from kfuse.train.curvature import Curvature
from kfuse.train.progress import Progress

SIZE, MICRO = 48, 8


def problem(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "gpt":
        tokens = (torch.randint(16, (96, 1), generator=generator) + torch.arange(9)) % 16
        return GPT(16, 8, layers=1, heads=2, width=16, dropout=0.0), (tokens[:, :-1], tokens[:, 1:])
    x = torch.randn(96, 6, generator=generator)
    return MLP((6,), 4, hidden=() if name == "regression" else (8,)), (x, x[:, :4].argmax(1))


def fitted(name: str, kind: Any, steps: int, every: int | None) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """The newest signals, and what is trained."""
    model, data = problem(name)
    opt, policy = kind(model.parameters(), lr=0.01), Seen()
    kf.fit(
        model, data, opt, policy, batch_size=SIZE, micro_batch=MICRO, steps=steps, seed=3,
        statistics_curvature_every=every,
    )  # fmt: skip
    return policy.signals[-1] if policy.signals else None, model, opt


def by_double_backward(
    model: nn.Module, opt: torch.optim.Optimizer, step: int, data: tuple[Tensor, Tensor]
) -> list[float]:
    """Mean slope, curvature, spread and length over the pairs of the step's micro-batches, in float64."""
    exact = copy.deepcopy(model).double()
    params, scales = list(exact.parameters()), []
    for group, p in [(each, p) for each in opt.param_groups for p in each["params"]]:
        scales.append(torch.full_like(p, group["lr"] / 0.01, dtype=torch.float64))
        if (state := opt.state.get(p)) and "betas" in group:
            moments = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"].double()
            scales[-1] /= (moments / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
    order = EpochSampler(96, 3).indices(step * SIZE // 96, step * SIZE % 96, SIZE).reshape(-1, MICRO)

    def gradients(which: np.ndarray) -> list[Tensor]:
        x, y = (each[torch.from_numpy(which.flatten())] for each in data)
        with sdpa_kernel(SDPBackend.MATH):
            out = exact(x.double() if x.is_floating_point() else x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        return list(torch.autograd.grad(loss, params, create_graph=True))

    found = []
    for k in range(0, len(order), 2):
        i, j = order[k], order[k + 1]
        u = [(g * s).detach() for g, s in zip(gradients(i), scales, strict=True)]
        along = sum((g * v).sum() for g, v in zip(gradients(j), u, strict=True))
        h = torch.autograd.grad(along, params)
        rest = [g.detach() for g in gradients(np.delete(order, [k, k + 1], 0))]

        def dot(a: Any, b: Any) -> float:
            return sum(float((v * w).sum()) for v, w in zip(a, b, strict=True))

        scaled = [g * s for g, s in zip(rest, scales, strict=True)]
        curvature = dot(scaled, h)
        found.append((dot(u, rest), curvature, MICRO * (dot(u, h) - curvature), dot(u, scaled)))
    return np.mean(found, 0).tolist()


def amsgrad_in_groups(params: Iterable[nn.Parameter], lr: float) -> kf.Optimizer:
    first, *others = params
    return kf.Optimizer(torch.optim.AdamW([{"params": [first]}, {"params": others, "lr": lr / 4}], lr, amsgrad=True))


@pytest.mark.parametrize("name", ["regression", "gpt"])
@pytest.mark.parametrize(("kind", "before"), [(kf.FusedSGD, 0), (kf.FusedAdamW, 4), (amsgrad_in_groups, 4)])
def test_it_is_that_of_double_backward_along_the_update(
    name: str, kind: Any, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam has no second moments in step 0."""
    found: list[float] = []
    take = Curvature.take
    monkeypatch.setattr(
        Curvature, "take", lambda self, step: (found.extend((self._found or (0, ()))[1]), take(self, step))
    )
    seen, _, _ = fitted(name, kind, before + 1, 4)
    _, model, opt = fitted(name, kind, before, None) if before else (None, *_fresh(name, kind))
    slope, curvature, spread, length = by_double_backward(model, opt, before, problem(name)[1])
    assert found[:4] == pytest.approx([slope, curvature, spread, length], rel=5e-3)
    assert seen.best_lr == (pytest.approx(slope / curvature, rel=5e-3) if min(slope, curvature) > 0 else None)


def _fresh(name: str, kind: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = problem(name)
    return model, kind(model.parameters(), lr=0.01)


def test_its_means_are_those_of_the_quadratic_model() -> None:
    """loss = sum_k h_k (x_k - e_k)^2 / 2 with e_k ~ N(0, 1): G'HG = sum h^3 x^2, tr(H Sigma) = sum h^3."""
    h = 1 / torch.arange(1.0, 9.0)

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.full((8,), 0.5))

        def forward(self, e: Tensor) -> Tensor:
            return (h * (self.x - e) ** 2).sum(1) / 2

    torch.manual_seed(0)
    data, model, policy = (torch.randn(20_000, 8), torch.zeros(20_000)), Point(), Seen()
    kf.fit(
        model, data, kf.FusedSGD(model.parameters(), lr=0.0), policy, batch_size=20_000, micro_batch=4, steps=2,
        loss_fn=lambda out, _: out.mean(), statistics_curvature_every=1, epochs=None,
    )  # fmt: skip
    seen, squares, cubes = policy.signals[-1], float((h**2).sum()), float((h**3).sum())
    figures = [seen.curvature, seen.curvature_noise_scale, seen.best_lr]
    assert figures == pytest.approx([cubes / squares, 4.0, squares / cubes], rel=0.05)


def test_its_means_follow_an_update_that_has_become_shorter() -> None:
    """P G falls to a thousandth: plain running means would be the first measurement for long."""
    made: Any = SimpleNamespace(progress=Progress(batch_size=1))
    for step in range(40):
        found = (1.0, -5.0, 1.0, 1.0, 2.0) if step < 2 else (4e-6, 2e-6, 6e-6, 1e-6, 2e-6)
        made._found = step, list(found)
        Curvature.take(made, step)
    expected = {"curvature_noise_scale": 3, "best_lr": 2, "curvature": 2}
    assert made.progress.curvature_figures() == pytest.approx(expected, rel=0.2)


def _with_dropout(every: int | None) -> tuple[Any, Any]:
    kf.init(comm_reproducible=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
    opt, policy = kf.FusedAdamW(model.parameters(), lr=0.01), Seen()
    kf.fit(
        model, problem("mlp")[1], opt, policy, batch_size=SIZE, micro_batch=MICRO, steps=9, seed=3,
        statistics_curvature_every=every,
    )  # fmt: skip
    seen = [(each.curvature, each.curvature_noise_scale, each.best_lr) for each in policy.signals]
    return seen, [value.tolist() for value in model.state_dict().values()]


def test_any_number_of_workers_has_its_bits_and_training_is_as_without() -> None:
    two, again = run_workers(2, _with_dropout, 4)
    assert two == again == _with_dropout(4)
    known = [curvature for curvature, *_ in two[0]]
    assert known[:4] == [None] * 4 and len({*known[4:]}) == 2, "at step 0 there are no second moments"
    assert two[1] == _with_dropout(None)[1]
