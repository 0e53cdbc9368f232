"""Muon for a model's hidden matrices, AdamW for its other parameters: `optimizer=muon` at the shell."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor, nn

from kfuse.optim.refuse import refuse_options
from kfuse.optim.wrap import Optimizer

_LOG = logging.getLogger("kfuse")


class MuonAdamW(Optimizer):
    """torch.optim.Muon (Jordan et al. 2024) for `hidden_matrices`, torch.optim.AdamW for the other parameters.

    Both have one learning rate and one weight decay: adjust_lr_fn="match_rms_adamw" gives Muon's updates the size of
    AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"). For rates of their own make the two optimizers and
    give them to kf.Optimizer. momentum: Muon's, by Nesterov. betas, eps: AdamW's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        momentum: float = 0.95,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        skip_nonfinite: bool | None = None,
    ) -> None:
        """Raises ValueError for a torch without Muon, for numbers out of range, and for a model without hidden matrices
        or without other parameters.
        """
        self.check_arguments(lr, momentum, betas, eps, weight_decay)
        hidden, others = self.check_model(model)
        muon = torch.optim.Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn)
        adamw = torch.optim.AdamW(others, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay)
        super().__init__(muon, adamw, clip_norm=clip_norm, skip_nonfinite=skip_nonfinite)
        if self._session.worker == 0:
            counts = (f"{len(each)} ({sum(p.numel() for p in each)} elements)" for each in (hidden, others))
            _LOG.warning("hidden matrices, by Muon: %s; other parameters, by AdamW: %s", *counts)

    @staticmethod
    def check_arguments(
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **_: object,
    ) -> None:
        """Raises ValueError as the constructor does; it needs no parameters and no workers."""
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"torch {torch.__version__} has no torch.optim.Muon: it is there since torch 2.9")
        refuse_options(lr, betas, eps, weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: must be in [0, 1)")

    @staticmethod
    def check_model(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the parameters for Muon, and those for AdamW. Raises ValueError where one of them has none."""
        hidden = hidden_matrices(model)
        ids = {id(p) for p in hidden}
        others: list[Tensor] = [p for p in model.parameters() if id(p) not in ids]
        if not hidden or not others:
            lacks = "parameters for AdamW" if hidden else "hidden matrices for Muon: use adamw or sgd"
            raise ValueError(f"{type(model).__name__} has no {lacks}")
        return hidden, others


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Returns the 2-d parameters of the model's blocks, but for embeddings.

    Blocks are what nn.ModuleLists hold, as transformers have their layers. In a model without one they are all
    nn.Linear but the last, which is the output.
    """
    modules = list(model.modules())
    embeddings: list[Tensor] = [m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    lists = [m for m in modules if isinstance(m, nn.ModuleList)]
    inside: list[Tensor] = [p for each in lists for p in each.parameters()]
    if not lists:
        inside = [m.weight for m in modules if isinstance(m, nn.Linear)][:-1]
    found = {id(p) for p in inside if p.ndim == 2} - {id(p) for p in embeddings}
    return [p for p in model.parameters() if id(p) in found]
