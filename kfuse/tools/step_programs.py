"""`kfuse schedule [override ...]`: the program of a step's buckets, and what it sends."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kfuse.comm import devices
from kfuse.comm.buckets import plan_parameters
from kfuse.comm.schedule import GRADIENT, Op
from kfuse.comm.settings import CommOptions
from kfuse.comm.transports import make_programs
from kfuse.elastic.launchers import TorchrunLauncher
from kfuse.kernels import BLOCK
from kfuse.kernels.wire import WIRE
from kfuse.observe.recorder import table
from kfuse.settings import instantiate
from kfuse.settings.tree import flat
from kfuse.train.build import data_and_model

WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": WIRE / BLOCK}  # of a gradient's element
USAGE = """\
kfuse schedule [override ...]

Prints what a step does with the model's gradients, for workers.count workers, 2 at least: each operation of a bucket's
program with its place, its stream, and what the busiest worker sends for all buckets with gradients. Overrides are
those of a run (kfuse --help). Exit status 0, or 1 where no gradients are sent, or the messages are not known."""


def main(config: dict[str, Any]) -> int:
    """Prints the program for a checked configuration. Returns the exit status."""
    options, workers = CommOptions.of(flat(config)), max(2, config["workers"]["count"])
    if options.synchronisation.mode != "ssgd":
        print(f"comm.sync={options.sync}: no gradients are sent: docs/synchronisation.md says what is")
        return 1
    if options.schedule == "tree" or "." in options.schedule:
        print(f"comm.schedule={options.schedule}: the messages of a tree, or of your own transport, are not known")
        return 1
    _, _, model = data_and_model(config)
    params = [p for p in model.parameters() if p.requires_grad]
    buckets = [it.numel for it in plan_parameters(params, [0] * len(params), options.bucket_elements)]
    launcher = instantiate.locate(config["launcher"]["_target_"])
    mirrored = options.redundancy == "mirror" and launcher is not TorchrunLauncher
    name = options.transport()
    program, _, _ = make_programs(options, name, devices.count() > 0, mirrored)
    print(f"{name}, {workers} workers: {sum(buckets) / 1e6:.3f} M parameters, buckets: {len(buckets)}")
    shown = table("operation", "place", "stream", "MB sent", texts=3)
    for op in program.ops:
        sent = sent_bytes(op, sum(buckets), workers, WIRE_BYTES[options.dtype]) / 1e6
        shown.add_row(f"{op.kind} {op.what}".rstrip(), op.place, op.stream, f"{sent:.3f}" if sent else "")
    Console().print(shown)
    if options.schedule == "auto" and options.leaves_choice:
        print("comm.schedule=auto: on CPUs a job may take all_to_all instead, as it measures (event `schedule`)")
    return 0


def sent_bytes(op: Op, elements: int, workers: int, wire_bytes: float) -> float:
    """What an operation sends through the busiest worker's link, in its busier direction.

    wire_bytes: of an element of a gradient. An all-reduce is a ring (Patarasuk and Yuan 2009).
    """
    others = (workers - 1) / workers
    match op.kind:
        case "exchange":
            return (2 if op.what == "allreduce" else 1) * others * elements * wire_bytes
        case "share":
            return others * elements * (wire_bytes if op.what == GRADIENT else 4)
        case "mirror":
            return 4 * elements / workers
    return 0.0
