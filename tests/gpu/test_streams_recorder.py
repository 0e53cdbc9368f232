"""The recorder's own rules, one by one: what is in order passes, what is not is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu.recorder import Recorder
from gpu.stand_in import StandInWork
from torch import Tensor

from kfuse.comm import devices
from kfuse.kernels import sum_partials

DEVICE = torch.device("cpu")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as made:
        made.device.make_current()
        yield made


def zeros(numel: int = 4) -> Tensor:
    return torch.zeros(numel, device=DEVICE)


@pytest.mark.parametrize("ordered", [False, True])
def test_two_streams_need_an_order(recorder: Recorder, ordered: bool) -> None:
    x, side = zeros(), recorder.device.new_stream()
    if ordered:
        side.wait_stream(recorder.main)
    with recorder.device.on(side):
        x.add_(1)
    assert bool(recorder.errors) != ordered


def test_reads_need_no_order_and_other_parts_are_other_memory(recorder: Recorder) -> None:
    x, side = zeros(), recorder.device.new_stream()
    side.wait_stream(recorder.main)
    x[:2].add_(1)
    y = x[2:] + x[2:]
    with recorder.device.on(side):
        z = x[2:] * 2
        x[3:4].view(-1)
    assert recorder.errors == []
    with recorder.device.on(side):
        x[1:].mul_(y.numel() + z.numel())
    assert recorder.errors != []


def test_an_event_orders_what_was_enqueued_before_it(recorder: Recorder) -> None:
    x, y, side = zeros(), zeros(), recorder.device.new_stream()
    event = recorder.device.event()
    event.record()
    y.add_(1)
    event.wait(side)
    with recorder.device.on(side):
        x.add_(1)
        assert recorder.errors == []
        y.add_(1)
    assert len(recorder.errors) == 1


@pytest.mark.parametrize("remedy", ["none", "record_stream", "wait_stream"])
def test_memory_of_another_stream_that_is_dropped(recorder: Recorder, remedy: str) -> None:
    x, side = zeros(), recorder.device.new_stream()
    side.wait_stream(recorder.main)
    with recorder.device.on(side):
        x.add_(1)
    if remedy == "record_stream":
        recorder.device.keep([x], side)
    if remedy == "wait_stream":
        recorder.main.wait_stream(side)
    del x
    recorder.end_step()
    assert (recorder.errors != []) == (remedy == "none")


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_reads_pinned_memory_after_the_copy(recorder: Recorder, waits: bool) -> None:
    host, event = recorder.device.pinned((4,), torch.float32), recorder.device.event()
    host.copy_(zeros(), non_blocking=True)
    event.record()
    assert recorder.host_waits == [] and not event.query()
    if waits:
        event.synchronize()
    host.tolist()
    assert bool(recorder.errors) != waits
    assert len(recorder.host_waits) == waits


def test_the_host_writes_pinned_memory_after_the_copy(recorder: Recorder) -> None:
    host = recorder.device.pinned((4,), torch.float32)
    host.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    on_device = host.to(DEVICE, non_blocking=True)
    on_device.add_(1)
    assert recorder.errors == []
    host.zero_()
    assert len(recorder.errors) == 1


def test_what_makes_the_host_wait(recorder: Recorder) -> None:
    x, index = zeros(), torch.zeros(4, dtype=torch.bool, device=DEVICE)
    acts = {
        "item": lambda: x[0].item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool(x.isfinite().all()),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu"),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[index],
        "equal": lambda: torch.equal(x, x),
        "tensor": lambda: torch.tensor([1.0], device=DEVICE),
        "upload": lambda: torch.zeros(4).to(DEVICE),
        "synchronize": recorder.device.synchronize,
    }
    counts = {name: len(recorder.waits_of(act)) for name, act in acts.items()}
    assert counts == dict.fromkeys(acts, 1)
    free = {
        "fill": lambda: torch.full((4,), 3.0, device=DEVICE),
        "number": lambda: x.__setitem__(0, 3.0),
        "host": lambda: torch.tensor([1.0, 2.0]).tolist(),
        "number on the host": lambda: x * torch.tensor(2.0),
        "kernel": lambda: sum_partials(x, torch.zeros((), dtype=torch.float64, device=DEVICE)),
    }
    assert {name: recorder.waits_of(act) for name, act in free.items()} == {name: [] for name in free}
    assert recorder.errors == []


def test_an_operand_on_the_host(recorder: Recorder) -> None:
    zeros() + torch.zeros(4)
    assert "lies on the host" in recorder.errors[0]


def test_numpy_sees_no_device(recorder: Recorder) -> None:
    zeros().numpy()
    assert "numpy()" in recorder.errors[0]


def test_a_launch_belongs_to_the_current_device() -> None:
    with Recorder() as recorder:
        partials, out = zeros(), torch.zeros((), dtype=torch.float64, device=DEVICE)
        out.add_(1)  # torch's own operations go where their tensors are
        assert recorder.errors == []
        sum_partials(partials, out)
        assert "a kernel is launched on cuda:0" in recorder.errors[0]


def test_the_seam_is_not_bypassed(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.cuda\.current_stream"):
        torch.cuda.current_stream()
    devices.of(torch.device("cuda", 0))
    assert len(recorder.errors) == 2


@pytest.mark.parametrize("waits", [False, True])
def test_a_collective_runs_on_a_stream_of_its_own(recorder: Recorder, waits: bool) -> None:
    x, work = zeros(), StandInWork(recorder, None)
    recorder.enqueued(work, [x], [x])
    if waits:
        work.synchronize()
    x.add_(1)
    assert bool(recorder.errors) != waits


def test_a_collective_keeps_its_memory_until_it_is_dropped(recorder: Recorder) -> None:
    work = StandInWork(recorder, None)
    recorder.enqueued(work, [zeros()], [])
    zeros()
    assert recorder.errors == []
    del work
    zeros()
    assert "memory is dropped" in recorder.errors[0]


def test_two_names_of_one_memory(recorder: Recorder) -> None:
    """As the fused optimizers' parameters are: storages of their own over a flat buffer."""
    x, side = zeros(64), recorder.device.new_stream()
    y = torch.utils.dlpack.from_dlpack(x[:32])
    with recorder.device.on(side):
        y.add_(1)
    assert "no order" in recorder.errors[0]


def test_hooks_of_a_backward_are_seen(recorder: Recorder) -> None:
    p, side = torch.nn.Parameter(zeros()), recorder.device.new_stream()

    def hook(param: Tensor) -> None:
        assert param.grad is not None
        with recorder.device.on(side):
            param.grad.add_(1)

    p.register_post_accumulate_grad_hook(hook)
    (p * 2).sum().backward()
    assert "no order" in recorder.errors[0]
