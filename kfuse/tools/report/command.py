"""The command `kfuse report RUN_DIR...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kfuse.observe import write_whole
from kfuse.settings.tree import ConfigError
from kfuse.tools.report.recorded import read_runs

USAGE = """\
kfuse report RUN_DIR [RUN_DIR ...]
kfuse report SWEEP_DIR

Writes a page about runs, and prints its path: loss, accuracy, noise scale and batch size, learning rate, workers and
events, throughput and the time of a step, with the settings and the summary. Several runs are drawn over each other.
The page is report.html in the run's or the sweep's directory; of several runs it is comparison.html in the first one's.
It is one file and needs no network. Needs bokeh (pip install 'kfuse[report]').
Exit status 0; 2 for what is no run directory."""


def main(words: Sequence[str]) -> int:
    """Writes the page. Returns the exit status. Raises ConfigError, in one line."""
    if not words:
        raise ConfigError("kfuse report: must be given the directories of one run or more")
    given = [Path(word) for word in words]
    runs = given if len(given) > 1 else _of_sweep(given[0]) or given
    path = given[0] / ("report.html" if len(given) == 1 else "comparison.html")
    try:
        from kfuse.tools.report.page import page
    except ImportError as error:
        raise ConfigError(f"kfuse report needs bokeh: pip install 'kfuse[report]' ({error})") from error
    html = page(read_runs(runs))
    try:
        write_whole(path, lambda to: to.write_text(html, encoding="utf-8", errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(path)
    return 0


def _of_sweep(folder: Path) -> list[Path]:
    """Returns the directories of a sweep's runs, in order; none for a run's own directory."""
    if (folder / "metrics.jsonl").exists():
        return []
    found = [path.parent for path in folder.glob("*/metrics.jsonl") if path.stat().st_size]  # some have made no step
    return sorted(found, key=lambda path: (len(path.name), path.name))  # 0, 1, ..., 10
