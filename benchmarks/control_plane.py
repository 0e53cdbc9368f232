"""How a supervisor's CPU time and memory grow with the number of its workers, which are stood in for.

    python benchmarks/control_plane.py --json benchmarks/results/control_plane.json --plot control_plane.png
    python benchmarks/control_plane.py --sizes 16,64 --rounds 1
    python benchmarks/control_plane.py --sizes 16 --real 64       # and a job of 64 real workers on this machine

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
--real is `kfuse` with so many workers of a small network, over gloo, until it has made `REAL_STEPS` steps. It takes
some 150 MB a worker. All import torch at once, so where cores are few `elastic.boot_timeout_s` must be raised.
The plot has measured points, and the power law through the two largest sizes beyond them, as a dashed line.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from control_report import plot, show
from machine import parser_of, warn_if_busy, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kfuse.elastic import protocol
from kfuse.elastic.processes import Worker
from kfuse.elastic.supervisor import Supervisor
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings.tree import SETTINGS, JobSettings, resolved

PROCESSES = 4  # that the workers are connections of
STEADY_S, SPREAD_S = 5.0, 1.0
LIMIT_S = 300.0  # for each phase
REAL_STEPS, REAL_LIMIT_S, REAL_BOOT_S = 20, 300.0, 280
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class StandIn:
    """A worker's process, as the supervisor sees it."""

    running = True

    def __init__(self, number: int, processes: Clients) -> None:
        self._number, self._processes = number, processes
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def lines(self) -> AsyncIterator[str]:
        """It prints nothing."""
        await self.wait()
        return
        yield ""

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.shield(self.status)

    def kill(self) -> None:
        """Ends it."""
        self._processes.lose([self._number])


class Clients:
    """A launcher whose workers are connections of a few processes."""

    async def open(self) -> str:
        """Starts the processes."""
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
        """A worker sends a message."""
        self._order(self._all[number % PROCESSES], do="say", worker=number, message=message, fields=fields)

    async def close(self) -> None:
        """Ends the processes."""
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


class Recorder:
    """Writes a run directory's files."""

    def __init__(self, directory: Path) -> None:
        self._directory = RunDirectory(directory, sinks=())
        self.failures = 0

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Records as the supervisor passes them on."""
        with self._directory.batch():
            for kind, data in records:
                if kind in ("metrics", "event"):
                    getattr(self._directory, kind)(data)
                self.failures += data.get("kind") == "failure"


class Measured:
    """A job of stand-ins, and what each phase of it costs the process in which its supervisor runs."""

    def __init__(self, workers: int, directory: Path) -> None:
        self._count, self._clients, self._recorder = workers, Clients(), Recorder(directory)
        limits = {"workers_count": workers, "workers_max": 2 * workers, "elastic_replace": False}
        settings: Any = resolved("the benchmark", JobSettings, limits)
        self._supervisor = Supervisor(self._clients, {}, self._recorder, settings)
        self._joined, self._supervisor.views.joined = self._supervisor.views.joined, self._count_joined  # type: ignore[method-assign]
        self._generation = self._number = 0
        self._agreed = asyncio.Event()
        self._awaited = workers
        self._cpu_s = self._at = 0.0
        self.phases: dict[str, dict[str, float]] = {}

    async def run(self) -> dict[str, Any]:
        """Goes through all phases."""
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
            "failures": self._recorder.failures,
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

    def _count_joined(self, worker: Worker, generation: int) -> None:
        view = self._supervisor.job.view
        if generation == view.generation:
            if generation != self._generation:
                self._generation, self._number = generation, 0
            self._number += 1
        self._joined(worker, generation)
        if generation == view.generation and self._number == view.size == self._awaited:
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


def real(workers: int) -> dict[str, Any]:
    """A job of real workers on this machine: seconds until the first view, and until the end; the memory it takes."""
    options = [f"workers.count={workers}", f"workers.max={workers}", f"batch.size={workers}", "batch.micro=1"]
    options += ["policy=none", "workers.threads=1", f"train.steps={REAL_STEPS}", "model=mlp", "observe.sinks=[]"]
    options += [f"elastic.boot_timeout_s={REAL_BOOT_S}", "observe.progress=false"]
    free_kb, least_kb = _available_kb(), math.inf
    with tempfile.TemporaryDirectory() as directory:
        since, when = time.monotonic(), time.time()
        command = [sys.executable, "-m", "kfuse", *options, f"hydra.run.dir={directory}/run"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            least_kb = min(least_kb, _available_kb())
            if time.monotonic() - since > REAL_LIMIT_S:
                process.terminate()
                process.wait()
            time.sleep(1.0)
        seconds = time.monotonic() - since
        events = [json.loads(line) for line in Path(directory, "run", "events.jsonl").read_text().splitlines()]
        steps = len(Path(directory, "run", "metrics.jsonl").read_text().splitlines())
    view = next((event for event in events if event["kind"] == "view"), {"workers": [], "time": math.nan})
    return {
        "options": options,
        "status": process.returncode,
        "steps": steps,
        "workers": len(view["workers"]),
        "lost": sum(event["kind"] == "failure" for event in events),
        "first_view_s": view["time"] - when,
        "end_s": seconds,
        "mb_a_worker": (free_kb - least_kb) / workers / 1000,
    }


def _available_kb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1.024


def main() -> None:
    """Measures, prints, draws, and writes what is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default="16,64,256,1000,2048,4096", help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", type=int, metavar="WORKERS", help="run a job of so many real workers too")
    parser.add_argument("--plot", type=Path, help="a picture; needs matplotlib")
    parser.add_argument("--before", type=Path, help="the figures of another version, from its --json, to show beside")
    parser.add_argument("--measure", type=int, help="of one job, in this process: what this script calls itself with")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    warn_if_busy()
    sizes = [int(size) for size in args.sizes.split(",")]
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    with Progress(*COLUMNS, console=Console(stderr=True)) as progress:
        task = progress.add_task("jobs", total=len(sizes) * args.rounds)
        for size in sizes * args.rounds:
            progress.update(task, description=f"{size} workers")
            command = [sys.executable, __file__, "--measure", str(size)]
            found[size].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            progress.advance(task)
    results = {size: middle(rounds) for size, rounds in found.items()}
    before = json.loads(args.before.read_text())["sizes"] if args.before else {}
    show(results)
    job = real(args.real) if args.real else None
    if job is not None:
        times = (
            f"{job['first_view_s']:.0f} s until all train, {job['end_s']:.0f} s until the end of {job['steps']} steps"
        )
        print(f"{args.real} real workers: {times}; {job['mb_a_worker']:.0f} MB a worker")
    about = {"heartbeat_s": protocol.HEARTBEAT_S, "silence_s": SETTINGS["elastic_heartbeat_timeout_s"].default}
    figures = {"sizes": results, "before": before, "rounds": found, "real": job}
    write(args.json, ["torch", "orjson"], benchmark="control_plane", settings=about, **figures)
    if args.plot is not None:
        plot(results, {int(size): each for size, each in before.items()}, args.plot)
    if job is not None and (job["status"] or job["steps"] < REAL_STEPS):
        raise SystemExit(f"the job of real workers has ended with status {job['status']}")


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of rounds."""
    values = list(rounds)
    if isinstance(values[0], dict):
        return {key: middle([each[key] for each in values]) for key in values[0]}
    return median(values)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
