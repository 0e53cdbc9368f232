"""What a sweep's runs came to, as a table on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kfuse.observe.recorder import table, value_text

_COLUMNS = {  # of summary.json, and what stands above them
    "steps": "steps",
    "wall_s": "time",
    "loss": "loss",
    "heldout_loss": "heldout",
    "heldout_accuracy": "accuracy",
    "exit_reason": "ended by",
}


def show(runs: Sequence[tuple[Path, Sequence[str], int]]) -> None:
    """Prints a line a run, with the overrides that differ. runs: each one's directory, overrides and exit status."""
    common = set.intersection(*(set(words) for _, words, _ in runs))
    given = [dict(word.split("=", 1) for word in words if word not in common and "=" in word) for _, words, _ in runs]
    differ = list(dict.fromkeys(key for each in given for key in each))
    shown = table("run", *differ, *_COLUMNS.values(), texts=1 + len(differ))
    for (folder, _, status), values in zip(runs, given, strict=True):
        try:
            summary = json.loads((folder / "summary.json").read_bytes())
        except (OSError, ValueError):
            summary = {}
        summary["exit_reason"] = summary.get("exit_reason") or f"status {status}"
        figures = (value_text(name, summary.get(name)) for name in _COLUMNS)
        shown.add_row(folder.name, *(values.get(key, "-") for key in differ), *figures)
    Console(highlight=False, markup=False).print(shown)
