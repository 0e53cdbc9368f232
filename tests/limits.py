"""How many workers a test's job has, and what happens to them."""

from __future__ import annotations

from typing import Any

from kfuse.settings.tree import JobSettings, resolved


def limits(
    count: int, least: int, most: int, restart: bool = False, script: bool = False, **elastic: Any
) -> dict[str, Any]:
    """The arguments of a supervisor's `kfuse.elastic.job.Job`. elastic: settings of that section."""
    given = {"workers_count": count, "workers_min": least, "workers_max": most}
    given |= {f"elastic_{name}": value for name, value in elastic.items()}
    return {"settings": resolved("a test", JobSettings, given), "restart": restart, "script": script}
