"""Partial sums on the host: on a recorded device every copy is in order, and the parameters' bits do not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu.steps import job
from torch import Tensor

import kfuse as kf
from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.plan import StepPlan
from kfuse.comm.ranges import aligned_ranges
from kfuse.comm.sum_tree import LeafStep
from kfuse.comm.transports.all_to_all import AllToAll

STEPS = [(16, 2), (18, 2), (33, 5)]
BUCKETS = 128 * 4 / 2**20  # MB: several buckets, of each of which rank 0 of 2 adds up a part


def parameters(total: int, workers: int, slots_on_host: bool, batch_norm: bool) -> tuple[list[bytes], int]:
    """The bits of the parameters after two steps of a worker, and how many slots it had."""
    with job(size=workers, elastic=True, batch_norm=batch_norm, reproducible=True, slots_on_host=slots_on_host) as it:
        for _ in range(2):
            it.planned_step(aligned_ranges(total, workers))
        slots = max(len(bucket.slots) for bucket in it.opt.engine.buckets)
    return [p.detach().numpy().tobytes() for p in it.model.parameters()], slots


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(("total", "workers"), STEPS)
def test_bits_and_order_are_the_same_in_fewer_slots(total: int, workers: int, batch_norm: bool) -> None:
    here, slots = parameters(total, workers, False, batch_norm)
    on_host, fewer = parameters(total, workers, True, batch_norm)
    assert on_host == here
    assert fewer == 2 < slots


def test_a_copy_to_the_host_that_nothing_orders_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: the same copies on a stream of their own, without a wait."""
    save = Bucket.save

    def save_elsewhere(bucket: Bucket, leaf: LeafStep) -> None:
        device = devices.of(bucket.device)
        with device.on(device.new_stream()):
            save(bucket, leaf)

    monkeypatch.setattr(Bucket, "save", save_elsewhere)
    with job(reproducible=True, slots_on_host=True) as it:
        it.planned_step(aligned_ranges(16, 2))
        errors = it.recorder.take_errors()
    assert any("no order between" in error for error in errors)


def test_a_receive_buffer_that_is_free_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: the next bucket's exchange may write there before this one's rows were added up."""
    launch = AllToAll.launch

    def launch_and_free(transport: AllToAll, key: int, slots: Sequence[Tensor], what: str) -> None:
        launch(transport, key, slots, what)
        transport._free.append(transport._messages[key].received)

    monkeypatch.setattr(AllToAll, "launch", launch_and_free)
    with job(reproducible=True, bucket_mb=BUCKETS) as it:
        it.planned_step(aligned_ranges(4, 2))
        errors = it.recorder.take_errors()
    assert any("no order between" in error for error in errors)


def test_two_receive_buffers_do_for_any_number_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of messages that NCCL needs a bucket's rows are added up before the exchange of the next but one."""
    taken: list[int] = []
    take = AllToAll._take

    def take_and_tell(transport: AllToAll, numel: int, like: Tensor) -> Tensor:
        buffer = take(transport, numel, like)
        taken.extend([buffer.data_ptr()] if numel else [])
        return buffer

    monkeypatch.setattr(AllToAll, "_take", take_and_tell)
    with job(reproducible=True, bucket_mb=BUCKETS) as it:
        for _ in range(3):  # the first steps find out how large they must be
            taken.clear()
            it.planned_step(aligned_ranges(4, 2))
    assert len(taken) > 3 and len(set(taken)) == 2


def test_on_the_cpu_nothing_changes() -> None:
    """There a copy would be in the same memory."""
    kf.init(kf.CommOptions(reproducible=True, slots_on_host=True))
    net = torch.nn.Linear(3, 3)
    opt = kf.FusedAdamW(net.parameters())
    opt.begin(StepPlan(16, (range(16),)))
    for j in range(16):
        with opt.micro_batch(samples=1, last=j == 15):
            net(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert max(len(bucket.slots) for bucket in opt.engine.buckets) == 4
    with pytest.raises(ValueError, match="slots_on_host=true: must be false"):
        kf.CommOptions(slots_on_host=True)
