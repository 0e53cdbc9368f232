"""How often the host waits for the device in a step: once where workers may change, else never unless it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.steps import OPTIMIZERS, job

import kfuse as kf

SCHEDULES = ("allreduce", "all_to_all", "reduce_scatter", "tree")
ON_THE_DEVICE = [name for name in OPTIMIZERS if name != "wrapped adamw"]
CASES = [(schedule, "adamw") for schedule in SCHEDULES] + [("allreduce", name) for name in ON_THE_DEVICE[1:]]
AHEAD = 2  # steps that the host is ahead of the device, whatever it does


@pytest.mark.parametrize(("schedule", "optimizer"), CASES)
def test_none_in_a_fixed_group(schedule: str, optimizer: str) -> None:
    """With parameters that one worker or all of them leave unused, in bare loops and in micro-batches."""
    with job(OPTIMIZERS[optimizer], 3, lag=AHEAD, schedule=schedule) as it:
        for _ in range(5):
            it.bare_step()
        for _ in range(3):
            it.step()
        assert it.recorder.host_waits == []


@pytest.mark.parametrize(("schedule", "optimizer"), CASES)
def test_one_a_step_where_workers_may_change(schedule: str, optimizer: str) -> None:
    """The wait for the last message; after it the statistics of the step before have arrived."""
    with job(OPTIMIZERS[optimizer], 3, elastic=True, lag=AHEAD, schedule=schedule) as it:
        it.opt.loop_handles_lost_workers = True
        ranges = [range(0, 2), range(2, 3), range(3, 5)]
        for _ in range(4):
            waits = it.recorder.waits_of(lambda: it.planned_step(ranges))
            assert len(waits) == 1 and waits[0].startswith("polling"), waits
            waits = it.recorder.waits_of(lambda: it.opt.statistics.read(1))  # what policies and the loop's records need
            assert waits == []


def test_reproducible_sums_and_local_sgd() -> None:
    ranges = [range(0, 2), range(2, 5)]
    with job(lag=AHEAD, reproducible=True) as it:
        for _ in range(4):
            it.planned_step(ranges)
        assert it.recorder.host_waits == []
    with job(lag=AHEAD) as it:
        for by_weight in (False, True, False, True):
            it.planned_step(ranges, by_weight=by_weight, local=True)
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "sgd", "wrapped fused adamw"])
def test_bf16_parameters(optimizer: str) -> None:
    with job(OPTIMIZERS[optimizer], lag=AHEAD, parameters=torch.bfloat16) as it:
        for _ in range(4):
            it.bare_step()
            it.step()
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_an_averaging_of_local_sgd_waits_for_its_message(parameters: torch.dtype) -> None:
    with job(lag=AHEAD, parameters=parameters) as it:
        for _ in range(2):
            it.planned_step([range(0, 2), range(2, 4)], local=True)
            waits = it.recorder.waits_of(it.opt.average_models)
            assert len(waits) == 1 and waits[0].startswith("polling"), waits


@pytest.mark.parametrize("options", [{"check_every": 1}, {"dtype": "bf16"}], ids=str)
def test_none_with_bf16_messages_digests_clipping_and_averaged_buffers(options: dict[str, Any]) -> None:
    with job(lag=AHEAD, batch_norm=True, **options) as it:
        it.opt.set_clip_norm(0.1)
        for _ in range(10):
            it.step()
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("optimizer", ON_THE_DEVICE)
def test_none_with_a_loss_scale(optimizer: str) -> None:
    with job(OPTIMIZERS[optimizer], lag=AHEAD) as it:
        scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
        for _ in range(4):
            it.scaled_step(scaler)
        assert it.recorder.host_waits == []


def test_what_a_wrapped_optimizer_waits_for() -> None:
    """Any optimizer can be wrapped, and most cannot leave a parameter or a step out on the device."""
    with job(OPTIMIZERS["wrapped adamw"], lag=AHEAD) as it:
        for _ in range(3):
            assert [wait.split(" ")[0] for wait in it.recorder.waits_of(it.bare_step)] == ["tolist"]
    with job(OPTIMIZERS["wrapped adamw"], size=1, lag=AHEAD) as it:  # alone it knows what it left unused
        for _ in range(3):
            assert it.recorder.waits_of(it.bare_step) == []
    with job(lambda params: kf.Optimizer(torch.optim.AdamW(params), skip_nonfinite=True), size=1, lag=AHEAD) as it:
        for _ in range(3):
            assert [wait.split(" ")[0] for wait in it.recorder.waits_of(it.bare_step)] == ["_local_scalar_dense"]


def test_statistics_that_are_asked_for_wait() -> None:
    with job(lag=AHEAD) as it:
        it.step()
        assert [wait.split(" ")[0] for wait in it.recorder.waits_of(lambda: it.opt.stats)] == ["event.synchronize"]


def test_a_host_far_ahead_waits_at_last() -> None:
    """So that records do not pile up: here the device finishes nothing by itself."""
    with job(lag=None) as it:
        waits = [len(it.recorder.waits_of(it.bare_step)) for _ in range(12)]
        assert waits == [0] * 8 + [1] * 4


def test_a_host_ahead_still_knows_the_time_of_a_micro_batch() -> None:
    with job(lag=3) as it:
        seconds = []
        for _ in range(6):
            it.bare_step()
            seconds.append(it.opt.engine.measurement.stopwatch.seconds_before)
        assert seconds == [0.0] * 3 + [0.001] * 3
