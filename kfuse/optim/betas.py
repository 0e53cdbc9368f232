"""Adam's betas where the batch is another than the one they are meant for: of torch's own Adam and AdamW.

Betas are then beta^k, k being the batch's ratio, and torch corrects a moment by 1 - (beta^k)^step. That is exact where
`step` counts in batches of the present size. kf.Optimizer keeps it in first batches, as its `param_groups` keep the
betas that the user gave, and shows torch the present ones for an update (`betas_of_batch`). In a framework the training
calls the optimizer itself: there both are changed for good with the batch (`change_betas`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, optim


def _adams(optimizers: Sequence[optim.Optimizer]) -> list[optim.Optimizer]:
    """Those whose betas follow the batch. Of another class it is not known what its betas mean."""
    return [each for each in optimizers if type(each) in (optim.Adam, optim.AdamW)]


@contextmanager
def betas_of_batch(optimizers: Sequence[optim.Optimizer], batch_factor: float) -> Iterator[None]:
    """Context of an update by these optimizers, which counts as `batch_factor` updates (`Update.batch_factor`).

    On exit betas are as before. An update that an optimizer leaves out counts as none.
    """
    followers = _adams(optimizers)
    kept = [(group, group["betas"]) for each in followers for group in each.param_groups]
    counts = _counts(followers)
    before, shown = (list(torch._foreach_div(counts, by)) if counts else [] for by in (1.0, batch_factor))
    try:
        _copy(counts, shown)
        for group, betas in kept:
            group["betas"] = tuple(beta**batch_factor for beta in betas)
        yield
    finally:
        for group, betas in kept:
            group["betas"] = betas
        if counts:
            made = torch._foreach_sub(counts, shown)
            torch._foreach_round_(made)  # 1, or 0
            torch._foreach_add_(before, made, alpha=batch_factor)
        _copy(counts, before)
        known = set(map(id, counts))
        for count in _counts(followers):
            if id(count) not in known:  # the first update of its parameter
                count.mul_(batch_factor)


def change_betas(optimizers: Sequence[optim.Optimizer], ratio: float) -> None:
    """The batch is `ratio` times as large from now on: betas become beta^ratio, and `step` counts in the new batch."""
    for each in _adams(optimizers):
        for group in each.param_groups:
            group["betas"] = tuple(beta**ratio for beta in group["betas"])
        for count in _counts([each]):
            count.div_(ratio)


def _copy(counts: list[Tensor], values: list[Tensor]) -> None:
    if counts:
        torch._foreach_copy_(counts, values)


def _counts(optimizers: Sequence[optim.Optimizer]) -> list[Tensor]:
    """Of each parameter that has been updated, the number of its updates, in place."""
    return [state["step"] for each in optimizers for state in each.state.values() if state]
