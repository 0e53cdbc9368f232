"""The noise scale of the normalisation layers beside the whole model's, while a GPT trains on text.

    python benchmarks/norm_noise.py --json benchmarks/results/norm_noise.json

One process, several micro-batches a step. The model's noise scale is the engine's, from the micro-batches' gradients;
that of the layers comes from each example's gradient in kf.nn.LayerNorm's backward. Both are running ratios with the
same decay. What is reported is their ratio, at several batch sizes: a number to look up, not a constant of nature.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import parser_of, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import kfuse as kf
from kfuse.data.builtin import load_text
from kfuse.models import GPT
from kfuse.nn import norm_layers_noise
from kfuse.statistics.noise_scale import NoiseScale

MICRO_BATCHES, BLOCK = 8, 64
BURN_IN = 100  # steps, of which the running means still remember the first, steep ones


def train(micro_batch: int, steps: int, lr: float, seed: int) -> Iterator[dict[str, float | None]]:
    torch.manual_seed(seed)
    split = load_text(block_size=BLOCK)
    model = GPT(split.spec["vocab_size"], BLOCK, noise_norm=True)
    opt = kf.FusedAdamW(model.parameters(), lr=lr)
    chance, layers = np.random.default_rng(seed), NoiseScale(decay=0.99)
    for step in range(steps):
        found, losses = [], []
        for j in range(MICRO_BATCHES):
            x, y = split.train.fetch(chance.integers(len(split.train), size=micro_batch))
            with opt.micro_batch(samples=micro_batch, last=j == MICRO_BATCHES - 1):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            losses.append(loss.item())
            noise = norm_layers_noise(model)
            assert noise is not None
            found.append((noise.grad_variance, noise.grad_sq))
        opt.step()
        opt.zero_grad()
        layers.update(*np.mean(found, axis=0))
        stats, of_layers = opt.stats, layers.estimate()
        assert stats is not None
        yield {
            "step": step,
            "loss": float(np.mean(losses)),
            "model": stats.noise_scale,
            "model_low": stats.noise_scale_low,
            "model_high": stats.noise_scale_high,
            "layers": of_layers.noise_scale,
            "layers_low": of_layers.low,
            "layers_high": of_layers.high,
        }


def ratios(course: list[dict[str, Any]]) -> list[float]:
    """Layers' to model's, where both are known."""
    return [c["layers"] / c["model"] for c in course if c["step"] >= BURN_IN and c["layers"] and c["model"]]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 16], help="sizes, in sequences")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.micro_batches) < 2 or args.steps <= BURN_IN:
        parser.error(f"allowed are micro-batches of 2 or more, and more than {BURN_IN} steps")
    courses: dict[int, list[dict[str, Any]]] = {}
    with Progress(transient=True) as bar:
        for size in args.micro_batches:
            run = train(size, args.steps, args.lr, args.seed)
            courses[size] = list(bar.track(run, total=args.steps, description=f"micro-batches of {size}"))
    table = Table(title=f"Noise scale of the normalisation layers to the model's, steps {BURN_IN} to {args.steps}")
    for heading in ("batch", "loss", "model", "layers", "ratio: median", "5 % to 95 %", "steps known"):
        table.add_column(heading, justify="right")
    figures = {}
    for size, course in courses.items():
        found, last = ratios(course), course[-1]
        low, high = np.quantile(found, [0.05, 0.95]) if found else (np.nan, np.nan)
        middle = median(found) if found else float("nan")
        figures[size] = {"median": middle, "p5": float(low), "p95": float(high), "known": len(found)}
        noise = [f"{last[name]:.0f}" if last[name] else "unknown" for name in ("model", "layers")]
        spread = f"{low:.2f} to {high:.2f}"
        table.add_row(
            f"{MICRO_BATCHES} x {size}", f"{last['loss']:.2f}", *noise, f"{middle:.2f}", spread, str(len(found))
        )
    Console().print(table)
    write(args.json, ["torch", "numpy"], ratio=figures, courses=courses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
