"""`kf.log_to`: where the monitors of this package send each step's figures."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

# A record's figures, in order: those of `kfuse.statistics.figures.METRICS` that a monitor knows.
FIGURES = (
    "step",
    "samples",
    "batch_size",
    "micro_batches",
    "workers",
    "noise_scale",
    "noise_scale_low",
    "noise_scale_high",
    "grad_variance",
    "grad_sq",
    "grad_norm",
)

Target = Callable[[dict[str, Any]], object]
TARGETS: list[Target] = []  # Those of the latest `log_to`


def log_to(*targets: Any) -> None:
    """Sends each step's figures of every monitor (`kf.ddp_hook`, `kf.fsdp_monitor`, `kf.monitor`) to these targets.

    They replace those of an earlier call; `log_to()` sends them nowhere. Only rank 0 sends. A step's figures are sent
    when they are on the host: one or two steps later, with `kf.monitor` on a CPU at once. `Monitor.close()` sends the
    last ones.

    targets: each one
    - a callable, called with a dict: "monitor" (the monitor's name), then FIGURES, None where unknown;
    - a TensorBoard SummaryWriter: each known figure becomes the scalar "<monitor's name>/<figure>";
    - a folder, for which a SummaryWriter is made at the first step (needs the package tensorboard).

    Raises TypeError for anything else.
    """
    TARGETS[:] = [_target(target) for target in targets]


def _target(target: Any) -> Target:
    if isinstance(target, str | os.PathLike) or hasattr(target, "add_scalar"):
        return _scalars(target)
    if not callable(target):
        raise TypeError(f"log_to target={target!r}: must be a folder, a TensorBoard SummaryWriter or a callable")
    return cast("Target", target)


def _scalars(writer: Any) -> Target:
    """Returns what writes a record's known figures to a SummaryWriter, which is made for a folder at the first one."""

    def write(record: dict[str, Any]) -> None:
        nonlocal writer
        if isinstance(writer, str | os.PathLike):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(writer))
        for name in FIGURES[1:]:
            if record[name] is not None:
                writer.add_scalar(f"{record['monitor']}/{name}", record[name], record["step"])

    return write
