"""Snapshots of the training state in the workers' own memory (`elastic.redundancy=snapshot`).

Every `elastic.snapshot_every` steps each worker copies what all workers have alike, and its shards of the optimizer's
state, which it also sends to the next worker, while training goes on. After a loss all go back to the newest snapshot
that is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kfuse.checkpoint import snapshot
from kfuse.comm.group import CommError, Pending
from kfuse.membership import Session
from kfuse.optim import DistributedOptimizer
from kfuse.optim.flat_updates import FlatUpdates
from kfuse.optim.layout import Part
from kfuse.train.state import TrainingState


@dataclass
class _Snapshot:
    step: int
    common: dict[str, Any]
    """What all workers have alike, on the host."""
    shards: list[list[Part]]
    """Of each bucket: this worker's own, and the one of the worker before."""
    arriving: list[Pending]
    """The messages that bring the latter."""

    def is_complete(self) -> bool:
        """Whether all has arrived. Does not wait; a message that has failed never arrives."""
        try:
            while self.arriving and self.arriving[-1].done():
                self.arriving[-1].wait()
                self.arriving.pop()
        except CommError:
            return False
        return not self.arriving


class Snapshots:
    """This worker's snapshots of one training."""

    def __init__(self, session: Session, opt: DistributedOptimizer, state: TrainingState) -> None:
        assert isinstance(opt.updates, FlatUpdates), "only these optimizers have sharded state"
        self._session, self._opt, self._flat, self._state = session, opt, opt.updates.flat, state
        self._every = session.comm.snapshot_every
        self._newest: _Snapshot | None = None
        self._complete: list[_Snapshot] = []
        """One or two, the newer one last: another worker may still wait for its part of that."""

    def take_when_due(self, step: int) -> None:
        """Between two steps, on every worker: copies the state, and starts sending the shards. step: completed ones.

        Raises CommError where those of the snapshot before do not arrive.
        """
        group = self._opt.engine.group
        if self._newest is not None and step > self._newest.step:
            # All workers have made a step since it was taken, and so had all of the one before.
            self._complete = self._complete[-1:]
        if step % self._every or group.size == 1:
            return
        if self._newest is not None:
            for message in self._newest.arriving:
                message.wait()
        self._keep_complete()
        copied, arriving = [], list[Pending]()
        for number, (bucket, of_bucket) in enumerate(self._flat.pairs()):
            own = of_bucket.own
            mine = {name: tensor.clone() for name, tensor in own.tensors.items()}  # updates change it meanwhile
            before = group.shards(bucket.body, self._opt.engine.shard_unit)[group.rank - 1]
            theirs = {name: torch.empty(before.stop - before.start, device=bucket.device) for name in mine}
            for name, tensor in mine.items():
                what = f"step {step}, snapshot of bucket {number + 1}, {name}"
                arriving.append(group.pass_on(theirs[name], tensor, what))
            copied.append([Part(own.place, mine), Part(before, theirs)])
        common = snapshot(self._state.capture_common(), "the training state")
        self._newest = _Snapshot(step, common, copied, arriving)

    def _keep_complete(self) -> None:
        if self._newest is not None and self._newest.is_complete():
            self._newest.shards = [
                [Part(part.place, {name: tensor.cpu() for name, tensor in part.tensors.items()}) for part in parts]
                for parts in self._newest.shards
            ]
            self._complete, self._newest = [*self._complete, self._newest], None

    def agree(self) -> int:
        """In a new view, on every worker: keeps the newest snapshot that is complete on all workers that have any.

        Returns its step; -1 where there is none. Raises CommError.
        """
        self._keep_complete()
        group = self._session.group
        mine = torch.tensor([self._complete[-1].step if self._complete else -1], device=group.device)
        steps = [int(step) for step in group.all_gather(mine, "newest snapshot of each worker")]
        agreed = min((step for step in steps if step >= 0), default=-1)
        self._complete, self._newest = [each for each in self._complete if each.step == agreed], None
        return agreed

    def go_back(self) -> bool:
        """In a new view, on every worker: takes the snapshot that they `agree` on. Returns whether this worker has it.

        The shards come to their owners by the optimizer's `regroup`. Raises CommError.
        """
        if self.agree() < 0 or not self._complete:
            return False
        self._state.restore_common(self._complete[-1].common, keeps_shards=False)
        self._flat.take_shards(self._complete[-1].shards)
        return True
