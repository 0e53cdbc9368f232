"""Each kernel on a device beside its PyTorch implementation on the CPU: for `kfuse doctor`, benchmarks/gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
from torch import Tensor

import kfuse.kernels as k
from kfuse.kernels import dispatch, num_blocks
from kfuse.kernels import orthogonal as o
from kfuse.kernels.normalisation import norm_backward, norm_forward
from kfuse.kernels.wire import wire_numel

Draw = Callable[..., Tensor]  # draws a tensor of a shape and `dtype=`, fp32 by default, on the device
# Calls a kernel on the device, with arguments that it draws; returns all results.
Call = Callable[[torch.device, Draw], Sequence[Tensor]]

ADAM = k.AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
NESTEROV = k.SGDOptions(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
_CPU = torch.device("cpu")


def check(call: Call, device: torch.device) -> str | None:
    """What is wrong: the bits of two calls differ, or a result is not near the CPU's; None where it is right."""
    once, twice = (call(device, _drawing(device)) for _ in range(2))
    with mock.patch.object(dispatch, "INTERPRETED", False):  # else Triton may interpret kernels of CPU tensors
        expected = call(_CPU, _drawing(_CPU))
    for number, (one, two, right) in enumerate(zip(once, twice, expected, strict=True)):
        if not torch.equal(one, two):
            return f"result {number}: two calls have different bits"
        rounding = 4 * torch.finfo(one.dtype).eps if one.dtype in (torch.bfloat16, torch.float16) else 2e-5
        apart = (one.cpu().double() - right.double()).abs().max() if one.numel() else 0.0
        if not apart <= rounding * max(1.0, float(right.double().abs().max() if one.numel() else 0.0)):
            return f"result {number} is off by {float(apart):.1e}"
    return None


def _drawing(device: torch.device) -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype).to(device)


def empty(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of NaN, which a kernel must overwrite."""
    return torch.full((numel,), torch.nan, dtype=dtype, device=device)


def table_of(numels: Sequence[int], device: torch.device) -> k.PackTable:
    """A table of tensors of these sizes one behind the other, each 64-element aligned."""
    places = [-(-numel // 64) * 64 for numel in numels]
    return k.PackTable.build(numels, [sum(places[:n]) for n in range(len(places))], device)


def pack(device: torch.device, draw: Draw, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    table, grads = table_of(numels, device), [draw(numel, dtype=dtype) for numel in numels]
    found = []
    for accumulate in (False, True):
        flat, sumsq = draw(-(-table.end // 64) * 64), empty(table.num_chunks, device)
        k.pack(grads, flat, table, scale=0.3, accumulate=accumulate, sumsq=sumsq)
        found += [flat, sumsq]
    return found


def message(device: torch.device, draw: Draw, numels: Sequence[int]) -> list[Tensor]:
    """A message of eight bits, and the sum of two, which it is made of."""
    table, wire = table_of(numels, device), torch.zeros(2, wire_numel(_NUMEL), dtype=torch.int8, device=device)
    flat, sumsq, added = torch.zeros(_NUMEL, device=device), *(empty(table.num_chunks, device) for _ in range(2))
    k.pack([draw(numel) for numel in numels], flat, table, 0.3, False, sumsq, wire=wire[0], added=added)
    k.reduce(wire[:1], (), flat, wire=wire[1])
    k.reduce(wire, ((0, 1),), flat)
    return [*wire, flat, added.sum()]


def block_sumsq(device: torch.device, draw: Draw, numel: int, dtype: torch.dtype) -> list[Tensor]:
    partials, total = empty(num_blocks(numel), device), empty(1, device, torch.float64)[0]
    k.block_sumsq(draw(numel, dtype=dtype), partials)
    k.sum_partials(partials, total)
    return [partials, total]


def reduce(device: torch.device, draw: Draw, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """With and without sums of squares."""
    rows, sumsq = draw(count, numel, dtype=dtype), empty(num_blocks(numel), device)
    plain, measured = empty(numel, device, dtype), empty(numel, device, dtype)
    k.reduce(rows.clone(), k.balanced(count), plain)
    k.reduce(rows, k.balanced(count), measured, sumsq=sumsq)
    return [plain, measured, sumsq]


def reduce_by_address(device: torch.device, draw: Draw, count: int, numel: int) -> list[Tensor]:
    out, sumsq = empty(numel, device), empty(num_blocks(numel), device)
    k.reduce([draw(numel) for _ in range(count)], k.balanced(count), out, sumsq)
    return [out, sumsq]


def adamw(device: torch.device, draw: Draw, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """One update, and one that found_inf leaves out."""
    param, m, v, grad = draw(numel), draw(numel), draw(numel).square(), draw(numel, dtype=dtype)
    step, scale = torch.tensor(3.0, device=device), torch.tensor(0.4, device=device)
    for found_inf in (0.0, 1.0):
        left_out = torch.tensor(found_inf, device=device)
        k.adamw(param, grad.clone(), m, v, ADAM, step=step, grad_scale=scale, found_inf=left_out)
    return [param, m, v]


def sgd(device: torch.device, draw: Draw, numel: int, dtype: torch.dtype) -> list[Tensor]:
    param, buffer = draw(numel), draw(numel)
    k.sgd(param, draw(numel, dtype=dtype), buffer, NESTEROV, first_step=False)
    return [param, buffer]


def lamb(device: torch.device, draw: Draw, numels: Sequence[int]) -> list[Tensor]:
    table = table_of(numels, device)
    p, g, m, v = (draw(-(-table.end // 64) * 64) for _ in range(4))
    k.lamb(p, g, m, v.square_(), table, ADAM, step=torch.tensor(3.0, device=device))
    return [p, m, v]


def norm(device: torch.device, draw: Draw, width: int, dtype: torch.dtype) -> list[Tensor]:
    """LayerNorm and RMSNorm, forward and backward."""
    x, dy, weight, bias = draw(15, width, dtype=dtype), draw(3, 5, width, dtype=dtype), draw(width), draw(width)
    found = []
    for centred in (True, False):
        y, mean, rstd = norm_forward(x, weight, bias if centred else None, eps=1e-5, centred=centred)
        grads = norm_backward(x.view(3, 5, width), dy, weight, mean, rstd, with_bias=centred)
        found += [y, *(each for each in grads if each is not None)]
    return found


def orthogonalise(
    device: torch.device, draw: Draw, count: int, shape: tuple[int, int], dtype: torch.dtype, steps: int = 5
) -> list[Tensor]:
    """By torch.optim.Muon's settings. Results are scaled to elements near 1."""
    outs = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(count)]
    o.orthogonalise([draw(*shape) for _ in outs], outs, (3.4445, -4.775, 2.0315), steps, eps=1e-7)
    return [out * max(shape) ** 0.5 for out in outs]


_NUMELS, _NUMEL = (1, 4096, 37, 5000), 9280
# Each kernel once, on small buffers.
CHECKS: dict[str, Call] = {
    "pack": partial(pack, numels=_NUMELS, dtype=torch.float32),
    "reduce": partial(reduce, count=5, numel=_NUMEL, dtype=torch.float32),
    "message": partial(message, numels=_NUMELS),
    "block_sumsq": partial(block_sumsq, numel=_NUMEL, dtype=torch.float32),
    "reduce by address": partial(reduce_by_address, count=3, numel=_NUMEL),
    "adamw": partial(adamw, numel=_NUMEL, dtype=torch.float32),
    "sgd": partial(sgd, numel=_NUMEL, dtype=torch.float32),
    "lamb": partial(lamb, numels=_NUMELS),
    "norm": partial(norm, width=96, dtype=torch.float32),
    "orthogonalise": partial(orthogonalise, count=2, shape=(90, 40), dtype=torch.float32, steps=2),
}
