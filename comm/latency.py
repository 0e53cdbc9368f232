"""Measures the links between the workers of a view: the latency and the throughput of each.

All pairs, in rounds of disjoint pairs (`topology.rounds`), so that n workers need about n - 1 rounds. In a pair both
workers send and receive at the same time. A message of some bytes shows the latency. Larger ones, up to 1 MiB, show the
throughput: a small one does not see a slow link, and a shaped link lets its first bytes pass at full speed. Sizes grow
until a message takes long enough, so a round takes below half a second on a link of 10 Mbit/s.
"""

from __future__ import annotations

import time

import torch

from kfuse.comm.group import Group
from kfuse.comm.topology import Links, rounds

_PINGS, _REPEATS = 6, 3  # messages of one size, of which the fastest counts: noise only ever adds time
_FIRST, _LAST = 2**16, 2**20  # bytes of a large message
_ENOUGH_S = 0.02  # a message that takes longer needs no larger one after it
_WHAT = "measuring links"


def measure(group: Group) -> Links:
    """Measures all links of `group`, and sets `group.links`. Every rank calls it at the same point, between steps.

    Raises CommError if a worker is lost meanwhile, or it takes longer than the group's timeout.
    """
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
