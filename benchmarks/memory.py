"""Bytes a parameter of every transport, by the number of workers and of micro-batches, as a table.

    python benchmarks/memory.py --json benchmarks/results/memory.json

One process stands for one worker of n: the engine, the optimizer and the transports are the real ones, on CPU tensors.
Only the group is a stand-in, whose collectives send nothing. Counted are the bytes of all tensors that exist while a
collective of the second step is started, where they are the most, for each parameter: parameters, gradients, moments,
partial sums, what is received, copies for the wire. Not counted: activations, and gradients that are not packed yet.
Parameters are fp32, in 2 buckets, and the optimizer is FusedAdamW. torch's DDP with AdamW has 16 bytes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from machine import parser_of, write
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.group import Group, Pending
from kfuse.comm.settings import CommOptions
from kfuse.comm.step_state import StepPlan
from kfuse.comm.sum_tree import bound, bytes_a_parameter, plan_range
from kfuse.data import worker_range
from kfuse.session import reset

TENSORS, NUMEL = 2, 2**18  # a bucket each: padding and tail are well below 1 % of it; both are under way at once
WORKERS = (2, 3, 4, 8, 16, 32, 64)
WITHOUT_ORDER = {
    "allreduce": CommOptions("allreduce"),
    "allreduce, bf16 wire": CommOptions("allreduce", dtype="bf16"),
    "all_to_all": CommOptions("all_to_all"),
    "all_to_all, bf16 wire": CommOptions("all_to_all", dtype="bf16"),
    "tree (binary)": CommOptions("tree"),
    "sharded": CommOptions(state="sharded"),
}
REPRODUCIBLE = CommOptions(reproducible=True)


def covered(places: Iterable[tuple[int, int]]) -> int:
    """Bytes that lie in at least one of the places: a parameter's storage may be a part of a flat buffer's."""
    total = reached = 0
    for start, end in sorted(places):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Slow(Pending):
    """Has not arrived until it is waited for: as many messages are under way as there can be."""

    def done(self) -> bool:
        return False


class StandIn(Group):
    """One of `size` workers, the only one there is: a collective sends nothing, and brings zeros."""

    def __init__(self, rank: int, size: int, message: type[Pending] = Slow) -> None:
        super().__init__()
        self.message = message
        self.rank, self.size, self.hosts = rank, size, [""] * size
        self.most = 0
        """Bytes of all tensors at the collective where they were the most."""

    def _count(self, what: str) -> Pending:
        kinds = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        storages = [found.untyped_storage() for found in kinds]
        self.most = max(self.most, covered((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages))
        return self.message(self, what, [])

    def all_reduce(self, tensor: Tensor, what: str, op: str = "sum") -> Pending:
        return self._count(what)

    def all_to_all(self, out: Tensor, into: Sequence[int], tensor: Tensor, cut: Sequence[int], what: str) -> Pending:
        out.zero_()
        return self._count(what)

    def share(self, flat: Tensor, what: str, unit: int = 1) -> Pending:
        return self._count(what)

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> Pending:
        return self._count(what)


def measure(options: CommOptions, ranges: Sequence[range], rank: int, message: type[Pending] = Slow) -> float:
    """Bytes a parameter on worker `rank` of a job whose workers sum these ranges of micro-batches, rank after rank.

    message: Slow: all messages are under way at once; Pending: each arrives at once.
    """
    reset()
    gc.collect()
    gc.freeze()  # the collector then knows of what is made from now on
    kf.init(**CommOptions(**{**vars(options), "bucket_mb": 4 * NUMEL / 2**20}).named())
    group = StandIn(rank, len(ranges), message)
    opt = kf.FusedAdamW([nn.Parameter(torch.zeros(NUMEL)) for _ in range(TENSORS)])
    opt.engine.set_group(group)
    opt.updates.lay_out(opt.engine)  # shards of this group's size
    for _ in range(2):  # the first step makes the moments and the buffers
        group.most = 0
        opt.begin(StepPlan(ranges[-1].stop, tuple(ranges)))
        for j in ranges[rank]:
            with opt.micro_batch(samples=1, last=j == ranges[rank][-1]):
                torch.stack([param.sum() for param in opt.engine.params]).sum().backward()
        opt.step()
        opt.zero_grad()
    opt.engine.close()
    gc.unfreeze()
    reset()
    return group.most / (TENSORS * NUMEL)


def reproducible(workers: int, total: int) -> dict[str, Any]:
    """The row of the table: counted on the worker with the most slots."""
    ranges = [worker_range(total, workers, rank, aligned=True) for rank in range(workers)]
    equal = [worker_range(total, workers, rank) for rank in range(workers)]
    slots = [plan_range(r.start, len(r), total).slots for r in ranges]
    return {
        "workers": workers,
        "micro_batches": total,
        "counted": measure(REPRODUCIBLE, ranges, slots.index(max(slots))),
        "formula": bytes_a_parameter(ranges),
        "bound": bound(total, workers),
        "load": max(map(len, ranges)) * workers / total,
        "equal_load": max(map(len, equal)) * workers / total,
        "equal_formula": bytes_a_parameter(equal),
    }


def without_order(workers: int) -> dict[str, Any]:
    """The row of the table: the micro-batches do not matter. Counted on the worker that has the most."""
    ranges = [range(rank, rank + 1) for rank in range(workers)]
    ranks = {name: range(workers) if options.schedule == "tree" else [0] for name, options in WITHOUT_ORDER.items()}
    found = {
        name: max(measure(options, ranges, rank) for rank in ranks[name]) for name, options in WITHOUT_ORDER.items()
    }
    return {"workers": workers, **found}


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [headings, ["---:"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def report(plain: Sequence[dict[str, Any]], ordered: Sequence[dict[str, Any]]) -> str:
    """Both tables."""
    first = [[row["workers"], *(f"{row[name]:.1f}" for name in WITHOUT_ORDER)] for row in plain]
    second = [
        [
            *(row["workers"], row["micro_batches"], f"{row['counted']:.1f}", row["bound"]),
            *(f"{row['load']:.2f}", f"{row['equal_load']:.2f}"),
            f"{row['equal_formula']:.1f}",
        ]
        for row in ordered
    ]
    headings = (
        *("n", "M", "bytes", "bound", "largest share / mean"),
        *("with equal ranges", "bytes with equal ranges"),
    )
    return f"{table(('n', *WITHOUT_ORDER), first)}\n\n{table(headings, second)}"


def main() -> int:
    """Prints both tables. Exit status 0."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    args = parser.parse_args()
    if min(args.workers) < 2:
        parser.error("--workers: must be at least 2")
    torch.set_num_threads(1)
    plain = [without_order(n) for n in args.workers]
    steps = [(n, total) for n in args.workers for total in sorted({n, 2 * n, 4 * n, 64, 100, 256}) if total >= n]
    ordered = [reproducible(*step) for step in steps]
    print(report(plain, ordered))
    write(args.json, ["torch", "numpy"], without_order=plain, reproducible=ordered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
