"""Builds a worker's trainer from the configuration (plain values)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from kfuse.checkpoint.manager import Checkpoints, SavedModel, load_weights
from kfuse.cores import cores
from kfuse.data import DataSplit
from kfuse.data.sources import heldout_data, training_data
from kfuse.elastic.link import Report, ignore
from kfuse.optim import DistributedOptimizer, Optimizer
from kfuse.session import current
from kfuse.settings import instantiate
from kfuse.settings.instantiate import class_arguments
from kfuse.settings.tree import completed, flat
from kfuse.train.arguments import TrainArguments
from kfuse.train.assemble import assemble
from kfuse.train.loss import cast_parameters
from kfuse.train.output import log_remarks
from kfuse.train.trainer import Trainer
from kfuse.version import __version__


def set_threads(config: dict[str, Any]) -> None:
    """CPU threads: as configured; else one with comm.reproducible=true, as a matrix product's bits depend on it; else
    OMP_NUM_THREADS, or the cores shared out.
    """
    workers = config["workers"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", workers["max"]))  # torchrun sets LOCAL_WORLD_SIZE
    shared = max(1, cores() // here)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) and "LOCAL_WORLD_SIZE" not in os.environ:  # torchrun sets it to 1 unasked
        shared = int(wanted)
    torch.set_num_threads(workers["threads"] or (1 if config["comm"]["reproducible"] else shared))


def build_trainer(config: dict[str, Any], report: Report = ignore) -> Trainer:
    """Data, model, policy and optimizer as configured, ready to run. Needs a session. report: takes its records."""
    torch.manual_seed(config["seed"])
    values = flat(config)
    split, node, model = data_and_model(config)
    session = current()
    model.to(session.group.device)
    # The optimizer has the norm to clip to: see `_optimizer`.
    settings: Any = completed(values | {"clip_norm": None})
    checkpoints = {name: config["checkpoint"][name] for name in ("every_steps", "keep", "resume")}
    given, run_dir = training_data(split.train), Path(config["run_dir"])
    about: dict[str, Any] = {"model": instantiate.supplied_node(node, **split.spec), "input": split.input or None}
    about |= {"classes": split.spec.get("classes"), "kfuse": __version__}
    saved_model = None if values["train_save_model"] is False else SavedModel(run_dir, session, report, about)
    log_remarks(given.remarks)
    if split.remark is not None and session.worker == 0:
        report("event", {"step": None, "kind": "note", "note": split.remark})
    arguments = TrainArguments(
        model,
        given.data,
        (_optimizer(config, model),),
        settings,
        policy=instantiate.build(config["policy"]),
        checkpoints=Checkpoints(run_dir / "checkpoints", session, **checkpoints, report=report),
        saved_model=saved_model,
        report=report,
        heldout=heldout_data(split.heldout),
        exits_are_errors=True,
    )
    return assemble(arguments)


def data_and_model(config: dict[str, Any]) -> tuple[DataSplit, dict[str, Any], torch.nn.Module]:
    """Data and model as configured, and the model's node without its initial weights."""
    split: DataSplit = instantiate.build(class_arguments("data", config["data"]))
    node, weights = instantiate.initial_weights(config["model"])
    model: torch.nn.Module = instantiate.build(node, **split.spec)
    if weights is not None:
        load_weights(model, weights)
    if config["train"]["precision"] == "bf16-true":
        cast_parameters(model)
    return split, node, model


def _optimizer(config: dict[str, Any], model: torch.nn.Module) -> DistributedOptimizer:
    node = {"lr": config["lr"]["base"], **config["optimizer"]}
    takes_model = next(iter(instantiate.parameters(instantiate.locate(node.get("_target_")))), None) == "model"
    made = instantiate.build(node, model if takes_model else model.parameters())
    opt = made if isinstance(made, DistributedOptimizer) else Optimizer(made)
    # Not by the constructor: a user's class that is derived from one of kfuse's may not pass them on.
    opt.clip_norm = config["train"]["clip_norm"]
    opt.skip_nonfinite = config["optimizer"].get("skip_nonfinite", True)
    return opt
