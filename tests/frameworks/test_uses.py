"""The examples of the frameworks run and print a noise scale, and wrong uses end in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from trainings import Trainer, TrainingArguments, llama, sequences

from kfuse.integrations import accelerate, transformers

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/frameworks/*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_a_noise_scale(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "noise" in done.stdout, done.stdout + done.stderr


def test_wrong_uses_end_in_one_line(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"^attach: the model must be what accelerator\.prepare has returned$"):
        accelerate.attach(accelerator, model)
    model = accelerator.prepare(model)
    accelerate.attach(accelerator, model)
    with pytest.raises(RuntimeError, match=r"^attach: this model is measured already"):
        accelerate.attach(accelerator, model)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = Trainer(torch.nn.DataParallel(llama()), arguments, train_dataset=sequences())
    transformers.attach(trainer)
    with pytest.raises(RuntimeError, match=r"^attach: this trainer has kfuse attached already"):
        transformers.attach(trainer)
    with pytest.raises(TypeError, match=r"^attach: the model is trained as a DataParallel: must be in Distributed"):
        trainer.train()
