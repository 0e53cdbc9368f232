"""Whole optimizer steps, kfuse beside its peers: one machine, interleaved, paired.

    python benchmarks/step.py --json benchmarks/results/step.json

Spawns the workers (gloo, one thread each), checks that all variants train the same model, then lets the variants take
turns in blocks of a few steps, in an order shuffled anew each round, so that a drifting machine drifts for all of them.
Ratios are formed within a round; reported is their median, with a bootstrap interval over rounds. See README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import warn_if_busy
from step_report import PAIRS, Pairs, report
from step_variants import VARIANTS, Settings, Variant
from workers import messages_from, set_torchrun_variables

CHECK_STEPS, TOLERANCE = 6, 1e-4
STEP_VARIANTS = tuple(VARIANTS)


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
    settings = Settings(
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
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    messages: Any = mp.get_context("spawn").Queue()
    arguments = (settings, schedule, store.port, messages)
    workers = mp.spawn(_worker, arguments, nprocs=settings.workers, join=False)
    outcome: dict[str, Any] = {}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("starting", total=schedule.rounds)
        for kind, value in messages_from(workers, messages):
            if kind == "outcome":
                outcome = value
            else:
                progress.update(task, description=kind, completed=value)
    return outcome


def _worker(rank: int, settings: Settings, schedule: Schedule, port: int, messages: Any) -> None:
    torch.set_num_threads(1)
    set_torchrun_variables(rank, settings.workers, port)
    dist.init_process_group("gloo")
    say = messages.put if rank == 0 else lambda message: None
    variants = {name: VARIANTS[name](settings, rank) for name in schedule.names}
    parameters = sum(p.numel() for p in next(iter(variants.values())).parameters)
    say(("checking", 0))
    differences = _check(variants)
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
    say(("outcome", {"rounds": rounds, "loss_differences": differences, "parameters": parameters}))
    dist.barrier()
    messages.close()
    messages.join_thread()
    os._exit(0)  # the destructors of torch's DDP and gloo have been seen to hang, and to abort the process


def _check(variants: dict[str, Variant]) -> dict[str, float]:
    """The largest difference of each variant's losses to DDP's, over all workers. Raises RuntimeError if too large.

    "local" averages nothing over workers, so its losses are its own.
    """
    losses = {}
    for name, variant in variants.items():
        with variant.turn():
            values = torch.stack([variant.step() for _ in range(CHECK_STEPS)])
        dist.all_reduce(values)
        losses[name] = values / dist.get_world_size()
    compared = {name: value for name, value in losses.items() if name != "local"}
    differences = {name: float((value - losses["ddp"]).abs().max()) for name, value in compared.items()}
    if losses["ddp"][-1] >= losses["ddp"][0]:
        raise RuntimeError(f"the model does not learn: losses {losses['ddp'].tolist()}")
    wrong = {name: difference for name, difference in differences.items() if not difference <= TOLERANCE}
    if wrong:
        raise RuntimeError(f"these variants do not train the model that ddp trains (largest loss difference): {wrong}")
    return differences


def _block(variant: Variant, steps: int) -> tuple[float, float, float]:
    """Seconds a step, the part of it that was exposed after backward, and this worker's CPU seconds (all threads)."""
    with variant.turn():
        dist.barrier()
        variant.step()
        exposed = 0.0
        started, started_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            variant.step()
            exposed += variant.exposed_s
        elapsed, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    return elapsed / steps, exposed / steps, cpu / steps


def _mean(measured: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*measured, strict=True))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _arguments(description: str, default: tuple[str, ...]) -> argparse.Namespace:
    parser = _Parser(description=description.splitlines()[0])
    parser.add_argument("--workers", type=_at_least(2), default=2)
    parser.add_argument("--micro-batches", type=_at_least(1), default=1, help="a worker's micro-batches a step")
    parser.add_argument("--samples", type=_at_least(1), default=8, help="sequences a micro-batch")
    parser.add_argument("--rounds", type=_at_least(3), default=60)
    parser.add_argument("--steps", type=_at_least(1), default=4, help="timed steps of a variant a round")
    parser.add_argument(
        "--bucket-mb", type=_positive, default=Settings.bucket_mb, help="of kfuse; DDP keeps its default"
    )
    parser.add_argument("--variants", type=_names, default=default, help=f"comma-separated: {', '.join(VARIANTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write settings, machine and all measurements here")
    arguments = parser.parse_args()
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
    """The chosen variants; the two that all others are measured against are always among them."""
    chosen = text.split(",")
    for name in chosen:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a variant; allowed are {', '.join(VARIANTS)}")
    return tuple(name for name in VARIANTS if name in chosen or name in ("local", "ddp"))


if __name__ == "__main__":
    main()
