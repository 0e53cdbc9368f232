"""What a GPU decides for itself, since the host does not wait to hear it, is what the host decides on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.order import RecordedDevice
from gpu.stand_in import StandInProcessGroup
from gpu.steps import OPTIMIZERS, Job, job
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import kfuse as kf

pytestmark = pytest.mark.full

SOME = {
    **{name: make for name, make in OPTIMIZERS.items() if name != "wrapped adamw"},
    "sgd without momentum": lambda params: kf.FusedSGD(params, lr=0.1),
    "wrapped amsgrad": lambda params: kf.Optimizer(torch.optim.Adam(params, amsgrad=True, fused=True)),
}


def trained(
    optimizer: str, act: Callable[[Job], Any], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], dict[int, dict[str, Tensor]]]:
    monkeypatch.setattr(RecordedDevice, "asynchronous", asynchronous)
    size = 1 if optimizer == "muon" else 2  # the stand-in brings no other worker's factors
    with job(SOME[optimizer], size) as it:
        act(it)
        if not asynchronous:
            it.recorder.errors.clear()  # the CPU's way of reading memory
    return [p.detach().clone() for p in it.model.parameters()], it.opt.state_dict()["state"]


def same(optimizer: str, act: Callable[[Job], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last bits, since the CPU's updates of whole buckets and of single parameters round differently.

    A parameter that was never updated may have a state of zeros where the host did not ask.
    """
    ours, state = trained(optimizer, act, True, monkeypatch)
    theirs, expected = trained(optimizer, act, False, monkeypatch)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    for key, tensors in state.items():
        for name, value in tensors.items():
            other = expected[key][name] if key in expected else torch.zeros_like(value)
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-8)
    assert expected.keys() <= state.keys()


def bare_steps(it: Job) -> None:
    for _ in range(5):
        it.bare_step()


def steps_that_are_left_out(it: Job) -> None:
    it.opt.skip_nonfinite = True
    for k in range(5):
        it.bare_step(factor=float("inf") if k in (0, 3) else 1.0)


def scaled_steps_with_overflows(it: Job) -> None:
    it.opt.set_clip_norm(0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # type: ignore[attr-defined]
    for k in range(5):
        it.scaled_step(scaler, factor=float("inf") if k in (0, 3) else 1.0)


def of_another_worker_alone(it: Job) -> None:
    """Some parameters get gradients from another worker only, which contributes to each element, and to each count."""
    plain = StandInProcessGroup.allreduce

    def allreduce(group: Any, tensor: Tensor, *op: Any) -> Any:
        with _disable_current_modes():
            tensor.add_(0.25)
        return plain(group, tensor, *op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInProcessGroup, "allreduce", allreduce)
        bare_steps(it)


@pytest.mark.parametrize("optimizer", SOME)
def test_steps_and_parameters_that_are_left_out(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for act in (bare_steps, steps_that_are_left_out, scaled_steps_with_overflows, of_another_worker_alone):
        same(optimizer, act, monkeypatch)
