"""What deaths, notices and resizes cost each system that keeps training: the same model, data and steps for all.

    python benchmarks/elastic.py --json benchmarks/results/elastic.json

Two workers on this machine (gloo, one thread each) train for a fixed number of steps. Every few seconds, once all are
back, one of random rank gets SIGKILL, or SIGTERM and SIGKILL 5 s later; kfuse is also resized. The systems take turns.
Everything is read off the lines that workers write and the final models. docs/measured.md says what the
figures mean, how to install the systems, and how to add one: those that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from elastic_log import Episode, Line, Reader, Result, contents, longest_gap, made_again, report, show
from elastic_systems import BATCH, WORKERS, System, Task, is_installed, systems
from report import parser_of, warn_if_busy
from rich.progress import Progress

BACK_S = 120.0  # for all workers to be back after a kill, or up at the start; and without any step
NOTICE_S = 5.0
_STEADY_LINES = 20  # of each worker, before anything is done to it


class NotBackError(RuntimeError):
    """A system ended, or is not where it should be in the time it has."""


class Job:
    """A system under way, and its log."""

    def __init__(self, name: str, directory: Path, epochs: int) -> None:
        directory.mkdir()
        self.task = Task(directory, epochs)
        self.log = Reader(directory / "log")
        self.started = time.time()
        self.system: System = systems()[name](name, self.task)

    @property
    def is_over(self) -> bool:
        return self.task.final.exists()

    def await_(self, what: str, true: Callable[[], bool], limit_s: float = BACK_S) -> None:
        """Until it is true, or the job is over. Raises NotBackError."""
        deadline = time.monotonic() + limit_s
        while not self.is_over and not true():
            if time.monotonic() > deadline:
                raise NotBackError(f"{self.system.name}: waited {limit_s:.0f} s for {what}")
            time.sleep(0.005)
            if not self.is_over and (ended := self.system.tend()) is not None:
                raise NotBackError(ended)
            self.log.update()
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

    def pass_time(self, seconds: float) -> list[Line]:
        """The lines of so many seconds, or up to the job's end."""
        began = time.time()
        self.await_("time to pass", lambda: time.time() > began + seconds, seconds + BACK_S)
        return self.log.since(began)

    def finish(self) -> None:
        """To the job's last step, as long as it makes steps."""
        while not self.is_over:
            self.await_step(len(self.log.done))

    def await_step(self, seen: int) -> None:
        self.await_("a step", lambda: len(self.log.done) > seen)

    def strike(self, kind: str, chance: random.Random) -> Episode | None:
        """Kills a worker, and waits until all are back or the job is over. None where it was over at once."""
        ranks = {line.pid: line.rank for line in self.log.since(self.log.done[-1].time - 1.0)}
        victim = chance.choice(sorted(ranks, key=lambda pid: ranks[pid]))
        time.sleep(chance.uniform(0, 0.05))  # anywhere in a step
        struck = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        if kind == "notice":
            after = threading.Timer(NOTICE_S, _kill_if_alive, (victim,))
            after.start()
        self.await_all(struck, without=victim)
        if kind == "notice":
            self.pass_time(struck + NOTICE_S - time.time())
            after.cancel()
        lines = self.log.since(struck - 3.0)
        # What the survivor completes with the dead one's gradients is no recovery: the next step, with fewer, is.
        going_on = next((i for i in lines if i.time >= struck and (i.workers < WORKERS or i.pid not in ranks)), None)
        if going_on is None or (kind == "notice" and self.is_over):
            return None  # all have to be back to say what a notice costs
        before = [line for line in lines if line.time < struck][-1:]
        after_it = [line for line in lines if line.time >= going_on.time]
        own = [[line for line in after_it if line.pid == pid] for pid in ranks if pid != victim]
        gaps = [longest_gap(mine) for mine in own if len(mine) > 1 and not self.is_over]  # else none came in
        standstill = longest_gap(before + [line for line in lines if line.time >= struck])
        again = made_again([line for line in self.log.done if line.pid in ranks or line.time >= struck], going_on)
        return Episode(kind, ranks[victim], going_on.time - struck, max(gaps, default=None), standstill, again)

    def resize_and_back(self, result: Result) -> bool:
        """One worker fewer, then as many as before. Whether both were made before the job was over."""
        shrunk = self._resize(WORKERS - 1)
        grown = self._resize(WORKERS)
        if self.is_over:
            return False
        result.shrink_s.append(shrunk)
        result.growth_s.append(grown)
        return True

    def _resize(self, workers: int) -> float:
        """The longest time between two steps of those that stay, until there are so many workers."""
        asked = time.time()
        before = {line.pid for line in self.log.since(self.log.done[-1].time - 1.0)}
        self.system.resize(workers)
        self.await_all(asked, workers)
        return max(longest_gap([line for line in self.log.since(asked) if line.pid == pid]) for pid in before)

    def model(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.task.final)
        return found


def _kill_if_alive(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Series:
    name: str
    epochs: int
    every_s: float
    result: Result = field(default_factory=Result)
    model: dict[str, torch.Tensor] | None = None
    """Of the first job to which nothing was done."""

    def turn(self, directory: Path, plan: list[str], chance: random.Random) -> None:
        """One job to which nothing is done, and as many as it takes to do to them what is planned."""
        directory.mkdir()
        try:
            model = self._undisturbed(Job(self.name, directory / "undisturbed", self.epochs))
            self.model = self.model or model
        except NotBackError as error:
            self._not_back(error)
            return
        tries = idle = 0
        while plan:
            left = len(plan)
            self._struck(Job(self.name, directory / str(tries), self.epochs), plan, chance)
            tries, idle = tries + 1, 0 if len(plan) < left else idle + 1
            if idle == 3:
                self._not_back(
                    NotBackError(f"{self.name}: three jobs were over before a {plan[0]}: give more --epochs")
                )
                return

    def _undisturbed(self, job: Job) -> dict[str, torch.Tensor]:
        try:
            job.await_all(0.0)
            all_there = time.time()
            job.finish()
            self.result.undisturbed_per_second += rate(job.log.since(all_there))
            self.result.undisturbed.append(contents(job.log, self.epochs))
            return job.model()
        finally:
            job.system.stop()

    def _struck(self, job: Job, plan: list[str], chance: random.Random) -> None:
        """What is done to the job is taken from the plan."""
        result = self.result
        try:
            job.await_all(0.0)
            result.start_s.append(job.log.done[0].time - job.started)
            while plan and not job.is_over:
                result.samples_per_second += rate(job.pass_time(self.every_s * chance.uniform(0.5, 1.5)))
                if job.log.done[-1].step > job.task.steps - 4 * _STEADY_LINES:
                    break
                if plan[0] == "resize":
                    done = job.resize_and_back(result)
                else:
                    episode = job.strike(plan[0], chance)
                    result.episodes += [episode] if episode else []
                    done = episode is not None
                if done:
                    plan.pop(0)
            job.finish()
            result.contents.append(contents(job.log, self.epochs))
            pairs = [(value, self.model[name]) for name, value in job.model().items()] if self.model else []
            result.equal.append(all(torch.equal(*pair) for pair in pairs))
            result.difference.append(max((a - b).abs().max().item() for a, b in pairs))
        except NotBackError as error:
            self._not_back(error)
            del plan[:1]
        finally:
            job.system.stop()
        result.growths += job.system.growths()

    def _not_back(self, error: NotBackError) -> None:
        print(error, file=sys.stderr)
        self.result.not_back.append(str(error).splitlines()[0])  # the rest may have paths of this machine


def rate(lines: list[Line]) -> list[float]:
    """The samples a second, if there are enough lines for it."""
    if len(lines) <= 4 * WORKERS:
        return []
    return [(lines[-1].step - lines[0].step) * BATCH / (lines[-1].time - lines[0].time)]


def main() -> int:
    known = systems()
    found = [name for name, kind in known.items() if is_installed(kind)]
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="turns that each system has (default 4)")
    parser.add_argument("--kills", type=int, default=3, help="of each system in each round (default 3)")
    parser.add_argument("--notices", type=int, default=1, help="of each system in each round (default 1)")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds from all being back to the next")
    parser.add_argument("--epochs", type=int, default=60, help="of 28 steps, in each job (default 60)")
    parser.add_argument("--systems", nargs="+", choices=list(known), default=found)
    args = parser.parse_args()
    for number, least in (("rounds", 1), ("kills", 1), ("notices", 0), ("epochs", 20)):
        if getattr(args, number) < least:
            parser.error(f"--{number} {getattr(args, number)}: allowed is {least} or more")
    if missing := [name for name in args.systems if name not in found]:
        parser.error(f"--systems {' '.join(missing)}: not installed; allowed are {' '.join(found)}")
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the end of what is under way
    order, series = random.Random(0), {name: Series(name, args.epochs, args.every) for name in args.systems}
    results = {name: each.result for name, each in series.items()}
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as bar:
        task = bar.add_task("", total=args.rounds * len(series))
        for turn in range(args.rounds):
            for name in order.sample(args.systems, len(series)):
                bar.update(task, description=f"round {turn + 1} of {args.rounds}: {name}")
                chance = random.Random(turn)  # the same for all systems
                plan = ["kill"] * args.kills + ["notice"] * args.notices
                chance.shuffle(plan)
                plan += ["resize"] if known[name].resizes else []
                series[name].turn(Path(folder, f"{name}-{turn}"), plan, chance)
                bar.advance(task)
                figures = report(results, args.json)
    show(figures, BACK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
