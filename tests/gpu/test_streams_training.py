"""Training from end to end on a recorded device: kf.fit with loader processes, and their copies on a side stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu.recorder import Recorder
from gpu.steps import job
from torch import nn

import kfuse as kf

pytestmark = pytest.mark.full


class Counts(kf.BasePolicy):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.steps: list[list[str]] = []

    def after_step(self) -> None:
        self.steps.append(list(self.recorder.host_waits))
        self.recorder.host_waits.clear()
        self.recorder.end_step()


def train(workers: int, **options: Any) -> tuple[list[list[str]], list[str]]:
    """Of each step of kf.fit, the host's waits; and what is wrong."""
    torch.manual_seed(0)
    data = (torch.randn(256, 6), torch.randint(0, 4, (256,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    with job(lambda params: None, lag=2, **options) as it:
        opt, counts = kf.FusedAdamW(model.parameters()), Counts(it.recorder)
        settings = {"batch_size": 32, "batch_micro": 8, "train_epochs": 2, "data_workers": workers}
        kf.fit(model, data, opt, kf.Hook(counts), loss_fn=F.cross_entropy, **settings)
        errors = it.recorder.take_errors()
    assert len(counts.steps) == 16
    return counts.steps[1:8], errors


def test_fit_waits_once_a_step_for_the_statistics_that_it_reports() -> None:
    steps, errors = train(workers=2)
    assert errors == []
    for waits in steps:
        assert len(waits) <= 1 and all(wait.startswith("event.synchronize") for wait in waits), waits


def test_fit_with_audits_waits_for_the_comparison_alone() -> None:
    """On one worker, which runs each micro-batch twice. Its loader processes fetch it out of turn."""
    steps, errors = train(workers=2, size=1, reproducible=True, audit_every=2)
    assert errors == []
    for step, waits in enumerate(steps, 1):
        assert len(waits) == (step % 2 == 0) and all("audit.py" in wait for wait in waits), waits
