"""Batches go to a GPU, and states come from it, by pinned memory; the host does not wait for the copies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfuse.checkpoint import blocks, snapshot
from kfuse.checkpoint.format import Checkpointer, load
from kfuse.comm import chunks, devices
from kfuse.comm.devices import Device
from kfuse.data.dataset import pinned_copy, to_device

META = torch.device("meta")


class Gpu(Device):
    """Keeps what is pinned, and in which threads the device was made the current one. `held` delays its events."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pinned_shapes: list[tuple[int, ...]] = []
        self.current_in: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.error: Exception | None = None

    def make_current(self) -> None:
        self.current_in.append(threading.current_thread().name)

    def event(self, timing: bool = False) -> Any:
        return Arrival(self)

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.pinned_shapes.append(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype)


class Arrival(devices.Event):
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        assert self._gpu.held.wait(60)
        if self._gpu.error:
            raise self._gpu.error


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(devices, "of", lambda name: made)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)  # asks CUDA, which is not there
    return made


@pytest.fixture
def meta(gpu: Gpu) -> Gpu:
    gpu.name = META
    return gpu


def test_each_tensor_of_a_batch_goes_by_pinned_memory(meta: Gpu) -> None:
    batch = {"x": [torch.zeros(4, 3)], "temperature": torch.tensor(0.5), "name": "a"}
    moved = to_device(batch, META)
    assert meta.pinned_shapes == [(4, 3), ()]
    assert moved["x"][0].device == moved["temperature"].device == META
    there = torch.zeros(3, device=META)
    assert to_device([there], META)[0] is there and len(meta.pinned_shapes) == 2


def test_a_tensor_keeps_its_strides_on_the_way_and_one_that_is_not_dense_goes_without_pinned_memory(meta: Gpu) -> None:
    """Else the bits of a model in channels_last would depend on the device."""
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for tensor in (torch.tensor(0.5), channels_last, torch.randn(4, 3).t()):
        meta.pinned_shapes.clear()
        copy = pinned_copy(meta, tensor)
        assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
        assert to_device([tensor], META)[0].stride() == tensor.stride() and len(meta.pinned_shapes) == 2
    meta.pinned_shapes.clear()
    every_second = torch.arange(6)[::2]
    assert pinned_copy(meta, every_second) is every_second and meta.pinned_shapes == []


def state_of(step: int, width: int = 40) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(2, width, width, generator=generator)
    images = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    return {
        "model": {"weight": weights[0], "flag": torch.tensor([True, False]), "count": torch.tensor(step)},
        "optimizer": {"moment": weights[1], "half": weights[1, 0].bfloat16(), "images": images, "none": torch.empty(0)},
        "progress": {"step": step},
    }


def assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype and found.stride() == wanted.stride()
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_equal(found[name], value)
    else:
        assert found == wanted


def test_only_the_writer_waits_and_all_checkpoints_share_one_buffer(gpu: Gpu, tmp_path: Path) -> None:
    checkpointer, counts = Checkpointer(tmp_path, 9, lambda event: None), list[int]()
    for step, width in enumerate((40, 40, 60)):
        gpu.held.clear()
        assert checkpointer.save(step, state_of(step, width)), "the host has not waited"
        assert not checkpointer.save(9, state_of(9)), "the buffer is in use until the first one is written"
        gpu.held.set()
        checkpointer.wait()
        assert_equal(load(tmp_path / f"step-{step:08d}"), state_of(step, width))
        counts.append(len(gpu.pinned_shapes))
    assert counts[0] == counts[1] < counts[2], "the second copy takes the first one's memory"
    assert all(size.bit_count() == 1 for (size,) in gpu.pinned_shapes)
    assert len(gpu.current_in) == 3 and "MainThread" not in gpu.current_in


@given(st.lists(st.integers(0, 3 * chunks.CHUNK_BYTES), max_size=40))
def test_blocks_are_powers_of_two_hold_each_tensor_whole_and_hardly_more(sizes: list[int]) -> None:
    made = chunks.cut(sizes)
    found, places = blocks(made)
    assert [chunk for chunk, _ in places] == made and all(size.bit_count() == 1 for size in found)
    ends = dict.fromkeys(range(len(found)), 0)
    last: tuple[int, int] | None = None
    for chunk, (number, at) in places:
        assert ends[number] <= at and at + chunk.size <= found[number]
        tensor = chunk.parts[0].tensor
        if last is not None and last[0] == tensor:
            assert (number, at) == (last[1], ends[number]), "a tensor is in one piece"
        ends[number], last = at + chunk.size, (tensor, number)


def test_a_large_state_takes_hardly_more_than_its_size() -> None:
    """7 B parameters with AdamW, in fp32."""
    found, _ = blocks(chunks.cut([2**29] * 168))
    assert sum(found) < 1.02 * 84 * 2**30


def test_what_was_copied_is_written_alone(gpu: Gpu, tmp_path: Path) -> None:
    """Each tensor has a storage of its own, though all lie in one buffer: torch.save writes storages."""
    checkpointer = Checkpointer(tmp_path, 1, lambda event: None)
    flat = torch.randn(1 << 16)
    checkpointer.save(1, {"model": {"a": flat[5:11].view(2, 3)}, "optimizer": {"b": flat}, "rest": 1})
    checkpointer.wait()
    assert (tmp_path / "step-00000001" / "model.pt").stat().st_size < 4000


def test_a_failed_copy_is_an_event(gpu: Gpu, tmp_path: Path) -> None:
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    events: list[dict[str, Any]] = []
    checkpointer = Checkpointer(tmp_path, 1, events.append)
    assert checkpointer.save(1, state_of(1))
    checkpointer.wait()
    [event] = events
    assert event["kind"] == "checkpoint_failed" and "illegal memory access" in event["why"]
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_on_the_cpu_keeps_ties() -> None:
    tied = nn.Parameter(torch.randn(3))
    state = state_of(3) | {"ties": [tied, tied]}
    taken = snapshot(state, "state")
    first, second = taken.pop("ties")
    assert first is second and torch.equal(first, tied) and type(first) is Tensor
    assert first.data_ptr() != tied.data_ptr()
    del state["ties"]
    assert_equal(taken, state)
