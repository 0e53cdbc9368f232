"""Whole steps on a recorded device: all uses of memory are in order, and everything happens on the right device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.steps import OPTIMIZERS, SMALL_BUCKETS, TINY_BUCKETS, job

import kfuse as kf

SCHEDULES = ("allreduce", "all_to_all", "reduce_scatter", "tree")


@pytest.mark.parametrize(
    ("schedule", "elastic", "optimizer"),
    [
        *((schedule, elastic, "adamw") for schedule in SCHEDULES for elastic in (False, True)),
        *(("allreduce", False, optimizer) for optimizer in OPTIMIZERS if optimizer != "adamw"),
    ],
)
def test_bare_loops_and_micro_batches(schedule: str, elastic: bool, optimizer: str) -> None:
    with job(OPTIMIZERS[optimizer], 3, elastic, schedule=schedule) as it:
        for _ in range(3):
            it.bare_step()
        for _ in range(2):
            it.step()
        it.step(several_backwards=True)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("width", [10, 2100], ids=["shards of the last rank alone", "shards of both"])
@pytest.mark.parametrize("schedule", ["all_to_all", "reduce_scatter"])
def test_sharded_state(schedule: str, width: int, reproducible: bool) -> None:
    """Update, share of the parameters, next forward; and nothing waits on the host."""
    if reproducible and schedule != "all_to_all":
        return
    with job(schedule=schedule, state="sharded", width=width, reproducible=reproducible, lag=2) as it:
        for _ in range(3):
            it.bare_step()
        it.step()
        it.planned_step([range(0, 3), range(3, 5)])
        it.planned_step([range(0, 3), range(3, 5)], by_weight=True)
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("options", [{}, {"elastic": True}], ids=str)
@pytest.mark.parametrize("ranges", [[3, 2], [2, 3, 1], [0, 2], [11, 5]], ids=str)
def test_reproducible_sums(ranges: list[int], options: dict[str, Any]) -> None:
    cuts = [range(sum(ranges[:r]), sum(ranges[: r + 1])) for r in range(len(ranges))]
    with job(size=len(ranges), reproducible=True, lag=2, **options) as it:
        for _ in range(3):
            it.planned_step(cuts)
        assert len(it.recorder.host_waits) == (3 if options.get("elastic") else 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_planned_steps_weights_and_local_sgd(schedule: str) -> None:
    with job(schedule=schedule, elastic=True) as it:
        for _ in range(2):
            it.planned_step([range(0, 3), range(3, 5)])
            it.planned_step([range(0, 2), range(2, 4)], by_weight=True)
            it.planned_step([range(0, 2), range(2, 4)], local=True)
            it.planned_step([range(0, 2), range(2, 4)], by_weight=True, local=True)
            it.planned_step([range(0, 0), range(0, 4)])
            it.opt.average_models()


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"check_every": 1}, {"bucket_mb": 25.0}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16_messages_digests_and_one_bucket(schedule: str, options: dict[str, Any]) -> None:
    with job(schedule=schedule, **options) as it:
        for _ in range(3):
            it.bare_step()
            it.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_averaged_buffers(schedule: str) -> None:
    with job(schedule=schedule, batch_norm=True) as it:
        for _ in range(2):
            it.bare_step()
            it.step()
            it.planned_step([range(0, 2), range(2, 4)])
            it.planned_step([range(0, 2), range(2, 4)], by_weight=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_and_statistics_that_are_read(optimizer: str) -> None:
    with job(OPTIMIZERS[optimizer]) as it:
        it.opt.set_clip_norm(0.1)
        for _ in range(3):
            it.step()
            assert it.opt.stats is not None


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_scale(optimizer: str, clip_norm: float | None) -> None:
    with job(OPTIMIZERS[optimizer]) as it:
        it.opt.set_clip_norm(clip_norm)
        scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
        for _ in range(3):
            it.scaled_step(scaler)


def test_accumulated_backwards_and_gradients_set_by_hand() -> None:
    with job() as it:
        it.opt.accumulate(2)
        for _ in range(2):
            for _ in range(2):
                (it.loss() / 2).backward()
            it.end_step()
        it.opt.accumulate(1)
        for p in it.model.parameters():
            p.grad = torch.ones_like(p)
        it.end_step()


def test_two_optimizers_of_one_backward() -> None:
    with job(lambda params: None, elastic=True) as it:
        first = kf.FusedAdamW(it.model.first.parameters())
        second = kf.FusedSGD([*it.model.middle.parameters(), *it.model.last.parameters()], lr=0.1)
        for _ in range(3):
            it.loss().backward()
            for opt in (first, second):
                opt.step()
                opt.zero_grad()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["between micro-batches", "in the last backward", "before the update"])
def test_an_aborted_step(where: str, schedule: str) -> None:
    """Buffers that messages may still write to are not used again before the communicator has been aborted."""
    with job(schedule=schedule) as it:
        it.step()
        with pytest.raises(ZeroDivisionError):
            with it.opt.micro_batch(samples=8, last=False):
                it.loss().backward()
            if where == "between micro-batches":
                raise ZeroDivisionError
            if where == "before the update":
                it.opt.engine.on_last_micro_batch = lambda: 1 / 0
                with it.opt.micro_batch(samples=8):
                    it.loss().backward()
            handle = it.model.first.weight.register_hook(lambda grad: 1 / 0)
            with it.opt.micro_batch(samples=8):
                it.loss().backward()
        if where == "in the last backward":
            handle.remove()
        it.opt.engine.on_last_micro_batch = it.opt.synchronize
        it.opt.engine.abort()
        torch.zeros(100, device=torch.device("cpu"))  # what has been dropped is given away
        it.next_group()
        it.step()


@pytest.mark.parametrize("layer", ["middle", "sometimes"])
@pytest.mark.parametrize("bucket_mb", [TINY_BUCKETS, 25.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forwards_on_several_streams(schedule: str, bucket_mb: float, layer: str) -> None:
    """Hooks of one bucket then run on different streams. Those of `sometimes` come last, and start the messages."""
    with job(schedule=schedule, bucket_mb=bucket_mb, all_used=True) as it:
        it.forwards_on_two_streams(layer)
        for _ in range(2):
            it.bare_step()
            it.step()
            it.planned_step([range(0, 2), range(2, 3)])


@pytest.mark.parametrize("layer", [None, "middle", "sometimes"])
@pytest.mark.parametrize("options", [{"schedule": "all_to_all"}, {"reproducible": True}, {"dtype": "bf16"}], ids=str)
def test_every_bucket_has_a_shard_for_each_worker(options: dict[str, Any], layer: str | None) -> None:
    """In tiny ones the shards of all ranks but the last are empty: then nothing is added up on the side stream."""
    with job(size=3, width=40, bucket_mb=SMALL_BUCKETS, all_used=True, **options) as it:
        if layer is not None:
            it.forwards_on_two_streams(layer)
        for _ in range(2):
            it.step()
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)])
