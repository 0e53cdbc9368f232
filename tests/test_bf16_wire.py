"""bf16 messages: all_to_all and reduce_scatter add up in fp32 and measure that sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_workers
from problems import Bag
from torch import Tensor

import kfuse as kf
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan
from kfuse.kernels import BLOCK
from kfuse.membership import Session

STATES = ["replicated", "sharded"]
SHAPES = [(BLOCK,), (3, 700), (2 * BLOCK + 65,), (1,), (9,)]
"""With small buckets: several blocks, a ragged one, and shards that are empty."""


def gradients(rank: int) -> list[Tensor]:
    """A worker's, of magnitudes far apart: in bf16 every addition would round."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * 2.0 ** (-3 * rank) for shape in SHAPES]


WAYS = [(state, bucket_mb, planned) for state in STATES for bucket_mb in (0.02, 25.0) for planned in (True, False)]


def one_step(name: str) -> list[dict[str, Any]]:
    """What a step of SGD with lr = 1 leaves, each of WAYS: the parameters are the mean gradient that was applied."""
    session = kf.init()
    return [_one_step(session, name, *way) for way in WAYS]


def _one_step(session: Session, name: str, state: str, bucket_mb: float, planned: bool) -> dict[str, Any]:
    session.comm = CommOptions(schedule=name, dtype="bf16", state=state, bucket_mb=bucket_mb)
    bag, size = Bag(SHAPES), kf.size()
    opt = kf.FusedSGD(bag.parameters(), lr=1.0, maximize=True)
    for _ in range(2):  # the second time all buffers are used again
        for p in bag.tensors:
            p.data.zero_()
        if planned:
            opt.begin(StepPlan(size, tuple(range(r, r + 1) for r in range(size))))
        with opt.micro_batch(samples=1, last=True):
            bag.backward(gradients(kf.rank()))
        opt.step()
        opt.zero_grad()
    assert opt.stats is not None
    transport = opt.engine.transport_name, opt.statistics.bf16_sums
    if state == "replicated":
        opt.engine.use_transport("allreduce", None)
        assert opt.engine.bf16_sums, "the library's"
    opt.engine.close()
    flat = torch.cat([p.detach().reshape(-1) for p in bag.tensors])
    return {"mean": flat.numpy(), "norm": opt.stats.grad_norm, "transport": transport}


def exact_mean(size: int, planned: bool) -> Tensor:
    """The contributions as they travel, added up in fp32 in rank order.

    A plan says the weights before: they travel weighted. Without one sums are divided at the end.
    """
    total: Tensor | None = None
    for rank in range(size):
        flat = torch.cat([g.reshape(-1) for g in gradients(rank)]) * (torch.tensor(1 / size) if planned else 1.0)
        sent = flat.bfloat16().float()
        total = sent if total is None else total + sent
    assert total is not None
    return total


@pytest.mark.parametrize(("name", "workers"), [("all_to_all", 3), ("auto", 2)])
def test_contributions_are_added_in_fp32(name: str, workers: int) -> None:
    """Sharded: the fp32 sum itself is applied. Replicated: that sum, rounded once to travel to the others."""
    results = run_workers(workers, one_step, name)
    for k, (state, _, planned) in enumerate(WAYS):
        total = exact_mean(workers, planned)
        share = torch.tensor(1.0) if planned else (1 / torch.tensor(float(workers), dtype=torch.float64)).float()
        expected = total * share if state == "sharded" else total.bfloat16().float() * share
        norm = math.sqrt(float((total.double() * float(share)).square().sum()))
        for of_rank in results:
            assert np.array_equal(of_rank[k]["mean"], expected.numpy()), WAYS[k]
            assert of_rank[k]["norm"] == pytest.approx(norm, rel=1e-5), WAYS[k]
            assert of_rank[k]["transport"] == ("all_to_all", False), "sums are formed in fp32"
