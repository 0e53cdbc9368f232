"""Adam's betas where the batch is another than the one they are meant for: of torch's own Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, optim


def with_betas(optimizers: Sequence[optim.Optimizer]) -> list[optim.Optimizer]:
    """Those whose betas follow the batch. Of another class it is not known what its betas mean."""
    return [each for each in optimizers if type(each) in (optim.Adam, optim.AdamW)]


@contextmanager
def following(optimizers: Sequence[optim.Optimizer], batches: float) -> Iterator[None]:
    """Context of an update by these optimizers: betas are beta^batches, and it counts as so many (`Update.batches`).

    On exit betas are as before. An update that an optimizer leaves out counts as none.
    """
    followers = with_betas(optimizers) if batches != 1 else []
    if not followers:
        yield
        return
    kept = [(group, group["betas"]) for each in followers for group in each.param_groups]
    counts = _counts(followers)
    before, shown = (list(torch._foreach_div(counts, by)) if counts else [] for by in (1.0, batches))
    try:
        _copy(counts, shown)
        for group, betas in kept:
            group["betas"] = tuple(beta**batches for beta in betas)
        yield
    finally:
        for group, betas in kept:
            group["betas"] = betas
        if counts:
            made = torch._foreach_sub(counts, shown)
            torch._foreach_round_(made)  # 1, or 0
            torch._foreach_add_(before, made, alpha=batches)
        _copy(counts, before)
        known = set(map(id, counts))
        for count in _counts(followers):
            if id(count) not in known:  # the first update of its parameter
                count.mul_(batches)


def change_betas(optimizers: Sequence[optim.Optimizer], ratio: float) -> None:
    """The batch is `ratio` times as large from now on. Updates so far are counted in those of the new batch, so that
    bias corrections stay exact.
    """
    for each in with_betas(optimizers):
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
