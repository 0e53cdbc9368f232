"""A batch that is fetched in the step's own thread reaches a GPU by pinned memory, and is fetched once.

The meta device stands for the GPU: what is copied there has a shape and a type, and no data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import devices
from kfuse.comm.devices import Device
from kfuse.data.batch import pinned_copy, to_device
from kfuse.data.dataset import TensorData
from kfuse.data.feeder import Feeder
from kfuse.data.fetching import Loading
from kfuse.data.sampler import EpochSampler

GPU = torch.device("meta")


class Counting(Device):
    asynchronous = True

    def __init__(self) -> None:
        super().__init__(GPU)
        self.pinned_shapes: list[tuple[int, ...]] = []

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.pinned_shapes.append(tuple(shape))
        return super().pinned(shape, dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(devices, "of", lambda name: counting)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)  # asks CUDA, which is not there
    return counting


def test_tensors_go_by_pinned_memory_and_the_host_does_not_wait(gpu: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    to = Tensor.to

    def count(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        asked.append(named["non_blocking"])
        return to(self, *arguments, **named)

    monkeypatch.setattr(Tensor, "to", count)
    batch = {"x": [torch.zeros(4, 3)], "temperature": torch.tensor(0.5), "name": "a"}
    moved = to_device(batch, GPU)
    assert gpu.pinned_shapes == [(4, 3), ()] and asked == [True] * 2
    assert moved["x"][0].device.type == moved["temperature"].device.type == "meta"
    there = torch.zeros(3, device=GPU)
    assert to_device([there], GPU)[0] is there
    assert len(gpu.pinned_shapes) == 2


def test_what_a_loader_process_sent_keeps_its_strides(gpu: Counting) -> None:
    """Else the bits of a model in channels_last would depend on the number of loader processes."""
    feeder = Feeder(TensorData((torch.zeros(1), torch.zeros(1))), EpochSampler(1, 0), Loading(workers=1), GPU)
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for tensor in (torch.tensor(0.5), channels_last, torch.randn(4, 3).t()):
        gpu.pinned_shapes.clear()
        started = feeder._start_copy([tensor])
        assert started is not None and started[0][0].stride() == tensor.stride() and len(gpu.pinned_shapes) == 1
        copy = pinned_copy(gpu, tensor)
        assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
        assert to_device([tensor], GPU)[0].stride() == tensor.stride()
    gpu.pinned_shapes.clear()
    every_second = torch.arange(6)[::2]  # not dense: copied without pinned memory
    assert pinned_copy(gpu, every_second) is every_second and gpu.pinned_shapes == []


class Counted(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.decoded: Counter[int] = Counter()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.decoded[i] += 1
        return torch.full((3,), float(i)), torch.tensor(i % 2)


def test_each_sample_of_an_epoch_is_decoded_once() -> None:
    data, net = Counted(), nn.Linear(3, 2)
    kf.fit(net, data, kf.FusedSGD(net.parameters(), lr=0.1), train_epochs=2, batch_size=8, batch_micro=4)
    assert data.decoded == Counter({i: 2 for i in range(24)})
