"""The transports of kfuse by name, and what each one can do: for settings, programs and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Properties:
    """What a transport of kfuse does with a bucket."""

    to_shards: bool
    """Its exchange leaves each worker its shard of the sum; else the whole sum. `comm.state=sharded` needs that."""
    contributions: bool
    """It brings all workers' contributions, and kfuse adds them up, in one order: `comm.reproducible=true` needs that.
    Else the library or the transport adds up."""
    message: str
    """The kind of message (`cost.PROBED`) whose measured time is that of its messages."""


PROPERTIES = {
    "allreduce": Properties(False, False, "all_reduce"),
    "all_to_all": Properties(True, True, "all_to_all"),
    "reduce_scatter": Properties(True, False, "all_to_all"),  # as many bytes; the library's own is not measured
    "tree": Properties(False, False, "all_to_all"),
    "symmetric": Properties(True, True, "all_to_all"),  # as many bytes, over the same links; a pull is not measured
}
NAMES = tuple(PROPERTIES)
TREES = ("binary", "star", "host", "latency")
"""The shapes that the transport `tree` knows by name."""


def allowed(reproducible: bool, sharded: bool) -> tuple[str, ...]:
    """What `comm.reproducible` and `comm.state=sharded` leave of `comm.schedule`."""
    left = (n for n, of in PROPERTIES.items() if of.contributions >= reproducible and of.to_shards >= sharded)
    return "auto", *left


def default(reproducible: bool, sharded: bool, dtype: str) -> str:
    """What `comm.schedule=auto` takes where messages have not been measured.

    Reproducible sums need every contribution at hand: all_to_all. bf16 messages (dtype) are added up in fp32 by
    all_to_all alone. Where there is a choice, `kfuse.comm.probe` makes it for a group of several workers. sharded: a
    worker needs its shard of the sum only.
    """
    if reproducible or dtype == "bf16":
        return "all_to_all"
    return "reduce_scatter" if sharded else "allreduce"


def check_one_each(transport: str, pieces: Sequence[int]) -> None:
    """For transports that add up one contribution of each worker: raises ValueError where one has another number."""
    if any(count != 1 for count in pieces):
        raise ValueError(f"{transport} takes one contribution a worker")
