"""The runner of step.py, gpu_step.py and comm.py: variants take turns in the same processes, and are compared in pairs.

All variants first train alike: their losses are compared with DDP's. Then they take turns in blocks of a few steps, in
an order shuffled anew each round, so that a drifting machine drifts for all of them. Ratios are formed within a round;
reported is their median, with a bootstrap interval over rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_workers import place
from links import LOOPBACK, Place, join, links, received_bytes
from replicas import Settings, Variant
from report import median_interval, parser_of, table
from variants import VARIANTS
from workers import free_port, leave, messages_from

CHECK_STEPS = 6
ON_A_GPU, IN_BF16 = 1e-3, 1e-2
"""How far losses may be from torch's, relatively: a problem's own tolerance is that of fp32 on a CPU."""
BLOCK_S, MOST_STEPS = 0.25, 30
"""A block has as many steps as fit, two at least, where their number is not given."""
MOST = ("allreduce", "all_to_all")
"""What `auto` chooses from."""
PAIRS = (
    ("int8", "bf16"),
    ("sharded-int8", "sharded-bf16"),
    ("allreduce", "ddp-adascale"),
    ("allreduce", "ddp-noise-scale"),
    ("allreduce", "local-noise-scale"),
    ("allreduce-bf16", "ddp-bf16"),
    ("reproducible", "allreduce"),
    ("sharded", "zero"),
    ("sharded-no-stats", "zero"),
    ("sharded-reproducible", "zero"),
    ("ddp-kf-hook", "ddp-allreduce-hook"),
    ("ddp-kf-hook", "ddp-noise-scale"),
    ("fsdp-kf-monitor", "fsdp"),
)
Say = Callable[[tuple[str, Any]], None]


@dataclass(frozen=True)
class Schedule:
    names: tuple[str, ...]
    rounds: int
    steps: int | None = None
    """Timed steps a block; one more before them warms the caches. None: see `BLOCK_S`."""
    checked: int = CHECK_STEPS
    """Steps whose losses are compared first."""
    tolerance: float | None = None
    """How far losses may be from torch's, relatively. None: the problem's, `ON_A_GPU` or `IN_BF16`."""
    own_interface: bool = False
    """Workers have a network interface of the run's own, whose counters are theirs; else the machine's loopback."""
    link: str | None = None
    """The rate of each worker's own link; None: they share one interface."""


def run(settings: Settings, schedule: Schedule) -> dict[str, Any]:
    """Starts the workers, follows their progress, and returns what rank 0 hands back. Exits where a worker fails."""
    count, outcome = settings.workers, dict[str, Any]()
    messages: Any = mp.get_context("spawn").Queue()
    with links(count, schedule.link) if schedule.own_interface else nullcontext([LOOPBACK] * count) as places:
        workers = mp.spawn(_worker, (settings, schedule, places, free_port(), messages), nprocs=count, join=False)
        try:
            for kind, value in messages_from(workers, messages):
                if kind == "outcome":
                    outcome = value
                elif sys.stderr.isatty():
                    print(f"\rround {value} of {schedule.rounds} ", end="", file=sys.stderr)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            sys.exit(f"a worker failed:\n{error}")
    return outcome


def _worker(rank: int, settings: Settings, schedule: Schedule, places: list[Place], port: int, messages: Any) -> None:
    store = join(places, rank, port)
    os.environ["GLOO_SOCKET_IFNAME"] = places[rank].interface
    device = place(settings.device, rank, settings.workers)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    say = messages.put if rank == 0 else lambda message: None
    say(("outcome", turns(rank, settings, schedule, places, say)))
    dist.barrier()
    del store
    leave(messages)


def turns(rank: int, settings: Settings, schedule: Schedule, places: list[Place], say: Say) -> dict[str, Any]:
    """Each round's figures of all variants, means over the workers, and what else there is to report. In a worker."""
    variants = {name: VARIANTS[name](settings, rank) for name in schedule.names}
    parameters = sum(p.numel() for p in variants["local"].parameters)
    base = "ddp" if settings.workers > 1 and "ddp" in variants else "local"
    differences, seconds = _check(variants, settings, schedule, base)
    counts = {name: schedule.steps or min(MOST_STEPS, max(2, round(BLOCK_S / seconds[name]))) for name in variants}
    sharers = settings.workers if len(set(places)) == 1 else 1  # whose bytes the interface counts
    order, names, measured = random.Random(settings.seed), list(variants), []
    for done in range(schedule.rounds):
        order.shuffle(names)
        found = {name: _block(variants[name], counts[name], places[rank].interface) for name in names}
        measured.append({name: [*figures, received / sharers] for name, (*figures, received) in found.items()})
        say(("round", done + 1))
    everyone: list[Any] = [None] * settings.workers
    dist.all_gather_object(everyone, measured)
    rounds = [{name: np.mean([m[i][name] for m in everyone], axis=0) for name in names} for i in range(schedule.rounds)]
    return {"rounds": rounds, "base": base, "loss_differences": differences, "parameters": parameters}


def _check(
    variants: dict[str, Variant], settings: Settings, schedule: Schedule, base_name: str
) -> tuple[dict[str, float], dict[str, float]]:
    """The largest difference of each variant's losses to torch's, over all workers; seconds of each one's last step.

    Raises RuntimeError if a difference is too large. With several workers the losses of those that average nothing
    are their own.
    """
    losses, seconds = {}, {}
    for name, variant in variants.items():
        with variant.turn():
            values = [variant.step() for _ in range(schedule.checked - 1)]
            started = time.perf_counter()
            values.append(variant.step())
            seconds[name] = time.perf_counter() - started
        losses[name] = _average(torch.stack(values).float())
    base = losses[base_name]
    problem = variants["local"].problem
    if problem.learns and base[-1] >= base[0]:
        raise RuntimeError(f"the model does not learn: losses {base.tolist()}")
    compared = [name for name, variant in variants.items() if settings.workers == 1 or not variant.alone]
    differences = {name: float(((losses[name] - base) / base).abs().max()) for name in compared}
    tolerance = schedule.tolerance or (ON_A_GPU if settings.device == "cuda" else problem.tolerance)
    allowed = {name: max(tolerance, IN_BF16) if "bf16" in name else tolerance for name in compared}
    wrong = {name: difference for name, difference in differences.items() if not difference <= allowed[name]}
    if wrong:
        raise RuntimeError(f"these variants do not train what torch trains (largest loss difference): {wrong}")
    took = _average(torch.tensor([*seconds.values()], device=base.device)).tolist()
    return differences, dict(zip(seconds, took, strict=True))


def _average(value: torch.Tensor) -> torch.Tensor:
    """The mean over all workers."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _block(variant: Variant, steps: int, interface: str) -> tuple[float, ...]:
    """Of a step: all its seconds; those exposed after backward; this worker's CPU seconds, of all threads; the host's
    seconds until all is enqueued; tables of addresses copied to the GPU; bytes that the interface received.

    On a GPU `exposed` is the host's part of it.
    """
    wait = torch.cuda.synchronize if variant.device.type == "cuda" else lambda: None
    with variant.turn():
        variant.step()
        dist.barrier()
        wait()
        exposed, received, tables = 0.0, received_bytes(interface), variant.tables
        started, started_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            variant.step()
            exposed += variant.exposed_s
        enqueued = time.perf_counter() - started
        wait()
        elapsed, cpu = time.perf_counter() - started, time.process_time() - started_cpu
        dist.barrier()
        received = received_bytes(interface) - received
    return tuple(each / steps for each in (elapsed, exposed, cpu, enqueued, variant.tables - tables, received))


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(outcome: dict[str, Any], order: Sequence[str], own_interface: bool = False) -> dict[str, Any]:
    """Of each variant, and of pairs of them. own_interface: the bytes received are this run's."""
    rounds = outcome["rounds"]
    names = [name for name in order if name in rounds[0]]
    seconds, exposed, cpu, host, tables, received = (
        {name: np.array([each[name][what] for each in rounds]) for name in names} for what in range(6)
    )
    base, found = outcome["base"], {}
    for name in names:
        alone = VARIANTS[name].base
        found[name] = {
            "step_ms": _milliseconds(seconds[name]),
            f"to_{base}": median_interval(seconds[name] / seconds[base]),
            "exposed_ms": _milliseconds(exposed[name]),
            "over_alone_ms": alone and _milliseconds(seconds[name] - seconds[alone if alone in names else "local"]),
            "cpu_ms": _milliseconds(cpu[name]),
            f"cpu_to_{base}": median_interval(cpu[name] / cpu[base]),
            "host_ms": _milliseconds(host[name]),
            "tables_a_step": round(float(np.mean(tables[name])), 2),
            "bytes_a_parameter": round(float(np.median(received[name])) / outcome["parameters"], 2)
            if own_interface
            else None,
            "step_ms_by_round": np.round(1e3 * seconds[name], 3).tolist(),
        }
    pairs = {
        f"{a} / {b}": {"step": median_interval(seconds[a] / seconds[b]), "cpu": median_interval(cpu[a] / cpu[b])}
        for a, b in _pairs(names, found)
    }
    return {"base": base, "variants": found, "pairs": pairs, "largest_loss_difference": outcome["loss_differences"]}


def _pairs(names: Sequence[str], found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each schedule with and without statistics; `PAIRS`; auto with the best of the schedules that it chooses from."""
    for a, b in ((name, f"{name}-no-stats") for name in names):
        if b in names:
            yield a, b
    yield from ((a, b) for a, b in PAIRS if a in names and b in names)
    if "auto" in names and (fixed := [name for name in MOST if name in names]):
        yield "auto", min(fixed, key=lambda name: float(found[name]["step_ms"]))


def _milliseconds(seconds: np.ndarray) -> float:
    return round(1e3 * float(np.median(seconds)), 3)


def show(title: str, found: dict[str, Any]) -> None:
    """Prints the figures of all variants, and of the pairs."""
    base = found["base"]
    kinds = {"exposed": "exposed_ms", "+alone": "over_alone_ms", "bytes/param": "bytes_a_parameter"}
    kinds |= {"cpu ms": "cpu_ms"}
    heads = ("variant", "step ms", f"to {base}", "95 %", f"cpu to {base}", *kinds)
    rows = [
        (
            name,
            f"{each['step_ms']:.2f}",
            *_ratio(each[f"to_{base}"]),
            f"{each[f'cpu_to_{base}']['median']:.3f}",
            *("-" if each[key] is None else f"{each[key]:.2f}" for key in kinds.values()),
        )
        for name, each in found["variants"].items()
    ]
    table(title, heads, rows)
    pairs = [(name, *_ratio(pair["step"]), *_ratio(pair["cpu"])) for name, pair in found["pairs"].items()]
    if pairs:
        table("", ("pair", "ratio", "95 %", "cpu ratio", "95 %"), pairs)


def _ratio(ratio: dict[str, float]) -> tuple[str, str]:
    return f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}"


# -- command lines ----------------------------------------------------------------------------------------------------


def parser(description: str | None, rounds: int, samples: int) -> argparse.ArgumentParser:
    """What all three commands know. The numbers are defaults."""
    found = parser_of(description)
    found.add_argument("--variants", help=f"comma-separated: {', '.join(VARIANTS)}")
    found.add_argument("--samples", type=int, default=samples, help="of a micro-batch")
    found.add_argument("--rounds", type=int, default=rounds)
    found.add_argument("--bucket-mb", type=float, default=Settings.bucket_mb, help="of kfuse; DDP keeps its default")
    found.add_argument("--seed", type=int, default=0)
    return found


def parse(found: argparse.ArgumentParser, always: Callable[[argparse.Namespace], Sequence[str]]) -> argparse.Namespace:
    """The arguments, checked. variants: the names, in the order of `VARIANTS`, with those that are `always` there."""
    args = found.parse_args()
    chosen = [*always(args), *args.variants.split(",")] if args.variants else [*always(args)]
    if unknown := set(chosen) - set(VARIANTS):
        found.error(f"--variants: {min(unknown)!r} is none of {', '.join(VARIANTS)}")
    if "ddp-adascale" in chosen and importlib.util.find_spec("fairscale") is None:
        found.error("ddp-adascale needs fairscale: pip install fairscale, or choose other --variants")
    for name, least in (("workers", 1), ("micro_batches", 1), ("samples", 1), ("rounds", 2), ("steps", 1)):
        if np.min(getattr(args, name, least)) < least:
            found.error(f"--{name.replace('_', '-')}: must be at least {least}")
    args.variants = tuple(name for name in VARIANTS if name in chosen)
    return args
