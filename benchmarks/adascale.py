"""AdaScale beside linear scaling at 8 and 32 times the batch: does it hold the small batch's accuracy?

    python benchmarks/adascale.py --json benchmarks/results/adascale.json --plot benchmarks/results/adascale.png

A perceptron learns 50,000 digits: scikit-learn's, shifted by up to two pixels, of other contrast and with noise, by SGD
with momentum. The held-out digits are others. The small batch is 32 samples, so 8 and 32 times that are 256 and 1,024.
The learning rate is tuned for the small batch alone. Then, for each seed, in turns:

    small       the small batch, 3 passes over the data
    linear      learning rate times the batch's ratio, with the same samples: the rule of Goyal et al. 2017
    adascale    lr.scaling=adascale and train.steps: it ends after as many scale-invariant steps as `small` makes
                steps (Johnson et al. 2020), so it takes more samples than the plan, and says how many
    linear, long    linear, with the samples that adascale took, in whole passes

All have a linear warm-up over 10 % of the samples of `small`, and a cosine decay to the end. Times are not compared.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import parser_of, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import kfuse as kf
from kfuse.policies import SchedulePolicy
from kfuse.session import reset
from kfuse.statistics.noise_scale import t_of_mean

SMALL, SCALES = 32, (8, 32)
TRAIN, HELD_OUT = 50_000, 10_000
PASSES = 3
PLANNED = PASSES * TRAIN // SMALL  # steps of `small`
WARM_UP_STEPS = PLANNED // 10  # of `small`
RATES = (0.025, 0.05, 0.1, 0.2)
TUNING_SEED = 1000  # none of those compared
MARGIN = 0.01  # held: at most so much accuracy is lost, at the 95 % bound

Digits = tuple[Tensor, Tensor]


def digits() -> tuple[Digits, Digits]:
    """Training and held-out digits: inputs fp32 [n, 64], labels int64 [n]. Always the same ones."""
    from sklearn.datasets import load_digits

    found, generator = load_digits(), torch.Generator().manual_seed(0)
    images, labels = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(images), generator=generator)

    def vary(which: Tensor, count: int) -> Digits:
        chosen = which[torch.randint(len(which), (count,), generator=generator)]
        down, right = torch.randint(-2, 3, (2, count, 1, 1), generator=generator)
        padded, place = nn.functional.pad(images[chosen], (2, 2, 2, 2)), torch.arange(8)
        shifted = padded[torch.arange(count)[:, None, None], place[:, None] + 2 + down, place + 2 + right]
        contrast = 0.5 + torch.rand(count, 1, 1, generator=generator)
        varied = shifted * contrast + 0.1 * torch.randn(shifted.shape, generator=generator)
        return varied.flatten(1), labels[chosen]

    return vary(order[360:], TRAIN), vary(order[:360], HELD_OUT)


class Recorded(SchedulePolicy):
    """One batch size from the first step on. Notes each step's learning rate and noise scale."""

    def __init__(self, batch_size: int) -> None:
        super().__init__([{"step": 0, "batch_size": batch_size}])
        self.course: list[tuple[int, float, float | None]] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.course.append((signals.samples, signals.lr, signals.noise_scale))
        return super().decide(signals)


def train(data: tuple[Digits, Digits], scaling: Any, scale: int, lr: float, passes: int, seed: int) -> dict[str, Any]:
    """One training; its figures."""
    reset()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    policy = Recorded(SMALL * scale)
    length: dict[str, int] = {"steps": PLANNED} if scaling == "adascale" else {"epochs": passes}
    summary = kf.fit(
        net,
        data[0],
        kf.FusedSGD(net.parameters(), lr=lr, momentum=0.9),
        kf.Hook(policy),
        batch_size=SMALL,
        batch_micro=SMALL,
        batch_max=SMALL * scale,
        seed=seed,
        lr_scaling=scaling,
        lr_warmup_steps=WARM_UP_STEPS,
        lr_decay="cosine",
        heldout=data[1],
        train_eval_every=10**9,
        observe_progress=False,
        **length,
    )
    assert summary is not None
    kept = {name: summary[name] for name in ("steps", "samples", "eval_accuracy", "eval_loss")}
    # An eval loss that is not finite is no number of JSON's.
    loss = kept["eval_loss"] if math.isfinite(kept["eval_loss"]) else None
    return {**kept, "eval_loss": loss, "course": policy.course}


def difference(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The mean of the paired differences, with the ends of its 95 % interval (Student's)."""
    pairs = [a - b for a, b in zip(values, others, strict=True)]
    mean = statistics.mean(pairs)
    half = t_of_mean(len(pairs)) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return mean, mean - half, mean + half


def verdict(low: float, high: float) -> str:
    """What the interval of a training's accuracy less the small batch's says."""
    if low > -MARGIN:
        return "holds it"
    return "loses it" if high < 0 else "unclear"


def gains(run: dict[str, Any], lr: float) -> tuple[list[float], list[float]]:
    """Of a run by adascale: at each step the part of the run that is over, and the gain."""
    progress, parts, found = 0.0, [], []
    for _, rate, _ in run["course"]:
        done, warm = progress / PLANNED, min(1.0, (progress + 1) / WARM_UP_STEPS)
        part = max(0.0, progress - WARM_UP_STEPS) / (PLANNED - WARM_UP_STEPS)
        found.append(rate / (lr * min(warm, 0.5 + 0.5 * math.cos(math.pi * part))))
        parts.append(done)
        progress += found[-1]
    return parts, found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="3 to 10")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not 3 <= args.seeds <= 10:
        parser.error("allowed are 3 to 10 seeds")
    torch.set_num_threads(1)
    data, runs, courses = digits(), {}, {}
    with Progress(transient=True) as bar:
        task = bar.add_task("tuning the small batch", total=len(RATES) + args.seeds * (1 + 3 * len(SCALES)))

        def go(*options: Any) -> dict[str, Any]:
            run = train(data, *options)
            bar.advance(task)
            return run

        sweep = {lr: go("none", 1, lr, PASSES, TUNING_SEED)["eval_accuracy"] for lr in RATES}
        lr = max(sweep, key=lambda rate: sweep[rate])
        for seed in range(args.seeds):
            bar.update(task, description=f"seed {seed}")
            found = {"small": go("none", 1, lr, PASSES, seed)}
            for scale in SCALES:
                adascale = found[f"adascale {scale}x"] = go("adascale", scale, lr, PASSES, seed)
                if seed == 0:
                    courses[scale] = gains(adascale, lr)
                found[f"linear {scale}x"] = go("linear", scale, lr, PASSES, seed)
                passes = round(adascale["samples"] / TRAIN)
                found[f"linear, long {scale}x"] = go("linear", scale, lr, passes, seed)
            for name, run in found.items():
                noise = [scale for *_, scale in run.pop("course") if scale is not None]
                runs.setdefault(name, []).append(run | {"noise_scale": float(np.median(noise)) if noise else None})
    names = ["small", *(f"{rule} {scale}x" for scale in SCALES for rule in ("linear", "linear, long", "adascale"))]
    table = Table(title=f"Held-out accuracy, {args.seeds} seeds; learning rate {lr} at a batch of {SMALL}")
    for heading in ("training", "batch", "steps", "passes", "accuracy", "less small's (95 %)", "small's accuracy"):
        table.add_column(heading, justify="right")
    results = {}
    of_small = [run["eval_accuracy"] for run in runs["small"]]
    for name in names:
        accuracies = [run["eval_accuracy"] for run in runs[name]]
        steps, samples = (statistics.mean(run[key] for run in runs[name]) for key in ("steps", "samples"))
        mean, low, high = difference(accuracies, of_small)
        said = "" if name == "small" else verdict(low, high)
        results[name] = {"steps": steps, "passes": samples / TRAIN, "accuracy": statistics.mean(accuracies)}
        results[name] |= {"difference": mean, "low": low, "high": high, "accuracy_of_small": said or None}
        scale = 1 if name == "small" else int(name.split()[-1].removesuffix("x"))
        spread = "" if name == "small" else f"{100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
        row = (f"{steps:.0f}", f"{samples / TRAIN:.2f}", f"{100 * statistics.mean(accuracies):.2f} %", spread, said)
        table.add_row(name, str(SMALL * scale), *row)
    Console().print(table)
    course = {scale: [[round(value, 4) for value in values] for values in of] for scale, of in courses.items()}
    record = {"lr": lr, "sweep": sweep, "results": results, "runs": runs, "gains_of_seed_0": course}
    write(args.json, ["torch", "numpy", "scikit-learn"], **record)
    if args.plot is not None:
        plot(runs, names, courses, args.plot)
    return 0


def plot(
    runs: dict[str, list[dict[str, Any]]],
    names: Sequence[str],
    courses: dict[int, tuple[list[float], list[float]]],
    picture: Path,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    (left, right) = figure.subplots(1, 2)
    for place, name in enumerate(names):
        accuracies = [100 * run["eval_accuracy"] for run in runs[name]]
        left.plot([place] * len(accuracies), accuracies, "o", alpha=0.6)
    left.axhline(statistics.mean(100 * run["eval_accuracy"] for run in runs["small"]), color="grey", linewidth=0.8)
    left.set(title="A dot is a seed; the line is the small batch's mean", ylabel="held-out accuracy, %")
    left.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    for scale, (parts, found) in courses.items():
        right.plot(parts, found, label=f"{scale} times the batch")
        right.axhline(scale, color="grey", linewidth=0.8, linestyle=":")
    right.set(title="AdaScale's gain; dotted: linear scaling's", xlabel="part of the run", ylabel="gain", yscale="log")
    right.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
