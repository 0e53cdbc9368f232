"""From micro-batches to `p.grad`: an optimizer's engine, and what it has reduced.

After the last micro-batch's backward the reduction is waited for and each `p.grad` is the mean gradient over the
global batch (a view of its bucket), as with DistributedDataParallel; of a bf16 parameter rounded to bf16, as torch
wants it, while the bucket has it in fp32.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.engine import Engine
from kfuse.comm.gradients import owner
from kfuse.comm.group import CommError
from kfuse.comm.step import REMEDY, Reduced
from kfuse.elastic.protocol import ControlError
from kfuse.membership import Session
from kfuse.optim.consistency import averaged_buffers, carried_states
from kfuse.optim.refuse import refuse_sharded
from kfuse.optim.scaling import squared_norm_of
from kfuse.optim.updates import Updates, named_parameters

_LOG = logging.getLogger("kfuse")


class Reducer:
    """Reduces an optimizer's gradients over the workers, and keeps what came of it until the update."""

    def __init__(self, session: Session, updates: Updates) -> None:
        """updates: have the optimizer, of whose parameters those that are trained are reduced."""
        self._session, self._updates = session, updates
        # Set by kf.DataLoader's loop: when a worker is lost `step()` does nothing, and the loop takes the error.
        self.loop_handles_lost_workers = False
        self.lost_worker_error: RuntimeError | None = None  # has aborted the step under way; the loop takes it
        # Parameters whose `.grad` is set, perhaps to zeros, though perhaps no worker gave them a gradient.
        self.in_doubt: set[int] = set()
        self._unused: Collection[int] = ()  # parameters that got no gradient in the step that was reduced last
        self.tracked: nn.Module | None = None  # whose buffers' changes are averaged
        self.unit = "micro-batches"  # of the statistics: these, or samples
        self.has_pass = True  # of several optimizers that step in one body: this one's pass has begun in it
        self._had_gradients = False  # some parameter has ever had a gradient, or it was warned that none has
        self._attach(self._new_engine(None))

    def _trained(self) -> list[list[Parameter]]:
        """The parameters that may share a bucket: of each parameter group those that are trained."""
        return [[p for p in group["params"] if p.requires_grad] for group in self._updates.opt.param_groups]

    def _groups_of_trained(self) -> dict[int, int]:
        return {id(p): index for index, params in enumerate(self._trained()) for p in params}

    def _ids_of_trained(self) -> list[list[int]]:
        return [[id(p) for p in group["params"] if p.requires_grad] for group in self._updates.opt.param_groups]

    def _new_engine(self, lane: int | None) -> Engine:
        named, session = named_parameters(self._updates.opt.param_groups), self._session
        refuse_sharded(named)
        self._updates.check_layout(named)
        names = [name for p, name in named if p.requires_grad]
        lane = self._lane() if lane is None else lane
        trained, costs = self._trained(), list[int | None]()
        for params, group in zip(trained, self._updates.opt.param_groups, strict=True):
            costs += self._updates.owner_costs(params, group) or [None] * len(params)
        return Engine(trained, session.group, session.comm, names, lane, session.mirrors, costs)

    def _attach(self, engine: Engine) -> None:
        self.engine, self._group_of = engine, self._groups_of_trained()  # `rebuild` replaces them
        self._trained_ids = self._ids_of_trained()
        engine.on_last_micro_batch = self.synchronize
        for bucket in engine.gradient_buckets:
            bucket.unscale = self._unscale
        if self.tracked is not None:
            engine.track_buffers(averaged_buffers(self.tracked), carried_states(self.tracked))
        self._updates.lay_out(engine)

    def rebuild(self) -> None:
        old = self.engine
        if old.reduced is not None or (old.now.begun and not old.interrupted):
            raise RuntimeError("parameters can change between steps, not between backward and opt.step()")
        with self._updates.shards_shown():
            engine = self._new_engine(old.lane)
            engine.use_transport(old.topology, old.tree)
            old.close()
            engine.step, engine.parts, engine.compared = old.step, old.parts, old.compared
            engine.bare_backwards = old.bare_backwards
            engine.carry_figures(old.figures)
            self._attach(engine)
        if old.now.plan is not None:
            engine.begin(old.now.plan)

    def refuse_changed(self) -> None:
        """Raises RuntimeError if parameters were frozen, unfrozen or moved to another group since."""
        if self._ids_of_trained() != self._trained_ids and self._groups_of_trained() != self._group_of:
            raise RuntimeError(
                "parameters were frozen, unfrozen or moved to another parameter group after the optimizer was made: "
                "call opt.rebuild() before backward"
            )

    def follow_buffers(self) -> None:
        """After a state was loaded: modules may have taken loaded tensors in place of their buffers, as torch's
        HistogramObserver does.
        """
        if self.tracked is not None:
            buffers = averaged_buffers(self.tracked)
            if list(map(id, buffers.values())) != list(map(id, self.engine.averaged.tensors)):
                self.engine.track_buffers(buffers, carried_states(self.tracked))

    def refuse_late_buffers(self) -> None:
        """After the first step. Raises RuntimeError if a forward has registered buffers: nothing averages those."""
        if self.tracked is not None and (self._session.elastic or self._session.group.size > 1):
            late = averaged_buffers(self.tracked).keys() - self.engine.averaged.named.keys()
            if late:
                raise RuntimeError(
                    f"buffer {min(late)} was registered by a forward: on several workers its values would differ. "
                    "Register it in __init__, run one forward before the optimizer is made, or with persistent=False"
                )

    def _lane(self) -> int:
        """That of an optimizer whose parameters it takes over; else a new one."""
        for older in (owner(p) for params in self._trained() for p in params):
            if older is not None and not older.superseded and older.lane < self._session.lanes_used:
                return older.lane
        return self._session.new_lane()

    # -- p.grad ---------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        try:
            self.engine.finish()
        except RuntimeError as error:
            if not self.leave_to_loop(error):
                raise
        reduced = self.engine.reduced
        if reduced is None:
            return
        unused = self._unused = self._unused_by_all(reduced)
        if reduced.now.done and len(self.in_doubt) == len(self.engine.params):  # no backward at all
            self._unused = self.in_doubt.copy()
        self._had_gradients |= len(unused) < len(self.engine.params)
        self._show_gradients(unused)

    def _show_gradients(self, unused: Collection[int] = ()) -> None:
        """Sets each `p.grad` to what its bucket has, but for those that are `unused`."""
        for bucket in self.engine.gradient_buckets:
            if bucket.visible is not bucket.mean:
                bucket.visible.copy_(bucket.mean)
            bucket.put_back(bucket.displaced())
            for p, index, view in zip(bucket.of(self.engine.params), bucket.layout.params, bucket.views, strict=True):
                if index not in unused:
                    p.grad = view

    def _unused_by_all(self, reduced: Reduced) -> Collection[int]:
        """The parameters that no worker gave a gradient, which keep no `.grad`; those in doubt are not among them.

        In doubt is, on a GPU with several workers, what this worker gave none: only the device knows whether another
        one did. An optimizer that can leave a parameter alone on the device takes zeros for it; else the host waits.
        """
        self.in_doubt = set()
        resumed = self.engine.kept is not None and self.engine.kept.resumed  # of a group of several
        if reduced.used is None or (self._session.group.size == 1 and not resumed):
            return reduced.unused
        if devices.of(self.engine.device).asynchronous and self._updates.skips_on_device:
            self.in_doubt = set(reduced.unused)
            return ()
        return {index for index, count in enumerate(reduced.used.tolist()) if count == 0}

    def take(self, uses_scaler: bool) -> Reduced | None:
        """Returns the step's complete reduction; None without gradients, or if the loop handles a lost worker."""
        if self.engine.reduced is None:
            if self.lost_worker_error is None and any(p.grad is not None for p in self.engine.params):
                self._take_gradients_set_by_hand(uses_scaler)
            self.synchronize()
        reduced, self.engine.reduced = self.engine.reduced, None
        if not self.has_pass:
            raise RuntimeError(
                f"{type(self._updates.opt).__name__}.step(): this optimizer has had no pass in this body: write `for "
                "batch in step.micro_batches(opt)` before; what other passes' backwards give its parameters is dropped"
            )
        had_pass = reduced is not None or self.engine.bare_backwards  # else its update was made before a loss
        if self.engine.params and not self._had_gradients and self.lost_worker_error is None and had_pass:
            # The loss may be that of another model or of a copy, or FSDP has replaced the parameters.
            self._had_gradients = True
            _LOG.warning(
                "%s.step(): none of its %d parameters has ever had a gradient, so nothing is trained. "
                "Does the loss come from the model whose parameters it was given?",
                type(self._updates.opt).__name__,
                len(self.engine.params),
            )
        if reduced is not None:
            self._take_back_gradients()
        return reduced

    def _take_gradients_set_by_hand(self, uses_scaler: bool) -> None:
        if self.engine.now.begun:
            return
        refuse_sharded(named_parameters(self._updates.opt.param_groups))
        if self._session.group.size > 1 and uses_scaler:
            raise RuntimeError(
                "GradScaler has looked for infinities in this worker's gradients before they were reduced over all "
                "workers: with several workers and a GradScaler, gradients must come from backward, not from p.grad = "
            )
        self.engine.take_gradients()

    def _take_back_gradients(self) -> None:
        """Where the user replaced a `p.grad` or its `.data` (it may also be changed in place), buckets get the values.

        Raises RuntimeError where `.data` has another shape now, where a further backward reached sharded gradients, and
        where a `p.grad` was set of which the reduction had none: on each worker it may be another one.
        """
        replaced: list[tuple[Bucket, int, Tensor]] = []
        for bucket in self.engine.gradient_buckets:
            if bucket.added_to:
                raise RuntimeError(f"another backward before opt.step() reached its gradients: {REMEDY}")
            displaced, grads = bucket.displaced(), [p.grad for p in bucket.of(self.engine.params)]
            if not displaced and all(map(operator.is_, grads, bucket.views)):
                continue
            for k, (index, view) in enumerate(zip(bucket.layout.params, bucket.views, strict=True)):
                p = self.engine.params[index]
                if p.grad is None or (p.grad is view and k not in displaced):
                    continue
                name = self.engine.names[index]
                if index in self._unused and p.grad.any():  # zeros in place of None are the same everywhere
                    raise RuntimeError(
                        f"the gradient of {name} was set by hand (p.grad = ...) after the step's gradients were "
                        "reduced over the workers: set it before the step's last micro-batch ends, in the loop over "
                        "`step` or in `with opt.micro_batch(...)`; it is that micro-batch's mean gradient"
                    )
                if p.grad.shape != p.shape:
                    found = tuple(p.grad.shape)
                    raise RuntimeError(f"{name} of shape {tuple(p.shape)}: its p.grad.data has shape {found}")
                replaced.append((bucket, k, p.grad.clone()))  # gradients may lie in each other's places
            bucket.put_back(displaced)
        for bucket, k, gradient in replaced:
            index = bucket.layout.params[k]
            self.engine.params[index].grad = bucket.views[k]
            bucket.view(bucket.visible)[k].copy_(gradient)
            self.in_doubt.discard(index)

    # -- a lost worker --------------------------------------------------------------------------------------------

    def leave_to_loop(self, error: RuntimeError) -> bool:
        """Whether the loop handles this error (a lost worker or supervisor). If so, aborts the step and keeps it.

        The body goes on to its end, so each parameter has a gradient that it can read, which nothing is updated with.
        """
        if not (self.loop_handles_lost_workers and isinstance(error, CommError | ControlError)):
            return False
        self.lost_worker_error = error
        self.engine.abort()
        if not self.engine.options.sharded:  # else those that are reduced are kept, and none can be read
            self._show_gradients()
        return True

    def _unscale(self, buckets: Sequence[int], found_inf: Tensor, inv_scale: Tensor) -> None:
        """GradScaler's check of gradients that are sharded, the same on all workers. Nothing waits for a GPU."""
        reduced = self.engine.reduced
        if reduced is None:
            raise RuntimeError("GradScaler looks at gradients that opt.step() has used: call opt.zero_grad() after it")
        _, finite = squared_norm_of(reduced, self.engine)
        bad = ~torch.as_tensor(finite, device=found_inf.device)
        torch.maximum(found_inf, bad.to(found_inf.dtype), out=found_inf)  # it is asked once for each dtype
        for bucket in (self.engine.gradient_buckets[index] for index in buckets):
            bucket.own.mul_(inv_scale.to(bucket.device))
