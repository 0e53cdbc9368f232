"""`orthogonalise`: a matrix's polar factor, nearly, by a Newton-Schulz iteration, as Muon's update needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.kernels.dispatch import Kernel


@dataclass
class OrthogonaliseArguments:
    """Newton-Schulz iterations of matrices of one shape, each with the bits that it has alone.

    As torch.optim.Muon makes them (Jordan et al. 2024): X = G / |G|, then `steps` times X = a X + (b A + c A A) X with
    A = X X^T. For U S V^T, the singular value decomposition of G, the result is U S' V^T; with the usual settings S' is
    between about 0.7 and 1.2, but for the smallest of S. A matrix with more rows than columns is transposed meanwhile.

    Args:
        matrices: [m, n] each, fp32, of any strides; not empty.
        outs: [m, n] each, in the arithmetic's type: fp32 or bf16. Products of bf16 matrices are summed in fp32.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: the least |G| that is divided by.

    Raises ValueError where shapes or types do not fit.
    """

    matrices: Sequence[Tensor]
    outs: Sequence[Tensor]
    coefficients: tuple[float, float, float]
    steps: int
    eps: float

    def __post_init__(self) -> None:
        shape, dtype = self.matrices[0].shape, self.outs[0].dtype
        if len(shape) != 2 or dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"orthogonalise: must be matrices, to fp32 or bf16, got {list(shape)} to {dtype}")
        for matrix, out in zip(self.matrices, self.outs, strict=True):
            if not (matrix.shape == out.shape == shape and matrix.dtype == torch.float32 and out.dtype == dtype):
                one, other = (f"{list(tensor.shape)}, {tensor.dtype}" for tensor in (matrix, out))
                raise ValueError(f"orthogonalise: must be alike, and fp32 at first, got {one} to {other}")

    @property
    def first(self) -> Tensor:
        return self.outs[0]


def orthogonalise_by_torch(given: OrthogonaliseArguments) -> None:
    """One matrix after the other: together they are no faster on a CPU, and bits must not depend on the others."""
    a, b, c = given.coefficients
    for matrix, out in zip(given.matrices, given.outs, strict=True):
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.to(out.dtype, copy=True)
        x = x.T if tall else x
        x.div_(x.norm().clamp(min=given.eps))
        for _ in range(given.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        out.copy_(x.T if tall else x)


orthogonalise = Kernel("orthogonalise", OrthogonaliseArguments, "first", orthogonalise_by_torch)
