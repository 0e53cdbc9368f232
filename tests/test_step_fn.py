"""`step_fn`, its figures, and users' metrics: training as by hand, evaluation the same on any number of workers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import network, problem
from torch import Tensor, nn

import kfuse as kf
from kfuse.observe.run_dir import RunDirectory
from kfuse.train.reporter import Reporter

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
    arguments = {"train_epochs": 2, "batch_size": 64, "batch_micro": 16, "heldout": rows(COUNT), **arguments}
    summary = kf.fit(model, rows(), opt, step_fn=step_fn, **arguments)
    assert summary is not None
    return summary, model


def test_a_step_function_is_the_loop_by_hand_and_its_figures_are_evaluated() -> None:
    summary, ours = train()
    theirs = network()
    opt = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for _ in range(2):
        opt.zero_grad()
        two_losses(theirs, rows())[0].backward()
        opt.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    loss, figures = two_losses(ours, rows(COUNT))
    assert summary["eval_loss"] == pytest.approx(loss.item(), rel=1e-5) and summary["eval_accuracy"] is None
    expected = {"loss": figures["loss"].item(), "size": figures["size"], "hits": figures["hits"].mean().item()}
    assert summary["eval_metrics"] == pytest.approx(expected, rel=1e-5)


def by_metrics(_: int = 0) -> dict[str, float]:
    model = nn.Sequential(network(), nn.Dropout(0.5))
    opt = kf.FusedSGD(model.parameters(), lr=0.0)
    metrics = {
        "each": lambda output, target: F.cross_entropy(output, target, reduction="none"),
        "mean": lambda output, target: F.cross_entropy(output, target).item(),
        "top": lambda output, target: (output.topk(2).indices == target[:, None]).any(1),
    }
    summary = kf.fit(
        model, problem(), opt, heldout=problem(COUNT), metrics=metrics, batch_size=64, batch_micro=16, train_steps=1
    )
    assert summary is not None
    return {**summary["eval_metrics"], "loss": summary["eval_loss"]}


def by_chance(_: int = 0) -> dict[str, float]:
    """A step function that draws random numbers, in evaluation too."""
    summary, _ = train(lambda model, batch: (model(batch["x"]).mean(), {"drawn": torch.rand(())}), train_steps=1)
    return {"drawn": summary["eval_metrics"]["drawn"]}


def test_metrics_are_means_over_the_samples_of_values_and_of_means() -> None:
    metrics = by_metrics()
    x, y = problem(COUNT)
    logits = network()(x)
    loss = F.cross_entropy(logits, y).item()
    top = (logits.topk(2).indices == y[:, None]).any(1).float().mean().item()
    assert metrics == pytest.approx({"each": loss, "mean": loss, "top": top, "loss": loss}, rel=1e-5)


@pytest.mark.parametrize("evaluated", [by_metrics, by_chance])
def test_evaluation_does_not_depend_on_the_number_of_workers(evaluated: Any) -> None:
    for found in run_workers(4, evaluated, 0):  # more workers than chunks
        assert found == evaluated()


def other_figures(extra: int) -> str:
    """Figures of two kinds of held-out batches. On two workers each kind is another's."""

    def step_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss = model(batch["x"]).mean()
        if torch.is_grad_enabled() or torch.equal(batch["x"], rows(COUNT)["x"][:256]):
            return loss, {"a": 1.0}
        return loss, {"b": 100.0, **({"a": 1.0} if extra else {})}

    with pytest.raises(ValueError, match="step_fn returned the figures") as caught:
        train(step_fn, train_steps=1, heldout={name: part[:512] for name, part in rows(COUNT).items()})
    return str(caught.value)


@pytest.mark.parametrize("extra", [0, 1])
def test_held_out_batches_with_other_figures_are_refused_on_one_worker_and_two(extra: int) -> None:
    """Sums are added by place: a figure would get another's values."""
    for said in (other_figures(extra), *run_workers(2, other_figures, extra)):
        assert "of heldout, and" in said and "for another: must be the same" in said


def test_figures_are_in_the_evaluations_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(Reporter, "event", lambda self, step, kind, **fields: events.append({"kind": kind, **fields}))
    train()
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert len(evaluations) == 2 and set(evaluations[0]["metrics"]) == {"loss", "size", "hits"}


def reported(_: int = 0) -> list[dict[str, float]]:
    """Each step's figures, as rank 0 reports them; weighted by twice the samples, which changes nothing."""
    found: list[dict[str, float]] = []
    report = Reporter.step

    def step(self: Reporter, stats: Any, *others: Any) -> None:
        found.append(stats.figures)
        report(self, stats, *others)

    with patch.object(Reporter, "step", step):
        train(batch_micro=10, lr_scaling="none")
        train(batch_micro=10, weight_fn=lambda batch: 2.0 * len(batch["x"]))
    return found


def test_figures_of_a_step_are_means_over_its_samples_on_one_worker_and_two() -> None:
    model = network()
    expected = []
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        opt.zero_grad()
        loss, figures = two_losses(model, rows())
        loss.backward()
        opt.step()
        values = {name: value.mean().item() if isinstance(value, Tensor) else value for name, value in figures.items()}
        expected.append(values)
    for found in (reported(), *run_workers(2, reported, 0)):
        assert len(found) == 4
        for step, figures in enumerate(found):
            assert figures == pytest.approx(expected[step % 2], rel=1e-4)


def test_figures_are_in_the_run_directorys_metrics(tmp_path: Path) -> None:
    record = {"step": 0, "loss": 1.0, "figures": {"kl": 0.5, "size": math.nan}}
    run = RunDirectory(tmp_path, tensorboard=True)
    run.metrics(record)
    run.metrics({"step": 1, "loss": 1.0})
    run.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["figures"] == {"kl": 0.5, "size": None} and "figures" not in second


def vector(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def detached(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).mean().detach()


def unnamed(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).mean(), 0.5


def changing(model: nn.Module, batch: Any) -> Any:
    model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
    return model(batch["x"]).mean(), {"b" if model.calls == 3 else "a": 1}


def seventeen(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).mean(), {f"f{i}": i for i in range(17)}


def words(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"]).mean(), {"a": "much"}


@pytest.mark.parametrize(
    ("step_fn", "message"),
    [
        (lambda model, batch: None, "step_fn returned NoneType: must return the mean loss, a scalar tensor"),
        (vector, r"step_fn returned a loss of shape \[16\]: must be its mean"),
        (detached, "step_fn returned a loss without a gradient"),
        (changing, r"step_fn returned the figures \['b'\], and \['a'\] before"),
        (seventeen, "step_fn returned 17 figures: must be at most 16"),
        (words, "step_fn's figure 'a' is a str: must be a number"),
        (unnamed, r"step_fn returned \(loss, float\): must be"),
    ],
)
def test_a_step_function_without_a_loss_is_refused_before_an_update(step_fn: Any, message: str) -> None:
    model = network()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        opt = kf.FusedSGD(model.parameters(), lr=0.5)
        kf.fit(model, rows(), opt, step_fn=step_fn, batch_size=64, batch_micro=16)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def broken(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("logits")


def one_score(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_fn": F.cross_entropy}, "loss_fn= and step_fn=: pass one of them"),
        ({"train_target_accuracy": 0.9}, r"train_target_accuracy=0\.9: must be None with step_fn="),
        ({"metrics": {"top": broken}}, r"metrics\['top'\] with step_fn="),
        (
            {"step_fn": None, "train_target_accuracy": 0.9, "loss_fn": one_score},
            r"target_accuracy=0\.9: the accuracy is unk",
        ),
        ({"step_fn": None, "metrics": {"top": broken}, "heldout": None}, r"metrics\['top'\]: pass heldout="),
        ({"step_fn": None, "metrics": {"top": broken}}, r"metrics\['top'\] raised KeyError: 'logits'"),
        ({"step_fn": None, "metrics": {"top": lambda o, t: o}}, r"metrics\['top'\] is of shape \[64, 3\] for 64"),
        ({"step_fn": lambda m, b: (m(b["x"]).mean(), {"a": b["x"]})}, "step_fn's figure 'a' is of shape"),
    ],
)
def test_wrong_metrics_are_named(arguments: dict[str, Any], message: str) -> None:
    model = network()
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    arguments = {"step_fn": two_losses, "heldout": problem(), **arguments}
    data: Any = problem()
    if arguments.get("loss_fn") is one_score:
        data = arguments["heldout"] = (data[0], data[1].float())
    if arguments["step_fn"] is not None:
        data = arguments["heldout"] = rows()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as caught:
        kf.fit(model, data, opt, batch_size=64, **arguments)
    assert "\n" not in str(caught.value)
