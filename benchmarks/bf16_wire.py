"""What bf16 messages cost a training: a GPT on text, beside fp32 messages, and the time of a step's reduction.

    python benchmarks/bf16_wire.py --json benchmarks/results/bf16_wire.json
    python benchmarks/bf16_wire.py --seeds 0 --steps 20 --rounds 3     a quick look

Two workers over gloo. Ways: fp32 messages; bf16 messages that are added up in fp32 (all_to_all, what `auto` takes).

Losses: `kfuse model=gpt data=text`, the defaults, the same seeds for both ways, so that initial values, batches and
dropout are the same. `train` is the mean loss of the last 50 steps, `held out` that of the evaluation at the end.
Differences are formed within a seed. For scale: the spread of fp32's own losses between seeds.

Times: steps of FusedSGD over one bucket, both ways, fp32 messages over all_to_all, and bf16 messages that are added up
in bf16 (allreduce), in turns in the same processes, in an order shuffled each round. A step's time is the slower
worker's. Ratios are formed within a round: the median, and its 95 % percentile-bootstrap interval.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from machine import parser_of, warn_if_busy, write
from step_report import median_interval
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests")]

from distributed import run_workers  # noqa: E402

import kfuse as kf  # noqa: E402
from kfuse.comm.settings import CommOptions  # noqa: E402

WAYS = {
    "fp32": {"schedule": "allreduce", "dtype": "fp32"},
    "bf16, sums in fp32": {"schedule": "all_to_all", "dtype": "bf16"},
}
TIMED = WAYS | {
    "fp32, all_to_all": {"schedule": "all_to_all", "dtype": "fp32"},
    "bf16, sums in bf16": {"schedule": "allreduce", "dtype": "bf16"},
}
SIZES = {"64 KB": 2**14, "1 MB": 2**18, "25 MB": 25 * 2**18}
"""Elements of fp32 gradients in the bucket that is timed."""
LAST = 50
"""Steps whose losses are averaged at the end."""


def train(way: dict[str, str], seed: int, steps: int) -> dict[str, Any]:
    """Losses, and the noise scale if known, of one run of the command line. Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["model=gpt", "data=text", "policy=none", "workers.count=2", "workers.max=2", "workers.threads=1"]
        words += ["batch.size=32", "batch.micro=8", f"train.steps={steps}", f"seed={seed}", f"hydra.run.dir={folder}"]
        words += [f"comm.{name}={value}" for name, value in way.items()]
        run = [sys.executable, "-m", "kfuse", *words, "observe.progress=false"]
        subprocess.run(run, check=True, capture_output=True, text=True)
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    noise = [line["noise_scale"] for line in lines[-LAST:] if line["noise_scale"] is not None]
    return {
        "train": mean(line["loss"] for line in lines[-LAST:]),
        "held_out": summary["eval_loss"],
        "noise_scale": median(noise) if noise else None,
    }


def losses(seeds: list[int], steps: int) -> dict[str, Any]:
    """Of each way and seed, and the differences from fp32 within a seed, relative to its loss."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for seed in seeds:
        for name, way in WAYS.items():
            run = train(way, seed, steps)
            print(f"seed {seed}, {name}: {run['train']:.4f}, held out {run['held_out']:.4f}", flush=True)
            runs[name].append(run)
    base = runs["fp32"]
    found: dict[str, Any] = {}
    for name, mine in runs.items():
        found[name] = {"runs": mine}
        for figure in ("train", "held_out"):
            values = [run[figure] for run in mine]
            differences = [run[figure] / other[figure] - 1 for run, other in zip(mine, base, strict=True)]
            found[name][figure] = {
                "mean": mean(values),
                "spread_of_seeds": stdev(values) if len(values) > 1 else 0.0,
                "difference": mean(differences),
                "largest_difference": max(differences, key=abs),
            }
    return found


def timed(rounds: int) -> dict[str, dict[str, list[float]]]:
    """On each worker: seconds of each way's step in each round, for each size."""
    torch.set_num_threads(1)
    session = kf.init()
    found: dict[str, dict[str, list[float]]] = {}
    for size, numel in SIZES.items():
        made = {}
        for name, way in TIMED.items():
            session.comm = CommOptions(bucket_mb=1000.0, **way)  # type: ignore[arg-type]
            p = nn.Parameter(torch.zeros(numel))
            made[name] = (p, kf.FusedSGD([p], lr=0.0))
        gradient, order = torch.randn(numel), np.random.default_rng(0)
        found[size] = {name: [] for name in TIMED}
        for k in range(rounds + 2):  # the first two are not counted
            for name in order.permutation(list(TIMED)):
                p, opt = made[name]
                p.grad = gradient.clone()
                kf.barrier()
                started = time.perf_counter()
                opt.step()
                seconds = time.perf_counter() - started
                if k >= 2:
                    found[size][name].append(seconds)
                opt.zero_grad()
    return found


def times(rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and ratios to fp32's within a round."""
    workers, found = run_workers(2, timed, rounds, timeout_s=1800.0), {}
    for size in SIZES:
        slowest = {name: np.max([worker[size][name] for worker in workers], axis=0) for name in TIMED}
        found[size] = {}
        for name, each in slowest.items():
            ratio = median_interval(each / slowest["fp32"])
            found[size][name] = {"ms": 1e3 * float(np.median(each)), "to_fp32": ratio}
            said = f"{ratio['median']:.3f} of fp32 ({ratio['low']:.3f}-{ratio['high']:.3f})"
            print(f"{size}, {name}: {1e3 * np.median(each):.3f} ms, {said}")
    return found


def main() -> None:
    """Measures, prints and writes."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    warn_if_busy()
    settings = {"steps": options.steps, "seeds": options.seeds, "rounds": options.rounds, "workers": 2}
    seconds, found = times(options.rounds), losses(options.seeds, options.steps)
    for name, each in found.items():
        for figure in ("train", "held_out"):
            f = each[figure]
            print(
                f"{name}, {figure}: {f['mean']:.4f}, between seeds {f['spread_of_seeds']:.4f}, "
                f"{100 * f['difference']:+.3f} % from fp32 (largest {100 * f['largest_difference']:+.3f} %)"
            )
    write(options.json, ["torch"], settings=settings, times=seconds, losses=found)


if __name__ == "__main__":
    main()
