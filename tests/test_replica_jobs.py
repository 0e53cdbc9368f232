"""kfuse-run --ranks: a worker of several processes, over which FSDP2 has sharded the model, is one elastic worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import replica_loop
import torch
from distributed import run_workers
from elastic_job import (
    DEADLINE_S,
    Job,
    assert_exact,
    assert_none_left,
    environment,
    parent,
    run_script,
    until,
    wait_until,
)
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
    events = [[1, 1, 10, "SIGKILL"], [0, 0, 20.5, "SIGKILL"], [2, 1, 30, "SIGUSR2"]]
    job = run(tmp_path, workers=2, events=events, waits=[12, 22, 32])
    assert_as_undisturbed(job, reference)
    assert [event["how"].split(":")[0] for event in job.of_kind("failure")] == [
        "rank 1 was ended by SIGKILL",
        "was ended by SIGKILL",
        "rank 1 ended with exit status 1",
    ]
    means = [parameters(tmp_path, worker, rank)["average.mean"] for worker in (3, 4) for rank in (0, 1)]
    assert all(torch.equal(mean, means[0]) for mean in means) and means[0].any()


def test_gradients_figures_and_buffers_are_those_of_one_process(tmp_path: Path) -> None:
    """An epoch with SGD and without clipping, in which a factor on the gradients would count."""
    given = {"dropout": 0.0, "optimizer": "SGD", "lr": 0.1, "clip_norm": None}
    job = run(tmp_path, workers=2, loader={"epochs": 1}, **given)
    assert job.error is None, job.told()
    [(expected, figures)] = run_workers(1, replica_loop.alone, given)
    for rank in range(2):
        found = parameters(tmp_path, 0, rank)
        for name, whole in expected.items():
            part = whole if whole.shape == found[name].shape else [*whole.chunk(2), whole[:0]][rank]
            assert torch.allclose(found[name], part, rtol=1e-6, atol=1e-6), name
    for record, (loss, norm, variance) in zip(job.metrics, figures, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-5) and record["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert (record["grad_variance"] or 0.0) == pytest.approx(variance, rel=1e-4)


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
    job = run(tmp_path, workers=3, resizes={"10": 1, "20": 2}, waits=[30])
    assert_as_undisturbed(job, reference)
    assert [len(view["workers"]) for view in job.views] == [3, 1, 2]


@pytest.mark.full
def test_replicas_of_three_ranks(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", workers=1, ranks=3)
    job = run(tmp_path / "two", workers=2, ranks=3, events=[[1, 2, 12.5, "SIGKILL"], [0, 1, 30, "SIGKILL"]], waits=[14])
    assert_as_undisturbed(job, alone)
    assert alone.of_kind("failure") == [] and len(job.of_kind("failure")) == 2


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed(rank: int, reference: Job, tmp_path: Path) -> None:
    job = run(tmp_path, workers=2, events=[[1, rank, 10, "SIGSTOP"]])
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


OTHER_RATES = """
kf.init(comm_check_every=1)
opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1 + torch.distributed.get_rank()))
for step in kf.DataLoader(model, replica_loop.data(), opt, batch_size=30, steps=3):
    for inputs, targets in step:
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
    opt.step()
"""
REFUSED = {
    "rates": (OTHER_RATES, "the ranks of a worker have other options of the optimizer"),
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


LATE = """
import sys, time, replica_loop, torch.distributed as dist
from pathlib import Path
replica_loop.main(Path(sys.argv[1]), {"loader": {"epochs": 1}})
print("done by", dist.get_rank(), flush=True)
time.sleep(9.0 * (dist.get_rank() == int(sys.argv[2])))
"""


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_work_on_after_the_loop(late: int, tmp_path: Path) -> None:
    """By the real command, for longer than heartbeats may be late; each rank has a file of what it prints."""
    (tmp_path / "script.py").write_text(LATE)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--run-dir", "run", "--log-dir", "logs", "--ranks", "2"]
    command += ["--elastic-heartbeat-timeout-s", "5", "script.py", ".", str(late)]
    env = {**os.environ, **environment(), "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"done by 0", "rank 1: done by 1"} <= {*done.stdout.splitlines()}
    logs = [(tmp_path / "logs" / name).read_text() for name in ("worker-0.log", "worker-0-rank-1.log")]
    assert logs == ["done by 0\n", "done by 1\n"]


@pytest.mark.full
def test_a_lost_supervisor_leaves_a_whole_checkpoint(reference: Job, tmp_path: Path) -> None:
    """And no process. The next command goes on from it, with the same bits."""
    given = {"loader": {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every_steps": 1000}, "sleep": 0.05}
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "2", "--ranks", "2", "--run-dir"]
    script = [replica_loop.__file__, str(tmp_path), json.dumps(given)]
    env = {**os.environ, **environment()}
    first = Job(tmp_path / "run")
    with subprocess.Popen([*command, "run", *script], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as process:
        wait_until("step 10", lambda: len(first.metrics) > 10)
        children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == process.pid]
        process.kill()
    assert len(children) == 4
    assert_none_left(children)
    subprocess.run([*command, "run", *script], cwd=tmp_path, env=env, check=True, timeout=DEADLINE_S)
    assert [event["step"] > 10 for event in first.of_kind("resumed")] == [True]
    assert first.summary["params_sha256"] == reference.summary["params_sha256"]


def _parent(pid: int) -> int:
    try:
        return parent(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0
