"""How often a noise scale is shown, and how often its interval then holds the true one.

    python benchmarks/noise_coverage.py --json benchmarks/results/noise_coverage.json

Each replicate is a run of its own, whose S and G2 go through `kfuse.statistics.noise_scale.NoiseScale` step by step.
The truth is the noise scale of the step at which the estimate is read, also where it drifts. `shown` is the share of
replicates with a number, `held` the share of these whose interval holds the truth. `low` is the share in which the low
end is known, with a number or alone, `low held` the share of these in which it lies at or below the truth.

Simulated: gradients of covariance I in `dim` dimensions, B = 32 samples in M = 4 micro-batches where nothing else is
said. For Gaussian ones

    gbar ~ N(G, I / B)   and   (M - 1) S ~ chi^2 with (M - 1) dim degrees of freedom, independent of gbar,

so that no vector needs to be drawn; heavy tails are drawn sample by sample. A model whose gradient noise has other
eigenvalues behaves about as dim = tr(Sigma)^2 / tr(Sigma^2).

Real: an MLP of 9,610 parameters trained on scikit-learn's digits by AdamW, in epochs, at fixed batch sizes. Read every
20 steps from step 20 to 300. The truth comes from the gradients of all training rows at that step, with |G|^2 less
tr(Sigma) / (N - 1), which is what sampling without replacement measures (docs/noise.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from report import parser_of, write

from kfuse.statistics.noise_scale import Estimate, NoiseScale, moments

Step = tuple[float, float, tuple[float, int]]  # S, G2, (samples, micro-batches)
SIZE = 8  # samples a micro-batch


@dataclass(frozen=True)
class Cell:
    """One row of the table. noise_scale (in samples), batch and scale (of all gradients) are functions of the step."""

    group: str
    name: str
    steps: int
    noise_scale: Callable[[int], float]
    batch: Callable[[int], int] = lambda step: 32
    scale: Callable[[int], float] = lambda step: 1.0
    dim: int = 1000
    tail: float = math.inf
    """Degrees of freedom of Student's t; infinite is Gaussian."""
    whole_samples: bool = False
    """One heavy-tailed factor for a sample's whole gradient, not one for each coordinate."""
    at_first: bool = False
    """Read at the first step that shows a number, instead of after the last."""


def gaussian(cell: Cell, rng: np.random.Generator) -> Iterator[Step]:
    steps = range(cell.steps)
    batches = np.array([cell.batch(step) for step in steps], dtype=np.float64)
    squared = np.array([cell.scale(step) ** 2 for step in steps])
    freedom = batches / SIZE - 1
    along = np.array([math.sqrt(cell.dim / cell.noise_scale(step)) for step in steps])
    along += rng.standard_normal(cell.steps) / np.sqrt(batches)
    variance = rng.chisquare(freedom * cell.dim) / freedom
    grad_sq = along**2 + rng.chisquare(cell.dim - 1, cell.steps) / batches - variance / batches
    for s, g2, b in zip((squared * variance).tolist(), (squared * grad_sq).tolist(), batches.tolist(), strict=True):
        yield s, g2, (b, round(b / SIZE))


def heavy_tailed(cell: Cell, rng: np.random.Generator) -> Iterator[Step]:
    for step in range(cell.steps):
        batch = cell.batch(step)
        shape = (batch // SIZE, SIZE, cell.dim)
        spread = rng.chisquare(cell.tail, (*shape[:2], 1) if cell.whole_samples else shape) / (cell.tail - 2)
        means = (rng.standard_normal(shape) / np.sqrt(spread)).mean(axis=1) + 1 / math.sqrt(cell.noise_scale(step))
        mean = means.mean(axis=0)
        s, g2 = moments(float(SIZE * (means**2).sum()), float(mean @ mean), batch, len(means))
        assert s is not None and g2 is not None
        yield s, g2, (batch, len(means))


def judge(found: Estimate, truth: float) -> tuple[bool, bool, bool, bool]:
    """Whether a number is shown, whether its interval holds; whether the low end is known, whether it holds."""
    below = found.low is not None and found.low <= truth
    shown = found.noise_scale is not None
    return shown, shown and below and found.high is not None and truth <= found.high, found.low is not None, below


def replicate(cell: Cell, rng: np.random.Generator) -> tuple[bool, bool, bool, bool]:
    noise = NoiseScale()
    for step, (s, g2, batch) in enumerate(gaussian(cell, rng) if math.isinf(cell.tail) else heavy_tailed(cell, rng)):
        noise.update(s, g2, batch)
        if cell.at_first and noise.estimate().noise_scale is not None:
            return judge(noise.estimate(), cell.noise_scale(step))
    return judge(noise.estimate(), cell.noise_scale(cell.steps - 1))


def shares(judged: list[tuple[bool, bool, bool, bool]]) -> dict[str, float | None]:
    shown, held, known, below = np.array(judged).sum(axis=0).tolist()
    return {
        "shown": shown / len(judged),
        "held": held / shown if shown else None,
        "low": known / len(judged),
        "low_held": below / known if known else None,
    }


def measure(cell: Cell, replicates: int, seed: int = 0) -> dict[str, float | None]:
    return shares([replicate(cell, np.random.default_rng([seed, i])) for i in range(replicates)])


def constant(value: float) -> Callable[[int], float]:
    return lambda step: value


def jump(before: int, after: int, at: int) -> Callable[[int], int]:
    return lambda step: before if step < at else after


def exponential(end: float, last: int, efold: float) -> Callable[[int], float]:
    """Grows by a factor of e every `efold` steps (falls, where negative) and reaches `end` at step `last`."""
    return lambda step: end * math.exp((step - last) / efold)


def cells() -> Iterator[Cell]:
    for dim, all_times in ((1000, (0.2, 1, 3, 10, 30, 100, 300)), (100, (0.2, 1, 3, 10, 30)), (10, (0.2, 1, 3, 10))):
        for times in all_times:
            for steps in (100, 400):
                name = f"{times:g} B, dim {dim}, after {steps} steps"
                yield Cell("stationary", name, steps, constant(times * 32), dim=dim)
    for times in (1, 10):
        name = f"{times} B, dim 1000, M = 2, after 400 steps"
        yield Cell("stationary", name, 400, constant(times * 16.0), constant(16))
    for times in (30, 100):
        name = f"{times} B, dim 1000, at the first number within 400 steps"
        yield Cell("stationary", name, 400, constant(times * 32.0), at_first=True)
    for dim in (1000, 10):
        yield Cell("G = 0", f"dim {dim}, after 400 steps", 400, constant(math.inf), dim=dim)
    for before, after in ((256, 16), (16, 256)):
        for scale in (16.0, 160.0, 1600.0):
            for since in (2, 10, 25, 60, 150):
                name = f"{before} -> {after}, noise scale {scale:g}, {since} steps later"
                yield Cell("batch change", name, 200 + since, constant(scale), jump(before, after, 200))
    for efold in (1000, 300, 100, 50, -50, -100, -300, -1000):
        for times in (1, 10, 30):
            name = f"{'up' if efold > 0 else 'down'} e-fold in {abs(efold)} steps, to {times} B"
            yield Cell("drift", name, 300, exponential(times * 32, 299, efold))
    for efold in (100, -100):
        name = f"{'up' if efold > 0 else 'down'} e-fold in 100 steps, to 1 B, S falls as fast"
        yield Cell("drift", name, 300, exponential(32, 299, efold), scale=exponential(1, 299, -200))
    for before, after in ((32, 128), (128, 32)):
        for since in (5, 20, 60, 150, 250):
            yield Cell("jump", f"{before} -> {after}, {since} steps later", 250 + since, jump(before, after, 250))
    for tail in (2.5, 3.0, 5.0, 10.0):
        for whole in (False, True):
            name = (
                f"t, {tail:g} degrees of freedom, {'whole samples' if whole else 'coordinates'}, B / 2, after 200 steps"
            )
            yield Cell("heavy tails", name, 200, constant(16.0), dim=5, tail=tail, whole_samples=whole)


def train_digits(batch: int, seed: int, steps: int = 301) -> list[tuple[bool, bool, bool, bool]]:
    """Trains; judges the estimate every 20 steps."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import one_hot

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, labels = load_digits(return_X_y=True)
    x = torch.tensor(data[:1437] / 16, dtype=torch.float32)
    y = one_hot(torch.tensor(labels[:1437]), 10).float()
    layers = torch.nn.Linear(64, 128), torch.nn.Linear(128, 10)
    params = [p for layer in layers for p in layer.parameters()]
    opt = torch.optim.AdamW(params, lr=1e-3)
    rows, order, at = len(x), torch.randperm(len(x)), 0

    def backward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs and output gradients of both layers, by sample."""
        before = layers[0](x)
        hidden = before.relu()
        out = layers[1](hidden).softmax(1) - y
        return x, (out @ layers[1].weight) * (before > 0), hidden, out

    def mean_gradient(x: torch.Tensor, d: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> list[torch.Tensor]:
        return [d.T @ x / len(x), d.mean(0), out.T @ hidden / len(x), out.mean(0)]

    def square(gradient: list[torch.Tensor]) -> float:
        return float(sum(g.double().square().sum() for g in gradient))

    noise, judged = NoiseScale(), []
    with torch.no_grad():
        for step in range(steps):
            if step and step % 20 == 0:
                x_, d, hidden, out = (v.double() for v in backward(x, y))
                each = (x_.square().sum(1) + 1) * d.square().sum(1) + (hidden.square().sum(1) + 1) * out.square().sum(1)
                grad_sq = square(mean_gradient(x_, d, hidden, out))
                trace = float(each.mean()) - grad_sq
                measured = grad_sq - trace / (rows - 1)
                judged.append(
                    judge(noise.estimate(), trace * rows / (rows - 1) / measured if measured > 0 else math.inf)
                )
            chosen = order[at : at + batch]
            total, weighted, parts = [torch.zeros_like(p) for p in params], 0.0, chosen.split(SIZE)
            for part in parts:
                gradient = mean_gradient(*backward(x[part], y[part]))
                weighted += len(part) * square(gradient)
                total = [t + g * (len(part) / len(chosen)) for t, g in zip(total, gradient, strict=True)]
            pair = moments(weighted, square(total), len(chosen), len(parts))
            noise.update(*pair, (len(chosen), len(parts)))
            for p, g in zip(params, total, strict=True):
                p.grad = g
            opt.step()
            at += len(chosen)
            if at == rows:
                order, at = torch.randperm(rows), 0
    return judged


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=40, help="of each batch size, real training")
    parser.add_argument("--group", help="only the cells of this group, e.g. drift")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = []

    def report(group: str, name: str, found: dict[str, float | None]) -> None:
        results.append({"group": group, "name": name, **found})
        figures = " | ".join("" if value is None else f"{100 * value:.1f}" for value in found.values())
        print(f"| {group}: {name} | {figures} |", flush=True)

    print("| in % | shown | held | low | low held |\n| --- | ---: | ---: | ---: | ---: |")
    for cell in cells():
        if args.group in (None, cell.group):
            report(cell.group, cell.name, measure(cell, args.replicates, args.seed))
    for batch in (32, 64, 256) if args.group in (None, "digits") else ():
        judged = [one for seed in range(args.runs) for one in train_digits(batch, args.seed + seed)]
        report("digits", f"batch {batch}, steps 20 to 300", shares(judged))
    write(args.json, ["numpy"], replicates=args.replicates, runs=args.runs, cells=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
