"""What a schedule costs: an alpha-beta-gamma model of its program, the model's fit to measured messages, the choice.

    alpha   seconds a message: the network's latency and the hosts' work
    beta    seconds a byte on the wire
    gamma   seconds a byte of memory that is read or written: pack, reduce, measure, update

The model of one message is Hockney's (1994), the counts of messages and bytes of the collectives are those of Thakur,
Rabenseifner and Gropp (2005, "Optimization of Collective Communication Operations in MPICH"), for the ring all-reduce
those of Patarasuk and Yuan (2009). alpha and beta are fitted for each kind of message by itself, since libraries send
them at different speeds. All functions are pure: `probe` measures.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from kfuse.comm.schedule import GRADIENT, SHARD, Op, Program
from kfuse.comm.topology import chunks, depths

PROBED = ("all_reduce", "all_to_all", "share")
"""The kinds of messages that are measured: methods of `Group`."""

MARGIN = 0.1
"""The part of the predicted time that a choice must save, for `auto` to leave its default. On a busy machine the fitted
alpha and beta vary by about as much, and with the default nothing changes from run to run."""
LEAST_S = 1e-3
"""Seconds that a choice must save, too: a program of more messages has more threads that wake up, and more calls from
Python, of which the model knows nothing."""

_PACK, _REDUCE, _MEASURE = 8, 4, 4  # bytes an element, fp32: read and written; of each row read, and the sum; read
UPDATE = 28
"""Bytes an element of an AdamW update in fp32: parameter, gradient and two moments read, all but the gradient written.
SGD moves less; then a sharded update saves less than is predicted."""


@dataclass(frozen=True)
class Traffic:
    """What an exchange asks of the busiest worker: messages after one another; bytes in its link's busier direction."""

    messages: float
    bytes: float


@dataclass(frozen=True)
class Costs:
    """The fitted constants of a group: alpha and beta by kind of message (`PROBED`)."""

    alpha: Mapping[str, float]
    beta: Mapping[str, float]
    gamma: float
    largest_bytes: float = float("inf")
    """Of the messages that were measured: nothing is known of much larger ones."""
    probe_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """What a program is priced for: elements of each bucket, the tree's parents, bytes of an element of a gradient."""

    buckets: tuple[int, ...]
    workers: int
    parents: tuple[int, ...] = ()
    wire_bytes: int = 4


@dataclass(frozen=True)
class Line:
    """One operation of a program, for one bucket, or summed over all buckets of a job."""

    op: Op
    messages: float
    wire_bytes: float
    memory_bytes: float
    seconds: float
    """Its own time, whatever runs beside it."""


@dataclass(frozen=True)
class Price:
    """What a program costs a job, a step."""

    lines: tuple[Line, ...]
    seconds: float
    """From the end of backward to the end of the update, if backward hides none of it."""

    @property
    def wire_bytes(self) -> float:
        """Through the busiest worker's link, in the busier direction."""
        return sum(line.wire_bytes for line in self.lines)


# -- what an operation asks for -------------------------------------------------------------------------------------


def traffic(kind: str, numel_bytes: float, workers: int) -> Traffic:
    others = workers - 1
    if kind == "all_reduce":  # a ring: reduce-scatter, then all-gather
        return Traffic(2 * others, 2 * others / workers * numel_bytes)
    return Traffic(others, others / workers * numel_bytes)  # a shard to, or from, each of the others


def traffic_of_tree(numel_bytes: float, parents: Sequence[int]) -> Traffic:
    """Rounds of chunks; a parent takes its children's one after another. Several roots add up by a ring."""
    roots, children, levels = _shape(tuple(parents))
    count = chunks(int(numel_bytes)) if roots == 1 else 1
    rounds, others = count + 2 * levels - 1 if levels else 0, roots - 1
    return Traffic(rounds + 2 * others, (rounds / count * children + 2 * others / roots) * numel_bytes)


@cache
def _shape(parents: tuple[int, ...]) -> tuple[int, int, int]:
    """A tree's roots, the most children that one of its workers has, and its levels."""
    children = Counter(parent for rank, parent in enumerate(parents) if rank != parent)
    roots = max(1, len(parents) - children.total())
    return roots, max(children.values(), default=0), max(depths(parents), default=0)


def _line(op: Op, elements: int, job: Job, costs: Costs, copies: int) -> Line:
    """What `op` costs for one bucket, of whose shard so many workers repeat the update."""
    here = elements / job.workers if op.place == SHARD else elements
    memory, sent, kind = 0.0, Traffic(0, 0), ""
    match op.kind:
        case "pack":
            memory = _PACK * elements
        case "reduce" | "reduce+measure":  # the kernel measures the sum while it has it
            memory = _REDUCE * here * (job.workers + 1)
        case "measure":
            memory = _MEASURE * here
        case "update":
            memory = UPDATE * here * copies
        case "exchange" | "mirror" | "share" if job.workers == 1:
            pass
        case "exchange":
            # A library's reduce-scatter and a pull are not measured: they move as many bytes as an all-to-all.
            kind, nbytes = "all_reduce" if op.what == "allreduce" else "all_to_all", elements * job.wire_bytes
            sent = traffic_of_tree(nbytes, job.parents) if op.what == "tree" else traffic(kind, nbytes, job.workers)
        case "mirror":  # fp32; an all-to-all with data for one rank: gloo waits for the others' empty messages too
            kind, sent = "all_to_all", Traffic(job.workers - 1, 4 * here)
        case "share":
            kind, width = "share", job.wire_bytes if op.what == GRADIENT else 4
            sent = traffic(kind, elements * width, job.workers)
    seconds = costs.gamma * memory
    if kind:
        seconds += costs.alpha[kind] * sent.messages + costs.beta[kind] * sent.bytes
    return Line(op, sent.messages, sent.bytes, memory, seconds)


# -- a whole step ---------------------------------------------------------------------------------------------------


def price(program: Program, job: Job, costs: Costs) -> Price:
    """What `program` costs `job` a step."""
    copies = 2 if program.has("mirror") and job.workers > 1 else 1
    rows = [[_line(op, elements, job, costs, copies) for op in program.ops] for elements in job.buckets]
    lines = tuple(_sum([row[k] for row in rows]) for k in range(len(program.ops)))
    return Price(lines, _finish(rows))


def _sum(lines: Sequence[Line]) -> Line:
    figures = ((line.messages, line.wire_bytes, line.memory_bytes, line.seconds) for line in lines)
    return Line(lines[0].op, *map(sum, zip(*figures, strict=True)))


def _finish(rows: Sequence[Sequence[Line]]) -> float:
    """When the last bucket has gone through all of its operations. rows: those of each bucket.

    Each stream does one operation at a time, the first that is ready. A bucket's operations follow one another. Behind
    the program's barrier nothing begins until all buckets have come there; then the last one goes first, which the next
    forward needs first.
    """
    ops = [line.op for line in rows[0]]
    free = dict.fromkeys((op.stream for op in ops), 0.0)
    barrier = [op.kind for op in ops].index("barrier")
    at = 0.0
    for first, last, sign in ((0, barrier, 1), (barrier, len(ops), -1)):
        ready = [(at, sign * bucket, first) for bucket in range(len(rows))]
        heapq.heapify(ready)
        while ready:
            since, place, k = heapq.heappop(ready)
            if seconds := rows[abs(place)][k].seconds:
                free[ops[k].stream] = since = max(since, free[ops[k].stream]) + seconds
            at = max(at, since)
            if k + 1 < last:
                heapq.heappush(ready, (since, place, k + 1))
    return at


# -- the fit and the choice -----------------------------------------------------------------------------------------


def fit(samples: Sequence[tuple[Traffic, float]]) -> tuple[float, float]:
    """alpha and beta, neither below 0, by least squares of the relative errors. samples: what was sent, seconds."""
    rows = [(sent.messages / seconds, sent.bytes / seconds) for sent, seconds in samples]
    mm, mb, bb = sum(m * m for m, _ in rows), sum(m * b for m, b in rows), sum(b * b for _, b in rows)
    m1, b1 = sum(m for m, _ in rows), sum(b for _, b in rows)
    determinant = mm * bb - mb * mb
    if determinant > 1e-12 * mm * bb:
        alpha, beta = (m1 * bb - b1 * mb) / determinant, (b1 * mm - m1 * mb) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    by_alpha, by_beta = (m1 / mm if mm else 0.0), (b1 / bb if bb else 0.0)

    def error(alpha: float, beta: float) -> float:
        return sum((alpha * m + beta * b - 1) ** 2 for m, b in rows)

    return min((by_alpha, 0.0), (0.0, by_beta), key=lambda pair: error(*pair))


def choose(seconds: Mapping[str, float], default: str) -> str:
    """The name with the smallest predicted time, if it saves more than `MARGIN` of the default's and more than
    `LEAST_S`; else the default.
    """
    best, most = min(seconds, key=lambda name: (seconds[name], name != default)), seconds[default]
    return best if seconds[best] < min((1 - MARGIN) * most, most - LEAST_S) else default
