"""Signals of a step, as policies see them, for the tests of the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from kfuse.policies.noise_interval import NoiseInterval, NoisePolicy
from kfuse.policies.signals import BasePolicy, Bounds, Decision, Signals

BOUNDS = Bounds(batch_min=8, batch_max=1024, workers_min=1, workers_max=8)
STEP = Signals(
    step=20,
    epoch=0,
    samples=1280,
    lr=0.1,
    lr_scale=1.0,
    batch_size=64,
    micro_batch=8,
    micro_batches=8,
    workers=1,
    bounds=BOUNDS,
)


Policy = TypeVar("Policy", bound=NoisePolicy)


def signals(batch_size: int = 64, noise: tuple[float, float, float] | None = None, **changes: Any) -> Signals:
    """A step with micro-batches of 8; `noise` is (low, noise scale, high) as it is shown."""
    low, middle, high = noise or (None, None, None)
    known = {"noise_scale": middle, "noise_scale_low": low, "noise_scale_high": high}
    return replace(STEP, batch_size=batch_size, micro_batches=math.ceil(batch_size / 8), **(known | changes))


def knowing(policy: Policy, low: float = math.nan, high: float = math.nan) -> Policy:
    """The policy, whose newest steps have this interval of the noise scale."""
    policy.noise_interval = lambda: NoiseInterval(low, high)  # type: ignore[method-assign]
    return policy


def run(policy: BasePolicy, seen: Callable[[int, Any, Any], Signals], now: Any, steps: Iterable[int]) -> list[Any]:
    """What each step was made with, and what the next one would be, where each decision applies at once.

    seen: the signals of a step, by its number, what it was made with and what the step before was made with (None: it
    is the first). now: the first step's settings, a `Decision`, as all are.
    """
    out, before = [now], None
    for step in steps:
        decision = policy.decide(seen(step, now, before)) or Decision()
        before, now = now, now.merged(decision)
        out.append(now)
    return out
