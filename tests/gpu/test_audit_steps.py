"""An audit on a recorded device: digests are in order, and the host waits for nothing but the comparison."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu.steps import Job, job
from gpu.test_streams_training import Counts
from torch import nn

import kfuse as kf
from kfuse.comm.audit import AuditedGradient
from kfuse.comm.plan import StepPlan


def audited_step(it: Job, audited: int) -> None:
    """A step of two workers with an audit, of which this worker is the owner, if the micro-batch is its, and checker.

    Raises AssertionError if the host waits for the device.
    """
    ranges, params = (range(0, 3), range(3, 5)), list(it.model.parameters())
    it.opt.begin(StepPlan(40, ranges, audited=audited))
    for j in ranges[0]:
        with it.opt.micro_batch(samples=8, last=j == 2):
            it.loss().backward()
    if audited in ranges[0]:
        assert it.opt.engine.audited.digest().shape == ()
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    assert it.opt.engine.audited.again(it.loss().backward).shape == ()
    for p, grad in zip(params, kept, strict=True):
        p.grad = grad
    assert it.recorder.host_waits == []
    it.end_step()


@pytest.mark.parametrize("streams", [1, 2])
def test_digests_are_taken_in_order_and_without_a_wait(streams: int) -> None:
    with job(lag=2, reproducible=True, batch_norm=True, all_used=True) as it:
        if streams == 2:
            it.forwards_on_two_streams()
        for audited in (0, 2, 4, 1):
            audited_step(it, audited)


def test_a_gradient_of_another_stream_that_is_dropped_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuditedGradient, "_keep_here", lambda engine, tensors: None)
    with job(lag=2, reproducible=True, all_used=True) as it:
        it.forwards_on_two_streams()
        for audited in (0, 4):
            audited_step(it, audited)
        errors = it.recorder.take_errors()
    assert any("memory is dropped" in error and "tail.py" in error for error in errors), errors


@pytest.mark.full
def test_fit_waits_for_the_comparison_alone() -> None:
    """On one worker, which runs each micro-batch twice. Its loader processes fetch it out of turn."""
    torch.manual_seed(0)
    data = (torch.randn(256, 6), torch.randint(0, 4, (256,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    with job(lambda params: None, size=1, lag=2, reproducible=True, audit_every=2) as it:
        opt, counts = kf.FusedAdamW(model.parameters()), Counts(it.recorder)
        settings = {"batch_size": 32, "micro_batch": 8, "epochs": 2, "num_workers": 2}
        kf.fit(model, data, opt, kf.Hook(counts), loss_fn=F.cross_entropy, **settings)
    assert len(counts.steps) == 16
    for step, waits in enumerate(counts.steps[1:8], 1):
        assert len(waits) == (step % 2 == 0) and all("audit.py" in wait for wait in waits), waits
