"""What every kfuse optimizer does: reduce gradients over the workers, measure them, clip, and keep statistics.

After the last micro-batch's backward the reduction is waited for and each `p.grad` is the mean gradient over the
global batch (a view of its bucket), as with DistributedDataParallel; of a bf16 parameter rounded to bf16, as torch
wants it, while the bucket has it in fp32. `step()` then updates.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm import devices
from kfuse.comm.engine import Engine
from kfuse.comm.gradients import check_owner, owner
from kfuse.comm.group import CommError, Group
from kfuse.comm.plan import MicroBatch, Reduced, StepPlan
from kfuse.optim.consistency import (
    ConsistencyError,
    average,
    averaged_buffers,
    first_difference,
    rates_salt,
    share_from_first,
)
from kfuse.optim.parameters import ParameterGroups
from kfuse.optim.refuse import refuse_ddp, refuse_fsdp, refuse_own_loop, refuse_sharded, refuse_unplanned
from kfuse.optim.scaling import LossScale, NonfiniteWarning, check_clip_norm, scaling
from kfuse.session import Session, current
from kfuse.statistics.step_stats import Statistics, StepStats

_LOG = logging.getLogger("kfuse")

_KFUSE = "kfuse"  # a key of state_dict


class DistributedOptimizer(ParameterGroups, ABC):
    """Mix-in over a torch optimizer. A subclass implements `_update`, which changes parameters by the mean gradient."""

    engine: Engine
    """Reduces the gradients over the workers. `rebuild` replaces it."""
    statistics: Statistics
    """The steps' records, and the running noise scale."""
    clip_norm: float | None
    """Largest norm of the mean gradient; None: no clipping."""
    skip_nonfinite: bool
    """Whether an update with a gradient that is not finite is skipped."""
    _step_supports_amp_scaling = True  # GradScaler then passes scale and found_inf to step() and does not unscale

    _weight_names: tuple[str, ...] = ()
    """What `_weights` returns is in `state` too, by these names."""
    last_lr: float = 0.0
    """The learning rate of the last update, as `base_lr` has it, times `lr_factor`."""
    loop_handles_lost_workers: bool = False
    """Set by kf.DataLoader's loop: when a worker is lost `step()` does nothing, and the loop takes the error."""
    _in_doubt: set[int]
    """Parameters whose `.grad` is set, perhaps to zeros, though perhaps no worker gave them a gradient."""
    _lost_worker_error: CommError | None = None
    """The lost worker that aborted the current step; kept for the loop."""

    def _attach(self, clip_norm: float | None, skip_nonfinite: bool) -> None:
        """Called by subclasses once `param_groups` exist. Raises ValueError for a clip_norm that is not positive."""
        self.set_clip_norm(clip_norm)
        self.skip_nonfinite = skip_nonfinite
        self._session: Session = current()
        self.statistics = Statistics()
        self.statistics.at_fixed_lag = self._session.elastic
        self._unit = "micro-batches"
        self._had_gradients, self._in_doubt = False, set()
        self._warning = NonfiniteWarning()
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
            self.engine.step, self.engine.parts = old.step, old.parts
            self.engine.carry_figures(old.figures)
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
        """Its present lane; else that of an optimizer whose parameters it takes over; else a new one."""
        if hasattr(self, "engine"):
            return self.engine.lane
        for p in (p for params in groups for p in params):
            older = owner(p)
            if older is not None and not older.superseded and older.lane < self._session.lanes_used:
                return older.lane
        return self._session.new_lane()

    def _check_layout(self) -> None:
        """Before buckets are built: subclasses raise ValueError for parameters that they cannot lay out."""

    def _layout_changed(self) -> None:
        """The buckets are new: subclasses with flat state lay it out again."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for a parameter that is given twice; then nothing is added."""
        super().add_param_group(param_group)
        if hasattr(self, "engine"):
            try:
                self._build_engine()
            except Exception:
                self.param_groups.pop()
                raise
            self._share_parameters(self.param_groups[-1:])

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

    # -- its state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and kfuse's statistics under the key "kfuse", which torch's optimizers leave alone."""
        return self._with_statistics(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, or a torch optimizer's; after that one the statistics are as they were."""
        super().load_state_dict(state_dict)
        self._load_statistics(state_dict)

    def make_room(self, state_dict: dict[str, Any]) -> None:
        """Makes the state tensors that `state_dict` has and this optimizer has not, where its class knows how.

        So a state that arrives from another worker is written where it stays. It is loaded once all has arrived.
        """

    def _with_statistics(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _KFUSE: self.statistics.state_dict()}

    def _load_statistics(self, state: dict[str, Any]) -> None:
        if _KFUSE in state:
            self.statistics.load_state_dict(state[_KFUSE])

    @property
    def worker_is_lost(self) -> bool:
        """Whether a lost worker has aborted the step under way, and the training loop is yet to take the error."""
        return self._lost_worker_error is not None

    def carry_figures(self, count: int) -> None:
        """Between trainings: each step's record has so many numbers of a step function's (kf.fit calls it)."""
        self.statistics.carry_figures(count)
        self.engine.carry_figures(count)

    # -- a step ---------------------------------------------------------------------------------------------------

    def _set_group(self, group: Group) -> None:
        self.engine.set_group(group)

    def leave_to_loop(self, error: CommError) -> bool:
        """Whether the training loop handles lost workers. If so, aborts the step and keeps `error` for the loop."""
        if self.loop_handles_lost_workers:
            self._lost_worker_error = error
            self.engine.abort()
        return self.loop_handles_lost_workers

    def take_lost_worker_error(self) -> CommError | None:
        """Returns the error that `leave_to_loop` kept, and forgets it; None if there is none."""
        error, self._lost_worker_error = self._lost_worker_error, None
        return error

    def begin(self, plan: StepPlan) -> None:
        """Announces the coming step's samples and each worker's range of micro-batches (kf.fit does)."""
        check_owner(self.engine)
        if self.engine.parts > 1:
            raise RuntimeError(
                f"opt.accumulate({self.engine.parts}) is for bare backwards: kf.fit and kf.DataLoader cut a batch into "
                "micro-batches themselves (micro_batch=), with the mean loss of each; call opt.accumulate(1) before"
            )
        self._unit = "samples"
        self.engine.begin(plan)

    def micro_batch(
        self,
        samples: int | None = None,
        last: bool = True,
        *,
        weight: float | None = None,
        several_backwards: bool = False,
    ) -> MicroBatch:
        """Context of one micro-batch's forward and backward; the loss must be the MEAN over its samples.

        samples: how many; without it micro-batches weigh the same and statistics are in units of micro-batches.
        last: whether it is this worker's last of the step; then the reduction starts as backward goes.
        weight: kf.fit and kf.DataLoader pass it (`weight_fn`). In a loop of your own `samples` is the weight: where it
        counts tokens, statistics are in units of tokens.
        several_backwards: several losses, each with a backward of its own: their gradients add up in `p.grad` as torch
        adds them, and are taken and measured as the context ends. The reduction then starts there, not during backward.
        Raises ValueError for a sample count below 1, RuntimeError if a newer optimizer has this one's parameters.
        """
        check_owner(self.engine)
        if self.engine.parts > 1:
            raise RuntimeError(
                f"opt.accumulate({self.engine.parts}) is for bare backwards of loss / {self.engine.parts}: in "
                "opt.micro_batch the loss is the mean, undivided; call opt.accumulate(1) before"
            )
        if (weight is not None) != (self.engine.plan is not None and self.engine.plan.by_weight):
            raise ValueError("opt.micro_batch(weight=...): kf.fit and kf.DataLoader pass it, where weight_fn= is given")
        if samples is not None and samples < 1:
            raise ValueError(f"samples={samples!r}: a micro-batch has at least one sample")
        unit = "micro-batches" if samples is None else "samples"
        if self.engine.begun and unit != self._unit:
            raise ValueError("opt.micro_batch: give the sample counts of all of a step's micro-batches, or of none")
        self._unit = unit
        counted = 1.0 if samples is None else float(samples)
        return MicroBatch(self.engine, counted if weight is None else weight, last, several_backwards)

    def accumulate(self, backwards: int) -> None:
        """From now on a step is so many bare backwards on this worker, each of a loss DIVIDED by their number.

            opt.accumulate(ACC)
            for i, (x, y) in enumerate(batches):
                (loss_fn(model(x), y) / ACC).backward()
                if (i + 1) % ACC == 0:
                    opt.step()
                    opt.zero_grad()

        Each backward is a micro-batch; the division is undone in the statistics, whose unit is the micro-batch. A step
        after fewer backwards, and another backward after the last, are errors. `accumulate(1)` ends it. Without it, and
        for micro-batches of unequal sizes: `micro_batch`, with the mean loss.
        Raises ValueError for a number below 1, RuntimeError in the middle of a step.
        """
        if not isinstance(backwards, int) or isinstance(backwards, bool) or backwards < 1:
            raise ValueError(f"opt.accumulate({backwards!r}): must be a whole number, at least 1")
        if self.engine.begun or self.engine.plan is not None:
            raise RuntimeError(
                f"opt.accumulate({backwards}): call it between steps of a loop of bare backwards; kf.fit and "
                "kf.DataLoader cut a batch into micro-batches themselves"
            )
        self.engine.parts = backwards

    def synchronize(self) -> None:
        """Waits for the reduction and sets each `p.grad`. Runs by itself after the last micro-batch's backward."""
        self.engine.finish()
        reduced = self.engine.reduced
        if reduced is None:
            return
        unused = self._unused_by_all(reduced)
        self._had_gradients = self._had_gradients or len(unused) < len(self.engine.params)
        for bucket in self.engine.gradient_buckets:
            bucket.show_mean()
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                if index not in unused:
                    self.engine.params[index].grad = view

    def _unused_by_all(self, reduced: Reduced) -> Collection[int]:
        """The parameters that no worker gave a gradient, which keep no `.grad`; those in doubt are not among them.

        In doubt is, on a GPU and with several workers, what this worker gave no gradient: only the device knows whether
        another one did. An optimizer that can leave a parameter alone on the device takes zeros for it; with any other
        the host waits.
        """
        self._in_doubt = set()
        if reduced.used is None or self._session.group.size == 1:
            return reduced.unused
        if devices.of(self.engine.device).asynchronous and self._skips_on_device:
            self._in_doubt = set(reduced.unused)
            return ()
        return {index for index, count in enumerate(reduced.used.tolist()) if count == 0}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update with the mean gradient over the global batch. Without gradients, does nothing.

        Gradients that were set by hand (`p.grad = ...`), with no backward since the last step, count as one
        micro-batch, as those of a bare backward do. Raises RuntimeError if a newer optimizer has the parameters, if
        some were frozen or unfrozen without `rebuild`, or if the last step's gradients are still there.
        """
        check_owner(self.engine)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_wrong_use()
        reduced = self._take_reduced()
        if reduced is None:
            return loss
        refuse_unplanned(self._session, reduced.planned)
        self._take_back_gradients()
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # as GradScaler sets it
        loss_scale = None if found_inf is None else LossScale(getattr(self, "grad_scale", None), found_inf)
        scaled = scaling(reduced, self.engine.params, self.clip_norm, self.skip_nonfinite, loss_scale)
        self.last_lr = self.base_lr * self.lr_factor
        self._update(reduced, scaled.factor, scaled.skip)
        step, unit = self.engine.step - 1, "micro-batches" if reduced.implicit else self._unit
        self.statistics.push(step, unit, scaled.record, reduced.local)
        if loss_scale is None:  # with GradScaler skips are how it finds its scale
            warns = self._session.group.rank == 0
            self._warning.after_step(step, scaled.finite, self.statistics.arrived, self.skip_nonfinite, warns)
        self._check_consistency(step)
        return loss

    def _refuse_wrong_use(self) -> None:
        """Raises RuntimeError if parameters were (un)frozen, or if an elastic job has its own loop or a GradScaler."""
        if {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad} != self._trainable:
            raise RuntimeError(
                "parameters were frozen or unfrozen after the optimizer was made: call opt.rebuild() before backward"
            )
        refuse_own_loop(self._session, uses_scaler=hasattr(self, "found_inf"))

    def _take_reduced(self) -> Reduced | None:
        """The step's reduction, complete; None without gradients, or if a worker is lost and the loop handles that."""
        if self.engine.reduced is None:
            try:
                if self._lost_worker_error is None and any(p.grad is not None for p in self.engine.params):
                    self._take_gradients_set_by_hand()
                self.synchronize()
            except CommError as error:
                if not self.leave_to_loop(error):
                    raise
        reduced, self.engine.reduced = self.engine.reduced, None
        if not self._had_gradients and self._lost_worker_error is None:
            self._warn_of_no_gradients()
        return reduced

    def _check_consistency(self, step: int) -> None:
        """Raises ConsistencyError, on every rank after the same step, if the ranks' parameters differed when they were
        compared.
        """
        compared = self.statistics.compared
        if not compared or 0 <= step - compared[0][0] < self.statistics.lag(self.engine.device):
            return
        compared_at, digests = compared.popleft()
        if len(set(digests)) < 2:
            return
        params, names = self.engine.params, self.engine.names
        if self._tracked is not None:
            known = {id(p): f"parameter {name}" for name, p in self._tracked.named_parameters()}
            names = [known.get(id(p), name) for p, name in zip(params, names, strict=True)]
        where = first_difference(self._session.group, params, names, self.learning_rates())
        raise ConsistencyError(f"step {compared_at}: the workers no longer have the same model: {where}")

    @torch.no_grad()
    def average_models(self) -> None:
        """Makes parameters, optimizer state and BatchNorm's running statistics the mean of all workers' (local SGD).

        Between steps, on every worker. All of it or nothing is replaced. Raises CommError.
        """
        group = self._session.group
        weights = self._weights()
        states = [state for p in self.engine.params if (state := self.state.get(p))]
        held = [state[name] for state in states for name in sorted(state) if name not in self._weight_names]
        values = [*weights, *(value for value in held if isinstance(value, Tensor)), *self.engine.averaged.tensors]
        average(group, values)
        self._weights_averaged()

    def _weights(self) -> list[Tensor]:
        """What `average_models` averages of the model: the parameters, or what they are computed from."""
        return list(self.engine.params)

    def _weights_averaged(self) -> None:
        """The tensors that `_weights` returned have other values now."""

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
        for bucket in self.engine.gradient_buckets:
            for index, view in zip(bucket.layout.params, bucket.views, strict=True):
                p = self.engine.params[index]
                if p.grad is not None and p.grad is not view:
                    view.copy_(p.grad)
                    p.grad = view
                    self._in_doubt.discard(index)

    def rebuild(self) -> None:
        """After freezing or unfreezing parameters: lays the buckets out again. State of parameters is kept."""
        self._build_engine()

    @property
    def _skips_on_device(self) -> bool:
        """Whether `_update` leaves parameters alone where the device says so, and the host need not ask it."""
        return False

    @abstractmethod
    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates all parameters whose `.grad` is set (their mean gradient, in their dtype; in the buckets fp32).

        Those of `_in_doubt` (indices in `engine.params`) are left alone where `reduced.used` is 0.
        scale: fp32 scalar on the device, by which gradients are multiplied; None: 1. found_inf: fp32 scalar on the
        device; if it is not 0, nothing may change; None: the update is made.
        """

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
    """The optimizer that was made last in this session; None if there is none, or it was deleted."""
    found = None if _latest is None else _latest()
    return found if found is not None and found._session is current() else None
