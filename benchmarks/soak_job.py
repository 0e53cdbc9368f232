"""One job, struck again and again: the events, and what the supervisor and a witness hold on to after each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak_worker import EXIT, RAISE

from kfuse.elastic.processes import State, Worker
from kfuse.elastic.supervisor import Supervisor
from kfuse.observe.run_dir import RunDirectory

STRIKES = {"kill": signal.SIGKILL, "exception": RAISE, "exit": EXIT, "stop": signal.SIGSTOP}
WEIGHTS = {"kill": 4, "exception": 2, "exit": 2, "stop": 1, "grow": 3, "shrink": 2, "topology": 2}
START, MOST = 3, 4
_LONGEST_DELAY_S = 0.3
_STEPS_BETWEEN = 5
_DEADLINE_S = 180.0


class Recorder:
    """Keeps what workers report in the run directory, and wakes who waits for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(directory, sinks=(), ledger=True)
        self.step = -1
        self.lost: dict[int, str] = {}
        """How each lost worker ended, by pid."""
        self.changes: list[dict[str, Any]] = []
        self.stirred = asyncio.Event()

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Records as workers report them."""
        for kind, data in records:
            if kind == "start":
                continue
            getattr(self.directory, kind)(data)
            if kind == "metrics":
                self.step = max(self.step, data["step"])
            elif kind == "event" and data["kind"] == "failure":
                self.lost[data["pid"]] = data["how"]
            elif kind == "event" and data["kind"] in ("view", "decision"):
                self.changes.append(data)
        self.stirred.set()

    def line(self, text: str) -> None:
        """What struck workers print is known; of others, an error tells."""

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        """Raises AssertionError after the deadline."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while not true():
                    self.stirred.clear()
                    await self.stirred.wait()
        except TimeoutError:
            raise AssertionError(f"waited {_DEADLINE_S:.0f} s for {what}") from None


@dataclass
class Sample:
    """What is held after an event; `witness` is the oldest worker."""

    event: int
    kind: str
    step: int
    processes: int
    members: int
    keys: int
    supervisor: dict[str, float]
    witness: dict[str, float]
    witness_pid: int


@dataclass
class Soak:
    """Strikes a running job `events` times. From event `spare_from` on the oldest worker, the witness, is spared."""

    supervisor: Supervisor
    recorder: Recorder
    requests: Path
    events: int
    spare_from: int
    topologies: list[str]
    chance: random.Random
    done: Callable[[str], None]
    samples: list[Sample] = field(default_factory=list)
    struck: list[int] = field(default_factory=list)
    wish: dict[str, Any] = field(default_factory=lambda: {"workers": START, "topology": None, "asked": 0})

    def write_wish(self, **changes: Any) -> None:
        self.wish |= changes
        part = self.requests.with_suffix(".part")
        part.write_text(json.dumps(self.wish))
        os.replace(part, self.requests)

    def members(self) -> list[Worker]:
        return self.supervisor.processes.members()

    def settled(self) -> bool:
        members = self.members()
        return bool(members) and all(worker.state is State.MEMBER for worker in members)

    async def run(self) -> None:
        """Returns when all events are over, and their consequences in force; the job is then told to stop."""
        await self._steps(_STEPS_BETWEEN)
        for index in range(self.events):
            kind = self._next()
            await asyncio.sleep(self.chance.uniform(0, _LONGEST_DELAY_S))
            await self._happen(index, kind)
            await self._steps(_STEPS_BETWEEN)
            self.samples.append(self._sample(index, kind))
            self.done(kind)
        await self.recorder.until("a quiet moment", self.settled)
        self.supervisor.stop("interrupted")

    def _next(self) -> str:
        wanted = self.wish["workers"]
        possible = {
            **{kind: wanted > 1 for kind in STRIKES},
            "grow": wanted < MOST,
            "shrink": wanted > 1,
            "topology": True,
        }
        kinds = [kind for kind, can in possible.items() if can]
        return self.chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]

    async def _happen(self, index: int, kind: str) -> None:
        before = len(self.recorder.changes)
        if kind in STRIKES:
            await self._strike(index, kind)
            return
        if kind == "topology":
            self.write_wish(topology=self.chance.choice(self.topologies), asked=self.wish["asked"] + 1)
            field_ = "topology"
        else:
            self.write_wish(workers=self.wish["workers"] + (1 if kind == "grow" else -1))
            field_ = "workers"
        await self.recorder.until(
            f"the decision on {field_}", lambda: any(field_ in change for change in self.recorder.changes[before:])
        )

    async def _strike(self, index: int, kind: str) -> None:
        """Any member but the witness, once there are some: two, or up to as many as are wanted."""
        enough = self.chance.randint(2, self.wish["workers"])
        await self.recorder.until(f"{enough} members", lambda: self.settled() and len(self.members()) >= enough)
        victim = self.chance.choice(self.members()[index >= self.spare_from :])
        self.struck.append(victim.pid)
        generation = self._generation()
        os.kill(victim.pid, STRIKES[kind])
        await self.recorder.until(f"word of {kind}", lambda: victim.pid in self.recorder.lost)
        await self.recorder.until("another view", lambda: self._generation() > generation and self.settled())

    def _generation(self) -> int:
        view = self.supervisor.job.view
        return 0 if view is None else view.generation

    async def _steps(self, count: int) -> None:
        goal = self.recorder.step + count
        await self.recorder.until(f"step {goal}", lambda: self.recorder.step >= goal and self.settled())

    def _sample(self, index: int, kind: str) -> Sample:
        store, witness = self.supervisor.views.store, self.members()[0].pid
        return Sample(
            event=index,
            kind=kind,
            step=self.recorder.step,
            processes=len(self.supervisor.processes.alive()),
            members=len(self.members()),
            keys=0 if store is None else store.num_keys(),
            supervisor=held_by(os.getpid()),
            witness=held_by(witness),
            witness_pid=witness,
        )


def held_by(pid: int) -> dict[str, float]:
    """A process's open file descriptors, threads and resident memory (MiB). Linux."""
    if not sys.platform.startswith("linux"):
        raise RuntimeError("the soak reads /proc: it needs Linux")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
    }
