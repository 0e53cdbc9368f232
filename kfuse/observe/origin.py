"""Where a run comes from: its command, its script's commit, and the versions it ran with."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version


def origin(folder: Path) -> dict[str, str]:
    """Returns this process's command, versions, and the folder's git commit, if it has one ("-dirty": with changes)."""
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    found = {"command": shlex.join(sys.argv), **versions()}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found["commit"] = subprocess.run(words, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    return found


def versions() -> dict[str, str]:
    """Returns the versions of Python, kfuse, torch and Triton, of those that are installed."""
    found = {"python": python_version()}
    for package in ("kfuse", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
