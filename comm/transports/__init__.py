"""How a bucket is reduced. Each transport sums every worker's slots into slot 0 on all of them."""

from __future__ import annotations

from kfuse.comm.group import Group
from kfuse.comm.transports.all_to_all import AllToAll
from kfuse.comm.transports.allreduce import AllReduce
from kfuse.comm.transports.base import Transport

NAMES = ("allreduce", "all_to_all")


def choose(schedule: str, reproducible: bool) -> str:
    """The transport's name for `comm.schedule`; `auto` takes the fastest that keeps the promises made.

    Reproducible sums need every contribution at hand: all_to_all. Otherwise the library's all-reduce is as fast
    (see benchmarks/results) and reads no contributions from memory.
    """
    if schedule not in ("auto", *NAMES):
        raise ValueError(f"comm.schedule={schedule!r}: allowed are auto, {', '.join(NAMES)}")
    if schedule == "auto":
        return "all_to_all" if reproducible else "allreduce"
    if reproducible and schedule == "allreduce":
        raise ValueError(
            "comm.schedule=allreduce: its summation order is its own; comm.reproducible=true needs all_to_all"
        )
    return schedule


def make(name: str, group: Group) -> Transport:
    return AllReduce(group) if name == "allreduce" else AllToAll(group)


__all__ = ["NAMES", "AllReduce", "AllToAll", "Transport", "choose", "make"]
