"""`kf.log_to`: where the monitors of this package send each step's figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

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
"""A record's figures, in order: those of `kfuse.statistics.figures.METRICS` that a monitor knows."""


class Writer(Protocol):
    """What `kf.log_to` uses of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Writes one value under `tag` at `global_step`."""

    def flush(self) -> None:
        """Writes out what is buffered."""


Target = Callable[[dict[str, Any]], object]

_targets: list[Target] = []


def log_to(*targets: Target | Writer | str | os.PathLike[str]) -> None:
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
    _targets[:] = [_target(target) for target in targets]


def targets() -> tuple[Target, ...]:
    """The targets of the latest `log_to`."""
    return tuple(_targets)


def _target(target: Target | Writer | str | os.PathLike[str]) -> Target:
    if isinstance(target, str | os.PathLike):
        return _Folder(Path(target))
    if hasattr(target, "add_scalar"):
        return _Scalars(cast(Writer, target))
    if callable(target):
        return target
    raise TypeError(f"log_to target={target!r}: must be a folder, a TensorBoard SummaryWriter or a callable")


class _Scalars:
    """Writes a record's known figures to a SummaryWriter."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __call__(self, record: Mapping[str, Any]) -> None:
        for name in FIGURES[1:]:
            if record[name] is not None:
                self._writer.add_scalar(f"{record['monitor']}/{name}", record[name], record["step"])


class _Folder:
    """Makes a SummaryWriter at the first record: so ranks that send nothing leave no files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scalars: _Scalars | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self._scalars is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(f"log_to {self._folder}: a folder needs the package tensorboard") from error
            self._scalars = _Scalars(cast(Writer, SummaryWriter(str(self._folder))))
        self._scalars(record)
