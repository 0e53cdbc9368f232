"""What `kfuse.integrations.transformers.fit` does not train as Trainer does, by looks at what the trainer was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DistributedType
from torch.nn import DataParallel
from transformers import Trainer

from kfuse.session import current

_OF_ARGUMENTS = {
    "seed": "seed",
    "batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "micro_batch": "per_device_train_batch_size",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "clip_norm": "max_grad_norm",
    "train_precision": "bf16",
    "heldout_every": "eval_strategy",
    "train_target_accuracy": "a callback",
    "num_workers": "dataloader_num_workers",
    "data_prefetch": "dataloader_prefetch_factor",
}
_LEFT_OUT = ("auto_find_batch_size", "dataloader_drop_last", "fp16", "push_to_hub")
_OWN_LOOPS = ("train", "_inner_training_loop", "_run_epoch", "get_batch_samples", "_get_num_items_in_batch")


def refuse(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for what is not trained here; TypeError for a setting that Trainer has."""
    for name in settings:
        if name in _OF_ARGUMENTS:
            raise TypeError(f"fit: {name} is not a setting here: TrainingArguments have it, as {_OF_ARGUMENTS[name]}")
    args, accelerator = trainer.args, trainer.accelerator
    distributed = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or bool(args.fsdp),
        "a model that was sharded as it was loaded": trainer.is_distributed_loading_by_transformers,
        "tensor parallelism": trainer.get_tp_size() > 1,
        "context parallelism": trainer.get_cp_size() > 1,
        "sequence parallelism": trainer.get_sp_size() > 1,
        "a model on several devices": trainer.is_model_parallel,
        "DataParallel": args.n_gpu > 1 or isinstance(trainer.model, DataParallel),
        "Accelerate's processes (torchrun)": accelerator.distributed_type != DistributedType.NO,
    }
    for name, is_used in distributed.items():
        if is_used:
            raise ValueError(f"fit: {name}: must be left out: kfuse's workers have the whole model on one device each")
    unsupported = {
        **{f"{name}={getattr(args, name)}": getattr(args, name) for name in _LEFT_OUT},
        "a trainer that has trained": getattr(trainer.optimizer, "_is_accelerate_prepared", False),
        "model_init": trainer.model_init is not None,
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no",
        "attach": getattr(getattr(trainer.training_step, "__self__", None), "is_attached", False),
        "a train_dataset without a length": not hasattr(trainer.train_dataset, "__len__"),
        **{f"a {name} of its own": getattr(type(trainer), name) is not getattr(Trainer, name) for name in _OWN_LOOPS},
        f"device {args.device}, which is not kfuse's {current().group.device}": args.device != current().group.device,
        f"comm_sync={current().comm.sync}": current().comm.sync != "ssgd",
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ValueError(f"fit: {name}: must be left out")
