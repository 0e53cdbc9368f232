"""SMA and outer steps on a GPU, as the recorder sees it: memory is used in order, and how often the host waits."""

from __future__ import annotations

import pytest
import torch
from gpu.steps import job

from kfuse.comm.sync.averaging import CentralModel, OuterMomentum

RANGES = [range(0, 2), range(2, 4)]


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elastic", [False, True])
def test_a_step_of_sma(elastic: bool, parameters: torch.dtype) -> None:
    """The host waits for the message nowhere. Where workers may be lost it waits for the tail, which comes after it."""
    with job(elastic=elastic, lag=2, parameters=parameters) as it:
        centre = CentralModel(it.opt.updates.weights())
        for _ in range(3):
            assert it.recorder.waits_of(lambda: centre.begin_step(it.opt.updates.weights(), it.group)) == []
            it.planned_step(RANGES, local=True)
            assert it.recorder.waits_of(lambda: centre.end_step(it.opt.updates.weights(), it.group, 0.5, 0.9)) == []
            it.opt.updates.weights_changed()


def test_a_message_that_a_lost_worker_aborted_is_sent_again() -> None:
    with job(elastic=True) as it:
        centre = CentralModel(it.opt.updates.weights())
        centre.begin_step(it.opt.updates.weights(), it.group)
        it.next_group()
        it.planned_step(RANGES, local=True)
        centre.end_step(it.opt.updates.weights(), it.group, 0.5, 0.9)
        assert centre.difference is None


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_an_outer_step_waits_for_the_average_only(parameters: torch.dtype) -> None:
    with job(lag=2, parameters=parameters) as it:
        outer = OuterMomentum(it.opt.updates.weights())
        for _ in range(2):
            it.planned_step(RANGES, local=True)
            assert len(it.recorder.waits_of(lambda: it.opt.updates.average_models(states=False))) == 1
            assert it.recorder.waits_of(lambda: outer.step(it.opt.updates.weights(), 0.7, 0.9)) == []
            it.opt.updates.weights_changed()
