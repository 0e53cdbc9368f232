"""`fit` trains as Trainer does: the same losses and calls of callbacks, and the same bits on workers that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainings import Trainer, TrainingArguments, collate, llama, sequences
from transformers import EarlyStoppingCallback, TrainerCallback

import kfuse as kf
from kfuse.integrations.transformers import fit

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
            self.seen.append((name, state.global_step, state.epoch, state.max_steps, flags, sorted(given.get("logs", {}))))

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
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "warmup_steps": 3, "seed": 3, **arguments,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(str(folder), **given), train_dataset=sequences(), eval_dataset=sequences(6),
        data_collator=collate, callbacks=callbacks,
    )  # fmt: skip


CASES: dict[str, tuple[type[nn.Module] | Any, int | None, dict[str, Any]]] = {
    "tokens": (llama, None, {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 6}),
    "bf16, part of an epoch": (llama, None, {"bf16": True, "num_train_epochs": 1.4, "eval_strategy": "epoch"}),
    "means": (Classifier, None, {"max_steps": 11, "train_sampling_strategy": "sequential", "eval_on_start": True}),
    "stopped": (llama, 4, {"logging_steps": 3, "logging_first_step": True, "save_strategy": "epoch"}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_calls_are_trainers(case: str, tmp_path: Path) -> None:
    make, stop_after, arguments = CASES[case]
    results = []
    for train in (Trainer.train, fit):
        recorder, folder = Recorder(stop_after), tmp_path / train.__name__
        trainer = trainer_of(folder, make(), [recorder], **arguments)
        output = train(trainer)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".pth")
        results.append((trainer, recorder.seen, output, files))
    (theirs, their_calls, their_output, their_files), (ours, our_calls, our_output, our_files) = results
    assert our_calls == their_calls
    assert our_files == their_files
    assert our_output.global_step == their_output.global_step > 3
    assert our_output.training_loss == pytest.approx(their_output.training_loss, rel=1e-4)
    timed = ("runtime", "per_second", "total_flos")
    for mine, yours in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert {k: v for k, v in mine.items() if not k.endswith(timed)} == pytest.approx(
            {k: v for k, v in yours.items() if not k.endswith(timed)}, rel=1e-4
        )
    for mine, yours in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-4)
