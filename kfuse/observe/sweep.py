"""A sweep's jobs: what each is, as it starts, and a table of their results, also as results.csv."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfuse.observe.display import figure

RESULTS = ("steps", "loss", "eval_accuracy", "eval_loss", "wall_s", "exit_reason")


class Sweep:
    """Keeps the results of a sweep's jobs, which run one after the other.

    results.csv, in the sweep's directory, has a row for each job that has ended: its number, the overrides that are
    not the same in all jobs, RESULTS, its exit status, its run directory, and the error that kept it from its run. What
    is not known is empty.
    """

    def __init__(self, jobs: Sequence[Sequence[str]], console: Console | None = None) -> None:
        """jobs: each job's overrides (key=value)."""
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 1000  # of no consequence for a file: lines are as long as they need to be
        pairs = [[override.lstrip("+").partition("=")[::2] for override in job] for job in jobs]
        self._overrides = [dict(job) for job in pairs]
        keys = dict.fromkeys(key for job in self._overrides for key in job)
        self._varied = [key for key in keys if len({job.get(key) for job in self._overrides}) > 1]
        self._rows: list[dict[str, Any]] = []

    def begin(self, number: int) -> None:
        """Job `number` starts."""
        job = self._overrides[number]
        what = " ".join(f"{key}={job[key]}" for key in self._varied if key in job)
        self._console.print(Text(f"job {number} ({number + 1} of {len(self._overrides)}): {what}"), soft_wrap=True)

    def end(self, number: int, directory: Path, run_dir: Path, status: int, error: str | None = None) -> None:
        """Job `number` has ended with this exit status. directory: the sweep's.

        error: what kept it from its run, whose results are unknown.
        """
        results: dict[str, Any] = {}
        if error is None:  # else another job may have written what is there
            with contextlib.suppress(OSError, ValueError):
                results = json.loads((run_dir / "summary.json").read_text())
        varied = {key: self._overrides[number].get(key) for key in self._varied}
        found = {name: results.get(name) for name in RESULTS}
        self._rows.append({"job": number, **varied, **found, "status": status, "run_dir": str(run_dir), "error": error})
        try:
            with (directory / "results.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, self._rows[0].keys())
                writer.writeheader()
                writer.writerows(self._rows)
        except OSError as problem:
            self._console.print(Text(f"{directory / 'results.csv'}: cannot be written: {problem.strerror}"))

    def finish(self) -> None:
        """Prints the table. Columns of which nothing is known are left out."""
        if not self._rows:
            return
        table = Table(title="results.csv", title_justify="left", title_style="bold", box=None)
        columns = [key for key in self._rows[0] if any(row[key] is not None for row in self._rows)]
        for key in columns:
            table.add_column(key, overflow="fold")
        for row in self._rows:
            values = [row[key] for key in columns]
            cells = [figure(value) if isinstance(value, float) else str(value) for value in values]
            table.add_row(*("-" if value is None else cell for value, cell in zip(values, cells, strict=True)))
        self._console.print(table)
        if left := len(self._overrides) - len(self._rows):
            self._console.print(Text(f"not run: {left} of {len(self._overrides)} jobs"))
