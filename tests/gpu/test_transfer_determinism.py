"""comm.reproducible=true on a GPU: what is set, when, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config

import kfuse as kf
from kfuse.comm import devices
from kfuse.comm.devices import Device, DeviceError
from kfuse.session import reset

FLAGS: dict[str, tuple[Any, Any]] = {
    "algorithms": (torch.are_deterministic_algorithms_enabled, True),
    "warn_only": (torch.is_deterministic_algorithms_warn_only_enabled, False),
    "cudnn": (lambda: torch.backends.cudnn.deterministic, True),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, False),
    "cudnn_tf32": (lambda: torch.backends.cudnn.allow_tf32, False),
    "precision": (torch.get_float32_matmul_precision, "highest"),
    "fill": (lambda: torch.utils.deterministic.fill_uninitialized_memory, False),
}
"""How a setting of torch is read, and what it is with reproducible sums."""


def flags() -> dict[str, Any]:
    return {name: read() for name, (read, _) in FLAGS.items()}


class StandIn(Device):
    """Stands for a GPU; its tensors are on the CPU. Keeps torch's settings as the device is made the current one."""

    asynchronous = True

    def __init__(self, name: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.seen: dict[str, Any] = {}

    def make_current(self) -> None:
        self.seen = flags() | {"workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A GPU that nobody has used. Settings of torch and of the environment are put back."""
    before = flags()
    stand_in = StandIn(torch.device("cuda", 0))
    monkeypatch.setattr(devices, "count", lambda: 1)
    monkeypatch.setattr(devices, "of", lambda name: stand_in)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield stand_in
    torch.use_deterministic_algorithms(before["algorithms"], warn_only=before["warn_only"])
    torch.backends.cudnn.deterministic = before["cudnn"]
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.backends.cudnn.allow_tf32 = before["cudnn_tf32"]
    torch.set_float32_matmul_precision(before["precision"])
    torch.utils.deterministic.fill_uninitialized_memory = before["fill"]


def test_everything_is_set_before_the_gpu_is_used(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of torch.compile, with which else each worker chooses kernels by its own timings; and not without the
    option.
    """
    monkeypatch.setattr(config, "deterministic", False)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    before = flags()
    kf.init(comm_reproducible=False)
    assert flags() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    reset()
    kf.init(comm_reproducible=True)
    assert gpu.seen == {name: value for name, (_, value) in FLAGS.items()} | {"workspace": ":4096:8"}
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1" and config.deterministic


def test_tf32_that_the_user_asked_for_by_torchs_newer_settings_is_off(gpu: StandIn) -> None:
    """They are inherited by what `cudnn.allow_tf32 = False` resets."""
    if not hasattr(torch.backends, "fp32_precision"):
        return
    operations: Any = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
    torch.backends.fp32_precision = "tf32"
    try:
        kf.init(comm_reproducible=True)
        found = [operation.fp32_precision for operation in operations]
    finally:
        torch.backends.fp32_precision = "none"
    assert found == ["ieee"] * 3


def test_a_workspace_that_the_user_set_stays_and_another_one_or_none_too_late_is_refused(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "started", lambda: True)
    with pytest.raises(DeviceError, match=r"CUBLAS_WORKSPACE_CONFIG is not set, and .* has used a GPU already"):
        kf.init(comm_reproducible=True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(DeviceError, match=r"^CUBLAS_WORKSPACE_CONFIG=:0:0: must be one of :4096:8, :16:8"):
        kf.init(comm_reproducible=True)
    assert not gpu.seen and not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    kf.init(comm_reproducible=True)
    assert gpu.seen["workspace"] == ":16:8" and gpu.seen["algorithms"]
