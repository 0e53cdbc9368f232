"""`kfuse schedule [override ...]`: the programs of a step's buckets, and what they should cost.

The constants of the model are measured by processes of this machine, started as those of `kfuse doctor`: as many as the
job has workers, or two, from whose messages those of more workers are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console

from kfuse.comm import devices
from kfuse.comm.buckets import plan_parameters
from kfuse.comm.cost import SCHEDULES, Job, Price, choose, price
from kfuse.comm.group import Costs
from kfuse.comm.settings import CommOptions
from kfuse.comm.transports import make_programs
from kfuse.cores import cores
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.observe.recorder import table
from kfuse.settings import instantiate
from kfuse.settings.instantiate import class_arguments
from kfuse.settings.tree import flat
from kfuse.tools.doctor.processes import TIMEOUT_S, ranks
from kfuse.train.loss import cast_parameters

USAGE = """\
kfuse schedule [override ...]

Prints what a step does with the model's gradients, for workers.count workers, 2 at least: each operation of a bucket's
program with its place, stream, bytes and predicted time, summed over all buckets with
gradients. Overrides are those of a run (kfuse --help). Takes some seconds: processes of this machine measure messages
between CPUs. Exit status 0, or 1 where they fail, or where no gradients are sent."""

MOST_PROCESSES = 4  # that measure; at most one a core, but never fewer than two


def main(config: dict[str, Any]) -> int:
    """Prints the program for a checked configuration. Returns the exit status."""
    options, workers = CommOptions.of(flat(config)), max(2, config["workers"]["count"])
    if options.synchronisation.mode != "ssgd":
        print(f"comm.sync={options.sync}: no gradients are sent: docs/synchronisation.md says what is")
        return 1
    if options.schedule == "tree" or "." in options.schedule:
        print(f"comm.schedule={options.schedule}: the messages of a tree, or of your own transport, are not known")
        return 1
    model = _model(config)
    params = [p for p in model.parameters() if p.requires_grad]
    buckets = tuple(it.numel for it in plan_parameters(params, [0] * len(params), options.bucket_elements))
    job = Job(buckets, workers, wire_bytes=4 if options.dtype == "fp32" else 2)
    processes = workers if workers <= min(MOST_PROCESSES, cores()) else 2
    arguments = {"settings": options.named(), "timeout_s": TIMEOUT_S, "elements": max(buckets)}
    with ranks("costs", arguments, processes, gpus=0) as started:
        found, problem = started[0]()
    if found is None:
        print(f"measuring messages: {problem}")
        return 1
    costs, candidates = Costs(**found), [options.transport()]
    if options.schedule == "auto" and candidates[0] in SCHEDULES and not options.reproducible:
        candidates = [*SCHEDULES] if options.dtype == "fp32" else candidates
    prices = _prices(config, options, job, costs, candidates)
    chosen = choose({name: prices[name].seconds for name in candidates}, candidates[0])
    source = "measured by" if processes == workers else "computed from the messages of"
    print(
        f"{chosen}, {workers} workers: {sum(buckets) / 1e6:.3f} M parameters in {len(buckets)} "
        f"bucket{'s' * (len(buckets) > 1)}; {source} {processes} processes of this machine, in {costs.probe_s:.2f} s",
    )
    if devices.count():
        print("These are messages between CPUs, over gloo: the times say nothing of this machine's GPUs.")
    _print_operations(prices[chosen])
    for name, each in prices.items():
        print(f"{name:<15}{1e3 * each.seconds:10.3f} ms a step, if backward hides none of it")
    return 0


def _model(config: Mapping[str, Any]) -> torch.nn.Module:
    node, _ = instantiate.initial_weights(config["model"])
    model: torch.nn.Module = instantiate.build(node, **instantiate.build(class_arguments("data", config["data"])).spec)
    if config["train"]["precision"] == "bf16-true":
        cast_parameters(model)
    return model


def _prices(
    config: Mapping[str, Any], options: CommOptions, job: Job, costs: Costs, names: list[str]
) -> dict[str, Price]:
    elastic = instantiate.locate(config["launcher"]["_target_"]) is not TorchrunLauncher
    mirrored = elastic and options.redundancy == "mirror"
    return {name: price(make_programs(options, name, devices.count() > 0, mirrored)[0], job, costs) for name in names}


def _print_operations(price: Price) -> None:
    shown = table("operation", "place", "stream", "messages", "MB sent", "MB of memory", "ms", texts=3)
    for line in price.lines:
        op = line.op
        figures = (line.messages, line.wire_bytes / 1e6, line.memory_bytes / 1e6, 1e3 * line.seconds)
        cells = [f"{value:.{3 if k else 0}f}" if value else "" for k, value in enumerate(figures)]
        shown.add_row(f"{op.kind} {op.what}".rstrip(), op.place, op.stream, *cells)
    shown.add_row("all", "", "", "", f"{price.wire_bytes / 1e6:.3f}", "", f"{1e3 * price.seconds:.3f}", style="bold")
    Console().print(shown)
