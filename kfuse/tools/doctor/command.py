"""`kfuse doctor [override...]`: whether this machine can run kfuse, and what a run with these overrides would use.

Each line is ok, warn or fail, what was found, and below it what to do about it. What could hang (a driver, a message
between processes) is tried in processes of their own (`self_test`), which have a time limit and end with this one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kfuse.comm import devices as comm_devices
from kfuse.comm.settings import CommOptions
from kfuse.cores import cores
from kfuse.kernels.private_names import TESTED
from kfuse.observe.origin import versions
from kfuse.settings.tree import flat
from kfuse.tools.doctor.processes import TIMEOUT_S, ranks, started

LEAST_SHM_GIB = 1.0


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    name: str
    status: str  # ok, warn or fail
    found: str
    remedy: str = ""  # what to do


USAGE = """\
kfuse doctor [override ...]

Checks this machine: devices, which transport these overrides choose, and, with two processes, the reduction
and the kernels. Overrides are those of a run (kfuse --help). Exit status 0, or 1 where a line says `fail`."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(config: dict[str, Any]) -> int:
    """Prints the report for a checked configuration. Returns 0, or 1 where a line says `fail`."""
    console, failed = Console(), False
    for line in lines(config):
        console.print(line.status.ljust(6), style=_COLOURS[line.status], end="", highlight=False)
        console.print(f"{line.name:<14}{line.found}", markup=False, highlight=False, soft_wrap=True)
        if line.remedy:
            console.print(f"{'':<20}{line.remedy}", style="cyan", markup=False, highlight=False, soft_wrap=True)
        failed = failed or line.status == "fail"
    return int(failed)


def lines(config: dict[str, Any]) -> Iterator[Line]:
    """The report, line by line, as each is known. Raises ValueError for communication options that do not fit."""
    options = CommOptions.of(flat(config))
    yield size()
    yield Line("versions", "ok", ", ".join(map(" ".join, versions().items())))
    with started("devices", {}) as result:
        devices, problem = result()
    gpus = len(devices["gpus"]) if devices else 0
    yield from gpu_lines(devices, problem)
    yield shared_memory(config["data"]["num_workers"])
    by_measure = "allreduce; on CPUs perhaps all_to_all, as the job measures"
    chosen = by_measure if options.leaves_choice else options.transport()
    yield Line("transport", "ok", f"{chosen}, gradients in {options.dtype}")
    yield from _self_test(options, gpus)


def _self_test(options: CommOptions, gpus: int) -> Iterator[Line]:
    """Two ranks that train, over NCCL where there are two GPUs, and at the same time a process for the kernels."""
    arguments = {"settings": options.named(), "timeout_s": TIMEOUT_S}
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(ranks("training", arguments, 2, gpus))
        by_triton = gpus > 0 or "triton" in versions()
        if by_triton:
            environment = {} if gpus else {"TRITON_INTERPRET": "1"}
            where = {"device": "cuda:0" if gpus else "cpu"}
            kernels = stack.enter_context(started("kernels", where, **environment))
        yield _reduction([result() for result in processes], gpus)
        if by_triton:
            yield _kernels(*kernels(), gpus)
        else:
            yield Line("kernels", "ok", "not tried: Triton is not installed, and only machines with a GPU need it")


def _reduction(answers: Sequence[tuple[Any, str | None]], gpus: int) -> Line:
    lost = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem is not None]
    if lost:
        remedy = "Processes of this machine must reach each other: see the firewall's rules for 127.0.0.1"
        remedy += "; NCCL_DEBUG=INFO shows more." if gpus > 1 else "."
        return Line("reduction", "fail", "; ".join(lost), remedy)
    first, second = (found for found, _ in answers)
    text, trained = f"2 processes over {first['backend']}", first["trained"]
    digest, loss = first["alone"]
    wrong = [] if first["alone"] == second["alone"] else ["one worker: each process has trained another model"]
    for name, (bits, reached, tolerance) in trained.items():
        if bits != second["trained"][name][0]:
            wrong.append(f"{name}: the ranks have different bits")
        elif tolerance == 0 and bits != digest:
            wrong.append(f"{name}: other bits than one worker alone")
        elif not abs(reached - loss) <= (tolerance or 1) * abs(loss):
            apart = f"{abs(reached / loss - 1):.1e}, more than {tolerance:g}"
            wrong.append(f"{name}: the loss after ten steps differs from that of one worker by {apart}")
    if wrong:
        remedy = "The results are wrong: memory, GPU or link may be defective. Run again, and on another machine."
        return Line("reduction", "fail", f"{text}: {'; '.join(wrong)}", remedy)
    text += f": {', '.join(trained)}: digits trained as by one worker, the same bits on both"
    return Line("reduction", "ok", f"{text} (one GPU: NCCL between two processes is not tried)" if gpus == 1 else text)


def _kernels(found: Mapping[str, str | None] | None, problem: str | None, gpus: int) -> Line:
    where = "on GPU 0" if gpus else "in Triton's interpreter"
    if found is None:
        return Line("kernels", "fail", f"{where}: {problem}", "Triton does not work here: pip install triton")
    wrong = [f"{name}: {why}" for name, why in found.items() if why is not None]
    if wrong:
        remedy = f"kfuse was tested with {TESTED}. On a GPU Triton needs a C compiler and Python.h: gcc, python3-dev."
        return Line("kernels", "fail", f"{where}: {'; '.join(wrong)}", remedy)
    return Line("kernels", "ok", f"{', '.join(found)} {where}: as their PyTorch implementations")


def size() -> Line:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Line("machine", "ok", f"{cores()} cores, {memory:.1f} GiB of memory, {platform.platform()}")


def gpu_lines(devices: Mapping[str, Any] | None, problem: str | None) -> Iterator[Line]:
    """Yields the lines of GPUs and NCCL from what `self_test.devices` returned; problem: why it returned nothing."""
    if devices is None:
        remedy = "Run nvidia-smi: if it fails or hangs too, the driver must be loaded anew (or the machine restarted)."
        yield Line("GPUs", "fail", str(problem), remedy)
        return
    gpus = devices["gpus"]
    if not gpus:
        yield _no_gpu(torch.version.cuda or torch.version.hip)
        return
    kinds = [f"{gpu['name']} (compute capability {gpu['capability']}, {gpu['memory_gib']:g} GiB)" for gpu in gpus]
    found = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    found += "; free GiB: " + ", ".join(f"{gpu['free_gib']:g}" for gpu in gpus)
    if too_old := comm_devices.problem():
        yield Line("GPUs", "fail", f"{found}; {too_old}", "pip install --upgrade torch")
    elif "triton" not in versions() and torch.version.hip is None:
        yield Line("GPUs", "fail", found, "pip install triton: the kernels need it.")
    elif min(float(gpu["capability"]) for gpu in gpus) < 8.0 and torch.version.hip is None:
        yield Line("GPUs", "warn", found, "The kernels are compiled and tested for compute capability 8.0 and later.")
    else:
        yield Line("GPUs", "ok", found)
    if devices["nccl_problem"] is not None:
        remedy = "Run again with NCCL_DEBUG=INFO; in a container give it --shm-size=8g or --ipc=host."
        yield Line("NCCL", "fail", devices["nccl_problem"], remedy)
    else:
        yield Line("NCCL", "ok", f"NCCL {devices['nccl']}, a group starts on GPU 0")


def _no_gpu(built_for: str | None) -> Line:
    found, hidden = "no GPU: the CPU path, gloo", os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None or not (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        return Line("GPUs", "ok", f"{found} (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else found)
    if built_for is None:
        remedy = "Install torch's build for GPUs: https://pytorch.org/get-started/locally"
        return Line("GPUs", "warn", f"{found}; this machine has a GPU, and this torch is built for CPUs only", remedy)
    remedy = f"Its driver must support CUDA {built_for}: compare with the version that nvidia-smi shows."
    return Line("GPUs", "fail", "this machine has a GPU, and torch cannot use it", remedy)


def shared_memory(loaders: int) -> Line:
    """Checks /dev/shm, by which loader processes hand over samples, and gloo and NCCL messages on one machine."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Line("shared memory", "warn", f"/dev/shm: {error.strerror}", "Mount a tmpfs there.")
    free = usage.free / 2**30
    found = f"/dev/shm has {usage.total / 2**30:.1f} GiB, {free:.1f} free (data.num_workers={loaders})"
    if free < LEAST_SHM_GIB:
        return Line("shared memory", "warn", found, "In a container: --shm-size=8g, or --ipc=host.")
    return Line("shared memory", "ok", found)
