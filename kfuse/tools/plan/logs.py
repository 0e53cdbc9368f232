"""Replays a cluster's log, in the format of the Helios traces (Hu et al., SC 2021). Times are seconds since 1970."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kfuse.settings.instantiate import one_line
from kfuse.settings.tree import ConfigError

HOST = 8  # GPUs of a node
TICK_S, BOOT_S, LATER_S = 600, 300, 60  # between forecasts; of a boot; a start that differs by no more is the same
CALM, AHEAD, WEEK, COVERED = 72, 6, 1008, 0.95  # see `needed`; the first three are ticks
_END, _BOOT, _SUBMIT, _TICK = range(4)  # events of one time happen in this order, then jobs start


class LoggedJob(NamedTuple):
    """Names a job's user and GPUs, the time of its submission, and the seconds that it ran."""

    user: str
    gpus: int
    submit: int
    duration: int


Cluster = tuple[Sequence[LoggedJob], int]  # a virtual cluster's jobs by submission, each of which fits; its nodes
Ended = Counter[object]  # number and total seconds of ended jobs: of all, of a user, of a user with as many GPUs


def predicted(job: LoggedJob, ended: Ended) -> float:
    """Returns GPU-seconds by a mean duration: of all jobs, of the user's, and of the user's with as many GPUs.

    Each mean counts the one before as 4 jobs more; the first one counts an hour so.
    """
    mean = 3600.0
    for group in (job[:0], job[:1], job[:2]):
        mean = (ended["seconds", group] + 4 * mean) / (ended["jobs", group] + 4)
    return job.gpus * mean


ORDERS: dict[str, Callable[[LoggedJob, Ended], float]] = {
    "FIFO": lambda job, ended: 0,
    "GPUs alone": lambda job, ended: job.gpus,
    "QSSF": predicted,
    "oracle": lambda job, ended: job.gpus * job.duration,
}


def needed(peaks: Sequence[int], nodes: int) -> int:
    """Returns how many nodes are to be awake: those of the last tick, and a rise that is larger than COVERED of the
    rises within AHEAD ticks, in the last WEEK.

    All nodes before 2 * CALM ticks, and where jobs have wanted all within CALM ticks: one late start moves others in a
    queue. peaks: the most nodes in use and wanted by the queue, tick by tick.
    """
    if len(peaks) < 2 * CALM or max(peaks[-CALM:]) >= nodes:
        return nodes
    spans = np.lib.stride_tricks.sliding_window_view(peaks[-WEEK:], AHEAD + 1)
    return min(nodes, peaks[-1] + int(np.ceil(np.quantile(spans.max(axis=1) - spans[:, 0], COVERED))))


def replay(cluster: Cluster, order: str, release: bool, size: int = HOST) -> tuple[NDArray[np.float64], int]:
    """Returns when each job starts, and node-seconds awake or booting without a job, up to the last submission.

    A job starts where so many GPUs are free, on whichever nodes; the first of the queue holds up the others, and none
    is stopped. release: idle nodes sleep, but for those that are `needed`; a job that wants more waits for their boot.
    """
    jobs, nodes = cluster
    events = [(job.submit, _SUBMIT, j) for j, job in enumerate(jobs)]
    events += [(when, _TICK, 0) for when in range(jobs[0].submit + TICK_S, jobs[-1].submit, TICK_S) if release]
    heapify(events)
    queue, ended, peaks, starts = list[tuple[float, int]](), Ended(), [0], np.full(len(jobs), np.nan)
    used, asked, awake, booting, forecast, idle_s, until = 0, 0, nodes, 0, nodes, 0, jobs[0].submit
    while events:
        now, kind, number = heappop(events)
        since, until = until, min(now, jobs[-1].submit)
        idle_s += (awake + booting - math.ceil(used / size)) * (until - since)
        if kind == _END:
            job = jobs[number]
            used -= job.gpus
            for group in (job[:0], job[:1], job[:2]):
                ended["jobs", group] += 1
                ended["seconds", group] += job.duration
        elif kind == _BOOT:
            awake, booting = awake + number, booting - number
        elif kind == _SUBMIT:
            asked += jobs[number].gpus
            heappush(queue, (ORDERS[order](jobs[number], ended), number))
        else:
            forecast = needed(peaks, nodes)
            awake = min(awake, max(forecast, math.ceil(used / size)))
            peaks.append(0)
        if events and events[0][0] == now:
            continue
        while queue and used + jobs[queue[0][1]].gpus <= awake * size:
            j = heappop(queue)[1]
            used, asked, starts[j] = used + jobs[j].gpus, asked - jobs[j].gpus, now
            heappush(events, (now + jobs[j].duration, _END, j))
        wanted = min(nodes, math.ceil((used + asked) / size))
        peaks[-1] = max(peaks[-1], wanted)
        if (woken := max(wanted, forecast) - awake - booting) > 0:
            booting += woken
            heappush(events, (now + BOOT_S, _BOOT, woken))
    return starts, idle_s


def compare(clusters: Sequence[Cluster]) -> dict[str, float]:
    """Returns figures of all virtual clusters together; those of ORDERS are mean hours from submission to end."""
    cases = [*((order, False) for order in ORDERS), ("QSSF", True)]
    runs = [[replay(cluster, *case) for cluster in clusters] for case in cases]
    starts = np.array([np.concatenate([each for each, _ in run]) for run in runs])
    took = [job.duration - job.submit for jobs, _ in clusters for job in jobs]
    fifo, alone, qssf, oracle, _ = hours = (starts + took).mean(axis=1) / 3600
    idle, less = (sum(idle_s for _, idle_s in run) / 3600 for run in runs[2::2])  # QSSF without releases, and with
    return {
        **dict(zip(ORDERS, hours, strict=False)),
        "% of the oracle's gain over FIFO: QSSF": 100 * (fifo - qssf) / (fifo - oracle or 1),
        "% of the oracle's gain over FIFO: GPUs alone": 100 * (fifo - alone) / (fifo - oracle or 1),
        "idle node-hours with QSSF": idle,
        "releases: % fewer idle node-hours": 100 * (idle - less) / (idle or 1),
        "releases: % of the jobs started later by more than a minute": 100 * (starts[-1] - starts[2] > LATER_S).mean(),
        "jobs": len(took),
    }


def read(log: str, gpus: str) -> list[Cluster]:
    """Returns the virtual clusters, each with the most nodes that it had. Raises ConfigError.

    Without the jobs that never started, and those that are larger than their virtual cluster.
    """
    nodes, jobs = Counter[str](), defaultdict[str, list[LoggedJob]](list)

    def add_day(row: dict[str, str]) -> None:
        datetime.fromisoformat(row.pop("date"))
        for vc, count in row.items():
            nodes[vc] = max(nodes[vc], int(np.uint32(count)) // HOST)

    def add_job(row: dict[str, str]) -> None:
        submit = int(datetime.fromisoformat(row["submit_time"] + "Z").timestamp())
        job = LoggedJob(row["user"], int(np.uint32(row["gpu_num"])), submit, int(np.uint32(row["duration"])))
        if row["vc"] not in nodes:
            raise ValueError(f"{gpus} lacks vc {row['vc']}")
        if 0 < job.gpus <= nodes[row["vc"]] * HOST and row["start_time"][:1].isdigit():  # else empty, or "None"
            jobs[row["vc"]].append(job)

    _for_rows(gpus, add_day, "date as 2020-06-09, and whole numbers for each vc")
    _for_rows(log, add_job, "user, vc, gpu_num, submit_time as 2020-06-09 18:41:01, start_time, duration in seconds")
    if not jobs:
        raise ConfigError(f"{log}: must have a job with gpu_num above 0 that has started and fits its virtual cluster")
    return [(sorted(each, key=lambda job: job.submit), nodes[vc]) for vc, each in jobs.items()]


def _for_rows(path: str, add: Callable[[dict[str, str]], None], must: str) -> None:
    where = path
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for row in (rows := csv.DictReader(file, restval="")):
                where = f"{path}: line {rows.line_num}"
                add(row)
    except (OSError, KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise ConfigError(f"{where}: {one_line(error)}: must have {must}") from error
