"""How a supervisor's CPU time and memory grow with the number of its workers, which are stood in for.

    python benchmarks/control_plane.py --json benchmarks/results/control_plane.json
    python benchmarks/control_plane.py --sizes 16,64 --rounds 1

A real supervisor, in a process of its own, with its messages, authentication and sockets over loopback. Its workers are
connections of `PROCESSES` other processes (control_clients.py), which train nothing and have no torch. They do not
connect to a view's store, whose server is in the supervisor's process too: its time is not in the figures.

start      from the first worker's start until all have joined the first view
steady     `STEADY_S` seconds of heartbeats (one in 0.5 s a worker) and of the leader's records (10 steps a second):
           the share of one core
growth     the leader asks for one worker more, until all have joined the view with it
loss       of one, of half of all at once, of half of all within `SPREAD_S`: until all others have joined the last view.
           Each other one also reports that it has lost contact. Nobody is started in their place
refill     then as many are asked for as were lost: until all have joined the view with them

CPU seconds are the supervisor process's own (user and system), of all its threads. Wall times are of a machine on which
the stand-ins compete with the supervisor for the cores, and say little about a cluster. Reported are medians of rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from driven import Recorder
from report import parser_of, progress_bar, table, warn_if_busy, write

from kfuse.elastic import protocol
from kfuse.elastic.job import Job
from kfuse.elastic.processes import Worker
from kfuse.elastic.supervisor import Supervisor
from kfuse.settings.tree import SETTINGS, JobSettings, resolved

PROCESSES = 4  # that the workers are connections of
STEADY_S, SPREAD_S = 5.0, 1.0
LIMIT_S = 300.0  # for each phase
PHASES = ("start", "growth", "loss of 1", "loss of half", "loss of half within a second", "refill")
BAR_CPU_S, BAR_KB, BAR_WORKERS = 1.0, 100.0, 1000  # of a loss; of memory a worker


class StandIn:
    """A worker's process, as the supervisor sees it."""

    running = True

    def __init__(self, number: int, processes: Clients) -> None:
        self._number, self._processes = number, processes
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def lines(self) -> AsyncIterator[str]:
        await self.wait()
        return
        yield ""

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.shield(self.status)

    def kill(self) -> None:
        self._processes.lose([self._number])


class Clients:
    """A launcher whose workers are connections of a few processes."""

    async def open(self) -> str:
        script = str(Path(__file__).with_name("control_clients.py"))
        pipe = asyncio.subprocess.PIPE
        starting = (
            asyncio.create_subprocess_exec(sys.executable, script, stdin=pipe, stdout=pipe) for _ in range(PROCESSES)
        )
        self._all = await asyncio.gather(*starting)
        self._workers: dict[int, StandIn] = {}
        self._reading = [asyncio.create_task(self._read(process)) for process in self._all]
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str]) -> StandIn:
        """Has one of the processes connect one worker."""
        number = int(env[protocol.ENV_WORKER])
        self._workers[number] = StandIn(number, self)
        about = {"worker": number, "address": env[protocol.ENV_CONTROL], "token": env[protocol.ENV_TOKEN]}
        self._order(self._all[number % PROCESSES], do="start", **about)
        return self._workers[number]

    def lose(self, numbers: Sequence[int], over_s: float = 0.0) -> None:
        """These workers are killed within so many seconds."""
        for process in self._all:
            self._order(process, do="lose", workers=list(numbers), over_s=over_s)

    def say(self, number: int, message: str, **fields: Any) -> None:
        self._order(self._all[number % PROCESSES], do="say", worker=number, message=message, fields=fields)

    async def close(self) -> None:
        for process in self._all:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(process.wait() for process in self._all), *self._reading)

    def _order(self, process: asyncio.subprocess.Process, **order: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            number, status = map(int, line.split())
            if not self._workers[number].status.done():
                self._workers[number].status.set_result(status)


class Measured:
    """A job of stand-ins, and what each phase of it costs the process in which its supervisor runs."""

    def __init__(self, workers: int, directory: Path) -> None:
        self._count, self._clients, self._recorder = workers, Clients(), Recorder(directory)
        limits = {"workers_count": workers, "workers_max": 2 * workers, "elastic_replace": False}
        settings: Any = resolved("the benchmark", JobSettings, limits)
        self._supervisor = Supervisor(self._clients, {}, self._recorder, Job(settings))
        self._receive, self._supervisor._receive = self._supervisor._receive, self._count_joined  # type: ignore[method-assign]
        self._generation = self._number = 0
        self._agreed = asyncio.Event()
        self._awaited = workers
        self._cpu_s = self._at = 0.0
        self.phases: dict[str, dict[str, float]] = {}

    async def run(self) -> dict[str, Any]:
        empty_kb = _resident_kb()
        self._begin(self._count)
        job = asyncio.create_task(self._supervisor.run())
        await self._end("start", job)
        share = await self._steady()
        grown_kb = (_resident_kb() - empty_kb) / self._count
        self._begin(self._count + 1)
        self._clients.say(self._members[0].number, "resize", workers=self._count + 1)
        await self._end("growth", job)
        for name, lost, over_s in (
            ("loss of 1", 1, 0.0),
            ("loss of half", self._count // 2, 0.0),
            ("refill", 0, 0.0),
            ("loss of half within a second", self._count // 2, SPREAD_S),
        ):
            if not lost:
                self._begin(self._count)
                self._clients.say(self._members[0].number, "resize", workers=self._count)
            else:
                members = self._members
                chosen = members[1 :: max(1, len(members) // lost)][:lost]
                self._begin(len(members) - lost)
                self._clients.lose([worker.number for worker in chosen], over_s)
            await self._end(name, job)
        self._supervisor.stop("terminated")
        await job
        return {
            "workers": self._count,
            "phases": self.phases,
            "steady_share_of_a_core": share,
            "kb_a_worker": grown_kb,
            "peak_kb": _peak_kb(),
            "failures": len(self._recorder.lost),
        }

    @property
    def _members(self) -> list[Worker]:
        return self._supervisor.processes.members()

    def _begin(self, awaited: int) -> None:
        self._awaited = awaited
        self._agreed.clear()
        self._first = self._supervisor.job.view.generation
        self._cpu_s, self._at = time.process_time(), time.monotonic()

    async def _end(self, name: str, job: asyncio.Task[Any]) -> None:
        """Waits until all of so many workers have joined the view, and keeps what that took."""
        agreed = asyncio.create_task(self._agreed.wait())
        await asyncio.wait([agreed, job], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not agreed.done():
            raise SystemExit(f"{name}, {self._count} workers: no view of {self._awaited}: {job}")
        self.phases[name] = {
            "cpu_s": self._agreed_cpu_s - self._cpu_s,
            "wall_s": self._agreed_at - self._at,
            "views": self._supervisor.job.view.generation - self._first,
        }
        await asyncio.sleep(1.0)  # what is left to do is not the next phase's

    async def _count_joined(self, worker: Worker, message: dict[str, Any]) -> None:
        view = self._supervisor.job.view
        joins = message["type"] == "joined" and message["generation"] == view.generation
        if joins:
            self._number = 1 + self._number * (view.generation == self._generation)
            self._generation = view.generation
        await self._receive(worker, message)
        if joins and self._number == view.size == self._awaited:
            self._agreed_cpu_s, self._agreed_at = time.process_time(), time.monotonic()
            self._agreed.set()

    async def _steady(self) -> float:
        cpu_s, since = time.process_time(), time.monotonic()
        await asyncio.sleep(STEADY_S)
        return (time.process_time() - cpu_s) / (time.monotonic() - since)


def _resident_kb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1000


def _peak_kb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1.024


def measure(workers: int) -> dict[str, Any]:
    """In this process: the supervisor's."""
    import torch.distributed  # noqa: F401  # the supervisor imports it where a job has several workers

    with tempfile.TemporaryDirectory() as directory:

        async def run() -> dict[str, Any]:
            return await Measured(workers, Path(directory)).run()

        return asyncio.run(run())


def main() -> None:
    """Measures, prints, and writes what is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default="16,64,256,1000,2048,4096", help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=int, help="of one job, in this process: what this script calls itself with")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    warn_if_busy()
    sizes = [int(size) for size in args.sizes.split(",")]
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    with progress_bar() as progress:
        task = progress.add_task("jobs", total=len(sizes) * args.rounds)
        for size in sizes * args.rounds:
            progress.update(task, description=f"{size} workers")
            command = [sys.executable, __file__, "--measure", str(size)]
            found[size].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            progress.advance(task)
    results = {size: middle(rounds) for size, rounds in found.items()}
    show(results)
    about = {"heartbeat_s": protocol.HEARTBEAT_S, "silence_s": SETTINGS["elastic_heartbeat_timeout_s"].default}
    figures = {"sizes": results, "rounds": found}
    write(args.json, ["torch", "orjson"], benchmark="control_plane", settings=about, **figures)


def show(results: Mapping[int, dict[str, Any]]) -> None:
    """Prints a table, and whether the bar is kept."""
    heads = ("workers", *(f"{phase}: CPU s (views)" for phase in PHASES), "steady, share of a core", "kB a worker")
    rows = []
    for size, result in results.items():
        cells = [f"{each['cpu_s']:.3f} ({each['views']:g})" for each in map(result["phases"].get, PHASES)]
        rows.append((str(size), *cells, f"{result['steady_share_of_a_core']:.3f}", f"{result['kb_a_worker']:.0f}"))
    table("", heads, rows)
    if (result := results.get(BAR_WORKERS)) is not None:
        worst = max(result["phases"][phase]["cpu_s"] for phase in ("loss of 1", "loss of half"))
        kept = "yes" if worst <= BAR_CPU_S and result["kb_a_worker"] <= BAR_KB else "NO"
        print(f"{BAR_WORKERS} workers: at most {BAR_CPU_S:g} s a loss, {BAR_KB:g} kB a worker: {kept}")


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = list(rounds)
    if isinstance(values[0], dict):
        return {key: middle([each[key] for each in values]) for key in values[0]}
    return median(values)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
