"""Drops growth while training waits for its data: a larger batch would wait as long for each sample, and more workers
read from the same source.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

from kfuse.policies.signals import BasePolicy, Decision, Signals

MOST_WAIT = 0.2  # of the steps' time: below it, data that came at once would save a fifth of a step at most
_LEAST_STEPS, _MOST_STEPS = 20, 60  # as `kfuse.policies.noise_interval` has


def without_growth(
    decision: Decision | None,
    signals: Signals,
    waits: list[tuple[float, float]],
    policy: BasePolicy,
    reproducible: bool = False,
) -> tuple[Decision | None, str]:
    """Returns what is granted of the policy's decision on these signals, and a note on the growth that is not; or "".

    waits: seconds of the newest steps, for data and in all; the signals' are added. A replay of these does the same.
    reproducible: what is computed must not depend on times, so batches may grow.
    """
    wait, took = signals.previous_data_wait_s, signals.previous_step_time_s
    waits += [] if wait is None or took is None else [(wait, took)]
    del waits[:-_MOST_STEPS]
    if decision is None or len(waits) < _LEAST_STEPS:
        return decision, ""
    kept = sorted(waits)[: -(len(waits) // 20)]  # without the longest waits: loader processes start, a file is opened
    share = sum(wait for wait, _ in kept) / sum(took for _, took in kept)
    planned = {name for part in policy.with_parts() if part.is_plan for name in part.owned_fields}
    droppable = {"workers"} if reproducible else {"batch_size", "workers"}
    nearest, _ = decision.clipped(signals.bounds)
    asked = {name: getattr(nearest, name) or 0 for name in droppable - planned}
    grown = {name: value for name, value in asked.items() if value > getattr(signals, name)}
    if not grown or share <= MOST_WAIT:
        return decision, ""
    dropped: dict[str, None] = dict.fromkeys(grown)
    if "batch_size" in grown and (decision.lr_scale or 0) > signals.lr_scale:
        dropped["lr_scale"] = None  # a higher rate is meant for the larger batch
    what = ", ".join(f"{name} {value}" for name, value in sorted(grown.items()))
    return replace(decision, **dropped), f"{what} dropped: {share:.0%} of a step is a wait for data"


def reads() -> tuple[float, int, int]:
    """Returns the moment, and the bytes that this process and its loaders have read so far, 0 where that is unknown:
    by read calls, and from storage.
    """
    called = stored = 0  # bytes: by read calls, the page cache's too; and from storage, those of mapped files too
    for pid in (os.getpid(), *(child.pid for child in active_children())):  # what ended ones have read is this one's
        with contextlib.suppress(OSError):
            counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            called, stored = called + int(counters["rchar"]), stored + int(counters["read_bytes"])
    return time.monotonic(), called, stored
