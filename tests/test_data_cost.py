"""What a micro-batch costs before its forward: one seed of torch's generator, one copy of a tensor's rows."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import update
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Subset, TensorDataset

import kfuse as kf
from kfuse.data import as_dataset
from kfuse.data.fetching import fetch, random_key
from kfuse.data.sources import training_data

X, Y = torch.randn(16, 2), torch.randint(0, 3, (16,))


class OwnTensors(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        x, y = super().__getitem__(index)
        return x + random.random(), y


def test_a_forward_draws_from_torchs_generator_by_seed_step_and_micro_batch() -> None:
    model = nn.Linear(2, 1)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    drawn = []
    for each in kf.DataLoader(model, (X, Y), opt, steps=2, batch_size=8, micro_batch=8):
        for x, _ in each:
            drawn.append(float(torch.rand(())))
            model(x).mean().backward()
        update(opt)
    generator = torch.Generator()
    expected = [float(torch.rand((), generator=generator.manual_seed(random_key(0, n, 0)))) for n in range(2)]
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
