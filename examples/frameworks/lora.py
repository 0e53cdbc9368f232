"""The noise scale of LoRA by PEFT under Hugging Face's Trainer: python examples/frameworks/lora.py

Only the adapters train, so the noise scale is theirs. A Llama of random weights stands for the pretrained one. Needs
transformers and peft (pip install 'kfuse[transformers]' peft).
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from kfuse.data.builtin import load_text
from kfuse.integrations.transformers import attach

blocks, _ = load_text(block_size=64).train.fetch(torch.arange(4096).numpy())
rows = [{"input_ids": block, "labels": block} for block in blocks]
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
arguments = TrainingArguments(
    output_dir="runs/lora", per_device_train_batch_size=8, gradient_accumulation_steps=4, max_steps=60,
    learning_rate=1e-3, logging_steps=20, save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows)
attach(trainer, tokens=True)
trainer.train()
