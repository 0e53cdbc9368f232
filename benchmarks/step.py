"""Whole optimizer steps, kfuse beside its peers: one machine, interleaved, paired.

    python benchmarks/step.py --json benchmarks/results/step.json
    python benchmarks/step.py --device cuda --workers 1        on one GPU: an optimizer and statistics beside torch's

Spawns the workers (gloo, one thread each; on GPUs NCCL, one GPU each), which train a small GPT as compare.py says. See
README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from compare import Schedule, figures, parse, parser, run, show
from gpu_workers import ABSENT
from replicas import Settings
from report import warn_if_busy, write

ALONE = ("local", "local-noise-scale", "allreduce", "allreduce-no-stats")
ON_GPUS = ("local", "ddp", "ddp-bf16", "allreduce", "allreduce-bf16")
"""Without reproducible ones: they turn deterministic algorithms on for the whole process. Choose them by themselves."""
ON_CPUS = ("local", "ddp", "ddp-adascale", "ddp-noise-scale", "allreduce", "allreduce-no-stats", "reproducible")
ON_CPUS = (*ON_CPUS, "reproducible-no-stats", "auto")
LARGE: dict[str, Any] = {"layers": 12, "width": 768, "block": 256, "lr": 3e-5}
"""The GPT of GPUs. Without a warm-up its loss rises at first at the smaller one's learning rate."""


def measure(benchmark: str, description: str | None, default: Sequence[str]) -> None:
    """The command `benchmark`: reads its arguments, measures, reports. default: variants unless others are chosen."""

    def always(args: argparse.Namespace) -> Sequence[str]:
        """What all others are measured against; and the default."""
        chosen = () if args.variants else ALONE if args.workers == 1 else ON_GPUS if args.device == "cuda" else default
        return ("local", *(["ddp"] if args.workers > 1 else []), *chosen)

    found = parser(description, rounds=60, samples=8)
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--workers", type=int, default=2)
    found.add_argument("--micro-batches", type=int, default=1, help="a worker's micro-batches a step")
    found.add_argument("--steps", type=int, default=4, help="timed steps of a variant a round")
    args = parse(found, always)
    if args.device == "cuda" and torch.cuda.device_count() < args.workers:
        print("one GPU: two ranks would wait for each other's turn on it")
        sys.exit(ABSENT)
    given = {name: vars(args)[name] for name in ("device", "workers", "samples", "micro_batches", "bucket_mb", "seed")}
    settings = s = Settings(**given, **(LARGE if args.device == "cuda" else {}))
    warn_if_busy()
    outcome = run(settings, Schedule(args.variants, args.rounds, args.steps))
    result = figures(outcome, args.variants)
    show(
        f"{s.workers} workers on {s.device}; GPT of {outcome['parameters'] / 1e6:.1f} M parameters; a worker's step: "
        f"{s.micro_batches} x {s.samples} sequences of {s.block} tokens; medians of {args.rounds} rounds of "
        f"{args.steps} steps; losses differ from {result['base']}'s by at most "
        f"{max(outcome['loss_differences'].values()):.1e} of them",
        result,
    )
    about = {**asdict(s), "rounds": args.rounds, "steps": args.steps, "parameters": outcome["parameters"]}
    write(args.json, ("torch", "numpy", "fairscale"), benchmark=benchmark, settings=about, **result)


if __name__ == "__main__":
    measure("step", __doc__, ON_CPUS)
