"""AdamW's betas and eps as functions of the batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kfuse.kernels.updates import AdamOptions

BetaScaling = Literal["malladi", "marek"]
Betas = Literal["keep", "malladi", "marek"]
"""The setting lr.betas. keep: betas and eps stay as they are set."""


@dataclass(frozen=True)
class BatchBetas:
    """AdamW's betas and eps of one update, whose batch is k times the one that they are meant for.

    malladi  beta' = 1 - k (1 - beta), for both;  eps' = eps / sqrt(k).  With a learning rate times sqrt(k), Adam
             then follows the same stochastic differential equation over the samples (Malladi et al. 2022, "On the
             SDEs and Scaling Rules for Adaptive Gradient Algorithms", the square root scaling rule for Adam)
    marek    beta2' = beta2^k: the second moment's half-life stays the same number of samples. beta1 and eps stay
             (Marek et al. 2025, "Small Batch Size Training for Language Models", arXiv 2507.07101)
    """

    scaling: BetaScaling
    ratio: float
    """k, above 0."""

    def of(self, options: AdamOptions) -> AdamOptions:
        """The settings of this update. options: those that the user has set."""
        if not self.changes:  # 1 - (1 - beta) may be rounded
            return options
        beta1, beta2 = scaled_betas(self.scaling, options.beta1, options.beta2, self.ratio)
        eps = options.eps / math.sqrt(self.ratio) if self.scaling == "malladi" else options.eps
        return replace(options, beta1=beta1, beta2=beta2, eps=eps)

    @property
    def changes(self) -> bool:
        """Whether the betas of this update are others than the user's."""
        return self.ratio != 1


def scaled_betas(scaling: BetaScaling, beta1: float, beta2: float, ratio: float) -> tuple[float, float]:
    """The betas for a batch of `ratio` times the size. Where malladi's would be negative they are 0.

    Raises ValueError for another scaling.
    """
    if scaling == "malladi":
        return max(0.0, 1 - ratio * (1 - beta1)), max(0.0, 1 - ratio * (1 - beta2))
    if scaling == "marek":
        return beta1, beta2**ratio
    raise ValueError(f"scaling={scaling}: must be one of {', '.join(get_args(BetaScaling))}")


def largest_batch(scaling: BetaScaling, betas: Iterable[tuple[float, float]], batch_size: int) -> float:
    """The largest batch, in samples, for which no beta would be negative. betas: of the parameter groups.

    batch_size: the one that the betas are meant for. Infinite but for malladi: with the usual beta1 of 0.9, at 10 times
    the batch, nothing is left of the average over updates.
    """
    least = min((min(pair) for pair in betas), default=1.0)
    if scaling == "marek" or least >= 1:
        return math.inf
    return math.floor(batch_size / (1 - least) * (1 + 1e-9))  # 1 - 0.9 is below 0.1


# -- bias correction --------------------------------------------------------------------------------------------------
#
# Adam's 1 - beta^t is one minus the weight that a moment's initial zero still has. With betas that change, that weight
# is the product of the betas over the parameter's own updates. In Malladi et al.'s equation, too, the correction
# follows the time that has passed, not the present beta: after 100 updates with a beta2 of 0.999, one with 0.992 has
# 1 - 0.999^100 * 0.992 = 0.102. By 1 - 0.992^101 = 0.556 the step would be 2.3 times too large.

BIAS_CORRECTION = "bias_correction"
"""The name in a state_dict of a parameter's two corrections: fp64 [2], of exp_avg and of exp_avg_sq."""
CHANGED_BETAS = "changed_betas"
"""A parameter group's key, True once its betas have changed: from then on its parameters' state has corrections."""


def corrections_after(steps: Tensor, beta1: float, beta2: float) -> Tensor:
    """The corrections after so many updates with the same betas: fp64 [parameters, 2]. steps: [parameters]."""
    return torch.stack([1 - beta ** steps.double() for beta in (beta1, beta2)], dim=1)


def correct_for_update(corrections: Tensor, beta1: float, beta2: float, skip: Tensor | None) -> None:
    """Counts one more update, in place. It is the moments' own recursion, with 1 for the gradient.

    corrections: fp64 [..., 2]. skip: a number on the device; where it is not 0 nothing changes. None: 0. The host does
    not wait.
    """
    for column, beta in enumerate((beta1, beta2)):
        before = corrections[..., column]
        after = before * beta + (1 - beta)
        before.copy_(after if skip is None else torch.where(skip == 0, after, before))
