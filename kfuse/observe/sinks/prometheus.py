"""metrics.prom in the run directory: the newest figures, for the text-file collector of Prometheus' node exporter."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from kfuse.observe.sinks import Groups, Sink, flat

_EVERY_S = 1.0  # between two writes of the file


class TextFile(Sink):
    """Gauges `kfuse_train_loss`, `kfuse_heldout_accuracy`, ..., with the run's directory as the label `run`.

    kfuse_step is the number of steps completed, kfuse_written the moment (Unix time, s) at which the file was written.
    A figure that the newest record does not have is NaN.
    """

    name = "metrics.prom"

    def __init__(self, path: Path) -> None:
        """path: of the file, written whole or not at all. Raises OSError where it cannot be written."""
        self._path, self._registry = path, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._logged: set[str] = set()
        self._due, self._changed = 0.0, True
        self.write()

    def log(self, groups: Groups, step: int) -> None:
        if "train" in groups:
            self._set("step", step + 1)
        found = flat(groups)
        unknown = [name for name in self._logged if name.partition("/")[0] in groups]  # unless it is found again
        for name, value in {**dict.fromkeys(unknown, math.nan), **found}.items():
            self._set(name, value)
        self._logged |= found.keys()
        self._changed = True

    def write(self) -> None:
        now = time.monotonic()
        if self._changed and now >= self._due:
            self._due, self._changed = now + _EVERY_S, False
            self._set("written", time.time())
            write_to_textfile(str(self._path), self._registry)

    def close(self, summary: Mapping[str, Any]) -> None:
        self._due = 0.0
        self.write()

    def _set(self, name: str, value: float) -> None:
        name = f"kfuse_{re.sub(r'[^a-zA-Z0-9]+', '_', name)}"
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, name, ["run"], registry=self._registry)
        self._gauges[name].labels(str(self._path.parent.absolute())).set(value)
