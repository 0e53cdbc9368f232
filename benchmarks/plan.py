"""The planner of `kfuse plan` against FIFO and static allocation, on a synthetic trace of jobs.

    python benchmarks/plan.py --json benchmarks/results/plan.json

Nothing trains: jobs proceed by their expected goodput (`kfuse.tools.plan.jobs`), events are simulated one by one.

The trace is drawn, not recorded. Of each job, independently:

    base batch      32, 64, 128 or 256; up to 64 times as large, in micro-batches of an eighth of it
    noise scale     base batch * 2^U(0, 6)
    step            t = a + b s + c (n - 1), s the samples of the busiest worker; all log-uniform: b from 0.3 to 10 ms,
                    a from 0.01 to 0.3 of b * base batch, c from 0.003 to 0.3 of a
    length          on one worker at the base batch: log-normal, median 4 h, sigma 1.4 (heavy-tailed, as the traces of
                    Hu et al., SC 2021, are)
    workers         1, 2, 4, ... 128
    arrival         uniform over a time in which what all jobs ask for would fill `load` of the workers

A job asks for the most workers, a quarter of all at most, that bring, each, half of what one brings alone, at the best
batch size for them. That is what a careful user would ask for (as the tuned jobs of Pollux's comparison). The baselines
give it to the job until its end, so they have the best batch sizes too.

    fifo         in order of arrival, none before the one that arrived before it
    static       shortest expected service first (QSSF), passing over jobs that do not fit
    planner      all workers are allocated anew when jobs arrive or end; a job stands still for 30 s at each change
    planner 0.3  the same with least_gain=0.3 instead of 0.1: workers that bring little are released earlier
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from machine import write

from kfuse.tools.plan.jobs import LEAST_GAIN, Job, LinearStepTime, Option, plan, service

RULES = {"planner": LEAST_GAIN, "planner 0.3": 0.3, "static": 0.0, "fifo": 0.0}
"""Each with its `least_gain`; the last two have none."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
PAUSE_S = 30.0
"""Seconds that a job stands still when its workers change: what Pollux's simulations take. kfuse itself needs less."""


@dataclass(frozen=True)
class Trace:
    """A cell of the table. interval_s: seconds between two plans at least."""

    jobs: int
    workers: int
    load: float
    interval_s: float
    seeds: int


TRACES = (
    Trace(160, 64, 0.7, 0.0, 20),
    Trace(160, 64, 1.3, 0.0, 20),
    Trace(10_000, 4096, 0.7, 120.0, 1),
    Trace(10_000, 4096, 1.3, 120.0, 1),
)


@dataclass(frozen=True)
class Arrival:
    """A job of a trace: when it arrives, and what it can do."""

    seconds: float
    samples: float
    options: list[Option]


@dataclass(frozen=True)
class Outcome:
    """What became of the jobs. float64 of shape (jobs,): seconds at its end, and from its arrival to that."""

    ends: npt.NDArray[np.float64]
    completion: npt.NDArray[np.float64]
    worker_hours: float
    """Of workers that a job had, pauses included."""
    idle_hours: float
    """Of workers without a job until the last end: saved, where idle workers are released."""


def draw(jobs: int, workers: int, load: float, seed: int) -> list[Arrival]:
    """A trace, in order of arrival."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(jobs):
        base = int(2 ** rng.integers(5, 9))
        noise = base * 2 ** rng.uniform(0, 6)
        sample = 10 ** rng.uniform(-3.5, -2)
        fixed = sample * base * 10 ** rng.uniform(-2, -0.5)
        step_time = LinearStepTime(fixed, sample, fixed * 10 ** rng.uniform(-2.5, -0.5))
        samples = rng.lognormal(math.log(4), 1.4) * 3600 * base / step_time(1, base)
        scale, sizes = (noise, noise, noise), (base, 64 * base)
        job = Job(str(k), samples, base, sizes, base // 8, (1, 128), scale, step_time, {}, (1.0, 1.0))
        found.append((samples, job.options(n for n in COUNTS if n <= workers)))
    asks = sum(samples * ask.workers / ask.goodput for samples, ask in ((s, asked(o, workers)) for s, o in found))
    arrivals = np.sort(rng.uniform(0, asks / workers / load, jobs)).tolist()
    return [Arrival(at, samples, options) for at, (samples, options) in zip(arrivals, found, strict=True)]


def asked(options: Sequence[Option], workers: int) -> Option:
    """What a careful user asks for on a cluster with so many workers."""
    first = options[0].goodput / options[0].workers
    most = max(options[0].workers, workers // 4)
    return [each for each in options if each.workers <= most and each.goodput / each.workers >= first / 2][-1]


def simulate(
    trace: Sequence[Arrival],
    workers: int,
    rule: str,
    interval_s: float = 0.0,
    pause_s: float = PAUSE_S,
    least_gain: float = LEAST_GAIN,
) -> Outcome:
    """Runs all jobs to their end. rule: planner, static or fifo."""
    cluster = Cluster(trace, workers, pause_s)
    while cluster.active or cluster.coming:
        cluster.admit()
        if rule == "planner":
            cluster.plan(least_gain)
        else:
            cluster.start(in_order=rule == "fifo")
        cluster.advance(interval_s if rule == "planner" else 0.0)
    hours = cluster.worker_seconds / 3600
    completion = cluster.ends - np.array([arrival.seconds for arrival in trace])
    return Outcome(cluster.ends, completion, hours, workers * float(cluster.ends.max()) / 3600 - hours)


class Cluster:
    """The state of a simulation at the time `now`, in seconds."""

    def __init__(self, trace: Sequence[Arrival], workers: int, pause_s: float) -> None:
        self.trace, self.workers, self.pause_s = trace, workers, pause_s
        self.options = [arrival.options for arrival in trace]
        self.coming = sorted(range(len(trace)), key=lambda j: trace[j].seconds)[::-1]
        self.active: list[int] = []  # in order of arrival
        self.chosen: list[Option | None] = [None] * len(trace)
        self.counts, self.speed = np.zeros(len(trace), dtype=int), np.zeros(len(trace))  # by that option
        self.left = np.array([arrival.samples for arrival in trace])
        self.ready = np.full(len(trace), -math.inf)  # when a job goes on; -inf before it has started
        self.ends = np.full(len(trace), math.nan)
        self.now = self.worker_seconds = 0.0

    def admit(self) -> None:
        """Takes in the jobs that have arrived."""
        while self.coming and self.trace[self.coming[-1]].seconds <= self.now:
            self.active.append(self.coming.pop())

    def plan(self, least_gain: float) -> None:
        """Allocates all workers anew."""
        options, left = [self.options[j] for j in self.active], [float(self.left[j]) for j in self.active]
        pauses = [self._pauses(j) for j in self.active]
        for j, option in zip(self.active, plan(options, left, self.workers, least_gain, pauses), strict=True):
            self._give(j, option)

    def _pauses(self, j: int) -> list[float]:
        """Seconds until job j goes on with each of its options."""
        if self.ready[j] == -math.inf:
            return [0.0] * len(self.options[j])
        here = max(float(self.ready[j]) - self.now, 0.0)
        return [here if option is self.chosen[j] else self.pause_s for option in self.options[j]]

    def start(self, in_order: bool) -> None:
        """Starts jobs that wait, with what they ask for, while workers are free.

        in_order: none before one that arrived before it. Else the shortest expected service first.
        """
        free = self.workers - int(self.counts[self.active].sum())
        waiting = [j for j in self.active if self.chosen[j] is None]
        if not in_order:
            waiting.sort(key=lambda j: service(self.options[j], self.left[j]))
        for j in waiting:
            option = asked(self.options[j], self.workers)
            if option.workers <= free:
                self._give(j, option)
                free -= option.workers
            elif in_order or not free:
                break

    def _give(self, j: int, option: Option | None) -> None:
        """Job j goes on with this option, after a pause unless it starts; None: it waits."""
        if option is self.chosen[j]:
            return
        self.chosen[j] = option
        self.counts[j], self.speed[j] = (option.workers, option.goodput) if option else (0, 0.0)
        if option is not None:
            self.ready[j] = self.now + (self.pause_s if self.ready[j] > -math.inf else 0.0)

    def advance(self, interval_s: float) -> None:
        """Trains until a job arrives or ends, `interval_s` at least. A job that ends gives up its workers at once."""
        running = np.array([j for j in self.active if self.chosen[j] is not None], dtype=int)
        goes_on = np.maximum(self.ready[running], self.now)
        finish = goes_on + self.left[running] / self.speed[running]
        arrival = self.trace[self.coming[-1]].seconds if self.coming else math.inf
        until = max(min(finish.min(initial=math.inf), arrival), self.now + interval_s)
        stop = np.minimum(finish, until)
        self.worker_seconds += float(self.counts[running] @ (stop - self.now))
        self.left[running] -= self.speed[running] * np.maximum(stop - goes_on, 0.0)
        ended = running[finish <= until]
        self.ends[ended] = finish[finish <= until]
        self.counts[ended] = 0
        self.active = [j for j in self.active if math.isnan(self.ends[j])]
        self.now = until


def measure(cell: Trace, rule: str) -> dict[str, Any]:
    """The rule's figures on this trace, each a mean over the seeds."""
    began, cpu_began, found = time.perf_counter(), time.process_time(), []
    for seed in range(cell.seeds):
        trace = draw(cell.jobs, cell.workers, cell.load, seed)
        outcome = simulate(trace, cell.workers, rule.split()[0], cell.interval_s, least_gain=RULES[rule])
        hours = outcome.completion / 3600
        mean, p50, p95 = float(hours.mean()), *map(float, np.quantile(hours, (0.5, 0.95)))
        found.append((mean, p50, p95, outcome.worker_hours, outcome.idle_hours))
    names = ("mean_h", "p50_h", "p95_h", "worker_hours", "idle_worker_hours")
    averages = dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))
    took = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
    return {"rule": rule, **averages, "mean_h_by_seed": [each[0] for each in found], **took}


def main() -> int:
    """Prints the table, and writes it with --json."""
    parser = argparse.ArgumentParser(
        description="The planner against FIFO and static allocation, on a synthetic trace."
    )
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    cells = []
    for cell in TRACES:
        print(f"{cell.jobs} jobs on {cell.workers} workers, load {cell.load}, {cell.seeds} seeds", flush=True)
        rules = [measure(cell, rule) for rule in RULES]
        cells.append({**vars(cell), "rules": rules})
        for line in rules:
            print("  {rule:<12}mean {mean_h:6.2f} h  median {p50_h:6.2f} h  95 % {p95_h:6.2f} h".format(**line), end="")
            print("  {worker_hours:8.0f} worker-hours, idle {idle_worker_hours:8.0f}  in {wall_s:.1f} s".format(**line))
    write(path, ["numpy"], traces=cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
