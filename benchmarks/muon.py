"""Steps with Muon for the matrices and AdamW for the rest: kf.FusedMuon beside DDP and ZeroRedundancyOptimizer.

    python benchmarks/muon.py --rounds 24 --steps 3 --json benchmarks/results/muon.json
    python benchmarks/muon.py --rounds 24 --steps 3 --samples 4
    python benchmarks/muon.py --rounds 24 --steps 3 --workers 1 --variants local,replicated

`ddp` steps torch.optim.Muon and fused AdamW on each worker, `zero` has ZeroRedundancyOptimizer in Muon's place, `torch`
is `ddp`'s pair in kf.Optimizer, the others are kf.FusedMuon. All have the arithmetic of the Newton-Schulz iteration
that kfuse takes on this machine: where that is fp32, torch's function, which has bf16, is replaced by the same
in fp32. The measurement is that of step.py: interleaved, paired within rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from step import measure
from step_variants import DDP, VARIANTS, Kfuse, Settings, Variant
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import _muon

import kfuse as kf
from kfuse.kernels.orthogonal import orthogonalise
from kfuse.optim.muon import bf16_is_faster, hidden_matrices

MUON: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01}


def _in_fp32(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    out = torch.empty_like(matrix)
    orthogonalise([matrix], [out], coefficients, steps, eps)
    return out


def _parts(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    hidden = hidden_matrices(model)
    ids = set(map(id, hidden))
    return hidden, [p for p in model.parameters() if id(p) not in ids]


class _Plain(Variant):
    """torch's optimizers, one after the other."""

    def optimizers(self, gpt: nn.Module) -> list[torch.optim.Optimizer]:
        if not bf16_is_faster(self.device.type):
            _muon._zeropower_via_newtonschulz = _in_fp32  # type: ignore[assignment]
        matrices, others = _parts(gpt)
        return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW, fused=True)]

    def update(self) -> None:
        for optimizer in self.pair:
            optimizer.step()
        for optimizer in self.pair:
            optimizer.zero_grad()


class Local(_Plain):
    """Each worker for itself."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.pair = self.optimizers(self.model)


class Ddp(_Plain, DDP):
    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.pair = self.optimizers(self.ddp.module)


class Zero(Ddp):
    """Each matrix has one owner, whose optimizer updates it and broadcasts it; AdamW is as with DDP."""

    def optimizers(self, gpt: nn.Module) -> list[torch.optim.Optimizer]:
        muon, adamw = super().optimizers(gpt)
        matrices = muon.param_groups[0]["params"]
        return [ZeroRedundancyOptimizer(matrices, torch.optim.Muon, parameters_as_bucket_view=True, **MUON), adamw]


class Fused(Kfuse):
    """kf.FusedMuon."""

    def __init__(self, settings: Settings, rank: int, *, statistics: bool = True, **comm: Any) -> None:
        super().__init__(settings, rank, statistics=statistics, **comm)
        self.optimizer = self.made()
        if not statistics:
            self.optimizer.statistics.push = lambda *_: None  # type: ignore[method-assign]

    def made(self) -> Any:
        matrices, others = _parts(self.model)
        return kf.FusedMuon([{"params": matrices}, {"params": others, "use_muon": False, **ADAMW}], **MUON)


class Wrapped(Fused):
    """torch's optimizers in kf.Optimizer: every worker orthogonalises every matrix."""

    def made(self) -> Any:
        matrices, others = _parts(self.model)
        return kf.Optimizer(torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW, fused=True))


def _fused(kind: type[Fused] = Fused, **options: Any) -> Any:
    return lambda settings, rank: kind(settings, rank, **options)


# Workers import this file too: there step.py finds these variants.
VARIANTS.clear()
VARIANTS.update({"local": Local, "ddp": Ddp, "zero": Zero, "torch": _fused(Wrapped)})
VARIANTS.update({"replicated": _fused(), "replicated-no-stats": _fused(statistics=False)})
VARIANTS.update({"sharded": _fused(state="sharded"), "reproducible": _fused(schedule="all_to_all", reproducible=True)})

PAIRS = (("replicated", "zero"), ("sharded", "zero"), ("replicated", "replicated-no-stats"), ("replicated", "torch"))

if __name__ == "__main__":
    measure("muon", __doc__ or "", tuple(VARIANTS), PAIRS)
