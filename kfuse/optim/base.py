"""What every kfuse optimizer does: reduce gradients over the workers, measure them, clip, and keep statistics.

After the last micro-batch's backward the reduction is waited for and each `p.grad` is the mean gradient over the
global batch (a view of its bucket), as with DistributedDataParallel. `step()` then updates.
"""

from __future__ import annotations

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm import tail as t
from kfuse.comm.engine import Engine
from kfuse.comm.gradients import owner
from kfuse.comm.group import CommError, Group
from kfuse.comm.plan import MicroBatch, Reduced, StepPlan
from kfuse.optim.consistency import (
    ConsistencyError,
    averaged_buffers,
    first_difference,
    rates_salt,
    share_from_first,
)
from kfuse.optim.refuse import refuse_ddp, refuse_fsdp, refuse_sharded
from kfuse.session import Session, current
from kfuse.statistics.step_stats import Statistics, StepStats
from kfuse.undecorated import undecorated

_LOG = logging.getLogger("kfuse")


class DistributedOptimizer(torch.optim.Optimizer, ABC):
    """Mix-in over a torch optimizer. Subclasses say how one bucket is updated."""

    _step_supports_amp_scaling = True  # GradScaler then hands us its scale and its verdict instead of unscaling

    lr_factor: float = 1.0
    """What kfuse multiplies each group's learning rate with in an update (batch-size scaling, a policy's lr_scale).

    group["lr"] belongs to the user, or to their scheduler: kfuse reads it and never changes it.
    """
    absorbs_losses: bool = False
    """Set by a training loop whose body is the user's: there a lost worker ends the step without an error."""
    _lost: CommError | None = None
    """What the step under way was given up for."""

    def _attach(self, clip_norm: float | None, skip_nonfinite: bool) -> None:
        """Called by subclasses once `param_groups` exist. Raises ValueError for a clip_norm that is not positive."""
        self.set_clip_norm(clip_norm)
        self.skip_nonfinite = skip_nonfinite
        self.statistics = Statistics()
        self._session: Session = current()
        self._unit = "micro-batches"
        self._had_gradients = self._was_nonfinite = self._was_local = False
        self._tracked: nn.Module | None = None
        self._build_engine()
        self._session.on_group_change(self._set_group)
        global _latest
        _latest = weakref.ref(self)
        if not self._session.elastic:  # in an elastic job the training loop shares all of the state
            self._share_parameters(self.param_groups)

    def _share_parameters(self, groups: list[dict[str, Any]]) -> None:
        """All workers take rank 0's values of these groups' parameters. Raises ValueError, CommError."""
        params = [p for group in groups for p in group["params"]]
        names = {id(p): name for p, name in self._named_parameters()}
        share_from_first(self._session.group, params, [names[id(p)] for p in params])

    def set_clip_norm(self, clip_norm: float | None) -> None:
        """The largest norm of the mean gradient from now on; None: no clipping. Raises ValueError unless positive."""
        check_clip_norm(clip_norm)
        self.clip_norm = clip_norm

    def _build_engine(self) -> None:
        session = self._session
        groups = [[p for p in group["params"] if p.requires_grad] for group in self.param_groups]
        names = [name for p, name in self._named_parameters() if p.requires_grad]
        old: Engine | None = getattr(self, "engine", None)
        if old is not None and (old.reduced is not None or (old.begun and not old.interrupted)):
            raise RuntimeError("parameters can change between steps, not between backward and opt.step()")
        refuse_sharded(self._named_parameters())
        self._check_layout()
        self.engine = Engine(groups, session.group, session.comm, names, self._choose_lane(groups))
        if old is not None:
            self.engine.use_transport(old.topology, old.tree)
            old.close()
            self.engine.step = old.step
        self.statistics.bf16_wire = session.comm.dtype == "bf16"
        self.engine.on_first_micro_batch = lambda params=self.engine.params: refuse_ddp(params)  # type: ignore[misc]
        self.engine.on_last_micro_batch = self.synchronize
        self.engine.digest_salt = lambda: rates_salt(self.learning_rates())
        self._group_of = [g for g, params in enumerate(groups) for _ in params]
        self._trainable = {id(p) for p in self.engine.params}
        if self._tracked is not None:
            self.engine.track_buffers(averaged_buffers(self._tracked))
        self._layout_changed()
        if old is not None and old.plan is not None:
            self.engine.begin(old.plan)

    def _choose_lane(self, groups: list[list[Parameter]]) -> int:
        """Its own; else that of an optimizer whose parameters it takes over; else a new one."""
        if hasattr(self, "engine"):
            return self.engine.lane
        for p in (p for params in groups for p in params):
            older = owner(p)
            if older is not None and not older.superseded and older.lane < self._session.lanes:
                return older.lane
        return self._session.new_lane()

    def _check_layout(self) -> None:
        """Before buckets are built: subclasses raise ValueError for parameters that they cannot lay out."""

    def _layout_changed(self) -> None:
        """The buckets are new: subclasses with flat state lay it out again."""

    def _named_parameters(self) -> list[tuple[Parameter, str]]:
        """All parameters, frozen ones too, as messages name them: by state_dict's index, and torch's name if given."""
        named: list[tuple[Parameter, str]] = []
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            words = [_words(index, name) for index, name in enumerate(names, len(named))]
            named += zip(group["params"], words, strict=True)
        return named

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for a parameter that is given twice; then nothing is added."""
        if not isinstance(param_group.get("params"), Tensor | set):
            param_group["params"] = list(param_group["params"])
            self._refuse_duplicates(param_group)
        undecorated(torch.optim.Optimizer.add_param_group)(self, param_group)
        if hasattr(self, "engine"):
            try:
                self._build_engine()
            except Exception:
                self.param_groups.pop()
                raise
            self._share_parameters(self.param_groups[-1:])

    def _refuse_duplicates(self, param_group: dict[str, Any]) -> None:
        """In a group that is to be added, whose parameters may be (name, parameter) pairs."""
        params = param_group["params"]
        pairs = [given if isinstance(given, tuple) else (None, given) for given in params]
        names = param_group.get("param_names") or [name for name, _ in pairs]
        seen = {id(p): name for p, name in self._named_parameters()}
        for index, (name, (_, p)) in enumerate(zip(names, pairs, strict=True), len(seen)):
            words = _words(index, name)
            if id(p) in seen:
                raise ValueError(
                    f"{words} of shape {tuple(p.shape)} is {seen[id(p)]} again: list each parameter once "
                    "(model.parameters() does, also where modules share one)"
                )
            seen[id(p)] = words

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it works on its parameters by hooks: keep its "
            "state_dict(), make a new optimizer over the copied model's parameters, and load it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        state: dict[str, Any] = undecorated(torch.optim.Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        undecorated(torch.optim.Optimizer.load_state_dict)(self, state_dict)

    def sync_buffers(self, model: nn.Module) -> None:
        """Keeps the buffers that `model` changes as it trains (BatchNorm's running statistics) the same on all workers.

        Each step's changes of all persistent floating-point buffers, and of BatchNorm's counters, are averaged over the
        step's micro-batches. Where the number of workers is fixed, all start from rank 0's values of buffers and
        parameters, frozen ones included. Call it on every worker, before the first step, and again after
        `model.load_state_dict`: in a loop of bare backwards what was loaded counts as a change of the next step, and
        may lose its last bits.
        """
        self._tracked = model
        if not self._session.elastic:
            everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            share_from_first(self._session.group, list(everything.values()), list(everything))
        self.engine.track_buffers(averaged_buffers(model))

    def learning_rates(self) -> list[float]:
        """Of each parameter group, the rate of the coming update: the group's own times `lr_factor`.

        0.0 for one that an optimizer does not have, or keeps on a GPU, where reading it would wait.
        """
        return [rate * self.lr_factor for rate in self._base_rates()]

    @property
    def base_lr(self) -> float:
        """The learning rate that records speak of, without `lr_factor`: the first group's that is not zero."""
        return next((rate for rate in self._base_rates() if rate), 0.0)

    def _base_rates(self) -> list[float]:
        rates = [group.get("lr", 0.0) for group in self.param_groups]
        return [0.0 if isinstance(rate, Tensor) and rate.is_cuda else float(rate) for rate in rates]

    # -- a step ---------------------------------------------------------------------------------------------------

    def _set_group(self, group: Group) -> None:
        self.engine.set_group(group)

    def absorb(self, error: CommError) -> bool:
        """Whether a training loop will deal with the loss of a worker: then the step under way is given up."""
        if self.absorbs_losses:
            self._lost = error
            self.engine.abort()
        return self.absorbs_losses

    def take_lost(self) -> CommError | None:
        """What ended the last step's body early, once."""
        lost, self._lost = self._lost, None
        return lost

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step's samples and each worker's range of micro-batches (kf.fit does)."""
        self.engine.check_owner()
        self._unit = "samples"
        self.engine.begin(plan)

    def micro_batch(self, samples: int | None = None, last: bool = True) -> MicroBatch:
        """Context of one micro-batch's forward and backward; the loss must be the MEAN over its samples.

        samples: how many; without it micro-batches weigh the same and statistics are in units of micro-batches.
        last: whether it is this worker's last of the step; then the reduction starts as backward goes.
        Raises ValueError for a sample count below 1, RuntimeError if a newer optimizer has this one's parameters.
        """
        self.engine.check_owner()
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
        used = None if reduced.used is None else reduced.used.tolist()
        self._had_gradients = self._had_gradients or used is None or any(used)
        for bucket in self.engine.of_params:
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                if used is None or used[index] > 0:
                    self.engine.params[index].grad = view

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update with the mean gradient over the global batch. Without gradients, does nothing.

        Gradients that were set by hand (`p.grad = ...`), with no backward since the last step, count as one
        micro-batch, as those of a bare backward do. Raises RuntimeError if a newer optimizer has the parameters, if
        some were frozen or unfrozen without `rebuild`, or if the last step's gradients are still there.
        """
        self.engine.check_owner()
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
        if self._session.elastic and hasattr(self, "found_inf"):
            raise RuntimeError(
                "GradScaler in a job whose workers may change: one that joins would scale its loss otherwise than the "
                "rest. Use autocast with bfloat16, which needs no scaler, or a fixed number of workers (torchrun)"
            )
        if self.engine.reduced is None:
            try:
                if self._lost is None and any(p.grad is not None for p in self.engine.params):
                    self._take_gradients_set_by_hand()
                self.synchronize()
            except CommError as error:
                if not self.absorb(error):
                    raise
        reduced, self.engine.reduced = self.engine.reduced, None
        if not self._had_gradients and self._lost is None:
            self._warn_of_no_gradients()
        if reduced is None:
            return loss
        if self._session.elastic and not reduced.planned:
            raise RuntimeError(
                "workers of this job may join and leave, and only the model and optimizer given to kf.fit or "
                "kf.DataLoader go along: use one optimizer, with a parameter group for each model, or a fixed number "
                "of workers (torchrun)"
            )
        self._take_back_gradients()
        record, scale, found_inf, finite = self._verdict(reduced)
        self._update(reduced, scale, found_inf)
        if reduced.local:
            record[t.GRAD_SQ] = torch.nan  # of the workers' mean gradient nothing is known
        if found_inf is not None:
            record[t.SKIPPED] = found_inf
        unit = "micro-batches" if reduced.implicit else self._unit
        self.statistics.push(self.engine.step - 1, unit, record)
        self._warn_of_nonfinite(self.engine.step - 1, finite, reduced.local)
        self._check_consistency()
        return loss

    def _check_consistency(self) -> None:
        """Raises ConsistencyError, on every rank, if the ranks' parameters differed in the newest step read."""
        if len(set(self.statistics.digests)) < 2:
            return
        stats = self.statistics.latest
        assert stats is not None
        params, names = self.engine.params, self.engine.names
        if self._tracked is not None:
            known = {id(p): f"parameter {name}" for name, p in self._tracked.named_parameters()}
            names = [known.get(id(p), name) for p, name in zip(params, names, strict=True)]
        where = first_difference(self._session.group, params, names, self.learning_rates())
        raise ConsistencyError(f"step {stats.step}: the workers no longer have the same model: {where}")

    @torch.no_grad()
    def average_models(self) -> None:
        """Makes parameters, optimizer state and BatchNorm's running statistics the mean of all workers' (local SGD).

        Between steps, on every worker. All of it or nothing is replaced. Raises CommError.
        """
        group = self._session.group
        held = [state[name] for p in self.engine.params if (state := self.state.get(p)) for name in sorted(state)]
        values = [
            *self.engine.params,
            *(value for value in held if isinstance(value, Tensor)),
            *self.engine.averaged.tensors,
        ]
        if group.size == 1 or not values:
            return
        flat = torch.cat([value.detach().reshape(-1).to(group.device, torch.float32) for value in values])
        group.all_reduce(flat, "average of the workers' models").wait()
        flat.div_(group.size)
        means = torch.split(flat, [value.numel() for value in values])
        for value, mean in zip(values, means, strict=True):
            mean = mean.view(value.shape)
            value.copy_(mean if value.is_floating_point() else mean.round())

    def _take_gradients_set_by_hand(self) -> None:
        if self.engine.begun:
            return
        refuse_sharded(self._named_parameters())
        if self._session.group.size > 1 and hasattr(self, "found_inf"):
            raise RuntimeError(
                "GradScaler has looked for infinities in this worker's gradients before they were reduced over all "
                "workers: with several workers and a GradScaler, gradients must come from backward, not from p.grad = "
            )
        self.engine.take_gradients()

    def _warn_of_no_gradients(self) -> None:
        """Once: perhaps the loss is that of another model, or of a copy of this one."""
        self._had_gradients = True
        refuse_fsdp()
        if self.engine.params:
            _LOG.warning(
                "%s.step(): none of its %d parameters has ever had a gradient, so nothing is trained. "
                "Does the loss come from the model whose parameters it was given?",
                type(self).__name__,
                len(self.engine.params),
            )

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

    def _verdict(self, reduced: Reduced) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | bool]:
        """The record in units of the true gradient; what gradients are multiplied with; whether to skip; whether
        gradients are finite, which the host knows on the CPU. All else on the device.
        """
        record = reduced.record
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        squared_norm, finite = self._squared_norm(reduced)
        if found_inf is not None:
            found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=record.device)
            record = record.clone()
            squared = torch.nan if loss_scale is None else loss_scale.double() ** 2  # unscaled by hand: not known
            record[t.SUM_SQUARES] /= squared
            record[t.GRAD_SQ] /= squared
            squared_norm = squared_norm / squared
            if self.clip_norm is not None and loss_scale is not None:
                # The scaled norm overflowed where no gradient did: there is no coefficient to clip with.
                found_inf = torch.maximum(found_inf, (~torch.isfinite(squared_norm)).to(torch.float32))
        elif self.skip_nonfinite and (record.device.type == "cuda" or not finite):
            found_inf = (~torch.as_tensor(finite)).to(torch.float32)
        scale = None if loss_scale is None else 1.0 / loss_scale.to(torch.float32)
        if self.clip_norm is not None:
            if hasattr(self, "found_inf") and loss_scale is None:  # p.grad was unscaled, perhaps changed, by the user
                squared_norm = self._squared_norm_of_gradients()
            coefficient = (self.clip_norm / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0).to(torch.float32)
            scale = coefficient if scale is None else scale * coefficient
        return record, scale, found_inf, finite

    def _squared_norm(self, reduced: Reduced) -> tuple[Tensor, Tensor | bool]:
        """|gbar|^2 (float64, on the device), and whether the gradients are finite.

        The record's squares are fp32, which finite gradients above 1e19 overflow. Where they did, the CPU looks at the
        gradients themselves; on CUDA that would make the host wait, so there they count as not finite.
        """
        record = reduced.record
        if record.device.type == "cuda":
            return record[t.GRAD_SQ], torch.isfinite(record[t.SUM_SQUARES] + record[t.GRAD_SQ])
        values = record.numpy()
        if math.isfinite(values[t.SUM_SQUARES] + values[t.GRAD_SQ]):
            return record[t.GRAD_SQ], True
        squared_norm = self._squared_norm_of_gradients()
        if reduced.local:  # the others must skip too, and have other gradients
            return squared_norm, False
        return squared_norm, math.isfinite(squared_norm.item())

    def _squared_norm_of_gradients(self) -> Tensor:
        """In float64, where fp32 gradients' squares cannot overflow."""
        squares = [p.grad.double().square().sum() for p in self.engine.params if p.grad is not None]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def _warn_of_nonfinite(self, step: int, finite: Tensor | bool, local: bool) -> None:
        """Rank 0 names the first of a run of steps whose gradients are not finite; on CUDA one step later."""
        if hasattr(self, "found_inf"):  # GradScaler's: there skips are how it finds its scale
            return
        was_local, self._was_local = self._was_local, local
        if not isinstance(finite, bool):
            stats = self.statistics.latest
            if stats is None:
                return
            # Of a local step the norm is unknown anyhow.
            step, nonfinite = stats.step, stats.skipped or (stats.grad_norm is None and not was_local)
        else:
            nonfinite = not finite
        if nonfinite and not self._was_nonfinite and self._session.group.rank == 0:
            outcome = "left out" if self.skip_nonfinite else "made all the same, since skip_nonfinite is off"
            _LOG.warning("step %d: a gradient is not finite; the update was %s", step, outcome)
        self._was_nonfinite = nonfinite

    @abstractmethod
    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates all parameters whose `.grad` is set. `scale` multiplies gradients; non-zero `found_inf` skips."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets every `p.grad` to None; else, as torch does, those that are there to zeros, which then count as used.

        What came since the last step is dropped: what a backward reduced, also if it raised in the middle, and
        micro-batches without a last one, with what they changed in the buffers of `sync_buffers`.
        """
        self.engine.drop()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # a new tensor: the bucket's is not to be accumulated into
                    p.grad = None if set_to_none else torch.zeros_like(p.grad)

    # -- what was measured ----------------------------------------------------------------------------------------

    @property
    def stats(self) -> StepStats | None:
        """The latest step's statistics, None before the first. Waits for the device."""
        return self.statistics.wait()


_latest: weakref.ref[DistributedOptimizer] | None = None


def latest_optimizer() -> DistributedOptimizer | None:
    """The one that was made last in this session, while it lives."""
    found = None if _latest is None else _latest()
    return found if found is not None and found._session is current() else None


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises ValueError unless positive or None."""
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r}: must be above 0, or None for no clipping")


def _words(index: int, name: str | None) -> str:
    return f"parameter {index}" if name is None else f"parameter {index} ({name})"
