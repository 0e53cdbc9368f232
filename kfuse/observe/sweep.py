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

from kfuse.observe.display import duration, figure

RESULTS = ("steps", "loss", "eval_accuracy", "eval_loss", "noise_scale", "wall_s", "exit_reason")


class Sweep:
    """Keeps the results of a sweep's jobs, which run one after the other.

    results.csv, in the sweep's directory, has a row for each job that has ended: its number, the overrides that are
    not the same in all jobs, RESULTS, its exit status, its run directory, and the error that ended it. What is not
    known is empty.
    """

    def __init__(self, jobs: Sequence[Sequence[str]], console: Console | None = None) -> None:
        """jobs: each job's overrides (key=value)."""
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 1000  # of no consequence for a file: lines are as long as they need to be
        self._overrides = [dict(_parted(override) for override in job) for job in jobs]
        keys = dict.fromkeys(key for job in self._overrides for key in job)
        self._varied = [key for key in keys if len({job.get(key) for job in self._overrides}) > 1]
        self._rows: list[dict[str, Any]] = []
        self._directory = Path()

    def begin(self, number: int, directory: Path) -> None:
        """Job `number` starts. directory: the sweep's."""
        self._directory = directory
        job = self._overrides[number]
        what = " ".join(f"{key}={job[key]}" for key in self._varied if key in job) or "no overrides that differ"
        self._console.print(Text(f"job {number} ({number + 1} of {len(self._overrides)}): {what}"), soft_wrap=True)

    def end(self, number: int, run_dir: Path, status: int, error: str | None = None) -> None:
        """Job `number` has ended with this exit status. error: what kept it from its run, whose results are unknown."""
        results = _results(run_dir) if error is None else {}  # else another job may have written what is there
        varied = {key: self._overrides[number].get(key) for key in self._varied}
        found = {name: results.get(name) for name in RESULTS}
        ending = {"status": status, "run_dir": str(run_dir), "error": error or results.get("error")}
        self._rows.append({"job": number, **varied, **found, **ending})
        try:
            with (self._directory / "results.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, self._rows[0].keys())
                writer.writeheader()
                writer.writerows(self._rows)
        except OSError as error:
            self._console.print(Text(f"{self._directory / 'results.csv'}: cannot be written: {error.strerror}"))

    def finish(self) -> None:
        """Prints the table, and under it each failed job's error. Columns of which nothing is known are left out."""
        if not self._rows:
            return
        table = Table(title=f"{self._directory}: results.csv", title_justify="left", title_style="bold", box=None)
        columns = [key for key in self._rows[0] if key != "error" and any(row[key] is not None for row in self._rows)]
        for key in columns:
            words = key in (*self._varied, "exit_reason")
            table.add_column(_HEADINGS.get(key, key), justify="left" if words else "right", overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(self._cell(key, row[key])) for key in columns))
        self._console.print(table)
        for row in self._rows:
            if row["error"] is not None:
                self._console.print(Text(f"error of job {row['job']}: {row['error']}"), soft_wrap=True)
        if left := len(self._overrides) - len(self._rows):
            self._console.print(Text(f"not run: {left} of {len(self._overrides)} jobs"))

    def _cell(self, key: str, value: Any) -> str:
        if value is None:
            return "-"
        if key == "run_dir":
            path = Path(value)
            return str(path.relative_to(self._directory)) if path.is_relative_to(self._directory) else value
        if key == "eval_accuracy":
            return f"{value:.1%}"
        if key == "wall_s":
            return duration(value) if value >= 60 else f"{value:.1f} s"
        return figure(value) if isinstance(value, float) else str(value)


_HEADINGS = {
    "eval_accuracy": "held-out accuracy",
    "eval_loss": "held-out loss",
    "noise_scale": "noise scale",
    "wall_s": "time",
    "run_dir": "directory",
    "exit_reason": "exit reason",
}


def _parted(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _results(run_dir: Path) -> dict[str, Any]:
    """The summary, the last noise scale of metrics.jsonl, and of a failed run the error, its last event."""
    results: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        results = json.loads((run_dir / "summary.json").read_text())
        if results.get("exit_reason") == "failed":
            *_, last = (run_dir / "events.jsonl").read_text().splitlines()
            results["error"] = json.loads(last).get("why")
        with (run_dir / "metrics.jsonl").open() as file:
            *_, last = file
        results = {"noise_scale": json.loads(last)["noise_scale"], **results}
    return results
