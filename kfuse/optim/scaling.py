"""The factor on a step's mean gradient (clipping, loss scale), and whether its update is skipped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm import measurement as t
from kfuse.comm.engine import Engine
from kfuse.comm.step import Step
from kfuse.kernels import BLOCK, num_blocks, sum_partials


def scaling(
    step: Step,
    engine: Engine,
    clip_norm: float | None,
    skip_nonfinite: bool,
    found_inf: Tensor | None,
    loss_scale: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | bool]:
    """Returns `factor`, `skip` and `finite` of the step's `Update`. Nothing waits for a CUDA device.

    The step's `record` is then in units of the true gradient, and has the slots that only the optimizer knows.

    found_inf, loss_scale: what torch's GradScaler passes to an optimizer's step. loss_scale is None too where the user
    has unscaled the gradients (`scaler.unscale_`).
    clip_norm: the largest norm of the mean gradient, without the loss scale. The gradients' factor is then
    min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it.
    """
    record = step.record
    assert record is not None
    exact, finite = squared_norm_of(record, step.is_local, engine)
    skip, factor = None, None if loss_scale is None else 1.0 / loss_scale.to(torch.float32)
    squared_norm = record[t.GRAD_SQ] if exact is None and (clip_norm is not None or found_inf is not None) else exact
    if found_inf is not None:
        skip = torch.as_tensor(found_inf, dtype=torch.float32, device=record.device)
        squared = torch.nan if loss_scale is None else loss_scale.double() ** 2  # unscaled by hand: unknown
        record = record.clone()
        record[t.SUM_SQUARES] /= squared
        record[t.GRAD_SQ] /= squared
        record[t.ADDED] /= squared
        assert squared_norm is not None
        squared_norm = squared_norm / squared
        if clip_norm is not None and loss_scale is not None:
            # The scaled norm overflowed where no gradient did: there is no coefficient to clip with.
            skip = torch.maximum(skip, (~torch.isfinite(squared_norm)).to(torch.float32))
    elif skip_nonfinite and (devices.of(record.device).asynchronous or not finite):
        skip = (~torch.as_tensor(finite)).to(torch.float32)
    if clip_norm is not None:
        if found_inf is not None and loss_scale is None:  # p.grad was perhaps changed too
            squared_norm = squared_norm_exactly(engine)
        assert squared_norm is not None
        coefficient = (clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0).to(torch.float32)
        factor = coefficient if factor is None else factor * coefficient
    if step.is_local:
        record[t.GRAD_SQ] = torch.nan  # the workers' mean gradient is not computed
    if skip is not None:
        record[t.SKIPPED] = skip
    step.record = record
    return factor, skip, finite


def squared_norm_of(record: Tensor, is_local: bool, engine: Engine) -> tuple[Tensor | None, Tensor | bool]:
    """|gbar|^2 (float64, on the device; None: it is the record's), and whether the gradients are finite.

    The record's squares are fp32, which finite gradients above 1e19 overflow. Where they did, the CPU looks at the
    gradients themselves; on CUDA that would make the host wait, so there they count as not finite.
    """
    if devices.of(record.device).asynchronous:
        total = record[t.SUM_SQUARES] + record[t.GRAD_SQ]
        return None, total - total == 0  # infinities and NaN give NaN; torch.isfinite takes four kernels
    values = record.tolist()
    if math.isfinite(values[t.SUM_SQUARES] + values[t.GRAD_SQ]):
        return None, True
    squared_norm = squared_norm_exactly(engine)
    if is_local:  # the others must skip too, and have other gradients
        return squared_norm, False
    return squared_norm, math.isfinite(squared_norm.item())


def squared_norm_exactly(engine: Engine) -> Tensor:
    """|gbar|^2 in float64, where no square of an fp32 number overflows, from the gradients as they are now.

    With sharded state a collective: every worker calls it. Raises CommError. Each block is summed where it lies and the
    blocks in their order, so the bits do not depend on the workers.
    """
    if not engine.options.sharded:
        squares = [p.grad.double().square().sum() for p in engine.params if p.grad is not None]
        return engine.over_ranks(torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64))
    sums = []
    for bucket in engine.gradient_buckets:
        mean, first = bucket.own, bucket.shard.start // BLOCK
        whole = mean.numel() // BLOCK * BLOCK
        rows = [mean[:whole].view(-1, BLOCK), *([mean[None, whole:]] if whole < mean.numel() else ())]
        norms = torch.cat([torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows])
        of_bucket = torch.zeros(num_blocks(bucket.body), dtype=torch.float64, device=engine.device)
        of_bucket[first : first + norms.numel()] = norms.square_()
        sums.append(of_bucket)
    every = torch.cat(sums)
    engine.executor.share_sums(every, what="sums of squares in float64")
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    sum_partials(every, total)
    return total
