"""Trainings of bf16 parameters: several workers, checkpoints, lost workers, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import assert_same_training, chaos, run_job, undisturbed_job, words
from problems import network, problem
from torch import Tensor, nn

import kfuse as kf
from kfuse.checkpoint.manager import load_weights, read_weights
from kfuse.comm.step import StepPlan
from kfuse.models import MLP
from kfuse.train.evaluation import params_sha256

BF16 = torch.bfloat16


def masters(net: nn.Module, opt: Any) -> list[Tensor]:
    return [opt.state[p]["master"] for p in net.parameters()]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def fitted(folder: Path | None = None, steps: int = 9, resume: str = "never") -> str:
    torch.set_num_threads(1)
    kf.init(comm_reproducible=True, comm_bucket_mb=0.0005, comm_check_every=1)
    net = nn.Sequential(network(), nn.Unflatten(1, (3, 1)), nn.BatchNorm1d(3), nn.Flatten(), nn.Dropout(0.1)).to(BF16)
    more: dict[str, Any] = {"train_steps": steps, "train_epochs": 99, "train_clip_norm": 0.1}
    if folder is not None:
        more |= {"checkpoint_dir": folder, "checkpoint_every_steps": 4, "checkpoint_resume": resume}
    opt = kf.FusedAdamW(net.parameters(), lr=1e-2)
    summary = kf.fit(net, problem(), opt, batch_size=16, batch_micro=2, train_precision="bf16-true", **more)
    assert summary is not None and summary["params_sha256"] == params_sha256(net)
    return str(summary["params_sha256"])


def resumed(folder: Path) -> str:
    fitted(folder, steps=4)
    return fitted(folder, resume="auto")


def test_a_checkpoint_resumes_bit_by_bit_on_another_number_of_workers(tmp_path: Path) -> None:
    assert run_workers(2, resumed, tmp_path) == run_workers(1, fitted) * 2


# -- what workers share -----------------------------------------------------------------------------------------------


def started_apart_and_compared() -> tuple[list[list[float]], str]:
    """Parameters and masters after a step from models that differ; the error after rank 1 changes a bit."""
    kf.init(comm_check_every=1)
    with pytest.raises(ValueError, match=r"rank 1 has another model than rank 0: .* in type"):
        kf.FusedAdamW(network().to(BF16 if kf.rank() else torch.float32).parameters())
    net = network().bfloat16()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(kf.rank())
    opt = kf.FusedAdamW(net.parameters(), lr=1e-2)
    x, y = (tensor[8 * kf.rank() :][:8] for tensor in problem())
    values: list[list[float]] = []
    try:
        for step in range(4):
            if step == 2 and kf.rank():
                net[2].weight.data.view(torch.int16)[1, 3] ^= 1
            F.cross_entropy(net(x.to(BF16)).float(), y).backward()
            opt.step()
            opt.zero_grad()
            values = values or [value.flatten().tolist() for value in (*net.parameters(), *masters(net, opt))]
    except kf.ConsistencyError as error:
        return values, str(error)
    return values, ""


def test_workers_start_from_rank_0s_masters_and_a_single_bit_that_differs_is_found() -> None:
    (one, said), (other, also) = run_workers(2, started_apart_and_compared)
    assert one == other and said == also
    assert said.startswith("step 2: the workers no longer have the same model: parameter 2 (ranks 1")


def averaged(every: int) -> list[list[list[float]]]:
    """Masters before and after the workers' models are averaged."""
    kf.init()
    net = network().bfloat16()
    opt = kf.FusedAdamW(net.parameters(), lr=1e-4)
    x, y = problem()
    for step in range(every):
        opt.begin(StepPlan(16, (range(1), range(1, 2)), local=8))
        with opt.micro_batch(samples=8):
            part = slice(16 * step + 8 * kf.rank(), 16 * step + 8 * kf.rank() + 8)
            F.cross_entropy(net(x[part].to(BF16)).float(), y[part]).backward()
        opt.step()
        opt.zero_grad()
    if kf.rank():
        with torch.no_grad():
            net[0].bias[3] = 0.5  # a change of the user's counts too
    before = [m.clone() for m in masters(net, opt)]
    opt.updates.average_models()
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(net.parameters(), masters(net, opt), strict=True))
    return [[value.flatten().tolist() for value in values] for values in (before, masters(net, opt))]


def test_local_sgd_averages_the_masters() -> None:
    """Averages of rounded parameters would undo what the masters have gathered below bf16's spacing."""
    (mine, one), (theirs, other) = run_workers(2, averaged, 3)
    theirs[1][3] = 0.5
    assert one == other
    for a, b, mean in zip(mine, theirs, one, strict=True):
        assert mean == ((torch.tensor(a) + torch.tensor(b)) / 2).tolist()
    assert mine != theirs


# -- the command line -------------------------------------------------------------------------------------------------

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 workers.max=4 model=mlp data=digits",
    "model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=2 train.eval_every=20",
    "train.precision=bf16-true",
)


@pytest.mark.full
def test_workers_that_join_or_take_over_have_the_masters(tmp_path: Path) -> None:
    """Growth, a worker that is killed in mid-reduction, and shrinkage: bit by bit the undisturbed training."""
    phases = [{"step": s, "workers": n} for s, n in ((5, 3), (60, 2))]
    # With the worker in the place of the lost one: else two are there as two are asked for, and it comes after that.
    gates = [{"step": 20, "workers": 3}, {"step": 50, "workers": 3}, {"step": 75, "workers": 2}]
    events = [{"step": 40, "moment": "mid_reduction", "rank": 0, "how": "kill"}]
    job = run_job(tmp_path / "run", [*TRAINING, *chaos(tmp_path, phases=phases, gates=gates, events=events)])
    assert_same_training(job, undisturbed_job(tmp_path / "alone", TRAINING))
    assert {len(view["workers"]) for view in job.views} >= {1, 2, 3} and job.of_kind("failure")


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "torch"])
def test_the_saved_model_is_bf16_and_loads(optimizer: str, tmp_path: Path) -> None:
    settings = f"model=mlp data=digits train.steps=30 policy=none optimizer={optimizer} train.precision=bf16-true"
    job = run_job(tmp_path / "run", words(settings))
    assert job.error is None, job.told()
    summary = job.summary
    for file in [summary[key] for key in ("model", "model_safetensors") if key in summary]:
        assert {value.dtype for value in read_weights(file).values()} == {BF16}
        net = MLP((64,), 10).to(BF16)
        load_weights(net, file)
        assert params_sha256(net) == summary["params_sha256"]
