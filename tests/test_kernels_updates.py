"""`adamw`, `sgd` and `lamb` agree with float64: PyTorch's optimizers, and You et al.'s algorithm 2 written out.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED, normal, rounded, scalar
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.kernels import CHUNK, AdamOptions, PackTable, SGDOptions, adamw, lamb, sgd

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 5 if INTERPRETED else 40
STEPS = 3
SENTINEL = -77.0
ADAM: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "lamb": ADAM,
    "sgd": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01},
    "sgd without momentum": {"lr": 0.1, "weight_decay": 0.01},
}
OF_ADAM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "maximize": True},
    {"beta1": 0.0},
    {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3},
    {"beta1": 0.9**0.5, "beta2": 0.999**0.5, "batch_factor": 2.0},
]
OF_SGD: list[dict[str, Any]] = [{}, {"nesterov": True}, {"dampening": 0.3}, {"weight_decay": 0.0, "maximize": True}]
CASES = [
    *((name, changed) for name in ("adamw", "lamb") for changed in OF_ADAM),
    *(("sgd", changed) for changed in OF_SGD),
    ("sgd without momentum", {}),
    ("sgd without momentum", {"maximize": True}),
]

pytestmark = pytest.mark.parametrize("device", DEVICES)
NAMES = pytest.mark.parametrize("name", OPTIONS)


def update(
    name: str, flats: list[Tensor], t: int, changed: Any = (), table: PackTable | None = None, **more: Any
) -> None:
    """Step number t of a kernel. flats: parameter, gradient and two states, of which it takes those that it has."""
    options = OPTIONS[name] | dict(changed)
    device = str(flats[0].device)
    counted = t * options.get("batch_factor", 1)
    if name.startswith("sgd"):
        states = flats[2] if options.get("momentum") else None
        sgd(*flats[:2], states, SGDOptions(**options), first_step=t == 1, **more)
    elif name == "adamw":
        adamw(*flats, AdamOptions(**options), step=scalar(counted, device), **more)  # type: ignore[misc]
    else:
        table = table or PackTable.build([flats[0].numel()], [0], flats[0].device)
        lamb(*flats, table, AdamOptions(**options), step=scalar(counted, device), **more)  # type: ignore[misc]


def oracle(name: str, start: Tensor, grads: list[Tensor], changed: Any = ()) -> list[Tensor]:
    """The parameter and its states after these gradients, in float64."""
    options = OPTIONS[name] | dict(changed)
    batches = options.pop("batch_factor", 1)
    options |= {beta: options[beta] ** batches for beta in ("beta1", "beta2") if beta in options}
    if name == "lamb":
        return lamb_in_float64(start.double(), [grad.double() for grad in grads], options)
    param = start.double().requires_grad_()
    if name == "adamw":
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    opt = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)([param], foreach=False, **options)
    for grad in grads:
        param.grad = grad.double()
        opt.step()
    state = opt.state[param]
    return [param.detach(), *(state[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if key in state)]


def lamb_in_float64(p: Tensor, grads: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, grad in enumerate(grads, start=1):
        g = -grad if options.get("maximize") else grad
        m = options["beta1"] * m + (1 - options["beta1"]) * g
        v = options["beta2"] * v + (1 - options["beta2"]) * g * g
        r = (m / (1 - options["beta1"] ** t)) / ((v / (1 - options["beta2"] ** t)).sqrt() + options["eps"])
        u = r + options["weight_decay"] * p
        ratio = (p.norm() / u.norm()).item() if p.norm() > 0 and u.norm() > 0 else 1.0
        p = p - options["lr"] * ratio * u
    return [p, m, v]


def assert_near(found: list[Tensor], exact: list[Tensor]) -> None:
    for ours, theirs in zip(found, exact, strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=5e-6, atol=1e-6)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "changed"), CASES, ids=str)
def test_matches_float64(device: str, name: str, changed: dict[str, Any]) -> None:
    """With and without a scale of the gradient, which may be of another dtype."""
    for scale, dtype in ((None, torch.float32), (0.25, torch.bfloat16)):
        flats = [normal(5003, 0, device), *(torch.zeros(5003, device=device) for _ in range(3))]
        grads = [normal(5003, t, device).to(dtype) for t in range(1, STEPS + 1)]
        more = {} if scale is None else {"grad_scale": scalar(scale, device), "found_inf": scalar(0.0, device)}
        for t, grad in enumerate(grads, 1):
            flats[1] = grad.clone()
            update(name, flats, t, changed, **more)
        exact = oracle(name, normal(5003, 0, device), [(scale or 1.0) * grad for grad in grads], changed)
        assert_near([flats[0], *flats[2:]], exact)


def test_adamw_bias_correction_at_any_step(device: str) -> None:
    # From zero moments, the update is lr * (1 - beta1) / (1 - beta1^t) * sqrt((1 - beta2^t) / (1 - beta2)).
    for t in (1, 1000, 1_000_000):
        flats = [torch.zeros(16, device=device) for _ in range(4)]
        flats[1] += 3.0
        update("adamw", flats, t, {"eps": 0.0, "weight_decay": 0.0, "lr": 1.0})
        expected = -0.1 / (1 - 0.9**t) * math.sqrt((1 - 0.999**t) / 0.001)
        torch.testing.assert_close(flats[0], torch.full_like(flats[0], expected), rtol=2e-6, atol=0.0)


@NAMES
@settings(max_examples=EXAMPLES)
@given(
    numel=st.integers(20, 5000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    grad_dtype=st.sampled_from(DTYPES),
)
def test_master_weights_are_those_of_fp32_parameters(
    device: str, name: str, numel: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """A 16-bit parameter has its master's rounded values; elements that were changed meanwhile replace the master's. So
    it is with a visible gradient and the exact one.
    """
    plain, kept = ([normal(numel, seed, device).abs() for seed in range(4)] for _ in range(2))
    master, kept[0] = kept[0], rounded(kept[0], dtype)
    for t in range(1, STEPS + 1):
        if t == STEPS:
            kept[0][10:20] *= 2
            plain[0][10:20] = kept[0][10:20].float()
        grad = normal(numel, 10 + t, device).to(grad_dtype)
        plain[1], kept[1], visible = grad.clone(), grad.clone(), None
        if grad_dtype == torch.float32:
            visible = rounded(grad, dtype)
            visible[:15] *= 2
            plain[1][:15] = visible[:15].float()
        update(name, plain, t)
        update(name, kept, t, master=master, visible=visible)
    assert same([plain[0], *plain[2:]], [master, *kept[2:]])
    assert torch.equal(kept[0], rounded(master, dtype))


@NAMES
@pytest.mark.parametrize("found_inf", [3.0, math.nan])
def test_found_inf_leaves_everything_untouched(device: str, name: str, found_inf: float) -> None:
    """Masters too."""
    flats = [normal(50, seed, device).abs() for seed in range(4)]
    param, master, flats[1] = flats[0].bfloat16(), flats[0].clone(), flats[1] * math.nan
    skip = {"found_inf": scalar(found_inf, device), "grad_scale": scalar(math.inf, device)}
    for given_flats, more in ((flats, {}), ([param, *flats[1:]], {"master": master})):
        before = [flat.clone() for flat in (given_flats[0], *flats[2:], master)]
        update(name, given_flats, 1, **skip, **more)
        assert same([given_flats[0], *flats[2:], master], before)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bits_do_not_depend_on_slices_or_threads(device: str, name: str) -> None:
    def step(bounds: list[int]) -> list[Tensor]:
        flats = [normal(5003, seed, device).abs() for seed in range(4)]
        for start, stop in pairwise(bounds):
            update(name, [flat[start:stop] for flat in flats], 3, grad_scale=scalar(0.37, device))
        return [flats[0], *flats[2:]]

    whole = step([0, 5003])
    for count, bounds in ((2, [0, 5003]), (1, [0, 1600, 4800, 5003]), (3, [0, 16, 4992, 5003])):
        torch.set_num_threads(count)
        assert same(whole, step(bounds))


def test_errors_name_what_is_wrong(device: str) -> None:
    good = torch.zeros(4, device=device)
    half, longer = good.half(), PackTable.build([9], [0], good.device)
    for name, flats, more, said in (
        ("adamw", [good, good[:3], good, good], {}, r"gradient must be .* \[4\], got torch\.float32 \[3\]"),
        ("sgd", [good, good, good], {"master": good[:3]}, r"master must be contiguous float32 \[4\], .* \[3\]"),
        ("lamb", [good] * 4, {"table": longer}, "param has 4 elements, the table needs 9"),
        ("lamb", [good, good, half, good], {}, r"exp_avg must be .*, got torch\.float16"),
    ):
        with pytest.raises(ValueError, match=said):
            update(name, flats, 1, **more)
    for momentum, buffer in ((0.9, None), (0.0, good)):
        with pytest.raises(ValueError, match=f"momentum is {momentum}, so momentum_buffer must"):
            sgd(good, good.clone(), buffer, SGDOptions(0.1, momentum), first_step=True)


def train_lamb(
    device: str, params: list[Tensor], grads: list[Tensor], gap: int, changed: Any = ()
) -> list[list[Tensor]]:
    """Each tensor's parameter and moments after a step. What lies between tensors must not be touched."""
    numels = [p.numel() for p in params]
    offsets = [gap + sum(numels[:k]) + k * gap for k in range(len(numels))]
    table = PackTable.build(numels, offsets, torch.device(device))
    flats = [torch.full((table.end + 5,), SENTINEL, device=device) for _ in range(4)]
    flats[1] = flats[1].to(grads[0].dtype)
    places = [slice(offset, offset + numel) for offset, numel in zip(offsets, numels, strict=True)]
    for place, p, g in zip(places, params, grads, strict=True):
        flats[0][place], flats[1][place], flats[2][place], flats[3][place] = p, g, 0.0, 0.0
    update("lamb", flats, 1, changed, table)
    found = [[flat[place].clone() for flat in (flats[0], *flats[2:])] for place in places]
    for place in places:
        for flat in flats:
            flat[place] = SENTINEL
    assert all((flat == SENTINEL).all() for flat in (flats[0], *flats[2:]))
    return found


@settings(max_examples=EXAMPLES)
@given(
    numels=st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4),
    gap=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
)
def test_lamb_of_any_layout(device: str, numels: list[int], gap: int, dtype: torch.dtype) -> None:
    params = [(i + 1) * normal(numel, i, device) for i, numel in enumerate(numels)]
    grads = [normal(numel, 9 + i, device).to(dtype) for i, numel in enumerate(numels)]
    for found, p, g in zip(train_lamb(device, params, grads, gap), params, grads, strict=True):
        assert_near(found, oracle("lamb", p, [g]))


def test_a_tensor_of_zeros_moves_by_the_plain_update_and_what_is_not_finite_stays_in_its_tensor(device: str) -> None:
    zeros, ones = torch.zeros(40, device=device), torch.ones(40, device=device)
    # p = 0: the ratio is 1, and Adam's first update is the sign. u = 0: nothing to move by.
    changed = {"weight_decay": 0.0, "eps": 1e-30, "lr": 0.5}
    found = train_lamb(device, [zeros, ones, ones], [3.0 * ones, zeros, ones * math.nan], 16, changed)
    torch.testing.assert_close(found[0][0], torch.full_like(zeros, -0.5))
    assert torch.equal(found[1][0], ones) and found[2][0].isnan().all()


def test_lambs_bits_belong_to_the_tensor(device: str) -> None:
    """Neither neighbours, nor the place in the bucket, nor the number of threads, nor repetition changes them."""
    p, g, other = normal(CHUNK + 21, 0, device), normal(CHUNK + 21, 1, device), normal(100, 2, device)
    results = []
    for count, before, gap in ((1, 0, 16), (2, 1, 16), (3, 2, 5), (1, 3, 0), (1, 0, 16)):
        torch.set_num_threads(count)
        results.append(train_lamb(device, [other] * before + [p], [other] * before + [g], gap)[-1])
    assert all(same(result, results[0]) for result in results[1:])
