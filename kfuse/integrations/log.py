"""`kf.log_to`: where the monitors of this package send each step's figures."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kfuse.statistics.figures import METRICS

if TYPE_CHECKING:
    from kfuse.observe.sinks import Sinks

_LOG = logging.getLogger("kfuse")

# A record's figures, in order: those that a monitor knows.
FIGURES = [name for name in METRICS[: METRICS.index("grad_norm") + 1] if name not in ("epoch", "loss", "lr")]

Target = Callable[[dict[str, Any]], object]
TARGETS: list[Target] = []  # Those of the latest `log_to`
_OPEN: list[Sinks] = []  # what is to be closed of them


def log_to(*targets: Any) -> None:
    """Sends each step's figures of every monitor (`kf.ddp_hook`, `kf.fsdp_monitor`, `kf.monitor`) to these targets.

    They replace those of an earlier call; `log_to()` sends them nowhere. Only rank 0 sends. A step's figures are sent
    when they are on the host: one or two steps later, with `kf.monitor` on a CPU at once. `Monitor.close()` sends the
    last ones.

    targets: each one
    - a callable, called with a dict: "monitor" (the monitor's name), then FIGURES, None where unknown;
    - a TensorBoard SummaryWriter: each known figure becomes the scalar "<monitor's name>/<figure>";
    - "wandb", "mlflow" or "trackio": the run of that service that the script has begun by the first step, else one
      that ends with the process or at the next `log_to`; "mlflow" keeps it in mlflow.db here, unless
      MLFLOW_TRACKING_URI is set;
    - a path that ends in .csv: that file, of which what it has of the first step and later ones is dropped;
    - any other path: a folder, for which a SummaryWriter is made at the first step (needs the package tensorboard).

    Raises TypeError for anything else, ModuleNotFoundError for a service whose package is not installed, OSError for a
    .csv file that cannot be written.
    """
    new = [_target(target) for target in targets]
    _close()
    TARGETS[:] = new


def _target(target: Any) -> Target:
    from kfuse.observe.sinks.services import SERVICES

    if isinstance(target, str | os.PathLike) and (target in SERVICES or Path(target).suffix == ".csv"):
        return _sink(target)
    if isinstance(target, str | os.PathLike) or hasattr(target, "add_scalar"):
        return _scalars(target)
    if not callable(target):
        allowed = f"a folder, a .csv file, {', '.join(map(repr, SERVICES))}, a TensorBoard SummaryWriter or a callable"
        raise TypeError(f"log_to target={target!r}: must be {allowed}")
    return cast("Target", target)


def _sink(target: str | os.PathLike[str]) -> Target:
    """Returns what logs records to a file, which is opened here, or a service, whose run is begun by the first one."""
    from kfuse.observe.sinks import Sinks, missing
    from kfuse.observe.sinks.csv_file import CsvFile
    from kfuse.observe.sinks.services import SERVICES, About, Sender, current_run

    if target in SERVICES and (why := missing([str(target)])):
        raise ModuleNotFoundError(f"log_to target={target!r}: {why}")
    file = None if target in SERVICES else CsvFile(Path(target))
    sinks: Sinks | None = None

    def write(record: dict[str, Any]) -> None:
        nonlocal sinks
        step = record["step"]
        if sinks is None:
            name = str(target)
            sinks = Sinks([file or Sender(name, About(Path()), {}, current_run(name))], _LOG.warning)
            sinks.rewind(step)
            _OPEN.append(sinks)
            atexit.register(_close)
        sinks.log({record["monitor"]: record}, step)
        sinks.write()

    return write


def _close() -> None:
    while _OPEN:
        _OPEN.pop().close({})


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
