"""Ordinary training scripts give with kfuse what they give with plain torch, on one worker and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kfuse as kf
from kfuse.session import reset


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    reset()
    yield
    reset()


def dataset(count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def train(how: str, model: nn.Module, opt: kf.Optimizer | kf.FusedAdamW) -> dict[str, torch.Tensor]:
    if how == "fit":
        kf.fit(model, dataset(), opt, batch_size=8, micro_batch=2)
    else:
        for step in kf.DataLoader(dataset(), model, opt, batch_size=8, micro_batch=2):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["fit", "loader"])
@pytest.mark.parametrize("new_optimizer", [False, True])
def test_gradients_that_are_left_over_do_not_enter_the_next_run(how: str, new_optimizer: bool) -> None:
    """Those of a loop over kf.DataLoader that was interrupted between backward and opt.step()."""
    model = network(0)
    expected = train(how, model, kf.FusedAdamW(model.parameters(), lr=0.01))
    model = network(0)
    start, opt = (
        {name: value.clone() for name, value in model.state_dict().items()},
        kf.FusedAdamW(model.parameters(), lr=0.01),
    )
    for step in kf.DataLoader(dataset(), model, opt, batch_size=8, micro_batch=2):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        break
    assert model[0].weight.grad is not None  # type: ignore[union-attr]
    model.load_state_dict(start)
    if new_optimizer:
        opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    found = train(how, model, opt)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
