"""A checkpoint from a GPU: one pinned buffer for all of them, the host never waits in `save`, and the order is right.

`Logging` stands for the GPU. Its copies happen at once (its tensors are the CPU's), and it keeps what was ordered after
what: the order is what is tested here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfuse.checkpoint.format
from kfuse.checkpoint.format import Checkpointer, load
from kfuse.checkpoint.snapshot import Snapshots, snapshot
from kfuse.comm import chunks, devices
from kfuse.comm.devices import Device


class Logging(Device):
    """A GPU whose streams and events write down what they are asked for."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []
        self.pinned_bytes: list[int] = []
        self._on = ["main"]
        self._streams = 0

    def make_current(self) -> None:
        self.say("made current")

    def new_stream(self, priority: int = 0) -> LoggingStream:  # type: ignore[override]
        self._streams += 1
        return LoggingStream(self, f"side {self._streams}")

    def current_stream(self) -> LoggingStream:  # type: ignore[override]
        return LoggingStream(self, self._on[-1])

    @contextlib.contextmanager
    def on(self, stream: LoggingStream) -> Iterator[None]:  # type: ignore[override]
        self._on.append(stream.name)
        yield
        self._on.pop()

    def event(self, timing: bool = False) -> LoggingEvent:  # type: ignore[override]
        return LoggingEvent(self)

    def pinned(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self.pinned_bytes.append(shape[0])
        return torch.full(tuple(shape), 255, dtype=dtype)

    def say(self, what: str) -> None:
        where = self._on[-1] if threading.current_thread() is threading.main_thread() else "writer"
        self.log.append(f"{where}: {what}")


class LoggingStream:
    def __init__(self, device: Logging, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, stream: LoggingStream) -> None:
        self._device.say(f"{self.name} waits for {stream.name}")


class LoggingEvent:
    def __init__(self, device: Logging) -> None:
        self._device = device

    def record(self, stream: Any = None) -> None:
        self._device.say("event recorded")

    def wait(self, stream: Any = None) -> None:
        self._device.say("waits for the event")

    def synchronize(self) -> None:
        self._device.say("host waits for the event")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Logging:
    logging = Logging()
    monkeypatch.setattr(devices, "of", lambda name: logging)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    return logging


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


ORDER = [
    "main: side 1 waits for main",  # the copies come after the step's work
    "side 1: event recorded",  # after the copies
    "main: waits for the event",  # the next update comes after the copies
]


def test_save_orders_the_streams_and_only_the_writer_waits(
    gpu: Logging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, write = threading.Event(), kfuse.checkpoint.format._write_files

    def write_files(*arguments: Any) -> int:
        gpu.say("writes")
        return write(*arguments)

    def report(event: dict[str, Any]) -> None:
        gpu.say(event["kind"])

    monkeypatch.setattr(kfuse.checkpoint.format, "_write_files", write_files)
    monkeypatch.setattr(LoggingEvent, "synchronize", lambda self: (held.wait(60), gpu.say("host waits for the event")))
    checkpointer = Checkpointer(tmp_path, 9, report)
    assert checkpointer.save(1, state_of(1))
    assert [line for line in gpu.log if not line.startswith("writer")] == ORDER, "the host has not waited"
    assert not checkpointer.save(2, state_of(2)), "the buffer is in use until the first one is written"
    held.set()
    checkpointer.wait()
    writer = [line for line in gpu.log if line.startswith("writer")]
    assert writer == [
        "writer: made current",
        "writer: host waits for the event",
        "writer: writes",
        "writer: checkpoint",
    ]
    assert_equal(load(tmp_path / "step-00000001"), state_of(1))


def test_all_checkpoints_share_one_pinned_buffer(gpu: Logging, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 9, lambda event: None)
    for step in range(4):
        checkpointer.save(step, state_of(step, width=60 if step == 3 else 40))
        checkpointer.wait()
        assert_equal(load(tmp_path / f"step-{step:08d}"), state_of(step, width=60 if step == 3 else 40))
    assert len(gpu.pinned_bytes) == 2 and gpu.pinned_bytes[0] < gpu.pinned_bytes[1]
    assert gpu._streams == 1


def test_small_tensors_share_a_copy_to_the_host(gpu: Logging, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_was_copied_is_written_alone(gpu: Logging, tmp_path: Path) -> None:
    """Each tensor has a storage of its own, though all lie in one buffer: torch.save writes storages."""
    checkpointer = Checkpointer(tmp_path, 1, lambda event: None)
    flat = torch.randn(1 << 16)
    checkpointer.save(1, {"model": {"a": flat[5:11].view(2, 3)}, "optimizer": {"b": flat}, "rest": 1})
    checkpointer.wait()
    assert (tmp_path / "step-00000001" / "model.pt").stat().st_size < 4000


def test_a_snapshot_for_the_caller_is_complete(gpu: Logging) -> None:
    tied = nn.Parameter(torch.randn(3))
    copy = snapshot({"a": tied, "b": tied}, "state")
    assert gpu.log == [*ORDER, "main: host waits for the event"]
    assert copy["a"] is copy["b"] and torch.equal(copy["a"], tied) and type(copy["a"]) is Tensor
    assert copy["a"].data_ptr() != tied.data_ptr()


def test_a_failed_copy_is_an_event(gpu: Logging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LoggingEvent) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(LoggingEvent, "synchronize", fail)
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
