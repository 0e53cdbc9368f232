"""The examples of the frameworks run and print a noise scale, and wrong uses end in one line."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from trainings import Trainer, TrainingArguments, llama, sequences
from transformers import BertConfig, BertForSequenceClassification

from kfuse.integrations import accelerate, transformers

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/frameworks/*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_a_noise_scale(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and re.search(r"noise.?scale[^\d\n]*\d", done.stdout), done.stdout + done.stderr


def test_wrong_uses_end_in_one_line(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"^attach: the model must be what accelerator\.prepare has returned$"):
        accelerate.attach(accelerator, model)
    model = accelerator.prepare(model)
    plain = accelerator.backward
    monitor = accelerate.attach(accelerator, model)
    with pytest.raises(RuntimeError, match=r"^attach: this accelerator measures a model already: close its monitor"):
        accelerate.attach(accelerator, model)
    pickle.dumps(model)
    monitor.close()
    assert accelerator.backward == plain
    accelerate.attach(accelerator, model)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = Trainer(torch.nn.DataParallel(llama()), arguments, train_dataset=sequences())
    transformers.attach(trainer, tokens=True)
    with pytest.raises(RuntimeError, match=r"^attach: this trainer has kfuse attached already"):
        transformers.attach(trainer)
    with pytest.raises(TypeError, match=r"^attach: the model is trained as a DataParallel: must be on one device"):
        trainer.train()
    trainer = Trainer(llama(), arguments, train_dataset=sequences())
    with patch.object(Accelerator, "parallelism_config", ParallelismConfig(cp_size=2)):
        for refused in (partial(transformers.attach, trainer), partial(accelerate.attach, accelerator, model)):
            with pytest.raises(RuntimeError, match=r"^attach: context parallelism shards a micro-batch"):
                refused()
    transformers.attach(trainer)
    with pytest.raises(ValueError, match=r"^attach: this trainer counts tokens"):
        trainer.train()


def test_a_models_own_mean_is_taken_as_a_mean(tmp_path: Path) -> None:
    """Trainer counts the labels of a classifier too, which ignores the number: each micro-batch weighs alike."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    rows = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(k % 2)} for k in range(32)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=4, max_steps=2,
        gradient_accumulation_steps=4, logging_steps=1, max_grad_norm=1e9, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
    attached = transformers.attach(trainer, tokens=False)
    trainer.train()
    assert attached.monitor is not None and (stats := attached.monitor.stats) is not None
    assert (stats.samples, stats.micro_batches) == (16, 4)
    # Trainer adds up four means; the norm here is of their mean.
    assert stats.grad_norm == pytest.approx(trainer.state.log_history[1]["grad_norm"] / 4, rel=1e-5)
