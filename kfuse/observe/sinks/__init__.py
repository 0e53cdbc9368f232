"""Where a run's figures go beside its JSON lines: TensorBoard's file, a CSV file, services that compare experiments."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# The packages that each needs beside kfuse's own. mlflow's others are those of its databases.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": (),
    "csv": (),
    "prometheus": ("prometheus_client",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}
Groups = Mapping[str, Mapping[str, Any]]


class Sink:
    """A place for figures. `write`, `rewind` and `close` raise OSError or SinkError where it takes no more."""

    name: str  # for messages

    def log(self, groups: Groups, step: int) -> None:
        """Takes figures of a step, by group. What is not a finite number is left out.

        An evaluation after n steps has step n, and may come before the figures of step n - 1.
        """

    def rewind(self, step: int) -> None:
        """The figures of this step and later ones come, perhaps again: also called as a run begins."""

    def write(self) -> None:
        """Passes on what was logged."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run has ended. summary: the content of summary.json, empty where there is none."""


class SinkError(Exception):
    """A sink takes no more. The message is one line."""


class Sinks:
    """Several sinks. Of one that takes no more `warn` is told once, and it is dropped: its file may be torn."""

    def __init__(self, sinks: Iterable[Sink], warn: Callable[[str], object]) -> None:
        self._sinks, self._warn = [*sinks], warn

    def log(self, groups: Groups, step: int) -> None:
        for sink in self._sinks:
            sink.log(groups, step)

    def rewind(self, step: int) -> None:
        self._ask(lambda sink: sink.rewind(step))

    def write(self) -> None:
        self._ask(lambda sink: sink.write())

    def close(self, summary: Mapping[str, Any]) -> None:
        self._ask(lambda sink: sink.close(summary))
        self._sinks.clear()

    def _ask(self, what: Callable[[Sink], None]) -> None:
        for sink in [*self._sinks]:
            try:
                what(sink)
            except (OSError, SinkError) as error:
                self._sinks.remove(sink)
                why = error.strerror or error if isinstance(error, OSError) else error
                self._warn(f"kfuse: warning: {sink.name}: no more is written: {why}")


def missing(sinks: Iterable[str]) -> str | None:
    """Returns one line about the first of these sinks that needs a package that is not installed."""
    for name in sinks:
        for package in PACKAGES[name]:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # a folder of that name (wandb makes one) is no package
                return f"{package} is not installed: pip install 'kfuse[{name}]'"
    return None


def flat(groups: Groups) -> dict[str, float]:
    """Returns the numbers of all groups, by "<group>/<figure>"."""
    return {f"{group}/{key}": value for group, record in groups.items() for key, value in numbers(record).items()}


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns a record's finite numbers, but the step."""
    found = {}
    for key, value in record.items():
        if (type(value) is int or (isinstance(value, float) and math.isfinite(value))) and key != "step":
            found[key] = value
    return found
