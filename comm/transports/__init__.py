"""How a bucket is reduced. Each transport sums every worker's slots into slot 0 on all of them."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kfuse.comm.group import Group
from kfuse.comm.sum_tree import Merge
from kfuse.comm.transports.all_to_all import AllToAll
from kfuse.comm.transports.allreduce import AllReduce
from kfuse.comm.transports.tree import TREES, Tree

NAMES = ("allreduce", "all_to_all", "tree")


class Transport(Protocol):
    """Sums flat buffers over the group's workers. All ranks launch the same messages in the same order."""

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """For the coming step: how many slots each rank contributes, and the order in which they are added up."""

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts reducing this worker's `slots` (it may contribute fewer than given) into slots[0]."""

    def poll(self) -> None:
        """Moves multi-phase reductions on, without waiting."""

    def wait(self, key: int) -> None:
        """Returns when slots[0] of `key` holds the sum. Raises CommError."""


def choose(schedule: str, reproducible: bool) -> str:
    """The transport's name for `comm.schedule`; `auto` takes the fastest that keeps the promises made.

    Reproducible sums need every contribution at hand: all_to_all. Otherwise the library's all-reduce is as fast
    (see benchmarks/results) and reads no contributions from memory. A dotted path names a class of the user's own,
    who answers for what it promises. Raises ValueError for an unknown name and for one that is not reproducible.
    """
    if "." in schedule:
        return schedule
    if schedule not in ("auto", *NAMES):
        raise ValueError(f"comm.schedule={schedule!r}: must be one of auto, {', '.join(NAMES)}")
    if schedule == "auto":
        return "all_to_all" if reproducible else "allreduce"
    if reproducible and schedule != "all_to_all":
        raise ValueError(f"comm.schedule={schedule!r}: must be one of auto, all_to_all with comm.reproducible=true")
    return schedule


def make(name: str, group: Group, tree: str = TREES[0]) -> Transport:
    """The transport of this name over `group`; `tree` is the shape that `tree` takes.

    A class of the user's own is called with the group. Raises ImportError or AttributeError where there is none.
    """
    match name:
        case "allreduce":
            return AllReduce(group)
        case "all_to_all":
            return AllToAll(group)
        case "tree":
            return Tree(group, tree)
    made: Transport = pkgutil.resolve_name(name)(group)
    return made


__all__ = ["NAMES", "TREES", "AllReduce", "AllToAll", "Transport", "Tree", "choose", "make"]
