"""An optimizer's engine: it is laid out over the parameters that are trained, and the optimizer takes its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import Parameter

from kfuse.comm import gradients
from kfuse.comm.engine import Engine
from kfuse.comm.group import CommError
from kfuse.comm.parts import owner
from kfuse.comm.step import Step
from kfuse.elastic.protocol import ControlError
from kfuse.membership import Session
from kfuse.optim.consistency import averaged_buffers, carried_states, salt
from kfuse.optim.refuse import refuse_sharded
from kfuse.optim.updates import Updates, named_parameters

if TYPE_CHECKING:
    from kfuse.optim.shards import Shards

_REQUIRES_GRAD = attrgetter("requires_grad")
_LOG = logging.getLogger("kfuse")


class Reducer(Engine):
    """Reduces an optimizer's gradients over the workers, and speaks with the loop that trains it."""

    # Set by kf.DataLoader's loop: when a worker is lost `step()` does nothing, and the loop takes the error.
    loop_handles_lost_workers = False
    lost_worker_error: RuntimeError | None = None  # has aborted the step under way; the loop takes it
    tracked: nn.Module | None = None  # whose buffers' changes are averaged
    unit = "micro-batches"  # of the statistics: these, or samples
    has_pass = True  # of several optimizers that step in one body: this one's pass has begun in it
    shards: Shards | None  # where parameters are sharded over the processes of this worker
    _had_gradients = False  # some parameter has ever had a gradient, or it was warned that none has

    def __init__(self, session: Session, updates: Updates) -> None:
        """updates: have the optimizer, of whose parameters those that are trained are reduced."""
        self._session, self._updates, self.shards = session, updates, None
        if session.replica is not None:
            from kfuse.optim.shards import Shards  # few jobs need it

            self.shards = updates.shards = Shards(updates.opt, session.replica)
            self.commit = self.shards.commit
        groups, names, costs = self._layout()
        super().__init__(groups, session.group, session.comm, names, self._lane(), session.mirrors, costs)
        updates.lay_out(self)

    # -- its layout -----------------------------------------------------------------------------------------------

    def _trained(self) -> list[list[Parameter]]:
        """The parameters that may share a bucket: of each parameter group those that are trained."""
        trained = [[p for p in group["params"] if p.requires_grad] for group in self._updates.opt.param_groups]
        return trained if self.shards is None else [[*map(self.shards.plain, params)] for params in trained]

    def _ids_of_trained(self) -> list[list[int]]:
        every = [group["params"] for group in self._updates.opt.param_groups]
        return [list(compress(map(id, params), map(_REQUIRES_GRAD, params))) for params in every]

    def _layout(self) -> tuple[list[list[Parameter]], list[str], list[int | None]]:
        """Returns the arguments of `lay_out`. Raises ValueError for parameters that cannot be laid out."""
        named = named_parameters(self._updates.opt.param_groups)
        if self.shards is None:
            refuse_sharded(named)
        else:
            self.shards.lay_out(named)
        self._updates.check_layout(named)
        trained, costs = self._trained(), list[int | None]()
        for params, group in zip(trained, self._updates.opt.param_groups, strict=True):
            costs += self._updates.owner_costs(params, group) or [None] * len(params)
        return trained, [name for p, name in named if p.requires_grad], costs

    def lay_out(self, *arguments: Any) -> None:
        super().lay_out(*arguments)
        self._laid_out = self._ids_of_trained()

    def rebuild(self) -> None:
        if self.reduced is not None or (self.now.begun and not self.interrupted):
            raise RuntimeError("parameters can change between steps, not between backward and opt.step()")
        plan = self.now.plan
        with self._updates.shards_shown():
            self.lay_out(*self._layout())
            if self.tracked is not None:
                self.track_buffers(averaged_buffers(self.tracked), carried_states(self.tracked))
            self._updates.lay_out(self)
        if plan is not None:
            self.begin(plan)

    def refuse_changed(self) -> None:
        """Raises RuntimeError if parameters were frozen, unfrozen or moved to another group since."""
        trained = self._ids_of_trained()
        if trained != self._laid_out and [set(ids) for ids in trained] != [set(ids) for ids in self._laid_out]:
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
            if list(map(id, buffers.values())) != list(map(id, self.averaged.tensors)):
                self.track_buffers(buffers, carried_states(self.tracked))

    def refuse_late_buffers(self) -> None:
        """After the first step. Raises RuntimeError if a forward has registered buffers: nothing averages those."""
        if self.tracked is not None and (self._session.elastic or self._session.group.size > 1):
            late = averaged_buffers(self.tracked).keys() - self.averaged.named.keys()
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

    # -- a step ---------------------------------------------------------------------------------------------------

    @property
    def skips_on_device(self) -> bool:
        return self._updates.skips_on_device

    def compared(self) -> tuple[Sequence[Tensor], int]:
        opt: Any = self._updates.opt
        return [counts for _, counts in self._updates.counts()], salt(opt.numbers())

    def finish(self) -> None:
        try:
            super().finish()
        except (CommError, ControlError) as error:
            if not self.leave_to_loop(error):
                raise
        if (reduced := self.reduced) is not None:
            self._had_gradients |= len(reduced.left_out) < len(self.params)
            if self.shards is not None:
                self.shards.show()

    def over_ranks(self, total: Tensor) -> Tensor:
        return total if self.shards is None else self.shards.replica.gather(total, "sums of squares").sum(0)

    def take_complete(self, uses_scaler: bool) -> Step | None:
        """Takes the step's complete reduction. Returns None without gradients, or if the loop handles a lost worker."""
        if self.shards is not None:
            self.shards.take_back()
        if (reduced := self.take()) is None:
            if self.lost_worker_error is None and any(p.grad is not None for p in self.params):
                self._take_gradients_set_by_hand(uses_scaler)
            self.finish()
            reduced = self.take()
        if not self.has_pass:
            raise RuntimeError(
                f"{type(self._updates.opt).__name__}.step(): this optimizer has had no pass in this body: write `for "
                "batch in step.micro_batches(opt)` before; what other passes' backwards give its parameters is dropped"
            )
        had_pass = reduced is not None or self.bare_backwards  # else its update was made before a loss
        if self.params and not self._had_gradients and self.lost_worker_error is None and had_pass:
            # The loss may be that of another model or of a copy, or FSDP has replaced the parameters.
            self._had_gradients = True
            _LOG.warning(
                "%s.step(): none of its %d parameters has ever had a gradient, so nothing is trained. "
                "Does the loss come from the model whose parameters it was given?",
                type(self._updates.opt).__name__,
                len(self.params),
            )
        if reduced is not None:
            gradients.take_back(self.gradient_buckets, self.names, reduced)
        return reduced

    def _take_gradients_set_by_hand(self, uses_scaler: bool) -> None:
        if self.now.begun:
            return
        if self.shards is None:
            refuse_sharded(named_parameters(self._updates.opt.param_groups))
        if self._session.group.size > 1 and uses_scaler:
            raise RuntimeError(
                "GradScaler has looked for infinities in this worker's gradients before they were reduced over all "
                "workers: with several workers and a GradScaler, gradients must come from backward, not from p.grad = "
            )
        self.take_gradients()

    # -- a lost worker --------------------------------------------------------------------------------------------

    def leave_to_loop(self, error: RuntimeError) -> bool:
        """Whether the loop handles this error (a lost worker or supervisor). If so, aborts the step and keeps it.

        The body goes on to its end, so each parameter has a gradient that it can read, which nothing is updated with.
        """
        if not (self.loop_handles_lost_workers and isinstance(error, CommError | ControlError)):
            return False
        self.lost_worker_error = error
        self.abort()
        gradients.show(self.gradient_buckets)
        if self.shards is not None:
            self.shards.show()
        return True
