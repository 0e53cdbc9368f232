"""What deaths and resizes cost: kfuse beside torchrun's restart and torchft, the same model, data and step.

    python benchmarks/elastic.py --json benchmarks/results/elastic.json

Two workers on this machine (gloo, one thread each) train an MLP on digits. A worker of random rank is killed (SIGKILL)
every few seconds, once all are back; each worker writes a line to a log as it completes a step, and everything is read
off that log. The systems take turns: a few kills each, round after round. torchft is measured where it is installed
(pip install torchft-nightly; in 0.2.0 survivors often die in a hook of its own). README.md says what the figures mean.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from elastic_report import Episode, Result, report
from elastic_systems import SYSTEMS, WORKERS, System
from machine import parser_of, warn_if_busy
from rich.progress import Progress

BACK_S = 60.0  # for all workers to be back after a kill, or up at the start
_STEADY_LINES = 50  # of each worker, before anything is done to it


@dataclass(frozen=True)
class Line:
    time: float
    """Seconds since the epoch."""
    step: int
    pid: int
    workers: int
    rank: int
    samples: int
    """Of the step, on all workers."""


class NotBackError(RuntimeError):
    """A system ended, or is not where it should be in the time it has."""


@dataclass
class Log:
    """The lines so far, oldest first."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _read: int = 0

    def update(self) -> None:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        for line in complete.splitlines():
            nanoseconds, *numbers = map(int, line.split())
            self.lines.append(Line(nanoseconds / 1e9, *numbers))

    def since(self, moment: float) -> list[Line]:
        recent = []
        for line in reversed(self.lines):
            if line.time < moment - 1:  # lines of different processes may be a little out of order
                break
            recent.append(line)
        return sorted((line for line in recent if line.time >= moment), key=lambda line: line.time)


class Job:
    """A system under way, and its log."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        self.system: System = SYSTEMS[name](name, directory)
        self.log = Log(directory / "log")
        self.directory = directory
        self.started = time.time()

    def await_(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BACK_S
        while not true():
            if time.monotonic() > deadline:
                raise NotBackError(f"{self.system.name}: waited {BACK_S:.0f} s for {what}")
            time.sleep(0.005)
            if (ended := self.system.tend()) is not None:
                raise NotBackError(ended)
            self.log.update()

    def await_all(self, since: float, workers: int = WORKERS, without: int = 0) -> None:
        """Until this many workers (and not the one `without`) have made steps together for a while."""

        def all_there() -> bool:
            together: dict[int, int] = {}
            for line in self.log.since(since):
                if line.workers == workers and line.pid != without:
                    together[line.pid] = together.get(line.pid, 0) + 1
            return sum(lines >= _STEADY_LINES for lines in together.values()) >= workers

        self.await_(f"{workers} workers", all_there)

    def samples_per_second(self, seconds: float) -> float:
        """Undisturbed."""
        began = time.time()
        self.await_("time to pass", lambda: time.time() > began + seconds)
        lines = self.log.since(began)
        return _samples(lines, lines[0].step) / (lines[-1].time - lines[0].time)

    def kill_one(self, chance: random.Random, every_s: float) -> Episode:
        """Kills a worker, and waits until all are back and `every_s` seconds have passed."""
        self.log.update()
        now = time.time()
        ranks = {line.pid: line.rank for line in self.log.since(now - 1.0)}
        pids = sorted(ranks)
        victim = chance.choice(pids)
        before = max(line.step for line in self.log.since(now - 5.0))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        self.await_all(killed, without=victim)
        self.await_("the next kill's time", lambda: time.time() > killed + every_s)
        lines = self.log.since(killed)
        # What the survivor completes with the dead one's gradients is no recovery: the next step, with fewer, is.
        going_on = next(line for line in lines if line.workers < WORKERS or line.pid not in pids)
        after = [line for line in lines if line.time >= going_on.time]
        survivors = [pid for pid in pids if pid != victim and any(line.pid == pid for line in after)]
        gaps = [_longest_gap([line for line in after if line.pid == pid]) for pid in survivors]
        made = _samples(lines, before)
        return Episode(ranks[victim], going_on.time - killed, max(gaps, default=None), made, lines[-1].time - killed)

    def resize(self, workers: int) -> float:
        """Asks for so many workers; the survivors' longest time between two steps until they are there."""
        asked = time.time()
        self.log.update()
        before = {line.pid for line in self.log.since(asked - 1.0)}
        (self.directory / "wish").write_text(str(workers))
        os.replace(self.directory / "wish", self.directory / "workers")  # it is read at every step
        self.await_all(asked, workers)
        lines = self.log.since(asked)
        stayed = [pid for pid in before if sum(line.pid == pid for line in lines) > 1 and lines[-1].workers == workers]
        return max(_longest_gap([line for line in lines if line.pid == pid]) for pid in stayed)


def _samples(lines: list[Line], after_step: int) -> int:
    """Of the steps after that one; a step that was done again counts once."""
    return sum({line.step: line.samples for line in lines if line.step > after_step}.values())


def _longest_gap(lines: list[Line]) -> float:
    return max((b.time - a.time for a, b in pairwise(lines)), default=0.0)


def measure(name: str, directory: Path, kills: int, every_s: float, result: Result, chance: random.Random) -> None:
    """One turn of a system: undisturbed, then the kills; kfuse also grows and shrinks as planned."""
    until, tries = len(result.episodes) + len(result.not_back) + kills, 0
    while (left := until - len(result.episodes) - len(result.not_back)) > 0:
        tries += 1
        _job(name, directory.with_name(f"{directory.name}-{tries}"), left, every_s, result, chance)


def _job(name: str, directory: Path, kills: int, every_s: float, result: Result, chance: random.Random) -> None:
    job = Job(name, directory)
    try:
        job.await_all(0.0)
        result.start_s.append(time.time() - job.started)
        result.samples_per_second.append(job.samples_per_second(5.0))
        try:
            for _ in range(kills):
                result.episodes.append(job.kill_one(chance, every_s))
        except NotBackError as error:
            result.not_back.append(str(error))
            return
        if name.startswith("kfuse"):
            for _ in range(max(1, kills // 2)):
                result.shrink_s.append(job.resize(WORKERS - 1))
                result.growth_s.append(job.resize(WORKERS))
    finally:
        job.system.stop()
    if name.startswith("kfuse"):
        result.splits += _splits(directory / "run" / "events.jsonl")


def _splits(events: Path) -> list[dict[str, float]]:
    """Where the time of each growth went, from the run's own events."""
    found, ready = [], {}
    for event in map(json.loads, events.read_text().splitlines()):
        if event["kind"] == "ready":
            ready[event["worker"]] = event
        elif event["kind"] == "view" and event["reason"] == "grow" and ready:
            newest = ready[max(ready)]
            join = event["time"] - newest["time"] - event["pause_s"]
            split = {"boot": newest["boot_s"], "join": max(0.0, join)}
            found.append(split | {part: event[f"{part}_s"] for part in ("regroup", "transfer")})
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each system (default 20)")
    parser.add_argument("--rounds", type=int, default=4, help="turns that each system has (default 4)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills at least (default 5)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    args = parser.parse_args()
    warn_if_busy()
    if args.rounds < 1 or args.kills < args.rounds or args.kills % args.rounds:
        parser.error(f"--kills {args.kills}: allowed is a multiple of --rounds {args.rounds}")
    chance, results = random.Random(0), {name: Result() for name in args.systems}
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as bar:
        task = bar.add_task("", total=args.rounds * len(args.systems))
        for turn in range(args.rounds):
            for name in chance.sample(args.systems, len(args.systems)):
                bar.update(task, description=f"round {turn + 1} of {args.rounds}: {name}")
                directory = Path(folder, f"{name}-{turn}")
                measure(name, directory, args.kills // args.rounds, args.every, results[name], chance)
                bar.advance(task)
    report(results, args.every, BACK_S, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
