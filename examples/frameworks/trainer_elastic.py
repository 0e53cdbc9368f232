"""Hugging Face's Trainer on elastic workers: kfuse-run --workers 2 examples/frameworks/trainer_elastic.py

Also on one: python examples/frameworks/trainer_elastic.py. `fit` takes the place of `trainer.train()`; a worker that is
lost in the middle changes no bit. Needs transformers (pip install 'kfuse[transformers]').
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import kfuse as kf
from kfuse.data.builtin import load_text
from kfuse.integrations.transformers import fit, init

init(comm_reproducible=True)  # before TrainingArguments
blocks, _ = load_text(block_size=64).train.fetch(torch.arange(4096).numpy())
rows = [{"input_ids": block, "labels": block} for block in blocks]
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir="runs/trainer", per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=100,
    learning_rate=1e-3, logging_steps=20, save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
torch.manual_seed(0)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
output = fit(trainer, tokens=True)  # a policy: fit(trainer, CriticalBatchPolicy(), tokens=True)
if output is not None and kf.rank() == 0:
    print(output.metrics)
