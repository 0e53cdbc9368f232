"""What comparing the workers' parameters costs: a digest every `check_every` steps, beside the steps themselves.

    OMP_NUM_THREADS=1 python benchmarks/consistency.py

Times, by turns in one process, the digest of a 4.8 M-parameter GPT and a training step of it (one worker, 8 sequences
of 64 bytes), and prints the medians and the cost of a digest every 100 steps as a fraction of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import kfuse as kf
from kfuse.comm.digest import digest
from kfuse.comm.settings import CommOptions
from kfuse.models import GPT

VOCABULARY, BLOCK, SAMPLES = 256, 64, 8


def main() -> None:
    """Prints three lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=30)
    rounds: int = parser.parse_args().rounds
    every = CommOptions().check_every
    assert every is not None
    torch.manual_seed(0)
    model = GPT(VOCABULARY, BLOCK, 6, 4, 256, dropout=0.0)
    opt = kf.FusedAdamW(model.parameters())
    tokens = torch.randint(VOCABULARY, (SAMPLES, BLOCK + 1))

    def step() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()

    def check() -> None:
        digest(opt.engine.params).item()

    times: dict[str, list[float]] = {"step": [], "digest": []}
    for turn in range(rounds + 3):
        for name, run in (("step", step), ("digest", check)):
            seconds = _timed(run)
            if turn >= 3:  # the first ones warm up
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    numel = sum(p.numel() for p in opt.engine.params)
    print(f"step of {numel / 1e6:.1f} M parameters: {1e3 * median['step']:.1f} ms")
    print(f"digest: {1e3 * median['digest']:.2f} ms")
    print(f"cost of one every {every} steps: {median['digest'] / (every * median['step']):.4%} of the step")


def _timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
