"""All ranks start their messages in one order, whatever the timing, and whoever has nothing to do."""

from __future__ import annotations

import time
from pathlib import Path

import nccl_double
import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from nccl_double import Faults, installed, messages, records
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import group as groups
from kfuse.comm.group import CommError
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan
from kfuse.session import current


class Net(nn.Module):
    """Several buckets, whose gradients come slowly; the last layer is used by some micro-batches only.

    A CPU's bits of an update depend on where a vector ends; with widths of 16 they are the same in whole buckets (of
    ranks that know that all parameters have gradients) as in single parameters (of a rank that has run nothing).
    """

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
        self.rare = nn.Linear(16, 16)
        self._pause_s = pause_s

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self._pause_s and x.requires_grad:
                x.register_hook(lambda _: time.sleep(self._pause_s))
        return x + self.rare(x) if rare else x


def ranges(step: int, size: int) -> tuple[range, ...]:
    """Uneven, and in every second step nothing for the last rank."""
    ends = [2, 3, 3] if step % 2 else [1, 3, 4]
    starts = [0, *ends[:-1]]
    return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))[:size]


def train(options: CommOptions, pause_s: float = 0.0) -> list[float]:
    """The parameters after some planned steps on this worker and the others."""
    kf.init(**options.named(), comm_timeout_s=60.0)
    session = current()
    net = Net(pause_s)
    opt = kf.FusedAdamW(net.parameters(), lr=0.01, clip_norm=1.0)
    for step in range(4):
        mine = ranges(step, session.group.size)
        opt.begin(StepPlan(4 * mine[-1].stop, mine))
        for j in mine[session.group.rank]:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + j))
            with opt.micro_batch(samples=4, last=j == mine[session.group.rank][-1]):
                net(x, rare=j % 2 == 0).square().mean().backward()
        opt.step()
        opt.zero_grad()
    kf.barrier()
    session.group.finish()
    parameters: list[float] = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    return parameters


def over_nccl(log: Path, options: CommOptions, slow_s: float, pause_s: float) -> list[float]:
    with installed(log, Faults(slow_s={1: slow_s})):
        return train(options, pause_s)


SMALL, LARGE = 1e-4, 25.0
MATRIX = [
    (2, CommOptions("auto", bucket_mb=SMALL)),
    (3, CommOptions("auto", bucket_mb=LARGE)),
    (8, CommOptions("auto", dtype="bf16", bucket_mb=SMALL)),
    (8, CommOptions("auto", dtype="int8", bucket_mb=SMALL)),
    (3, CommOptions("auto", dtype="int8", state="sharded", bucket_mb=LARGE)),
    (4, CommOptions("allreduce", bucket_mb=SMALL)),
    (7, CommOptions("allreduce", dtype="bf16", bucket_mb=LARGE)),
    (2, CommOptions("all_to_all", reproducible=True, bucket_mb=LARGE)),
    (5, CommOptions("all_to_all", dtype="bf16", bucket_mb=SMALL)),
    (6, CommOptions("all_to_all", state="sharded", bucket_mb=LARGE)),
    (3, CommOptions("reduce_scatter", state="sharded", bucket_mb=SMALL)),
    (8, CommOptions("reduce_scatter", state="sharded", bucket_mb=LARGE)),
    (6, CommOptions("tree", bucket_mb=SMALL)),
    (3, CommOptions("tree", tree="latency", bucket_mb=LARGE)),
    (5, CommOptions("tree", tree="star", bucket_mb=LARGE)),
    (4, CommOptions("tree", tree="host", bucket_mb=SMALL)),
    (5, CommOptions(sync="local:2", bucket_mb=SMALL)),
    (3, CommOptions(sync="local:2", outer_lr=0.7, outer_momentum=0.9, bucket_mb=LARGE)),
    (4, CommOptions(sync="sma", bucket_mb=LARGE)),
    (7, CommOptions(sync="sma", bucket_mb=SMALL)),
]


def train_oddly(options: CommOptions) -> list[float]:
    """The parameters after four steps, in buckets of odd sizes; with ssgd of seven micro-batches: one worker of
    eight has none.
    """
    kf.init(**options.named(), comm_timeout_s=60.0)
    group = current().group
    if options.tree == "latency":
        kf.peer_latencies()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    opt = kf.FusedSGD(net.parameters(), lr=0.1, momentum=0.9, clip_norm=1.0)
    generator = torch.Generator().manual_seed(0)
    if options.sync != "ssgd":
        data = torch.randn(280, 13, generator=generator), torch.randint(5, (280,), generator=generator)
        kf.fit(net, data, opt, batch_size=7 * group.size, epochs=None, steps=4)
    mine = tuple(range(7 * r // group.size, 7 * (r + 1) // group.size) for r in range(group.size))
    for _ in range(4 if options.sync == "ssgd" else 0):
        x = torch.randn(7, 4, 13, generator=generator)
        opt.begin(StepPlan(28, mine))
        for j in mine[group.rank]:
            with opt.micro_batch(samples=4, last=j == mine[group.rank][-1]):
                net(x[j]).square().mean().backward()
        opt.step()
        opt.zero_grad()
    kf.barrier()
    group.finish()
    parameters: list[float] = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    return parameters


def oddly_over_nccl(log: Path, options: CommOptions) -> list[float]:
    with installed(log, Faults(slow_s={1: 0.002})):
        return train_oddly(options)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    [parameters] = run_workers(1, train_oddly, CommOptions())
    return parameters


@pytest.mark.full
@pytest.mark.parametrize(
    ("workers", "options"),
    MATRIX,
    ids=[f"{n}-{o.sync}-{o.schedule}-{o.tree}-{o.dtype}-{o.state}-{o.bucket_mb:g}" for n, o in MATRIX],
)
def test_every_transport_and_mode_over_nccl(
    tmp_path: Path, alone: list[float], workers: int, options: CommOptions
) -> None:
    """With ssgd as one worker trains; in any mode all workers end with the same model."""
    results = run_workers(workers, oddly_over_nccl, tmp_path, options)
    if options.sync == "ssgd":
        expected = pytest.approx(alone, rel=1e-4 if options.dtype == "fp32" else 2e-2, abs=2e-3)
        assert results[0] == expected
    assert all(each == results[0] for each in results)
    for wrong in ("wrong order", "two threads", "abort", "unhandled error"):
        assert not records(tmp_path, wrong)
    sent = [message.split()[0] for message in assert_one_order(tmp_path)]
    if options.schedule == "reduce_scatter":  # of each bucket, however odd its size, one, and one that shares it
        count = 4 * (6 if options.bucket_mb == SMALL else 1)
        assert sent.count("reducescatter") == count <= sent.count("allgather") <= count + 2 and "reduce" not in sent


def assert_one_order(log: Path) -> list[str]:
    """The messages, which all ranks have enqueued in the same order."""
    (logs,) = messages(log).values()
    assert all(enqueued == logs[0] for enqueued in logs.values())
    return logs[0]


def test_all_to_all_starts_each_share_after_the_next_exchange(tmp_path: Path) -> None:
    options = CommOptions("all_to_all", reproducible=True, bucket_mb=1e-4, check_every=None)
    results = run_workers(3, over_nccl, tmp_path, options, 0.002, 0.0)
    assert results[0] == results[1] == results[2]
    kinds = [message.split()[0] for message in assert_one_order(tmp_path)]
    first = kinds.index("alltoall")
    exchanges = "".join("x" if kind == "alltoall" else "s" for kind in kinds[first:-2])
    assert exchanges.startswith("xx")
    assert "sx" in exchanges and "ssss" not in exchanges, "exchanges go on between shares, of two messages at most"


def pair_with_an_idle_rank(log: Path) -> list[float]:
    """As a GAN's pair: one backward through both. Rank 2 has no micro-batch."""
    with installed(log):
        kf.init(comm_schedule="all_to_all", comm_bucket_mb=1e-4, comm_timeout_s=60.0)
        session = current()
        torch.manual_seed(5)
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        opts = [kf.FusedSGD(net.parameters(), lr=0.1) for net in (first, second)]
        plan = StepPlan(8, (range(0, 1), range(1, 2), range(2, 2)))
        for step in range(3):
            for opt in opts:
                opt.begin(plan)
            if len(plan.ranges[session.group.rank]):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + session.group.rank))
                with opts[1].micro_batch(samples=4), opts[0].micro_batch(samples=4):
                    F.mse_loss(second(torch.tanh(first(x))), x).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        kf.barrier()
        session.group.finish()
        return [float(p.detach().double().sum()) for net in (first, second) for p in net.parameters()]


@pytest.mark.full
def test_a_rank_without_micro_batches_keeps_the_order_of_two_optimizers(tmp_path: Path) -> None:
    results = run_workers(3, pair_with_an_idle_rank, tmp_path)
    assert results[0] == results[1] == results[2]
    assert_one_order(tmp_path)


# -- a late rank --------------------------------------------------------------------------------------------------


def late_in_each_step(log: Path, late_in: int) -> list[str]:
    """Which steps come through; in so many of them rank 1 takes three times comm.timeout_s."""
    groups.GRACE_S = 0.1
    with installed(log):
        kf.init(comm_schedule="all_to_all", comm_timeout_s=0.5)
        rank, net, outcome = current().group.rank, nn.Linear(4, 4), []
        opt = kf.FusedSGD(net.parameters(), lr=0.1)
        for step in range(3):
            if rank == 1 and step < late_in:
                time.sleep(1.5)
            try:
                net(torch.ones(2, 4)).sum().backward()
                opt.step()
                if nccl_double.HOST_IS_STREAM or step == 2:
                    kf.barrier()
                outcome.append("done")
            except CommError as error:
                outcome.append(str(error))
                break
            opt.zero_grad()
        return outcome


@pytest.mark.full
def test_a_rank_may_be_later_in_the_first_steps(tmp_path: Path) -> None:
    *earlier, last = run_workers(2, late_in_each_step, tmp_path, 3)[0]
    assert earlier == ["done", "done"] and "waited" in last, "the second step's sums wait for first updates"


@pytest.mark.full
@on_workers(2)
def test_the_messages_of_first_steps_have_time_also_where_the_host_is_steps_ahead(tmp_path: Path) -> None:
    nccl_double.HOST_IS_STREAM = False
    assert late_in_each_step(tmp_path, 1) == ["done"] * 3


@pytest.mark.full
@on_workers(2)
def test_so_they_have_over_gloo() -> None:
    """With further connections between some of the ranks, which the first sum makes."""
    group = kf.init(comm_schedule="tree", comm_tree="host", comm_timeout_s=1.0).group
    group.hosts = ["a", "b"]
    net = nn.Linear(4, 4)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    if group.rank == 1:
        time.sleep(2.5)
    net(torch.ones(2, 4)).sum().backward()
    opt.step()
