"""What a micro-batch costs before its forward: no seed where nothing could draw, one copy of a tensor's rows."""

from __future__ import annotations

import random
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import update
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import kfuse as kf
from kfuse.data import as_dataset
from kfuse.data.fetching import fetch
from kfuse.data.sources import training_data
from kfuse.policies import ComposePolicy
from kfuse.train import step

X, Y = torch.randn(16, 2), torch.randint(0, 3, (16,))


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class Policy(kf.BasePolicy):
    pass


class OwnSGD(torch.optim.SGD):
    pass


class OwnTensors(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = super().__getitem__(index)
        return x + random.random(), y


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda *_: None)
    return model


def with_gradient_hook(model: nn.Linear) -> nn.Module:
    model.weight.register_hook(lambda grad: grad)
    return model


def with_other_forward(model: nn.Linear) -> nn.Module:
    model.forward = lambda x: nn.functional.linear(nn.functional.dropout(x), model.weight)  # type: ignore[method-assign]
    return model


def seeds_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch, own: type | None = None, **given: Any) -> int:
    """Trains for two steps of two micro-batches; returns how many forwards were seeded."""
    seeds: list[int] = []
    monkeypatch.setattr(step, "seed_forward", lambda device, key: seeds.append(key))
    parameters = [*model.parameters()] or [nn.Parameter(torch.zeros(1))]
    opt = kf.FusedSGD(parameters, lr=0.1) if own is None else kf.Optimizer(own(parameters, lr=0.1))
    if scheduled := given.pop("scheduled", None):
        given["scheduler"] = scheduled(opt)
    kf.fit(model, given.pop("data", (X, Y)), opt, train_steps=2, batch_size=8, batch_micro=4, **given)
    return len(seeds)


PLAIN: dict[str, dict[str, Any]] = {
    "layers": {
        "model": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), kf.nn.LayerNorm(4), nn.Linear(4, 3))
    },
    "torch's optimizer": {"own": torch.optim.AdamW},
    "a loss of torch's": {"loss_fn": nn.CrossEntropyLoss()},
    "kfuse's policies": {"hook": kf.Hook(ComposePolicy(kf.GNSPolicy(), kf.NoPolicy()))},
    "held-out data": {"heldout": (X, Y), "metrics": {"m": lambda output, target: output.mean()}},
    "part of a TensorDataset": {"data": DataLoader(random_split(TensorDataset(X, Y), [12, 4])[0], 8, shuffle=True)},
}
DRAWING: dict[str, dict[str, Any]] = {
    "dropout": {"model": nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1))},
    "a layer that draws": {"model": nn.Sequential(nn.Linear(2, 3), nn.RReLU())},
    "own layer": {"model": Noisy(2, 3)},
    "a hook": {"model": nn.Sequential(hooked(nn.Linear(2, 3)))},
    "a gradient's hook": {"model": with_gradient_hook(nn.Linear(2, 3))},
    "own forward": {"model": with_other_forward(nn.Linear(2, 3))},
    "own loss": {"loss_fn": lambda output, target: output.mean()},
    "own loss, named as torch's": {"loss_fn": wraps(nn.functional.cross_entropy)(lambda output, target: output.mean())},
    "own step": {"step_fn": lambda model, batch: model(batch[0]).mean()},
    "own weight": {"weight_fn": lambda batch: 1.0},
    "own policy": {"hook": kf.Hook(Policy())},
    "own policy, as a part": {"hook": kf.Hook(ComposePolicy(kf.GNSPolicy(), Policy()))},
    "own optimizer": {"own": OwnSGD},
    "a scheduler": {"scheduled": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)},
    "own data": {"data": list(zip(X, Y, strict=True))},
    "own data of tensors": {"data": OwnTensors(X, Y)},
}


@pytest.mark.parametrize(("case", "seeded"), [*((name, 0) for name in PLAIN), *((name, 4) for name in DRAWING)])
def test_a_forward_is_seeded_where_something_could_draw(
    case: str, seeded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"model": nn.Linear(2, 3), **(PLAIN | DRAWING)[case]}
    assert seeds_of(given.pop("model"), monkeypatch, **given) == seeded


def test_a_loop_of_the_users_own_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    drawn = []
    for each in kf.DataLoader((X, Y), model, opt, train_steps=2, batch_size=8, batch_micro=8):
        for x, _ in each:
            drawn.append(float(torch.rand(())))
            model(x).mean().backward()
        update(opt)
    generator = torch.Generator()
    expected = [float(torch.rand((), generator=generator.manual_seed(step.random_key(0, n, 0)))) for n in range(2)]
    assert drawn == expected


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("data", [TensorDataset(X, Y), Subset(TensorDataset(X, Y), [5, -1, 7, 2]), {"x": X, "y": Y}])
def test_tensors_are_fetched_by_one_operator_each(data: Any) -> None:
    dataset, state = training_data(data).data, torch.get_rng_state()
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and str(Path(kf.__file__).parent) in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with Operators() as operators:
        sys.setprofile(count)
        batch = fetch(dataset, np.array([1, 3, 1]), seed=0, epoch=0)
        sys.setprofile(None)
    assert operators.names == ["lift_fresh", "index_select", "index_select"]  # the first one is from_numpy's
    assert len(calls) <= 5
    assert torch.equal(state, torch.get_rng_state())
    rows = [-1, 2, -1] if isinstance(data, Subset) else [1, 3, 1]
    got = batch.values() if isinstance(data, dict) else batch
    assert all(torch.equal(part, whole[rows]) for part, whole in zip(got, (X, Y), strict=True))


def test_what_changes_samples_is_asked_for_each() -> None:
    """A class derived from TensorDataset may do so, and a part of one has a class of its own as well."""
    plain = fetch(as_dataset(TensorDataset(X, Y)), np.array([2]), seed=0, epoch=0)[0]
    for data in (OwnTensors(X, Y), Subset(OwnTensors(X, Y), range(16)), DataLoader(OwnTensors(X, Y), 4, shuffle=True)):
        assert not torch.equal(fetch(training_data(data).data, np.array([2]), seed=0, epoch=0)[0], plain)
