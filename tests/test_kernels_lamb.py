"""`lamb` agrees with You et al.'s algorithm 2, written out in float64.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED, normal, rounded, scalar
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import CHUNK, AdamOptions, PackTable, lamb

EXAMPLES = 8 if INTERPRETED else 40
SENTINEL = -77.0
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-6,
    "weight_decay": 0.1,
    "maximize": False,
    "grad_scale": None,
    "found_inf": None,
}

pytestmark = pytest.mark.parametrize("device", DEVICES)


def update_lamb(*flats: Any, step: Tensor, grad_scale: Any, found_inf: Any, **options: Any) -> None:
    lamb(*flats, AdamOptions(**options), step=step, grad_scale=grad_scale, found_inf=found_inf)


def build(numels: list[int], device: str, gap: int = 16) -> PackTable:
    offsets, end = [], gap
    for numel in numels:
        offsets.append(end)
        end += numel + gap
    return PackTable.build(numels, offsets, torch.device(device))


def oracle(p: Tensor, grads: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's algorithm on one tensor, in float64: parameter, first and second moment after these gradients."""
    p, m, v = p.double(), torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)
    for t, given_grad in enumerate(grads, start=1):
        g = given_grad.double() * (1.0 if options["grad_scale"] is None else options["grad_scale"].item())
        g = -g if options["maximize"] else g
        m = options["beta1"] * m + (1 - options["beta1"]) * g
        v = options["beta2"] * v + (1 - options["beta2"]) * g * g
        r = (m / (1 - options["beta1"] ** t)) / ((v / (1 - options["beta2"] ** t)).sqrt() + options["eps"])
        u = r + options["weight_decay"] * p
        ratio = (p.norm() / u.norm()).item() if p.norm() > 0 and u.norm() > 0 else 1.0
        p = p - options["lr"] * ratio * u
    return p, m, v


def train(table: PackTable, params: list[Tensor], grads: list[list[Tensor]], options: dict[str, Any]) -> list[Tensor]:
    """Flat parameter and moments after steps with `grads[step][tensor]`."""
    device = params[0].device
    flats = [torch.full((table.end + 5,), SENTINEL, device=device) for _ in range(3)]
    places = [slice(offset, offset + numel) for offset, numel in zip(table.offsets, table.numels, strict=True)]
    for place, p in zip(places, params, strict=True):
        flats[0][place] = p
        flats[1][place] = flats[2][place] = 0.0
    for t, step_grads in enumerate(grads, start=1):
        grad = torch.full((table.end + 5,), SENTINEL, device=device, dtype=step_grads[0].dtype)
        for place, g in zip(places, step_grads, strict=True):
            grad[place] = g
        update_lamb(flats[0], grad, flats[1], flats[2], table, step=scalar(t, str(device)), **options)
    return flats


def assert_matches(table: PackTable, flats: list[Tensor], expected: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    touched = torch.zeros(flats[0].numel(), dtype=torch.bool, device=flats[0].device)
    for offset, numel, exact in zip(table.offsets, table.numels, expected, strict=True):
        touched[offset : offset + numel] = True
        for flat, value in zip(flats, exact, strict=True):
            torch.testing.assert_close(flat[offset : offset + numel].double(), value, rtol=5e-6, atol=1e-6)
    assert all((flat[~touched] == SENTINEL).all() for flat in flats)


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
def test_matches_the_paper(device: str, changed: dict[str, Any]) -> None:
    numels = [1, 100, 0, 2 * CHUNK + 37, CHUNK]
    tensors = {key: scalar(changed[key], device) for key in ("grad_scale", "found_inf") if key in changed}
    options = OPTIONS | changed | tensors
    table = build(numels, device)
    params = [(i + 1) * normal(numel, i, device) for i, numel in enumerate(numels)]
    grads = [[normal(numel, 10 * t + i, device) for i, numel in enumerate(numels)] for t in range(3)]
    expected = [oracle(p, [step[i] for step in grads], options) for i, p in enumerate(params)]
    assert_matches(table, train(table, params, grads, options), expected)


@settings(max_examples=EXAMPLES)
@given(
    numels=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4),
    gap=st.integers(0, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_layout_and_gradient_dtype(device: str, numels: list[int], gap: int, dtype: torch.dtype) -> None:
    table = build(numels, device, gap)
    params = [normal(numel, i, device) for i, numel in enumerate(numels)]
    grads = [[normal(numel, 9 + i, device).to(dtype) for i, numel in enumerate(numels)]]
    expected = [oracle(p, [g], OPTIONS) for p, g in zip(params, grads[0], strict=True)]
    assert_matches(table, train(table, params, grads, OPTIONS), expected)


def test_a_tensor_of_zeros_moves_by_the_plain_update(device: str) -> None:
    table = build([40, 40], device)
    zeros, ones = torch.zeros(40, device=device), torch.ones(40, device=device)
    # p = 0: the ratio is 1, and Adam's first update is the sign. u = 0: nothing to move by.
    flats = train(table, [zeros, ones], [[3.0 * ones, zeros]], OPTIONS | {"weight_decay": 0.0, "eps": 0.0, "lr": 0.5})
    torch.testing.assert_close(flats[0][16:56], torch.full_like(zeros, -0.5))
    nothing = train(table, [zeros, ones], [[zeros, zeros]], OPTIONS | {"weight_decay": 0.0})
    assert torch.equal(nothing[0][72:112], ones)


def test_found_inf_leaves_everything_untouched(device: str) -> None:
    table = build([CHUNK + 9], device)
    flats = [normal(table.end, seed, device).abs() for seed in range(4)]
    before = [flat.clone() for flat in flats]
    options = OPTIONS | {"found_inf": scalar(math.nan, device), "grad_scale": scalar(math.inf, device)}
    update_lamb(*flats, table, step=scalar(1, device), **options)
    assert all(torch.equal(a, b) for a, b in zip(flats, before, strict=True))


def test_non_finite_stays_in_its_tensor(device: str) -> None:
    table = build([50, CHUNK + 3], device)
    grads = [normal(50, 1, device), normal(CHUNK + 3, 2, device)]
    grads[1][7] = math.nan
    param = train(table, [normal(50, 3, device), normal(CHUNK + 3, 4, device)], [grads], OPTIONS)[0]
    assert param[16:66].isfinite().all() and param[82 : 82 + CHUNK + 3].isnan().all()


def test_bits_belong_to_the_tensor(device: str) -> None:
    """Neither neighbours, nor the place in the bucket, nor the number of threads, nor repetition changes them."""
    p, g = normal(CHUNK + 21, 0, device), normal(CHUNK + 21, 1, device)
    other = normal(100, 2, device)
    results = []
    for count, before, gap in ((1, 0, 16), (2, 1, 16), (3, 2, 5), (1, 3, 0), (1, 0, 16)):
        torch.set_num_threads(count)
        table = build([100] * before + [CHUNK + 21], device, gap)
        flat = train(table, [other] * before + [p], [[other] * before + [g]], OPTIONS)[0]
        results.append(flat[table.offsets[-1] : table.end])
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_errors_name_what_is_wrong(device: str) -> None:
    table, good, options = (
        build([10], device, 0),
        torch.zeros(10, device=device),
        AdamOptions(0.1, 0.9, 0.99, 1e-6, 0.0),
    )
    for flats, master, said in (
        ((good, good[:9], good, good), None, r"grad is \[9\], the table needs \[10\] or more"),
        ((good, good, good.bfloat16(), good), None, r"exp_avg is torch\.bfloat16, must be torch\.float32$"),
        ((good, good.long(), good, good), None, r"grad is torch\.int64, must be torch\.float32 or 16-bit"),
        ((good.bfloat16(), good, good, good), None, r"param is torch\.bfloat16, must be torch\.float32"),
        ((good.bfloat16(), good, good, good), good[:4], r"master is \[4\], param \[10\]: must be the same"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            lamb(*flats, table, options, step=scalar(1.0, device), master=master)


def test_master_weights_are_those_of_fp32_parameters(device: str) -> None:
    """A 16-bit parameter has its master's rounded values; elements that were changed meanwhile replace the master's."""
    numels, dtype = [1, 100, 0, CHUNK + 37], torch.bfloat16
    table = build(numels, device)
    plain = [normal(table.end, 0, device), torch.zeros(table.end, device=device), torch.zeros(table.end, device=device)]
    master, m, v = (flat.clone() for flat in plain)
    param = rounded(master, dtype)
    changed = slice(table.offsets[1], table.offsets[1] + 10)
    for t in (1, 2, 3):
        if t == 3:
            param[changed] *= 2
            plain[0][changed] = param[changed].float()
        grad = normal(table.end, t, device).to(dtype)
        update_lamb(plain[0], grad.clone(), *plain[1:], table, step=scalar(t, device), **OPTIONS)
        options = {name: value for name, value in OPTIONS.items() if name not in ("grad_scale", "found_inf")}
        lamb(param, grad, m, v, table, AdamOptions(**options), step=scalar(t, device), master=master)
    assert all(torch.equal(one, two) for one, two in zip(plain, (master, m, v), strict=True))
    assert torch.equal(param, rounded(master, dtype))
