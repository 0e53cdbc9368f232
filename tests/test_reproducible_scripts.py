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
from problems import update
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import chunks


class Augmented(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noise from all three global generators, as people's transforms draw it."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return torch.full((4,), i / self.count) + noise, i % 3


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


class Model(nn.Module):
    """Everything that could depend on who computes what: dropout, running statistics, a layer not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.shift = RunningMean()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 33))
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(33, 3)
        self.rare = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.shift(x)).view(-1, 3, 11)  # eleven values a channel, also for one sample
        out: Tensor = self.last(self.dropout(torch.relu(self.norm(hidden).flatten(1))))
        return out + self.rare(x) if float(x[0, 0].detach()) > 2.5 else out


class Grow(kf.BasePolicy):
    """Decides by the statistics' very bits."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        if signals.step % 3:
            return None
        odd = np.float64(signals.grad_variance or signals.grad_norm).view(np.int64) >> 24 & 1
        return kf.Decision(batch_size=signals.batch_size + 5 * int(1 + odd), lr_scale=0.9 + 0.1 * float(odd))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: kf.FusedAdamW(p, lr=0.01, clip_norm=0.5),
    "sgd": lambda p: kf.FusedSGD(p, lr=0.1, momentum=0.9, clip_norm=0.5),
    "wrapped": lambda p: kf.Optimizer(torch.optim.Adam(p, lr=0.01), clip_norm=0.5),
}


def weigh(batch: Any) -> float:
    return float(1 + batch[1].sum())


def bits(
    kind: str, count: int, settings: dict[str, Any], weighted: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a training with `kf.fit` reports, or nothing with `kf.DataLoader`; and the bits of its state."""
    kf.init(comm_reproducible=True, comm_bucket_mb=0.0008, comm_check_every=1)
    assert torch.get_num_threads() == 1
    model, data = Model(), Augmented(count)
    opt = OPTIMIZERS[kind](model.parameters())
    summary: dict[str, Any] = {}
    if kind != "sgd":
        weight_fn = weigh if weighted else None
        more: dict[str, Any] = {"epochs": 2, "heldout": data, "weight_fn": weight_fn, **settings}
        summary = kf.fit(model, data, opt, Grow(), **more) or {}
        del summary["wall_s"], summary["workers"]
        assert summary["steps"] > 3
    else:
        for step in kf.DataLoader(model, data, opt, policy=Grow(), epochs=2, **settings):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            update(opt)
    return summary, {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "count", "settings", "weighted"),
    [
        ("adamw", 130, {"batch_size": 32, "micro_batch": 4}, False),
        pytest.param("sgd", 131, {"batch_size": 17, "micro_batch": 3}, False, marks=pytest.mark.full),
        ("wrapped", 38, {"batch_size": 4, "micro_batch": 4}, False),
        ("adamw", 300, {"batch_size": 24, "micro_batch": 6, "micro_batch_max": 24}, True),
    ],
    ids=["even", "ragged", "fewer micro-batches than workers", "growing micro-batches, weighted"],
)
def test_state_and_report_have_the_same_bits(kind: str, count: int, settings: dict[str, Any], weighted: bool) -> None:
    """Transforms that draw from torch, numpy and random included, whatever was drawn in the process before.

    All workers are compared after each step: one without a micro-batch, which sends no digest, is no false alarm.
    """
    torch.set_num_threads(2)
    random.seed(7), np.random.seed(8), torch.manual_seed(9)
    alone = bits(kind, count, settings, weighted)
    for workers in (2, 3, 4):
        assert run_workers(workers, bits, kind, count, settings, weighted) == [alone] * workers, f"{workers} workers"


def test_the_users_generators_are_where_they_were() -> None:
    net, drawn = nn.Linear(4, 3), []
    for trains in (False, True):
        torch.manual_seed(1), np.random.seed(2), random.seed(3)
        if trains:
            kf.fit(net, Augmented(), kf.FusedSGD(net.parameters(), lr=0.1))
        drawn.append((torch.rand(3).tolist(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


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
        with opt.micro_batch(samples=4):
            net(torch.randn(4, 4)).square().mean().backward()
        update(opt)
    [said] = [record.getMessage() for record in caplog.records if record.name == "kfuse"]
    assert "the micro-batches of this loop are not planned" in said


def test_a_state_is_loaded_onto_the_receivers_device() -> None:
    """The sender's GPU may have another index here; what was on its host stays on the host."""
    with (
        patch.object(torch, "load", return_value={}) as load,
        patch.object(torch.serialization, "default_restore_location") as restore,
    ):
        chunks.decode(b"", torch.device("cuda", 3))
        place = load.call_args.kwargs["map_location"]
        storage = torch.zeros(1).untyped_storage()
        assert place(storage, "cpu") is storage and not restore.called
        place(storage, "cuda:0")
    restore.assert_called_once_with(storage, "cuda:3")
