"""A micro-batch's forward: its batch is checked, the first time; the loss comes in the configured precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kfuse.data import Dataset
from kfuse.data.batch import describe, names
from kfuse.optim import DistributedOptimizer
from kfuse.train.loss import Objective, Outcome
from kfuse.train.precision import forward
from kfuse.train.step import Step, generators_restored

MOST_FIGURES = 16
"""Figures of a step function that each step averages: they have slots in the tail, whose size is known before."""


class Forward:
    """Runs the model and the loss on each micro-batch of kf.fit and the command line."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        opt: DistributedOptimizer,
        heldout: Dataset | None,
        precision: str,
        device: torch.device,
    ) -> None:
        """heldout: data that will be evaluated; their batches are checked too. precision: see `train.precision`."""
        self._model, self._objective, self._heldout = model, objective, heldout
        self._precision, self._device = precision, device
        self._statistics, self._checked = opt.statistics, False
        opt.carry_figures(MOST_FIGURES if objective.step_fn is not None else 0)

    def __call__(self, step: Step, batch: Any) -> Tensor:
        """Returns the micro-batch's mean loss, and leaves what is to be averaged with it in `step`.

        Raises TypeError or ValueError for a batch that cannot become a loss; the first time before the model is run.
        """
        done = self.run(batch)
        step.loss = done.loss
        if self._objective.step_fn is not None:
            step.figures = self._figures(done)
        return done.loss

    def run(self, batch: Any) -> Outcome:
        """Runs the model and the loss on a batch. Raises as a call does."""
        if not self._checked:
            self._check(batch)
        return forward(self._objective, self._model, batch, self._precision, self._device)

    def _check(self, batch: Any) -> None:
        self._objective.check(self._model, batch, "the data")
        if self._heldout is not None:
            with generators_restored(self._device):
                heldout = self._heldout.fetch(np.zeros(1, np.int64))
            self._objective.check(self._model, heldout, "heldout")
            missing = sorted(names(batch) - names(heldout))
            if missing:
                raise TypeError(
                    f"a batch of heldout is a {describe(heldout)} and one of the data a {describe(batch)}: "
                    f"{', '.join(missing)} is missing in heldout. collate_fn= makes the batches of both; that of a "
                    "DataLoader only its own"
                )
        self._checked = True

    def _figures(self, done: Outcome) -> Sequence[Tensor | float]:
        """A step function's figures, as scalars in the order of their slots, which the first micro-batch decides."""
        if self._statistics.figure_names is None:
            if len(done.figures) > MOST_FIGURES:
                raise ValueError(f"step_fn returned {len(done.figures)} figures: must be at most {MOST_FIGURES}")
            self._statistics.figure_names = tuple(sorted(done.figures))
        return done.scalars(self._statistics.figure_names)
