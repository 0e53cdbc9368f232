"""What the kernel benchmark runs for `orthogonalise`: square matrices, by torch.optim.Muon's settings.

The arithmetic counts whole products, also those of which half suffices since they are symmetric.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from kernels_cases import Buffers, Case, Run
from kernels_shapes import Layout
from torch import Tensor

from kfuse.kernels.orthogonal import orthogonalise

COEFFICIENTS, STEPS, EPS = (3.4445, -4.775, 2.0315), 5, 1e-7
LARGEST = {"cpu": (4, 512), "cuda": (64, 1024)}
"""At most so many matrices, of at most so many rows: a CPU takes a second for one of 1024."""
ITERATED_IN_BF16 = "orthogonal"
"""The name of a result whose error is that of five iterations in bf16."""


def orthogonalise_case(arithmetic: torch.dtype) -> Callable[..., Case]:
    """fp32 matrices of together `layout`'s elements. Raises NotImplementedError for others."""
    result = ITERATED_IN_BF16 if arithmetic == torch.bfloat16 else "out"

    def case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
        if dtype != torch.float32:
            raise NotImplementedError("orthogonalise takes fp32 matrices")
        most, side = LARGEST[device.type]
        side = min(side, math.isqrt(layout.numel))
        count = min(most, layout.numel // side**2)

        def make() -> Buffers:
            matrices = torch.randn(count, side, side, device=device)
            return {"matrices": matrices, result: torch.empty_like(matrices, dtype=arithmetic)}

        def ours(b: Buffers) -> None:
            orthogonalise(b["matrices"].unbind(), b[result].unbind(), COEFFICIENTS, STEPS, EPS)

        def expected(b: Buffers) -> dict[str, Tensor]:
            exact = torch.empty_like(b[result], dtype=torch.float64)
            _batched(b["matrices"].double(), exact)
            return {result: exact}

        compiled = torch.compile(_batched, dynamic=False)
        runs: dict[str, Run] = {
            "kfuse": ours,
            "eager": lambda b: _batched(b["matrices"], b[result]),
            "compile": lambda b: compiled(b["matrices"], b[result]),
        }
        absent = {}
        try:
            muon: Any = importlib.import_module("torch.optim._muon")
        except ImportError as error:
            absent["torch"] = str(error)
        else:
            if arithmetic == torch.bfloat16:
                runs["torch"] = lambda b: _one_by_one(muon._zeropower_via_newtonschulz, b["matrices"], b[result])
            else:
                absent["torch"] = "torch.optim.Muon's function is for bf16 alone"
        moved = count * side**2 * (4 + arithmetic.itemsize)
        return Case(moved, make, runs, absent, expected, arithmetic=STEPS * 6.0 * count * side**3)

    return case


def _batched(matrices: Tensor, out: Tensor) -> None:
    """One product for all matrices, in the type of `out`."""
    (a, b, c), x = COEFFICIENTS, matrices.to(out.dtype)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    out.copy_(x)


def _one_by_one(function: Callable[..., Tensor], matrices: Tensor, outs: Tensor) -> None:
    for matrix, out in zip(matrices.unbind(), outs.unbind(), strict=True):
        out.copy_(function(matrix, COEFFICIENTS, STEPS, EPS))
