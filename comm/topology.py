"""Trees of workers, and the links between them: how they are measured, and the best tree of measured ones.

All pairs are measured, in rounds of disjoint pairs. In a pair both workers send and receive at the same time. A message
of some bytes shows the latency, larger ones, up to 1 MiB, the throughput: a small one does not see a slow link, and a
shaped link lets its first bytes pass at full speed. A round takes below half a second on a link of 10 Mbit/s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kfuse.comm.group import Group, Links

SAME = 1.5  # times are alike within this factor: a measurement in a busy network is no more exact
_MOST_CHUNKS, _CHUNK_BYTES = 8, 2**18


def best_tree(links: Links, nbytes: int) -> list[int]:
    """Each rank's parent in the tree along which a buffer of `nbytes` is summed soonest."""
    return spanning_tree(alike(links.seconds(nbytes)), chunks(nbytes))


def alike(times: Sequence[Sequence[float]]) -> list[list[float]]:
    """The times, where those within SAME of the smallest become the smallest, and so on: noise makes no deep tree."""
    classes: dict[float, float] = {}
    first = 0.0
    for seconds in sorted({seconds for row in times for seconds in row if seconds > 0}):
        if seconds >= SAME * first:
            first = seconds
        classes[seconds] = first
    return [[classes.get(seconds, 0.0) for seconds in row] for row in times]


def chunks(nbytes: int) -> int:
    """In how many parts a buffer of `nbytes` goes along a tree, so that all levels are busy at once: up to 8."""
    return max(1, min(_MOST_CHUNKS, nbytes // _CHUNK_BYTES))


def spanning_tree(times: Sequence[Sequence[float]], count: int = 1) -> list[int]:
    """Each rank's parent in a minimum spanning tree of `times` (symmetric, seconds), the root's being itself.

    By Prim's algorithm (1957). Among equal links it takes the one whose upper end has the least depth and children: on
    a network of equal links that is a binomial tree. The root is the rank, of several the lowest, from which the sum
    in `count` chunks takes the least time.
    """
    ranks = range(len(times))
    start = min(ranks, key=lambda r: sum(times[r]))
    parents, depth, children = {start: start}, {start: 0}, dict.fromkeys(ranks, 0)
    while len(parents) < len(times):
        *_, above, nearest = min(
            (times[r][p], depth[p] + children[p], p, r) for r in ranks if r not in parents for p in parents
        )
        parents[nearest], depth[nearest] = above, depth[above] + 1
        children[above] += 1
    tree = [parents[r] for r in ranks]
    return min((rooted(tree, root) for root in ranks), key=lambda it: duration(it, times, count))


def rooted(parents: Sequence[int], root: int) -> list[int]:
    """The same tree with another root: the links on the way from `root` to the old one are turned."""
    turned, at, above = list(parents), root, root
    while True:
        below, turned[at] = at, above
        if parents[at] == at:
            return turned
        at, above = parents[at], below


def duration(parents: Sequence[int], times: Sequence[Sequence[float]], count: int = 1) -> float:
    """Seconds that the sum of a buffer takes, up the tree and down, in `count` chunks. times: of the whole buffer.

    Each chunk follows a round behind the one before. In a round a worker sends its chunks one after another, and takes
    others' so too; the slowest worker counts.
    """
    depth, ranks = depths(parents), range(len(parents))
    levels, links = max(depth), [(r, parents[r], times[r][parents[r]]) for r in ranks if r != parents[r]]
    total = 0.0
    for step in range(count + 2 * levels - 1 if levels else 0):
        sends, takes = [0.0] * len(parents), [0.0] * len(parents)
        for r, above, seconds in links:
            if 0 <= step - levels + depth[r] < count:
                sends[r] += seconds
                takes[above] += seconds
            if 0 <= step - levels - depth[above] < count:
                sends[above] += seconds
                takes[r] += seconds
        total += max(*sends, *takes)
    return total / count


def depths(parents: Sequence[int]) -> list[int]:
    """By rank, the number of links to its root."""
    out = []
    for at in range(len(parents)):
        out.append(0)
        while at != parents[at]:
            at, out[-1] = parents[at], out[-1] + 1
    return out


def check_parents(parents: Sequence[int], size: int) -> None:
    """Raises ValueError unless parents[r] is the rank of r's parent in one tree of `size` ranks, the root's its own."""
    is_tree = len(parents) == size and all(parent in range(size) for parent in parents)
    if is_tree:
        ends = list(range(size))  # of the ways that lead up from each rank
        for _ in range(size):
            ends = [parents[end] for end in ends]
        is_tree = len(set(ends)) == 1
    if not is_tree:
        said = f"must have one parent for each of the {size} workers, one root (its own parent), and no circle"
        raise ValueError(f"tree {list(parents)}: {said}")


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """All pairs of `size` ranks in as few rounds of disjoint pairs as there can be, by the circle method."""
    even = size + size % 2
    out = []
    for k in range(even - 1):
        pairs = [(k, even - 1)] + [((k + i) % (even - 1), (k - i) % (even - 1)) for i in range(1, even // 2)]
        out.append([(min(pair), max(pair)) for pair in pairs if max(pair) < size])
    return out


_PINGS, _REPEATS = 6, 3  # messages of one size, of which the fastest counts: noise only ever adds time
_FIRST, _LAST = 2**16, 2**20  # bytes of a large message
_ENOUGH_S = 0.02  # a message that takes longer needs no larger one after it
_WHAT = "measuring links"


def measure(group: Group) -> Links:
    """Measures and sets the group's links. Every rank calls it at the same point, between steps. Raises CommError."""
    rows = torch.zeros(group.size, 2, dtype=torch.float64)  # by rank: latency, seconds a byte

    def act() -> None:
        for pairs in rounds(group.size):
            for pair in pairs:
                if group.rank in pair:
                    peer = sum(pair) - group.rank
                    rows[peer] = torch.tensor(_probe(group, peer), dtype=torch.float64)

    if group.size > 1:
        group.in_pairs(act, _WHAT)
    matrix = [row.tolist() for row in group.all_gather(rows.to(group.device), _WHAT)]
    links = Links(
        tuple(tuple(latency for latency, _ in row) for row in matrix),
        tuple(tuple(1 / each if each > 0 else None for _, each in row) for row in matrix),
    )
    group.take_links(links)
    return links


def _probe(group: Group, peer: int) -> tuple[float, float]:
    """Seconds of a small message, and seconds of each byte of a large one; both sides find the same."""
    latency, nbytes = _fastest(group, peer, 8, _PINGS), _FIRST
    while (seconds := _fastest(group, peer, nbytes, _REPEATS)) <= _ENOUGH_S and nbytes < _LAST:
        nbytes *= 2
    beyond = seconds - latency
    return latency, (beyond if beyond > 0 else seconds) / nbytes


def _fastest(group: Group, peer: int, nbytes: int, repeats: int) -> float:
    """Seconds of the fastest of so many messages, as the slower side saw it: both sides go on with one figure."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=group.device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        group.exchange(sent, received, peer, _WHAT)
        times.append(time.perf_counter() - started)
    theirs = torch.zeros(1, dtype=torch.float64, device=group.device)
    group.exchange(torch.full_like(theirs, min(times)), theirs, peer, _WHAT)
    return max(min(times), float(theirs))
