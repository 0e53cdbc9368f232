"""Each kernel beside its PyTorch implementation on the CPU, on small buffers: for `kfuse doctor`."""

from __future__ import annotations

from collections.abc import Callable

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
from kfuse.kernels.normalisation import (
    NormBackwardArguments,
    NormForwardArguments,
    norm_backward,
    norm_backward_by_torch,
    norm_forward,
    norm_forward_by_torch,
)
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

_NUMELS = (1, 4096, 37, 5000)
_OFFSETS = (0, 64, 4160, 4224)
_END = 9280
"""Elements of a flat buffer in which tensors of these sizes lie at these places."""


def _near(name: str, ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> str | None:
    """What is wrong where `ours` differs from `theirs` by more than `tolerance` of its largest element."""
    error = float((ours.detach().cpu().double() - theirs.double()).abs().max() / theirs.double().abs().max())
    return None if error <= tolerance else f"{name} differs by {error:.1e}"


def _bits(name: str, ours: Tensor, theirs: Tensor) -> str | None:
    return None if torch.equal(ours.detach().cpu(), theirs) else f"{name} has other bits"


def _pack(device: torch.device) -> str | None:
    grads, before = [torch.randn(numel) for numel in _NUMELS], torch.randn(_END)
    table, on_cpu = (PackTable.build(_NUMELS, _OFFSETS, each) for each in (device, torch.device("cpu")))
    flat, sumsq = before.clone().to(device), torch.zeros(table.num_chunks, device=device)
    pack([grad.to(device) for grad in grads], flat, table, scale=0.3, accumulate=True, sumsq=sumsq)
    expected, squares = before.clone(), torch.zeros(table.num_chunks)
    pack_by_torch(PackArguments(grads, expected, on_cpu, scale=0.3, accumulate=True, sumsq=squares))
    return _bits("the flat buffer", flat, expected) or _near("the sum of squares", sumsq, squares)


def _reduce(device: torch.device) -> str | None:
    rows = torch.randn(5, _END)
    out, expected = torch.empty(_END, device=device), torch.empty(_END)
    reduce(rows.clone().to(device), balanced(5), out)
    reduce_by_torch(ReduceArguments(rows, balanced(5), expected))
    return _bits("the sum", out, expected)


def _block_sumsq(device: torch.device) -> str | None:
    flat, total = torch.randn(_END), torch.empty((), dtype=torch.float64, device=device)
    partials = torch.empty(num_blocks(_END), device=device)
    block_sumsq(flat.to(device), partials)
    sum_partials(partials, total)
    return _near("|g|^2", total, flat.double().square().sum())


def _states(device: torch.device, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """`count` buffers on the CPU, the last one positive, and copies on `device`."""
    ours = [torch.randn(_END) for _ in range(count)]
    ours[-1] = ours[-1].square()
    return ours, [each.clone().to(device) for each in ours]


def _adamw(device: torch.device) -> str | None:
    options, step = AdamOptions(1e-2, 0.9, 0.99, 1e-6, 0.1), torch.tensor(3.0)
    theirs, ours = _states(device, 4)
    p, g, m, v = ours
    adamw(p, g, m, v, options, step=step.to(device))
    p, g, m, v = theirs
    adamw_by_torch(AdamWArguments(p, g, m, v, options, step=step))
    return _near("the parameter", ours[0], theirs[0]) or _near("exp_avg_sq", ours[3], theirs[3])


def _sgd(device: torch.device) -> str | None:
    options = SGDOptions(0.1, momentum=0.9, weight_decay=0.01)
    theirs, ours = _states(device, 3)
    p, g, buffer = ours
    sgd(p, g, buffer, options, first_step=False)
    p, g, buffer = theirs
    sgd_by_torch(SGDArguments(p, g, buffer, options, first_step=False))
    return _near("the parameter", ours[0], theirs[0]) or _near("the momentum", ours[2], theirs[2])


def _lamb(device: torch.device) -> str | None:
    options, step = AdamOptions(1e-2, 0.9, 0.99, 1e-6, 0.1), torch.tensor(3.0)
    table, on_cpu = (PackTable.build(_NUMELS, _OFFSETS, each) for each in (device, torch.device("cpu")))
    theirs, ours = _states(device, 4)
    p, g, m, v = ours
    lamb(p, g, m, v, table, options, step=step.to(device))
    p, g, m, v = theirs
    lamb_by_torch(LAMBArguments(p, g, m, v, on_cpu, options, step=step))
    return _near("the parameter", ours[0], theirs[0]) or _near("exp_avg", ours[2], theirs[2])


def _norm(device: torch.device) -> str | None:
    x, dy, weight, bias = torch.randn(3, 5, 96), torch.randn(3, 5, 96), torch.randn(96), torch.randn(96)
    theirs = norm_forward_by_torch(NormForwardArguments(x.view(-1, 96), weight, bias, eps=1e-5, centred=True))
    y, mean, rstd = norm_forward(x.view(-1, 96).to(device), weight.to(device), bias.to(device), eps=1e-5, centred=True)
    expected = norm_backward_by_torch(NormBackwardArguments(dy, x, weight, *theirs[1:], with_bias=True))
    found = norm_backward(dy.to(device), x.to(device), weight.to(device), mean, rstd, with_bias=True)
    wrong = _near("y", y, theirs[0], 1e-4)
    for name, ours, exact in zip(("dx", "dweight", "dbias", "the examples' norms"), found, expected, strict=True):
        assert ours is not None and exact is not None
        wrong = wrong or _near(name, ours, exact, 1e-4)
    return wrong


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    "pack": _pack,
    "reduce": _reduce,
    "block_sumsq": _block_sumsq,
    "adamw": _adamw,
    "sgd": _sgd,
    "lamb": _lamb,
    "norm": _norm,
}
"""By a kernel's name, its check on a device: returns what is wrong in words, or None. Raises what the kernel raises."""
