"""Losses, `step_fn`, its figures, users' metrics: training as by hand; evaluation the same on any number of workers."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import read_lines
from problems import network, problem
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.data import TensorData
from kfuse.train.evaluation import evaluate
from kfuse.train.loss import Objective, default_loss

COUNT = 600  # held-out samples: three chunks, the last one smaller


def rows(count: int = 64) -> dict[str, Tensor]:
    x, y = problem(count)
    return {"x": x, "y": y}


def two_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    logits = model(batch["x"])
    fit, size = F.cross_entropy(logits, batch["y"]), logits.square().mean()
    return fit + 0.1 * size, {"loss": fit, "size": size.item(), "hits": (logits.argmax(1) == batch["y"]).float()}


def train(step_fn: Any = two_losses, **arguments: Any) -> tuple[dict[str, Any], nn.Module]:
    model = network()
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    arguments = {"epochs": 2, "batch_size": 64, "micro_batch": 16, "heldout": rows(COUNT), **arguments}
    summary = kf.fit(model, rows(), opt, step_fn=step_fn, **arguments)
    assert summary is not None
    return summary, model


# -- the default loss -------------------------------------------------------------------------------------------------


def test_default_losses_have_known_values() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0]])
    for dtype in (torch.uint8, torch.int32, torch.int64):
        loss = default_loss(logits, torch.tensor([1, 0, 0], dtype=dtype))
        assert loss.item() == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 3)
    sequences = default_loss(logits.expand(2, 3, 2), torch.tensor([[1, 0, 0]] * 2))
    assert sequences.item() == pytest.approx(loss.item())
    output, target = torch.randn(5, 2), torch.randn(5, 2, dtype=torch.float64)
    squared = default_loss(output, target)
    assert squared.dtype == torch.float32 and squared.item() == pytest.approx(((output - target) ** 2).mean().item())
    low = torch.randn(8, 100).bfloat16().requires_grad_()
    assert torch.equal(default_loss(low, torch.arange(8)), F.cross_entropy(low.float(), torch.arange(8)))


@pytest.mark.parametrize(
    ("output", "target", "message"),
    [
        (torch.zeros(4, 1), torch.zeros(4), "needs equal shapes"),
        (torch.zeros(4, 10), torch.zeros(5, dtype=torch.int64), "one dimension of classes"),
        (torch.zeros(4, 10), torch.zeros(4, 6, dtype=torch.int64), "one dimension of classes"),
        (torch.zeros(4, 10), torch.zeros(4, dtype=torch.bool), "torch.bool"),
    ],
)
def test_nothing_is_broadcast(output: Tensor, target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_loss(output, target)


# -- evaluation -------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Returns a part of its input."""

    def __init__(self, pick: Any) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor) -> Any:
        return self.pick(x)


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        (lambda x: x[:, 0], None),  # one score a sample: no argmax over the batch
        (lambda x: x[:, :1], None),  # one column: its argmax is always 0
        (lambda x: {"scores": x[:, 0]}, None),
        (lambda x: torch.stack([-x[:, 0], x[:, 0]], 1), 1.0),
        (lambda x: torch.stack([-x[:, 0], x[:, 0].clamp(max=0.5)], 1).roll(1, 1), 0.0),
    ],
)
def test_accuracy_needs_a_score_for_each_class(pick: Any, expected: float | None) -> None:
    target = torch.arange(300) % 2
    x = (2.0 * target - 1.0).unsqueeze(1)  # a perfect classifier's scores

    def loss(output: Any, target: Tensor) -> Tensor:
        output = output["scores"] if isinstance(output, dict) else output
        return output.sum() * 0 + target.float().mean()

    result = evaluate(Fixed(pick), TensorData((x, target)), Objective(loss), Group())
    assert (result.accuracy, result.loss) == (expected, pytest.approx(0.5))


def test_accuracy_of_sequences_counts_tokens() -> None:
    target = torch.arange(40).view(10, 4) % 3
    scores = F.one_hot(target, 3).float()
    scores[:5, 0] = torch.tensor([0.0, 0.0, 5.0]).where(target[:5, :1] != 2, torch.tensor([5.0, 0.0, 0.0]))
    model = Fixed(lambda index: scores[index])
    assert evaluate(model, TensorData((torch.arange(10), target)), Objective(), Group()).accuracy == pytest.approx(
        35 / 40
    )


def by_metrics() -> dict[str, float]:
    model = nn.Sequential(network(), nn.Dropout(0.5))
    opt = kf.FusedSGD(model.parameters(), lr=0.0)
    metrics = {
        "each": lambda output, target: F.cross_entropy(output, target, reduction="none"),
        "mean": lambda output, target: F.cross_entropy(output, target).item(),
        "top": lambda output, target: (output.topk(2).indices == target[:, None]).any(1),
        "drawn": lambda output, target: torch.rand(()),
    }
    summary = kf.fit(model, problem(), opt, heldout=problem(COUNT), metrics=metrics, batch_size=64, steps=1)
    assert summary is not None
    return {**summary["heldout_metrics"], "loss": summary["heldout_loss"]}


def test_metrics_are_means_over_the_samples_of_values_and_of_means() -> None:
    metrics = by_metrics()
    assert 0 < metrics.pop("drawn") < 1
    x, y = problem(COUNT)
    logits = network()(x)
    loss = F.cross_entropy(logits, y).item()
    top = (logits.topk(2).indices == y[:, None]).any(1).float().mean().item()
    assert metrics == pytest.approx({"each": loss, "mean": loss, "top": top, "loss": loss}, rel=1e-5)


def test_evaluation_does_not_depend_on_the_number_of_workers() -> None:
    for found in run_workers(4, by_metrics):  # more workers than chunks
        assert found == by_metrics()


# -- a step function --------------------------------------------------------------------------------------------------


def by_hand() -> tuple[nn.Module, list[dict[str, float]]]:
    """The model after two steps of plain torch, and their figures."""
    model, figures = network(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        opt.zero_grad()
        loss, found = two_losses(model, rows())
        loss.backward()
        opt.step()
        figures.append({k: v.mean().item() if isinstance(v, Tensor) else v for k, v in found.items()})
    return model, figures


def test_a_step_function_is_the_loop_by_hand_and_its_figures_are_evaluated(tmp_path: Path) -> None:
    summary, ours = train(run_dir=tmp_path)
    torch.testing.assert_close(ours.state_dict(), by_hand()[0].state_dict(), rtol=1e-5, atol=1e-6)
    loss, figures = two_losses(ours, rows(COUNT))
    assert summary["heldout_loss"] == pytest.approx(loss.item(), rel=1e-5) and summary["heldout_accuracy"] is None
    expected = {"loss": figures["loss"].item(), "size": figures["size"], "hits": figures["hits"].mean().item()}
    assert summary["heldout_metrics"] == pytest.approx(expected, rel=1e-5)
    evaluations = [event for event in read_lines(tmp_path / "events.jsonl") if event["kind"] == "evaluation"]
    assert len(evaluations) == 2 and set(evaluations[0]["metrics"]) == {"loss", "size", "hits"}


def reported(weighted: bool) -> list[dict[str, float]]:
    """Each step's figures, as rank 0 reports them; weighted by twice the samples, which changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        weigh = (lambda batch: 2.0 * len(batch["x"])) if weighted else None
        train(micro_batch=10, weight_fn=weigh, run_dir=folder)
        return [step["figures"] for step in read_lines(Path(folder, "metrics.jsonl"))] if kf.rank() == 0 else []


@pytest.mark.parametrize("weighted", [False, True])
def test_figures_of_a_step_are_means_over_its_samples_on_one_worker_and_two(weighted: bool) -> None:
    for found in (reported(weighted), run_workers(2, reported, weighted)[0]):
        for ours, expected in zip(found, by_hand()[1], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4)


def changing(model: nn.Module, batch: Any) -> Any:
    model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
    return model(batch["x"]).mean(), {"b" if model.calls == 3 else "a": 1}


def mean(figures: Any) -> Any:
    return lambda model, batch: (model(batch["x"]).mean(), figures)


@pytest.mark.parametrize(
    ("step_fn", "message"),
    [
        (lambda model, batch: None, "step_fn returned NoneType: must return the mean loss, a scalar tensor"),
        (lambda model, batch: model(batch["x"]), r"step_fn returned a loss of shape \[16, 3\]: must be its mean"),
        (changing, r"step_fn returned the figures \['b'\], and \['a'\] before"),
        (mean({f"f{i}": i for i in range(17)}), "step_fn returned 17 figures: must be at most 16"),
        (mean({1: 2.0}), "step_fn's figure 1: its name must be a text"),
    ],
)
def test_a_step_function_without_a_loss_is_refused_before_an_update(step_fn: Any, message: str) -> None:
    model = network()
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    with pytest.raises((TypeError, ValueError), match=message):
        kf.fit(model, rows(), opt, step_fn=step_fn, batch_size=64, micro_batch=16)
    assert all(torch.equal(a, b) for a, b in zip(network().parameters(), model.parameters(), strict=True))


def one_score(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], target.float())


TOP = {"top": lambda output, target: output}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step_fn": two_losses, "loss_fn": one_score}, "loss_fn= and step_fn=: pass one of them"),
        ({"step_fn": two_losses, "train_target_accuracy": 0.9}, r"train_target_accuracy=0\.9: must be None with step_"),
        ({"step_fn": two_losses, "metrics": TOP}, "metrics=top: must be None with step_fn="),
        ({"step_fn": mean({"a": torch.zeros(63)}), "heldout": rows()}, "heldout's 'a' is of shape"),
        ({"train_target_accuracy": 0.9, "loss_fn": one_score}, r"target_accuracy=0\.9: the accuracy is unk"),
        ({"metrics": TOP, "heldout": None}, "metrics=top: must be None with heldout="),
        ({"metrics": TOP}, r"heldout's 'top' is of shape \[64, 3\] for 64"),
        ({"metrics": {"top": 3}}, r"metrics\['top'\]=3: must be a function"),
    ],
)
def test_wrong_metrics_are_named(arguments: dict[str, Any], message: str) -> None:
    model = network()
    x, y = problem()
    data: Any = rows() if "step_fn" in arguments else (x, y.float() if "loss_fn" in arguments else y)
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        kf.fit(model, data, opt, **{"heldout": data, "batch_size": 64, **arguments})
