"""comm.reproducible=true on a GPU: what is set, when, what is refused, and that a CPU run sets nothing.

A device that says it is asynchronous stands for the GPU: torch's settings are process-wide and need none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import kfuse as kf
from kfuse import determinism
from kfuse.comm import devices
from kfuse.comm.devices import Device, DeviceError

FLAGS = {
    "algorithms": torch.are_deterministic_algorithms_enabled,
    "warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn": lambda: torch.backends.cudnn.deterministic,
    "benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "precision": torch.get_float32_matmul_precision,
    "fill": lambda: torch.utils.deterministic.fill_uninitialized_memory,
}
ON = {
    "algorithms": True,
    "warn_only": False,
    "cudnn": True,
    "benchmark": False,
    "cudnn_tf32": False,
    "precision": "highest",
    "fill": False,
}


def flags() -> dict[str, Any]:
    return {name: read() for name, read in FLAGS.items()}


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


def test_everything_is_set_before_the_gpu_is_used(gpu: StandIn) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    kf.init(kf.CommOptions(reproducible=True))
    assert gpu.seen == ON | {"workspace": ":4096:8"}


def test_tf32_that_the_user_asked_for_by_torchs_newer_settings_is_off(gpu: StandIn) -> None:
    """They are inherited by what `cudnn.allow_tf32 = False` resets."""
    if not hasattr(torch.backends, "fp32_precision"):
        return
    operations: Any = {"matmul": torch.backends.cuda.matmul, "conv": torch.backends.cudnn.conv}
    operations["rnn"] = torch.backends.cudnn.rnn
    torch.backends.fp32_precision = "tf32"
    try:
        kf.init(kf.CommOptions(reproducible=True))
        found = {name: operation.fp32_precision for name, operation in operations.items()}
    finally:
        torch.backends.fp32_precision = "none"
    assert found == dict.fromkeys(operations, "ieee")


@pytest.mark.parametrize("imported", [False, True])
def test_torch_compile_measures_no_kernels(imported: bool, gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each worker chooses by its own timings, and their bits differ."""
    config = SimpleNamespace(deterministic=False)
    if imported:
        monkeypatch.setitem(sys.modules, "torch._inductor.config", config)  # type: ignore[arg-type]
    else:
        monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    kf.init(kf.CommOptions(reproducible=True))
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1" and config.deterministic == imported


def test_without_the_option_nothing_is_set(gpu: StandIn) -> None:
    before = flags()
    kf.init()
    assert flags() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_on_the_cpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(devices, "count", lambda: 0)
    before = flags()
    kf.init(kf.CommOptions(reproducible=True))
    assert flags() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("given", [":4096:8", ":16:8"])
def test_a_workspace_that_the_user_set_stays(given: str, gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    monkeypatch.setattr(devices, "started", lambda: True)
    kf.init(kf.CommOptions(reproducible=True))
    assert gpu.seen["workspace"] == given and gpu.seen["algorithms"]


def test_too_late_is_refused_in_one_line(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "started", lambda: True)
    with pytest.raises(DeviceError, match=r"CUBLAS_WORKSPACE_CONFIG is not set, and .* has used a GPU already") as told:
        kf.init(kf.CommOptions(reproducible=True))
    assert "\n" not in str(told.value) and not gpu.seen and not torch.are_deterministic_algorithms_enabled()


def test_another_workspace_is_refused(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(DeviceError, match=r"^CUBLAS_WORKSPACE_CONFIG=:0:0: must be one of :4096:8, :16:8"):
        kf.init(kf.CommOptions(reproducible=True))


def test_a_refused_operation_is_named_in_one_line(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own text is four lines long; that of `Context::alertNotDeterministic`."""
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as raised:
        torch._C._set_deterministic_algorithms(True)
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    line = determinism.refused_operation(raised.value)
    assert line is not None and "the operation put_ has no deterministic algorithm" in line and "\n" not in line
    assert determinism.refused_operation(RuntimeError("out of memory")) is None
    assert determinism.refused_operation(ValueError(str(raised.value))) is None


class Scatters(nn.Module):
    """Uses an operation that torch refuses on the CPU too: its deterministic mode asks for accumulate=True."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        return self.layer(x)


def test_fit_ends_with_that_line(gpu: StandIn) -> None:
    torch.use_deterministic_algorithms(True)
    net = Scatters()
    opt = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"^comm\.reproducible=true: the operation put_ has no deterministic"):
        kf.fit(net, (torch.randn(8, 4), torch.randint(0, 3, (8,))), opt, batch_size=4)


@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt"])
def test_the_built_in_models_use_no_operation_that_is_refused(model: str, gpu: StandIn) -> None:
    """As far as the CPU can tell: torch's deterministic mode refuses more on a GPU. docs/reproducibility.md says which
    operations of these models are which there."""
    from kfuse.models import GPT, MLP, ConvNet
    from kfuse.train.loss import default_loss

    torch.use_deterministic_algorithms(True)
    tokens = torch.randint(0, 11, (2, 8))
    image = torch.randn(2, 1, 8, 8)
    net, x, y = {
        "mlp": lambda: (MLP((1, 8, 8), 3), image, torch.tensor([0, 2])),
        "convnet": lambda: (ConvNet((1, 8, 8), 3, width=4), image, torch.tensor([0, 2])),
        "gpt": lambda: (GPT(11, 8, layers=1, heads=2, width=8), tokens, tokens),
    }[model]()
    loss = default_loss(net(x), y)
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())
