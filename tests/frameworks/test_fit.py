"""`fit` trains as Trainer does: the same losses and calls of callbacks, and the same bits on workers that are lost."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainings import Trainer, TrainingArguments, collate, llama, sequences
from transformers import EarlyStoppingCallback, TrainerCallback

import kfuse as kf
from kfuse.integrations.transformers import fit, init
from kfuse.session import current
from kfuse.train.evaluation import params_sha256

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps each event with the state and the flags that came with it; stops training after so many steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._stop_after = stop_after

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def event(args: Any, state: Any, control: Any, **given: Any) -> None:
            if name == "on_step_end" and state.global_step == self._stop_after:
                control.should_training_stop = True
            flags = [name for name, value in vars(control).items() if value]
            self.seen.append(
                (name, state.global_step, state.epoch, state.max_steps, flags, sorted(given.get("logs", {})))
            )

        return event


class Classifier(nn.Module):
    """Its loss is a mean; the last labels of a sequence decide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(8 * 33, 5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(input_ids), labels[:, 0] % 5)}


def trainer_of(folder: Path, model: nn.Module, callbacks: list[Any], **arguments: Any) -> Trainer:
    data = sequences()
    for row in data[8:12]:  # in sequential order a micro-batch in which no token counts
        row["labels"][:] = -100
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "warmup_steps": 3, "seed": 3, **arguments,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(str(folder), **given), train_dataset=data, eval_dataset=sequences(6),
        data_collator=collate, callbacks=callbacks,
    )  # fmt: skip


# fmt: off
CASES: dict[str, tuple[type[nn.Module] | Any, int | None, dict[str, Any]]] = {
    "tokens": (llama, None, {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 6}),
    "bf16, part of an epoch": (llama, None, {"bf16": True, "num_train_epochs": 1.4, "eval_strategy": "epoch"}),
    "best": (llama, None, {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6,
                           "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
                           "activation_checkpointing": True}),
    "compiled": (llama, None, {"torch_compile": True, "torch_compile_backend": "eager", "label_smoothing_factor": 0.1,
                               "activation_checkpointing": True,
                               "activation_checkpointing_kwargs": {"use_reentrant": True}}),
    "means": (Classifier, None, {"max_steps": 11, "train_sampling_strategy": "sequential", "eval_on_start": True}),
    "stopped": (
        llama,
        4,
        {
            "train_sampling_strategy": "sequential",
            "logging_steps": 3,
            "logging_first_step": True,
            "save_strategy": "epoch",
        },
    ),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_losses_and_calls_are_trainers(case: str, tmp_path: Path) -> None:
    make, stop_after, arguments = CASES[case]
    results = []
    for by_trainer in (True, False):
        recorder, folder = Recorder(stop_after), tmp_path / ("trainer" if by_trainer else "kfuse")
        trainer = trainer_of(folder, make(), [recorder], **arguments)
        output = trainer.train() if by_trainer else fit(trainer, tokens=make is llama)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".pth")
        results.append((trainer, recorder.seen, output, files))
    (theirs, their_calls, their_output, their_files), (ours, our_calls, our_output, our_files) = results
    assert our_calls == their_calls
    assert our_files == their_files
    assert our_output.global_step == their_output.global_step > 3
    timed, rel = ("runtime", "per_second", "total_flos"), 5e-3 if "bf16" in arguments else 2e-5
    assert our_output.training_loss == pytest.approx(their_output.training_loss, rel=rel)
    for mine, yours in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        figures = [{k: v for k, v in each.items() if not k.endswith(timed)} for each in (mine, yours)]
        assert figures[0] == pytest.approx(figures[1], rel=rel)
    for mine, yours in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=rel, atol=rel if "bf16" in arguments else 1e-5)


class Killed(TrainerCallback):  # type: ignore[misc]
    """Worker 0 is killed within step 4, worker 1 as it writes a checkpoint after step 12, worker 2 in the last update.

    Steps 8 and 14 wait for the worker that comes in its place.
    """

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 4 and current().worker == 0 and current().elastic:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        while current().elastic and state.global_step in (8, 14) and not current().proposed_generation():
            time.sleep(0.01)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 23 and current().worker == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def script(folder: Path) -> None:
    """Each worker that is there at the end writes what it has."""
    given = os.environ.get("LOCAL_RANK")
    assert init(comm_reproducible=True).elastic == (given is not None)
    if given is not None:
        assert "LOCAL_RANK" not in os.environ
        assert os.environ["CUDA_VISIBLE_DEVICES"] == {"0": "97", "1": "98"}[given]
    recorder = Recorder()
    arguments = {**CASES["best"][2], "activation_checkpointing": False, "save_steps": 3, "num_train_epochs": 3}
    trainer = trainer_of(folder / "out", llama(), [Killed(), recorder], **arguments)
    trainer.add_callback(stopping := EarlyStoppingCallback(100))
    save_optimizer = trainer._save_optimizer_and_scheduler

    def save_or_die(directory: str) -> None:
        if directory.endswith("-12") and current().worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save_optimizer(directory)

    trainer._save_optimizer_and_scheduler = save_or_die
    output = fit(trainer, tokens=True)
    assert output is not None
    steps = [step for name, step, *_ in recorder.seen if name == "on_step_end"]
    found = {
        "parameters": params_sha256(trainer.model),
        "losses": [each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history],
        "evaluations": [[each["step"], each["eval_loss"]] for each in trainer.state.log_history if "eval_loss" in each],
        "loss": output.training_loss,
        "steps": steps,
        "leads": trainer.state.is_world_process_zero,
        "best": [trainer.state.best_metric, stopping.early_stopping_patience_counter],
        "best at": os.path.basename(trainer.state.best_model_checkpoint),
    }
    (folder / f"{current().worker}.json").write_text(json.dumps(found))


def test_bits_are_the_same_on_workers_that_are_lost_and_join(tmp_path: Path) -> None:
    alone, several = tmp_path / "alone", tmp_path / "several"
    alone.mkdir(), several.mkdir()
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--run-dir", str(several / "run"), "--workers", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "97,98"}
    done = subprocess.run(
        [*command, __file__, str(several)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    script(alone)
    reference, last = (json.loads(file.read_text()) for file in (alone / "0.json", several / "3.json"))
    assert reference["steps"] == list(range(1, 25)) and reference["best at"] == "checkpoint-3"
    assert last["steps"][0] in (15, 16, 17) and last["steps"][-1] == 24 and last["leads"]
    for name in ("parameters", "losses", "loss", "best", "best at"):
        assert last[name] == reference[name], name
    events = map(json.loads, (several / "run" / "events.jsonl").read_text().splitlines())
    evaluations = [[event["step"] + 1, event["loss"]] for event in events if event["kind"] == "evaluation"]
    assert evaluations == reference["evaluations"] != [], "Trainer's, in the run's records, each once"
    names = [sorted(str(path.relative_to(each)) for path in each.rglob("checkpoint-*/*")) for each in (alone, several)]
    assert names[0] == names[1] and len(names[0]) > 12
    weights = [(each / "out" / "checkpoint-12" / "model.safetensors").read_bytes() for each in (alone, several)]
    assert weights[0] == weights[1]


class NotFinite(Classifier):
    calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": super().forward(input_ids, labels)["loss"] * (math.nan if self.calls == 8 else 1.0)}


def test_training_goes_on_after_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    output = fit(trainer_of(tmp_path, NotFinite(), []), tokens=False)
    assert output is not None and output.global_step == 16 and math.isfinite(output.training_loss)


class Grows(kf.BasePolicy):
    """Twice the batch, after the second step."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        return kf.Decision(batch_size=24) if signals.step == 1 else None


def test_a_policy_changes_the_batch_size(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = trainer_of(tmp_path, llama(), [recorder], num_train_epochs=3)
    output = fit(trainer, Grows(), tokens=True)
    assert output is not None
    planned = list(dict.fromkeys(steps for name, _, _, steps, *_ in recorder.seen if name == "on_step_end"))
    assert planned[0] == 24 and planned[-1] == output.global_step < 16
    assert trainer.state.epoch == 3
    assert [name for name, *_ in recorder.seen].count("on_epoch_end") == 3


class Ignoring(Classifier):
    """Trainer takes it for one that divides its loss by the number it is given, and it has a mean."""

    def forward(self, input_ids: Tensor, labels: Tensor, **given: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


def refusal(folder: Path, model: nn.Module | None = None, **arguments: Any) -> str:
    """How `fit` refuses the trainer. tuning: what to change in it before; settings: of fit."""
    tuning, settings = arguments.pop("tuning", {}), arguments.pop("settings", {})
    trainer = trainer_of(folder, model or llama(), [], **arguments)
    for name, value in tuning.items():
        setattr(trainer, name, value)
    with pytest.raises((TypeError, ValueError)) as error:
        fit(trainer, **settings)
    return str(error.value)


def test_what_is_not_trained_as_trainer_does_is_refused_in_one_line(tmp_path: Path) -> None:
    refused: dict[str, dict[str, Any]] = {
        "fit: DataParallel: must be left out": {"model": nn.DataParallel(llama())},
        "fit: FSDP: must be left out": {"tuning": {"is_fsdp_enabled": True}},
        "fit: DeepSpeed: must be left out": {"tuning": {"is_deepspeed_enabled": True}},
        "fit: dataloader_drop_last=True: must be left out": {"dataloader_drop_last": True},
        "fit: batch_size is not a setting here": {"settings": {"batch_size": 3}},
        "fit: the training data's sampler is a LengthGroupedSampler": {"train_sampling_strategy": "group_by_length"},
        "fit: lr_scheduler_type: ReduceLROnPlateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 2,
                                                      "eval_strategy": "steps", "warmup_steps": 0},
        "fit: this trainer counts tokens, and kfuse must be told": {},
        "fit: the loss is not a sum divided by num_items": {"model": Ignoring(), "settings": {"tokens": False}},
        "fit: tokens=True says that the loss is divided": {"tuning": {"loss_is_scaled_for_ga": False},
                                                  "settings": {"tokens": True}},
    }  # fmt: skip
    for text, given in refused.items():
        said = refusal(tmp_path, **given)
        assert said.startswith(text) and "\n" not in said, said


if __name__ == "__main__":
    script(Path(sys.argv[1]))
