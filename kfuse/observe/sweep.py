"""A sweep's jobs: what each is, as it starts, and a table of their results, results.csv."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = ("steps", "loss", "eval_accuracy", "eval_loss", "wall_s", "exit_reason")


class Sweep:
    """Keeps the results of a sweep's jobs, which run one after the other.

    results.csv, in the sweep's directory, has a row for each job that has ended: its number, the overrides that are
    not the same in all jobs, RESULTS, its exit status, its run directory, and the error that kept it from its run. What
    is not known is empty.
    """

    def __init__(self, jobs: Sequence[Sequence[str]]) -> None:
        """jobs: each job's overrides (key=value)."""
        pairs = [[override.lstrip("+").partition("=")[::2] for override in job] for job in jobs]
        self._overrides = [dict(job) for job in pairs]
        keys = dict.fromkeys(key for job in self._overrides for key in job)
        self._varied = [key for key in keys if len({job.get(key) for job in self._overrides}) > 1]
        self._rows: list[dict[str, Any]] = []

    def begin(self, number: int) -> None:
        """Job `number` starts."""
        job = self._overrides[number]
        what = " ".join(f"{key}={job[key]}" for key in self._varied if key in job)
        print(f"job {number} ({number + 1} of {len(self._overrides)}): {what}", flush=True)

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
        path = directory / "results.csv"
        try:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._rows[0].keys())
                writer.writeheader()
                writer.writerows(self._rows)
        except OSError as problem:
            print(f"{path}: cannot be written: {problem.strerror}")

    def finish(self) -> None:
        """Says how many jobs were not run, if any."""
        if left := len(self._overrides) - len(self._rows):
            print(f"not run: {left} of {len(self._overrides)} jobs")
