"""Which worker has the copy of another one's shard of the optimizer state, where workers are on several hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def ranks_after(hosts: Sequence[str]) -> list[int]:
    """By rank another one, each once: on another host for as many as can be. hosts: where each rank is.

    The ranks are taken host by host, the host with the most first. Each one's is as many places on as that host has.
    """
    ranks, counts = range(len(hosts)), Counter(hosts)
    in_order = sorted(ranks, key=lambda rank: (-counts[hosts[rank]], hosts.index(hosts[rank])))
    most = counts[hosts[in_order[0]]]
    places = most if most < len(hosts) else 1  # where all are on one host, the next rank
    after = dict(zip(in_order, in_order[places:] + in_order[:places], strict=True))
    return [after[rank] for rank in ranks]


def beside(hosts: Sequence[str]) -> list[int]:
    """The ranks whose copy is on their own host: the loss of that host takes both."""
    return [rank for rank, other in enumerate(ranks_after(hosts)) if hosts[rank] == hosts[other]]
