"""With comm.reproducible a script has the same bits for any number of workers, or the cause is named."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn

import kfuse as kf
from kfuse.train import state as training_state


class Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noise from all three global generators, as people's transforms draw it."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return torch.full((4,), i / 48) + noise, i % 3


class RunningMean(nn.Module):
    """A buffer that is not BatchNorm's, and a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.linspace(0, 1, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean + self.table


def networks(kind: str) -> nn.Module:
    torch.manual_seed(3)
    match kind:
        case "running_mean":
            return nn.Sequential(RunningMean(), nn.Linear(4, 3))
        case "spectral_norm":
            return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))
        case "batch_norm":
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    raise ValueError(kind)


def bits(kind: str, how: str) -> dict[str, list[float]]:
    kf.init(comm_reproducible=True)
    assert torch.get_num_threads() == 1
    net = networks(kind)
    opt = kf.FusedAdamW(net.parameters(), lr=0.05)
    if how == "fit":
        kf.fit(net, Augmented(), opt, batch_size=12, batch_micro=3, train_epochs=3)
    else:
        for step in kf.DataLoader(Augmented(), net, opt, batch_size=12, batch_micro=3, train_epochs=3):
            for x, y in step:
                F.cross_entropy(net(x), y).backward()
            opt.step()
            opt.zero_grad()
    return {name: value.double().flatten().tolist() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "how"), [("running_mean", "fit"), ("spectral_norm", "loader"), ("batch_norm", "loader")]
)
def test_parameters_and_buffers_have_the_same_bits(kind: str, how: str) -> None:
    """Transforms that draw from torch, numpy and random included, whatever was drawn in the process before."""
    torch.set_num_threads(2)
    random.seed(7), np.random.seed(8), torch.manual_seed(9)
    alone = bits(kind, how)
    assert run_workers(3, bits, kind, how) == [alone] * 3


def test_the_users_generators_are_where_they_were() -> None:
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    expected = (torch.rand(3).tolist(), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    net = nn.Linear(4, 3)
    torch.manual_seed(1)  # the layer drew too
    kf.fit(net, Augmented(), kf.FusedSGD(net.parameters(), lr=0.1))
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected


def embedding(max_norm: float | None) -> None:
    kf.init()
    net = nn.Sequential(nn.Embedding(10, 4, max_norm=max_norm), nn.Flatten(), nn.Linear(8, 3))
    data = (torch.randint(10, (32, 2)), torch.randint(3, (32,)))
    kf.fit(net, data, kf.FusedSGD(net.parameters(), lr=0.1), batch_size=8)


def test_an_embedding_that_renormalises_in_forward_is_refused_for_several_workers() -> None:
    run_workers(2, embedding, None)
    with pytest.raises(AssertionError, match=r"module 0: Embedding\(max_norm=1.0\) changes its weights in forward"):
        run_workers(2, embedding, 1.0)
    embedding(1.0)  # one worker does it as torch does


def test_a_loop_that_plans_nothing_is_warned_of(caplog: Any) -> None:
    kf.init(comm_reproducible=True)
    net = nn.Linear(4, 3)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for j in range(2):
            with opt.micro_batch(samples=4, last=j == 1):
                net(torch.randn(4, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    [said] = [record.getMessage() for record in caplog.records if record.name == "kfuse"]
    assert "the micro-batches of this loop are not planned" in said


def test_a_state_is_loaded_onto_the_receivers_device() -> None:
    """The sender's GPU may have another index here; what was on its host stays on the host."""
    with (
        patch.object(torch, "load", return_value={}) as load,
        patch.object(torch.serialization, "default_restore_location") as restore,
    ):
        training_state.decode(b"", torch.device("cuda", 3))
        place = load.call_args.kwargs["map_location"]
        storage = torch.zeros(1).untyped_storage()
        assert place(storage, "cpu") is storage and not restore.called
        place(storage, "cuda:0")
    restore.assert_called_once_with(storage, "cuda:3")
