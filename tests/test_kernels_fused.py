"""Updates that keep fp32 master weights for 16-bit parameters have the bits of updates of fp32 parameters.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED, normal, rounded, scalar
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import AdamOptions, SGDOptions, adamw, sgd

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 5 if INTERPRETED else 60

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("name", ["adamw", "sgd", "sgd without momentum"]),
]


def updater(name: str, device: str) -> Callable[..., None]:
    """update(param, grad, moment, second_moment, step number, **more)"""
    if name == "adamw":
        adam = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)

        def update(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, **more: Any) -> None:
            adamw(param, grad, m, v, adam, step=scalar(t, device), **more)

    else:
        momentum = 0.9 * (name == "sgd")
        options = SGDOptions(lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=name == "sgd")

        def update(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, t: int, **more: Any) -> None:
            sgd(param, grad, m if momentum else None, options, first_step=t == 1 and bool(momentum), **more)

    return update


@settings(max_examples=EXAMPLES)
@given(
    numel=st.integers(1, 5000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    grad_dtype=st.sampled_from(DTYPES),
)
def test_master_weights_are_those_of_fp32_parameters(
    device: str, name: str, numel: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    update = updater(name, device)
    plain = [normal(numel, seed=seed, device=device).abs() for seed in range(3)]
    master, m, v = (tensor.clone() for tensor in plain)
    param = rounded(master, dtype)
    for t in (1, 2):
        grad = normal(numel, seed=10 + t, device=device).to(grad_dtype)
        update(plain[0], grad.clone(), *plain[1:], t)
        update(param, grad.clone(), m, v, t, master=master)
    assert all(torch.equal(one, two) for one, two in zip(plain, (master, m, v), strict=True))
    assert torch.equal(param, rounded(master, dtype))


def test_a_changed_parameter_replaces_its_master(device: str, name: str) -> None:
    """The rest keeps the master's own bits."""
    update, dtype = updater(name, device), torch.bfloat16
    master, m, v = (normal(100, seed=seed, device=device).abs() for seed in range(3))
    param = rounded(master, dtype)
    param[10:20] *= 2
    plain = [torch.where(torch.arange(100, device=device) // 10 == 1, param.float(), master), m.clone(), v.clone()]
    grad = normal(100, seed=9, device=device)
    update(plain[0], grad.clone(), *plain[1:], 1)
    update(param, grad.clone(), m, v, 1, master=master)
    assert all(torch.equal(one, two) for one, two in zip(plain, (master, m, v), strict=True))
    assert torch.equal(param, rounded(master, dtype))


def test_skipped_update_touches_nothing(device: str, name: str) -> None:
    tensors = [normal(50, seed=seed, device=device).abs() for seed in range(4)]
    param = torch.ones(50, dtype=torch.bfloat16, device=device)
    before = [tensor.clone() for tensor in (*tensors, param)]
    grad = torch.full((50,), math.nan, device=device)
    updater(name, device)(param, grad, *tensors[:2], 1, master=tensors[2], found_inf=scalar(1.0, device))
    assert all(torch.equal(a, b) for a, b in zip((*tensors, param), before, strict=True))


def test_errors_name_what_is_wrong(device: str, name: str) -> None:
    update, good = updater(name, device), torch.zeros(4, device=device)
    with pytest.raises(ValueError, match=r"got \[3\] and \[4\]"):
        update(good, good[:3], good, good, 1)
    with pytest.raises(ValueError, match=r"master is \[3\], param \[4\]"):
        update(good, good, good, good, 1, master=good[:3])
    with pytest.raises(TypeError, match=r"master is torch\.float16, must be torch\.float32"):
        update(good, good, good, good, 1, master=good.half())
