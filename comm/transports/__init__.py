"""Transports: how a bucket is reduced over the workers. (Policies and scripts call the transport the "topology".)"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kfuse.comm.group import Group
from kfuse.comm.sum_tree import Merge

NAMES = ("allreduce", "all_to_all", "tree")
TREES = ("binary", "star", "host")
"""The shapes that the transport `tree` takes."""


class Transport(Protocol):
    """Sums flat buffers over the group's workers. Made for each optimizer and view: the class is called with a `Group`.

    `plan` is called before the first step, and again when the contributions change (with reproducible sums: before each
    step). In a step `launch` is called for each bucket, in the same order on every rank; `poll` now and then; `wait`
    for each bucket. A step that is aborted is not waited for.

    On a GPU the messages must be started in one order on all ranks: by `launch` and `wait` alone, never by how far
    others have come. `Pending.wait_on_stream` orders the device's work after a message without blocking the host.
    """

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Prepares the coming steps. pieces[r]: how many slots rank r contributes; 1 without reproducible sums.

        merges: the order of additions, as pairs (destination, source); slots are counted rank after rank.
        Only transports for reproducible sums need it. Raises ValueError for more slots than the transport can take.
        """

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts summing bucket `key` over the workers, without waiting.

        slots: this worker's contributions (the first pieces[rank] of them), 1-D, fp32 or bf16, of one length on all
        ranks; slots[0] receives the sum. what: names the message in errors.
        """

    def poll(self) -> None:
        """Starts the next phase of launched buckets where the phase before has completed. Does not wait."""

    def wait(self, key: int) -> None:
        """Returns when slots[0] of bucket `key` holds the sum, for work on the current stream. Raises CommError."""


def choose(schedule: str, reproducible: bool) -> str:
    """The transport's name for `comm.schedule`; `auto` takes the fastest that keeps the promises made.

    Reproducible sums need every contribution at hand: all_to_all. Otherwise the library's all-reduce is as fast
    (see benchmarks/results) and reads no contributions from memory. A dotted path names the user's own class; whether
    its sums are reproducible is not checked. Raises ValueError for an unknown name, and for one that `reproducible`
    rules out.
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
    match name:  # imported when used: `import kfuse` is quick
        case "allreduce":
            from kfuse.comm.transports.allreduce import AllReduce

            return AllReduce(group)
        case "all_to_all":
            from kfuse.comm.transports.all_to_all import AllToAll

            return AllToAll(group)
        case "tree":
            from kfuse.comm.transports.tree import Tree

            return Tree(group, tree)
    made: Transport = pkgutil.resolve_name(name)(group)
    return made
