"""One supervisor of a job with injected faults, and what resources it and a worker hold after each of them.

    python benchmarks/soak_job.py DIRECTORY      # what `soak.py` starts, and starts again after the supervisor's loss

DIRECTORY/plan.json is a `Plan`; samples.jsonl gets a line after each event. The process ends with status 0 once there
are enough, with 143 after a notice to it, by SIGKILL where it is to be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from driven import Driver, Recorder, run_beside
from elastic_job import parent
from hosts import Host
from joining import Agents
from warm import CONTEXT, WarmLauncher

from kfuse.elastic.job import Job
from kfuse.elastic.processes import State, Worker
from kfuse.elastic.supervisor import Supervisor
from kfuse.settings.tree import JobSettings, resolved

HERE = Path(__file__).parent
SCRIPT = str(HERE / "soak_worker.py")
START, MOST = 3, 4
MARKS = [("time", "<f8"), ("pid", "<i8")]  # of `soak_worker.Obedient`
STRIKES = {
    "kill": signal.SIGKILL,
    "exception": signal.SIGUSR1,
    "exit": signal.SIGUSR2,
    "stop": signal.SIGSTOP,
    "notice": signal.SIGTERM,
}
AGENTS = {"agent lost": signal.SIGKILL, "agent's notice": signal.SIGTERM}
SUPERVISOR = {"supervisor lost": signal.SIGKILL, "supervisor's notice": signal.SIGTERM}
WEIGHTS = {
    **{"kill": 8, "exception": 4, "exit": 4, "stop": 1, "notice": 8, "grow": 6, "shrink": 4},
    **{"loader lost": 4, "disk full": 1, "agent lost": 4, "agent's notice": 4, "link cut": 2},
    **{"supervisor lost": 1.5, "supervisor's notice": 1.5},
}
GRACE_S = 5.0
_LONGEST_DELAY_S = 0.3
_STEPS_BETWEEN = 5


@dataclass(frozen=True)
class Plan:
    """A run. Its job is one training, whatever supervisors it has."""

    name: str
    events: int
    seed: int
    pace_s: float = 0.02
    comm: dict[str, Any] = field(default_factory=dict)
    loop: bool = False  # a loop over a kf.DataLoader with a loader process, instead of kf.fit
    agents: bool = False  # each worker on an agent of its own
    network: bool = False  # the agents are in network namespaces, each with an address of its own
    disk: bool = False  # the run directory is a file system of its own, which may be filled

    @property
    def undisturbed_from(self) -> int:
        """The event from which on the supervisor and the oldest worker stay."""
        return self.events // 3

    @property
    def exact(self) -> bool:
        """Whether the end has the bits and the ledger of an undisturbed run."""
        return self.comm.get("comm_sync") != "pair"


@dataclass
class Sample:
    """What is held after an event; `witness` is the oldest worker."""

    event: int
    kind: str
    began: float  # on the machine's monotonic clock
    ended: float  # some steps after its consequences are in force
    step: int
    incarnation: int  # of the supervisor
    members: int
    shared: int  # files in shared memory
    supervisor: dict[str, float] = field(default_factory=dict)
    witness: dict[str, float] = field(default_factory=dict)
    witness_pid: int = 0


class Soak(Driver):
    """Strikes a running job until there were enough events, or until one of them ends the supervisor.

    In the last two thirds of a run none does, and the oldest worker, the witness, is spared: both are watched for long.
    """

    def __init__(self, plan: Plan, directory: Path, supervisor: Supervisor, recorder: Recorder, agents: Agents | None):
        super().__init__(supervisor, recorder, directory / "requests")
        self._plan, self._directory, self._agents = plan, directory, agents
        before = samples_of(directory)
        self._done = len(before)
        self._incarnation = 1 + max((sample["incarnation"] for sample in before), default=-1)
        self._chance = random.Random(f"{plan.seed} {self._done} {self._incarnation}")

    async def run(self) -> None:
        """Returns when all events are over, and their consequences in force; the job is then told to stop."""
        if self._agents is not None:
            await self._agents.start(MOST)
        self.ask_for(START)
        await self._steps(_STEPS_BETWEEN)
        for index in range(self._done, self._plan.events):
            self._done = index
            kind = self._next()
            await asyncio.sleep(self._chance.uniform(0, _LONGEST_DELAY_S))
            began = time.monotonic()
            if kind in SUPERVISOR:
                self._note(Sample(index, kind, began, 0.0, self.recorder.step, self._incarnation, 0, 0))
                os.kill(os.getpid(), SUPERVISOR[kind])
                await asyncio.Event().wait()  # the job ends
            await self._happen(kind)
            await self._steps(_STEPS_BETWEEN)
            self._note(self._sample(index, kind, began))
        await self.recorder.until("a quiet moment", self.settled)
        self.supervisor.stop("interrupted")

    @property
    def _watches(self) -> bool:
        return self._done >= self._plan.undisturbed_from

    def _next(self) -> str:
        several, plan = self.wanted > 1, self._plan
        possible = {
            **dict.fromkeys(STRIKES, several),
            **dict.fromkeys(SUPERVISOR, not self._watches),
            **dict.fromkeys(AGENTS, several and plan.agents),
            "grow": self.wanted < MOST,
            "shrink": several,
            "loader lost": plan.loop,
            "disk full": plan.disk,
            "link cut": several and plan.network,
        }
        kinds = [kind for kind, can in possible.items() if can]
        return self._chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]

    async def _happen(self, kind: str) -> None:
        if kind in STRIKES:
            victim = await self._victim()
            await self._strike(victim, victim.pid or 0, STRIKES[kind], planned=kind == "notice")
        elif kind in AGENTS:
            victim = await self._victim()
            await self._strike(victim, parent(victim.pid or 0), AGENTS[kind], planned=kind == "agent's notice")
        elif kind in ("grow", "shrink"):
            self.ask_for(self.wanted + (1 if kind == "grow" else -1))
            await self.recorder.until(f"{self.wanted} members", lambda: self.settled(self.wanted))
        elif kind == "loader lost":
            await self.recorder.until("a loader process to kill", self._kill_loader)
            await self._steps(_STEPS_BETWEEN)
        elif kind == "link cut":
            await self._cut()
        else:
            with filled(self._directory / "disk"):
                await self._steps(2 * _STEPS_BETWEEN)

    async def _victim(self) -> Worker:
        """Any member but the witness, once there are some: two, or up to as many as are wanted."""
        enough = self._chance.randint(2, self.wanted)
        await self.recorder.until(f"{enough} members", lambda: self.settled() and len(self.members()) >= enough)
        return self._chance.choice(self.members()[self._watches :])

    async def _strike(self, victim: Worker, pid: int, number: int, planned: bool) -> None:
        os.kill(pid, number)
        if not planned:
            await self.recorder.until(f"word of worker {victim.pid}", lambda: victim.pid in self.recorder.lost)
        await self.recorder.until(f"worker {victim.pid} to end", lambda: victim.state is State.ENDED)
        if self._agents is not None and pid != victim.pid:
            await self._agents.start(1)
        await self.recorder.until("another view", self.settled)

    async def _cut(self) -> None:
        """Two members on different hosts do not reach each other, until one of them had to go."""
        assert self._agents is not None
        await self.recorder.until("members on two hosts", lambda: self.settled() and len(self._hosts()) > 1)
        one, other = self._chance.sample(self._hosts(), 2)
        cuts = self.recorder.cuts
        with self._agents.apart(one, other):
            await self.recorder.until(f"a cut of {one} and {other}", lambda: self.recorder.cuts > cuts)
            await self.recorder.until(
                "a view of hosts that reach each other",
                lambda: self.settled() and not {one, other} <= {*self._hosts()},
            )

    def _hosts(self) -> list[str]:
        return sorted({worker.host for worker in self.members()})

    def _kill_loader(self) -> bool:
        """Whether one was there to kill: a child of a worker."""
        loaders = [pid for worker in self.members() for pid in _children(worker.pid or 0)]
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if loaders:
                os.kill(self._chance.choice(loaders), signal.SIGKILL)
                return True
        return False

    async def _steps(self, count: int) -> None:
        await self.steps(count)
        await self.recorder.until("an active view", self.settled)

    def _sample(self, index: int, kind: str, began: float) -> Sample:
        members = self.members()
        return Sample(
            event=index,
            kind=kind,
            began=began,
            ended=time.monotonic(),
            step=self.recorder.step,
            incarnation=self._incarnation,
            members=len(members),
            shared=len(os.listdir("/dev/shm")),
            supervisor=held_by(os.getpid()),
            witness=held_by(members[0].pid or 0),
            witness_pid=members[0].pid or 0,
        )

    def _note(self, sample: Sample) -> None:
        with (self._directory / "samples.jsonl").open("a") as file:
            file.write(json.dumps(asdict(sample)) + "\n")


def samples_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def filled(folder: Path) -> Any:
    """The folder's file system, which has no room meanwhile."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**20)):
            pass
    try:
        yield
    finally:
        filler.unlink()


def held_by(pid: int) -> dict[str, float]:
    """A process's open file descriptors, threads and resident memory (MiB). Linux."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
    }


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has just ended
            found += [int(child) for child in task.read_text().split()]
    return found


async def run(plan: Plan, directory: Path, workers: int = START, disturb: bool = True) -> str | None:
    """Runs the job, as a supervisor does; returns the stop reason. Raises JobFailed, AssertionError."""
    recorder = Recorder(directory / "disk" / "run")
    script = [SCRIPT, str(directory / "worker.json")]
    agents = None
    if plan.agents and disturb:
        hosts = [Host(**host) for host in json.loads((directory / "hosts.json").read_text())]
        agents = Agents(directory, [sys.executable, *script], GRACE_S, hosts)
    launcher: Any = WarmLauncher(directory / "workers.log", script=script) if agents is None else agents.launcher
    limits = {"workers_count": workers, "workers_max": MOST, "elastic_heartbeat_timeout_s": 5}
    limits |= {"elastic_max_failures": 12, "elastic_grace_s": GRACE_S}
    settings: Any = resolved("the soak", JobSettings, limits)
    job = {"run_dir": str(directory / "disk" / "run"), "observe": {"log_level": "warning", "ledger": True}}
    supervisor = Supervisor(launcher, job, recorder, Job(settings, script=True))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop, "terminated")
    soak = Soak(plan, directory, supervisor, recorder, agents) if disturb else None
    try:
        return await run_beside(supervisor, None if soak is None else soak.run())
    finally:
        if agents is not None:
            agents.end()
        recorder.directory.close()


def main() -> int:
    CONTEXT.set_forkserver_preload(["soak_worker", "kfuse.train.fit", "kfuse.checkpoint.manager"])
    directory = Path(sys.argv[1])
    plan = Plan(**json.loads((directory / "plan.json").read_text()))
    alone = directory.name == "alone"
    reason = asyncio.run(run(plan, directory, 1 if alone else START, disturb=not alone))
    return 143 if reason == "terminated" else 0


if __name__ == "__main__":
    sys.exit(main())
