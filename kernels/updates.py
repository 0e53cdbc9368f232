"""The optimizers' updates of flat buffers: `adamw`, `sgd` and `lamb`. Arguments and PyTorch implementations.

A further optimizer: its arguments and its PyTorch implementation here, its Triton kernel in `triton_updates`, and its
class in `kfuse.optim`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kfuse.kernels.dispatch import DTYPES, Kernel, require
from kfuse.kernels.reduction import PIECE, row_norms, sum_partials
from kfuse.kernels.table import CHUNK, PackTable


@dataclass(unsafe_hash=True)  # made anew in each step, and `frozen` takes longer; nothing changes one
class AdamOptions:
    """Settings of AdamW and LAMB, named as in torch.optim."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False
    batch_factor: float = 1.0
    """What the update counts as in `step`: moments are multiplied with beta^batch_factor."""


@dataclass
class SGDOptions:
    """Settings of SGD, named as in torch.optim."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass
class UpdateArguments:
    """What every update is given.

    Where elements do not depend on each other (all but LAMB), an element's bits do not depend on how the buffers are
    sliced, where slices start at multiples of 16 elements and end there or at the buffers' end.

    Args:
        param, grad, and the states: 1-D, contiguous, of one length. On a GPU each may be fp32, bf16 or fp16, and the
            arithmetic is fp32; on the CPU parameters and states have one dtype. With `master` the states are fp32.
        grad: after the call its content is unspecified.
        visible: bf16 or fp16, the rounded copy of the fp32 `grad` that p.grad shows. Elements that differ from the
            rounded `grad` were changed by the user, and replace it. None: there is no copy.
        grad_scale: 0-dim fp32 on the same device that multiplies the gradient (clip coefficient, inverse loss scale),
            or None.
        found_inf: 0-dim fp32 on the same device; nonzero leaves parameters and states untouched. Or None.
        master: fp32 weights that are updated in the parameters' stead; `param`, 16-bit, is then written with their
            rounded values. An element of `param` that is not the rounded master was changed since the last update (a
            model that was loaded, weights that were clipped): it replaces the master first. None: there are none.

    Raises ValueError where shapes or dtypes do not fit.
    """

    param: Tensor
    grad: Tensor
    _: KW_ONLY
    visible: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    master: Tensor | None = None

    def __post_init__(self) -> None:
        numel = self.param.numel()
        require("the update's gradient", self.grad, (numel,), *(DTYPES if self.visible is None else DTYPES[:1]))
        require("the update's visible gradient", self.visible, (numel,), *DTYPES[1:])
        require("the update's parameter", self.param, (numel,), *DTYPES)
        require("the update's master", self.master, (numel,), torch.float32)

    @property
    def weights(self) -> Tensor:
        """What is updated."""
        return self.param if self.master is None else self.master

    @property
    def skipped(self) -> bool:
        """Whether `found_inf` is not 0. Waits for the device."""
        # PyTorch's fused kernels skip for exactly 1.0; here any nonzero count of bad values skips.
        return self.found_inf is not None and self.found_inf.item() != 0


@dataclass
class AdamWArguments(UpdateArguments):
    """One AdamW step on flat buffers, in place, as torch.optim.AdamW (Loshchilov and Hutter 2019, algorithm 2).

    Args, beside those of `UpdateArguments`:
        step: 0-dim fp32 on the same device, the number of this step (1 for the first), already increased by the caller:
            with `batch_factor` the sum of all updates'.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    options: AdamOptions
    step: Tensor


@dataclass
class SGDArguments(UpdateArguments):
    """One SGD step on flat buffers, in place, as torch.optim.SGD.

    Args, beside those of `UpdateArguments`:
        momentum_buffer: None exactly when `momentum` is 0.
        first_step: the buffer becomes the gradient itself, undamped, and its old content is not read. A first step
            that `found_inf` skips leaves it as it was: start from zeros, and without dampening the next step is right.
    """

    momentum_buffer: Tensor | None
    options: SGDOptions
    first_step: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum = self.options.momentum
        if (self.momentum_buffer is None) != (momentum == 0):
            raise ValueError(f"sgd: momentum is {momentum}, so momentum_buffer must {'not ' * (momentum == 0)}be given")


@dataclass
class LAMBArguments(UpdateArguments):
    """One LAMB step (You et al. 2020, algorithm 2, phi the identity) on a bucket's flat buffers, in place.

    For each tensor p of the table, u = Adam's bias-corrected update + weight_decay * p, then p -= lr * |p| / |u| * u;
    the ratio is 1 where either norm is 0. Norms are summed from the table's chunks: with offsets that are multiples
    of 16, as a bucket's are, and chunks counted from the tensor's start, its bits depend on it alone.

    In two calls, where a tensor's chunks are several workers': the first with `partials`, the second with `trust`.

    Args, beside those of `UpdateArguments`:
        param, exp_avg, exp_avg_sq: fp32, at least `table.end` elements; what lies between tensors is not touched. With
            `master`, `param` is bf16 or fp16, and norms are the master's.
        table: where each tensor lies in them.
        step: as for `adamw`.
        partials: fp32 [2, table.num_chunks]: the call updates the moments, writes what `lamb_trust` takes of each
            chunk, and leaves the parameters. `grad`, fp32, must stay as it is until the second call.
        trust: fp32 [tensors of the table]: the call moves the parameters, each tensor by its own ratio |p| / |u|.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    table: PackTable
    options: AdamOptions
    step: Tensor
    partials: Tensor | None = None
    trust: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.param.numel() < self.table.end:
            raise ValueError(f"lamb: param has {self.param.numel()} elements, the table needs {self.table.end}")
        for name, flat in (("weights", self.weights), ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            require(f"lamb: {name}", flat, self.param.shape, torch.float32)
        require("lamb: partials", self.partials, (2, self.table.num_chunks), torch.float32)
        require("lamb: trust", self.trust, (len(self.table.numels),), torch.float32)


def take_changed(param: Tensor, master: Tensor, looks: bool = False) -> None:
    """Elements of `param` that are not the rounded `master` were changed since it was rounded: they replace it.

    By their values, since not every way to change a tensor leaves a trace (`p.grad.data.mul_`). param: bf16 or fp16.
    master: fp32, of the same shape. looks: whether there are any, which is quicker and would wait for a GPU.
    """
    same = master.to(param.dtype) == param
    if not looks or not same.all():
        torch.where(same, master, param, out=master)


def adamw_by_torch(given: AdamWArguments) -> None:
    options, step = dict(vars(given.options)), given.step
    if (k := options.pop("batch_factor")) != 1:  # (beta^k)^(step / k) is beta^step
        step = step / k
        options |= {name: options[name] ** k for name in ("beta1", "beta2")}
    states: list[list[Tensor]] = [[given.exp_avg], [given.exp_avg_sq], [], [step]]
    _fused(torch._fused_adamw_, given, options, *states, amsgrad=False)


def sgd_by_torch(given: SGDArguments) -> None:
    buffers = [] if given.momentum_buffer is None else [given.momentum_buffer]
    _fused(torch._fused_sgd_, given, vars(given.options), buffers, is_first_step=given.first_step)


def _fused(
    update: Callable[..., object],
    given: UpdateArguments,
    options: Mapping[str, Any],
    *states: list[Tensor],
    **more: bool,
) -> None:
    if given.skipped:
        return
    if given.visible is not None:
        take_changed(given.visible, given.grad, looks=True)
    if given.master is not None:
        take_changed(given.param, given.master, looks=True)
    # PyTorch's fused optimizers divide by the scale, and write the quotient back to the gradient.
    scale = None if given.grad_scale is None or given.grad_scale.item() == 1.0 else given.grad_scale.reciprocal()
    weights, grad = given.weights, given.grad
    if grad.dtype != weights.dtype:
        grad = grad.to(weights.dtype)
    update([weights], [grad], *states, **options, **more, grad_scale=scale, found_inf=None)
    if given.master is not None:
        given.param.copy_(given.master)


@dataclass(frozen=True)
class TrustArguments:
    """LAMB's trust ratios |p| / |u|, from what `lamb` has written of each chunk; 1 where either norm is 0.

    Args:
        partials: fp32 [2, table.num_chunks], contiguous: of the parameters, and of the update's direction.
        table: which chunks make a tensor.
        out: fp32 [tensors of the table].

    Sums are in fp64, in the order of the chunks.
    """

    partials: Tensor
    table: PackTable
    out: Tensor

    def __post_init__(self) -> None:
        require("lamb_trust: partials", self.partials, (2, self.table.num_chunks), torch.float32)
        require("lamb_trust: out", self.out, (len(self.table.numels),), torch.float32)


def lamb_by_torch(given: LAMBArguments) -> None:
    if given.skipped:
        return
    table, trust = given.table, given.trust
    if given.visible is not None:
        take_changed(given.visible, given.grad, looks=True)
    gradients = [g.float() for g in table.split(given.grad)]  # its own place, where it is fp32
    if trust is None:
        partials = torch.empty(2, table.num_chunks, dtype=torch.float32) if given.partials is None else given.partials
        _lamb_norms(given, gradients, partials)
        if given.partials is not None:
            return
        trust = torch.empty(len(table.numels), dtype=torch.float32)
        lamb_trust_by_torch(TrustArguments(partials, table, trust))
    places = zip(table.split(given.param), table.split(given.weights), gradients, trust, strict=True)
    for param, p, direction, ratio in places:
        p.sub_(direction, alpha=given.options.lr * ratio.item())
        if given.master is not None:
            param.copy_(p)


def _lamb_norms(given: LAMBArguments, gradients: Sequence[Tensor], partials: Tensor) -> None:
    """Updates the moments, turns each gradient into the update before the trust ratio, and writes the chunks' norms of
    parameters and updates.
    """
    table = given.table
    scratch = torch.empty(min(PIECE, max(table.numels, default=0)), dtype=torch.float32)
    flats = (table.split(flat) for flat in (given.param, given.weights, given.exp_avg, given.exp_avg_sq))
    first = 0
    for param, p, m, v, g, edges in zip(*flats, gradients, table.edges, strict=True):
        if given.master is not None:
            take_changed(param, p, looks=True)
        head = edges[1] % CHUNK if p.numel() else 0  # a first chunk that is cut short goes alone
        for start, end in pairwise(sorted({0, *range(head, p.numel(), PIECE), p.numel()})):
            chunks = -(-(end - start) // CHUNK)
            piece = [flat[start:end] for flat in (p, g, m, v)]
            _lamb_direction(given, piece, partials[:, first : first + chunks], scratch)
            first += chunks


def _lamb_direction(given: LAMBArguments, piece: Sequence[Tensor], norms: Tensor, scratch: Tensor) -> None:
    """Updates the moments, turns the gradient into the update before the trust ratio, and measures it and `p`."""
    p, g, m, v = piece
    update = torch.mul(p, given.options.weight_decay, out=scratch[: p.numel()])
    # What AdamW would add to it at a learning rate of -1 is Adam's update.
    options = replace(given.options, lr=-1.0, weight_decay=0.0)
    adamw(update, g, m, v, options, step=given.step, grad_scale=given.grad_scale)
    g.copy_(update)
    for values, out in zip((p, update), norms, strict=True):
        row_norms(values, CHUNK, out)


def lamb_trust_by_torch(given: TrustArguments) -> None:
    for number, partials in enumerate(given.partials.split_with_sizes(given.table.chunk_counts, dim=1)):
        of_p, of_direction = (_length(row) for row in partials)
        given.out[number] = of_p / of_direction if of_p and of_direction else 1.0


def _length(norms: Tensor) -> float:
    """The 2-norm of a tensor from its chunks', in an order fixed by their number."""
    total = torch.empty((), dtype=torch.float64)
    sum_partials(norms.double().square_(), total)
    return math.sqrt(total.item())


adamw = Kernel("adamw", AdamWArguments, "param", adamw_by_torch)
sgd = Kernel("sgd", SGDArguments, "param", sgd_by_torch)
lamb = Kernel("lamb", LAMBArguments, "param", lamb_by_torch)
lamb_trust = Kernel("lamb_trust", TrustArguments, "partials", lamb_trust_by_torch)
