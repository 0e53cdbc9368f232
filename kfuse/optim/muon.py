"""Muon, data-parallel, for a model's matrices, beside AdamW for its other parameters."""

from __future__ import annotations

import logging
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.consistency import share_from_first
from kfuse.optim.flat_updates import FlatUpdates
from kfuse.optim.muon_rule import COEFFICIENTS, MuonRule
from kfuse.optim.refuse import refuse_options
from kfuse.session import current

_LOG = logging.getLogger("kfuse")

Arithmetic = Literal["auto", "bf16", "fp32"]
AdjustLr = Literal["original", "match_rms_adamw"]


class FusedMuon(DistributedOptimizer):
    """Muon (Jordan et al. 2024), with torch.optim.Muon's arithmetic, defaults and state, data-parallel.

    Parameter groups with `use_muon=True`, which is the default, have matrices, [m, n], or stacks of them, [k, m, n], of
    which each is orthogonalised: by one worker, which shares the result. Groups with `use_muon=False` (embeddings,
    output layers, norms, biases) are AdamW's, with `betas` and `adamw_eps`, which in a group is `eps`. `lr` and
    `weight_decay` are for all groups that have none of their own.

    Parameters, `clip_norm` and `skip_nonfinite` are as for FusedAdamW.
    """

    shards_state = True

    def __init__(
        self,
        model: nn.Module | ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        arithmetic: Arithmetic = "auto",
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        """model: parameter groups, or a model: its `hidden_matrices` are Muon's then, its other parameters AdamW's.

        adjust_lr_fn: what the rate of an [m, n] matrix is multiplied with: sqrt(max(1, m / n)), "original" and None; or
        0.2 sqrt(max(m, n)), "match_rms_adamw" (Liu et al. 2025, "Muon is scalable for LLM training"), by which AdamW's
        rate suits Muon too. arithmetic: the type of the Newton-Schulz iteration; "auto": bf16 as torch has it, or fp32
        on processors without products of bf16, on all workers what suits rank 0's. It is kept in the state.

        Raises ValueError for numbers out of range, a parameter for Muon that is no matrix, and a model without hidden
        matrices or without other parameters.
        """
        self.check_arguments(lr, weight_decay, momentum, ns_steps, betas, eps, adamw_eps, adjust_lr_fn, arithmetic)
        session = current()
        if arithmetic == "auto":
            # Whether products of bf16 take clearly less time than fp32's. Timed, it would differ from run to run.
            by_type = session.group.device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
            faster = torch.tensor([int(by_type)], device=session.group.device)
            if not session.elastic:  # else all take the first worker's state
                share_from_first(session.group, [faster])
            arithmetic = "bf16" if faster.item() else "fp32"
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "arithmetic": arithmetic, "use_muon": True}
        self._of_adamw = {"betas": betas, "eps": adamw_eps, "maximize": False}
        groups: ParamsT = model if not isinstance(model, nn.Module) else self._groups_of(model)
        torch.optim.Optimizer.__init__(self, groups, defaults)
        self._attach(FlatUpdates(self, MuonRule()), clip_norm, skip_nonfinite)
        if session.worker == 0:
            by_muon, others = (
                sum(p.numel() for group in self.param_groups if group["use_muon"] == chosen for p in group["params"])
                for chosen in (True, False)
            )
            log = _LOG.warning if isinstance(model, nn.Module) else _LOG.info  # kfuse has chosen which
            log(
                "Muon has %d elements of matrices, in %s arithmetic; AdamW has the other %d",
                by_muon,
                arithmetic,
                others,
            )

    @staticmethod
    def check_arguments(
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        adamw_eps: float = 1e-8,
        adjust_lr_fn: str | None = None,
        arithmetic: str = "auto",
        **_: object,
    ) -> None:
        """Raises ValueError as the constructor does; it needs no parameters and no workers."""
        refuse_options(lr, betas, eps, weight_decay)
        if not adamw_eps >= 0:
            raise ValueError(f"adamw_eps={adamw_eps!r}: must be 0 or more")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: must be in [0, 1)")
        if ns_steps not in range(1, 100):
            raise ValueError(f"ns_steps={ns_steps!r}: must be 1 to 99")
        for name, value, allowed in (
            ("adjust_lr_fn", adjust_lr_fn or "original", get_args(AdjustLr)),
            ("arithmetic", arithmetic, get_args(Arithmetic)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")

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

    def _groups_of(self, model: nn.Module) -> list[dict[str, Any]]:
        hidden, others = self.check_model(model)
        return [{"params": hidden}, {"params": others, "use_muon": False}]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Also raises ValueError for options out of range, and a parameter of Muon's that is no matrix."""
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        group = {**param_group, "params": params}
        if group.get("arithmetic") == "auto":
            group["arithmetic"] = self.defaults["arithmetic"]
        if not group.setdefault("use_muon", True):
            group = {**self._of_adamw, **group}
        self.check_arguments(**{name: value for name, value in (self.defaults | group).items() if name != "params"})
        for k, entry in enumerate(params if group["use_muon"] else ()):
            name, p = entry if isinstance(entry, tuple) else (f"parameter {k}", entry)
            if p.dim() not in (2, 3):
                raise ValueError(
                    f"{name} of group {len(self.param_groups)} has the shape {tuple(p.shape)}: Muon takes matrices, "
                    "[m, n], and stacks of them, [k, m, n]; a group with use_muon=False is AdamW's"
                )
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's. Groups whose state was torch.optim.Muon's or AdamW's keep what only this class has.

        Raises ValueError for a group of Muon's that is AdamW's here, or the other way round; then nothing is loaded.
        """
        for k, (group, own) in enumerate(zip(state["param_groups"], self.param_groups, strict=True)):
            by_muon = group.setdefault("use_muon", "momentum" in group)
            if by_muon != own["use_muon"]:
                raise ValueError(f"group {k} of the state has use_muon={by_muon}: must be {own['use_muon']}, as here")
            group.setdefault("arithmetic", own["arithmetic"])
        super().__setstate__(state)


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
