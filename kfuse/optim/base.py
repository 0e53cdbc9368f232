"""What every kfuse optimizer does: it sets up its engine, which reduces gradients over the workers, and makes updates.

Micro-batches and `p.grad` are in `gradients`, what workers save and give each other in `state`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm.engine import Engine
from kfuse.comm.gradients import check_owner, owner
from kfuse.comm.group import Group
from kfuse.comm.plan import Reduced
from kfuse.optim.consistency import (
    ConsistencyError,
    averaged_buffers,
    first_difference,
    numeric_options,
    salt,
    share_from_first,
)
from kfuse.optim.gradients import ReducedGradients
from kfuse.optim.refuse import (
    refuse_own_loop,
    refuse_scaled_local_step,
    refuse_sharded,
    refuse_sync_batchnorm,
    refuse_unplanned,
    refuse_wrapped,
)
from kfuse.optim.scaling import LossScale, NonfiniteWarning, Scaling, check_clip_norm, scaling
from kfuse.optim.state import OptimizerState
from kfuse.session import current
from kfuse.statistics.step_stats import Statistics, StepStats

if TYPE_CHECKING:
    from kfuse.comm.sync.pair import Pair


@dataclass(frozen=True)
class BegunUpdate:
    """An update that this worker has begun to make."""

    step: int
    reduced: Reduced
    scaled: Scaling


class DistributedOptimizer(OptimizerState, ReducedGradients, ABC):
    """Mix-in over a torch optimizer. A subclass implements `_update`, which changes parameters by the mean gradient."""

    engine: Engine
    """Reduces the gradients over the workers. `rebuild` replaces it."""
    statistics: Statistics
    """The steps' records, and the running noise scale."""
    clip_norm: float | None
    """Largest norm of the mean gradient; None: no clipping."""
    skip_nonfinite: bool
    """Whether an update with a gradient that is not finite is skipped."""
    shards_state: bool = False
    """Whether the class can keep a shard of the optimizer's state on each worker (`comm.state=sharded`)."""
    tells_fisher: bool = False
    """Whether the class has `fisher`. It is right where each worker has all of the state (comm.state=replicated)."""
    _step_supports_amp_scaling = True  # GradScaler then passes scale and found_inf to step() and does not unscale

    last_lr: float = 0.0
    """The learning rate of the last update, as `base_lr` has it, times `lr_factor`."""
    _pair: Pair | None = None
    """Averages this worker's weights with another one's before each update (`average_with`)."""
    _steps_without_gradients: int = 0
    """Calls of `step` that did nothing. Workers on which they differ have lost their common step."""
    begun: BegunUpdate | None = None
    """The newest update, made or not: with sharded state a lost worker may interrupt it."""

    # -- set-up ---------------------------------------------------------------------------------------------------

    def _attach(self, clip_norm: float | None, skip_nonfinite: bool) -> None:
        """Called by subclasses once `param_groups` exist. Raises ValueError for a clip_norm that is not positive, and
        with sharded state if the class has none.
        """
        self.set_clip_norm(clip_norm)
        self.skip_nonfinite = skip_nonfinite
        self._session = current()
        if self._session.comm.sharded and not self.shards_state:
            raise ValueError(
                f"comm.state=sharded: kf.{type(self).__name__} has whole state only: use kf.FusedAdamW, kf.FusedSGD or "
                "kf.FusedLAMB, or comm.state=replicated"
            )
        self.statistics = Statistics()
        self.statistics.at_fixed_lag = self._session.elastic
        self._in_doubt = set()
        self._warning = NonfiniteWarning()
        self._tracked: nn.Module | None = None
        self._build_engine()
        if not self.engine.has_chosen_buckets:  # comm.bucket_mb=null: the first one has measured which size is best
            self._build_engine()
        self._session.on_group_change(self._set_group)
        self._session.on_planned_change(self._hand_over)
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
        lane = self._choose_lane(groups)
        self.engine = Engine(groups, session.group, session.comm, names, lane, session.mirrors)
        if old is not None:
            self.engine.use_transport(old.topology, old.tree)
            old.close()
            self.engine.step, self.engine.parts = old.step, old.parts
            self.engine.carry_figures(old.figures)
        self.statistics.bf16_wire = session.comm.dtype == "bf16"
        self.engine.on_last_micro_batch = self.synchronize
        self.engine.compared = lambda: ([counts for _, counts in self._update_counts()], salt(self._numbers()))
        for bucket in self.engine.gradient_buckets:
            bucket.unscale = self._unscale
        self._group_of = [g for g, params in enumerate(groups) for _ in params]
        self._trainable = dict(zip(map(id, self.engine.params), self._group_of, strict=True))
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
        may lose its last bits. Raises TypeError for a model that DistributedDataParallel or FSDP has wrapped, and for
        SyncBatchNorm, unless there is one worker for good.
        """
        refuse_wrapped(model)
        if self._session.elastic or self._session.group.size > 1:
            refuse_sync_batchnorm(model)
        self._tracked = model
        if not self._session.elastic:
            everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            share_from_first(self._session.group, list(everything.values()), list(everything))
        self.engine.track_buffers(averaged_buffers(model))

    def carry_figures(self, count: int) -> None:
        """Between trainings: each step's record has so many numbers of a step function's (kf.fit calls it)."""
        self.statistics.carry_figures(count)
        self.engine.carry_figures(count)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context: what the steps in it record and count is not this optimizer's, also after an error.

        They have statistics of their own: the noise scale does not see them. Parameters and optimizer state are not
        kept: the caller loads those before the context ends. For a group whose workers stay the same.
        """
        statistics, last_lr, tracked = self.statistics, self.last_lr, self._tracked
        idle, begun = self._steps_without_gradients, self.begun
        step, figures, averaged = self.engine.step, self.engine.figures, self.engine.averaged.tensors
        self.statistics = Statistics()
        self.statistics.bf16_wire, self.statistics.bf16_sums = statistics.bf16_wire, statistics.bf16_sums
        try:
            yield
        finally:
            self.statistics, self.last_lr, self._tracked = statistics, last_lr, tracked
            self._steps_without_gradients, self.begun = idle, begun
            self.carry_figures(figures)
            if self.engine.averaged.tensors != averaged:
                self.engine.track_buffers(averaged)
            self.engine.step = step

    def fisher(self) -> Tensor | None:
        """Trace and largest entry of the diagonal Fisher information by the state: fp32 [2] on the device, without a
        wait. None before the first update. Raises RuntimeError for a class without `tells_fisher`.
        """
        raise RuntimeError(f"{type(self).__name__} does not tell the Fisher information")

    def average_with(self, pair: Pair | None) -> None:
        """From the next step on: averages this worker's weights with another one's before each update, and publishes
        them after it (pair averaging). None: no more.
        """
        self._pair = pair

    def rebuild(self) -> None:
        """After freezing or unfreezing parameters: lays the buckets out again. State of parameters is kept."""
        self._build_engine()

    def _set_group(self, group: Group) -> None:
        self.engine.set_group(group)
        if not self.engine.has_chosen_buckets:  # all workers come here, between two steps
            self.rebuild()

    # -- an update ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update with the mean gradient over the global batch. Without gradients, does nothing.

        Where each worker updates with its own gradients, one that had no micro-batch in the step makes no update.

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
            if not self._session.elastic:  # else a worker that joins has made fewer calls of all kinds
                self._steps_without_gradients += 1
            return loss
        refuse_unplanned(self._session, reduced.planned)
        self._take_back_gradients()
        found_inf: Tensor | None = getattr(self, "found_inf", None)  # as GradScaler sets it
        if found_inf is not None and reduced.local:
            refuse_scaled_local_step()
        loss_scale = None if found_inf is None else LossScale(getattr(self, "grad_scale", None), found_inf)
        try:
            scaled = scaling(reduced, self._squared_norm_exactly, self.clip_norm, self.skip_nonfinite, loss_scale)
            self.last_lr = self.base_lr * self.lr_factor
            if self._pair is not None and self._pair.mix(self.weights()):
                self.weights_changed()
            begun = self.begun = BegunUpdate(self.engine.step - 1, reduced, scaled)
            if not (reduced.local and reduced.idle):
                self._update(reduced, scaled.factor, scaled.skip)
        except RuntimeError as error:  # comm.state=sharded: sums of shards, or updated parameters, did not arrive
            if not self.leave_to_loop(error):
                raise
            return loss
        if self._pair is not None:
            self._pair.publish(self.weights(), self.engine.step)
        self.take_statistics(begun, warns=loss_scale is None)  # with GradScaler skips are how it finds its scale
        self._check_consistency(begun.step)
        return loss

    def take_statistics(self, update: BegunUpdate, warns: bool = True) -> None:
        """The update is made: keeps its figures. warns: of a gradient that is not finite."""
        unit = "micro-batches" if update.reduced.implicit else self._unit
        self.statistics.bf16_sums = self.engine.bf16_sums
        self.statistics.push(update.step, unit, update.scaled.record, update.reduced.local)
        if warns:
            leads, finite = self._session.group.rank == 0, update.scaled.finite
            self._warning.after_step(update.step, finite, self.statistics.arrived, self.skip_nonfinite, leads)

    def _refuse_wrong_use(self) -> None:
        """Raises RuntimeError if parameters were (un)frozen or moved to another group, or if an elastic job has its own
        loop or a GradScaler.
        """
        groups = enumerate(self.param_groups)
        trained = {id(p): index for index, group in groups for p in group["params"] if p.requires_grad}
        if trained != self._trainable:
            only_moved = trained.keys() == self._trainable.keys()
            what = "moved to another parameter group" if only_moved else "frozen or unfrozen"
            raise RuntimeError(
                f"parameters were {what} after the optimizer was made: call opt.rebuild() before backward"
            )
        refuse_own_loop(self._session, uses_scaler=hasattr(self, "found_inf"))

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
        tensors: dict[str, Tensor] = {}
        for indices, counts in self._update_counts():
            tensors |= {f"the number of updates of {names[i]}": counts[k] for k, i in enumerate(indices)}
        tensors |= zip(names, params, strict=True)
        where = first_difference(self._session.group, self._numbers(), tensors)
        raise ConsistencyError(f"step {compared_at}: the workers no longer have the same model: {where}")

    def _numbers(self) -> dict[str, float]:
        """By name, the settings that must be equal on all workers."""
        numbers = {f"the learning rate of group {k}": rate for k, rate in enumerate(self.learning_rates())}
        numbers |= numeric_options(self.param_groups)
        numbers["clip_norm"] = math.nan if self.clip_norm is None else float(self.clip_norm)
        numbers["skip_nonfinite"] = float(self.skip_nonfinite)
        numbers["the number of opt.step() calls without a backward"] = float(self._steps_without_gradients)
        return numbers

    def _update_counts(self) -> list[tuple[Sequence[int], Tensor]]:
        """With sharded state: how many updates each parameter has had, as it must be equal on all workers.

        Pairs of parameters (indices in `engine.params`) and fp32 counts, one each, on the device.
        """
        return []

    @abstractmethod
    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates all parameters whose `.grad` is set (their mean gradient, in their dtype; in the buckets fp32).

        Those of `_in_doubt` (indices in `engine.params`) are left alone where `reduced.used` is 0.
        scale: fp32 scalar on the device, by which gradients are multiplied; None: 1. found_inf: fp32 scalar on the
        device; if it is not 0, nothing may change; None: the update is made.
        """

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
