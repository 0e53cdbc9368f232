"""A checkpoint from a GPU: one pinned buffer for all of them, and the host never waits in `save`.

`Gpu` stands for the GPU. Its copies happen at once (its tensors are the CPU's). `test_transfer_streams.py` tests the
order of the streams.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfuse.checkpoint.format import Checkpointer, load
from kfuse.checkpoint.snapshot import Snapshots, snapshot
from kfuse.comm import chunks, devices
from kfuse.comm.devices import Device


class Gpu(Device):
    """Keeps what is pinned, and in which threads the device was made the current one. `held` delays its events."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pinned_bytes: list[int] = []
        self.current_in: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.error: Exception | None = None

    def make_current(self) -> None:
        self.current_in.append(threading.current_thread().name)

    def event(self, timing: bool = False) -> Any:
        return Arrival(self)

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.pinned_bytes.append(shape[0])
        return torch.full(tuple(shape), 255, dtype=dtype)


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
    return made


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
    checkpointer = Checkpointer(tmp_path, 9, lambda event: None)
    for step, width in enumerate((40, 40, 40, 60)):
        gpu.held.clear()
        assert checkpointer.save(step, state_of(step, width)), "the host has not waited"
        assert not checkpointer.save(9, state_of(9)), "the buffer is in use until the first one is written"
        gpu.held.set()
        checkpointer.wait()
        assert_equal(load(tmp_path / f"step-{step:08d}"), state_of(step, width))
    assert len(gpu.pinned_bytes) == 2 and gpu.pinned_bytes[0] < gpu.pinned_bytes[1]
    assert len(gpu.current_in) == 4 and "MainThread" not in gpu.current_in


def test_small_tensors_share_a_copy_to_the_host(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = Tensor.copy_

    def count(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append((source.nbytes, non_blocking))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(Tensor, "copy_", count)
    Snapshots().take({f"p{i}": torch.randn(10) for i in range(100)} | {"large": torch.randn(2**18)}, "state")
    assert sorted(size for size, _ in copies) == [100 * 64 - 24, 2**20]
    assert all(non_blocking for _, non_blocking in copies)


def test_what_was_copied_is_written_alone(gpu: Gpu, tmp_path: Path) -> None:
    """Each tensor has a storage of its own, though all lie in one buffer: torch.save writes storages."""
    checkpointer = Checkpointer(tmp_path, 1, lambda event: None)
    flat = torch.randn(1 << 16)
    checkpointer.save(1, {"model": {"a": flat[5:11].view(2, 3)}, "optimizer": {"b": flat}, "rest": 1})
    checkpointer.wait()
    assert (tmp_path / "step-00000001" / "model.pt").stat().st_size < 4000


def test_a_snapshot_for_the_caller_is_a_copy_that_keeps_ties(gpu: Gpu) -> None:
    tied = nn.Parameter(torch.randn(3))
    copy = snapshot({"a": tied, "b": tied}, "state")
    assert copy["a"] is copy["b"] and torch.equal(copy["a"], tied) and type(copy["a"]) is Tensor
    assert copy["a"].data_ptr() != tied.data_ptr()


def test_a_failed_copy_is_an_event(gpu: Gpu, tmp_path: Path) -> None:
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    events: list[dict[str, Any]] = []
    checkpointer = Checkpointer(tmp_path, 1, events.append)
    assert checkpointer.save(1, state_of(1))
    checkpointer.wait()
    [event] = events
    assert event["kind"] == "checkpoint_failed" and "illegal memory access" in event["why"]
    assert list(tmp_path.iterdir()) == []


def test_on_the_cpu_nothing_is_pinned_and_each_tensor_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "pinned", lambda *_: pytest.fail("pinned"))
    state = state_of(3)
    made: list[int] = []
    to = Tensor.to

    def count(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        made.append(self.nbytes)
        return to(self, *arguments, **named)

    monkeypatch.setattr(Tensor, "to", count)
    taken = Snapshots().take(state, "state")
    assert taken.on_the_way == () and len(made) == 7
    assert_equal(taken.value, state)
