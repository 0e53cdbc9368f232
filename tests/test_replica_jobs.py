"""kfuse-run --ranks: a worker of several processes, over which FSDP2 has sharded the model, is one elastic worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import replica_loop
import torch
from distributed import run_workers
from elastic_job import Job, assert_exact, assert_none_left, run_script, until
from limits import limits
from torch import Tensor

from kfuse.elastic.protocol import ENV_WORKER
from kfuse.elastic.supervisor import Supervisor

pytestmark = pytest.mark.jobs


def run(folder: Path, workers: int, ranks: int = 2, most: int | None = None, **given: Any) -> Job:
    """A job of the script. given: what it reads; `during`: see `run_job`; `elastic`: settings of that section."""
    during, elastic = given.pop("during", None), given.pop("elastic", {})
    folder.mkdir(parents=True, exist_ok=True)
    bounds = limits(workers, 1, most or workers, script=True, **elastic)
    words = replica_loop.__file__, str(folder), json.dumps(given)
    job = run_script(folder / "run", bounds, *words, ranks=ranks, during=during)
    assert_none_left([process.pid for process in job.processes if process.pid is not None])
    return job


def parameters(folder: Path, worker: int, rank: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / f"of-{worker}-{rank}.pt", weights_only=True)
    return found


def assert_as_undisturbed(job: Job, reference: Job) -> None:
    assert job.error is None, job.told()
    assert_exact(job)
    assert job.ledger == reference.ledger
    assert job.summary["params_sha256"] == reference.summary["params_sha256"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One replica of two ranks, to which nothing happens."""
    return run(tmp_path_factory.mktemp("reference"), workers=1)


def test_losses_of_any_rank_change_no_bit_and_no_sample(reference: Job, tmp_path: Path) -> None:
    """In a step and in a micro-batch; of the leader's rank 0 too. Buffers that forward changes are the same on all."""
    events = [[1, 1, 10, "SIGKILL"], [0, 0, 20.5, "SIGKILL"], [2, 1, 30, "SIGUSR2"], [3, 0, 40, "SIGTERM"]]
    job = run(tmp_path, workers=2, events=events, sleep=0.05)
    assert_as_undisturbed(job, reference)
    assert [event["how"].split(":")[0] for event in job.of_kind("failure")] == [
        "rank 1 was ended by SIGKILL",
        "was ended by SIGKILL",
        "rank 1 ended with exit status 1",
    ]
    assert [event["worker"] for event in job.of_kind("notice")] == [3]
    means = [parameters(tmp_path, worker, rank)["average.mean"] for worker in (4, 5) for rank in (0, 1)]
    assert all(torch.equal(mean, means[0]) for mean in means) and means[0].any()


@pytest.mark.full
@pytest.mark.parametrize("kind, bf16, bound", [("AdamW", False, 1e-6), ("AdamW", True, 4e-3), ("Muon", False, 5e-3)])
def test_it_trains_as_fsdp2_does_alone(kind: str, bf16: bool, bound: float, tmp_path: Path) -> None:
    """Fifty steps with clipping and dropout on two replicas. bound: over the largest element; Muon rounds to bf16."""
    given = {"optimizer": kind, "bf16": bf16}
    job = run(tmp_path, workers=2, loader={"epochs": None, "steps": 50}, **given)
    assert job.error is None, job.told()
    for rank, expected in enumerate(run_workers(2, replica_loop.plain, given, 50)):
        found = parameters(tmp_path, 0, rank)
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
        for name, value in expected.items():
            if value.numel() and name != "average.mean":
                assert (found[name] - value).abs().max() <= bound * value.abs().max(), name


@pytest.mark.full
def test_three_replicas_and_planned_changes(reference: Job, tmp_path: Path) -> None:
    job = run(tmp_path, workers=3, resizes={"10": 1, "25": 2}, sleep=0.05)
    assert_as_undisturbed(job, reference)
    assert [len(view["workers"]) for view in job.views] == [3, 1, 2]


@pytest.mark.full
def test_replicas_of_three_ranks(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", workers=1, ranks=3)
    job = run(tmp_path / "two", workers=2, ranks=3, events=[[1, 2, 12.5, "SIGKILL"], [0, 1, 30, "SIGKILL"]], sleep=0.05)
    assert_as_undisturbed(job, alone)
    assert alone.of_kind("failure") == [] and len(job.of_kind("failure")) == 2


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed(rank: int, reference: Job, tmp_path: Path) -> None:
    job = run(tmp_path, workers=2, events=[[1, rank, 10, "SIGSTOP"]], sleep=0.05)
    assert_as_undisturbed(job, reference)
    [failure] = job.of_kind("failure")
    assert failure["how"] == f"rank {rank} was stopped by a signal and was killed"


@pytest.mark.full
def test_a_signal_of_notice_may_come_to_any_rank(reference: Job, tmp_path: Path) -> None:
    async def notify(supervisor: Supervisor, job: Job) -> None:
        await until("step 10", lambda: len(job.metrics) > 10)
        [other] = [each for each in job.processes if (each.env[ENV_WORKER], each.env["RANK"]) == ("1", "1")]
        assert other.pid is not None
        os.kill(other.pid, signal.SIGTERM)

    job = run(tmp_path, workers=2, during=notify, sleep=0.05)
    assert_as_undisturbed(job, reference)
    assert [event["worker"] for event in job.of_kind("notice")] == [1] and not job.of_kind("failure")


@pytest.mark.full
def test_checkpoints_are_for_any_number_of_ranks(tmp_path: Path) -> None:
    """Stopped after 30 steps, it is resumed by workers of as many ranks with the same bits; by others, and by one
    process that shards nothing, with other roundings.
    """
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every_steps": 10}
    reference = run(tmp_path / "reference", workers=1, dropout=0.0)
    first = run(tmp_path / "first", workers=2, loader={**kept, "epochs": None, "steps": 30}, dropout=0.0)
    assert first.error is None, first.told()
    expected = parameters(tmp_path / "first", 0, 0)["first.weight"]
    whole = torch.load(tmp_path / "kept" / "model.pt", weights_only=True)
    assert torch.equal(whole["first.weight"][: len(expected)], expected)
    assert whole.keys() == replica_loop.Network().state_dict().keys()
    found = []
    for ranks, workers in ((2, 1), (3, 2)):
        shutil.copytree(tmp_path / "kept", tmp_path / f"kept {ranks}")
        loader = {**kept, "checkpoint_dir": str(tmp_path / f"kept {ranks}"), "checkpoint_resume": "auto"}
        job = run(tmp_path / f"again {ranks}", workers=workers, ranks=ranks, loader=loader, dropout=0.0)
        assert job.error is None and [event["step"] for event in job.of_kind("resumed")] == [30], job.told()
        found.append(torch.load(tmp_path / f"kept {ranks}" / "model.pt", weights_only=True))
        if ranks == 2:
            assert job.summary["params_sha256"] == reference.summary["params_sha256"]
    found += run_workers(1, replica_loop.whole, str(tmp_path / "kept"))
    for other in found[1:]:
        for name in found[0].keys() - {"average.mean"}:
            assert torch.allclose(found[0][name], other[name], rtol=0, atol=1e-5), name


REFUSED = {
    "Adagrad": ("opt = kf.Optimizer(torch.optim.Adagrad(model.parameters()))", "one of torch's SGD, Adam, AdamW"),
    "fused": ("opt = kf.FusedAdamW(model.parameters())", "FusedAdamW in a worker of 2 ranks: must be kf.Optimizer"),
    "whole": ("opt = kf.Optimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))", "is not sharded"),
    "sync": ("kf.init(comm_sync='local:4')", "must be ssgd with --ranks 2"),
    "collective": ("kf.rank(); kf.barrier()", "use those of torch.distributed, within a worker"),
    "early": ("import torch; torch.distributed.destroy_process_group(); kf.init()", "init_process_group"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", REFUSED)
def test_it_says_what_is_refused(what: str, tmp_path: Path) -> None:
    text, said = REFUSED[what]
    start = "import sys, replica_loop, torch, kfuse as kf\nmodel, _ = replica_loop.make({})\n"
    (tmp_path / "script.py").write_text(start + text)
    job = run_script(tmp_path / "run", limits(1, 1, 1, script=True), str(tmp_path / "script.py"), ranks=2)
    assert job.error is not None and any(said in line for line in job.lines), job.told()
