"""Reductions between real workers have the right sums and the same bits on all ranks, and no wait is endless."""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_workers
from hypothesis import given
from hypothesis import strategies as st
from problems import Bag
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import kfuse as kf
from kfuse.comm import transports
from kfuse.comm.gloo import GlooGroup, GlooPending
from kfuse.comm.group import Group, Pending, drop_retired
from kfuse.comm.settings import CommOptions
from kfuse.comm.sum_tree import Merge, plan_merges
from kfuse.comm.topology import depths, measure
from kfuse.comm.transports import all_to_all
from kfuse.comm.transports.tree import parents
from kfuse.kernels import BLOCK, block_sumsq, num_blocks, reduce
from kfuse.session import current

TENSORS = [[(1,)], [(5,), (3, 50), (64,)], [(0,), (4097,), (2, 2, 2), (300, 41)]]


def wanted(shapes: list[tuple[int, ...]], rank: int, j: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + j)
    return [torch.randn(shape, generator=generator) * 10.0 ** (j % 3) for shape in shapes]


def reduce_everything() -> list[tuple[str, str, float, str]]:
    """By schedule and type, for all shapes and bucket sizes: the largest relative error, a digest of all bits."""
    session = kf.init()
    size, out = session.group.size, []
    for (schedule, dtype), shapes, bucket_mb in product(SCHEDULES, TENSORS, (1e-4, 0.01, 4.0)):
        session.comm = CommOptions(schedule=schedule, dtype=dtype, bucket_mb=bucket_mb)
        bag = Bag(shapes)
        opt = kf.FusedSGD(bag.parameters(), lr=0.0)
        for _ in range(2):
            for j in range(3):
                with opt.micro_batch(samples=j + 1, last=j == 2):
                    bag.backward(wanted(shapes, session.group.rank, j))
            worst, digest = 0.0, hashlib.sha256()
            for k, p in enumerate(bag.tensors):
                terms = [wanted(shapes, r, j)[k].double() * (j + 1) for r in range(size) for j in range(3)]
                mean, scale = sum(terms) / (6 * size), torch.stack(terms).norm() / (6 * size)
                assert p.grad is not None
                worst = max(worst, float((p.grad - mean).norm() / scale) if p.numel() else 0.0)
                digest.update(p.grad.contiguous().numpy().tobytes())
            out.append((schedule, dtype, worst, digest.hexdigest()))
            opt.step()
            opt.zero_grad()
        opt.engine.close()
    return out


SCHEDULES = [
    ("all_to_all", "fp32"),
    ("all_to_all", "bf16"),
    ("all_to_all", "int8"),
    ("allreduce", "bf16"),
    ("tree", "fp32"),
    ("test_transports.OneByOne", "fp32"),
]


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.full)])
def test_sums_are_right_and_bits_the_same_on_all_ranks(workers: int) -> None:
    results = run_workers(workers, reduce_everything)
    assert all(result == results[0] for result in results), "ranks disagree"
    for schedule, dtype, error, _ in results[0]:
        assert error <= (1e-6 if dtype == "fp32" else 1e-2), (schedule, dtype)


class OneByOne:
    """A transport as a user may write one: every worker's gradients from all, added up at home."""

    def __init__(self, group: Group) -> None:
        self._group, self._under_way = group, {}

    def plan(self, pieces: Sequence[int], merges: tuple[Merge, ...]) -> None:
        assert list(pieces) == [1] * self._group.size

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        self._under_way[key] = (slots[0], what)

    def wait(self, key: int) -> None:
        flat, what = self._under_way.pop(key)
        flat.copy_(torch.stack(self._group.all_gather(flat, what)).sum(0))


@pytest.mark.parametrize("shape", ["binary", "star", "host"])
@given(hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_every_tree_leads_to_a_root(shape: str, hosts: list[str]) -> None:
    """Rank 0, or with `host` the first rank of the host."""
    parent = parents(shape, hosts)
    roots = [hosts.index(host) for host in hosts] if shape == "host" else [0] * len(hosts)
    for rank, depth in enumerate(depths(parent)):
        at, steps = rank, 0
        while at != parent[at]:
            at, steps = parent[at], steps + 1
        assert (at, steps) == (roots[rank], depth)


def sum_up_a_tree(shape: str | list[int], hosts: list[str]) -> tuple[list[float], str]:
    """The largest error of each of three sums, and a digest of their bits."""
    group = kf.init().group
    group.hosts = hosts
    if shape == "latency":
        measure(group)
    if shape == "host as NCCL has it":
        shape = "host"
        GlooGroup.sum_among = Group.sum_among  # type: ignore[method-assign]
    transport = transports.make("tree", group, shape, lambda key, numel: [])
    transport.plan([1] * group.size, ())
    generator = torch.Generator().manual_seed(3)
    terms = [
        torch.randn(group.size, numel, generator=generator) for numel in (200, 1, 300_001)
    ]  # the last one in four chunks
    flats = [each[group.rank].clone() for each in terms]
    for key, flat in enumerate(flats):
        transport.launch(key, [flat], f"message {key}")
    for key in range(3):
        transport.wait(key)
    errors = [float((flat - each.double().sum(0)).abs().max()) for flat, each in zip(flats, terms, strict=True)]
    return errors, hashlib.sha256(torch.cat(flats).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("shape", "hosts"),
    [
        ("binary", "aabb"),
        ("host", "abca"),
        ("host as NCCL has it", "abca"),
        ("latency", "aabb"),
        ([1, 2, 3, 3], "aabb"),
    ],
    ids=str,
)
def test_each_tree_sums_over_several_hosts(shape: str | list[int], hosts: str) -> None:
    results = run_workers(4, sum_up_a_tree, shape, list(hosts))
    assert max(max(errors) for errors, _ in results) < 2e-6
    assert len({digest for _, digest in results}) == 1, "ranks disagree"


def sum_in_parts() -> None:
    """Of two workers, which have so many partial sums each: this one's shard has the bits of the plan."""
    all_to_all.PART = 2 * BLOCK
    group, numel = kf.init().group, 9 * BLOCK + 700
    shards = group.shards(numel, BLOCK)
    transport: Any = transports.make("all_to_all", group, "binary", lambda key, numel: shards)
    shard = shards[group.rank]
    for pieces in ([1, 1], [0, 2], [3, 4]):
        merges = plan_merges([(0, k) for k in range(sum(pieces))], sum(pieces))
        transport.plan(pieces, merges)
        rows = torch.randn(sum(pieces), numel, generator=torch.Generator().manual_seed(1))
        own = rows[pieces[0] :] if group.rank else rows[: pieces[0]]
        slots = [*own.clone()] or [torch.empty(numel)]
        transport.launch(0, slots, "step 1, bucket 1 of 1")
        transport.wait(0)
        found, squares = (torch.empty(num_blocks(shard.stop - shard.start)) for _ in range(2))
        transport.reduce(0, slots[0], found)
        reduce(rows, merges, expected := torch.empty(numel))
        block_sumsq(expected[shard], squares)
        assert torch.equal(slots[0][shard], expected[shard]) and torch.equal(found, squares), pieces


def test_two_workers_add_up_a_shard_in_parts() -> None:
    run_workers(2, sum_in_parts)


def test_a_retired_group_is_gone_at_once() -> None:
    """With its sockets and threads: they must not wait for the garbage collector, which comes to old objects late."""
    gc.disable()
    try:
        group = Group()
        Pending(group, "a message whose failure nobody waited for", [])
        gone = weakref.ref(group)
        group.retire()
        del group
        assert gone() is None
    finally:
        gc.enable()


def test_messages_that_have_ended_keep_no_connection() -> None:
    """Whoever still knows them: a failed step's objects know each other until the garbage collector comes."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, store = descriptors(), HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = [*pool.map(lambda rank: GlooGroup(rank, 2, store), range(2))]
        kept = [group.all_reduce(torch.ones(4), what) for what in ("first", "second") for group in groups]
        [*pool.map(GlooPending.wait, kept[:2])]  # the others' end is not waited for
    failed = groups[0].all_reduce(torch.ones(4), "third")  # the other one does not send it
    deadline = time.monotonic() + 20
    assert descriptors() > before
    for group in groups:
        group.retire()
    while descriptors() > before and time.monotonic() < deadline:
        drop_retired()
        time.sleep(0.01)
    assert descriptors() == before
    for pending in kept:
        pending.wait()
    with pytest.raises(kf.CommError, match="third: lost contact with rank 1"):
        failed.wait()


AT_THE_END = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import HashStore
from kfuse.comm.gloo import GlooGroup
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.membership import Session
from kfuse.session import _close_at_exit

store = HashStore()
with ThreadPoolExecutor(2) as pool:
    groups = [*pool.map(lambda rank: GlooGroup(rank, 2, store), range(2))]
_close_at_exit(Session(Group(), CommOptions()))
groups[0].all_reduce(torch.ones(4), "what the other one does not send")
groups[0].retire()
if sys.argv[1] == "has ended":
    groups[1].disconnect()
"""


@pytest.mark.parametrize("message", ["has ended", "is under way"])
def test_a_group_that_was_retired_does_not_abort_the_end_of_its_process(message: str) -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END, message], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
def test_a_connection_to_a_lost_worker_is_soon_dropped() -> None:
    """Rank 0 is lost as it connects: its address is known, and rank 1 waits for it."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    for rank in range(2):
        with pytest.raises(kf.CommError, match="connect"):
            GlooGroup(rank, 2, store, timeout_s=0.5)
        deadline = time.monotonic() + 20  # gloo's timeout of messages is 40 s
        while any(thread.name == "kfuse-connect" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, f"rank {rank} still connects"
            time.sleep(0.05)


def silent(schedule: str, absent: int, done: str, gone: bool) -> str:
    """One rank never comes to the second step, or has gone by then. The others' error, in words."""
    group = kf.init(comm_schedule=schedule, comm_bucket_mb=0.0004).group
    model = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4))
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    if not gone:
        group.timeout_s = 2  # the first step, as processes come up, may take longer
    if group.rank == absent:
        while not gone and len(list(Path(done).iterdir())) < group.size - 1:
            time.sleep(0.02)
        return ""
    started = time.monotonic()
    try:
        model(torch.ones(2, 4)).sum().backward()
        return "no error"
    except kf.CommError as error:
        return str(error) if time.monotonic() - started < 30 else f"late: {error}"
    finally:
        Path(done, str(group.rank)).touch()


@pytest.mark.parametrize(
    ("workers", "absent", "schedule", "gone"),
    [
        pytest.param(3, 1, "all_to_all", False, marks=pytest.mark.full),
        (2, 1, "allreduce", True),
        (2, 1, "all_to_all", True),
    ],
)
def test_a_rank_that_never_comes_is_named(schedule: str, workers: int, absent: int, gone: bool, tmp_path: Path) -> None:
    messages = run_workers(workers, silent, schedule, absent, str(tmp_path), gone)
    messages.pop(absent)
    for message in messages:
        assert message.startswith(f"step 1, bucket 1 of 4 ({schedule}")
        assert ("lost contact with" if gone else f"rank {absent}") in message
        assert gone or message.endswith("a longer comm.timeout_s, in a script kf.init(comm_timeout_s=...)")
        assert not any(f"rank {other}" in message for other in range(workers) if other != absent), message


def alone() -> float:
    """Rank 0 of two; the other one is never started."""
    started = time.monotonic()
    with pytest.raises(kf.CommError):
        kf.init(comm_timeout_s=2)
    return time.monotonic() - started


@pytest.mark.full
def test_a_worker_that_is_never_started_is_an_error_in_time() -> None:
    assert run_workers(1, alone, env={"WORLD_SIZE": "2"})[0] < 30


OPERATIONS: tuple[Any, ...] = ("sum", "avg", "min", "max")


def verbs() -> dict[str, Any]:
    kf.init()
    r = kf.rank()
    matrix = torch.arange(6.0).reshape(2, 3) + 10 * r
    bent = matrix.t() if r % 2 else matrix.t().contiguous()
    before = matrix.clone()
    kf.barrier()
    found = {
        "numbers": [kf.allreduce(r + 1, op) for op in OPERATIONS],
        "exact": kf.allreduce(2.0**40 + r, "max"),
        "nan": str(kf.allreduce(float("nan") if r == 1 else 1.0, "avg")),
        "tensors": [kf.allreduce(matrix, op).tolist() for op in OPERATIONS],
        "bent": kf.allreduce(bent, "sum").tolist(),
        "scalar": kf.allreduce(torch.tensor(2.5), "sum").item(),
        "integers": kf.allreduce(torch.tensor([2**40 + r]), "max").tolist(),
        "half": kf.allreduce(torch.tensor([1.5], dtype=torch.bfloat16), "sum").tolist(),
        "gradient": kf.allreduce(torch.ones(2, requires_grad=True), "sum").requires_grad,
        "broadcast": [kf.broadcast(r + 0.5, source) for source in range(kf.size())],
        "broadcast tensor": kf.broadcast(bent, 1).tolist(),
        "gathered": kf.allgather(10 * r + 0.25),
        "gathered tensors": [t.tolist() for t in kf.allgather(matrix)],
        "gathered bent": [t.tolist() for t in kf.allgather(bent)],
    }
    assert (r, 3, r) == (kf.rank(), kf.size(), kf.local_rank())
    assert torch.equal(matrix, before), "an argument was changed"
    return found


def swapped_bytes(hosts: int) -> int:
    """Of two workers on so many hosts: the largest tensor that they swap in one all-to-all."""
    rank, swapped = os.environ["RANK"], []
    socket.gethostname = lambda: f"host{rank if hosts == 2 else 0}"
    group: Any = kf.init().group
    plain = group._pass_on
    group._pass_on = lambda over, out, tensor: swapped.append(tensor.nbytes) or plain(over, out, tensor)
    for numel in (1, 10_001, 100_001, 300_001):
        values = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(2)]
        assert torch.equal(kf.allreduce(values[kf.rank()]), values[0] + values[1])
        assert all(map(torch.equal, kf.allgather(values[kf.rank()]), values))
    return max(swapped)


def test_two_workers_swap_large_tensors_on_one_host_alone() -> None:
    """Over a link the two directions of a swap wait for each other."""
    assert run_workers(2, swapped_bytes, 1) == [400_004] * 2
    assert run_workers(2, swapped_bytes, 2) == [40_004] * 2


def test_verbs() -> None:
    matrices = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(3)]
    stacked = torch.stack(matrices)
    expected = {
        "numbers": [6.0, 2.0, 1.0, 3.0],
        "exact": 2.0**40 + 2,
        "nan": "nan",
        "tensors": [t.tolist() for t in (stacked.sum(0), stacked.mean(0), stacked.amin(0), stacked.amax(0))],
        "bent": stacked.sum(0).t().tolist(),
        "scalar": 7.5,
        "integers": [2**40 + 2],
        "half": [4.5],
        "gradient": False,
        "broadcast": [0.5, 1.5, 2.5],
        "broadcast tensor": matrices[1].t().tolist(),
        "gathered": [0.25, 10.25, 20.25],
        "gathered tensors": [m.tolist() for m in matrices],
        "gathered bent": [m.t().tolist() for m in matrices],
    }
    assert run_workers(3, verbs) == [expected] * 3


def test_verbs_on_one_worker_are_the_identity_and_check_their_arguments() -> None:
    current()
    x = torch.ones(3)
    assert (kf.rank(), kf.size(), kf.local_rank()) == (0, 1, 0)
    assert kf.allreduce(3, "avg") == 3.0 and kf.broadcast(2) == 2.0 and kf.allgather(1) == [1.0]
    total = kf.allreduce(x)
    assert isinstance(total, Tensor) and total is not x and torch.equal(total, x)
    with pytest.raises(ValueError, match="must be one of sum, avg, min, max"):
        kf.allreduce(1, "mean")
    with pytest.raises(ValueError, match=r"source=1: must be a rank from 0 to 0"):
        kf.broadcast(1, 1)
    with pytest.warns(UserWarning, match="number of workers is fixed"):
        kf.resize(2)
