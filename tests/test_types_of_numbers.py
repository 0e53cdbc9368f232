"""Types of numbers: torch's global default changes nothing, and float64 parameters are trained in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import network, problem
from torch import Tensor, nn

import kfuse as kf
from kfuse.session import reset

MAKE: dict[str, Any] = {
    "adamw": lambda net: kf.FusedAdamW(net.parameters(), lr=0.01, clip_norm=1.0),
    "lamb": lambda net: kf.FusedLAMB(net.parameters(), lr=0.01),
    "muon": lambda net: kf.FusedMuon(net, lr=0.01),
    "wrapped": lambda net: kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
}


def trained(kind: str, default: torch.dtype, comm: dict[str, Any]) -> list[Tensor]:
    """Parameters, buffers and optimizer state of a network that was made before the default was set."""
    reset()
    kf.init(**comm)
    net, data = nn.Sequential(nn.BatchNorm1d(4), *network()), problem()
    torch.set_default_dtype(default)
    try:
        opt = MAKE[kind](net)
        kf.fit(net, data, opt, batch_size=16, epochs=2)
    finally:
        torch.set_default_dtype(torch.float32)
    values = [value for state in opt.state_dict()["state"].values() for value in state.values()]
    return [*net.state_dict().values(), *(value for value in values if isinstance(value, Tensor))]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_type_changes_no_bits(kind: str, default: torch.dtype) -> None:
    of_each = [trained(kind, each, {}) for each in (default, torch.float32)]
    assert all(map(torch.equal, *of_each))


@pytest.mark.parametrize(
    ("kind", "comm"),
    [
        ("lamb", {"comm_state": "sharded"}),
        ("muon", {"comm_reproducible": True}),
        ("wrapped", {"comm_sync": "local:2"}),
    ],
    ids=str,
)
def test_the_default_type_changes_no_bits_on_two_workers(kind: str, comm: dict[str, Any]) -> None:
    of_each = [run_workers(2, trained, kind, each, comm) for each in (torch.bfloat16, torch.float32)]
    assert all(map(torch.equal, *(first for first, _ in of_each)))


@pytest.mark.parametrize(
    "comm", [{}, {"comm_reproducible": True}, {"comm_dtype": "bf16"}, {"comm_schedule": "tree"}], ids=str
)
@on_workers(2)
def test_float64_parameters_are_trained_in_float64(comm: dict[str, Any]) -> None:
    """Beside torch's own optimizer on the whole batch."""
    kf.init(**comm)
    net = network().double()
    twin, (x, y) = copy.deepcopy(net), problem()
    opt, plain = (kf.Optimizer(torch.optim.AdamW(net.parameters())), torch.optim.AdamW(twin.parameters()))
    for step in kf.DataLoader(net, (x.double(), y), opt, batch_size=64, epochs=5):
        for a, b in step:
            F.cross_entropy(net(a), b).backward()
        opt.step()
        F.cross_entropy(twin(x.double()), y).backward()
        plain.step()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        opt.zero_grad()
        plain.zero_grad()
    assert opt.stats is not None and opt.stats.grad_variance is not None


def test_what_does_not_train_float64_says_so() -> None:
    with pytest.raises(ValueError, match=r"parameter 0 is torch.float64: kf.FusedSGD updates in fp32: use kf"):
        kf.FusedSGD(network().double().parameters())
    reset()
    kf.init(comm_sync="local:2")
    with pytest.raises(ValueError, match=r"comm.sync=local:2: must be ssgd with parameters of float64"):
        kf.Optimizer(torch.optim.SGD(network().double().parameters()))
