"""A whole training step on one device, kfuse beside torch: forward, backward, statistics, clipping, AdamW.

    python benchmarks/step_gpu.py --device cuda --json benchmarks/results/step_gpu_cuda.json

The variants train the same GPT from the same parameters on the same data, two micro-batches a step. Their losses are
compared first; then they take turns in an order shuffled anew each round. `beside the model` is a step's time less that
of forward and backward alone, measured in the same round: what optimizer and statistics cost. `host` is how long the
host was busy until a step's work was enqueued; `peak` is the memory that torch allocates for a variant alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from machine import command, machine, versions, warn_if_busy
from torch import Tensor

import kfuse as kf
from kfuse import session
from kfuse.comm import measurement
from kfuse.comm.plan import StepPlan
from kfuse.models import GPT

VOCABULARY, LR, CLIP, MICRO_BATCHES = 256, 3e-4, 1.0, 2
CHECK_STEPS, TOLERANCE = 5, 5e-3
SIZES = {  # layers, heads, width, tokens a sequence, sequences a micro-batch
    "cpu": (2, 4, 128, 32, 4),
    "cuda": (12, 12, 768, 256, 8),
}


class Variant(ABC):
    """A model of its own; `step` trains on the next batch and returns the mean loss, on the device."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers, heads, width, block, self.sequences = SIZES[device.type]
        self.model = GPT(VOCABULARY, block, layers, heads, width, dropout=0.0).to(device)
        self.parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        shape = (8, self.sequences, block + 1)
        # Skewed tokens: there is something to learn, so that the losses of two diverging runs would differ.
        self.pool = (torch.rand(shape, generator=generator) ** 3 * VOCABULARY).long().to(device)
        self.steps = 0

    def loss(self, j: int) -> Tensor:
        tokens = self.pool[(self.steps * MICRO_BATCHES + j) % len(self.pool)]
        # As one trains today: matrix products in bf16, parameters and gradients in fp32.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def step(self) -> Tensor:
        loss = self.train()
        self.steps += 1
        return loss

    @abstractmethod
    def train(self) -> Tensor: ...


class Model(Variant):
    """Forward and backward alone: gradients are accumulated and dropped."""

    def train(self) -> Tensor:
        losses = []
        for j in range(MICRO_BATCHES):
            loss = self.loss(j) / MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        for parameter in self.parameters:
            parameter.grad = None
        return torch.stack(losses).sum()


class Torch(Variant):
    """torch's fused AdamW and clip_grad_norm_, no statistics."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=True)

    def train(self) -> Tensor:
        losses = []
        for j in range(MICRO_BATCHES):
            loss = self.loss(j) / MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.update()
        return torch.stack(losses).sum()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()


class TorchNoiseScale(Torch):
    """The same with a noise scale in foreach operations: each micro-batch's own norm, so gradients add up apart."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.total = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.squares = torch.zeros((), device=device)
        self.means = torch.zeros(2, dtype=torch.float64, device=device)

    def train(self) -> Tensor:
        losses = []
        self.squares.zero_()
        for j in range(MICRO_BATCHES):
            loss = self.loss(j)
            loss.backward()  # type: ignore[no-untyped-call]
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            self.squares += torch.stack(torch._foreach_norm(grads)).square().sum()
            torch._foreach_add_(self.total, grads, alpha=1 / MICRO_BATCHES)
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        for parameter, total in zip(self.parameters, self.total, strict=True):
            parameter.grad = total
        mean = torch.stack(torch._foreach_norm(self.total)).square().sum().double()
        samples = self.sequences * MICRO_BATCHES
        variance = (self.sequences * self.squares.double() - samples * mean) / (MICRO_BATCHES - 1)
        self.means.lerp_(torch.stack([variance, mean - variance / samples]), 0.05)  # read when wanted
        self.update()
        torch._foreach_zero_(self.total)
        return torch.stack(losses).mean()


class Kfuse(Variant):
    """kf.FusedAdamW, clipping, statistics; the host digests a step's record one step later, as the trainer does."""

    statistics = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.optimizer = kf.FusedAdamW(self.parameters, lr=LR, clip_norm=CLIP)
        self.plan = StepPlan(self.sequences * MICRO_BATCHES, (range(MICRO_BATCHES),))

    def train(self) -> Tensor:
        losses = []
        self.optimizer.begin(self.plan)
        for j in range(MICRO_BATCHES):
            with self.optimizer.micro_batch(self.sequences, last=j == MICRO_BATCHES - 1):
                loss = self.loss(j)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.statistics:
            self.optimizer.statistics.read(lag=1)
        return torch.stack(losses).mean()


class KfuseNoStatistics(Kfuse):
    """Without what can be left out: the micro-batches' partial sums are not added up, nothing goes to the host.

    The squares in `pack` stay, for they ride in its pass over memory; |gbar|^2 stays, for clipping needs it.
    """

    statistics = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.optimizer.statistics.push = lambda *_: None  # type: ignore[method-assign]

    def train(self) -> Tensor:
        original, own = measurement.sum_partials, self.optimizer.engine.measurement.sumsq

        def only_for_clipping(partials: Tensor, out: Tensor) -> None:
            if partials is not own:
                original(partials, out)

        with patch.object(measurement, "sum_partials", only_for_clipping):
            return super().train()


VARIANTS: dict[str, Callable[[torch.device], Variant]] = {
    "model alone": Model,
    "torch": Torch,
    "torch + noise scale": TorchNoiseScale,
    "kfuse": Kfuse,
    "kfuse, no statistics": KfuseNoStatistics,
}
PAIRS = (("kfuse", "torch + noise scale"), ("kfuse", "torch"), ("kfuse", "kfuse, no statistics"))


def main() -> int:
    """Measures. Exit status 1 where a variant trains something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a variant a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warn_if_busy()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session.reset()
    if kf.init().group.device != device:
        parser.error(f"kfuse has chosen {kf.init().group.device}, not {device}")
    variants = {name: make(device) for name, make in VARIANTS.items()}
    losses = {name: torch.stack([v.step() for _ in range(CHECK_STEPS)]).tolist() for name, v in variants.items()}
    wrong = [n for n in VARIANTS if n != "model alone" and _apart(losses[n], losses["torch"]) > TOLERANCE]
    if wrong or not losses["torch"][-1] < losses["torch"][0]:
        print(f"these do not train the model that torch trains: {wrong}; losses {losses}")
        return 1
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    host: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            elapsed, enqueued = _block(variants[name], options.steps, device)
            seconds[name].append(elapsed)
            host[name].append(enqueued)
    count = sum(p.numel() for p in variants["torch"].parameters)
    variants.clear()
    peaks = {name: peak_bytes(partial(make, device), device) for name, make in VARIANTS.items()}
    return _report(seconds, host, peaks, losses, count, options)


def _apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _block(variant: Variant, steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds a step, and the host's part of it, until its work was enqueued."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    variant.step()
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        variant.step()
    enqueued = time.perf_counter()
    wait()
    return (time.perf_counter() - started) / steps, (enqueued - started) / steps


def peak_bytes(make: Callable[[], Variant], device: torch.device) -> int | None:
    """Bytes that torch allocates for two steps of a variant, above what there was before it; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    variant = make()
    for _ in range(2):
        variant.step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _report(
    seconds: dict[str, list[float]],
    host: dict[str, list[float]],
    peaks: dict[str, int | None],
    losses: dict[str, list[float]],
    parameters: int,
    options: argparse.Namespace,
) -> int:
    model = seconds["model alone"]
    beside = {name: [t - m for t, m in zip(times, model, strict=True)] for name, times in seconds.items()}
    print(f"GPT of {parameters / 1e6:.1f} M parameters on {options.device}; medians of {options.rounds} rounds")
    print(f"{'variant':<22} {'step ms':>9} {'beside the model ms':>20} {'host ms':>9} {'peak GiB':>9}")
    on_gpu = options.device == "cuda"  # elsewhere the host does the work itself, and nothing counts its memory
    host_ms = {name: 1e3 * median(times) if on_gpu else None for name, times in host.items()}
    peak_gib = {name: None if peak is None else peak / 2**30 for name, peak in peaks.items()}
    for name in seconds:
        cells = [f"{value:.2f}" if value is not None else "-" for value in (host_ms[name], peak_gib[name])]
        times = f"{1e3 * median(seconds[name]):>9.2f} {1e3 * median(beside[name]):>20.2f}"
        print(f"{name:<22} {times} {cells[0]:>9} {cells[1]:>9}")
    ratios = {f"{a} / {b}": _ratios(seconds, beside, a, b) for a, b in PAIRS}
    for pair, ratio in ratios.items():
        print(f"{pair:<36} step {ratio['step']:.3f}, beside the model {ratio['beside_the_model']:.3f}")
    if options.json is not None:
        record: dict[str, Any] = {
            "benchmark": "step_gpu",
            "command": command(),
            "machine": machine(),
            "versions": versions(("torch", "triton")),
            "parameters": parameters,
            "step_ms": {name: 1e3 * median(times) for name, times in seconds.items()},
            "beside_the_model_ms": {name: 1e3 * median(times) for name, times in beside.items()},
            "host_ms": host_ms,
            "peak_gib": peak_gib,
            "ratios": ratios,
            "losses": losses,
            "step_ms_by_round": {name: [round(1e3 * t, 3) for t in times] for name, times in seconds.items()},
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    to_torch = ratios["kfuse / torch"]["step"]
    print(f"a step of kfuse, statistics included, takes {to_torch:.3f} times torch's without any")
    return 0


def _ratios(seconds: dict[str, list[float]], beside: dict[str, list[float]], a: str, b: str) -> dict[str, float]:
    return {
        "step": median(x / y for x, y in zip(seconds[a], seconds[b], strict=True)),
        "beside_the_model": median(beside[a]) / median(beside[b]),
    }


if __name__ == "__main__":
    sys.exit(main())
