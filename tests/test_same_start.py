"""All workers start from rank 0's model, and a difference that arises later ends the job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import WorkersFailed, on_workers, run_workers
from elastic_job import run_job, words
from problems import all_equal, problem, update
from torch import Tensor, nn

import kfuse as kf
from kfuse.optim.base import latest_optimizer
from kfuse.session import current


def network(rank: int) -> nn.Sequential:
    """Another one on each rank, as in a script that sets no seed; with a frozen layer and buffers."""
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    net[2].requires_grad_(False)
    net[1].running_mean.normal_()
    return net


def start_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def fitted() -> tuple[dict[str, Tensor], str]:
    kf.init()
    net = network(kf.rank())
    opt = kf.Optimizer(torch.optim.SGD(net.parameters(), 0.1))
    summary = kf.fit(net, problem(), opt, batch_size=16, micro_batch=4)
    assert summary is not None
    return start_of(net), summary["params_sha256"]


def test_fit_starts_from_rank_0s_model() -> None:
    """The same parameters, frozen ones and buffers too, as of rank 0's model trained alone (but for rounding)."""
    (alone, _), *_ = run_workers(1, fitted)
    results = run_workers(2, fitted)
    for state, sha in results:
        assert sha == results[0][1]
        for name, value in state.items():
            assert torch.equal(value, results[0][0][name]), name
            assert torch.allclose(value.double(), alone[name].double(), rtol=1e-4, atol=1e-5), name


def fit_another(what: str) -> None:
    """kf.fit, which on rank 1 is another one."""
    kf.init()
    other = what if kf.rank() else ""
    net = network(0)
    net[4].bias.requires_grad_(other != "frozen")
    x, y = (tensor[: 61 if other == "samples" else 64] for tensor in problem())
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    kf.fit(net, (x, y), opt, steps=5, batch_size=16, seed=int(other == "seed"))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("frozen", "rank 1 has another model than rank 0: .* or in which are frozen"),
        ("seed", "other arguments than the one whose state it takes .seed 1 here, 0 there"),
        ("samples", "other arguments than the one whose state it takes .samples of data"),
    ],
)
def test_a_training_that_is_another_one_on_one_rank_is_refused(what: str, told: str) -> None:
    with pytest.raises(WorkersFailed, match=told):
        run_workers(2, fit_another, what)


def diverge(how: str) -> list[int]:
    """Rank 1 changes something in step 13; returns the steps made until the job ended with an error."""
    kf.init(comm_check_every=5)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    x, y = problem(256)
    steps, differs = 0, kf.rank() == 1
    try:
        if how == "loader":
            for step in kf.DataLoader(net, (x, y), opt, batch_size=8, micro_batch=4, epochs=4):
                if steps == 13 and differs:
                    net[2].weight.data[1, 1] += 1e-6
                for inputs, targets in step:
                    F.cross_entropy(net(inputs), targets).backward()
                update(opt)
                steps += 1
        while steps < 128:
            if steps == 13 and differs:
                opt.param_groups[0]["lr"] = 0.2
            F.cross_entropy(net(x), y).backward()
            update(opt)
            steps += 1
    except kf.ConsistencyError as error:
        # Parameters of earlier layers follow within a step, so that the first that differs may be one of them.
        first = r"parameter (2\.weight|0\.)" if how == "loader" else "learning rate of group 0"
        assert re.search(first + ".*ranks 1 against rank 0", str(error)), error
        return [steps]
    return []


@pytest.mark.parametrize("how", ["loader", "bare"])
def test_workers_that_differ_end_in_the_next_check(how: str) -> None:
    results = run_workers(2, diverge, how)
    assert results[0] == results[1] != [], "no rank noticed"
    assert results[0][0] == 15


class SpoilsRank1(kf.BasePolicy):
    """In step 13 rank 1's first parameters change, as by a fault of memory."""

    step = 0

    def after_step(self) -> None:
        self.step += 1
        opt = latest_optimizer()
        if self.step == 13 and kf.rank() == 1 and opt is not None:
            opt.param_groups[0]["params"][0].data[0, 0] += 1e-6


def test_an_elastic_job_whose_workers_differ_ends_in_one_line(tmp_path: Path) -> None:
    settings = words(
        "model=mlp model.hidden=[16] data=digits batch.size=64 batch.micro=16 train.steps=200 comm.check_every=5",
        "workers.count=2 workers.max=2 policy._target_=test_same_start.SpoilsRank1",
    )
    job = run_job(tmp_path / "run", settings)
    assert job.error is not None and "the workers no longer have the same model: parameter layers." in job.error
    assert "\n" not in job.error and len(job.metrics) < 30
    assert len(job.views) == 1  # nobody was replaced


@on_workers(2)
def test_expanded_buffers_and_other_memory_formats() -> None:
    """Buffers that repeat their elements, and parameters whose layout changes after the optimizer was made."""
    kf.init()
    torch.manual_seed(kf.rank())
    net = nn.Conv2d(3, 4, 3)
    net.register_buffer("counts", torch.full((1,), kf.rank()).expand(4))
    net.register_buffer("scales", torch.full((1, 2), float(kf.rank())).expand(3, 2))
    opt = kf.FusedSGD(net.parameters(), 0.1)
    opt.sync_buffers(net)
    net.to(memory_format=torch.channels_last)
    for _ in range(2):
        net(torch.ones(2, 3, 8, 8)).square().mean().backward()
        update(opt)
    assert net.counts.tolist() == [0] * 4 and net.scales.tolist() == [[0.0] * 2] * 3
    assert all_equal(net.parameters())


def start_that_fails(directory: Path) -> None:
    """Rank 1 is lost after the optimizer was made, before rank 0 has read the checkpoint that it is to resume from."""
    kf.init()
    net = network(kf.rank())
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    if kf.rank() == 1:
        assert current().group.close(0.0)
        return
    settings: dict[str, Any] = {"checkpoint_dir": directory, "checkpoint_resume": "auto", "batch_size": 8}
    with pytest.raises(kf.CommError):
        kf.fit(net, problem(), opt, micro_batch=4, checkpoint_every_steps=5, **settings)


def test_a_start_that_fails_leaves_the_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000020").mkdir()
    run_workers(2, start_that_fails, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]
