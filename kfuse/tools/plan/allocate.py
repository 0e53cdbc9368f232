"""How many workers each job gets: dynamic programming, the optimum of a sum over the jobs.

The sum is of effective workers. A job that waits adds 0, and one on n workers, whose fewest are m,

    value(n) = goodput(n) / (goodput(m) / m) - least_gain * n.

The objective: Saxena et al. (2020) maximise the sum of the jobs' throughputs, each over its throughput on one
worker, by dynamic programming over jobs and workers. This is their sum with Pollux's goodput (Qiao et al. 2021) for
throughput.

Minimising the sum of remaining times was rejected: a waiting job has no time, and the longest job gets most workers.

Goodput per worker falls with more workers. So as many jobs run as fit: first workers bring the most.

Jobs that wait for as many workers add the same. Of equal sums `plan` takes the one that runs the shortest expected
first: Helios' QSSF (Hu et al., SC 2021).

A worker that brings less than `least_gain` of what each of the job's first workers brings is released. Or et al. (MLSys
2020) keep a worker that gains a tenth of linear scaling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kfuse.tools.plan.jobs import Option

LEAST_GAIN = 0.1
"""What a worker must bring, over what each of the job's first ones brings. 0: all that help are used. Below 1."""
_MOST_EFFICIENT = 1e6
"""Largest efficiency of a worker over the job's first ones. More is a mistake; larger sums overflow int64."""


def service(options: Sequence[Option], samples_left: float) -> float:
    """Expected worker-seconds of a job with the fewest workers that it can have: what Helios' QSSF sorts by."""
    return options[0].workers * samples_left / options[0].goodput


def plan(
    options: Sequence[Sequence[Option]],
    samples_left: Sequence[float],
    workers: int,
    least_gain: float = LEAST_GAIN,
    pause_s: Sequence[Sequence[float]] = (),
) -> list[Option | None]:
    """What each job does with its part of the workers; None: it waits.

    options: each job's, of `Job.options`, at least one. pause_s: seconds until the job goes on with each option, whose
    part of the time left counts as lost goodput; none: at once.
    """
    order, choices = sorted(range(len(options)), key=lambda j: service(options[j], samples_left[j])), []
    for j in order:
        first, values = options[j][0].goodput / options[j][0].workers, []
        for option, pause in zip(options[j], pause_s[j] if pause_s else [0.0] * len(options[j]), strict=True):
            lost = pause / (samples_left[j] / option.goodput + pause) if pause else 0.0
            efficiency = min(option.goodput / option.workers / first * (1 - lost), _MOST_EFFICIENT)
            values.append((option.workers, round(1e6 * option.workers * (efficiency - least_gain))))
        choices.append(values)
    taken = dict(zip(order, allocate(choices, workers), strict=True))
    return [next((option for option in each if option.workers == taken[j]), None) for j, each in enumerate(options)]


def allocate(choices: Sequence[Sequence[tuple[int, int]]], workers: int) -> list[int]:
    """For each job the workers that it gets, 0 where it waits. The sum of their values is the largest possible.

    choices: each job's (workers, value); whole numbers, so that equal sums are found. Of these the one with the fewest
    workers is taken, then the one that gives them to the first jobs. Takes O(number of choices * workers).
    """
    # best[j, w]: the largest sum of the first j jobs with w workers at most.
    best = np.zeros((len(choices) + 1, workers + 1), dtype=np.int64)
    for j, options in enumerate(choices):
        best[j + 1] = best[j]
        for count, gain in options:
            if count <= workers and gain > 0:
                np.maximum(best[j + 1, count:], best[j, : workers + 1 - count] + gain, out=best[j + 1, count:])
    taken = [0] * len(choices)
    left = int(np.argmax(best[-1] == best[-1, -1]))
    for j in reversed(range(len(choices))):
        if best[j + 1, left] > best[j, left]:
            taken[j] = min(n for n, gain in choices[j] if n <= left and best[j, left - n] + gain == best[j + 1, left])
            left -= taken[j]
    return taken


def forecast(
    options: Sequence[Sequence[Option]], samples_left: Sequence[float], workers: int, least_gain: float = LEAST_GAIN
) -> tuple[list[float], float]:
    """Each job's end, in seconds from now, and all worker-seconds, if each end brings a new plan, without pauses.

    Each job's first option must have at most `workers`.
    """
    left, unfinished, now, worker_seconds = list(samples_left), list(range(len(options))), 0.0, 0.0
    ends = [0.0] * len(options)
    while unfinished:
        given = plan([options[j] for j in unfinished], [left[j] for j in unfinished], workers, least_gain)
        running = {j: option for j, option in zip(unfinished, given, strict=True) if option}
        first = min(running, key=lambda j: left[j] / running[j].goodput)
        seconds = left[first] / running[first].goodput
        for j, option in running.items():
            worker_seconds += seconds * option.workers
            left[j] -= seconds * option.goodput
        now += seconds
        # Others may end at the same time; what rounding leaves of them is no work, and may be below 0.
        for j in [j for j in running if j == first or left[j] <= 1e-12 * samples_left[j]]:
            ends[j] = now
            unfinished.remove(j)
    return ends, worker_seconds
