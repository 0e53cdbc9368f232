"""group["lr"] belongs to the user or their scheduler, and kfuse multiplies it by a factor of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers
from elastic_job import command_line, read_lines
from problems import Seen, all_equal, network, problem, update
from support import supervised
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import kfuse as kf
from kfuse import session
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.session import reset


def make(kind: str, net: nn.Module, lr: float = 0.1) -> Any:
    return (
        kf.FusedSGD(net.parameters(), lr=lr) if kind == "fused" else kf.Optimizer(torch.optim.SGD(net.parameters(), lr))
    )


def test_a_plateau_scheduler_is_stepped_with_the_held_out_loss(tmp_path: Path) -> None:
    """As by hand from the recorded losses; a run that resumes goes on with its state."""

    def train(epochs: int) -> ReduceLROnPlateau:
        reset()
        net = network()
        opt = make("fused", net, 0.3)
        scheduler = ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.2)
        files = {"checkpoint_dir": tmp_path / "kept", "run_dir": tmp_path / "run", "checkpoint_resume": "auto"}
        kf.fit(net, problem(), opt, batch_size=16, epochs=epochs, heldout=problem(), scheduler=scheduler, **files)
        return scheduler

    train(5)
    found = train(9)
    twin = ReduceLROnPlateau(torch.optim.SGD(network().parameters(), 0.3), factor=0.5, patience=1, threshold=0.2)
    losses = [event["loss"] for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "evaluation"]
    for loss in losses:
        twin.step(loss)
    assert len(losses) == 9 and found.state_dict() == twin.state_dict()
    assert twin.optimizer.param_groups[0]["lr"] == found.optimizer.param_groups[0]["lr"] < 0.3


def test_the_rate_that_is_recorded_is_the_one_used() -> None:
    """A loop's body may set the rate before opt.step(), as loops with a schedule of their own do."""
    net, policy, rates = network(), Seen(), [0.1 / (1 + i) for i in range(6)]
    opt = make("fused", net)
    for step, rate in zip(
        kf.DataLoader(net, problem(), opt, batch_size=16, steps=6, policy=policy), rates, strict=True
    ):
        opt.param_groups[0]["lr"] = rate
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
        update(opt)
    assert [signals.lr for signals in policy.signals] == pytest.approx(rates)


def test_kfuse_multiplies_the_schedulers_rate() -> None:
    """Batch-size scaling and the scheduler's decay, both."""
    net, policy = network(), Seen({0: kf.Decision(batch_size=32)})
    opt = make("wrapped", net)
    scheduler = LambdaLR(opt, lambda step: 0.9**step)
    kf.fit(net, problem(128), opt, policy, batch_size=8, scheduler=scheduler, lr_scaling="sqrt")
    assert {seen.batch_size for seen in policy.signals} == {8, 32}
    for step, seen in enumerate(policy.signals):
        assert seen.lr == pytest.approx(0.1 * 0.9**step * math.sqrt(seen.batch_size / 8), rel=1e-12)
    assert opt.lr_factor == 1.0  # what the user does next is theirs


@on_workers(2)
def test_all_ranks_have_rank_0s_rate_and_schedule() -> None:
    kf.init()
    net = network()
    opt = make("fused", net, lr=0.1 * (1 + kf.rank()))  # rank 0's rate and schedule are everybody's
    scheduler = StepLR(opt, 2 + kf.rank(), 0.5)
    kf.fit(net, problem(), opt, batch_size=16, epochs=2, scheduler=scheduler)
    assert all_equal(net.parameters()) and opt.base_rates() == [0.1 * 0.5**4]


@pytest.mark.parametrize(
    ("scheduler", "arguments", "error", "message"),
    [
        (lambda opt: None, {"scheduler": 3}, TypeError, "scheduler=int: must be a torch"),
        (ReduceLROnPlateau, {}, ValueError, "ReduceLROnPlateau: needs heldout="),
        (lambda opt: StepLR(make("fused", network()), 1), {}, ValueError, "belongs to another optimizer"),
    ],
)
def test_wrong_arguments_are_refused_before_training(
    scheduler: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    net = network()
    opt = make("fused", net)
    given = {"scheduler": scheduler(opt), **arguments}
    with pytest.raises(error, match=message):
        kf.fit(net, problem(), opt, **given)


def test_a_scheduler_that_nobody_would_step_is_refused() -> None:
    net = network()
    for opt, owner in ((make("fused", net), None), (make("wrapped", net), "inner")):
        StepLR(opt if owner is None else opt.inner, 1)
        with pytest.raises(ValueError, match=r"kf\.fit would not step it"):
            kf.fit(net, problem(), opt)


def test_a_scheduler_stepped_by_the_body_is_refused_where_workers_may_join() -> None:
    session._current = session.Session(Group(), CommOptions(), supervised())
    net = network()
    opt = make("fused", net)
    StepLR(opt, 1)
    with pytest.raises(ValueError, match=r"in an elastic job .* pass it as scheduler="):
        kf.DataLoader(net, problem(), opt)


class OfLayers(torch.optim.SGD):
    """Each parameter has a rate of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__([{"params": [p], "lr": lr * k} for k, p in enumerate(params, 2)], lr)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [None, "OfLayers"])
def test_a_resumed_run_of_the_command_line_has_the_configured_rate(
    tmp_path: Path, optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lr.base on the command line wins over the checkpoint's."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    common = ["model.hidden=[8]", "batch.size=64", "policy=none", "checkpoint.every_steps=5", "checkpoint.resume=auto"]
    if optimizer is not None:
        common.append(f"optimizer._target_={Path(__file__).stem}.{optimizer}")
    for rate, steps in ((0.001, 10), (0.01, 20)):
        with command_line(tmp_path / "run", [*common, f"lr.base={rate}", f"train.steps={steps}"]) as (process, job):
            assert process.wait(240) == 0
    first = 1 if optimizer is None else 2
    assert [record["lr"] for record in job.metrics] == [0.001 * first] * 10 + [0.01 * first] * 10
