"""What every kfuse optimizer does: reduce gradients over the workers, measure them, clip, and keep statistics.

After the last micro-batch's backward the reduction is waited for and each `p.grad` is the mean gradient over the
global batch (a view of its bucket), as with DistributedDataParallel. `step()` then updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.comm import tail as t
from kfuse.comm.engine import Engine
from kfuse.comm.group import CommError
from kfuse.comm.step import MicroBatch, Reduced, StepPlan
from kfuse.optim.statistics import Statistics, StepStats
from kfuse.session import Session, current
from kfuse.undecorated import undecorated


class DistributedOptimizer(torch.optim.Optimizer, ABC):
    """Mix-in over a torch optimizer. Subclasses say how one bucket is updated."""

    _step_supports_amp_scaling = True  # GradScaler then hands us its scale and its verdict instead of unscaling

    def _attach(self, clip_norm: float | None, skip_nonfinite: bool) -> None:
        """Called by subclasses once `param_groups` exist. Raises ValueError for a clip_norm that is not positive."""
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm!r}: must be above 0, or None for no clipping")
        self.clip_norm, self.skip_nonfinite = clip_norm, skip_nonfinite
        self.statistics = Statistics()
        self._session: Session = current()
        self._unit = "micro-batches"
        self._tracked: nn.Module | None = None
        self._build_engine()
        self._session.register(self)

    def _build_engine(self) -> None:
        session = self._session
        groups = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        old: Engine | None = getattr(self, "engine", None)
        if old is not None:
            if old.reduced is not None:
                raise RuntimeError("parameters can change between steps, not between backward and opt.step()")
            old.close()
        self.engine = Engine(groups, session.group, session.comm)
        self.statistics.bf16_wire = session.comm.dtype == "bf16"
        self.engine.step = old.step if old is not None else 0
        self.engine.on_last_micro_batch = self.synchronize
        self.engine.control = session.take_control
        self._group_of = [g for g, params in enumerate(groups) for _ in params]
        self._trainable = {id(p) for p in self.engine.params}
        if self._tracked is not None:
            self.sync_buffers(self._tracked)
        self._layout_changed()

    def _layout_changed(self) -> None:
        """The buckets are new: subclasses with flat state lay it out again."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        undecorated(torch.optim.Optimizer.add_param_group)(self, param_group)
        if hasattr(self, "engine"):
            self._build_engine()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = undecorated(torch.optim.Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        undecorated(torch.optim.Optimizer.load_state_dict)(self, state_dict)

    def sync_buffers(self, model: nn.Module) -> None:
        """Averages BatchNorm's running statistics over each step's micro-batches. Other buffers are left alone."""
        self._tracked = model
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)]
        self.engine.track_buffers([buffer for norm in norms for buffer in norm.buffers(recurse=False)])

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step's samples and each worker's range of micro-batches (kf.fit does)."""
        self._unit = "samples"
        self.engine.begin(plan)

    def micro_batch(self, samples: int | None = None, last: bool = True) -> MicroBatch:
        """Context of one micro-batch's forward and backward; the loss must be the MEAN over its samples.

        samples: how many; without it micro-batches weigh the same and statistics are in units of micro-batches.
        last: whether it is this worker's last of the step; then the reduction starts as backward goes.
        Raises ValueError for a sample count below 1.
        """
        if samples is not None and samples < 1:
            raise ValueError(f"samples={samples!r}: a micro-batch has at least one sample")
        unit = "micro-batches" if samples is None else "samples"
        if self.engine.begun and unit != self._unit:
            raise ValueError("opt.micro_batch: give the sample counts of all of a step's micro-batches, or of none")
        self._unit = unit
        return self.engine.micro_batch(1.0 if samples is None else float(samples), last)

    def synchronize(self) -> None:
        """Waits for the reduction and sets each `p.grad`. Runs by itself after the last micro-batch's backward."""
        self.engine.finish()
        reduced = self.engine.reduced
        if reduced is None:
            return
        used = None if reduced.all_used_here else reduced.used.tolist()
        for bucket in self.engine.of_params:
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                if used is None or used[index] > 0:
                    self.engine.params[index].grad = view

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update with the mean gradient over the global batch. Without a backward before it, does nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad} != self._trainable:
            raise RuntimeError(
                "parameters were frozen or unfrozen after the optimizer was made: call opt.rebuild() before backward"
            )
        if self._session.elastic and self._session.view is None:
            raise RuntimeError("this job is elastic: kf.fit or kf.DataLoader must drive its training loop")
        if self.engine.reduced is None:
            try:
                self.synchronize()
            except CommError as error:
                if not self._session.absorb(error):
                    raise
                self.engine.abort()
        reduced, self.engine.reduced = self.engine.reduced, None
        if reduced is None:
            return loss
        self._take_back_gradients()
        record, scale, found_inf = self._verdict(reduced)
        skipped = torch.zeros(1, dtype=torch.float64, device=record.device) if found_inf is None else found_inf.double()
        self._update(reduced, scale, found_inf)
        self._session.control_sent()
        if reduced.local:
            record[t.TAIL_SLOTS] = torch.nan  # of the workers' mean gradient nothing is known
        unit = "micro-batches" if reduced.implicit else self._unit
        record = torch.cat([record, skipped.reshape(1), reduced.seconds.double()])
        self.statistics.push(self.engine.step - 1, unit, record)
        return loss

    @torch.no_grad()
    def average_models(self) -> None:
        """Makes parameters, optimizer state and BatchNorm's running statistics the mean of all workers' (local SGD).

        Between steps, on every worker. All of it or nothing is replaced. Raises CommError.
        """
        group = self._session.group
        held = [state[name] for p in self.engine.params if (state := self.state.get(p)) for name in sorted(state)]
        values = [*self.engine.params, *(value for value in held if isinstance(value, Tensor)), *self.engine.averaged]
        if group.size == 1 or not values:
            return
        flat = torch.cat([value.detach().reshape(-1).to(group.device, torch.float32) for value in values])
        group.all_reduce(flat, "average of the workers' models").wait()
        flat.div_(group.size)
        means = torch.split(flat, [value.numel() for value in values])
        for value, mean in zip(values, means, strict=True):
            mean = mean.view(value.shape)
            value.copy_(mean if value.is_floating_point() else mean.round())

    def _take_back_gradients(self) -> None:
        """Where the user replaced a `p.grad` (it may also be changed in place), the bucket gets the new values."""
        for bucket in self.engine.of_params:
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                p = self.engine.params[index]
                if p.grad is not None and p.grad is not view:
                    view.copy_(p.grad)
                    p.grad = view

    def rebuild(self) -> None:
        """After freezing or unfreezing parameters: lays the buckets out again. State of parameters is kept."""
        self._build_engine()

    def _verdict(self, reduced: Reduced) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The record in units of the true gradient; what gradients are multiplied with; whether to skip (device)."""
        record = reduced.record
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=record.device)
            record = record.clone()
            squared = torch.nan if loss_scale is None else loss_scale.double() ** 2  # unscaled by hand: not known
            record[t.SUM_SQUARES] /= squared
            record[t.TAIL_SLOTS] /= squared
            if self.clip_norm is not None and loss_scale is not None:
                # The scaled norm overflowed fp32 where no gradient did: there is no coefficient to clip with.
                found_inf = torch.maximum(found_inf, (~torch.isfinite(record[t.TAIL_SLOTS])).to(torch.float32))
        elif self.skip_nonfinite:
            finite = torch.isfinite(record[t.SUM_SQUARES] + record[t.TAIL_SLOTS])
            found_inf = (~finite).to(torch.float32)
        scale = None if loss_scale is None else 1.0 / loss_scale.to(torch.float32)
        if self.clip_norm is not None:
            norm = self._norm_to_clip(record, loss_scale)
            coefficient = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)
            scale = coefficient if scale is None else scale * coefficient
        return record, scale, found_inf

    def _norm_to_clip(self, record: Tensor, loss_scale: Tensor | None) -> Tensor:
        if hasattr(self, "found_inf") and loss_scale is None:  # p.grad was unscaled, perhaps changed, by the user
            grads = [p.grad for p in self.engine.params if p.grad is not None]
            return torch.nn.utils.get_total_norm(grads).double()
        return record[t.TAIL_SLOTS].sqrt()

    @abstractmethod
    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates all parameters whose `.grad` is set. `scale` multiplies gradients; non-zero `found_inf` skips."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets every `p.grad` to None, whatever `set_to_none`: gradients live in the buckets.

        What a backward before it reduced is dropped, also if that backward raised in the middle.
        """
        self.engine.reduced = None
        if self.engine.interrupted:
            self.engine.abort()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # -- what was measured ----------------------------------------------------------------------------------------

    @property
    def stats(self) -> StepStats | None:
        """The latest step's statistics, None before the first. Waits for the device."""
        return self.statistics.wait()
