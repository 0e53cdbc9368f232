"""The noise scale that kfuse measures beside the true one, and beside other estimators' on the same gradients.

    python benchmarks/noise_quality.py --json benchmarks/results/noise_quality.json
    python benchmarks/noise_quality_plot.py benchmarks/results/noise_quality.json benchmarks/results/noise_quality.png

Trains an MLP on digits and a small GPT on text by kf.FusedAdamW, several seeds each, with every sample's gradient.
Means of them are the micro-batches' gradients: they go through kfuse's engine (`opt.stats`), and their squared norms to
the estimators of noise_estimators.py, also in other numbers of micro-batches and samples. Truth, every 25 steps: the
gradients of all N samples, of mean G and covariance Sigma (divided by N), give tr(Sigma) / |G|^2. Batches are drawn
with replacement, so that this is exactly what the estimators estimate.

Adam's step -lr D g, D = 1 / (sqrt(v) + eps), has the noise scale tr(DHD Sigma) / G'DHDG (as McCandlish et al. 2018,
section 2.2, for SGD). The Hessian H is not known. Two cases are measured: H = 1 / D, so tr(D Sigma) / G'DG, and H = 1,
so tr(D^2 Sigma) / G'D^2G, which AdaptDL measures. v is bias-corrected and that of the step before.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import parser_of, write
from noise_estimators import PEERS, AdaptDL, Estimator, FairScale, KDiffusion, Kfuse, KungFu
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfuse as kf
from kfuse.data import load_digits
from kfuse.data.builtin import load_text
from kfuse.models import GPT, MLP
from kfuse.statistics.noise_scale import Estimate

MICRO_BATCHES = 8  # of the training itself; the others are measured on
EVERY = 25  # steps, from one truth to the next
TREND = 40  # latest steps, through whose truths a line is drawn
ADAPTED = 5  # steps, before which AdaptDL takes Adam's v for unknown
CHUNK = 64  # samples whose gradients are in memory at a time
CHOSEN = 256  # samples that the number of directions is estimated from


@dataclass(frozen=True)
class Problem:
    """A model and the N samples that it is trained on."""

    name: str
    unit: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch: int
    runs: int
    lr: float = 1e-3


def digits() -> Problem:
    data = load_digits().train
    x, y = data.fetch(np.arange(len(data)))
    return Problem("digits, MLP", "images", lambda: MLP((1, 8, 8), 10), x, y, batch=64, runs=6)


def text(samples: int, length: int = 32) -> Problem:
    data = load_text(block_size=length).train
    x, y = data.fetch(np.linspace(0, len(data) - 1, samples).astype(np.int64))
    return Problem("text, GPT", "sequences", lambda: GPT(256, length, 2, 4, 64, dropout=0.0), x, y, batch=32, runs=4)


PROBLEMS = ("digits", "text")


# -- gradients of single samples, and what is exactly known from them ------------------------------------------------


class SampleGradients:
    """Gradients of single samples, fp32 [B, P]; the P parameters in the model's order, flattened."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())

        def of_sample(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = functional_call(model, parameters, (x[None],))
            return loss(out.flatten(0, -2), y.flatten())

        self._gradients = vmap(grad(of_sample), in_dims=(None, 0, 0))

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in zip(self.names, self.parameters, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # the one kernel of attention that vmap can batch
            found = self._gradients(parameters, x, y)
        return torch.cat([found[name].flatten(1) for name in self.names], 1)


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of each parameter's gradient over all samples, float64 [P]; the variance by N."""

    mean: Tensor
    variance: Tensor

    def noise_scale(self, weight: Tensor | float = 1.0) -> float:
        """tr(W Sigma) / G'WG for the diagonal matrix W of `weight`."""
        return float((weight * self.variance).sum() / (weight * self.mean.square()).sum())


def moments_of(gradients: SampleGradients, x: Tensor, y: Tensor) -> Moments:
    """Of these samples. Sums of a chunk are fp32, sums over chunks float64."""
    sums: Any = 0.0
    squares: Any = 0.0
    for chunk in torch.arange(len(x)).split(CHUNK):
        each = gradients(x[chunk], y[chunk])
        sums, squares = sums + each.sum(0).double(), squares + each.square().sum(0).double()
    mean = sums / len(x)
    return Moments(mean, squares / len(x) - mean.square())


def directions(each: Tensor, exact: Moments) -> float:
    """tr(Sigma)^2 / tr(Sigma^2), from some samples' gradients: E (a'b)^2 = tr(Sigma^2) for two centred samples."""
    centred = each.double() - exact.mean
    products = (centred @ centred.T).square()
    pairs = (products.sum() - products.diagonal().sum()) / (len(each) * (len(each) - 1))
    return float(exact.variance.sum().square() / pairs)


def split(gram: Tensor, batch: int, parts: int) -> tuple[list[float], float, int]:
    """|g_j|^2, |gbar|^2 and the samples of a micro-batch, for the first `batch` samples in so many equal parts.

    gram: the products of all pairs of samples' gradients [B, B].
    """
    size = batch // parts
    products = gram[:batch, :batch].reshape(parts, size, parts, size).mean((1, 3))
    return products.diagonal().tolist(), float(products.mean()), size


def adam_divisor(opt: torch.optim.Optimizer, steps: int) -> Tensor | None:
    """sqrt(v) + eps, float64 [P], after so many steps; None where these are too few."""
    if steps < ADAPTED:
        return None
    options, state = opt.param_groups[0], opt.state_dict()["state"]
    v = torch.cat([state[i]["exp_avg_sq"].flatten() for i in range(len(options["params"]))]).double()
    return (v / (1 - options["betas"][1] ** steps)).sqrt() + options["eps"]


# -- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """An estimator, and what of a step's gradients it gets."""

    estimator: Estimator
    batch: int
    parts: int = MICRO_BATCHES
    weight: str = ""
    """Of the gradients: "D" or "D^2", or none."""


def estimators(batch: int) -> dict[str, Measured]:  # `kfuse` itself is the optimizer's own
    found = {name: Measured(kind(), batch) for name, kind in PEERS.items()}
    for parts in (2, 4, 8, 32):
        for name, kind in {"kfuse": Kfuse, **PEERS}.items():
            found[f"{name}, M = {parts}"] = Measured(kind(), batch, parts)
    for decay in (0.9, 0.95, 0.98, 0.995):
        found[f"kfuse, decay {decay}"] = Measured(Kfuse(decay), batch)
    for fewer in (batch // 4, batch // 2):
        found[f"kfuse, B = {fewer}"] = Measured(Kfuse(), fewer)
    same = (KungFu(0.99), FairScale(0.99), AdaptDL(0.99 ** (1 / MICRO_BATCHES)), KDiffusion(0.99))
    found |= {f"{name}, decay 0.99": Measured(one, batch) for name, one in zip(PEERS, same, strict=True)}
    for weight in ("D", "D^2"):
        found[f"kfuse's formula, {weight}"] = Measured(Kfuse(), batch, weight=weight)
    found["AdaptDL's for Adam, D^2"] = Measured(AdaptDL(), batch, weight="D^2")
    return found


@dataclass
class Run:
    """What one training yields: all estimates by step, and the truth by checkpoint."""

    seed: int
    course: dict[str, list[Estimate]] = field(default_factory=dict)
    truth: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def train(
    problem: Problem, seed: int, steps: int, every: int = EVERY, after_step: Callable[[], None] = lambda: None
) -> Run:
    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(seed)
    model = problem.build()
    gradients, opt = SampleGradients(model), kf.FusedAdamW(model.parameters(), lr=problem.lr)
    run, others = Run(seed), estimators(problem.batch)
    run.course = {name: [] for name in ("kfuse", *others)}
    for step in range(steps):
        rows = torch.randint(len(problem.x), (problem.batch,), generator=chance)
        each, divisor = gradients(problem.x[rows], problem.y[rows]), adam_divisor(opt, step)
        if step % every == 0 and step:
            run.truth[step] = truth(problem, gradients, divisor)
            run.losses.append(whole_loss(model, problem))
        grams = gram_matrices(each, divisor)
        for name, measured in others.items():
            if measured.weight in grams:
                measured.estimator.update(*split(grams[measured.weight], measured.batch, measured.parts))
            run.course[name].append(measured.estimator.estimate())
        run.course["kfuse"].append(update(opt, gradients.parameters, each))
        after_step()
    return run


def gram_matrices(each: Tensor, divisor: Tensor | None) -> dict[str, Tensor]:
    """The products of all pairs of samples, by the gradients' weight; unweighted alone where v is not yet known."""
    weighted = {"": each}
    if divisor is not None:
        weighted |= {"D": each / divisor.sqrt().float(), "D^2": each / divisor.float()}
    return {name: (w @ w.T).double() for name, w in weighted.items()}


def update(opt: Any, parameters: Sequence[Tensor], each: Tensor) -> Estimate:
    """One step of kfuse's optimizer: its engine gets the mean gradients of micro-batches. each: fp32 [B, P]."""
    parts = each.chunk(MICRO_BATCHES)
    for j, part in enumerate(parts):
        pieces = part.mean(0).split([p.numel() for p in parameters])
        with opt.micro_batch(samples=len(part), last=j == len(parts) - 1):
            # A sum of products with fixed gradients has these as its gradients, to the last bit.
            products = [(p.flatten() * piece).sum() for p, piece in zip(parameters, pieces, strict=True)]
            torch.stack(products).sum().backward()
    opt.step()
    opt.zero_grad()
    stats = opt.stats
    interval = stats.noise_scale, stats.noise_scale_low, stats.noise_scale_high
    return Estimate(*interval, stats.mean_grad_variance, stats.mean_grad_sq)


def truth(problem: Problem, gradients: SampleGradients, divisor: Tensor | None) -> dict[str, float]:
    exact = moments_of(gradients, problem.x, problem.y)
    chosen = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(0))[:CHOSEN]
    found = {
        "noise_scale": exact.noise_scale(),
        "trace": float(exact.variance.sum()),
        "grad_sq": float(exact.mean.square().sum()),
        "directions": directions(gradients(problem.x[chosen], problem.y[chosen]), exact),
    }
    if divisor is not None:
        found |= {"D": exact.noise_scale(1 / divisor), "D^2": exact.noise_scale(1 / divisor.square())}
    return found


@torch.no_grad()
def whole_loss(model: nn.Module, problem: Problem) -> float:
    parts = zip(problem.x.split(256), problem.y.split(256), strict=True)
    losses = [F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum").item() for x, y in parts]
    return sum(losses) / problem.y.numel()


# -- how good the estimates are --------------------------------------------------------------------------------------


def trend(truth: dict[int, dict[str, float]], step: int) -> float | None:
    """The ratio at `step` of the lines through tr(Sigma) and |G|^2 at the latest checkpoints; None for under three."""
    latest = [other for other in truth if step - TREND < other <= step]
    if len(latest) < 3:
        return None
    trace, grad_sq = (np.polyfit(latest, [truth[other][key] for other in latest], 1) for key in ("trace", "grad_sq"))
    return float(np.polyval(trace, step) / np.polyval(grad_sq, step))


def score(runs: Sequence[Run], name: str) -> dict[str, float | int | None]:
    """At the checkpoints of all runs: how often there is a number, its error, and what the interval holds.

    `ratio` is of numbers to truths: median, 5 % and 95 % quantile. `factor` is how far off they typically are: exp of
    the median of |log ratio|. `ends` are the medians of low / number and high / number. `trend_held` counts intervals
    that hold the truth's trend, where it is known. `means` are of the running ratio mean(S) / mean(G2), which kfuse has
    at all steps where the mean of G2 is positive. `steps` count all steps.
    """
    weight = next((w for w in ("D^2", "D") if name.endswith(f", {w}")), "noise_scale")
    pairs = [(run.course[name][step], t[weight]) for run in runs for step, t in run.truth.items() if weight in t]
    shown = [(e.noise_scale, e.low, e.high, exact) for e, exact in pairs if e.noise_scale is not None]
    ratios = [number / exact for number, _, _, exact in shown]
    found: dict[str, float | int | None] = {"checkpoints": len(pairs), "shown": len(shown)}
    if shown:
        low, middle, high = np.quantile(ratios, [0.05, 0.5, 0.95]).tolist()
        off = math.exp(np.median(np.abs(np.log(ratios))))
        found |= {"ratio": middle, "ratio_low": low, "ratio_high": high, "factor": off}
    if not name.startswith("kfuse"):
        return found
    intervals = [(number, low, high, exact) for number, low, high, exact in shown if None not in (low, high)]
    ends = [(low / number, high / number) for number, low, high, _ in intervals]
    lows = [(e.low, exact) for e, exact in pairs if e.low is not None]
    means = [
        e.mean_grad_variance / e.mean_grad_sq / exact
        for e, exact in pairs
        if e.mean_grad_variance is not None and e.mean_grad_sq is not None and e.mean_grad_sq > 0
    ]
    every = [estimate for run in runs for estimate in run.course[name]]
    trends = [
        run.course[name][step].low <= line <= run.course[name][step].high
        for run in runs
        for step in run.truth
        if weight == "noise_scale"
        and run.course[name][step].noise_scale is not None
        and (line := trend(run.truth, step)) is not None
    ]
    return found | {
        "steps": len(every),
        "steps_shown": sum(e.noise_scale is not None for e in every),
        "steps_low_alone": sum(e.noise_scale is None and e.low is not None for e in every),
        "held": sum(low <= exact <= high for _, low, high, exact in intervals),
        "ends": np.median(ends, axis=0).tolist() if ends else None,
        "trend_shown": len(trends),
        "trend_held": sum(trends),
        "low_shown": len(lows),
        "low_held": sum(low <= exact for low, exact in lows),
        "low_to_truth": float(np.median([low / exact for low, exact in lows])) if lows else None,
        "means_shown": len(means),
        "means_ratio": float(np.median(means)) if means else None,
        "means_factor": math.exp(np.median(np.abs(np.log(means)))) if means else None,
    }


def report(problem: Problem, scores: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{problem.name}: batch {problem.batch}, M = {MICRO_BATCHES} where not said otherwise")
    for heading in ("estimator", "number", "to truth", "5 % to 95 %", "factor off", "held", "ends", "low end held"):
        table.add_column(heading, justify="left" if heading == "estimator" else "right")
    for name, found in scores.items():
        cells = [f"{found['shown']}/{found['checkpoints']}", "", "", ""]
        if found["shown"]:
            spread = f"{found['ratio_low']:.3g} to {found['ratio_high']:.3g}"
            cells[1:] = f"{found['ratio']:.3g}", spread, f"{found['factor']:.2f}"
        if "held" in found:
            ends = "" if found["ends"] is None else "{:.2f}, {:.2f}".format(*found["ends"])
            cells += [f"{found['held']}/{found['shown']}", ends, f"{found['low_held']}/{found['low_shown']}"]
        table.add_row(name, *cells)
    return table


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--runs", type=int, help="of each problem; else 6 of digits and 4 of text")
    parser.add_argument("--samples", type=int, default=2048, help="of text")
    parser.add_argument("--every", type=int, default=EVERY, help="steps from one truth to the next")
    parser.add_argument("--steps", type=int, default=601)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for key in args.problems:
        problem = digits() if key == "digits" else text(args.samples)
        count = problem.runs if args.runs is None else args.runs
        with Progress(transient=True) as bar:
            advance = partial(bar.advance, bar.add_task(problem.name, total=count * args.steps))
            runs = [train(problem, seed, args.steps, args.every, advance) for seed in range(count)]
        scores = {name: score(runs, name) for name in runs[0].course}
        Console(width=140).print(report(problem, scores))
        results[key] = recorded(problem, runs, scores)
    write(args.json, ["torch", "numpy"], steps=args.steps, problems=results)
    return 0


def recorded(problem: Problem, runs: Sequence[Run], scores: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file holds: scores, the truth of all runs, and the first run's course."""
    plotted = ("kfuse", *PEERS, "kfuse's formula, D", "kfuse's formula, D^2", "AdaptDL's for Adam, D^2")
    course = {name: [rounded(e.noise_scale) for e in runs[0].course[name]] for name in plotted}
    for end in ("low", "high"):
        course[f"kfuse {end}"] = [rounded(getattr(e, end)) for e in runs[0].course["kfuse"]]
    return {
        "name": problem.name,
        "unit": problem.unit,
        "samples": len(problem.x),
        "parameters": sum(p.numel() for p in problem.build().parameters()),
        "batch": problem.batch,
        "micro_batches": MICRO_BATCHES,
        "seeds": len(runs),
        "scores": scores,
        "truth": [
            {"seed": run.seed, "step": step, **{name: rounded(value) for name, value in found.items()}}
            for run in runs
            for step, found in run.truth.items()
        ],
        "losses": [[rounded(loss) for loss in run.losses] for run in runs],
        "course": course,
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
