"""Sharded state on a recorded device: each fused optimizer, and a loss scale. The host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from gpu.steps import OPTIMIZERS, job

FUSED = [name for name in OPTIMIZERS if name in ("adamw", "sgd", "lamb")]


@pytest.mark.parametrize("width", [10, 2100], ids=["shards of the last rank alone", "shards of all"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_each_optimizer(optimizer: str, width: int) -> None:
    with job(OPTIMIZERS[optimizer], 3, state="sharded", schedule="all_to_all", width=width, lag=2) as it:
        for _ in range(3):
            it.bare_step()
        it.step()
        it.planned_step([range(0, 3), range(3, 5), range(5, 6)])
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_loss_scale(optimizer: str, clip_norm: float | None) -> None:
    """GradScaler's question is answered on the device."""
    with job(OPTIMIZERS[optimizer], 2, state="sharded", schedule="all_to_all", width=2100, lag=5) as it:
        it.opt.set_clip_norm(clip_norm)
        scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
        for _ in range(3):
            it.scaled_step(scaler)
        assert it.recorder.host_waits == []
