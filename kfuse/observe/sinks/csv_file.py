"""A run's figures as a CSV file."""

from __future__ import annotations

import csv
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kfuse.observe import write_whole
from kfuse.observe.sinks import Groups, Sink, flat


class CsvFile(Sink):
    """A column for the step and one for each figure. An evaluation has a row of its own, which `rewind` keeps."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for what cannot be read, or is another program's."""
        self.name, self._path = str(path), path
        self._waiting: list[dict[str, Any]] = []
        path.touch()
        self._columns, rows = self._read()
        if self._columns and self._columns[0] != "step":
            raise OSError(errno.EINVAL, "must be a file of kfuse, whose first column is step", str(path))
        self._evaluated = max((int(row["step"]) for row in rows if _is_evaluation(row)), default=-1)

    def log(self, groups: Groups, step: int) -> None:
        row = {"step": step, **flat(groups)}
        if _is_evaluation(row):
            if step <= self._evaluated:
                return
            self._evaluated = step
        self._waiting.append(row)

    def rewind(self, step: int) -> None:
        self.write()
        self._rewrite([row for row in self._read()[1] if int(row["step"]) < step or _is_evaluation(row)])

    def write(self) -> None:
        if not self._waiting:
            return
        columns = dict.fromkeys([*self._columns, *(name for row in self._waiting for name in row)])
        if len(columns) > len(self._columns):
            rows = self._read()[1]
            self._columns = [*columns]
            self._rewrite(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerows(self._waiting)
        self._waiting.clear()

    def close(self, summary: Mapping[str, Any]) -> None:
        self.write()

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """The columns and the rows, without what a killed process may have left of one."""
        with self._path.open(newline="") as file:
            reader = csv.DictReader((line for line in file if line.endswith("\n")), restkey="", restval="")
            return [*(reader.fieldnames or ())], [row for row in reader if row["step"].isdecimal() and "" not in row]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        def save(to: Path) -> None:
            with to.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                if self._columns:
                    writer.writeheader()
                writer.writerows(rows)

        write_whole(self._path, save)


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(value != "" for name, value in row.items() if name.startswith("heldout/"))
