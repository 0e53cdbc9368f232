"""Monitors beside plain DDP and FSDP2: what the gradient noise scale costs those who keep them and their optimizer.

    python benchmarks/hooks.py --json benchmarks/results/hooks.json
    python benchmarks/hooks.py --micro-batches 4 --samples 2
    python benchmarks/hooks.py --variants fsdp,fsdp-kf-monitor

`ddp` and `fsdp` are plain, with torch's fused AdamW; the others are the same, each with a communication hook or a
monitor. The measurement is that of step.py.
"""

from __future__ import annotations

from step import measure

if __name__ == "__main__":
    measure("hooks", __doc__, ("ddp-allreduce-hook", "ddp-kf-hook", "ddp-noise-scale"))
