"""Workers of several processes (`kfuse-run --ranks`): what they cost beside torch's HSDP, a loss beside torchft's.

    python benchmarks/hsdp.py cost --json benchmarks/results/hsdp_cost.json
    python benchmarks/hsdp.py losses --json benchmarks/results/hsdp_losses.json      # torchft where it is installed

Two replicas of two processes each (gloo, one thread each) train the model of hsdp_worker.py.

cost: wall time and CPU time of a step, of all processes of a job, over those of torch's HSDP under torchrun. Jobs run
side by side and take turns in blocks of steps, as in job_cost.py: start-up and the first blocks do not count, and the
figures are those of the starts' medians. `native` accumulates whole gradients and reduces them once a step,
`native-each` scatters those of each micro-batch, as kfuse must, and reduces their sum over the replicas once.

losses: rank 1 of a random replica gets SIGKILL once all are back. Seconds until both processes of the other replica
have completed a step without it (kfuse makes the whole batch then, torchft half of it: beside it, a step of a replica
that is left alone); samples of the plan, one epoch, that are in no completed step. torchft's job ends
after the plan's number of steps. It takes the next batch where a step was not committed, as in its examples, or draws
that batch again (`torchft-again`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hsdp_worker import BATCH, RANKS, REPLICAS
from job_cost import WARM, Blocks
from report import median_interval, parser_of, table, told, warn_if_busy, write
from rich.progress import track
from workers import free_port

WORKER = str(Path(__file__).with_name("hsdp_worker.py"))
NAMES = ("native", "native-each", "kfuse", "reproducible")
STEPS = 10  # of a block
STEADY, LIMIT_S = 10, 120.0  # steps of all processes before a kill; for what is waited for


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("cost", "losses"))
    parser.add_argument("--starts", type=int, default=6, help="cost: of each job (default 6)")
    parser.add_argument("--rounds", type=int, default=8, help="cost: blocks of each job a start (default 8)")
    parser.add_argument(
        "--reshards", action="store_true", help="fully_shard's default: parameters are gathered for each backward again"
    )
    parser.add_argument("--kills", type=int, default=5, help="losses: of each system (default 5)")
    parser.add_argument("--steps", type=int, default=800, help="losses: of the plan (default 800)")
    parser.add_argument("--systems", default="kfuse,torchft,torchft-again", help="losses: comma-separated")
    arguments = parser.parse_args()
    warn_if_busy()
    os.environ["HSDP_RESHARDS"] = str(int(arguments.reshards))
    if arguments.what == "cost":
        figures = costs(arguments.starts, arguments.rounds)
    else:
        figures = losses(arguments.systems.split(","), arguments.kills, arguments.steps)
    write(arguments.json, ["torch", "torchft-nightly"], **figures)


def run(command: list[str], directory: Path, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "RUST_LOG": "error", **variables},
        stdin=subprocess.DEVNULL,
        stdout=(directory / "output").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kfuse_run(run_dir: Path, *more: str) -> list[str]:
    count, options = str(REPLICAS), ["--ranks", str(RANKS), "--run-dir", str(run_dir), "--observe-progress=false"]
    return ["kfuse.cli.kfuse_run", "--workers", count, "--max-workers", count, *options, *more, WORKER]


def torchrun(processes: int) -> list[str]:
    return [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "--max-restarts",
        "100",
        WORKER,
    ]


# -- cost -------------------------------------------------------------------------------------------------------------


class Job(Blocks):
    """A job of four processes that makes a block of steps whenever it is told to."""

    def __init__(self, name: str, folder: Path) -> None:
        directory, processes = folder / name, REPLICAS * RANKS
        directory.mkdir()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(directory / "gate"))
            server.listen()
            server.settimeout(LIMIT_S)
            command = torchrun(processes) if "native" in name else kfuse_run(directory / "run")
            self._process = run(["-m", *command, "cost", name, str(directory / "gate"), str(STEPS)], directory)
            self._workers = [server.accept()[0].makefile("rwb") for _ in range(processes)]
        lines = [worker.readline() for worker in self._workers]
        if not all(lines):
            self.end()
            sys.exit((directory / "output").read_text(errors="replace"))
        self._parents = {json.loads(line) for line in lines}
        self._steps = STEPS


def costs(starts: int, rounds: int) -> dict[str, Any]:
    found = {name: np.array(each) for name, each in _starts(starts, rounds).items()}
    rows, ratios = [], dict[str, Any]()
    for name in NAMES:
        ms = 1e3 * np.median(found[name], axis=0)
        ratios[name] = {"wall_ms": round(float(ms[0]), 2), "cpu_ms": round(float(ms[1]), 2)}
        for base in NAMES[:2]:
            pairs = found[name] / found[base]
            ratios[name][f"to {base}"] = {what: median_interval(pairs[:, i]) for i, what in enumerate(("wall", "cpu"))}
        beside = [told(ratios[name][f"to {base}"][what]) for what in ("cpu", "wall") for base in NAMES[:2]]
        rows.append((name, f"{ms[1]:.1f}", f"{ms[0]:.1f}", *beside))
    heads = [f"{what} to {base}" for what in ("CPU", "wall") for base in NAMES[:2]]
    table("A step of all processes", ("job", "CPU ms", "wall ms", *heads), rows)
    return {"ratios": ratios, "starts": {name: np.round(1e3 * each, 3).tolist() for name, each in found.items()}}


def _starts(starts: int, rounds: int) -> dict[str, list[np.ndarray]]:
    """Of each job, by start: seconds of a step and of its CPU time, the medians of blocks."""
    order, found = random.Random(0), {name: list[np.ndarray]() for name in NAMES}
    for _ in track(range(starts), "starts"):
        blocks = {name: list[tuple[float, ...]]() for name in NAMES}
        with (
            tempfile.TemporaryDirectory(prefix="kfuse-hsdp-", ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as ends,
        ):
            jobs = dict[str, Job]()
            for name in NAMES:
                jobs[name] = Job(name, Path(folder))
                ends.callback(jobs[name].end)
            for _ in range(WARM + rounds):
                for name in order.sample(NAMES, len(NAMES)):
                    blocks[name].append(jobs[name].block()[:2])
        for name, each in blocks.items():
            found[name].append(np.median(np.array(each[WARM:]), axis=0))
    return found


# -- losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """See `hsdp_worker.Log`."""

    time: float
    pid: int
    replica: int
    rank: int
    step: int
    workers: int  # 0: the step has begun
    samples: list[int]


class Lossy:
    """A job under way, and the lines that its processes have written."""

    def __init__(self, name: str, directory: Path, steps: int) -> None:
        self.directory, self.lines, self._lighthouse = directory, list[Line](), None
        self._worker = ["losses", name, str(directory), str(steps)]
        self._replicas = list[list[subprocess.Popen[bytes]]]()
        if name == "kfuse":
            command = [*kfuse_run(directory / "run", "--observe-ledger=true"), *self._worker]
            self._replicas.append([run(["-m", *command], directory)])
        else:
            self._lighthouse = lighthouse()
            self._replicas += map(self._replica, range(REPLICAS))
        self._log, self._read = directory / "log", 0

    def _replica(self, group: int) -> list[subprocess.Popen[bytes]]:
        """Of torchft, started as torchrun does it: torchrun itself would notice a death up to 0.1 s later."""
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
        common |= {"TORCHFT_LIGHTHOUSE": self._lighthouse.address(), "REPLICA_GROUP_ID": str(group)}
        return [run([WORKER, *self._worker], self.directory, RANK=str(rank), **common) for rank in range(RANKS)]

    def is_over(self) -> bool:
        return any(process.poll() is not None for each in self._replicas for process in each)

    def update(self) -> None:
        for group, processes in enumerate(self._replicas if self._lighthouse else ()):
            if any(process.poll() for process in processes):  # one has failed: the replica is started again at once
                for process in processes:
                    process.kill()
                    process.wait()
                self._replicas[group] = self._replica(group)
        if self._log.exists():
            complete = self._log.read_bytes()[self._read :].rpartition(b"\n")[0]
            self._read += len(complete) + bool(complete)
            self.lines += [Line(*json.loads(line)) for line in complete.splitlines()]

    def await_(self, what: str, true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while not true():
            self.update()
            if self.is_over() or time.monotonic() > until:
                said = (self.directory / "output").read_text(errors="replace")[-3000:]
                sys.exit(f"{said}\nthe job {'ended' if self.is_over() else 'stands still'}: no {what}")
            time.sleep(0.005)

    def await_end(self) -> None:
        seen, until = -1, 0.0
        while not self.is_over():
            if len(self.lines) > seen:
                seen, until = len(self.lines), time.monotonic() + LIMIT_S
            if time.monotonic() > until:
                sys.exit("the job stands still")
            time.sleep(0.1)
            self.update()
        self.update()

    def kill(self, chance: random.Random) -> float:
        """Kills rank 1 of a replica once all are back. Returns the seconds to the others' next step without it."""
        began = time.time()
        there: dict[int, list[Line]] = {}

        def all_are_back() -> bool:
            there.clear()
            for line in self.lines:
                if line.time > began and line.workers == REPLICAS:
                    there.setdefault(line.pid, []).append(line)
            return sum(len(each) >= STEADY for each in there.values()) == REPLICAS * RANKS

        self.await_("step of all", all_are_back)
        victim = chance.choice(sorted((each[0] for each in there.values() if each[0].rank), key=lambda line: line.pid))
        time.sleep(chance.uniform(0, 0.5))  # anywhere in a step
        struck = time.time()
        os.kill(victim.pid, signal.SIGKILL)
        survivors = {pid for pid, each in there.items() if each[0].replica != victim.replica}
        first: dict[int, float] = {}

        def have_gone_on() -> bool:
            for line in self.lines:
                if line.time > struck and line.workers == 1 and line.pid in survivors:
                    first.setdefault(line.pid, line.time)
            return len(first) == RANKS

        self.await_("step after a kill", have_gone_on)
        return max(first.values()) - struck

    def alone_s(self) -> float:
        """The median step of a replica that is left alone, beside one that boots."""
        of: dict[int, list[Line]] = {}
        for line in self.lines:
            if line.workers:
                of.setdefault(line.pid, []).append(line)
        pairs = [pair for lines in of.values() for pair in pairwise(lines)]
        return statistics.median(b.time - a.time for a, b in pairs if a.workers == b.workers == 1)

    def used(self) -> set[int]:
        """The samples of completed steps: by kfuse's ledger, or by the lines."""
        ledger = self.directory / "run" / "ledger.jsonl"
        if ledger.exists():
            return {index for line in ledger.open() for index in json.loads(line)["indices"]}
        begun: dict[int, dict[tuple[int, int], Line]] = {}
        done: dict[int, set[int]] = {}
        for line in self.lines:
            if not line.workers:
                begun.setdefault(line.step, {})[line.replica, line.rank] = line
            else:  # of a step with all of them also the samples of one that could not say so any more
                done.setdefault(line.step, set()).update(range(REPLICAS) if line.workers > 1 else (line.replica,))
        parts = [each for step, all_ in done.items() for each in begun[step].values() if each.replica in all_]
        return {index for each in parts for index in each.samples}

    def stop(self) -> None:
        processes = [process for each in self._replicas for process in each]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        ours = str(self.directory).encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):  # ranks have sessions of their own
            with contextlib.suppress(OSError):
                if ours in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def lighthouse() -> Any:
    """torchft's, with timeouts as short as in elastic.py."""
    os.environ.setdefault("RUST_LOG", "error")  # read as it is loaded
    from torchft.coordination import LighthouseServer

    times = {"join_timeout_ms": 100, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 300}
    return LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **times)


def losses(systems: list[str], kills: int, steps: int) -> dict[str, Any]:
    found, rows = dict[str, Any](), []
    for name in systems:
        if name != "kfuse" and importlib.util.find_spec("torchft") is None:
            print(f"{name}: torchft is not installed", file=sys.stderr)
            continue
        seconds, chance = list[float](), random.Random(0)
        with tempfile.TemporaryDirectory(prefix="kfuse-hsdp-", ignore_cleanup_errors=True) as folder:
            job = Lossy(name, Path(folder), steps)
            try:
                for _ in track(range(kills), name):
                    seconds.append(job.kill(chance))
                job.await_end()
            finally:
                job.stop()
            alone = job.alone_s()
            lost = steps * BATCH - len(job.used() & set(range(steps * BATCH)))
            views = Path(folder, "run", "events.jsonl")
            pauses = (
                [each["pause_s"] for each in map(json.loads, views.open()) if each.get("reason") == "failure"]
                if views.exists()
                else []
            )
        found[name] = {
            "to_next_step_s": seconds,
            "samples_planned": steps * BATCH,
            "samples_lost": lost,
            "alone_s": alone,
            "pauses_s": pauses,
        }
        median, worst = statistics.median(seconds), max(seconds)
        rows.append(
            (name, str(kills), f"{median:.3f}", f"{worst:.3f}", f"{alone:.3f}", str(lost), f"{lost / kills:.0f}")
        )
    heads = ("system", "kills", "to the next step, s: median", "worst", "a step alone", "samples lost", "a kill")
    table(f"{steps * BATCH} samples", heads, rows)
    return {"losses": found}


if __name__ == "__main__":
    main()
