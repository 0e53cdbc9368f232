"""Steps of two optimizers in the same processes, which take turns: what an option costs, on a busy machine too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import kfuse as kf


def network(hidden: int) -> nn.Sequential:
    """64 inputs, two hidden layers, 10 classes; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def seconds_in_turns(
    pairs: Sequence[tuple[nn.Module, Any]], samples: int, rounds: int, steps: int
) -> list[list[float]]:
    """By round and pair: seconds a step, of some steps at a time. On each of several workers, at the same point.

    pairs: two networks, each with its optimizer. samples: in each worker's batch. One round more is made, first.
    """
    x, y = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    found: list[list[float]] = []
    for number in range(rounds + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            model, opt = pairs[which]
            kf.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            kf.barrier()
            seconds[which] = (time.perf_counter() - started) / steps
        found.append(seconds)
    return found[1:]
