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
from kfuse.comm.tail import Tail
from kfuse.comm.transports import make_programs
from kfuse.comm.transports.tree import parents
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.optim.consistency import averaged_buffers
from kfuse.settings import instantiate
from kfuse.settings.instantiate import class_arguments
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
    options, workers = CommOptions.of(flat(config)), max(2, config["workers"]["count"])
    if options.synchronisation.mode != "ssgd":
        _say(f"comm.sync={options.sync}: no gradients are sent: docs/synchronisation.md says what is")
        return 1
    if "." in options.schedule:
        _say(f"comm.schedule={options.schedule}: the messages of your own transport are not known")
        return 1
    model = _model(config)
    params = [p for p in model.parameters() if p.requires_grad]
    buckets = tuple(it.numel for it in plan_parameters(params, [0] * len(params), options.bucket_elements))
    job = Job(buckets, workers, tuple(parents(options.tree, [""] * workers)), options.wire_bytes)
    # Buffers and tail are a bucket of their own where the last bucket has no room for them.
    buffers = averaged_buffers(model)
    extra = sum(buffer.numel() for buffer in buffers) + Tail(len(params), 0, workers).numel
    apart = replace(job, buckets=(extra,), wire_bytes=4) if options.has_bucket_apart(buffers) else None
    processes = workers if workers <= min(MOST_PROCESSES, os.cpu_count() or 1) else 2
    arguments = {"settings": options.named(), "timeout_s": TIMEOUT_S, "elements": max(buckets)}
    try:
        with ranks("costs", arguments, processes, gpus=0) as started:
            found, problem = started[0]()
    except StoreError as error:
        found, problem = None, str(error)
    if found is None:
        _say(f"measuring messages: {problem}")
        return 1
    costs, candidates = Costs(**found), [options.transport()]
    if options.schedule == "auto" and candidates[0] in SCHEDULES and not options.reproducible:
        candidates = [*SCHEDULES] if options.dtype == "fp32" else candidates
    prices = _prices(config, options, job, apart, costs, [*candidates, *(("tree",) if len(candidates) > 1 else ())])
    chosen = choose({name: prices[name][0].seconds for name in candidates}, candidates[0])
    source = "measured by" if processes == workers else "computed from the messages of"
    _say(
        f"{chosen}, {workers} workers: {sum(buckets) / 1e6:.3f} M parameters in {len(buckets)} "
        f"bucket{'s' * (len(buckets) > 1)}; {source} {processes} processes of this machine, in {costs.probe_s:.2f} s",
    )
    if devices.count():
        _say("These are messages between CPUs, over gloo: the times say nothing of this machine's GPUs.")
    _print_operations(prices[chosen][0])
    for each in prices[chosen][1:]:
        _say(f"The last bucket has no gradients: averaged buffers and the tail, {extra} numbers.")
        _print_operations(each)
    for name, both in prices.items():
        _say(f"{name:<15}{1e3 * sum(each.seconds for each in both):10.3f} ms a step, if backward hides none of it")
    return 0


def _say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _model(config: Mapping[str, Any]) -> torch.nn.Module:
    """Builds the configured model."""
    node, _ = instantiate.initial_weights(config["model"])
    model: torch.nn.Module = instantiate.build(node, **instantiate.build(class_arguments("data", config["data"])).spec)
    if config["train"]["precision"] == "bf16-true":
        cast_parameters(model)
    return model


def _prices(
    config: Mapping[str, Any], options: CommOptions, job: Job, apart: Job | None, costs: Costs, names: list[str]
) -> dict[str, list[Price]]:
    """Returns by schedule the price of its program, and that of the last bucket where this has no gradients."""
    elastic = instantiate.locate(config["launcher"]["_target_"]) is not TorchrunLauncher
    found: dict[str, list[Price]] = {}
    for name in names:
        program, last = make_programs(options, name, devices.count() > 0, elastic and options.redundancy == "mirror")
        found[name] = [price(program, job, costs)]
        if apart is not None:  # nothing in it is measured or updated
            until_barrier = replace(last, ops=last.ops[: last.index("barrier") + 1])
            found[name].append(price(until_barrier, apart, costs))
    return found


def _print_operations(price: Price) -> None:
    """Prints a table of the program's operations, summed over all buckets."""
    table = Table(box=SIMPLE, padding=0)
    for k, column in enumerate(("operation", "place", "stream", "messages", "MB sent", "MB of memory", "ms")):
        table.add_column(column, justify="left" if k < 3 else "right", no_wrap=True)
    for line in price.lines:
        op = line.op
        figures = (line.messages, line.wire_bytes / 1e6, line.memory_bytes / 1e6, 1e3 * line.seconds)
        cells = [f"{value:.{3 if k else 0}f}" if value else "" for k, value in enumerate(figures)]
        table.add_row(f"{op.kind} {op.what}".rstrip(), op.place, op.stream, *cells)
    table.add_row("all", "", "", "", f"{price.wire_bytes / 1e6:.3f}", "", f"{1e3 * price.seconds:.3f}", style="bold")
    Console().print(table)
