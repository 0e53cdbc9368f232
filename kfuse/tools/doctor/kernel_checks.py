"""Each kernel beside its PyTorch implementation on the CPU, on small buffers: for `kfuse doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfuse.kernels import (
    AdamOptions,
    PackTable,
    SGDOptions,
    adamw,
    balanced,
    block_sumsq,
    lamb,
    num_blocks,
    pack,
    reduce,
    sgd,
    sum_partials,
)
from kfuse.kernels import normalisation as norm
from kfuse.kernels.packing import PackArguments, pack_by_torch
from kfuse.kernels.reduction import ReduceArguments, reduce_by_torch
from kfuse.kernels.updates import (
    AdamWArguments,
    LAMBArguments,
    SGDArguments,
    adamw_by_torch,
    lamb_by_torch,
    sgd_by_torch,
)

Results = Iterator[tuple[str, Tensor, Tensor, float]]
"""Of each result of a kernel its name, its value on the device and on the CPU, and how far they may differ."""

_CPU = torch.device("cpu")
_NUMELS = (1, 4096, 37, 5000)
_OFFSETS = (0, 64, 4160, 4224)
_END = 9280
"""Elements of a flat buffer in which tensors of these sizes lie at these places."""


def check(name: str, device: torch.device) -> str | None:
    """Returns what is wrong with a kernel of `CHECKS` on a device, or None. Raises what the kernel raises."""
    for result, ours, theirs, tolerance in CHECKS[name](device):
        found, expected = ours.detach().cpu().double(), theirs.double()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= tolerance:
            return f"{result} differs by {error:.1e}"
    return None


def _pack(device: torch.device) -> Results:
    grads, before = [torch.randn(numel) for numel in _NUMELS], torch.randn(_END)
    table, on_cpu = (PackTable.build(_NUMELS, _OFFSETS, each) for each in (device, _CPU))
    flat, sumsq = before.clone().to(device), torch.zeros(table.num_chunks, device=device)
    pack([grad.to(device) for grad in grads], flat, table, scale=0.3, accumulate=True, sumsq=sumsq)
    expected, squares = before.clone(), torch.zeros(table.num_chunks)
    pack_by_torch(PackArguments(grads, expected, on_cpu, scale=0.3, accumulate=True, sumsq=squares))
    yield "the flat buffer", flat, expected, 0
    yield "the sum of squares", sumsq, squares, 1e-5


def _reduce(device: torch.device) -> Results:
    rows = torch.randn(5, _END)
    out, expected = torch.empty(_END, device=device), torch.empty(_END)
    reduce(rows.clone().to(device), balanced(5), out)
    reduce_by_torch(ReduceArguments(rows, balanced(5), expected))
    yield "the sum", out, expected, 0


def _block_sumsq(device: torch.device) -> Results:
    flat, total = torch.randn(_END), torch.empty((), dtype=torch.float64, device=device)
    partials = torch.empty(num_blocks(_END), device=device)
    block_sumsq(flat.to(device), partials)
    sum_partials(partials, total)
    yield "|g|^2", total, flat.double().square().sum(), 1e-5


def _update(
    kernel: Callable[..., object],
    by_torch: Callable[[Any], object],
    arguments: Callable[..., Any],
    tensors: tuple[str, ...],
    further: Callable[[torch.device], dict[str, Any]],
    device: torch.device,
) -> Results:
    """An optimizer's update of flat buffers, the last of which is positive. further: its other arguments."""
    theirs = [torch.randn(_END) for _ in tensors]
    theirs[-1].square_()
    ours = [each.clone().to(device) for each in theirs]
    kernel(*ours, **further(device))
    by_torch(arguments(*theirs, **further(_CPU)))
    for name, found, expected in zip(tensors, ours, theirs, strict=True):
        if name != "the gradient":  # which an update may use as its workspace
            yield name, found, expected, 1e-5


def _of_adam(device: torch.device) -> dict[str, Any]:
    return {"options": AdamOptions(1e-2, 0.9, 0.99, 1e-6, 0.1), "step": torch.tensor(3.0).to(device)}


def _of_lamb(device: torch.device) -> dict[str, Any]:
    return {**_of_adam(device), "table": PackTable.build(_NUMELS, _OFFSETS, device)}


def _norm(device: torch.device) -> Results:
    x, dy, weight, bias = torch.randn(3, 5, 96), torch.randn(3, 5, 96), torch.randn(96), torch.randn(96)
    rows = x.view(-1, 96)
    theirs = norm.norm_forward_by_torch(norm.NormForwardArguments(rows, weight, bias, eps=1e-5, centred=True))
    ours = norm.norm_forward(rows.to(device), weight.to(device), bias.to(device), eps=1e-5, centred=True)
    yield "y", ours[0], theirs[0], 1e-4
    expected = norm.norm_backward_by_torch(norm.NormBackwardArguments(dy, x, weight, *theirs[1:], with_bias=True))
    found = norm.norm_backward(dy.to(device), x.to(device), weight.to(device), *ours[1:], with_bias=True)
    for name, each, exact in zip(("dx", "dweight", "dbias", "the examples' norms"), found, expected, strict=True):
        assert each is not None and exact is not None
        yield name, each, exact, 1e-4


_MOMENTS = ("the parameter", "the gradient", "exp_avg", "exp_avg_sq")
CHECKS: dict[str, Callable[[torch.device], Results]] = {
    "pack": _pack,
    "reduce": _reduce,
    "block_sumsq": _block_sumsq,
    "adamw": partial(_update, adamw, adamw_by_torch, AdamWArguments, _MOMENTS, _of_adam),
    "sgd": partial(
        _update,
        sgd,
        sgd_by_torch,
        SGDArguments,
        ("the parameter", "the gradient", "the momentum"),
        lambda device: {"options": SGDOptions(0.1, momentum=0.9, weight_decay=0.01), "first_step": False},
    ),
    "lamb": partial(_update, lamb, lamb_by_torch, LAMBArguments, _MOMENTS, _of_lamb),
    "norm": _norm,
}
