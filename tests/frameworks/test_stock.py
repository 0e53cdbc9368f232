"""Stock configurations of TRL, Trainer, Accelerate and Lightning: same parameters, and figures of plain gradients."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import stock_fit
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from elastic_job import run_script
from limits import limits
from stock import ACCUMULATE, BY_SAMPLES, LOSSES, MAKERS, MICRO, MORE_BY_FIT, STEPS, Loss, Row, of_tokens
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback

from kfuse.integrations import accelerate
from kfuse.integrations.lightning import NoiseScale
from kfuse.integrations.transformers import attach, fit
from kfuse.statistics.step_stats import StepStats


@dataclass
class Step:
    batches: list[Row] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    """That require gradients, before the update; `gradient` is what the optimizer took."""
    gradient: Tensor | None = None
    stats: StepStats | None = None


def trainable(model: Any) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors]).double()


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps what a trainer's steps were made of."""

    def __init__(self, trainer: Trainer) -> None:
        self.steps, self.attached = [Step()], None
        self._training_step = trainer.training_step
        trainer.training_step = self.training_step
        trainer.add_callback(self)

    def training_step(self, model: Any, inputs: Row, *given: Any) -> Tensor:
        self.steps[-1].batches.append(copy.deepcopy(dict(inputs)))
        return self._training_step(model, inputs, *given)

    def on_pre_optimizer_step(self, *given: Any, model: Any, **named: Any) -> None:
        params = trainable(model)
        self.steps[-1].parameters = [param.detach().clone() for param in params]
        self.steps[-1].gradient = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in params])

    def on_step_end(self, *given: Any, **named: Any) -> None:
        if self.attached is not None:
            self.steps[-1].stats = self.attached.monitor.stats
        self.steps.append(Step())


def trained(name: str, folder: Path, monitored: bool, **more: Any) -> tuple[Trainer, list[Step]]:
    trainer = MAKERS[name](folder, **more)
    recorder = Recorder(trainer)
    if monitored:
        recorder.attached = attach(trainer, tokens=name not in BY_SAMPLES)
    trainer.train()
    return trainer, recorder.steps[:-1]


Found = tuple[Sequence[Tensor], Sequence[float]]
"""The gradient of each micro-batch's mean loss, and of how many samples or tokens it is."""


def agree(stats: StepStats | None, found: Found, by_samples: bool = True, rtol: float = 1e-4) -> Tensor:
    """Of a step. By the formulas of kfuse.integrations.measure; returns the mean gradient."""
    gradients, counts = found
    each, b = torch.stack(list(gradients)).double(), torch.tensor(counts).double()
    w = torch.full_like(b, 1 / len(b)) if by_samples else b / b.sum()
    mean, k = w @ each, w.square().sum()
    variance = ((w[:, None] * each).square().sum() - k * mean.square().sum()) / (1 - k)
    assert stats is not None and stats.micro_batches == len(counts)
    if len(counts) > 1:
        np.testing.assert_allclose(stats.grad_variance, float(variance / (w.square() / b).sum()), rtol)
        np.testing.assert_allclose(stats.grad_sq, mean.square().sum() - variance, rtol, rtol * mean.square().sum())
    return mean


def of_step(model: Any, step: Step, loss: Loss) -> Found:
    params, gradients, counts = trainable(model), [], []
    for param, value in zip(params, step.parameters, strict=True):
        param.data.copy_(value)
    for batch in step.batches:
        mean, count = loss(model, batch)
        gradients.append(flat(torch.autograd.grad(mean, params, allow_unused=True, materialize_grads=True)))
        counts.append(float(count))
    return gradients, counts


@pytest.mark.parametrize("name", MAKERS)
def test_a_trainer_trains_to_the_same_bits_and_has_the_figures_of_its_gradients(name: str, tmp_path: Path) -> None:
    if name != "liger":
        return compare(name, tmp_path)
    # A process that runs Triton's kernels without a GPU, from its start on.
    given = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__, tmp_path], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def compare(name: str, folder: Path) -> None:
    trainer, plain = trained(name, folder, monitored=False)
    attached, steps = trained(name, folder, monitored=True)
    assert all(map(torch.equal, attached.model.parameters(), trainer.model.parameters()))
    assert len(steps) == len(plain) == (8 if name == "stopped_early" else STEPS)
    model, rtol = (trainer.model, 2e-2) if trainer.args.bf16 else (trainer.model.double(), 1e-4)
    for step, without in zip(steps, plain, strict=True):
        assert all(map(torch.equal, step.parameters, without.parameters))
        mean = agree(step.stats, of_step(model, step, LOSSES.get(name, of_tokens)), name in BY_SAMPLES, rtol)
        times = len(step.batches) if name == "streamed" else 1  # Trainer adds up T5's means
        assert (step.gradient / times - mean).norm() < rtol * mean.norm()
    assert max(len(step.batches) for step in steps) == ACCUMULATE


@pytest.mark.parametrize("name", ["sft_completions", "dpo"])
def test_means_of_s_and_g2_are_those_of_single_samples(name: str, tmp_path: Path) -> None:
    """Of tokens, and of pairs, at a learning rate of 0."""
    trainer, steps = trained(name, tmp_path, monitored=True, learning_rate=0.0, max_steps=45)
    values = np.array([(step.stats.grad_variance, step.stats.grad_sq) for step in steps])
    rows = [trainer.data_collator([row]) for row in trainer.train_dataset]
    found, counts = of_step(trainer.model.double(), Step(rows, steps[0].parameters), LOSSES.get(name, of_tokens))
    b = torch.tensor(counts).double()
    sums = torch.stack(found) * b[:, None]
    mean = sums.sum(0) / b.sum()
    variance = float((sums - b[:, None] * mean).square().sum()) / (len(b) - 1) / float(b.mean())
    truth = variance, float(mean.square().sum()) - variance / float(b.sum())
    errors = values.std(0, ddof=1) / np.sqrt(len(values))
    assert np.all(np.abs(values.mean(0) - truth) < 5 * errors), (values.mean(0), truth, errors)
    assert errors[0] < 0.1 * truth[0], (truth, errors)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("streamed", "liger")])
def test_fit_trains_as_trainer_and_to_the_same_bits_through_a_kill(name: str, tmp_path: Path) -> None:
    jobs, counts = [], (1, 2) if name in ("sft_lora", "dpo", "stopped_early") else (2,)
    for count in counts:
        words = stock_fit.__file__, name, str(tmp_path / f"out{count}")
        limited = limits(count, 1, count, replace=False, script=True)
        jobs.append(job := run_script(tmp_path / str(count), limited, *words))
        assert job.error is None, job.told()
    losses = losses_of(name, tmp_path / "out")
    struck = jobs[-1]
    for alone in jobs[:-1]:
        assert struck.ledger == alone.ledger
        assert struck.summary["params_sha256"] == alone.summary["params_sha256"]
    assert [event["how"] for event in struck.events if event["kind"] == "failure"] == ["was ended by SIGKILL"]
    tolerance = 5e-3 if name == "sft_packed" else 2e-5
    assert [record["loss"] for record in struck.metrics] == pytest.approx(losses, rel=tolerance)


def losses_of(name: str, folder: Path, by_fit: bool = False) -> list[float]:
    """Of each step, by Trainer or by `fit`."""
    trainer = MAKERS[name](folder, **{"logging_steps": 1, **MORE_BY_FIT.get(name, {})})
    fit(trainer, tokens=True) if by_fit else trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# -- Accelerate and Lightning: linear models, whose micro-batches' gradients the training without kfuse keeps ----------


def gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    return flat(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def windows(gradients: Sequence[Tensor]) -> list[Found]:
    """Of each step."""
    return [(gradients[k : k + ACCUMULATE], [MICRO] * ACCUMULATE) for k in range(0, len(gradients), ACCUMULATE)]


def gan(measured: str | None) -> tuple[list[Tensor], dict[str, list[Any]]]:
    """Returns parameters; and of each model the micro-batches' gradients, or of the measured one the steps' figures."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
    torch.manual_seed(0)
    models = {"generator": torch.nn.Linear(4, 4), "critic": torch.nn.Linear(4, 1)}
    optimizers = {name: torch.optim.Adam(model.parameters(), 1e-2) for name, model in models.items()}
    for name in models:
        models[name], optimizers[name] = accelerator.prepare(models[name], optimizers[name])
    make, judge = models.values()
    loader = accelerator.prepare(DataLoader(torch.randn(40 * ACCUMULATE * MICRO, 4), MICRO))
    found: dict[str, list[Any]] = {name: [] for name in models}
    monitor = None if measured is None else accelerate.attach(accelerator, models[measured])
    for real in loader:
        noise = torch.randn_like(real)
        with accelerator.accumulate(*models.values()):
            for name in ("critic", "generator"):
                judge.requires_grad_(name == "critic")
                fake = make(noise)
                loss = F.softplus(-judge(fake)).mean()
                if name == "critic":
                    loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
                if monitor is None:
                    found[name].append(gradient(loss, models[name]))
                accelerator.backward(loss)
                optimizers[name].step()
                optimizers[name].zero_grad()
                if monitor is not None and measured == name and accelerator.sync_gradients:
                    found[name].append(monitor.stats)
    return [param.detach() for model in models.values() for param in model.parameters()], found


@pytest.mark.parametrize("name", ["generator", "critic"])
def test_a_model_of_a_gan_is_measured(name: str) -> None:
    (parameters, stats), (plain, gradients) = gan(name), gan(None)
    assert all(map(torch.equal, parameters, plain))
    for each, found in zip(stats[name], windows(gradients[name]), strict=True):
        agree(each, found)


def by_lightning(manual: bool, monitored: bool) -> tuple[Tensor, list[Any]]:
    """Returns parameters; and the steps' figures, or the micro-batches' gradients."""
    found, noise = list[Any](), NoiseScale(accumulate=ACCUMULATE if manual else None)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.automatic_optimization = torch.nn.Linear(4, 1), not manual

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            loss = F.mse_loss(self.inner(batch[0]), batch[1])
            if not monitored:
                found.append(gradient(loss, self))
            if not manual:
                return loss
            self.manual_backward(loss / ACCUMULATE)
            if (index + 1) % ACCUMULATE == 0:
                self.clip_gradients(self.optimizers(), 0.1)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

        def on_train_batch_end(self, *given: Any) -> None:
            if monitored and (stats := noise.monitor.stats) is not None and stats not in found:
                found.append(stats)

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            rows = STEPS * ACCUMULATE * MICRO
            return DataLoader(TensorDataset(torch.randn(rows, 4), torch.randn(rows, 1)), MICRO)

    torch.manual_seed(0)
    automatic = {} if manual else {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.1}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[noise] if monitored else [], enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, **automatic,
    )  # fmt: skip
    trainer.fit(module := Module(), datamodule=Data())
    return flat(list(module.parameters())), found


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_clips_and_a_loop_may_be_manual(manual: bool) -> None:
    (parameters, stats), (plain, gradients) = by_lightning(manual, True), by_lightning(manual, False)
    assert torch.equal(parameters, plain)
    for each, found in zip(stats, windows(gradients), strict=True):
        agree(each, found)


if __name__ == "__main__":
    compare("liger", Path(sys.argv[1]))
    ours, theirs = (losses_of("liger", Path(sys.argv[1]), by_fit) for by_fit in (True, False))
    assert ours == pytest.approx(theirs, rel=2e-5)
