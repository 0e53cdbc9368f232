"""`kfuse doctor [override...]`: whether this machine can run kfuse, and what a run with these overrides would use.

Each line is ok, warn or fail, what was found, and below it what to do about it. What could hang (a driver, a message
between processes) is tried in processes of their own (`self_test`), which have a time limit and end with this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from kfuse.comm.settings import CommOptions
from kfuse.settings.tree import flat
from kfuse.tools.doctor import machine
from kfuse.tools.doctor.machine import Line
from kfuse.tools.doctor.processes import TIMEOUT_S, StoreError, ranks, started

USAGE = """\
kfuse doctor [override ...]

Checks this machine: devices, compiler, which transport these overrides choose, and, with two processes, the reduction
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
    yield machine.size()
    yield machine.versions()
    with started("devices", {}) as result:
        devices, problem = result()
    gpus = len(devices["gpus"]) if devices else 0
    yield from machine.gpu_lines(devices, problem)
    if gpus:
        yield machine.compiler()
    yield machine.shared_memory(config["data"]["workers"])
    yield _transport(options, gpus)
    if options.schedule == "symmetric" and gpus < 2:  # the line transport says so
        options = replace(options, schedule="auto")
    yield from _self_test(options.named(), gpus)


def _transport(options: CommOptions, gpus: int) -> Line:
    chosen = options.transport()
    if chosen == "symmetric" and gpus < 2:
        text = f"comm.schedule=symmetric: GPUs read each other's memory, one for each worker; this machine has {gpus}"
        return Line("transport", "fail", text, "Name another schedule, or none: comm.schedule=auto.")
    if options.schedule == "auto" and not (options.reproducible or options.dtype == "bf16" or options.sharded):
        chosen = "allreduce or all_to_all, by measured messages (see the line schedule)"
    return Line("transport", "ok", f"{chosen}, gradients in {options.dtype}")


def _self_test(settings: dict[str, Any], gpus: int) -> Iterator[Line]:
    """Two ranks that reduce, over NCCL where there are two GPUs, and at the same time a process for the kernels."""
    arguments = {"settings": settings, "timeout_s": TIMEOUT_S}
    with contextlib.ExitStack() as stack:
        try:
            processes = stack.enter_context(ranks("reduction", arguments, 2, gpus))
        except StoreError as error:
            yield Line("reduction", "fail", str(error), "The loopback interface must be up: ip link set lo up.")
            return
        by_triton = gpus > 0 or machine.version("triton") is not None
        if by_triton:
            environment = {} if gpus else {"TRITON_INTERPRET": "1"}
            where = {"device": "cuda:0" if gpus else "cpu"}
            kernels = stack.enter_context(started("kernels", where, **environment))
        answers = [result() for result in processes]
        yield _reduction(answers, gpus)
        first = answers[0][0]
        if first is not None:
            choice = first["choice"]
            text = f"2 processes over {first['backend']}, one bucket in fp32: auto would "
            text += f"take {choice['schedule']}: {choice['reason']}; measured in {choice['probe_s']:.2f} s"
            yield Line("schedule", "ok", text)
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
    text, names = f"2 processes over {first['backend']}", list(first["digests"])
    wrong = [f"{name}: {problem}" for name, problem in first["wrong"].items()]
    wrong += [f"{n}: the ranks have different bits" for n in names if first["digests"][n] != second["digests"][n]]
    if wrong:
        remedy = "The results are wrong: memory, GPU or link may be defective. Run again, and on another machine."
        return Line("reduction", "fail", f"{text}: {'; '.join(wrong)}", remedy)
    text += f": {', '.join(names)}: sums as in float64, the same bits on both"
    return Line("reduction", "ok", f"{text} (one GPU: NCCL between two processes is not tried)" if gpus == 1 else text)


def _kernels(found: Mapping[str, str | None] | None, problem: str | None, gpus: int) -> Line:
    where = "on GPU 0" if gpus else "in Triton's interpreter"
    if found is None:
        remedy = "See the line compiler." if gpus else "Triton does not work here: pip install triton"
        return Line("kernels", "fail", f"{where}: {problem}", remedy)
    wrong = [f"{name}: {why}" for name, why in found.items() if why is not None]
    if wrong:
        remedy = "Compare the version of Triton with the one that this torch needs (pip check)."
        return Line("kernels", "fail", f"{where}: {'; '.join(wrong)}", remedy)
    return Line("kernels", "ok", f"{', '.join(found)} {where}: as their PyTorch implementations")
