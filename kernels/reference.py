"""The kernels in PyTorch: the CPU path, and what the Triton kernels are tested against.

Every sum here has an order fixed by the data's shape, whatever the thread count or the memory alignment: that is why
squares are summed with `vector_norm` over short rows and not with `torch.dot`, whose bits depend on both.

What needs room for intermediate values goes over a stretch of the data at a time, so that they stay in cache. A stretch
is a whole number of chunks and blocks: it changes no bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate as running_sums

import torch
from torch import Tensor

from kfuse.kernels.measure import Measures
from kfuse.kernels.merges import ADD, postfix
from kfuse.kernels.options import AdamOptions, SGDOptions
from kfuse.kernels.table import BLOCK, CHUNK, PackTable, num_blocks

STRETCH = 2**19
"""Elements, 2 MiB of fp32. Shorter ones fit a second-level cache and are slower all the same: each operation has a
fixed cost of a few microseconds, and below 2**15 elements torch uses one thread."""

ONE_THREAD = 2**14
"""Elements that torch adds up in one thread, in an order of their number: half of where it begins to share work out."""

ROOM = 2**18
"""Elements of each row that are added up at a time."""

SLAB = 16 * BLOCK
"""Elements of each row that are reduced, then measured, at a time."""


def pack(
    grads: Sequence[Tensor | None],
    flat: Tensor,
    table: PackTable,
    *,
    scale: float,
    accumulate: bool,
    sumsq: Tensor,
) -> None:
    segments = flat[: table.end].split_with_sizes(table.flat_sizes)[1::2]
    norms = sumsq.split_with_sizes(table.sumsq_sizes)
    scratch = torch.empty(min(STRETCH, table.end), dtype=torch.float32, device=flat.device)
    by_scratch = accumulate and scale != 1.0  # rounded before it is added: `add_(alpha=)` rounds once
    for grad, segment, full, ragged in zip(grads, segments, norms[::2], norms[1::2], strict=True):
        if grad is None:
            full.zero_(), ragged.zero_()
            if not accumulate:
                segment.zero_()
            continue
        values = grad.reshape(-1)
        whole = not by_scratch or values.numel() <= STRETCH
        if whole and values.dtype == flat.dtype == torch.float32:
            _row_norms(values, CHUNK, full, ragged)
            if by_scratch:
                segment.add_(torch.mul(values, scale, out=scratch[: values.numel()]))
            elif accumulate:
                segment.add_(values)
            else:
                torch.mul(values, scale, out=segment)
            continue
        for part, target, norm in _stretches(values, segment, full, ragged):
            _pack_stretch(part, target, scale, accumulate, norm, scratch[: part.numel()].view(part.shape))
    sumsq.square_()


def _stretches(
    values: Tensor, segment: Tensor, full: Tensor, ragged: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cuts a tensor, its place in the flat buffer, and its norms: rows of CHUNK elements, then the ragged one."""
    whole = full.numel() * CHUNK
    if whole:
        stretch = STRETCH // CHUNK
        yield from zip(
            torch.split(values[:whole].view(-1, CHUNK), stretch),
            torch.split(segment[:whole].view(-1, CHUNK), stretch),
            torch.split(full, stretch),
            strict=True,
        )
    if ragged.numel():
        yield values[whole:].view(1, -1), segment[whole:].view(1, -1), ragged


def _pack_stretch(
    values: Tensor, target: Tensor, scale: float, accumulate: bool, norm: Tensor, scratch: Tensor
) -> None:
    if values.dtype != torch.float32:
        values = scratch.copy_(values)
    torch.linalg.vector_norm(values, dim=1, out=norm)
    if scale != 1.0:
        values = torch.mul(values, scale, out=scratch)
    if accumulate:
        # Rounded to the buffer's type before the addition, as if it had been packed and added later.
        target.add_(values.to(target.dtype))
    else:
        target.copy_(values)


def block_sumsq(flat: Tensor, out: Tensor) -> None:
    stretches = [(flat, out)]
    if flat.dtype != torch.float32:
        stretches = list(zip(torch.split(flat, STRETCH), torch.split(out, num_blocks(STRETCH)), strict=True))
    for values, norms in stretches:
        full = values.numel() // BLOCK
        _row_norms(values.float(), BLOCK, norms[:full], norms[full:])
    out.square_()


def _row_norms(values: Tensor, width: int, full: Tensor, ragged: Tensor) -> None:
    """Write the 2-norm of each `width` elements of `values` (1-D, fp32) to `full`, and of the rest to `ragged`."""
    whole = full.numel() * width
    if whole:
        rows = values if whole == values.numel() else values[:whole]
        torch.linalg.vector_norm(rows.view(-1, width), dim=1, out=full)
    if whole < values.numel():
        torch.linalg.vector_norm(values[whole:], dim=0, keepdim=True, out=ragged)


def sum_partials(partials: Tensor, out: Tensor) -> None:
    if partials.dim() == 1 and partials.numel() <= ONE_THREAD:
        torch.sum(partials, 0, dtype=torch.float64, out=out)
    elif partials.shape[-1] == 0:
        out.zero_()
    else:  # torch.sum may split the work between threads; a running sum goes from left to right
        out.copy_(partials.cumsum(-1, dtype=torch.float64)[..., -1])


def reduce(rows: Tensor, merges: tuple[tuple[int, int], ...], out: Tensor, *, scale: float, measures: Measures) -> None:
    if not measures.any:
        _merge(rows, merges, out, scale)
        return
    for at in range(0, out.numel(), SLAB):  # what has just been added is measured while it is in the cache
        elements = slice(at, min(at + SLAB, out.numel()))
        contributions = rows[:, elements].float()
        if out.data_ptr() == rows.data_ptr():  # the first of them is about to be overwritten
            contributions = contributions.clone()
        _merge(rows[:, elements], merges, out[elements], scale)
        _measure(contributions, out[elements], scale, measures, elements)


def _merge(rows: Tensor, merges: tuple[tuple[int, int], ...], out: Tensor, scale: float) -> None:
    """Adds up the rows as `merges` say and writes the scaled sum. `out` may be the first row; the others stay."""
    program = postfix(len(rows), merges)
    if program.count(0) > 1 and out.data_ptr() == rows.data_ptr():  # the first row is needed again after it was written
        rows = rows.clone()
    depth = max(running_sums(-1 if item == ADD else 1 for item in program))
    one_pass = len(merges) <= 1 and rows.dtype == out.dtype == torch.float32 and scale == 1.0
    stretch = max(1, out.numel()) if one_pass else ROOM
    scratch = torch.empty(depth, min(stretch, out.numel()), dtype=torch.float32, device=rows.device)
    for target, *parts in zip(*(torch.split(row, stretch) for row in (out, *rows.unbind(0))), strict=True):
        slots = list(scratch[:, : target.numel()].unbind(0))  # for the sum at each place of the stack
        if out.dtype == torch.float32:
            slots[0] = target
        stack: list[Tensor] = []
        for item in program:
            if item == ADD:
                right = stack.pop()
                stack[-1] = torch.add(stack[-1], right, out=slots[len(stack) - 1])
            else:
                part = parts[item]
                stack.append(part if part.dtype == torch.float32 else slots[len(stack)].copy_(part))
        total = stack[0] if scale == 1.0 else torch.mul(stack[0], scale, out=slots[0])
        if total is not target:
            target.copy_(total)


def _measure(rows: Tensor, out: Tensor, scale: float, measures: Measures, elements: slice) -> None:
    """Fill the partial sums of these elements' blocks. `rows` are the contributions in fp32."""
    blocks = slice(elements.start // BLOCK, num_blocks(elements.stop))
    mean = out.float()
    if measures.sumsq is not None:
        block_sumsq(out, measures.sumsq[blocks])
    if measures.shares is not None and measures.centred:
        spread = torch.zeros_like(mean)
        for row, share in zip(rows, measures.shares, strict=True):
            factor = torch.where(share == 0, 0, scale / share)
            spread.add_((row * factor).sub_(mean).square_().mul_(share))
        if measures.variance is not None:
            _block_sums(spread, measures.variance[blocks])
        if measures.noise is not None and measures.exp_avg_sq is not None:
            denominator = measures.exp_avg_sq[elements].sqrt().add_(measures.eps)
            _block_sums(spread.div_(denominator).div_(denominator), measures.noise[blocks])
    for k, row in enumerate(rows):
        if measures.row_sumsq is not None:
            block_sumsq(row, measures.row_sumsq[k, blocks])
        if measures.row_dot is not None:
            _block_sums(row * mean, measures.row_dot[k, blocks])


def _block_sums(values: Tensor, out: Tensor) -> None:
    """Write the sum of each BLOCK elements of `values` (1-D, fp32), the last one perhaps ragged, to `out`."""
    full = values.numel() // BLOCK
    torch.sum(values[: full * BLOCK].view(full, BLOCK), dim=1, out=out[:full])
    if full < out.numel():
        torch.sum(values[full * BLOCK :], dim=0, keepdim=True, out=out[full:])


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    options: AdamOptions,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    master: Tensor | None,
    merges: tuple[tuple[int, int], ...],
) -> None:
    if _skipped(found_inf):
        return
    weights = param if master is None else master
    torch._fused_adamw_(
        [weights],
        [_summed(grad, merges).to(weights.dtype)],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
        grad_scale=_divisor(grad_scale),
        found_inf=None,
    )
    if master is not None:
        param.copy_(master)


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    options: SGDOptions,
    first_step: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    master: Tensor | None,
    merges: tuple[tuple[int, int], ...],
) -> None:
    if _skipped(found_inf):
        return
    weights = param if master is None else master
    torch._fused_sgd_(
        [weights],
        [_summed(grad, merges).to(weights.dtype)],
        [] if momentum_buffer is None else [momentum_buffer],
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        lr=options.lr,
        dampening=options.dampening,
        nesterov=options.nesterov,
        maximize=options.maximize,
        is_first_step=first_step,
        grad_scale=_divisor(grad_scale),
        found_inf=None,
    )
    if master is not None:
        param.copy_(master)


def _summed(grad: Tensor, merges: tuple[tuple[int, int], ...]) -> Tensor:
    """The gradient itself, or the sum of its rows as `reduce` adds them, in fp32."""
    if grad.dim() == 1:
        return grad
    rows = grad.float()
    _merge(rows, merges, rows[0], 1.0)
    return rows[0]


def lamb(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    table: PackTable,
    options: AdamOptions,
    step: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if _skipped(found_inf):
        return
    scratch = torch.empty(min(STRETCH, max(table.numels, default=0)))
    for numel, offset in zip(table.numels, table.offsets, strict=True):
        p, g, m, v = (flat[offset : offset + numel] for flat in (param, grad, exp_avg, exp_avg_sq))
        direction = g.float()  # the gradient's own place, where it is fp32
        norms = torch.empty(2, -(-numel // CHUNK))
        stretches = (torch.split(values, STRETCH) for values in (p, direction, m, v))
        for *values, norm in zip(*stretches, torch.split(norms, STRETCH // CHUNK, dim=1), strict=True):
            _lamb_direction(values, norm, options, step, grad_scale, scratch)
        of_p, of_direction = (_length(row) for row in norms)
        trust = of_p / of_direction if of_p and of_direction else 1.0
        p.sub_(direction, alpha=options.lr * trust)


def _lamb_direction(
    stretch: Sequence[Tensor],
    norms: Tensor,
    options: AdamOptions,
    step: Tensor,
    grad_scale: Tensor | None,
    scratch: Tensor,
) -> None:
    """Updates the moments, turns the gradient into the update before the trust ratio, and measures it and `p`."""
    p, g, m, v = stretch
    update = torch.mul(p, options.weight_decay, out=scratch[: p.numel()])
    # What AdamW would add to it at a learning rate of -1 is Adam's update.
    adamw(update, g, m, v, replace(options, lr=-1.0, weight_decay=0.0), step, grad_scale, None, None, ())
    g.copy_(update)
    full = p.numel() // CHUNK
    for values, out in zip((p, update), norms, strict=True):
        _row_norms(values, CHUNK, out[:full], out[full:])


def _length(norms: Tensor) -> float:
    """The 2-norm of a tensor from its chunks', in an order fixed by their number."""
    total = torch.empty((), dtype=torch.float64)
    sum_partials(norms.double().square_(), total)
    return math.sqrt(total.item())


def _skipped(found_inf: Tensor | None) -> bool:
    # PyTorch's fused kernels skip for exactly 1.0; here any nonzero count of bad values skips.
    return found_inf is not None and found_inf.item() != 0


def _divisor(grad_scale: Tensor | None) -> Tensor | None:
    """PyTorch's fused optimizers divide by the scale, and write the quotient back to the gradient."""
    if grad_scale is None or grad_scale.item() == 1.0:
        return None
    return grad_scale.reciprocal()
