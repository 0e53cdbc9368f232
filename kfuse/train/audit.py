"""Audits: every `comm.audit_every` steps a micro-batch is run on two workers, whose gradients must have the same bits.

With comm.reproducible=true a micro-batch's gradient does not depend on the worker. So where two workers' bits differ,
one of them computes wrongly. No error tells so, and as all workers add up the same gradients parameters are equal.

1) Before the step all workers choose the same micro-batch: its owner is the worker whose turn it is, and within the
   owner's range a random number of (seed, step) decides.
2) The owner takes the digest of its gradient as backward produces it.
3) After the reduction, and before the update changes the parameters, the next rank runs the micro-batch again. Its
   gradients reach no bucket. The digests are gathered.
4) Where they differ a third worker runs it too: the one that the other two contradict computes wrongly.

A wait for another worker may fail in 3) and 4): then the step is undone and comes again, as after any loss.

What follows, `comm.audit_on_corruption` says. With `replace` the step is undone, since its sum may have the wrong
gradient: the supervisor ends the worker, and the others make the step again as after any loss. With `stop` it is undone
too, and the state before it is the last checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.audit import AuditedGradient
from kfuse.comm.group import CommError, Group
from kfuse.data.fetching import random_key
from kfuse.elastic.protocol import Member
from kfuse.membership import Session
from kfuse.optim import ConsistencyError
from kfuse.train.again import Buffer, buffers_of, put_back, undisturbed
from kfuse.train.arguments import TrainArguments
from kfuse.train.loss import Forward
from kfuse.train.progress import Progress
from kfuse.train.reporter import Reporter
from kfuse.train.step import Step, StepSamples

_LOG = logging.getLogger("kfuse")

_AUDITING = 2**63 - 27  # in the keys of choosing: no other use of the seed has it


class Chosen(NamedTuple):
    """The micro-batch of a step that is audited."""

    micro_batch: int
    # The workers that run it, in order: its owner in the step, the checker (on one worker the owner itself), and where
    # they differ a third one, if there are so many workers.
    ranks: tuple[int, ...]


def choose(step: int, every: int, samples: StepSamples, seed: int) -> Chosen | None:
    """The audit of this step, a function of these arguments alone; None: the step has none.

    The owners take turns: of any n audits on n workers each worker is the owner of one, and the checker of one.
    """
    if step % every:
        return None
    owners = [rank for rank in range(samples.workers) if samples.ranges[rank]]
    owner = owners[step // every % len(owners)]
    mine, size = samples.ranges[owner], samples.workers
    micro_batch = mine[random_key(seed, _AUDITING, step) % len(mine)]
    return Chosen(micro_batch, tuple((owner + place) % size for place in range(min(max(size, 2), 3))))


@dataclass(eq=False)
class Audit:
    """The audits of one training, on this worker."""

    given: TrainArguments
    session: Session
    forward: Forward
    progress: Progress
    reporter: Reporter
    save_last: Callable[[], None]  # writes a last checkpoint
    _chosen: Chosen | None = None  # the audit of the step under way
    _before: list[Buffer] = field(default_factory=list)  # in such a step: the model's buffers before it
    _unequal: Group | None = None  # the newest group whose workers differ in kind: no audit takes place in it
    _warned: set[tuple[int, ...]] = field(default_factory=set)  # the workers, together, that a warning was logged for
    _made_again: int | None = None  # the newest step that is made again because gradients of it differed

    def __post_init__(self) -> None:
        """Raises ValueError where kfuse cannot run a micro-batch again."""
        every = self.session.comm.audit_every
        assert every is not None
        self._every, self._seed, self._opt = every, self.given.settings["seed"], self.given.opt
        self._audited: AuditedGradient  # of such a step
        if self.given.user_loop:
            raise ValueError(
                f"comm.audit_every={every}: must be None with kf.DataLoader, as kfuse cannot run the body of your loop "
                "again; kf.fit can"
            )

    def before_step(self, samples: StepSamples) -> int | None:
        """Chooses the coming step's audit. Returns its micro-batch, for the step's plan; None if there is no audit."""
        self._chosen, self._before, self._opt.engine.audited = None, [], None
        at = self.progress
        # Where workers are not synchronised at every step, each has parameters of its own.
        if not at.is_local and self.session.group is not self._unequal:
            self._chosen = choose(at.step, self._every, samples, self._seed)
        if self._chosen is None:
            return None
        self._before = buffers_of(self.given.model)
        engine = self._opt.engine
        engine.audited = self._audited = AuditedGradient(engine.gradient_buckets, engine.device)
        return self._chosen.micro_batch

    def compare(self, step: Step) -> None:
        """After this worker's last backward of the step, before its update: runs the audit, if the step has one.

        Every worker calls it. All learn the outcome, and report it in the same way. Parameters, buffers, gradients and
        random numbers are then as without an audit. If it raises, gradients are gone and buffers are as before the
        step. CommError: a worker was lost, or is replaced, and the step must be run again. ConsistencyError, on all
        workers: training must end.
        """
        if self._chosen is None:
            return
        try:
            self._opt.synchronize()  # a worker without a micro-batch takes part in the reduction only here
            found = self._run(step, self._chosen)
        except Exception:
            self._undo()
            raise
        if found is not None and self.session.comm.audit_on_corruption != "report":
            self._undo()
            self._answer(found)

    def _undo(self) -> None:
        self._opt.zero_grad()
        put_back(self._before)

    def _run(self, step: Step, chosen: Chosen) -> dict[str, Any] | None:
        """Returns the event that is reported, where gradients differ."""
        owner, checker, *third = chosen.ranks
        rank = self.session.group.rank
        first = self._audited.digest() if rank == owner else None
        again = self._digest_again(step, chosen.micro_batch) if rank == checker else None
        found = self._gather(first, again, "audit")
        if len({kind for _, _, kind in found}) > 1:
            self._unequal = self.session.group
            if rank == 0:
                _LOG.warning(
                    "comm.audit_every=%d: no audits with these workers: they must have one kind of device, one number "
                    "of CPU threads and one version of torch",
                    self._every,
                )
            return None
        digests = [found[owner][0], found[checker][1]]
        if digests[0] == digests[1]:
            return None
        for judge in third:
            again = self._digest_again(step, chosen.micro_batch) if rank == judge else None
            digests.append(self._gather(None, again, "audit, third worker")[judge][1])
        return self._report(step.number, chosen.micro_batch, chosen.ranks[: len(digests)], digests)

    # -- the second run -------------------------------------------------------------------------------------------

    def _digest_again(self, step: Step, micro_batch: int) -> Tensor:
        """Returns the digest of a micro-batch's gradient, of any worker's of the step. It changes nothing else."""
        engine = self._opt.engine
        params = list({id(p): p for p in (*self.given.model.parameters(), *engine.params)}.values())
        with undisturbed(self.given.model, params, engine.group.device):
            put_back(self._before)  # as for each of the step's micro-batches
            loss, _ = self.forward(step.batch_again(micro_batch))
            return self._audited.again(loss.backward)

    # -- the comparison -------------------------------------------------------------------------------------------

    def _gather(self, first: Tensor | None, again: Tensor | None, what: str) -> list[list[int]]:
        """By rank: the owner's digest in the step, the digest of a further run (0 where there is none each), and a
        number of the worker's kind. Waits for the device, and for the others. Raises CommError.
        """
        group = self.session.group
        text = f"{torch.get_num_threads()} {torch.__version__} {devices.of(group.device).model()}".encode()
        kind = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
        nothing, own_kind = (torch.full((), number, dtype=torch.int64, device=group.device) for number in (0, kind))
        mine = torch.stack([*(nothing if digest is None else digest for digest in (first, again)), own_kind])
        found: list[list[int]] = torch.stack(group.all_gather(mine, what)).tolist()
        return found

    def _report(self, step: int, micro_batch: int, ranks: Sequence[int], digests: Sequence[int]) -> dict[str, Any]:
        """The runs differ: an event on each such audit, which is returned; a warning once for the same workers."""
        session, at, wrong = self.session, self.progress, culprit(digests)
        members = None if session.view is None else session.view.members
        runs: list[dict[str, Any]] = []
        for rank, digest in zip(ranks, digests, strict=True):
            who = members[rank] if members else Member(0, os.getpid(), socket.gethostname())
            runs.append({**vars(who), "rank": rank, "digest": f"{digest % 2**64:016x}"})
        named = {name: None if wrong is None else runs[wrong][name] for name in ("worker", "rank")}
        note = _note(micro_batch, runs, wrong)
        about = {"micro_batch": micro_batch, **named, "note": note, "runs": runs}
        self.reporter.event(step, "corruption", **about)
        if wrong is not None and runs[wrong]["worker"] not in at.corrupt:
            at.corrupt = (*at.corrupt, runs[wrong]["worker"])
        suspects = tuple(sorted(run["worker"] for run in (runs if wrong is None else [runs[wrong]])))
        witness = 1 if named["rank"] == 0 else 0
        is_said = suspects in self._warned or session.comm.audit_on_corruption == "stop"  # by the error
        if not is_said and session.group.rank == witness:
            _LOG.warning("step %d: audit: %s", step, note)
        self._warned.add(suspects)
        return {"step": step, "kind": "corruption", **about}

    def _answer(self, event: dict[str, Any]) -> NoReturn:
        """The runs differ, and the step is undone. Raises CommError, and ConsistencyError, on all workers alike."""
        session, step, worker = self.session, event["step"], event["worker"]
        why = f"step {step}: audit: {event['note']}"
        replaces = session.comm.audit_on_corruption == "replace"
        if replaces and worker is not None:
            session.evict(worker, f"computed a wrong gradient at step {step}", event)
        elif replaces and self._made_again != step:  # a fault that passes is not met again
            self._made_again = step
        else:
            self.save_last()
            with contextlib.suppress(CommError):
                session.group.barrier("last checkpoint")  # a worker that ends may end the others
            session.link.give_up(why, event)
            raise ConsistencyError(why)
        raise CommError(f"{why}; the step is made again")


def culprit(digests: Sequence[int]) -> int | None:
    """Which of the runs, by its index, two others contradict, which agree; None if that is unknown."""
    if len(digests) < 3 or len(set(digests)) != 2:
        return None
    return next(index for index, digest in enumerate(digests) if digests.count(digest) == 1)


def _note(micro_batch: int, runs: Sequence[dict[str, Any]], wrong: int | None) -> str:
    names = [f"worker {run['worker']} (rank {run['rank']}, pid {run['pid']}, host {run['host']})" for run in runs]
    what = f"gradients of micro-batch {micro_batch}"
    if wrong is not None:
        others = " and ".join(str(run["worker"]) for index, run in enumerate(runs) if index != wrong)
        return f"{names[wrong]} computes wrongly: its {what} differ from those of workers {others}, which are equal"
    who = ", ".join(dict.fromkeys(names))
    if len(runs) == 2 and runs[0]["worker"] != runs[1]["worker"]:
        return f"{who} computed different {what}: one of them computes wrongly"
    return f"{who} computed different {what} in each run: the model is not deterministic, or a worker computes wrongly"
