"""Several optimizers in one process train as with torch where one backward reaches the parameters of all."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import relative
from support import Supervised
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.elastic.protocol import Member, View

TINY_BUCKETS = 64 * 4 / 2**20  # MB: every tensor travels alone


def net(width: int, out: int, layers: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, out))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def sgd(kind: Any, nets: list[nn.Module]) -> list[Any]:
    return [kind(each.parameters(), lr=0.1, momentum=0.9) for each in nets]


def one_backward(schedule: str, steps: int) -> float:
    """Encoder and two heads, each with an optimizer; the heads' order differs between ranks. Some steps have two
    micro-batches.
    """
    kf.init(comm_schedule=schedule, comm_bucket_mb=TINY_BUCKETS)
    rank, size = kf.rank(), kf.size()

    def make() -> list[nn.Module]:
        return [net(16, 16, 3, seed=1), net(16, 3, 3, seed=2), net(16, 3, 2, seed=3)]

    ours, theirs = make(), make()
    opts, plain = sgd(kf.FusedSGD, ours), sgd(torch.optim.SGD, theirs)

    def loss(nets: list[nn.Module], x: Tensor, step: int, rank: int) -> Tensor:
        encoded = nets[0](x)
        order = (1, 2) if (step + rank) % 2 else (2, 1)  # backward reaches the later one's parameters first
        out = sum((nets[k](encoded) for k in order), torch.zeros(()))
        if (step + rank) % 3 == 0:
            out = nets[1][-1](encoded) + nets[2](encoded)  # type: ignore[index]
        return F.mse_loss(out, torch.sin(x[:, :3]))

    for step in range(steps):
        x = batch(step, rank)
        if step % 2:
            loss(ours, x, step, rank).backward()
        else:
            for part, last in ((slice(0, 3), False), (slice(3, 8), True)):
                with ExitStack() as contexts:
                    for opt in opts:
                        contexts.enter_context(opt.micro_batch(samples=part.stop - part.start, last=last))
                    loss(ours, x[part], step, rank).backward()
        total = torch.stack([loss(theirs, batch(step, r), step, r) for r in range(size)]).mean()
        total.backward()
        for opt in (*opts, *plain):
            opt.step()
        for opt in (*opts, *plain):
            opt.zero_grad()
    return max(relative(a.parameters(), b.parameters()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("schedule", "workers"), [("tree", 2), ("all_to_all", 3)])
def test_several_optimizers_train_as_their_torch_twins(schedule: str, workers: int) -> None:
    """Where one backward reaches the parameters of all. A GAN: test_scripts."""
    for error in run_workers(workers, one_backward, schedule, 6):
        assert error <= 1e-4


def lanes() -> list[int]:
    """A notebook's cell that is run again, a rebuild, and a model of its own. Then ranks need unequal numbers."""
    group = kf.init().group
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    first, again, other = (kf.FusedSGD(net.parameters()) for net in (a, a, b))
    found = [first.engine.lane, again.engine.lane, other.engine.lane]
    other.rebuild()
    again.rebuild()
    found += [other.engine.lane, again.engine.lane, len(group._further)]
    group.connect_lanes(1 + group.rank)
    group.barrier()  # a rank that has all its connections must not end while another still makes its own
    return [*found, len(group._further)]


def test_each_optimizer_in_use_has_connections_of_its_own() -> None:
    for found in run_workers(3, lanes):
        assert found == [0, 0, 1, 1, 0, 1, 2], "as many as any rank needs"


def test_a_second_optimizer_is_refused_where_workers_may_join() -> None:
    """Its state would not go along to a worker that joins."""
    session._current = joined = session.Session(Group(), CommOptions(), Supervised())  # type: ignore[arg-type]
    joined.view = View(1, (Member(0, os.getpid(), "host"),), ("127.0.0.1", 1), "start")
    model, other = nn.Linear(16, 3), nn.Linear(16, 3)
    opt, second = kf.FusedSGD(model.parameters(), lr=0.1), kf.FusedSGD(other.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"of several optimizers give kf\.DataLoader a list"):
        for step in kf.DataLoader((batch(0, 0), torch.zeros(8, 3)), model, opt, batch_size=4):
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            opt.step()
            other(batch(0, 0)).sum().backward()
            second.step()


def late() -> None:
    """One worker starts, and makes its second optimizer, later than the others wait for it in a step."""
    rank = int(os.environ["RANK"])
    time.sleep(3.0 * rank)
    kf.init(comm_timeout_s=1)
    for _ in range(2):
        time.sleep(3.0 * rank)
        model = nn.Linear(3, 1)
        opt = kf.FusedSGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            opt.step()
            opt.zero_grad()


@pytest.mark.full
def test_workers_may_start_and_make_a_further_optimizer_at_different_times() -> None:
    run_workers(2, late)
