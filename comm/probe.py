"""Measures a group's messages in a fraction of a second, and chooses the program that should be fastest.

At the start, and after each change of the view, where `comm.schedule=auto` leaves a choice. Rank 0 measures, decides
how large the messages may be for the time that is left, fits the model (`cost`) and sends its constants to all: one
broadcast, from which each rank computes the same choice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kfuse.comm import devices, transports
from kfuse.comm.cost import LEAST_S, MARGIN, PROBED, Costs, Job, choose, fit, price, traffic
from kfuse.comm.group import Group

BUDGET_S = 0.12
"""How long a probe should take. It never begins messages that are expected to take longer than what is left."""
AGAIN_S = 0.05
"""The same for a later view: workers wait for it, perhaps after a loss, and the model's program is running already."""
SMALL = 2**10
"""Elements of the small messages: latency is most of their time."""
_MOST_ROUNDS = 15  # of a size; the shortest is fitted: others wait for a core, on a busy machine twenty times as long
_LEAST_ROUNDS = 3  # of the largest size
_GROWTH = 16  # a larger message may be slower by more than its bytes: caches

Rounds = dict[int, list[dict[str, float]]]
"""By elements of a message: the seconds of each kind, round by round."""
SCHEDULES = ("allreduce", "all_to_all")
"""What `comm.schedule=auto` chooses from, its default first. A tree sends more bytes: it is for networks that its user
knows."""
_LARGER = 8
"""A bucket may be so many times as large as the largest message that was measured; else nothing is predicted of it.
Short messages lie in a link's queue as they are sent: they tell nothing of its rate."""


@dataclass(frozen=True)
class Choice:
    """The schedule that is taken by measured messages, and why."""

    schedule: str
    """A name in `SCHEDULES`."""
    workers: int
    predicted_s: Mapping[str, float]
    """Of each candidate, by name: seconds a step for communication and update, if backward hides nothing of it."""
    probe_s: float
    reason: str


def choose_in(group: Group, buckets: Sequence[int], again: bool) -> Choice:
    """Returns what measured messages choose for buckets of so many elements. Raises CommError.

    again: not for the first time. A worker that joins does not know yet what the others' decisions chose. So these do
    not matter here: all workers of a view must come to the same messages.
    """
    if group.costs is None:
        group.costs = probe(group, max(buckets), AGAIN_S if again else BUDGET_S)
    return choose_program(group.costs, group.size, buckets)


def choose_program(costs: Costs, workers: int, buckets: Sequence[int]) -> Choice:
    """A pure function of what a probe found: every rank computes the same. buckets: elements of each."""
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


def probe(group: Group, elements: int, budget_s: float = BUDGET_S) -> Costs:
    """Measures the messages of a group of several workers: called on every rank at the same point.

    elements: of the largest bucket; no larger message is sent. Raises CommError if a worker is lost.
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
    gamma, constants = messages.memory_seconds(), [0.0] * (2 * len(PROBED) + 3)
    if group.rank == 0:
        ends = sorted({min(rounds), max(rounds)})  # of the sizes; the shortest messages of each are fitted
        shortest = {n: {kind: min(each[kind] for each in rounds[n]) for kind in PROBED} for n in ends}
        pairs = [fit([(traffic(k, 4 * n, group.size), times[k]) for n, times in shortest.items()]) for k in PROBED]
        alphas, betas = zip(*pairs, strict=True)
        constants = [*alphas, *betas, gamma, 4.0 * max(rounds), time.perf_counter() - started]
    sent = torch.tensor(constants, dtype=torch.float64, device=group.device)
    group.broadcast(sent, "probe (result)").wait()
    values = sent.tolist()
    alpha, beta = (dict(zip(PROBED, part, strict=True)) for part in (values[:3], values[3:6]))
    return Costs(alpha, beta, *values[6:])


def orders(
    largest: int, budget_s: float, rounds: Rounds, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[int, int]]:
    """Yields which messages come next, as elements and rounds; these are in `rounds` when it goes on.

    1) One round of small messages, which is dropped: connections and caches are cold.
    2) Small ones, in a fifth of the time.
    3) One round of ever larger ones, up to the largest, or to what fits several times into the time left.
    4) More rounds of that size.
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
    """Buffers of zeros, and messages of them. The host waits for each."""

    def __init__(self, group: Group) -> None:
        self._group, self._device = group, devices.of(group.device)
        self._flat = self._received = torch.empty(0)

    def grow(self, elements: int) -> None:
        if elements > self._flat.numel():
            most = max(shard.stop - shard.start for shard in self._group.shards(elements))  # NCCL: the last one
            # Not `zeros`: pages that nothing has written are all one page, and quicker to read than a bucket.
            self._flat = torch.empty(elements, device=self._group.device).fill_(0)
            self._received = torch.empty(max(elements, most * self._group.size), device=self._group.device).fill_(0)

    def seconds(self, kind: str, elements: int) -> float:
        """Sends one message of this kind. Returns the seconds until it has arrived."""
        started, group, flat = time.perf_counter(), self._group, self._flat[:elements]
        if kind == "all_reduce":
            group.all_reduce(flat, "probe (all_reduce)").wait()
        elif kind == "share":
            group.share(flat, "probe (share)").wait()
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
