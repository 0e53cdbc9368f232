"""Each schedule of kfuse beside DDP, ZeroRedundancyOptimizer and FSDP2: time a step, exposed communication, bytes.

    python benchmarks/comm.py --json benchmarks/results/comm.json                     # one loopback interface
    python benchmarks/comm.py --link 2gbit --megabytes 64 --variants zero,sharded     # each worker behind a link
    python benchmarks/comm.py --memory --megabytes 64

Workers (gloo, one thread each) are processes of this machine, behind links of a rate where `--link` says so (links.py).
For each size all variants first train alike (their losses are compared), then take turns in blocks, in an order
shuffled anew each round. Ratios and differences are formed within a round: the median over rounds, and a bootstrap
interval of 95 %. See README.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comm_report import report
from comm_variants import VARIANTS, Settings, Variant, average, covered, storages
from links import Place, join, links, received_bytes
from machine import parser_of, warn_if_busy
from workers import leave, messages_from

CHECK_STEPS, TOLERANCE = 4, 1e-3
BLOCK_S, MOST_STEPS = 0.25, 30
"""A block has as many steps as fit, two at least."""
BYTES_A_PARAMETER = 24
"""Of a replica, about: to tell how many variants fit in memory at once."""
ALONE = ("local", "kfuse-alone", "kfuse-alone-no-stats")
"""Variants that average nothing, so that their losses are their own."""
ALWAYS = (*ALONE, "ddp")
"""Variants that the others are compared with."""


def main() -> None:
    """Measures every size that the command line names, then reports."""
    arguments = _arguments()
    warn_if_busy()
    sizes = []
    for workers in arguments.workers:
        for megabytes in arguments.megabytes:
            settings = Settings(workers, megabytes, arguments.samples, arguments.bucket_mb, arguments.seed)
            if arguments.memory:
                sizes.append({**_facts(settings), "memory": _memory(settings, arguments)})
                continue
            rounds: dict[str, list[Any]] = {}
            for names in _that_fit(settings, arguments.variants, arguments.memory_gib):
                outcome = _run(settings, names, arguments.rounds, arguments.link)
                rounds[",".join(names)] = outcome["rounds"]
            sizes.append({**_facts(settings), "groups": rounds})
    report(sizes, vars(arguments), arguments.json)


def _facts(settings: Settings) -> dict[str, Any]:
    return {"workers": settings.workers, "megabytes": settings.megabytes, "parameters": 8 * settings.width**2}


def _that_fit(settings: Settings, names: list[str], gib: float) -> list[list[str]]:
    """The variants in groups whose replicas fit in memory together; each has `ALWAYS` too."""
    each = settings.workers * settings.megabytes / 1024 * BYTES_A_PARAMETER / 4
    others = [name for name in names if name not in ALWAYS]
    room = max(2, int(gib / each) - len(ALWAYS))
    groups = [others[i : i + room] for i in range(0, len(others), room)] or [[]]
    return [[*ALWAYS, *group] for group in groups]


def _run(settings: Settings, names: list[str], rounds: int, link: str | None, memory: bool = False) -> dict[str, Any]:
    """Starts the workers, and returns what rank 0 hands back."""
    messages: Any = mp.get_context("spawn").Queue()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with links(settings.workers, link) as places:
        arguments = (settings, names, rounds, places, port, messages, memory)
        workers = mp.spawn(_worker, arguments, nprocs=settings.workers, join=False)
        outcome: dict[str, Any] = {}
        for kind, value in messages_from(workers, messages):
            if kind == "outcome":
                outcome = value
            else:
                print(f"{settings.megabytes:g} MB, {settings.workers} workers: {value}", file=sys.stderr)
    return outcome


def _worker(
    rank: int,
    settings: Settings,
    names: list[str],
    rounds: int,
    places: list[Place],
    port: int,
    messages: Any,
    memory: bool,
) -> None:
    here, store = places[rank], join(places, rank, port)
    os.environ["GLOO_SOCKET_IFNAME"] = here.interface
    dist.init_process_group("gloo")
    outcome: Any
    if memory:
        outcome = _bytes_of(VARIANTS[names[0]], settings, rank)
    else:
        variants = {name: VARIANTS[name](settings, rank) for name in names}
        steps = _check(variants)
        if rank == 0:
            messages.put(("says", f"{steps} steps a block; {', '.join(names)}"))
        shared = len({place.interface for place in places} | {place.address for place in places}) == 2
        sharers, say = settings.workers if shared else 1, messages.put if rank == 0 else lambda message: None
        outcome = {"rounds": _rounds(variants, steps, rounds, here, sharers, settings.seed, say)}
    everyone: list[Any] = [None] * settings.workers
    dist.all_gather_object(everyone, outcome)
    if rank == 0:
        messages.put(("outcome", {"memory": everyone} if memory else {"rounds": _means(everyone)}))
    dist.barrier()
    del store
    leave(messages)


def _check(variants: dict[str, Variant]) -> dict[str, int]:
    """Trains some steps; returns how many steps of each variant make a block. Raises RuntimeError if losses differ."""
    losses, seconds = {}, []
    for name, variant in variants.items():
        with variant.turn():
            values = [variant.step() for _ in range(CHECK_STEPS - 1)]
            started = time.perf_counter()
            values.append(variant.step())
            seconds.append(time.perf_counter() - started)
        losses[name] = average(torch.stack(values))
    wanted = losses["ddp"]
    for name, value in losses.items():
        if name not in ALONE and not float(((value - wanted) / wanted).abs().max()) <= TOLERANCE:
            raise RuntimeError(f"{name} does not train the model that ddp trains: {value.tolist()}, {wanted.tolist()}")
    took = average(torch.tensor(seconds)).tolist()
    counts = [min(MOST_STEPS, max(2, round(BLOCK_S / each))) for each in took]
    return dict(zip(variants, counts, strict=True))


def _rounds(
    variants: dict[str, Variant],
    steps: dict[str, int],
    rounds: int,
    here: Place,
    sharers: int,
    seed: int,
    say: Callable[[tuple[str, str]], None],
) -> list[dict[str, tuple[float, ...]]]:
    """Of each round and variant, a step: seconds, bytes that this worker received, its CPU seconds (all threads).

    sharers: how many workers' bytes the
    interface counts. say: tells the process that waits for these workers.
    """
    order, names, measured = random.Random(seed), list(variants), []
    for done in range(rounds):
        order.shuffle(names)
        found = {}
        for name in names:
            variant, count = variants[name], steps[name]
            with variant.turn():
                variant.step()
                dist.barrier()
                before, started, cpu = received_bytes(here.interface), time.perf_counter(), time.process_time()
                for _ in range(count):
                    variant.step()
                elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
                dist.barrier()
                found[name] = (
                    elapsed / count,
                    (received_bytes(here.interface) - before) / count / sharers,
                    cpu / count,
                )
        measured.append(found)
        say(("says", f"round {done + 1} of {rounds}"))
    return measured


def _means(everyone: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Over the workers."""
    out = []
    for rounds in zip(*(each["rounds"] for each in everyone), strict=True):
        names = rounds[0]
        out.append({name: [sum(v) / len(v) for v in zip(*(r[name] for r in rounds), strict=True)] for name in names})
    return out


def _memory(settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each variant, in processes of its own."""
    found = {}
    for name in arguments.variants:
        if not name.endswith("-no-stats"):
            everyone = _run(settings, [name], 0, arguments.link, memory=True)["memory"]
            found[name] = {key: max(each[key] for each in everyone) for key in everyone[0]}
    return found


def _bytes_of(make: type[Variant], settings: Settings, rank: int) -> dict[str, float]:
    """The most tensor bytes at the end of backward or after the update, and how much the resident set has grown."""
    gc.collect()
    known = storages()
    before, most = _resident("VmRSS"), 0
    variant = make(settings, rank)

    def count() -> None:
        nonlocal most
        most = max(most, covered(storages() - known))

    variant.at_peak = count
    with variant.turn():
        for _ in range(3):
            variant.step()
    return {"tensor_bytes": most, "resident_bytes": _resident("VmHWM") - before}


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise ValueError(name)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=_list(int), default=[2])
    parser.add_argument("--megabytes", type=_list(float), default=[0.0625, 1, 4, 16, 64], help="of fp32 parameters")
    parser.add_argument("--link", help="each worker's own link has this rate, as tc writes it: 2gbit; needs root")
    parser.add_argument("--variants", type=_names, default=list(VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--samples", type=int, default=Settings.samples, help="of a worker a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--bucket-mb", type=float, default=Settings.bucket_mb, help="of kfuse; DDP keeps its default")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="that all replicas together may take")
    parser.add_argument("--memory", action="store_true", help="count bytes instead of time, a variant at a time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if min(arguments.workers) < 2:
        parser.error(f"--workers {min(arguments.workers)}: must be at least 2")
    return arguments


def _list(kind: type) -> Any:
    return lambda text: [kind(word) for word in text.split(",")]


def _names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(f"{name!r}: must be one of {', '.join(VARIANTS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
