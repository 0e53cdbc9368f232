"""`kfuse schedule [override ...]`: the programs of a step's buckets, and what they should cost.

The constants of the model are measured by processes of this machine, started as those of `kfuse doctor`: as many as the
job has workers, or two, from whose messages those of more workers are computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kfuse.comm import devices
from kfuse.comm.buckets import plan_parameters
from kfuse.comm.cost import Costs, Job, Price, choose, price
from kfuse.comm.options import CommOptions
from kfuse.comm.probe import SCHEDULES
from kfuse.comm.programs import make_programs
from kfuse.comm.schedule import Program
from kfuse.comm.tail import Tail
from kfuse.comm.transports.tree import parents
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.optim.consistency import averaged_buffers
from kfuse.settings import instantiate
from kfuse.settings.groups import class_arguments
from kfuse.settings.tree import flat
from kfuse.tools.doctor.processes import TIMEOUT_S, StoreError, ranks
from kfuse.train.precision import cast_parameters

USAGE = """\
kfuse schedule [override ...]

Prints what a step does with the model's gradients, for workers.count workers, 2 at least: each operation of a bucket's
program with its place, stream, bytes and predicted time, summed over all buckets. Overrides are those of a run
(kfuse --help). Takes some seconds: processes of this machine measure messages between CPUs. Exit status 0, or 1 where
they fail, or where no gradients are sent."""

MOST_PROCESSES = 4
"""At most this many processes measure, and at most one a core, but never fewer than two."""


def main(config: dict[str, Any]) -> int:
    """Prints the program for a checked configuration. Returns the exit status."""
    console, options = Console(), CommOptions.of(flat(config))
    workers = max(2, config["workers"]["count"])
    candidates, further = _schedules(options)
    if options.synchronisation.mode != "ssgd":
        return _fail(console, f"comm.sync={options.sync}: no gradients are sent: docs/synchronisation.md says what is")
    if not candidates:
        return _fail(console, f"comm.schedule={options.schedule}: the messages of your own transport are not known")
    model = _model(config)
    job = Job(_buckets(model, options), workers, tuple(parents(options.tree, [""] * workers)), options.wire_bytes)
    apart = replace(job, buckets=(_elements_apart(model, options, workers),), wire_bytes=4)
    processes = workers if workers <= min(MOST_PROCESSES, os.cpu_count() or 1) else 2
    costs, problem = _measure(options, processes, max(job.buckets))
    if costs is None:
        return _fail(console, f"measuring messages: {problem}")
    elastic = instantiate.locate(config["launcher"]["_target_"]) is not TorchrunLauncher
    mirrors = elastic and options.redundancy == "mirror"
    prices: dict[str, list[Price]] = {}
    for name in (*candidates, *further):
        program, last = make_programs(options, name, devices.count() > 0, mirrors)
        prices[name] = [price(program, job, costs)]
        if sum(apart.buckets):
            prices[name].append(price(_up_to_barrier(last), apart, costs))
    chosen = choose({name: prices[name][0].seconds for name in candidates}, candidates[0])
    source = "measured by" if processes == workers else "computed from the messages of"
    _say(
        console,
        f"{chosen}, {workers} workers: {sum(job.buckets) / 1e6:.3f} M parameters in {len(job.buckets)} "
        f"bucket{'s' * (len(job.buckets) > 1)}; {source} {processes} processes of this machine, in "
        f"{costs.probe_s:.2f} s",
    )
    if devices.count():
        _say(console, "These are messages between CPUs, over gloo: the times say nothing of this machine's GPUs.")
    console.print(_table(prices[chosen][0]))
    for each in prices[chosen][1:]:
        _say(console, f"The last bucket has no gradients: averaged buffers and the tail, {apart.buckets[0]} numbers.")
        console.print(_table(each))
    for name, both in prices.items():
        seconds = sum(each.seconds for each in both)
        _say(console, f"{name:<15}{1e3 * seconds:10.3f} ms a step, if backward hides none of it")
    return 0


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _fail(console: Console, text: str) -> int:
    _say(console, text)
    return 1


def _measure(options: CommOptions, processes: int, elements: int) -> tuple[Costs | None, str | None]:
    """Returns what messages between so many processes cost, or None and why that is unknown.

    elements: of the largest message.
    """
    arguments = {"settings": options.named(), "timeout_s": TIMEOUT_S, "elements": elements}
    try:
        with ranks("costs", arguments, processes, gpus=0) as started:
            found, problem = started[0].result()
    except StoreError as error:
        return None, str(error)
    return (None, problem) if found is None else (Costs(**found), None)


def _schedules(options: CommOptions) -> tuple[list[str], list[str]]:
    """Returns what `comm.schedule` leaves to choose from, and what is shown beside; none for a user's own class."""
    if "." in options.schedule:
        return [], []
    first = options.transport()
    if options.schedule != "auto" or first not in SCHEDULES or options.reproducible or options.dtype != "fp32":
        return [first], []
    return [*SCHEDULES], ["tree"]


def _up_to_barrier(program: Program) -> Program:
    """Returns the program of a last bucket without gradients: nothing in it is measured or updated."""
    return replace(program, ops=program.ops[: program.index("barrier") + 1])


def _model(config: Mapping[str, Any]) -> torch.nn.Module:
    """Builds the configured model."""
    node, _ = instantiate.initial_weights(config["model"])
    model: torch.nn.Module = instantiate.build(node, **instantiate.build(class_arguments("data", config["data"])).spec)
    if config["train"]["precision"] == "bf16-true":
        cast_parameters(model)
    return model


def _buckets(model: torch.nn.Module, options: CommOptions) -> tuple[int, ...]:
    """Returns the elements of each bucket of the model's gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    return tuple(it.numel for it in plan_parameters(params, [0] * len(params), options.bucket_elements()))


def _elements_apart(model: torch.nn.Module, options: CommOptions, workers: int) -> int:
    """Returns the elements of the last bucket where that has no gradients, else 0."""
    buffers = averaged_buffers(model)
    if not options.has_bucket_apart(buffers):
        return 0
    tail = Tail(len([p for p in model.parameters() if p.requires_grad]), 0, workers)
    return sum(buffer.numel() for buffer in buffers) + tail.numel


def _table(price: Price) -> Table:
    """Returns a table of the program's operations, summed over all buckets."""
    table = Table(box=SIMPLE, padding=0)
    for k, column in enumerate(("operation", "place", "stream", "messages", "MB sent", "MB of memory", "ms")):
        table.add_column(column, justify="left" if k < 3 else "right", no_wrap=True)
    for line in price.lines:
        op = line.op
        figures = (line.messages, line.wire_bytes / 1e6, line.memory_bytes / 1e6, 1e3 * line.seconds)
        cells = [f"{value:.{3 if k else 0}f}" if value else "" for k, value in enumerate(figures)]
        table.add_row(f"{op.kind} {op.what}".rstrip(), op.place, op.stream, *cells)
    table.add_row("all", "", "", "", f"{price.wire_bytes / 1e6:.3f}", "", f"{1e3 * price.seconds:.3f}", style="bold")
    return table
