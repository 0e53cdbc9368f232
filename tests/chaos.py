"""Faults, struck inside worker processes: `policy._target_=chaos.Chaos` makes a worker die or hang at a given moment.

An event is {step, moment, how} with a `rank`, and `workers`, how many there must be (at least rank + 1 and 2). It
strikes once a job, at the first such moment from that step on, once every event of an earlier step has struck.
Training waits shortly before an event's step until enough workers are there. `Chaos._patch` has the moments.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty

from kfuse import BasePolicy, session
from kfuse.comm import chunks
from kfuse.comm.group import CommError
from kfuse.elastic import protocol, rendezvous
from kfuse.policies import GNSPolicy, SchedulePolicy
from kfuse.policies.signals import Decision, Signals

_OF_NEWCOMERS = ("boot", "joining", "source", "receiver", "sending", "receiving")
_ANY_STEP = (*_OF_NEWCOMERS, "recovery", "handing over", "resharding", "resharded")
_AHEAD = 8  # steps: a proposed view is in force within four
_PATIENCE_S = 240.0


def strike(how: str) -> None:
    """Ends, hangs or delays this process, or cuts its host off."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill_all":  # workers of this view at once, this one last
            view = session.current().view
            others = [] if view is None else [member.pid for member in view.members if member.pid != os.getpid()]
            for pid in [*others, os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        case "kill_host":  # this worker last
            members = session.current().view.members  # type: ignore[union-attr]
            own = next(member.host for member in members if member.pid == os.getpid())
            pids = [member.pid for member in members if member.host == own]
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        case "notice_stuck":  # in a call of C
            os.kill(os.getpid(), signal.SIGTERM)
            ctypes.CDLL(None).sleep(1000)
        case "notice_all":
            for member in session.current().view.members:  # type: ignore[union-attr]
                os.kill(member.pid, signal.SIGTERM)
        case "stuck_gil":
            ctypes.PyDLL(None).sleep(1000)
        case "exit":
            os._exit(3)
        case "lose_contact":  # with the others, which are well
            time.sleep(0.3)  # they go on meanwhile
            raise CommError("struck by chaos")
        case "linger":  # until a second worker has come
            while session.current().group.size < 2:
                time.sleep(0.001)
        case "wrong":  # from now on all gradients of this process are
            faulty.wrong_backwards = sys.maxsize
        case "wrong_once":
            faulty.wrong_backwards = 1
        case "exception":
            raise RuntimeError("struck by chaos")
        case "silence":  # of this host, a network namespace: no packet comes or goes, and nobody is told
            for chain in ("INPUT", "OUTPUT"):
                subprocess.run(["iptables", "-w", "-A", chain, "-j", "DROP"], check=True)
        case "unplug":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        case _ if how.startswith("apart_from "):  # this host and that address reach all others, and not each other
            for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
                subprocess.run(["iptables", "-w", "-A", chain, side, how.split()[1], "-j", "DROP"], check=True)
        case _:
            raise ValueError(f"how={how!r}: unknown")


class Chaos(BasePolicy):
    """Batch size by the gradient noise scale and the rest by a schedule, on workers that are lost now and then.

    directory: where each event leaves its mark. phases: SchedulePolicy's. gates: {step, workers}: training does not go
    beyond that step with another number of workers. topologies: {step, topology}: asked for at that step. adaptive:
    whether the batch size follows the noise scale. pace_s: a step takes at least this long, of the first `paced` ones.
    again: events may strike more than once. until: training does not end before this file is there. checkpoints:
    {directory, every} of the job: training waits for each one that is due, so that it does not run ahead of the disk.
    """

    is_plan, owned_fields = True, ("batch_size", "workers")  # whatever the machine's speed

    def __init__(
        self,
        directory: str,
        events: Sequence[Mapping[str, Any]] = (),
        phases: Sequence[Mapping[str, Any]] = (),
        gates: Sequence[Mapping[str, Any]] = (),
        topologies: Sequence[Mapping[str, Any]] = (),
        adaptive: bool = True,
        pace_s: float = 0.0,
        paced: int = 10**6,
        again: bool = False,
        until: str | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._directory, self._again, self._pace_s, self._paced = Path(directory), again, pace_s, paced
        self._until = Path(until) if until else None
        self._checkpoints, self._chunk_bytes = checkpoints, chunk_bytes
        self._events = [dict(event) for event in events]
        self._gates = list(gates)
        self._topologies: dict[int, str] = {item["step"]: item["topology"] for item in topologies}
        self._schedule = SchedulePolicy(phases)
        self._adapts = GNSPolicy(every=5) if adaptive else BasePolicy()
        self._trainer: Any = None
        self._messages = 0
        self._began = time.monotonic()
        if protocol.ENV_WORKER in os.environ:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._patch()
            self._reached("boot", None)

    # -- the policy -----------------------------------------------------------------------------------------------

    def decide(self, signals: Signals) -> Decision | None:
        batch = self._adapts.decide(signals) or Decision()
        planned = self._schedule.decide(signals) or Decision()
        decision = replace(batch, workers=None).merged(planned)  # the number of workers is not the statistics' to say
        if signals.step in self._topologies:
            decision = replace(decision, topology=self._topologies[signals.step])
        return None if decision.is_empty else decision

    def state_dict(self) -> dict[str, Any]:
        return self._adapts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adapts.load_state_dict(state)

    def before_step(self) -> None:
        while self._step < self._paced and time.monotonic() - self._began < self._pace_s:
            time.sleep(0.001)
            self._check()
        until = self._until
        if until is not None and self._step >= 50:
            self._await(lambda _: until.exists(), {"until": str(until)})
        self._await_checkpoint()
        self._began = time.monotonic()
        for gate in self._gates:
            # Once it was passed the number may change again.
            if gate["step"] - _AHEAD <= self._step <= gate["step"]:
                self._await(lambda size, gate=gate: size == gate["workers"], gate)  # type: ignore[misc]
        for index, event in enumerate(self._events):
            if self._step >= event["step"] - _AHEAD and self._armed(event):
                self._await_workers_for(event, self._mark(index))

    def after_step(self) -> None:
        self._reached("after_step", session.current().group.rank)

    # -- waiting for workers --------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return 0 if self._trainer is None else int(self._trainer.progress.step)

    def _check(self) -> None:
        if session.current().elastic:
            session.current().check()

    def _await_checkpoint(self) -> None:
        if self._checkpoints is not None and self._step and self._step % self._checkpoints["every"] == 0:
            written = Path(self._checkpoints["directory"], f"step-{self._step:08d}")
            self._await(lambda _: written.exists(), {"written": written.name})

    def _await_workers_for(self, event: Mapping[str, Any], mark: Path) -> None:
        of_newcomers = event["moment"] in _OF_NEWCOMERS
        needed = max(event.get("workers", 2), event.get("rank", 0) + 1)
        self._await(lambda size: mark.exists() or (size >= needed and not of_newcomers), event)

    def _await(self, right: Callable[[int], bool], why: Mapping[str, Any]) -> None:
        """Waits until it is right, or another view is on its way: that one needs steps to be made."""
        own, deadline = session.current(), time.monotonic() + _PATIENCE_S
        client = own.link
        while own.elastic and own.view is not None and not right(own.group.size):
            if client.view(own.view.generation) or client.stop:
                return
            assert time.monotonic() < deadline, f"{own.group.size} workers at step {self._step}: no good for {why}"
            time.sleep(0.005)
            self._check()

    # -- events ---------------------------------------------------------------------------------------------------

    def _mark(self, index: int) -> Path:
        return self._directory / f"event-{index}"

    def _armed(self, event: Mapping[str, Any]) -> bool:
        earlier = (i for i, other in enumerate(self._events) if other["step"] < event["step"])
        return all(self._mark(i).exists() for i in earlier)

    def _reached(self, moment: str, rank: int | None) -> None:
        """`rank`: this worker's, None where it has none yet."""
        for index, event in enumerate(self._events):
            here = event["moment"] == moment and rank in (None, event.get("rank", 0))
            # New workers, and those that recover or receive, know no step, or an old one: what came before counts.
            reached = moment in _ANY_STEP or self._step >= event["step"]
            reached = reached and event.get("message", self._messages) == self._messages
            reached = reached and not (moment == "sending" and self._step == 0)  # as the job starts
            if here and reached and self._armed(event):
                self._strike(index, event, rank)

    def _strike(self, index: int, event: Mapping[str, Any], rank: int | None) -> None:
        try:
            with self._mark(index).open("x") as file:
                json.dump({"pid": os.getpid(), "rank": rank, "step": self._step}, file)
        except FileExistsError:
            if not self._again:
                return
        strike(event["how"])

    def _patch(self) -> None:
        """Has `_reached` called at each of the moments."""
        from kfuse.checkpoint.format import _HashedFile
        from kfuse.comm.engine import Engine
        from kfuse.comm.executor import Executor
        from kfuse.comm.gloo import GlooGroup
        from kfuse.comm.transports import AllReduce
        from kfuse.comm.transports.all_to_all import AllToAll, Swap, TwoWorkers
        from kfuse.optim import base, sharding
        from kfuse.train import audit, evaluation, trainer

        def nothing(*_: Any, **__: Any) -> None: ...

        def before(owner: Any, name: str, look: Callable[..., None], then: Callable[..., None] = nothing) -> None:
            original = getattr(owner, name)

            def patched(*args: Any, **kwargs: Any) -> Any:
                look(*args, **kwargs)
                result = original(*args, **kwargs)
                then(*args, **kwargs)
                return result

            setattr(owner, name, patched)

        def here(moment: str) -> Callable[..., None]:
            return lambda *_, **__: self._reached(moment, session.current().group.rank)

        def steps(training: Any) -> None:
            self._trainer = training

        def digests(_: Any, __: Any, ___: Any, what: str) -> None:
            self._reached("audit" if what == "audit" else "third run", session.current().group.rank)

        def launched(_: Any, key: int, *__: Any) -> None:
            if key == 0:  # the last bucket's has not started
                self._reached("mid_reduction", session.current().group.rank)

        def share(group: Any, source: int, _: Any, room: Any) -> None:
            self._reached("source" if group.rank == source else "receiver", group.rank)
            role, self._messages = "sending" if group.rank == source else "receiving" if room else "", 0

            def sent(*_: Any) -> None:
                self._reached(role, None if role == "sending" else group.rank)  # the source is one, whichever it is
                self._messages += 1

            kind = type(group)
            if not hasattr(kind.broadcast, "patched"):
                before(kind, "broadcast", lambda *arguments: self._sent(*arguments))
                kind.broadcast.patched = True
            self._sent = sent

        def shared(*_: Any, **__: Any) -> None:
            self._sent = lambda *_: None

        def form(view: Any, rank: int, *_: Any) -> None:
            self._reached("recovery" if view.recovers else "joining", rank)

        before(trainer.Trainer, "steps", steps)
        before(Engine, "open", here("forward"))
        for transport in (AllToAll, AllReduce, Swap, TwoWorkers):
            before(transport, "launch", nothing, launched)
        before(Engine, "finish", nothing, here("reduced"))  # on all workers, and the optimizer does not know yet
        before(base, "scaling", here("between_reduction_and_update"))
        before(Executor, "share_sums", here("point"))  # all gradients are here, and nobody knows that of all others
        before(Executor, "updates", here("updating"))  # all workers have all gradients
        updates = Executor.updates

        def updated(*arguments: Any) -> Any:
            yield from updates(*arguments)
            self._reached("updated", session.current().group.rank)  # as the last message of the update is over

        Executor.updates = updated  # type: ignore[method-assign]
        before(GlooGroup, "share", here("sharing"))  # a bucket's shard is updated, and no other worker has it
        before(sharding, "hand_over", here("handing over"))
        before(sharding, "regroup", here("resharding"), here("resharded"))
        before(audit.Audit, "_gather", digests, here("audited"))
        before(evaluation, "evaluate", here("evaluation"), here("evaluated"))
        before(_HashedFile, "sync", here("checkpoint_write"))
        before(chunks, "share", share, shared)
        if self._chunk_bytes is not None:
            chunks.CHUNK_BYTES = self._chunk_bytes
        before(rendezvous, "form_group", form)
