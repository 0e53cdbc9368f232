"""Whole optimizer steps, kfuse beside its peers: one machine, interleaved, paired.

    python benchmarks/step.py --json benchmarks/results/step.json
    python benchmarks/step.py --device cuda --workers 1        on one GPU: an optimizer and statistics beside torch's

Spawns the workers (gloo, one thread each; on GPUs NCCL, one GPU each), checks that all variants train the same model,
then lets the variants take turns in blocks of a few steps, in an order shuffled anew each round, so that a drifting
machine drifts for all of them. Ratios are formed within a round; reported is their median, with a bootstrap interval
over rounds. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_workers import ABSENT, place
from machine import warn_if_busy
from step_report import PAIRS, Pairs, report
from step_variants import VARIANTS, Settings, Variant
from workers import leave, messages_of, set_torchrun_variables

CHECK_STEPS = 6
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-3}
IN_BF16 = 5e-2
"""How far losses may be from torch's: on a GPU matrix products are in bf16; with gradients in bf16 on the wire."""
STEP_VARIANTS = tuple(name for name in VARIANTS if "bf16" not in name and name != "local-noise-scale")
ALONE = ("local", "local-noise-scale", "allreduce", "allreduce-no-stats")
ON_GPUS = ("local", "ddp", "ddp-bf16", "allreduce", "allreduce-bf16")
"""Without reproducible ones: they turn deterministic algorithms on for the whole process. Choose them by themselves."""
LARGE: dict[str, Any] = {"layers": 12, "width": 768, "block": 256, "lr": 3e-5}
"""The GPT of GPUs. Without a warm-up its loss rises at first at the smaller one's learning rate."""


@dataclass(frozen=True)
class Schedule:
    names: tuple[str, ...]
    rounds: int
    steps: int
    """Timed steps a block; one more before them warms the caches."""


def main() -> None:
    measure("step", __doc__ or "", STEP_VARIANTS, PAIRS)


def measure(benchmark: str, description: str, default: tuple[str, ...], pairs: Pairs) -> None:
    """The command `benchmark`: reads its arguments, measures, reports. default: variants unless others are chosen."""
    arguments = _arguments(description, default)
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.workers:
        print("one GPU: two ranks would wait for each other's turn on it")
        sys.exit(ABSENT)
    settings = Settings(
        device=arguments.device,
        **(LARGE if arguments.device == "cuda" else {}),
        workers=arguments.workers,
        samples=arguments.samples,
        micro_batches=arguments.micro_batches,
        bucket_mb=arguments.bucket_mb,
        seed=arguments.seed,
    )
    warn_if_busy()
    schedule = Schedule(arguments.variants, arguments.rounds, arguments.steps)
    try:
        outcome = _run(settings, schedule)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"a worker failed:\n{error}")
    report(benchmark, pairs, outcome, settings, schedule.rounds, schedule.steps, arguments.json)


def _run(settings: Settings, schedule: Schedule) -> dict[str, Any]:
    """Starts the workers, follows their progress, and returns what rank 0 hands back."""
    outcome: dict[str, Any] = {}
    for kind, value in messages_of(settings.workers, _worker, settings, schedule):
        if kind == "outcome":
            outcome = value
        elif sys.stderr.isatty():
            print(f"\r{kind} {value}/{schedule.rounds} ", end="", file=sys.stderr)
    return outcome


def _worker(rank: int, settings: Settings, schedule: Schedule, port: int, messages: Any) -> None:
    set_torchrun_variables(rank, settings.workers, port)
    device = place(settings.device, rank, settings.workers)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    say = messages.put if rank == 0 else lambda message: None
    variants = {name: VARIANTS[name](settings, rank) for name in schedule.names}
    parameters = sum(p.numel() for p in next(iter(variants.values())).parameters)
    say(("checking", 0))
    differences = _check(variants, TOLERANCE[settings.device])
    order = random.Random(settings.seed)
    measured: list[dict[str, tuple[float, ...]]] = []
    for done in range(schedule.rounds):
        names = list(variants)
        order.shuffle(names)
        measured.append({name: _block(variants[name], schedule.steps) for name in names})
        say(("measuring", done + 1))
    everyone: list[Any] = [None] * settings.workers
    dist.all_gather_object(everyone, measured)
    rounds = [{name: _mean([m[i][name] for m in everyone]) for name in variants} for i in range(schedule.rounds)]
    variants.clear()
    peaks = {name: _peak_bytes(name, settings, rank) for name in schedule.names}
    outcome = {"rounds": rounds, "loss_differences": differences, "parameters": parameters, "peak_bytes": peaks}
    say(("outcome", outcome))
    dist.barrier()
    leave(messages)


def _peak_bytes(name: str, settings: Settings, rank: int) -> int | None:
    """Bytes that torch allocates for two steps of a variant alone, NCCL's buffers not included; None on a CPU."""
    if settings.device == "cpu":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    variant = VARIANTS[name](settings, rank)
    with variant.turn():
        for _ in range(2):
            variant.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _check(variants: dict[str, Variant], tolerance: float) -> dict[str, float]:
    """The largest difference of each variant's losses to torch's, over all workers. Raises RuntimeError if too large.

    "local" averages nothing over workers, so with several its losses are its own.
    """
    losses = {}
    for name, variant in variants.items():
        with variant.turn():
            values = torch.stack([variant.step() for _ in range(CHECK_STEPS)]).float()
        dist.all_reduce(values)
        losses[name] = values / dist.get_world_size()
    base = losses["ddp"] if "ddp" in losses else losses["local"]
    compared = {name: value for name, value in losses.items() if name != "local" or "ddp" not in losses}
    differences = {name: float((value - base).abs().max()) for name, value in compared.items()}
    if base[-1] >= base[0]:
        raise RuntimeError(f"the model does not learn: losses {base.tolist()}")
    allowed = {name: IN_BF16 if "bf16" in name else tolerance for name in differences}
    wrong = {name: difference for name, difference in differences.items() if not difference <= allowed[name]}
    if wrong:
        raise RuntimeError(f"these variants do not train what torch trains (largest loss difference): {wrong}")
    return differences


def _block(variant: Variant, steps: int) -> tuple[float, ...]:
    """Of a step, seconds: all; exposed after backward; this worker's CPU (all threads); the host until all is enqueued.

    On a GPU `exposed` is the host's part of it.
    """
    wait = torch.cuda.synchronize if variant.device.type == "cuda" else lambda: None
    with variant.turn():
        dist.barrier()
        variant.step()
        wait()
        exposed = 0.0
        started, started_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            variant.step()
            exposed += variant.exposed_s
        enqueued = time.perf_counter() - started
        wait()
        elapsed, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    return elapsed / steps, exposed / steps, cpu / steps, enqueued / steps


def _mean(measured: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*measured, strict=True))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _arguments(description: str, default: tuple[str, ...]) -> argparse.Namespace:
    parser = _Parser(description=description.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=_at_least(1), default=2)
    parser.add_argument("--micro-batches", type=_at_least(1), default=1, help="a worker's micro-batches a step")
    parser.add_argument("--samples", type=_at_least(1), default=8, help="sequences a micro-batch")
    parser.add_argument("--rounds", type=_at_least(3), default=60)
    parser.add_argument("--steps", type=_at_least(1), default=4, help="timed steps of a variant a round")
    parser.add_argument(
        "--bucket-mb", type=_positive, default=Settings.bucket_mb, help="of kfuse; DDP keeps its default"
    )
    parser.add_argument("--variants", type=_names, help=f"comma-separated: {', '.join(VARIANTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write settings, machine and all measurements here")
    arguments = parser.parse_args()
    if arguments.variants is None:
        arguments.variants = ALONE if arguments.workers == 1 else ON_GPUS if arguments.device == "cuda" else default
    base = {"local"} | ({"ddp"} if arguments.workers > 1 else set())  # what all others are measured against
    arguments.variants = tuple(name for name in VARIANTS if name in base.union(arguments.variants))
    if "ddp-adascale" in arguments.variants and importlib.util.find_spec("fairscale") is None:
        parser.error("ddp-adascale needs fairscale: pip install fairscale, or choose other --variants")
    return arguments


def _at_least(least: int) -> Any:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
        return int(text)

    return integer


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _names(text: str) -> tuple[str, ...]:
    """The chosen variants."""
    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a variant; allowed are {', '.join(VARIANTS)}")
    return chosen


if __name__ == "__main__":
    main()
