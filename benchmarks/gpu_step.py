"""Training steps on a GPU beside torch's, each with the most that it may take: a GPT of 85 M parameters.

    python benchmarks/gpu_step.py --device cuda --json step.json
    python benchmarks/gpu_step.py --device cuda --two           on two GPUs, beside DDP
    python benchmarks/gpu_step.py --device cpu                  a rehearsal at a tiny size: no row has a verdict

Variants take turns as compare.py says, in one process for each GPU. The upper end of a ratio's interval counts.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from compare import CHECK_STEPS, Schedule, turns
from gpu_workers import last_line, place
from links import LOOPBACK
from replicas import Settings, Variant, new_session
from report import median_interval, parser_of, row, show_rows, write
from torch.profiler import ProfilerActivity
from variants import VARIANTS
from workers import leave, messages_of, set_torchrun_variables

from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.kernels import PackArguments, PackTable, pack

Rows = Iterator[tuple[str, Any, float | None]]
"""Of each row its name, what was found, and the most that is accepted."""


@dataclass(frozen=True)
class Case:
    ours: str
    at_most: dict[str, float | None]
    """By peer: the part of its time that ours may take."""
    samples: int = 8
    micro_batches: int = 2
    checked: int = CHECK_STEPS


NO_STATS = "allreduce-no-stats"
CASES: dict[int, dict[str, Case]] = {
    1: {
        "host-bound": Case("allreduce", {"local": 1.02, "local-noise-scale": 0.95, "ddp": 0.97, NO_STATS: 1.005}),
        "GPU-bound": Case("allreduce", {"local": 1.01, "local-noise-scale": 0.99, "ddp": 0.99, NO_STATS: 1.005}, 64),
        "masters": Case("allreduce-masters-bf16", {"local-masters-bf16": 1.01}, samples=64, micro_batches=1),
        "by block": Case("allreduce-compiled", {"local-compiled": 1.01}, checked=50),
        "in graphs": Case("allreduce-graphs", {"local-graphs": 1.02}, checked=50),
    },
    2: {
        "two": Case("allreduce", {"ddp": None, "ddp-noise-scale": None, NO_STATS: 1.005}),
        "sharded": Case("sharded", {"zero": None}),
        "bf16": Case("allreduce-bf16", {"ddp-bf16": None}),
        "reproducible": Case("reproducible", {"ddp": None}),  # its deterministic algorithms stay on
    },
}
"""By the number of workers."""
SIZE = {
    "cuda": {"layers": 12, "width": 768, "block": 256, "lr": 3e-5},
    "cpu": {"layers": 1, "width": 64, "block": 16, "lr": 3e-3},
}
"""Without a warm-up the larger one's loss rises at first at the smaller one's rate."""
LOSSES, LAUNCHES, BUSY_MS, COPIED_TABLES, LAUNCH, MESSAGE_US = 1e-3, 30.0, 0.1, 0.01, 1.5, 60.0
"""What is accepted."""
ROUNDS = {"cuda": 15, "cpu": 2}


def main() -> int:
    """Measures all cases. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--two", action="store_true", help="two workers, each with a GPU")
    options = parser.parse_args()
    count, name = 1 + options.two, options.device
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for case, found in messages_of(count, work, count, name):
        if isinstance(found, str):
            failed[case], found = found, [("failed", 1.0, 0.0)]
        rows |= {f"{case}: {what}": row(value, bar, name) for what, value, bar in found}
        write(options.json, ("torch", "triton"), device=name, **SIZE[name], failed=failed, rows=rows)  # so far
    show_rows(rows)
    print(*(f"{case} failed: {why}" for case, why in failed.items()), f"{len(rows)} rows", sep="\n")
    return int(bool(failed))


def work(rank: int, count: int, name: str, port: int, messages: Any) -> None:
    """One of `count` ranks. Rank 0 answers each case's rows, or why it failed."""
    set_torchrun_variables(rank, count, port)
    device = place(name, rank, count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    acts: dict[str, Callable[[], Rows]] = {"host": partial(_launches if count == 1 else _messages, device)}
    acts["profile"] = partial(_profiles, rank, count, name)
    for what, case in CASES[count].items():
        if name == "cuda" or "ddp-bf16" not in case.at_most:  # gloo refuses it
            acts[what] = partial(_case, case, rank, count, name)
    for what, act in acts.items():
        try:
            found: Any = list(act())
        except Exception as error:
            found = last_line(error)
        gc.collect()
        torch.compiler.reset()
        if rank == 0:
            messages.put((what, found))
    dist.barrier()
    leave(messages)


def _case(case: Case, rank: int, count: int, name: str) -> Rows:
    on_gpu, ours = name == "cuda", case.ours
    names = dict.fromkeys(["local", *["ddp"] * (count > 1), ours, *case.at_most])
    samples, checked = (case.samples, case.checked) if on_gpu else (2, CHECK_STEPS)
    s = Settings(device=name, workers=count, samples=samples, micro_batches=case.micro_batches, **SIZE[name])
    losses = 1.0 if case.checked > CHECK_STEPS else None  # they are a row of their own
    schedule = Schedule(tuple(names), ROUNDS[name], 3 if on_gpu else 1, checked, losses)
    outcome = turns(rank, s, schedule, [LOOPBACK] * count, lambda _: None)
    seconds = {each: np.array([done[each][0] for done in outcome["rounds"]]) for each in names}
    for each in names:
        yield f"{each}, ms a step", 1e3 * float(np.median(seconds[each])), None
    for peer, bar in case.at_most.items():
        yield f"{ours} / {peer}", median_interval(seconds[ours] / seconds[peer]), bar
    if losses is not None:
        yield "largest difference of losses", outcome["loss_differences"][ours], LOSSES


def _profiles(rank: int, count: int, name: str) -> Rows:
    s = Settings(device=name, workers=count, samples=8 if name == "cuda" else 2, micro_batches=2, **SIZE[name])
    peer = "local" if count == 1 else "ddp"
    model, theirs, ours = (_profile(VARIANTS[each](s, rank)) for each in ("model", peer, "allreduce"))
    for what, found in (("model", model), (peer, theirs), ("allreduce", ours)):
        yield f"{what}, launches a step", found["launches"], None
        yield f"{what}, busy ms a step", found["busy_ms"], None
    yield "launches beside the model's", ours["launches"] - model["launches"], LAUNCHES if count == 1 else None
    yield f"busy ms more than {peer}", ours["busy_ms"] - theirs["busy_ms"], BUSY_MS if count == 1 else None
    yield "tables of addresses copied, a pack", ours["tables"] / max(1, ours["packs"]), COPIED_TABLES
    yield "messages' time beside other kernels, a share", ours["beside"], None


def _profile(variant: Variant, steps: int = 3) -> dict[str, float]:
    """Of a step, by torch's profiler: what the GPU has run (on a CPU, torch's operations)."""
    on_gpu = variant.device.type == "cuda"
    with variant.turn(), tempfile.TemporaryDirectory() as folder:
        for _ in range(CHECK_STEPS):
            variant.step()
        tables = variant.tables
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                variant.step()
            if on_gpu:
                torch.cuda.synchronize()
        seen.export_chrome_trace(str(path := Path(folder, "trace.json")))
        trace = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    ran = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in trace if e.get("cat") in kinds)
    if not ran:
        raise RuntimeError("the profiler has seen nothing")
    sent = [(start, end) for start, end, name in ran if "nccl" in name]
    busy: list[list[float]] = []  # when other kernels ran, by spans
    for start, end, name in ran:
        if "nccl" not in name:
            busy += [[start, end]] if not busy or start > busy[-1][1] else []
            busy[-1][1] = max(busy[-1][1], end)
    beside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in sent for a, b in busy)
    return {
        "launches": len(ran) / steps,
        "busy_ms": sum(end - start for start, end, _ in ran) / steps / 1e3,
        "tables": (variant.tables - tables) / steps,
        "packs": sum(name.startswith("pack") for *_, name in ran) / steps,
        "beside": beside / max(1e-9, sum(end - start for start, end in sent)),
    }


def _us(act: Callable[[], Any], count: int, device: torch.device) -> float:
    """The host's microseconds for a call. The device is idle before and after."""
    act()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - started) / count * 1e6


@torch.no_grad()
def _launches(device: torch.device) -> Rows:
    """The host's time for a launch whose arguments are kept, beside that of a torch operation."""
    grad, flat = (torch.ones(8192, device=device) for _ in range(2))
    table = PackTable.build([8192], [0], device)
    given = PackArguments([grad], flat, table, 1.0, False, torch.empty(table.num_chunks, device=device))

    def launch() -> None:
        given.grads = [grad]
        pack.run(given)

    pairs = [(_us(launch, 200, device), _us(lambda: torch.add(grad, 1.0, out=flat), 200, device)) for _ in range(15)]
    yield "us of a launch", median(ours for ours, _ in pairs), None
    yield "a launch / torch.add", median_interval([ours / other for ours, other in pairs]), LAUNCH


def _messages(device: torch.device) -> Rows:
    """The host's time for a message of 25 MB, of 2,000, and for torch's. It waits before a queue is full."""
    size, blocks, count = (25 * 2**18, 20, 100) if device.type == "cuda" else (256, 2, 3)
    tensor = torch.zeros(size, device=device)
    new_session(CommOptions("allreduce"))
    group = session.current().group
    ours = [_us(lambda: group.all_reduce(tensor, "message").wait_on_stream(), count, device) for _ in range(blocks)]
    theirs = [_us(lambda: dist.all_reduce(tensor, async_op=True).wait(), count, device) for _ in range(blocks)]  # type: ignore[union-attr]
    yield "us of a message", median(ours), MESSAGE_US
    yield "us of torch's", median(theirs), None


if __name__ == "__main__":
    sys.exit(main())
