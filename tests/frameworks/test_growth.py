"""A batch size that follows a policy in Trainer, Accelerate and Lightning: the samples and rates of a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from test_frameworks import trained
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainings import Case, Row, Seen, llama, parameters_of, rate

import kfuse as kf
from kfuse.integrations.growth import Growth

CASE = Case(accumulate=1, epochs=2, asked={1: 2, 5: 4, 16: 1})
"""Of 45 micro-batches an epoch on one process, 23 on each of two: the last step of an epoch is a short one."""

PLANNED = replace(CASE, asked={0: 1, 24: 2, 60: 4}, planned=True)


def rates_of(framework: str, cases: list[Case], monitored: bool) -> tuple[list[Seen], list[float]]:
    """As `trained`, with the learning rate of each step."""
    rates = list[float]()

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))

    register_optimizer_step_pre_hook(record)
    return trained(framework, cases, monitored), rates


def sum_of_losses(model: Any, batch: Row) -> tuple[Tensor, int]:
    """Over the tokens that count, and their number."""
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, int((labels != -100).sum())


def by_hand(framework: str, case: Case, ranks: list[list[Row]]) -> tuple[list[Tensor], list[int], list[float]]:
    """A plain loop over all processes' micro-batches: its parameters, each step's micro-batches, and its rates."""
    model, windows, rates = llama(), list[int](), list[float]()
    opt = torch.optim.AdamW(model.parameters(), case.lr, weight_decay=0.0 if framework == "trainer" else 1e-2)
    assert case.asked is not None
    epoch = len(ranks[0]) // case.epochs
    updates = math.ceil(epoch / case.accumulate)
    accumulate = wanted = case.accumulate
    for first in range(0, len(ranks[0]), epoch):
        done = 0
        while done < epoch:
            window = range(first + done, first + min(done + accumulate, epoch))
            losses = [[sum_of_losses(model, batches[index]) for index in window] for batches in ranks]
            if framework == "trainer":
                tokens = sum(count for mine in losses for _, count in mine)
                loss = sum(total for mine in losses for total, _ in mine) / tokens  # type: ignore[operator]
            else:
                means = [total / count for mine in losses for total, count in mine]
                loss = sum(means) / (accumulate * len(ranks))  # type: ignore[assignment]
            over = (first // epoch * updates + math.ceil(done / case.accumulate)) / (case.epochs * updates)
            k = accumulate / case.accumulate
            rates.append(case.lr * math.sqrt(k) * rate(case, over))
            opt.param_groups[0] |= {"lr": rates[-1], "betas": tuple(beta**k for beta in (0.9, 0.999))}
            windows.append(len(window) * len(ranks))
            opt.zero_grad()
            loss.backward()
            opt.step()
            done += len(window)
            at = 2 * sum(windows) if case.planned else len(windows) - 4
            begun = [times for begin, times in case.asked.items() if (begin <= at if case.planned else begin == at)]
            wanted = case.accumulate * begun[-1] if begun else wanted
            if done % wanted == 0 or done == epoch:
                for state in opt.state.values():  # for exact bias corrections: in updates of the new batch
                    state["step"] *= accumulate / wanted
                accumulate = wanted
    return parameters_of(model), windows, rates


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning", "trainer by a schedule"])
def test_a_training_that_grows_is_that_of_a_plain_loop(framework: str, workers: int) -> None:
    framework, *by = framework.split(maxsplit=1)
    case = PLANNED if by else CASE
    results = run_workers(workers, rates_of, framework, [case], True)
    (seen,), rates = results[0]
    parameters, windows, expected = by_hand(framework, case, [ranks[0].batches for ranks, _ in results])
    assert [stats.micro_batches for stats in seen.stats] == windows
    assert len(set(windows)) >= 3
    assert rates == pytest.approx(expected, rel=1e-6)
    for ours, theirs in zip(seen.parameters, parameters, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-5), float((ours - theirs).abs().max())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_of_ones_own_grows_as_accelerates_does(workers: int, tmp_path: Path) -> None:
    """But for an epoch's last step, which is a short one there. FSDP2 has the steps, and rounds otherwise."""
    case = replace(CASE, epochs=1, asked={1: 2, 5: 4}, directory=str(tmp_path))
    theirs, rates = run_workers(workers, rates_of, "accelerate", [case], True)[0]
    kinds = [case, *([replace(case, fsdp=True)] if workers > 1 else [])]
    for kind in kinds:
        resumed = replace(kind, resume=True, save=9)
        results = run_workers(workers, rates_of, "own", [replace(kind, save=9), resumed], True)
        for (first, again), our_rates in results:
            sizes = [stats.micro_batches for stats in first.stats]
            assert sizes == [stats.micro_batches for stats in theirs[0].stats][: len(sizes)]
            assert len(set(sizes)) == 3 and len(theirs[0].stats) - len(sizes) in (0, 1)
            assert our_rates == pytest.approx(rates[: len(sizes)] + rates[9 : len(sizes)], rel=1e-12)
            assert all(map(torch.equal, first.parameters, again.parameters))
            variances = [[stats.grad_variance for stats in seen.stats] for seen in (first, again)]
            assert variances[1] == pytest.approx(variances[0][9:], rel=1e-5)


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_a_resumed_training_goes_on_with_its_batch(framework: str, tmp_path: Path) -> None:
    saved = replace(CASE, directory=str(tmp_path), save=0 if framework == "lightning" else 10)
    first, resumed = run_workers(1, trained, framework, [saved, replace(saved, resume=True)], True)[0]
    assert all(map(torch.equal, first.parameters, resumed.parameters))
    assert first.stats[-1].step == resumed.stats[-1].step
    assert first.stats[-1].noise_scale_low == resumed.stats[-1].noise_scale_low


def test_what_growth_cannot_do_is_refused() -> None:
    with pytest.raises(TypeError, match="GoodputPolicy decides by the times of steps"):
        Growth(kf.policies.GoodputPolicy(), 64)
    with pytest.raises(ValueError, match="lr_scaling='none': must be one of sqrt, linear"):
        Growth(kf.policies.CriticalBatchPolicy(), 64, "none")
    with pytest.raises(ValueError, match="batch_max: must be given"):
        Growth(kf.GNSPolicy())
    with pytest.raises(ValueError, match="the schedule sets lr_scale: must set the batch size alone"):
        Growth(kf.SchedulePolicy([{"step": 4, "lr_scale": 0.5}]), 64)
    net = torch.nn.Linear(2, 1)
    opt, plan = torch.optim.SGD(net.parameters(), lr=0.1), kf.SchedulePolicy("0:4 100:12")
    with pytest.raises(ValueError, match="the schedule's batch size 12: must be 4 times a power of two"):
        kf.growth(kf.monitor(net, samples=2, accumulate=2), plan, opt)
    by_epoch = kf.SchedulePolicy([{"epoch": 1, "batch_size": 8}])
    for policy, said in ((kf.SchedulePolicy("0:8 9:16"), "begins with 8 samples: must be"), (by_epoch, "are by epoch")):
        with pytest.raises(ValueError, match=said):
            kf.growth(kf.monitor(net, samples=2, accumulate=2), policy, opt)
    with pytest.raises(ValueError, match="the monitor's samples is None: must be a whole number"):
        kf.growth(kf.monitor(net), kf.GNSPolicy(), opt, batch_max=64)


def trained_twice(framework: str) -> str:
    """Returns the error of a second training with the same growth."""
    growth = CASE.growth()
    with patch.object(Case, "growth", lambda _: growth), pytest.raises(RuntimeError) as refused:
        trained(framework, [CASE, CASE], True)
    return str(refused.value)


@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_a_growth_is_for_one_training(framework: str) -> None:
    assert "must be a new one for each training" in run_workers(1, trained_twice, framework)[0]
