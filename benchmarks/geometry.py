"""Batch sizes that follow noise scales in the optimizer's own norm, beside the Euclidean one's: does it pay?

    python benchmarks/geometry.py --json benchmarks/results/geometry.json

A GPT of 120,576 parameters on text, by AdamW and by Muon with AdamW for what is no matrix of a block; paired seeds, the
same samples in the same order. The fixed batch is 4 micro-batches of 2 sequences. A policy starts there and doubles the
batch where factor * noise scale > sqrt(2) * batch; the rate grows by sqrt(2). Noise scales come from the step's
micro-batches (geometry_norms.py), as running means since the batch last changed. Rates come from a coarse search at the
fixed batch.

Reported: steps and samples until the held-out loss is what the fixed batch ends with, over the fixed batch's; samples
over those with which Euclidean policies take as many steps, interpolated between their factors; costs, where a step
costs as much as r samples beside its own, over those of the Euclidean policy with the best factor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from geometry_norms import Place, l1, l2, matrices, moments, nuclear, plug_in, show
from machine import parser_of, write
from rich.progress import track
from torch import Tensor

from kfuse.data import DataSplit
from kfuse.data.builtin import load_text
from kfuse.models import GPT
from kfuse.statistics.noise_scale import t_of_mean

MICRO, SMALL, LARGE, BLOCK, LAYERS = 2, 8, 128, 64, 2  # samples of a micro-batch; batch sizes; tokens of a sample
SAMPLES, MOST = 5120, 3  # of the fixed batch's run; how often as many the others may take
DECAY, EVERY = 0.95, 10  # of the running means; steps between decisions
LR = {"adamw": 2e-3, "muon": 1e-2}
EUCLIDEAN = {"euclidean / 2": 0.5, "euclidean": 1.0, "euclidean * 2": 2.0}
COSTS = (16, 64, 256)

Policy = tuple[Callable[[Tensor, int], tuple[float, float]], float, int]
"""What measures (c, a), the factor, and every how many steps it is measured."""


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon's update, in fp32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = self.orthogonal(p.grad.lerp(momentum, 0.95)) * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                p.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * update)

    def orthogonal(self, g: Tensor) -> Tensor:
        x = g.mT if g.shape[0] > g.shape[1] else g
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.mT if g.shape[0] > g.shape[1] else x


def spectral(places: Sequence[Place], parts: Tensor, size: int) -> tuple[float, float]:
    """From quarters of the batch, since nuclear norms of all contributions take long."""
    return moments(partial(nuclear, places=places), parts.unflatten(0, (4, -1)).mean(1), size * len(parts) // 4)


def train(
    optimizer: str, policy: Policy, seed: int, data: DataSplit, target: float | None = None
) -> dict[str, list[Any]]:
    """Trains, up to the target if given. Returns (step, samples, held-out loss), (step, batch), (step, noise scale)."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed).permutation(len(data.train))
    model = GPT(256, BLOCK, LAYERS, 4, 64, dropout=0.0)
    named = dict(model.named_parameters())
    muon = [n for n, p in named.items() if optimizer == "muon" and n.startswith("blocks") and p.ndim == 2]
    rest = [p for n, p in named.items() if n not in muon]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, LR["adamw"], foreach=True)]
    optimizers += [Muon([named[n] for n in muon], {"lr": LR["muon"]})] if muon else []
    base = [o.param_groups[0]["lr"] for o in optimizers]
    held = data.heldout.fetch(np.linspace(0, len(data.heldout) - 1, 64).astype(np.int64))
    (measure, factor, every), batch, used, step, start, evaluated = policy, SMALL, 0, 0, 0, 0
    run: dict[str, list[Any]] = {"losses": [], "batches": [(0, batch)], "scales": []}
    sums, weight = np.zeros(2), 0.0
    while used < (SAMPLES if target is None else MOST * SAMPLES):
        for opt, lr in zip(optimizers, base, strict=True):
            opt.param_groups[0]["lr"] = lr * math.sqrt(batch / SMALL) * min(1.0, (used + batch) / (50 * SMALL))
        contributions = []
        for j in range(used, used + batch, MICRO):
            x, y = data.train.fetch(order[np.arange(j, j + MICRO) % len(order)])
            found = torch.autograd.grad(F.cross_entropy(model(x).flatten(0, 1), y.flatten()), list(named.values()))
            contributions.append(torch.cat([g.flatten() for g in found]))
        parts = torch.stack(contributions)
        for p, g in zip(named.values(), parts.mean(0).split([p.numel() for p in named.values()]), strict=True):
            p.grad = g.view_as(p)
        for opt in optimizers:
            opt.step()
        used, step = used + batch, step + 1
        if step % every == 0:
            decay = DECAY**every
            sums = decay * sums + (1 - decay) * np.array(measure(parts, MICRO))
            weight = decay * weight + 1 - decay
            if step - start >= 2 * EVERY and step % EVERY < every:
                c, a = sums / weight
                scale = float(c / a) if a > 0 else math.nan
                run["scales"].append((step, scale))
                if factor * scale > math.sqrt(2) * batch and batch < LARGE:
                    batch, start, sums, weight = 2 * batch, step, np.zeros(2), 0.0
                    run["batches"].append((step, batch))
        if used - evaluated >= 256:
            evaluated = used
            with torch.no_grad():
                loss = F.cross_entropy(model(held[0]).flatten(0, 1), held[1].flatten())
            run["losses"].append((step, used, float(loss)))
            if target is not None and reached(run["losses"], target):
                break
    return run


def smooth(losses: list[Any]) -> list[float]:
    """Means of the latest 5."""
    return [float(np.mean([loss for _, _, loss in losses[max(0, i - 4) : i + 1]])) for i in range(len(losses))]


def reached(losses: list[Any], target: float) -> tuple[float, float] | None:
    """Steps and samples until the smoothed loss is so low, interpolated."""
    means = smooth(losses)
    for i in range(1, len(means)):
        if means[i] <= target:
            part = min(1.0, max(0.0, (means[i - 1] - target) / (means[i - 1] - means[i])))
            (step, used, _), (next_step, next_used, _) = losses[i - 1], losses[i]
            return step + part * (next_step - step), used + part * (next_used - used)
    return None


def runs_of(optimizer: str, seed: int, data: DataSplit) -> dict[str, dict[str, Any]]:
    """Trains once with each policy, all to the fixed batch's loss. Beside the fixed batch the plug-in is measured."""
    policies: dict[str, Policy] = {name: (partial(moments, l2), factor, 1) for name, factor in EUCLIDEAN.items()}
    if optimizer == "adamw":
        policies["sign"] = partial(moments, l1), 1.0, 1
    else:
        policies["spectral"] = partial(spectral, matrices(GPT(256, BLOCK, LAYERS, 4, 64))), 1.0, 4
    runs = {"fixed": train(optimizer, (plug_in, 0.0, 4), seed, data)}
    target = smooth(runs["fixed"]["losses"])[-1]
    runs |= {name: train(optimizer, policy, seed, data, target) for name, policy in policies.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        steps, samples = reached(run["losses"], target) or (math.nan, math.nan)
        found[name] = {"steps": steps, "samples": samples, "target": target, **run}
    return found


def bounds(ratios: Sequence[float]) -> str:
    """The geometric mean and its 95 % bounds."""
    logs = np.log(ratios)
    half = t_of_mean(len(logs)) * logs.std(ddof=1) / math.sqrt(len(logs))
    return "{:.3f} ({:.3f} to {:.3f})".format(*np.exp(logs.mean() + half * np.array([0, -1, 1])))


def compare(seeds: Sequence[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """Rows of the table, one a policy."""

    def cost(name: str, r: int) -> Any:
        return np.array([r * seed[name]["steps"] + seed[name]["samples"] for seed in seeds])

    def excess(seed: dict[str, dict[str, Any]], name: str) -> float:
        points = sorted((seed[other]["steps"], seed[other]["samples"]) for other in ("fixed", *EUCLIDEAN))
        steps, samples = np.log(points).T
        return float(seed[name]["samples"] / np.exp(np.interp(np.log(seed[name]["steps"]), steps, samples)))

    rows = []
    for name in seeds[0]:
        row = [name, *(bounds([s[name][key] / s["fixed"][key] for s in seeds]) for key in ("steps", "samples"))]
        row.append("" if name in ("fixed", *EUCLIDEAN) else bounds([excess(seed, name) for seed in seeds]))
        for r in COSTS:
            best = min(EUCLIDEAN, key=lambda other: np.log(cost(other, r)).mean())
            row.append("best" if name == best else bounds(cost(name, r) / cost(best, r)))
        rows.append([*row, ", ".join(str(seed[name]["batches"][-1][1]) for seed in seeds)])
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: at least 2")
    torch.set_num_threads(1)
    data, runs = load_text(block_size=BLOCK), {name: list[dict[str, dict[str, Any]]]() for name in LR}
    for seed in track(range(args.seeds)):
        for optimizer, found in runs.items():
            found.append(runs_of(optimizer, seed, data))
    headings = ["policy", "steps", "samples", "at equal steps", *(f"cost, r = {r}" for r in COSTS), "last batches"]
    for optimizer, found in runs.items():
        show(optimizer, headings, compare(found))
        plugged = [scale / SMALL for seed in found for _, scale in seed["fixed"]["scales"]]
        print(f"The plug-in with the fixed batch: at most {max(plugged):.2f} batches")
    write(args.json, ["torch", "numpy"], runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
