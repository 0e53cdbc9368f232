"""Stock configurations of Trainer and TRL on tiny local models, and their micro-batches' mean losses in plain torch.

A maker returns a trainer of STEPS steps of up to ACCUMULATE micro-batches of up to MICRO samples. Nothing is random but
the data's order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

Row = dict[str, Any]
Loss = Callable[[Any, Row], tuple[Tensor, int]]
MICRO, ACCUMULATE, STEPS = 3, 3, 9
BETA, SMOOTHING, IGNORED = 0.5, 0.1, -100


def tokenizer() -> PreTrainedTokenizerFast:
    words = {name: k for k, name in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{k}" for k in range(40))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(*columns: str, count: int = 80) -> Dataset:
    """Each column has 2 to 20 words of a row; an epoch of 80 rows ends with a short micro-batch and a short step."""
    chosen = random.Random(0)
    return Dataset.from_list([{name: words(chosen) for name in columns} for _ in range(count)])


def words(chosen: random.Random) -> str:
    return "".join(f" w{chosen.randrange(40)}" for _ in range(chosen.randint(2, 20)))


def tokens(count: int = 80) -> Dataset:
    made, rows = tokenizer(), texts("input_ids", "labels", count=count)
    return rows.map(lambda row: {name: made(text)["input_ids"] for name, text in row.items()})


def config(**more: Any) -> LlamaConfig:
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=43, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=None, eos_token_id=1, **more,
    )  # fmt: skip


def lora() -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])


def options(folder: Path, **more: Any) -> Row:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATE,
        "max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.0, "logging_steps": 3, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "bf16": False,
    }  # fmt: skip
    return given | more


def sft(folder: Path, *columns: str, peft: LoraConfig | None = None, **more: Any) -> Trainer:
    arguments = SFTConfig(**options(folder, **more))
    model, data = LlamaForCausalLM(config()), texts(*columns)
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=peft)


def sft_lora(folder: Path, **more: Any) -> Trainer:
    return sft(folder, "text", peft=lora(), **more)


def sft_packed(folder: Path, **more: Any) -> Trainer:
    return sft(folder, "text", **{"packing": True, "bf16": True, "max_length": 24, **more})


def sft_completions(folder: Path, **more: Any) -> Trainer:
    return sft(folder, "prompt", "completion", **{"gradient_checkpointing": True, **more})


def dpo(folder: Path, **more: Any) -> Trainer:
    model, arguments = LlamaForCausalLM(config()), DPOConfig(**options(folder, beta=BETA, **more))
    data = texts("prompt", "chosen", "rejected")
    return DPOTrainer(model, None, arguments, train_dataset=data, processing_class=tokenizer(), peft_config=lora())


def reward(folder: Path, **more: Any) -> Trainer:
    model, arguments = LlamaForSequenceClassification(config(num_labels=1)), RewardConfig(**options(folder, **more))
    return RewardTrainer(model, arguments, train_dataset=texts("chosen", "rejected"), processing_class=tokenizer())


def causal(folder: Path, callbacks: tuple[Any, ...] = (), **more: Any) -> Trainer:
    data = tokens().map(lambda row: {"input_ids": row["input_ids"], "labels": row["input_ids"]})
    return Trainer(
        LlamaForCausalLM(config()), TrainingArguments(**options(folder, **more)), DataCollatorForSeq2Seq(tokenizer()),
        data, data.select(range(8)), callbacks=list(callbacks),
    )  # fmt: skip


def smoothed(folder: Path, **more: Any) -> Trainer:
    return causal(folder, label_smoothing_factor=SMOOTHING, **more)


def compiled(folder: Path, **more: Any) -> Trainer:
    """Without label smoothing: Trainer's does not shift a compiled model's labels."""
    return causal(folder, **{"torch_compile": True, "torch_compile_backend": "eager", **more})


def liger(folder: Path, **more: Any) -> Trainer:
    """With that of Liger's kernels that replaces the loss; without a GPU in a process that has TRITON_INTERPRET=1."""
    kernels = {"rope": False, "fused_linear_cross_entropy": True, "rms_norm": False, "swiglu": False}
    few = {"per_device_train_batch_size": 1, "use_liger_kernel": True, "liger_kernel_config": kernels}
    return causal(folder, **few | more)


def stopped_early(folder: Path, **more: Any) -> Trainer:
    """After 8 steps: after 2, 4, 6 and 8 the loss is evaluated, and three of these are no better by 100."""
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 30}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
    by_length = {"train_sampling_strategy": "group_by_length"}
    return causal(folder, (EarlyStoppingCallback(3, 100.0),), **often | best | by_length | more)


def streamed(folder: Path, **more: Any) -> Trainer:
    """T5, whose loss is its micro-batch's mean, of which Trainer adds up a step's; evaluated by what it generates."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=43, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    evaluated = {"predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 4, "generation_max_length": 4}
    return Seq2SeqTrainer(
        T5ForConditionalGeneration(config), Seq2SeqTrainingArguments(**options(folder, **evaluated | more)),
        DataCollatorForSeq2Seq(tokenizer()), tokens().to_iterable_dataset(), tokens(8),
        compute_metrics=lambda predicted: {"width": predicted.predictions.shape[1]},
    )  # fmt: skip


# -- a micro-batch's mean loss, and of how many samples or tokens -----------------------------------------------------


def of_tokens(model: Any, batch: Row, smoothing: float = 0.0) -> tuple[Tensor, int]:
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
    return loss, int((labels != IGNORED).sum())


def of_smoothed(model: Any, batch: Row) -> tuple[Tensor, int]:
    return of_tokens(model, batch, SMOOTHING)


def of_targets(model: Any, batch: Row) -> tuple[Tensor, int]:
    logits, labels = model(**batch).logits, batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), len(labels)


def of_preferences(model: Any, batch: Row) -> tuple[Tensor, int]:
    ratio = _log_probability(model, batch)
    with torch.no_grad(), model.disable_adapter():
        reference = _log_probability(model, batch)
    chosen, rejected = (ratio - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), len(chosen)


def _log_probability(model: Any, batch: Row) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    each = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (each * batch["completion_mask"][:, 1:]).sum(1)


def of_rewards(model: Any, batch: Row) -> tuple[Tensor, int]:
    chosen, rejected = model(batch["input_ids"], batch["attention_mask"]).logits[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean(), len(chosen)


MAKERS: dict[str, Callable[..., Trainer]] = {
    "sft_lora": sft_lora, "sft_packed": sft_packed, "sft_completions": sft_completions, "dpo": dpo, "reward": reward,
    "smoothed": smoothed, "compiled": compiled, "liger": liger, "stopped_early": stopped_early, "streamed": streamed,
}  # fmt: skip
"""By name: make(folder, **arguments of its TrainingArguments)."""
LOSSES: dict[str, Loss] = {
    "dpo": of_preferences, "reward": of_rewards, "smoothed": of_smoothed, "streamed": of_targets,
}  # fmt: skip
"""Of those whose loss is not `of_tokens`."""
BY_SAMPLES = ("dpo", "reward", "streamed")
"""Those whose unit is the sample: each micro-batch weighs alike."""
MORE_BY_FIT: dict[str, Row] = {"stopped_early": {"train_sampling_strategy": "random", "learning_rate": 1e-2}}
"""`fit` takes no order by length, and no stream: so nothing of `streamed`. This rate keeps rounding small."""
