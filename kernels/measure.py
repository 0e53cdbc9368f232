"""What `reduce` can measure while the contributions pass through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.kernels.table import num_blocks

MAX_MEASURED_ROWS = 16
"""Most contributions whose own norms and dot products are kept: two sums each, in registers."""


@dataclass(frozen=True)
class Measures:
    """Where `reduce` writes partial sums, one per BLOCK of the output; `sum_partials` adds them up. None: not measured.

    Contribution k is taken as `rows[k] = shares[k] / scale * g_k`, a weighted gradient, so that `out` is the mean gbar
    of the g_k. All are fp32 and on the rows' device; with n elements and K rows there are b = num_blocks(n) blocks.
    """

    sumsq: Tensor | None = None
    """[b]: |gbar|^2. With fp32 rows the bits are those of `block_sumsq(out)`."""
    variance: Tensor | None = None
    """[b]: sum_k shares[k] |g_k - gbar|^2, each difference taken before it is squared, so that nothing cancels."""
    noise: Tensor | None = None
    """[b]: the same, each element divided by (sqrt(exp_avg_sq) + eps)^2: the noise Adam's preconditioner leaves.

    To correct exp_avg_sq by c = 1 - beta2^t, give eps * sqrt(c) and multiply the sum by c.
    """
    row_sumsq: Tensor | None = None
    """[K, b]: |rows[k]|^2."""
    row_dot: Tensor | None = None
    """[K, b]: rows[k] . gbar; divided by both norms it is the cosine between a contribution and the mean."""
    shares: Tensor | None = None
    """[K], for variance and noise: each contribution's part of the samples; 0 for a row of zeros that has none."""
    exp_avg_sq: Tensor | None = None
    """[n], for noise."""
    eps: float = 0.0

    @property
    def centred(self) -> bool:
        return self.variance is not None or self.noise is not None

    @property
    def of_rows(self) -> bool:
        return self.row_sumsq is not None or self.row_dot is not None

    @property
    def any(self) -> bool:
        return self.sumsq is not None or self.centred or self.of_rows

    def check(self, rows: Tensor) -> None:
        """Raises ValueError where a tensor is missing, does not fit `rows` ([K, n]), or K is too large."""
        count, numel = rows.shape
        blocks = num_blocks(numel)
        shapes = {
            "sumsq": (blocks,),
            "variance": (blocks,),
            "noise": (blocks,),
            "row_sumsq": (count, blocks),
            "row_dot": (count, blocks),
            "shares": (count,),
            "exp_avg_sq": (numel,),
        }
        for name, shape in shapes.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(
                    f"reduce: {name} must be contiguous float32 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
                )
            if tensor.device != rows.device:
                raise ValueError(f"reduce: {name} is on {tensor.device}, the rows on {rows.device}")
        if self.centred and self.shares is None:
            raise ValueError("reduce: variance and noise need shares")
        if self.noise is not None and self.exp_avg_sq is None:
            raise ValueError("reduce: noise needs exp_avg_sq")
        if self.of_rows and count > MAX_MEASURED_ROWS:
            raise ValueError(f"reduce: row_sumsq and row_dot take at most {MAX_MEASURED_ROWS} rows, got {count}")


NOTHING = Measures()
