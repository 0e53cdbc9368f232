"""Transports: how a bucket's contributions are exchanged. (Policies and scripts call the transport the "topology".)"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kfuse.comm import devices, schedule
from kfuse.comm.group import Group, Pending
from kfuse.comm.schedule import Program
from kfuse.comm.settings import CONTRIBUTIONS, TO_SHARDS, CommOptions
from kfuse.comm.sum_tree import Merge


class Transport(Protocol):
    """Exchanges flat buffers between the group's workers.

    Made for each optimizer and view: the class is called with a `Group`, which others may be given too. `plan` is
    called before the first step, and again when the contributions change (with reproducible sums: before each step).
    In a step `launch` is called for each bucket, in the same order on every rank, then `wait` for each bucket in that
    order. A step that is aborted is not waited for.

    On a GPU the messages must be started in one order on all ranks: by `launch` and `wait` alone, never by how far
    others have come. `Pending.wait_on_stream` orders the device's work after a message without blocking the host.

    Where there is a method `hold(buckets)`, it has these buckets take fresh slots in the transport's own memory.
    """

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        """Prepares the coming steps. pieces[r]: how many slots rank r contributes; 1 without reproducible sums.

        merges: the order of additions, as pairs (destination, source); slots are counted rank after rank. Only
        transports for reproducible sums need it, which are kfuse's own.
        """
        return  # nothing to prepare, where each worker contributes one slot

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        """Starts the exchange of bucket `key`, without waiting.

        slots: this worker's contributions (the first pieces[rank] of them), 1-D, fp32 or bf16, of one length on all
        ranks; slots[0] receives the sum. For `BringsContributions` also int8, a message of `kfuse.kernels.wire`. what:
        names the message in errors.
        """

    def wait(self, key: int) -> None:
        """Returns when slots[0] of bucket `key` holds the sum, for work on the current stream. Raises CommError."""


class BringsContributions(Transport, Protocol):
    """Brings a rank all contributions to its shard. `wait` returns when `reduce` can begin.

    On a GPU `launch`, `wait` and `reduce` are called on one stream, which is not the one that backward runs on.
    """

    def arrived(self, key: int) -> bool:
        """Whether the messages of bucket `key` have ended, without waiting."""

    def reduce(self, key: int, flat: Tensor, sumsq: Tensor | None = None, wire: Tensor | None = None) -> None:
        """After `wait`: adds up the contributions, to this rank's shard of `flat`. May wait for some. Raises CommError.

        flat: fp32, of as many elements as the bucket. sumsq: fp32, receives the sum of squares of each block of the
        shard. wire: int8, a message that receives the shard's sum too.
        """


def program(name: str, sharded: bool, dtype: str = "fp32") -> Program:
    """What a step does with a bucket over the transport of this name, which is resolved. dtype: of its messages."""
    plain = schedule.all_reduce(name)
    if name not in TO_SHARDS:
        return plain
    reduces = name in CONTRIBUTIONS
    shared = schedule.split(plain, name, reduces)
    if sharded:
        shared = schedule.reorder(shared)
    elif dtype != "fp32":
        shared = schedule.measure_shards(shared)
    return schedule.fuse(shared) if reduces and shared.measures_shards else shared


def make_programs(options: CommOptions, name: str, adds_up: bool, mirrors: bool) -> tuple[Program, Program, Program]:
    """What a step does with a bucket of gradients, with one of owned matrices, and with a last bucket that has no
    gradients: buffers and the tail.

    name: of the transport. adds_up: of the group. mirrors: see `Engine`. Raises ValueError unless all are valid.
    """
    # gloo's own reduce-scatter takes several times as long for the same bytes, and bf16 sums would be rounded.
    replaced = name == "reduce_scatter" and not (adds_up and options.dtype == "fp32")
    running = "all_to_all" if replaced else name
    whole = program(running, options.sharded, options.dtype)
    # A library's reduce-scatter makes equal parts.
    unequal = "all_to_all" if running == "reduce_scatter" and options.sharded else running
    matrices = schedule.orthogonalise(program(unequal, options.sharded, options.dtype))
    if mirrors and options.sharded:
        whole, matrices = schedule.mirror(whole), schedule.mirror(matrices)
    # One message, where the order of additions is free: these are few numbers, and a message costs more than its bytes.
    apart = program(("all_to_all" if options.reproducible else "allreduce") if running in TO_SHARDS else running, False)
    for each in (whole, matrices, apart):
        schedule.validate(each)
    return whole, matrices, apart


def in_one_message(program: Program) -> Program:
    """The program in which both workers add up the whole bucket, for one that reduces shards and shares them."""
    own = program.sharded or program.measures_shards or program.has("orthogonalise")
    return program if own or program.transport != "all_to_all" else schedule.all_reduce("swap")


_CLASSES = {  # imported when used: `import kfuse` is quick
    "allreduce": f"{__name__}:AllReduce",
    "reduce_scatter": f"{__name__}:ReduceScatter",
    "all_to_all": f"{__name__}.all_to_all:AllToAll",
    "all_to_all, two workers": f"{__name__}.all_to_all:TwoWorkers",
    "swap": f"{__name__}.all_to_all:Swap",
    "symmetric": f"{__name__}.symmetric:Symmetric",
    "tree": f"{__name__}.tree:Tree",
}


Cuts = Callable[[int, int], Sequence[slice]]
"""Of a bucket's number, and of how many elements its message has: the shard of each rank."""


def make(name: str, group: Group, tree: str | Sequence[int], cuts: Cuts) -> Transport:
    """The transport of this name, which is resolved, or of the user's own class, over `group`.

    tree: the shape that `tree` takes: a name, or each rank's parent. Raises ImportError or AttributeError where there
    is no such class.
    """
    if name == "all_to_all" and group.size == 2 and not devices.of(group.device).asynchronous:
        name = "all_to_all, two workers"
    arguments: tuple[Any, ...] = (tree,) if name == "tree" else (cuts,) if name in _CLASSES else ()
    made: Transport = pkgutil.resolve_name(_CLASSES.get(name, name))(group, *arguments)
    return made


class AllReduce(Transport):
    """The transport `allreduce`: the library's own collective, in a summation order of its choice."""

    _name = "allreduce"

    def __init__(self, group: Group, cuts: Cuts | None = None) -> None:
        """cuts: None, as for classes of users that are derived from this one: equal shards."""
        self._group, self._cuts = group, cuts or (lambda key, numel: group.shards(numel))
        self._pending: dict[int, Pending] = {}

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        self._pending[key] = self._start(key, slots[0], f"{what} ({self._name})")

    def _start(self, key: int, flat: Tensor, what: str) -> Pending:
        return self._group.all_reduce(flat, what)

    def wait(self, key: int) -> None:
        self._pending.pop(key).wait_on_stream()


class ReduceScatter(AllReduce):
    """The transport `reduce_scatter` of a group that has one: slot 0 receives this rank's shard of the sum."""

    _name = "reduce_scatter"

    def _start(self, key: int, flat: Tensor, what: str) -> Pending:
        return self._group.reduce_scatter(flat, what, self._cuts(key, flat.numel()))
