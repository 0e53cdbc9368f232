"""What communication costs beside backward, kfuse and torch's DDP: 2 to 8 GPUs over NCCL; on a CPU two gloo processes.

    python benchmarks/gpu_ddp.py --device cuda --json ddp.json

All variants train the GPT of step_gpu.py, two micro-batches a step, each rank on data of its own. Their losses are
compared first; then they take turns in an order shuffled anew each round. `exposed` is a step's time less that of the
same optimizer without other workers, in the same round: communication that nothing hides, and waiting for each other.
`host` is how long the host was busy until the step's work was enqueued. `peak` is the memory that torch has allocated
for a variant alone, NCCL's own buffers not included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_workers import ABSENT, Ranks, nccl, new_session
from machine import command, machine, versions, warn_if_busy
from step_gpu import MICRO_BATCHES, Kfuse, Torch, Variant, peak_bytes
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.comm.plan import StepPlan

CHECK_STEPS, TOLERANCE, ROUNDED = 5, 5e-3, 5e-2
STEPS, MOST_GPUS, TIMEOUT_S = 3, 8, 20.0


class Alone(Torch):
    """torch's fused AdamW on each rank for itself."""

    def __init__(self, device: torch.device, options: kf.CommOptions | None = None) -> None:
        super().__init__(device)
        self.pool = self.pool.roll(dist.get_rank(), 0)


class DDP(Alone):
    """DistributedDataParallel, its gradients views of its buckets."""

    def __init__(self, device: torch.device, options: kf.CommOptions | None = None) -> None:
        super().__init__(device)
        ids = [device.index] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.model = self.ddp  # type: ignore[assignment]

    def train(self) -> Tensor:
        losses = []
        for j in range(MICRO_BATCHES):
            with nullcontext() if j == MICRO_BATCHES - 1 else self.ddp.no_sync():
                loss = self.loss(j) / MICRO_BATCHES
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.update()
        return torch.stack(losses).sum()


class DDPInBf16(DDP):
    """The same with torch's hook that sends gradients in bf16."""

    def __init__(self, device: torch.device, options: kf.CommOptions | None = None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        super().__init__(device)
        self.ddp.register_comm_hook(None, bf16_compress_hook)


class KfuseTogether(Kfuse):
    """kf.FusedAdamW over all ranks."""

    alone = False

    def __init__(self, device: torch.device, options: kf.CommOptions) -> None:
        session = new_session(options, TIMEOUT_S, alone=self.alone)
        if session.group.device != device:
            raise RuntimeError(f"kfuse has chosen {session.group.device}, not {device}")
        super().__init__(device)
        self.pool = self.pool.roll(dist.get_rank(), 0)
        ranks = range(session.group.size)
        ranges = tuple(range(r * MICRO_BATCHES, (r + 1) * MICRO_BATCHES) for r in ranks)
        self.plan = StepPlan(self.sequences * MICRO_BATCHES * len(ranks), ranges)


class KfuseAlone(KfuseTogether):
    """kf.FusedAdamW on each rank for itself."""

    alone = True


Maker = Callable[[torch.device, kf.CommOptions], Variant]
VARIANTS: dict[str, tuple[Maker, kf.CommOptions, str]] = {  # class, options, the same without other workers
    "torch alone": (Alone, kf.CommOptions(), "torch alone"),
    "kfuse alone": (KfuseAlone, kf.CommOptions(), "kfuse alone"),
    "ddp": (DDP, kf.CommOptions(), "torch alone"),
    "ddp, bf16 messages": (DDPInBf16, kf.CommOptions(), "torch alone"),
    "kfuse": (KfuseTogether, kf.CommOptions(), "kfuse alone"),
    "kfuse, bf16 messages": (KfuseTogether, kf.CommOptions(dtype="bf16"), "kfuse alone"),
}
REPRODUCIBLE: dict[str, tuple[Maker, kf.CommOptions, str]] = {
    "kfuse alone, reproducible": (KfuseAlone, kf.CommOptions(reproducible=True), "kfuse alone, reproducible"),
    "kfuse, reproducible": (KfuseTogether, kf.CommOptions(reproducible=True), "kfuse alone, reproducible"),
    "torch alone, deterministic": (Alone, kf.CommOptions(), "torch alone, deterministic"),
    "ddp, deterministic": (DDP, kf.CommOptions(), "torch alone, deterministic"),
}
"""In processes of their own: comm.reproducible=true turns deterministic algorithms on for the whole process."""
PAIRS = (
    ("kfuse", "ddp"),
    ("kfuse, bf16 messages", "ddp, bf16 messages"),
    ("kfuse, reproducible", "ddp, deterministic"),
)
NEEDS_NCCL = ("ddp, bf16 messages",)  # torch's hook refuses gloo


def main() -> int:
    """Measures. Exit status 1 where a variant trains something else, ABSENT on a machine with one GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warn_if_busy()
    count = min(torch.cuda.device_count(), MOST_GPUS) if options.device == "cuda" else 2
    if count < 2:
        print("one GPU: two ranks would wait for each other's turn on it")
        return ABSENT
    patience = 1 if options.device == "cuda" else 3
    answers: list[dict[str, Any]] = [{} for _ in range(count)]
    failed = False
    for group in (VARIANTS, REPRODUCIBLE):
        try:
            with Ranks(count, options.device, measure, list(group), options.rounds) as ranks:
                for answer, found in zip(answers, ranks.next(45.0 * patience), strict=True):
                    answer.update({what: answer.get(what, {}) | values for what, values in found.items()})
        except RuntimeError as error:
            print(error)
            failed = True
    if not answers[0]:
        return 1
    _report(answers, count, options)
    return int(failed)


def measure(device: torch.device, names: list[str], rounds: int, answer: Callable[[Any], None]) -> None:
    """One rank: checks, then times, then measures memory. Raises RuntimeError where losses differ."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    every = VARIANTS | REPRODUCIBLE
    chosen = {name: every[name] for name in names if device.type == "cuda" or name not in NEEDS_NCCL}
    variants = {name: make(device, options) for name, (make, options, _) in chosen.items()}
    losses = _check(variants, device)
    order = random.Random(0)
    step_s: dict[str, list[float]] = {name: [] for name in variants}
    host_s: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        turns = list(variants)
        order.shuffle(turns)
        for name in turns:
            elapsed, host = _block(variants[name], device)
            step_s[name].append(elapsed)
            host_s[name].append(host)
    parameters = {name: sum(p.numel() for p in variant.parameters) for name, variant in variants.items()}
    variants.clear()
    peaks = {name: peak_bytes(partial(make, device, options), device) for name, (make, options, _) in chosen.items()}
    answer({"losses": losses, "step_s": step_s, "host_s": host_s, "peak_bytes": peaks, "parameters": parameters})


def _check(variants: dict[str, Variant], device: torch.device) -> dict[str, list[float]]:
    """Losses averaged over ranks. Raises RuntimeError where a variant does not train what DDP trains."""
    losses = {}
    for name, variant in variants.items():
        values = torch.stack([variant.step() for _ in range(CHECK_STEPS)]).float()
        dist.all_reduce(values)
        losses[name] = (values / dist.get_world_size()).tolist()
    [base] = [name for name in losses if name in ("ddp", "ddp, deterministic")]
    for name, values in losses.items():
        allowed = ROUNDED if "bf16" in name else TOLERANCE
        apart = max(abs(a - b) for a, b in zip(values, losses[base], strict=True))
        if "alone" not in name and not apart <= allowed:
            raise RuntimeError(f"{name} does not train what DDP trains: its losses differ by {apart:.1e}")
    if not losses[base][-1] < losses[base][0]:
        raise RuntimeError(f"the model does not learn: losses {losses[base]}")
    return losses


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _block(variant: Variant, device: torch.device) -> tuple[float, float]:
    """Seconds a step, and the host's part of it."""
    variant.step()
    _wait(device)
    dist.barrier()
    _wait(device)  # NCCL's barrier is work on the device
    started = time.perf_counter()
    for _ in range(STEPS):
        variant.step()
    enqueued = time.perf_counter()
    _wait(device)
    return (time.perf_counter() - started) / STEPS, (enqueued - started) / STEPS


def _report(answers: list[dict[str, Any]], count: int, options: argparse.Namespace) -> None:
    """Prints a line for each variant: medians over rounds, of the mean over ranks."""

    def mean(what: str, name: str) -> list[float]:
        return [sum(values) / count for values in zip(*(answer[what][name] for answer in answers), strict=True)]

    parameters = next(iter(answers[0]["parameters"].values()))
    print(f"GPT of {parameters / 1e6:.1f} M parameters, {count} workers; medians of {options.rounds} rounds")
    print(f"{'variant':<28} {'step ms':>9} {'exposed ms':>11} {'host ms':>9} {'peak GiB':>9}")
    steps = {name: mean("step_s", name) for name in answers[0]["step_s"]}
    results: dict[str, dict[str, Any]] = {}
    for name in steps:
        alone = (VARIANTS | REPRODUCIBLE)[name][2]
        exposed = median(a - b for a, b in zip(steps[name], steps[alone], strict=True))
        peak = max(answer["peak_bytes"][name] or 0 for answer in answers)
        found = {"step_ms": 1e3 * median(steps[name]), "exposed_ms": 1e3 * exposed if name != alone else None}
        found["host_ms"] = 1e3 * median(mean("host_s", name)) if options.device == "cuda" else None
        found["peak_gib"] = peak / 2**30 if options.device == "cuda" else None
        results[name] = found
        cells = [f"{found[key]:.2f}" if found[key] is not None else "-" for key in found]
        print(f"{name:<28} {cells[0]:>9} {cells[1]:>11} {cells[2]:>9} {cells[3]:>9}")
    pairs = [(a, b) for a, b in PAIRS if a in steps and b in steps]
    ratios = {f"{a} / {b}": median(x / y for x, y in zip(steps[a], steps[b], strict=True)) for a, b in pairs}
    if options.json is not None:
        record = {
            "benchmark": "gpu_ddp",
            "command": command(),
            "machine": machine(),
            "versions": versions(("torch", "triton")) | {"nccl": ".".join(map(str, nccl())) or "none"},
            "workers": count,
            "parameters": parameters,
            "results": results,
            "ratios": ratios,
            "step_ms_by_round": {name: [round(1e3 * s, 3) for s in values] for name, values in steps.items()},
            "losses": answers[0]["losses"],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{count} workers: " + ", ".join(f"{pair} {ratio:.3f}" for pair, ratio in ratios.items()))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
