"""How many CPU cores this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def cores(root: Path = Path("/")) -> int:
    """Returns those of the process's affinity, or what the CPU quota of its cgroups allows, if that is less.

    root: where the system's files are.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yields, of this process's cgroup and of each one above it that has a quota, how many cores' time it may take."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # no Linux
        return
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")  # version 1, or 2
        names = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
        own = top / path.lstrip("/")  # in a container it may not be there, and `top` is its own
        for folder in (own, *(above for above in own.parents if above.is_relative_to(top))):
            try:
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                continue
