"""`adamw` and `sgd` agree with PyTorch's optimizers in float64.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from devices import DEVICES, normal, scalar
from torch import Tensor

from kfuse.kernels import AdamOptions, SGDOptions, adamw, sgd

STEPS = 4
ADAMW: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
    "grad_scale": None,
    "found_inf": None,
}
SGD: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.01,
    "nesterov": False,
    "maximize": False,
    "grad_scale": None,
    "found_inf": None,
}

pytestmark = pytest.mark.parametrize("device", DEVICES)


def update_adamw(*flats: Tensor, step: Tensor, grad_scale: Any, found_inf: Any, **options: Any) -> None:
    adamw(*flats, AdamOptions(**options), step=step, grad_scale=grad_scale, found_inf=found_inf)  # type: ignore[misc]


def update_sgd(*flats: Any, first_step: bool, grad_scale: Any, found_inf: Any, **options: Any) -> None:
    sgd(*flats, SGDOptions(**options), first_step=first_step, grad_scale=grad_scale, found_inf=found_inf)  # type: ignore[misc]


def train_adamw(numel: int, device: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    param = normal(numel, 0, device)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    for step in range(1, STEPS + 1):
        grad = normal(numel, step, device)
        update_adamw(param, grad, exp_avg, exp_avg_sq, step=scalar(step, device), **options)
    return param, exp_avg, exp_avg_sq


def train_sgd(numel: int, device: str, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    param = normal(numel, 0, device)
    buffer = torch.full_like(param, math.nan) if options["momentum"] else None
    for step in range(1, STEPS + 1):
        update_sgd(param, normal(numel, step, device), buffer, first_step=step == 1, **options)
    return param, buffer


def train_oracle(numel: int, device: str, optimizer: type[torch.optim.Optimizer], scale: float, **options: Any) -> Any:
    """The same steps by PyTorch, in float64; returns the parameter and its optimizer state."""
    param = normal(numel, 0, device).double().requires_grad_()
    opt = optimizer([param], foreach=False, **options)
    for step in range(1, STEPS + 1):
        param.grad = normal(numel, step, device).double() * scale
        opt.step()
    return param.detach(), opt.state[param]


def assert_near(actual: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"beta1": 0.0},
        {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
        {"grad_scale": 0.25},
        {"found_inf": 0.0, "grad_scale": 1.0},
    ],
    ids=str,
)
def test_adamw_matches_torch(device: str, changed: dict[str, Any]) -> None:
    numel = 5003
    tensors = {key: scalar(changed[key], device) for key in ("grad_scale", "found_inf") if key in changed}
    options = ADAMW | changed | tensors
    param, exp_avg, exp_avg_sq = train_adamw(numel, device, options)
    exact, state = train_oracle(
        numel,
        device,
        torch.optim.AdamW,
        changed.get("grad_scale", 1.0),
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        maximize=options["maximize"],
    )
    assert_near(param, exact)
    assert_near(exp_avg, state["exp_avg"])
    assert_near(exp_avg_sq, state["exp_avg_sq"])


def test_adamw_bias_correction_at_any_step(device: str) -> None:
    # From zero moments, the update is lr * (1 - beta1) / (1 - beta1^t) * sqrt((1 - beta2^t) / (1 - beta2)).
    options = ADAMW | {"eps": 0.0, "weight_decay": 0.0, "lr": 1.0}
    for step in (1, 1000, 1_000_000):
        param, *moments = torch.zeros(3, 16, device=device)
        update_adamw(param, torch.full((16,), 3.0, device=device), *moments, step=scalar(step, device), **options)
        expected = -0.1 / (1 - 0.9**step) * math.sqrt((1 - 0.999**step) / 0.001)
        torch.testing.assert_close(param, torch.full_like(param, expected), rtol=2e-6, atol=0.0)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"momentum": 0.0},
        {"nesterov": True},
        {"dampening": 0.3},
        {"weight_decay": 0.0, "maximize": True},
        {"momentum": 0.0, "maximize": True},
        {"grad_scale": 0.25},
        {"found_inf": 0.0, "grad_scale": 1.0},
    ],
    ids=str,
)
def test_sgd_matches_torch(device: str, changed: dict[str, Any]) -> None:
    numel = 5003
    tensors = {key: scalar(changed[key], device) for key in ("grad_scale", "found_inf") if key in changed}
    options = SGD | changed | tensors
    param, buffer = train_sgd(numel, device, options)
    own = {key: value for key, value in options.items() if key not in ("grad_scale", "found_inf")}
    exact, state = train_oracle(numel, device, torch.optim.SGD, changed.get("grad_scale", 1.0), **own)
    assert_near(param, exact)
    if buffer is not None:
        assert_near(buffer, state["momentum_buffer"])


@pytest.mark.parametrize("found_inf", [3.0, math.nan])
def test_found_inf_leaves_everything_untouched(device: str, found_inf: float) -> None:
    bad = scalar(found_inf, device)
    tensors = [normal(50, seed, device).abs() for seed in range(4)]
    before = [tensor.clone() for tensor in tensors]
    options = ADAMW | {"found_inf": bad, "grad_scale": scalar(math.inf, device)}
    update_adamw(*tensors, step=scalar(1, device), **options)
    update_sgd(tensors[0], tensors[1], tensors[2], first_step=True, **(SGD | {"found_inf": bad}))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_zero_grad_scale_takes_no_gradient(device: str) -> None:
    param = normal(50, 0, device)
    expected = param.clone()
    options = SGD | {"momentum": 0.0, "weight_decay": 0.0, "grad_scale": scalar(0.0, device)}
    update_sgd(param, normal(50, 1, device), None, first_step=False, **options)
    assert torch.equal(param, expected)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bits_do_not_depend_on_slices_or_threads(device: str, name: str) -> None:
    def step(bounds: list[int]) -> list[Tensor]:
        tensors = [normal(5003, seed, device).abs() for seed in range(4)]
        for start, stop in pairwise(bounds):
            part = [tensor[start:stop] for tensor in tensors]
            scale = scalar(0.37, device)
            if name == "adamw":
                update_adamw(*part, step=scalar(3, device), **(ADAMW | {"grad_scale": scale}))
            else:
                update_sgd(*part[:3], first_step=False, **(SGD | {"grad_scale": scale, "nesterov": True}))
        del tensors[1]  # the gradient's content is unspecified
        return tensors

    whole = step([0, 5003])
    for count, bounds in ((2, [0, 5003]), (1, [0, 1600, 4800, 5003]), (3, [0, 16, 4992, 5003])):
        torch.set_num_threads(count)
        assert all(torch.equal(a, b) for a, b in zip(whole, step(bounds), strict=True))


def test_non_finite_gradient_stays_in_its_element(device: str) -> None:
    param, grad, exp_avg, exp_avg_sq = (normal(64, seed, device).abs() for seed in range(4))
    grad[5] = math.nan
    update_adamw(param, grad, exp_avg, exp_avg_sq, step=scalar(1, device), **ADAMW)
    assert param.isnan().nonzero().flatten().tolist() == [5]


def test_gradient_of_another_dtype(device: str) -> None:
    grad = normal(40, 1, device).bfloat16()
    results = []
    for given in (grad.clone(), grad.float()):
        param, exp_avg, exp_avg_sq = (torch.ones(40, device=device) for _ in range(3))
        update_adamw(param, given, exp_avg, exp_avg_sq, step=scalar(1, device), **ADAMW)
        update_sgd(param, given, None, first_step=False, **(SGD | {"momentum": 0.0}))
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-6, atol=0.0)


def test_sgd_refuses_a_missing_or_needless_buffer(device: str) -> None:
    param = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"momentum is 0\.9, so momentum_buffer must be given"):
        update_sgd(param, param.clone(), None, first_step=True, **SGD)
    with pytest.raises(ValueError, match=r"momentum is 0\.0, so momentum_buffer must not be given"):
        update_sgd(param, param.clone(), param.clone(), first_step=True, **(SGD | {"momentum": 0.0}))
