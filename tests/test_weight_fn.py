"""`weight_fn`: the mean gradient and the loss are weighted, the statistics are those of the samples, bits are kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import Seen, network
from torch import Tensor, nn

import kfuse as kf
from kfuse.data import EpochSampler
from kfuse.session import reset
from kfuse.statistics.noise_scale import moments

COUNT, LENGTH, MICRO = 48, 5, 6


def sentences() -> dict[str, Tensor]:
    """Sequences of 1 to 5 tokens, padded; sorted by length, so that micro-batches' numbers of tokens differ much."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(COUNT, LENGTH, 4, generator=generator)
    y = torch.randint(0, 3, (COUNT, LENGTH), generator=generator)
    lengths = 1 + torch.arange(COUNT) * LENGTH // COUNT
    return {"x": x, "y": y, "mask": (torch.arange(LENGTH) < lengths[:, None]).float()}


def tokens(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


WEIGHTS: dict[str, Any] = {"tokens": tokens, "thrice the samples": lambda batch: 3.0 * len(batch["x"])}


def loss_of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    each = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
    mask = batch["mask"].to(each.dtype).flatten()
    return (each * mask).sum() / mask.sum()


def fit(weigh: str | None = "tokens", options: Any = None, **arguments: Any) -> tuple[Any, list[Tensor], list[Any]]:
    """Returns the summary, the parameters, and of each step some signals. weigh: one of `WEIGHTS`."""
    reset()
    kf.init(**options or {})
    model, seen = network(), Seen()
    arguments = {"batch_size": COUNT, "micro_batch": MICRO, "epochs": 3, "heldout": sentences(), **arguments}
    weight_fn = WEIGHTS[weigh] if weigh else None
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    summary = kf.fit(model, sentences(), opt, seen, step_fn=loss_of_tokens, weight_fn=weight_fn, **arguments)
    names = ("samples", "loss", "grad_variance", "grad_sq", "grad_norm", "noise_scale", "batch_size")
    signals = [tuple(getattr(s, name) for name in names) for s in seen.signals]
    return summary, [p.detach() for p in model.parameters()], signals


def by_hand() -> tuple[list[Tensor], list[float]]:
    """Full-batch steps in plain torch: the mean over all tokens. Their losses."""
    model = network()
    opt, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        opt.zero_grad()
        loss = loss_of_tokens(model, sentences())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return [p.detach() for p in model.parameters()], losses


def test_the_mean_is_over_tokens_on_any_number_of_workers() -> None:
    params, losses = by_hand()
    for summary, found, signals in [fit(), *run_workers(2, fit)]:
        for a, b in zip(found, params, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert [s[1] for s in signals] == pytest.approx(losses, rel=1e-5)
        assert [s[0] for s in signals] == [COUNT, 2 * COUNT, 3 * COUNT] and {s[-1] for s in signals} == {COUNT}
        model = network()
        model.load_state_dict(dict(zip(model.state_dict(), found, strict=True)))
        assert summary["heldout_loss"] == pytest.approx(loss_of_tokens(model, sentences()).item(), rel=1e-5)


def test_statistics_are_in_units_of_samples() -> None:
    """Against float64: S in units of tokens, times samples over tokens; G2 = |gbar|^2 - S / B either way."""
    _, _, signals = fit(steps=1)
    order = EpochSampler(COUNT, 0).indices(0, 0, COUNT)
    model, data = network().double(), sentences()
    grads, weights = [], []
    for j in range(0, COUNT, MICRO):
        part = {name: tensor[order[j : j + MICRO]] for name, tensor in data.items()}
        part["x"] = part["x"].double()
        found = torch.autograd.grad(loss_of_tokens(model, part), list(model.parameters()))
        grads.append(torch.cat([grad.flatten() for grad in found]))
        weights.append(tokens(part).item())
    total = sum(weights)
    mean = sum(w / total * g for w, g in zip(weights, grads, strict=True))
    squares = sum(w * float(g @ g) for w, g in zip(weights, grads, strict=True))
    assert isinstance(mean, Tensor) and len(set(weights)) > 3
    of_tokens, grad_sq = moments(squares, float(mean @ mean), total, len(grads))
    assert of_tokens is not None
    assert signals[0][2] == pytest.approx(of_tokens * COUNT / total, rel=1e-4)
    assert signals[0][3] == pytest.approx(grad_sq, rel=1e-3)
    assert signals[0][4] == pytest.approx(math.sqrt(float(mean @ mean)), rel=1e-5)


def test_local_steps_use_the_workers_own_weights() -> None:
    """Equal weights of samples change nothing."""
    plain, weighted = (run_workers(2, fit, weigh, {"comm_sync": "local:4"}) for weigh in (None, "thrice the samples"))
    for (_, expected, _), (_, found, _) in zip(plain, weighted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", [0, math.nan, torch.ones(3)])
def test_a_wrong_weight_is_refused_before_the_first_forward(weight: Any) -> None:
    model = network()
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    with pytest.raises((TypeError, ValueError), match=r"weight_fn returned .*: must be a number"):
        kf.fit(model, sentences(), opt, step_fn=loss_of_tokens, weight_fn=lambda batch: weight)
    with pytest.raises((TypeError, ValueError), match=r"weight_fn returned .*: must be a number"):
        list(next(iter(kf.DataLoader(model, sentences(), opt, weight_fn=lambda batch: weight))))
    with pytest.raises(TypeError, match="weight_fn=7: must be a function"):
        kf.DataLoader(model, sentences(), opt, weight_fn=7)  # type: ignore[arg-type]
