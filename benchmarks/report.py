"""What every benchmark says: ratios with their intervals, a table, and a file with the machine and the versions.

Tables are plain text: a bare machine with a GPU may have no rich.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

import kfuse

RESAMPLES = 2000
_LOAD = os.getloadavg()  # as this is imported: later it is the benchmark's own


def warn_if_busy() -> None:
    """Says on stderr that other programs use the machine, where they do: for benchmarks that take times."""
    if _is_busy():
        said = f"WARNING: the load average is {_LOAD[0]:.1f}, this machine has {os.cpu_count()} cores"
        print(f"{said}: other programs use it, so times, and ratios of them, are not steady", file=sys.stderr)


def _is_busy() -> bool:
    return _LOAD[0] > (os.cpu_count() or 1)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the command line, with the script's docstring as its help, that knows --json FILE."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write figures, settings, machine and versions here")
    return parser


def median_interval(ratios: ArrayLike) -> dict[str, float]:
    """The median of per-round ratios, and the 95 % percentile-bootstrap interval over rounds."""
    values = np.asarray(ratios)
    drawn = np.median(np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"median": round(float(np.median(values)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def told(ratio: Mapping[str, float]) -> str:
    """The median, and its interval in brackets."""
    return "{median:.3f} ({low:.3f}-{high:.3f})".format(**ratio)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Prints a table. The first `left` columns are flush left, the others flush right."""
    lines = [heads, *rows]
    aligned = []
    for column, cells in enumerate(zip(*lines, strict=True)):
        width = max(map(len, cells))
        aligned.append([cell.ljust(width) if column < left else cell.rjust(width) for cell in cells])
    print(title, *map("  ".join, zip(*aligned, strict=True)), sep="\n")


def row(found: Mapping[str, float] | float, at_most: float | None, device: str) -> dict[str, Any]:
    """What was found, the most that is accepted of it, or of its interval's upper end, and the verdict. None: any.

    On a CPU it is a rehearsal.
    """
    upper = found["high"] if isinstance(found, Mapping) else float(found)
    verdict = "-" if at_most is None else "accept" if upper <= at_most else "miss"
    return {
        "found": found if isinstance(found, Mapping) else upper,
        "at_most": at_most,
        "verdict": verdict if device == "cuda" else "rehearsal",
    }


def show_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints what `row` has made, by name."""
    cells = []
    for name, each in rows.items():
        found, most = each["found"], each["at_most"]
        text = told(found) if isinstance(found, Mapping) else found if isinstance(found, str) else f"{found:.4g}"
        cells.append((name, text, "" if most is None else f"{most:g}", each["verdict"]))
    table("", ("row", "found", "at most", "verdict"), cells)


def progress_bar(**more: Any) -> Any:
    """A bar of rich's on stderr: what is done, how much of it, for how long."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), **more)


def write(path: Path | None, packages: Iterable[str], **figures: Any) -> None:
    """Writes the figures, with what they hold for, where a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**origin(packages), **figures}, indent=1) + "\n")


def origin(packages: Iterable[str]) -> dict[str, Any]:
    return {"command": _command(), "machine": _machine(), "versions": _versions(packages)}


def _machine() -> dict[str, Any]:
    """The processor, memory, system and GPU, and the load average as this process began."""
    found = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average_before": [round(load, 2) for load in _LOAD],
        "busy_before": _is_busy(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["cuda"] = torch.version.cuda or torch.version.hip
    return found


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "kfuse": kfuse.__version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _command() -> str:
    """What this process was started with; a script of this checkout by its place in it, wherever that lies."""
    script = Path(sys.argv[0]).absolute()
    root = Path(__file__).absolute().parents[1]
    name = str(script.relative_to(root)) if script.is_relative_to(root) else sys.argv[0]
    return shlex.join(["python", name, *sys.argv[1:]])


def _cpu() -> str:
    """The processor's name, family and model (virtual machines shorten the name)."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    name = values.get("model name", platform.machine())
    return f"{name} (family {values.get('cpu family', '?')}, model {values.get('model', '?')})"
