"""An audit on a recorded device: digests are in order, and the host waits for nothing but the comparison."""

from __future__ import annotations

import pytest
from gpu.steps import Job, job

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


@pytest.mark.parametrize("keeps", [True, False])
def test_digests_are_taken_in_order_and_without_a_wait(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without record_stream a gradient of another stream is dropped too early."""
    if not keeps:
        monkeypatch.setattr(AuditedGradient, "_keep_here", lambda engine, tensors: None)
    with job(lag=2, reproducible=True, all_used=True, batch_norm=keeps) as it:
        it.forwards_on_two_streams()
        for audited in (0, 2, 4, 1):
            audited_step(it, audited)
        errors = it.recorder.take_errors()
    assert keeps == (not errors) and all("memory is dropped" in error for error in errors), errors
