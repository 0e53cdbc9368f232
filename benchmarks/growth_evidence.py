"""How often policy=gns grows by chance, and how soon it grows where it should: simulated gradients.

    python benchmarks/growth_evidence.py --json FILE        # ten minutes

The policy sees S and G2 of each step as training computes them from M micro-batches, of a gradient whose true value G
and covariance Sigma stay the same. Gradients are normal, or Student's t with three degrees of freedom (a factor for
each micro-batch). Sigma's eigenvalues are i^-p for i = 1 .. 200; G is in proportion to their roots.

1. The batch is at the target, factor x noise scale: how many runs of 2,000 steps grow at all.
2. The noise scale is 2, 4 and 16 times the batch: after how many steps it first grows (median), within 2,000.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np
from machine import parser_of, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kfuse.policies import GNSPolicy
from kfuse.policies.signals import Bounds, Signals
from kfuse.statistics.noise_scale import moments

STEPS, BATCH = 2000, 64
RATIOS = (1, 2, 4, 16)
"""Noise scales over the batch."""
CASES = [(p, m, tails) for p in (0.0, 1.0, 2.0) for m in (2, 4, 8) for tails in ("normal", "t")]


def steps_of(rng: np.random.Generator, power: float, micro_batches: int, tails: str, ratio: float) -> Any:
    """S and G2 of STEPS steps, a pair each."""
    variances = np.arange(1.0, 201.0) ** -power
    variances /= variances.sum()  # tr(Sigma) = 1
    true = np.sqrt(variances / (ratio * BATCH))  # |G|^2 = tr(Sigma) / (ratio BATCH)
    noise = rng.standard_normal((STEPS, micro_batches, 200)) * np.sqrt(variances * micro_batches / BATCH)
    if tails == "t":
        noise *= np.sqrt(1 / rng.chisquare(3, (STEPS, micro_batches, 1)))  # 3 / chi^2 has the mean 3
    gradients = true + noise
    squares = (gradients**2).sum(2).sum(1) * BATCH / micro_batches
    means = (gradients.mean(1) ** 2).sum(1)
    return [moments(a, b, BATCH, micro_batches) for a, b in zip(squares.tolist(), means.tolist(), strict=True)]


def first_growth(pairs: Any, micro_batches: int) -> int | None:
    """The step at whose signals it first asks for a larger batch."""
    policy, bounds = GNSPolicy(), Bounds(1, 1 << 20, 1, 1)
    size = BATCH // micro_batches
    for step, (variance, grad_sq) in enumerate(pairs):
        seen = Signals(
            step=step, epoch=0, samples=BATCH * (step + 1), lr=1.0, lr_scale=1.0, batch_size=BATCH, micro_batch=size,
            micro_batches=micro_batches, workers=1, bounds=bounds, grad_variance=variance, grad_sq=grad_sq,
        )  # fmt: skip
        decision = policy.decide(seen)
        if decision is not None and (decision.batch_size or 0) > BATCH:
            return step
    return None


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    args = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    for power, micro_batches, tails in track(CASES, transient=True):
        firsts: dict[int, list[int | None]] = {}
        for ratio in RATIOS:
            runs = range(args.runs if ratio == 1 else max(1, args.runs // 5))
            each = [steps_of(rng, power, micro_batches, tails, ratio) for _ in runs]
            firsts[ratio] = [first_growth(pairs, micro_batches) for pairs in each]
        variances = np.arange(1.0, 201.0) ** -power
        row: dict[str, Any] = {
            "directions": round(float(variances.sum() ** 2 / (variances**2).sum()), 1),
            "M": micro_batches,
            "tails": tails,
            "runs": len(firsts[1]),
            "grew by chance": sum(step is not None for step in firsts[1]),
        }
        for ratio in RATIOS[1:]:
            middle = median(math.inf if step is None else step for step in firsts[ratio])
            row[f"first growth, N = {ratio} B"] = middle if math.isfinite(middle) else None
        rows.append(row)
    table = Table(title=f"policy=gns, {STEPS} steps at a noise scale that stands still")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    Console().print(table)
    grew, runs = (sum(row[name] for row in rows) for name in ("grew by chance", "runs"))
    print(f"at the target {grew} of {runs} runs grew")
    write(args.json, ["numpy"], rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
