"""A micro-batch's forward, in the configured precision.

fp32, bf16 (autocast over fp32 parameters), or bf16-true (bf16 parameters). With the latter fp32 are: BatchNorm's
parameters and running statistics, the loss that kfuse computes, gradients from their packing on (partial sums, messages
unless comm.dtype=bf16, statistics), and the fused optimizers' master weights and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kfuse.data.dataset import map_leaves
from kfuse.optim import DistributedOptimizer
from kfuse.train.loss import Objective, Outcome, is_pair
from kfuse.train.step import Step

MOST_FIGURES = 16
"""Figures of a step function that each step averages: they have slots in the tail, whose size is known before."""


def cast_parameters(model: nn.Module) -> None:
    """Makes the floating-point parameters and buffers of `model` bf16, in place, but for BatchNorm's.

    Running statistics are means over hundreds of micro-batches, which 8 bits of mantissa would not hold, and torch's
    batch normalisation takes bf16 inputs with fp32 parameters. Other layers, LayerNorm too, have parameters of their
    inputs' dtype.
    """
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            module._apply(_in_bf16, recurse=False)  # type: ignore[no-untyped-call]


class Forward:
    """Runs the model and the loss on each micro-batch of kf.fit and the command line."""

    def __init__(self, model: nn.Module, objective: Objective, opt: DistributedOptimizer, precision: str) -> None:
        self._model, self._objective, self._precision = model, objective, precision
        self._device, self._statistics = opt.engine.group.device, opt.statistics
        opt.carry_figures(MOST_FIGURES if objective.step_fn is not None else 0)

    def __call__(self, step: Step, batch: Any) -> Tensor:
        """Returns the micro-batch's mean loss, and leaves what is to be averaged with it in `step`.

        The first micro-batch decides the order of a step function's figures.
        """
        done = self.run(batch)
        step.loss = done.loss
        if self._objective.step_fn is not None:
            if self._statistics.figure_names is None:
                if len(done.figures) > MOST_FIGURES:
                    raise ValueError(f"step_fn returned {len(done.figures)} figures: must be at most {MOST_FIGURES}")
                self._statistics.figure_names = tuple(sorted(done.figures))
            step.figures = done.scalars(self._statistics.figure_names)
        return done.loss

    def run(self, batch: Any) -> Outcome:
        """Runs the model and the loss on a batch."""
        return forward(self._objective, self._model, batch, self._precision, self._device)


def forward(objective: Objective, model: nn.Module, batch: Any, precision: str, device: torch.device) -> Outcome:
    """The objective of a batch in this precision.

    With bf16-true the model's floating-point inputs are cast to bf16: the first of a pair, all of a mapping. Targets
    and the batch of a step function are left as they are.
    """
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            return objective(model, batch)
    if precision == "fp32" or objective.step_fn is not None:
        inputs = batch
    elif is_pair(batch):
        inputs = (map_leaves(_in_bf16, batch[0]), batch[1])
    else:
        inputs = map_leaves(_in_bf16, batch)
    if torch.is_autocast_enabled(device.type):  # the script's: asking takes a fraction of the 20 us of switching it off
        with torch.autocast(device.type, enabled=False):
            done = objective(model, inputs)
    else:
        done = objective(model, inputs)
    return done._replace(target=batch) if isinstance(batch, Mapping) and objective.step_fn is None else done


def _in_bf16(leaf: Any) -> Any:
    """A floating-point tensor in bf16; anything else as it is."""
    return leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
