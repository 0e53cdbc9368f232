"""From micro-batches to `p.grad`: an optimizer's engine, and what it has reduced.

After the last micro-batch's backward the reduction is waited for and each `p.grad` is the mean gradient over the
global batch (a view of its bucket), as with DistributedDataParallel; of a bf16 parameter rounded to bf16, as torch
wants it, while the bucket has it in fp32.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection

from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.engine import Engine
from kfuse.comm.gradients import owner
from kfuse.comm.group import CommError
from kfuse.comm.step import Reduced
from kfuse.elastic.protocol import ControlError
from kfuse.membership import Session
from kfuse.optim.consistency import averaged_buffers, carried_states
from kfuse.optim.refuse import refuse_sharded
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
        self.unused: set[int] = set()  # parameters that no worker gave a gradient in the step that was reduced last
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
        self.unused = set(self._unused_by_all(reduced))
        self._had_gradients |= len(self.unused) < len(self.engine.params)
        self._show_gradients(self.unused)

    def _show_gradients(self, unused: Collection[int] = ()) -> None:
        """Sets each `p.grad` to what its bucket has, but for those that are `unused`. With sharded state none has."""
        for bucket in self.engine.gradient_buckets:
            if bucket.visible is not bucket.mean:
                bucket.visible.copy_(bucket.mean)
            if not bucket.are_views():  # the model's memory format has changed since, and gradients with it
                bucket.renew_views()
            for p, index, view in zip(bucket.of(self.engine.params), bucket.layout.params, bucket.views, strict=True):
                if view is not None and index not in unused:
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
            self._take_back_gradients(reduced)
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

    def _take_back_gradients(self, reduced: Reduced) -> None:
        """Where the user replaced a `p.grad` (it may also be changed in place), buckets get the values.

        Raises RuntimeError where its `.data` was replaced, and where `p.grad` was set for a parameter that no worker
        gave a gradient: each worker may have set another one.
        """
        no_backward = reduced.now.done > 0 and len(self.in_doubt) == len(self.engine.params)
        replaced: list[tuple[Bucket, int, Tensor]] = []
        for bucket in self.engine.gradient_buckets:
            if not bucket.are_views():
                raise RuntimeError("p.grad.data = ... after backward: set p.grad = ..., or change p.grad in place")
            if all(map(operator.is_, [p.grad for p in bucket.of(self.engine.params)], bucket.views)):
                continue
            for k, (index, view) in enumerate(zip(bucket.layout.params, bucket.views, strict=True)):
                p = self.engine.params[index]
                if p.grad is None or p.grad is view:
                    continue
                if (no_backward or index in self.unused) and p.grad.any():  # zeros for None are the same everywhere
                    raise RuntimeError(
                        f"the gradient of {self.engine.names[index]} was set by hand (p.grad = ...) after the step's "
                        "gradients were reduced over the workers: set it before the step's last micro-batch ends, in "
                        "the loop over `step` or in `with opt.micro_batch(...)`; it is that micro-batch's mean gradient"
                    )
                replaced.append((bucket, k, p.grad.clone()))  # gradients may lie in each other's places
        for bucket, k, gradient in replaced:
            index = bucket.layout.params[k]
            self.engine.params[index].grad = bucket.views[k]
            bucket.view(bucket.visible)[k].copy_(gradient)
            self.in_doubt.discard(index)
            self.unused.discard(index)

    # -- a lost worker --------------------------------------------------------------------------------------------

    def leave_to_loop(self, error: RuntimeError) -> bool:
        """Whether the loop handles this error (a lost worker or supervisor). If so, aborts the step and keeps it.

        The body goes on to its end, so each parameter has a gradient that it can read, which nothing is updated with.
        """
        if not (self.loop_handles_lost_workers and isinstance(error, CommError | ControlError)):
            return False
        self.lost_worker_error = error
        self.engine.abort()
        self._show_gradients()
        return True
