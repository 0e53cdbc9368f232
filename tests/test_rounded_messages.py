"""Messages of bf16 and int8: all_to_all and reduce_scatter add up in fp32 and measure that sum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_workers
from elastic_job import chaos, run_job, words
from problems import Bag
from test_kernels_wire import message
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


def one_step(name: str, dtype: str) -> list[dict[str, Any]]:
    """What a step of SGD with lr = 1 leaves, each of WAYS: the parameters are the mean gradient that was applied."""
    session = kf.init()
    return [_one_step(session, name, dtype, *way) for way in WAYS]


def _one_step(session: Session, name: str, dtype: str, state: str, bucket_mb: float, planned: bool) -> dict[str, Any]:
    session.comm = CommOptions(schedule=name, dtype=dtype, state=state, bucket_mb=bucket_mb)
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
    transport = opt.engine.transport_name, opt.statistics.wire
    if state == "replicated" and dtype == "bf16":
        opt.engine.use_transport("allreduce", None)
        assert opt.engine.wire == "bf16 sums", "the library's"
    opt.engine.close()
    flat = torch.cat([p.detach().reshape(-1) for p in bag.tensors])
    found = {"norm": opt.stats.grad_norm, "variance": opt.stats.grad_variance}
    return {"mean": flat.numpy(), "transport": transport, **found}


def as_sent(flat: Tensor, dtype: str) -> Tensor:
    """The parameters' gradients as they travel. int8: each parameter's groups of 64 by their largest magnitude."""
    if dtype == "bf16":
        return flat.bfloat16().float()
    parts = flat.split([math.prod(shape) for shape in SHAPES])
    return torch.cat([torch.from_numpy(message(part.numpy())[1]) for part in parts])


def exact_mean(size: int, planned: bool, dtype: str) -> tuple[Tensor, float]:
    """The contributions as they travel, added up in fp32 in rank order; and what rounding has added to their squares,
    where that is taken off.

    A plan says the weights before: they travel weighted. Without one sums are divided at the end.
    """
    total, added = torch.zeros(()), 0.0
    for rank in range(size):
        flat = torch.cat([g.reshape(-1) for g in gradients(rank)]) * (torch.tensor(1 / size) if planned else 1.0)
        sent = as_sent(flat, dtype)
        total = total + sent if rank else sent
        added += float(sent.double().square().sum() - flat.double().square().sum()) if dtype == "int8" else 0.0
    return total, added


@pytest.mark.parametrize(("name", "workers"), [("all_to_all", 3), ("auto", 2)])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_contributions_are_added_in_fp32(name: str, workers: int, dtype: str) -> None:
    """Sharded: the fp32 sum itself is applied. Replicated: that sum, rounded once to travel to the others."""
    results = run_workers(workers, one_step, name, dtype)
    for k, (state, _, planned) in enumerate(WAYS):
        total, added = exact_mean(workers, planned, dtype)
        share = torch.tensor(1.0) if planned else (1 / torch.tensor(float(workers), dtype=torch.float64)).float()
        expected = total * share if state == "sharded" else as_sent(total, dtype) * share
        applied = float(total.double().square().sum()) * float(share) ** 2
        squares = sum(float(g.double().square().sum()) for rank in range(workers) for g in gradients(rank))
        variance = (squares - workers * (applied - added * float(share) ** 2)) / (workers - 1)
        for of_rank in results:
            assert np.array_equal(of_rank[k]["mean"], expected.numpy()), WAYS[k]
            assert of_rank[k]["norm"] == pytest.approx(math.sqrt(applied), rel=1e-5), WAYS[k]
            assert of_rank[k]["variance"] == pytest.approx(variance, rel=1e-5), WAYS[k]
            assert of_rank[k]["transport"] == ("all_to_all", dtype), "sums are formed in fp32"


@pytest.mark.full
@pytest.mark.parametrize("state", STATES)
def test_workers_are_lost_while_messages_of_eight_bits_are_under_way(tmp_path: Path, state: str) -> None:
    lost = [
        {"step": step, "moment": moment, "rank": rank, "how": "kill", "workers": 3}
        for rank, (step, moment) in enumerate([(12, "mid_reduction"), (30, "between_reduction_and_update")])
    ]
    training = words(
        f"comm.dtype=int8 comm.state={state} comm.bucket_mb=0.002 lr.base=0.003 workers.count=3 workers.max=3",
        "model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4 batch.max=64 train.epochs=2",
    )
    job = run_job(tmp_path / "run", [*training, *chaos(tmp_path, events=lost)])
    assert len(job.of_kind("failure")) == 2 and job.summary["heldout_accuracy"] > 0.7


def uneven_steps() -> tuple[list[float | None], list[float]]:
    """Gradient norms and parameters: of a step with an infinite gradient, one of both workers, one of rank 0 alone."""
    session = kf.init()
    session.comm = CommOptions(dtype="int8")
    bag = Bag([(100,)])  # which leaves room in its last group
    opt = kf.FusedSGD(bag.parameters(), lr=1.0, maximize=True)
    norms: list[float | None] = []
    for step, ranges in enumerate([(range(1), range(1, 2))] * 2 + [(range(1), range(1, 1))]):
        opt.begin(StepPlan(ranges[1].stop, ranges))
        for _ in ranges[kf.rank()]:
            gradient = torch.full((100,), 1.0 + kf.rank())
            gradient[-1] *= math.inf if step == kf.rank() == 0 else 1.0
            with opt.micro_batch(samples=1, last=True):
                bag.backward([gradient])
        opt.step()
        opt.zero_grad()
        stats = opt.statistics.wait()
        assert stats is not None
        norms.append(stats.grad_norm)
    return norms, bag.tensors[0].tolist()


def test_a_gradient_that_is_not_finite_and_a_worker_without_one_leave_nothing_behind() -> None:
    for norms, parameters in run_workers(2, uneven_steps):
        assert norms[0] is None and norms[1:] == pytest.approx([15.0, 10.0])
        assert parameters == pytest.approx([2.5] * 100)
