"""Whole optimizer steps, kfuse beside its peers: one machine, interleaved, paired.

    python benchmarks/step.py --json benchmarks/results/step.json
    python benchmarks/step.py --workers 1                   an optimizer and statistics beside torch's
    python benchmarks/step.py --hooks --json benchmarks/results/hooks.json
    python benchmarks/step.py --variants fsdp,fsdp-kf-monitor
    python benchmarks/step.py --workers 1 --micro-batches 2 --samples 1 --block 32 --variants local,local-kf-monitor

`--hooks`: what the gradient noise scale costs those who keep plain DDP and torch's fused AdamW.

Spawns the workers (gloo, one thread each), which train a small GPT as compare.py says. On GPUs: gpu_step.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from compare import Schedule, figures, parse, parser, run, show
from replicas import Settings
from report import warn_if_busy, write

ALONE = ("local", "local-noise-scale", "allreduce", "allreduce-no-stats")
HOOKS = ("ddp-allreduce-hook", "ddp-kf-hook", "ddp-noise-scale")
ON_CPUS = ("local", "ddp", "ddp-adascale", "ddp-noise-scale", "allreduce", "allreduce-no-stats", "reproducible")
ON_CPUS = (*ON_CPUS, "reproducible-no-stats", "auto")


def main() -> None:
    def always(args: argparse.Namespace) -> Sequence[str]:
        """What all others are measured against; and the default."""
        chosen = () if args.variants else HOOKS if args.hooks else ALONE if args.workers == 1 else ON_CPUS
        return ("local", *(["ddp"] if args.workers > 1 else []), *chosen)

    found = parser(__doc__, rounds=60, samples=8)
    found.add_argument("--hooks", action="store_true", help="by default compare DDP's hooks")
    found.add_argument("--workers", type=int, default=2)
    found.add_argument("--micro-batches", type=int, default=1, help="a worker's micro-batches a step")
    found.add_argument("--block", type=int, default=64, help="tokens of a sequence")
    found.add_argument("--steps", type=int, default=4, help="timed steps of a variant a round")
    args = parse(found, always)
    given = {name: vars(args)[name] for name in ("workers", "samples", "micro_batches", "block", "bucket_mb", "seed")}
    settings = s = Settings(**given)
    warn_if_busy()
    outcome = run(settings, Schedule(args.variants, args.rounds, args.steps))
    result = figures(outcome, args.variants)
    show(
        f"{s.workers} workers; GPT of {outcome['parameters'] / 1e6:.1f} M parameters; a worker's step: "
        f"{s.micro_batches} x {s.samples} sequences of {s.block} tokens; medians of {args.rounds} rounds of "
        f"{args.steps} steps; losses differ from {result['base']}'s by at most "
        f"{max(outcome['loss_differences'].values()):.1e} of them",
        result,
    )
    about = {**asdict(s), "rounds": args.rounds, "steps": args.steps, "parameters": outcome["parameters"]}
    what = "hooks" if args.hooks else "step"
    write(args.json, ("torch", "numpy", "fairscale"), benchmark=what, settings=about, **result)


if __name__ == "__main__":
    main()
