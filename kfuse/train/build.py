"""From a configuration (plain values) to a training loop: what a worker builds."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from kfuse.checkpoint.manager import CheckpointSettings
from kfuse.comm.plan import CommOptions
from kfuse.config import instantiate
from kfuse.data import DataSplit, as_dataset
from kfuse.elastic import protocol
from kfuse.optim import DistributedOptimizer, Optimizer
from kfuse.policies.signals import Bounds
from kfuse.session import Session
from kfuse.train.coordinator import Coordinator
from kfuse.train.loop import Loop
from kfuse.train.loss import default_loss
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.progress import Settings


def comm_options(config: dict[str, Any]) -> CommOptions:
    comm = config["comm"]
    schedule = comm["_target_"] or comm["schedule"]
    names = ("dtype", "bucket_mb", "reproducible", "tree", "check_every")
    return CommOptions(schedule, **{name: comm[name] for name in names})


def set_threads(config: dict[str, Any]) -> None:
    """CPU threads: as configured; else what the launcher set aside, or the machine's shared out among all workers.

    A matrix product's bits depend on the number of threads, so reproducible runs take one on any number of workers.
    """
    workers = config["workers"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", workers["max"]))  # torchrun says how many there are
    shared = int(os.environ.get(protocol.ENV_THREADS, max(1, (os.cpu_count() or 1) // here)))
    torch.set_num_threads(workers["threads"] or (1 if config["comm"]["reproducible"] else shared))


def build_loop(config: dict[str, Any], session: Session) -> Loop:
    """Data, model, policy and optimizer as configured, in a loop ready to run. Needs no other worker."""
    torch.manual_seed(config["seed"])
    split: DataSplit = instantiate.build(config["data"])
    train_set = as_dataset(split.train)
    model: torch.nn.Module = instantiate.build(config["model"], **split.spec)
    model.to(session.group.device)
    batch, train, lr, workers = (config[name] for name in ("batch", "train", "lr", "workers"))
    # Where the number is fixed a policy may still ask for another, and is told so: within bounds it would not ask.
    workers_bounds = (workers["min"], workers["max"]) if session.elastic else (1, 2**20)
    run = Coordinator(
        model,
        train_set,
        _optimizer(config, model),
        session=session,
        policy=instantiate.build(config["policy"]),
        schedule=LRSchedule(
            scaling=lr["scaling"],
            warmup_steps=lr["warmup_steps"],
            decay=lr["decay"],
            base_batch_size=batch["size"],
            total=total_steps(config, len(train_set)),
        ),
        settings=Settings(
            batch_size=batch["size"],
            micro_batch=batch["micro"],
            bounds=Bounds(batch["min"], batch["max"], *workers_bounds),
            epochs=train["epochs"],
            steps=train["steps"],
            target_accuracy=train["target_accuracy"],
            eval_every=train["eval_every"],
            precision=train["precision"],
            seed=config["seed"],
            base_lr=lr["base"],
            balance=workers["balance"],
            sync_every=config["comm"]["sync_every"],
            ledger=config["observe"]["ledger"],
            checkpoints=CheckpointSettings(Path(config["run_dir"], "checkpoints"), **config["checkpoint"]),
        ),
    )
    facts = {name: value for name, value in split.spec.items() if isinstance(value, float)}
    return Loop(run, default_loss, as_dataset(split.heldout), facts)


def total_steps(config: dict[str, Any], samples: int) -> float:
    """The run's length in steps of the first batch size: by epochs or by steps, whichever ends first."""
    train = config["train"]
    epochs = math.inf if train["epochs"] is None else train["epochs"] * samples / config["batch"]["size"]
    return float(min(epochs, math.inf if train["steps"] is None else train["steps"]))


def _optimizer(config: dict[str, Any], model: torch.nn.Module) -> DistributedOptimizer:
    made = instantiate.build(config["optimizer"], model.parameters(), always={"lr": config["lr"]["base"]})
    opt = made if isinstance(made, DistributedOptimizer) else Optimizer(made)
    # Not by the constructor: a class of the user's own, derived from one of ours, need not pass them on.
    opt.clip_norm = config["train"]["clip_norm"]
    opt.skip_nonfinite = config["optimizer"].get("skip_nonfinite", True)
    return opt
