"""Seesaw beside the cosine decay that it replaces, on noisy linear regression, computed exactly.

    python benchmarks/seesaw.py --json benchmarks/results/seesaw.json    # some minutes; no times are taken

Samples (x, y) with x ~ N(0, H) and y = <w*, x> + noise of variance 1; H = diag(i^-1.5), i = 1 .. 100. At first w - w* =
1 in each coordinate. For such data the expectation m_i of (w - w*)_i^2 follows a recursion, without random numbers and
in float64. For a step of rate a with B samples, where r = sum_j h_j m_j is twice the excess risk,

    m_i  <-  m_i - 2 a h_i m_i + a^2 e_i,    e_i = E[g_i^2] = (1 + 1/B) h_i^2 m_i + (r + 1) h_i / B

There are two optimizers: SGD, and SGD whose rate is divided by sqrt(sum_i e_i), the normalised SGD that Seesaw's
authors analyse in place of Adam (arXiv 2510.14717).

The decay has a fixed batch size B0. Seesaw is kfuse's policy: it gets each step's signals, what it decides applies as
many steps later as in training, and lr.scaling is sqrt for normalised SGD and linear for SGD. Both use the same samples
and the same rate. `rate` is that rate over the best one of a sweep for the decay. `most` is batch.max over B0. Reported
are

    steps   Seesaw's over the decay's, beside their limit for small cuts and batches of any size, the curve's integral
    risk    the excess risk at the end, Seesaw's over the decay's. Two controls have Seesaw's batch sizes and steps: the
            rate falls with the curve in full (`cut twice`), or not at all (`no cut`)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from machine import parser_of, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kfuse.policies import SeesawPolicy
from kfuse.policies.signals import DECISION_LAG, Bounds, Signals
from kfuse.settings.tree import BATCH_MAX
from kfuse.train.learning_rate import gain

H = np.arange(1, 101) ** -1.5
RATES = [2.0 ** (k / 2) for k in range(-18, 5)]
SCALING: dict[str, Any] = {"normalised SGD": "sqrt", "SGD": "linear"}
CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "quarter_cosine": lambda done: math.cos(math.pi * done / 2),
}
VARIANTS: list[tuple[float, int | None, float]] = [
    (1.01, None, 0.25),
    (1.01, None, 1.0),
    (1.1, None, 1.0),
    (2.0, None, 1.0),
    (1.1, 8, 1.0),
]
"""cut; batch.max over B0, None: as large as can be; the rate of both, over the best one for the decay."""

Rate = Callable[[float, int, float], float]
"""From the part of the run that is over, the batch size and the policy's lr_scale: the factor on the rate."""


@dataclass(frozen=True)
class Run:
    """How many steps a run took, and the excess risk at its end; infinite where it has diverged."""

    steps: int
    risk: float


def train(
    optimizer: str, samples: int, base: int, lr: float, rate: Rate, policy: SeesawPolicy | None = None, most: int = 1
) -> Run:
    """Trains on so many samples. policy: None: the batch size stays. most: batch.max over the base batch size."""
    m, used, step, batch, lr_scale = np.ones_like(H), 0, 0, base, 1.0
    bounds = Bounds(1, min(most * base, BATCH_MAX), 1, 1)
    decided: dict[int, tuple[int | None, float | None]] = {}
    while used < samples:
        new_batch, new_scale = decided.pop(step, (None, None))
        batch, lr_scale = new_batch or batch, new_scale or lr_scale
        size = min(batch, samples - used)
        squared = (1 + 1 / size) * H**2 * m + (float(H @ m) + 1) * H / size
        a = lr * rate(used / samples, batch, lr_scale)
        if optimizer == "normalised SGD":
            a /= math.sqrt(float(squared.sum()))
        m = m - 2 * a * H * m + a**2 * squared
        if not m[0] < 1e6:
            return Run(step, math.inf)
        used, step = used + size, step + 1
        if policy is not None:
            decision = policy.decide(signals(step - 1, used, used / samples, batch, lr_scale, base, bounds))
            if decision is not None:
                decided[step - 1 + DECISION_LAG] = decision.batch_size, decision.lr_scale
    return Run(step, float(H @ m) / 2)


def signals(step: int, used: int, done: float, batch: int, lr_scale: float, base: int, bounds: Bounds) -> Signals:
    """What the policy sees after a step. A micro-batch is one sample."""
    return Signals(
        step=step,
        epoch=0,
        samples=used,
        lr=1.0,
        lr_scale=lr_scale,
        batch_size=batch,
        micro_batch=1,
        micro_batches=batch,
        workers=1,
        done=done,
        base_batch_size=base,
        bounds=bounds,
    )


def compare(optimizer: str, curve: str, samples: int, base: int) -> Iterator[dict[str, Any]]:
    """A row for each of `VARIANTS`."""
    value, scaling = CURVES[curve], SCALING[optimizer]
    decays = {lr: train(optimizer, samples, base, lr, lambda done, batch, scale: value(done)) for lr in RATES}
    best = min(decays, key=lambda lr: decays[lr].risk)
    rates: dict[str, Rate] = {
        "seesaw": lambda done, batch, scale: scale * gain(scaling, batch, base),
        "cut twice": lambda done, batch, scale: value(done),
        "no cut": lambda done, batch, scale: 1.0,
    }
    for cut, most, part in VARIANTS:
        lr, decay = part * best, decays[part * best]
        policy = SeesawPolicy(cut, "cosine" if curve == "cosine" else "quarter_cosine")
        runs = {
            name: train(optimizer, samples, base, lr, rate, policy, most or BATCH_MAX) for name, rate in rates.items()
        }
        yield {
            "optimizer": optimizer,
            "curve": curve,
            "batch_size": base,
            "cut": cut,
            "most": most,
            "rate": part,
            "lr": lr,
            "decay_steps": decay.steps,
            "decay_risk": decay.risk,
            "steps": runs["seesaw"].steps / decay.steps,
            "steps_limit": float(np.mean([max(value((k + 0.5) / 10_000), 1 / (most or 1e9)) for k in range(10_000)])),
            "risk": {name: run.risk / decay.risk for name, run in runs.items()},
        }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=2**22)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512, 4096])
    args = parser.parse_args()
    cases = [(optimizer, curve, base) for optimizer in SCALING for curve in CURVES for base in args.batch_sizes]
    rows: list[dict[str, Any]] = []
    with Progress(transient=True) as bar:
        for optimizer, curve, base in bar.track(cases):
            rows += compare(optimizer, curve, args.samples, base)
    table = Table(title="Seesaw over the decay that it replaces")
    for heading in ("optimizer", "curve", "B0", "rate", "cut", "most", "steps", "limit", "risk", "cut twice", "no cut"):
        table.add_column(heading, justify="right")
    for row in rows:
        words = [row["optimizer"], row["curve"], str(row["batch_size"]), f"{row['rate']:g}", f"{row['cut']:g}"]
        risks = [f"{risk:.3g}" for risk in row["risk"].values()]
        table.add_row(*words, str(row["most"] or ""), f"{row['steps']:.4f}", f"{row['steps_limit']:.4f}", *risks)
    Console(width=120).print(table)
    write(args.json, ["torch", "numpy"], samples=args.samples, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
