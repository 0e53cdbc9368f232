"""What the schedules of `comm.schedule=auto` cost: timed once where machines come, and the choice between them.

Both send as much over n workers: 2 (n - 1) messages after one another, and 2 (n - 1) / n of the bytes through each
worker's link (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH";
Patarasuk and Yuan 2009). So two constants of each are measured (Hockney 1994). They are taken for other numbers of
workers on the same machines too, though two exchange in another way: a new probe would make survivors wait.

    alpha   seconds a message: the network's latency and the hosts' work
    beta    seconds a byte on the wire, with the additions

Rank 0 measures, and sends the constants to all: each rank computes the same choice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kfuse.comm import transports
from kfuse.comm.group import Costs, Group
from kfuse.comm.sum_tree import plan_merges
from kfuse.comm.transports import BringsContributions

SCHEDULES = ("allreduce", "all_to_all")  # what `comm.schedule=auto` chooses from, its default first

# The part of the default's predicted time, and the seconds, that another choice must save. On a busy machine alpha and
# beta vary by a tenth.
MARGIN, LEAST_S = 0.1, 1e-3
# How many times the largest measured message a bucket may have: short messages tell nothing of a link's rate.
_LARGER = 8

BUDGET_S = 0.12  # seconds of a probe. No message begins that is expected to end later.
SMALL = 2**10  # elements of the small messages: latency is most of their time
_MOST_ROUNDS, _LEAST_ROUNDS = 15, 3  # of a size; the shortest counts: others wait for a core of a busy machine
_GROWTH = 16  # a larger message may be slower by more than its bytes: caches

Rounds = dict[int, list[dict[str, float]]]  # by elements of a message: the seconds of each schedule, round by round


@dataclass(frozen=True)
class Choice:
    """The schedule that is chosen by measured times, and why."""

    schedule: str  # a name in `SCHEDULES`
    workers: int
    predicted_s: Mapping[str, float]  # of each candidate: seconds a step, if backward hides nothing of it
    probe_s: float
    reason: str


def choose(costs: Costs, workers: int, buckets: Sequence[int]) -> Choice:
    """The schedule with the least predicted time, if it saves more than MARGIN of the default's, and than LEAST_S.

    buckets: elements of each.
    """
    predicted = {
        name: 2 * (workers - 1) * sum(costs.alpha[name] + costs.beta[name] * 4 * each / workers for each in buckets)
        for name in SCHEDULES
    }
    default, best = SCHEDULES[0], min(SCHEDULES, key=lambda name: predicted[name])
    most, chosen = predicted[default], default
    why = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in predicted.items()) + " a step predicted"
    if 4 * max(buckets) > _LARGER * costs.largest_bytes:
        why = f"no message above {costs.largest_bytes:.0f} bytes could be measured in time"
    elif predicted[best] < min((1 - MARGIN) * most, most - LEAST_S):
        chosen = best
    elif best != default:
        why += f"; the other saves less than {100 * MARGIN:.0f} %, or than {1e3 * LEAST_S:g} ms"
    return Choice(chosen, workers, predicted, costs.probe_s, why)


def known(group: Group, before: Group) -> Costs | None:
    """What rank 0 knew in the group before, if it was measured on the machines that there are now. Every rank calls it.

    Raises CommError.
    """
    costs = before.costs
    holds = costs is not None and [*costs.hosts] == sorted({*group.hosts})
    return _from_first(group, costs if holds else None)


def _from_first(group: Group, costs: Costs | None) -> Costs | None:
    """Rank 0's costs, on every rank. Raises CommError."""
    figures = torch.zeros(2 * len(SCHEDULES) + 2, dtype=torch.float64, device=group.device)
    if group.rank == 0 and costs is not None:
        numbers = [*costs.alpha.values(), *costs.beta.values(), costs.largest_bytes, costs.probe_s]
        figures.copy_(torch.tensor(numbers, dtype=torch.float64))
    group.broadcast(figures, "costs of messages").wait()
    *constants, largest_bytes, probe_s = figures.tolist()
    if not largest_bytes:
        return None
    alpha, beta = (dict(zip(SCHEDULES, part, strict=True)) for part in (constants[:2], constants[2:]))
    return Costs(alpha, beta, largest_bytes, probe_s, sorted({*group.hosts}))


# -- the probe --------------------------------------------------------------------------------------------------------


def probe(group: Group, elements: int) -> Costs:
    """Measures a group's messages, of at most so many elements: called on every rank at the same point.

    Raises CommError if a worker is lost.
    """
    started = time.perf_counter()
    rounds: Rounds = defaultdict(list)
    plan, sums, flat = orders(max(SMALL, elements), rounds), _sums(group), torch.empty(0)
    order = torch.zeros(2, dtype=torch.int64, device=group.device)
    while True:  # rank 0 says of how many elements the next messages are, and how many rounds; 0: no more
        if group.rank == 0:
            order.copy_(torch.tensor(next(plan, (0, 0))))
        group.broadcast(order, "probe (order)").wait()
        size, count = order.tolist()
        if not count:
            break
        if size > flat.numel():
            # Not `zeros`: pages that nothing has written are all one page, and quicker to read than a bucket.
            flat = torch.empty(size, dtype=torch.float32, device=group.device).fill_(0)
        rounds[size] += [{name: _seconds(act, flat[:size]) for name, act in sums.items()} for _ in range(count)]
    costs = None
    if group.rank == 0:
        shortest = {n: {name: min(each[name] for each in of) for name in SCHEDULES} for n, of in rounds.items()}
        fitted = [fit({n: times[name] for n, times in shortest.items()}, group.size) for name in SCHEDULES]
        alpha, beta = (dict(zip(SCHEDULES, part, strict=True)) for part in zip(*fitted, strict=True))
        costs = Costs(alpha, beta, 4.0 * max(rounds), time.perf_counter() - started)
    costs = _from_first(group, costs)
    assert costs is not None
    return costs


def _sums(group: Group) -> dict[str, Callable[[Tensor], None]]:
    """Of each schedule, what adds up a flat buffer over the workers, as in a step."""
    made = transports.make("all_to_all", group, "", lambda _, numel: group.shards(numel))
    brings = cast(BringsContributions, made)
    brings.plan([1] * group.size, plan_merges([(0, r) for r in range(group.size)], group.size))

    def all_reduce(flat: Tensor) -> None:
        group.all_reduce(flat, "probe (all_reduce)").wait()

    def all_to_all(flat: Tensor) -> None:
        brings.launch(0, [flat], "probe")
        brings.wait(0)
        brings.reduce(0, flat)
        group.share(flat, "probe (share)", group.shards(flat.numel())).wait()

    return dict(zip(SCHEDULES, (all_reduce, all_to_all), strict=True))


def _seconds(act: Callable[[Tensor], None], flat: Tensor) -> float:
    started = time.perf_counter()
    act(flat)
    return time.perf_counter() - started


def fit(times: Mapping[int, float], workers: int) -> tuple[float, float]:
    """alpha and beta of a schedule, neither below 0, by its smallest and its largest message. times: by elements."""
    small, large, messages = min(times), max(times), 2 * (workers - 1)
    rate = max(0.0, (times[large] - times[small]) / (large - small)) if large > small else 0.0
    return max(0.0, times[small] - rate * small) / messages, rate * workers / (4 * messages)


def orders(
    largest: int, rounds: Rounds, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter
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
