"""What a schedule costs: an alpha-beta-gamma model of its program, the model's fit to measured messages, the choice.

    alpha   seconds a message: the network's latency and the hosts' work
    beta    seconds a byte on the wire
    gamma   seconds a byte of memory that is read or written: pack, reduce, measure, update

The model of one message is Hockney's (1994), the counts of messages and bytes of the collectives are those of Thakur,
Rabenseifner and Gropp (2005, "Optimization of Collective Communication Operations in MPICH"), for the ring all-reduce
those of Patarasuk and Yuan (2009). alpha and beta are fitted for each kind of message by itself, since libraries send
them at different speeds. All functions are pure but for `probe` and `known`: rank 0 measures, once and where machines
come, and sends the fitted constants to all: each rank computes the same choice.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kfuse.comm import devices, transports
from kfuse.comm.group import Costs, Group
from kfuse.comm.schedule import GRADIENT, SHARD, Op, Program

PROBED = ("all_reduce", "all_to_all", "share")  # the kinds of messages that are measured: methods of `Group`

# The part of the default's predicted time, and the seconds, that another choice must save. On a busy machine the fitted
# alpha and beta vary by a tenth; of the threads and calls of more messages the model knows nothing.
MARGIN, LEAST_S = 0.1, 1e-3

_PACK, _REDUCE, _MEASURE = 8, 4, 4  # bytes an element, fp32: read and written; of each row read, and the sum; read
UPDATE = 28  # bytes an element of an AdamW update in fp32: four tensors read, all but the gradient written


@dataclass(frozen=True)
class Traffic:
    """What an exchange asks of the busiest worker: messages after one another; bytes in its link's busier direction."""

    messages: float
    bytes: float


@dataclass(frozen=True)
class Job:
    """What a program is priced for: elements of each bucket, workers, bytes of an element of a gradient."""

    buckets: tuple[int, ...]
    workers: int
    wire_bytes: int = 4


@dataclass(frozen=True)
class Line:
    """One operation of a program, for one bucket, or summed over all buckets of a job."""

    op: Op
    messages: float
    wire_bytes: float
    memory_bytes: float
    seconds: float  # its own time, whatever runs beside it


@dataclass(frozen=True)
class Price:
    """What a program costs a job, a step."""

    lines: tuple[Line, ...]
    seconds: float  # from the end of backward to the end of the update, if backward hides none of it

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
            sent = traffic(kind, nbytes, job.workers)
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
    copies = 2 if program.has("mirror") and job.workers > 1 else 1
    rows = [[_line(op, elements, job, costs, copies) for op in program.ops] for elements in job.buckets]
    lines = []
    for each in zip(*rows, strict=True):  # one operation, of all buckets
        figures = ((line.messages, line.wire_bytes, line.memory_bytes, line.seconds) for line in each)
        lines.append(Line(each[0].op, *map(sum, zip(*figures, strict=True))))
    return Price(tuple(lines), _finish(rows))


def _finish(rows: Sequence[Sequence[Line]]) -> float:
    """When the last bucket has gone through all of its operations. rows: those of each bucket.

    Each stream does one operation at a time, the first that is ready. Behind the barrier, where all buckets meet, the
    last one goes first.
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


BUDGET_S = 0.12  # seconds of a probe. No message begins that is expected to end later.
SMALL = 2**10  # elements of the small messages: latency is most of their time
_MOST_ROUNDS, _LEAST_ROUNDS = 15, 3  # of a size; the shortest is fitted: others wait for a core of a busy machine
_GROWTH = 16  # a larger message may be slower by more than its bytes: caches

Rounds = dict[int, list[dict[str, float]]]  # by elements of a message: the seconds of each kind, round by round
SCHEDULES = ("allreduce", "all_to_all")  # what `comm.schedule=auto` chooses from, its default first
# How many times the largest measured message a bucket may have: short messages tell nothing of a link's rate.
_LARGER = 8


@dataclass(frozen=True)
class Choice:
    """The schedule that is taken by measured messages, and why."""

    schedule: str  # a name in `SCHEDULES`
    workers: int
    predicted_s: Mapping[str, float]  # of each candidate: seconds a step, if backward hides nothing of it
    probe_s: float
    reason: str


def choose_program(costs: Costs, workers: int, buckets: Sequence[int]) -> Choice:
    """buckets: elements of each."""
    job, default = Job(tuple(buckets), workers), SCHEDULES[0]
    predicted = {name: price(transports.program(name, sharded=False), job, costs).seconds for name in SCHEDULES}
    if 4 * max(buckets) > _LARGER * costs.largest_bytes:
        why = f"no message above {costs.largest_bytes:.0f} bytes could be measured in time"
        return Choice(default, workers, predicted, costs.probe_s, why)
    chosen = choose(predicted, default)
    why = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in predicted.items()) + " a step predicted"
    if chosen == default and min(predicted.values()) < predicted[default]:
        why += f"; the other saves less than {100 * MARGIN:.0f} %, or than {1e3 * LEAST_S:g} ms"
    return Choice(chosen, workers, predicted, costs.probe_s, why)


def known(group: Group, before: Group) -> Costs | None:
    """What rank 0 knew in the group before, if it was measured on the machines that there are now. Every rank calls it.

    Raises CommError.
    """
    costs = before.costs
    holds = costs is not None and [*costs.hosts] == _machines(group)
    return _from_first(group, costs if holds else None)


def _machines(group: Group) -> list[str]:
    return sorted({*group.hosts})


def _from_first(group: Group, costs: Costs | None) -> Costs | None:
    """Rank 0's costs, on every rank. Raises CommError."""
    figures = torch.zeros(2 * len(PROBED) + 3, dtype=torch.float64, device=group.device)
    if group.rank == 0 and costs is not None:
        numbers = [*costs.alpha.values(), *costs.beta.values(), costs.gamma, costs.largest_bytes, costs.probe_s]
        figures.copy_(torch.tensor(numbers, dtype=torch.float64))
    group.broadcast(figures, "costs of messages").wait()
    values, count = figures.tolist(), len(PROBED)
    if not any(values):
        return None
    alpha, beta = (dict(zip(PROBED, part, strict=True)) for part in (values[:count], values[count : 2 * count]))
    gamma, largest_bytes, probe_s = values[2 * count :]
    return Costs(alpha, beta, gamma, largest_bytes, probe_s, _machines(group))


def probe(group: Group, elements: int, budget_s: float = BUDGET_S) -> Costs:
    """Measures a group's messages, of at most so many elements: called on every rank at the same point.

    Raises CommError if a worker is lost.
    """
    started = time.perf_counter()
    rounds: Rounds = defaultdict(list)
    plan = orders(max(SMALL, elements), budget_s, rounds)
    messages = _Messages(group)
    order = torch.zeros(2, dtype=torch.int64, device=group.device)
    while True:  # rank 0 says of how many elements the next messages are, and how many rounds; 0: no more
        if group.rank == 0:
            order.copy_(torch.tensor(next(plan, (0, 0))))
        group.broadcast(order, "probe (order)").wait()
        size, count = order.tolist()
        if not count:
            break
        messages.grow(size)
        rounds[size] += [{kind: messages.seconds(kind, size) for kind in PROBED} for _ in range(count)]
    # On all ranks at once, as in a step: those of one machine share its memory. Rank 0's figure is taken.
    gamma, costs = messages.memory_seconds(), None
    if group.rank == 0:
        ends = sorted({min(rounds), max(rounds)})  # of the sizes; the shortest messages of each are fitted
        shortest = {n: {kind: min(each[kind] for each in rounds[n]) for kind in PROBED} for n in ends}
        pairs = [fit([(traffic(k, 4 * n, group.size), times[k]) for n, times in shortest.items()]) for k in PROBED]
        alpha, beta = (dict(zip(PROBED, part, strict=True)) for part in zip(*pairs, strict=True))
        costs = Costs(alpha, beta, gamma, 4.0 * max(rounds), time.perf_counter() - started)
    costs = _from_first(group, costs)
    assert costs is not None
    return costs


def orders(
    largest: int, budget_s: float, rounds: Rounds, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[int, int]]:
    """Yields which messages come next, as elements and rounds; these are in `rounds` when it goes on.

    One round of small messages is dropped, as connections and caches are cold. Small ones follow, in a fifth of the
    time; then a round of ever larger ones, up to what fits several times into the time left; then more of that size.
    """
    size, end = SMALL, clock() + budget_s

    def took() -> float:
        return max(1e-9, min(sum(each.values()) for each in rounds[size]))

    yield size, 1
    small = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(budget_s / 5 / took())), int((end - clock()) / took()))
    if small <= 0:
        return
    rounds.clear()
    yield size, small
    while True:
        fits = int(size * (end - clock()) / ((_LEAST_ROUNDS + 1) * took()))
        following = min(largest, size * _GROWTH, fits)
        if following <= 2 * size and not size < following == largest:
            break
        size = following
        yield size, 1
    more = min(_MOST_ROUNDS, int((end - clock()) / (2 * took())))
    if size > SMALL and more > 0:
        yield size, more


class _Messages:
    """Buffers of zeros, and messages of them."""

    def __init__(self, group: Group) -> None:
        self._group, self._device = group, devices.of(group.device)
        self._flat = self._received = torch.empty(0)

    def grow(self, elements: int) -> None:
        if elements > self._flat.numel():
            most = max(shard.stop - shard.start for shard in self._group.shards(elements))  # NCCL: the last one
            self._flat = self._zeros(elements)
            self._received = self._zeros(max(elements, most * self._group.size))

    def _zeros(self, elements: int) -> torch.Tensor:
        # Not `zeros`: pages that nothing has written are all one page, and quicker to read than a bucket.
        return torch.empty(elements, dtype=torch.float32, device=self._group.device).fill_(0)

    def seconds(self, kind: str, elements: int) -> float:
        started, group, flat = time.perf_counter(), self._group, self._flat[:elements]
        if kind == "all_reduce":
            group.all_reduce(flat, "probe (all_reduce)").wait()
        elif kind == "share":
            group.share(flat, "probe (share)", group.shards(elements)).wait()
        else:
            widths = [shard.stop - shard.start for shard in group.shards(elements)]
            mine = widths[group.rank]
            out = self._received[: mine * group.size]
            group.all_to_all(out, [mine] * group.size, flat, widths, "probe (all_to_all)").wait()
        return time.perf_counter() - started

    def memory_seconds(self) -> float:
        """Seconds a byte of a pass that reads two rows and writes one, as the kernels' passes do."""
        flat, rows = self._flat, self._received[: self._flat.numel()]
        taken = []
        for _ in range(_LEAST_ROUNDS):
            self._device.synchronize()
            started = time.perf_counter()
            flat.add_(rows)
            self._device.synchronize()
            taken.append(time.perf_counter() - started)
        return min(taken) / (12 * flat.numel())
