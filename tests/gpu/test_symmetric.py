"""comm.schedule=symmetric over doubles of NCCL and of symmetric memory, between real processes: no GPU has run it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import sharded as s
import symmetric_double
from distributed import WorkersFailed, run_workers

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.comm.transports import symmetric
from kfuse.session import current

PARTS, STEPS = 7, 5


def train(schedule: str, state: str, late: int | None = None) -> dict[str, Any]:
    """Parameters, optimizer state and norm after some planned steps. late: the rank that is late in each of them."""
    symmetric_double.install()
    s.init(state, schedule=schedule, reproducible=True)
    model = s.net()
    opt = s.optimizer("adamw", model, clip_norm=0.5)
    for step in range(STEPS):
        if late == current().group.rank:
            time.sleep(0.02)
        s.planned_step(opt, model, step, PARTS + step % 2, aligned=False)
    found = {"params": s.values(model), "state": s.tensors(opt.state_dict()), "norm": opt.stats.grad_norm}
    kf.barrier()
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return s.same(a["params"], b["params"]) and s.same(a["state"], b["state"]) and a["norm"] == b["norm"]


@pytest.mark.parametrize(("workers", "state"), [(2, "sharded"), pytest.param(3, "replicated", marks=pytest.mark.full)])
def test_the_same_bits_as_all_to_all(workers: int, state: str) -> None:
    """In reproducible mode, with a number of micro-batches for which a worker exchanges several slots, and another from
    step to step. One rank is late, so that the others' memory is read long after they have packed.
    """
    expected = run_workers(1, train, "all_to_all", "replicated")[0]
    for late in (0, workers - 1):
        for found in run_workers(workers, train, "symmetric", state, late):
            assert same(found, expected)


def without_the_barrier() -> dict[str, Any]:
    symmetric.SymmetricMemory.barrier = lambda self: None  # type: ignore[method-assign]
    return train("symmetric", "sharded", 0)


def test_without_the_barrier_the_bits_differ() -> None:
    """Negative: rank 0 is late, and rank 1 reads what it has not packed yet."""
    expected = run_workers(1, train, "all_to_all", "replicated")[0]
    assert not same(run_workers(2, without_the_barrier)[1], expected)


def loses_rank_1() -> None:
    symmetric_double.install()
    s.reset()
    group = kf.init(comm_schedule="symmetric", comm_state="sharded", comm_bucket_mb=s.BUCKET_MB).group
    symmetric.GRACE_S = 6.0  # kernels end after 8 s, long after the host has noticed
    model = s.net()
    opt = s.optimizer("adamw", model)
    try:
        for step in range(4):
            if group.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 3:
                group.timeout_s = 2.0  # the first steps, as processes come up, may take longer
            begun = time.monotonic()
            s.loss_of(model, step, group.rank).backward()
            opt.step()
            opt.zero_grad()
            kf.barrier()
    except CommError as error:
        raise AssertionError(f"after {time.monotonic() - begun:.1f} s: {error}") from error


@pytest.mark.full
def test_a_lost_worker_is_noticed_within_the_timeout() -> None:
    """The error says what was waited for, for how long, and for whom."""
    with pytest.raises(WorkersFailed) as failed:
        run_workers(2, loses_rank_1)
    said = str(failed.value)
    assert "step 3, bucket" in said and "(symmetric, packed by all): waited 2." in said and "for rank 1" in said, said
    seconds = float(said.rpartition("after ")[2].partition(" s")[0])
    assert 2.0 <= seconds < 40.0  # it asks for some seconds which ranks are silent


def refused(case: str) -> str:
    rank = int(os.environ["RANK"])
    changes: dict[str, Any] = {"cpu": {"number": None}, "no link": {"reads": lambda number: rank != 0}}.get(case, {})
    symmetric_double.install(**changes)
    group = s.init("replicated", schedule="symmetric").group
    group.hosts, group.fixed = (["a", "b"] if case == "hosts" else group.hosts), case != "elastic"
    with pytest.raises(ValueError) as told:
        s.optimizer("adamw", s.net())
    return str(told.value)


@pytest.mark.full
def test_where_it_cannot_be_it_is_refused_on_every_worker() -> None:
    for case, said in {
        "cpu": "parameters lie on the CPU",
        "no link": "cuda:0 (rank 0) cannot read the memory of cuda:1 (rank 1)",
        "hosts": "the workers are on 2 hosts",
        "elastic": "the number of workers may change",
    }.items():
        for found in run_workers(2, refused, case):
            assert found.startswith(f"comm.schedule='symmetric': {said}"), found
