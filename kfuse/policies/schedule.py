"""Batch size, learning-rate factor and worker count by a schedule fixed beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kfuse.policies.signals import BasePolicy, Decision, Signals, check_positive, check_whole

_UNITS = {"step", "epoch"}
_SETTINGS = {"batch_size", "lr_scale", "workers"}
_NAMES = ", ".join(sorted(_SETTINGS))


class SchedulePolicy(BasePolicy):
    """Changes settings at given steps or epochs.

    phases: a list of mappings, each with `step` or `epoch` (all the same one, increasing) and at least
    one of `batch_size`, `lr_scale`, `workers`: [{"epoch": 0, "lr_scale": 1.0},
    {"epoch": 5, "batch_size": 256, "workers": 2}]. A setting holds until a later phase changes it.

    A phase that starts at a step applies from that step on: the policy asks for it as many steps before as a
    decision takes (signals.in_force_at). One that starts at steps 1 to 3 applies from step 4 on. A phase that starts
    at an epoch applies from that epoch's fifth step at the latest, epoch 0's from the first step. More workers join
    when they are ready. The policy asks until the signals show the settings, also in a run that resumes later.

    Raises ValueError for phases that are not of that form.
    """

    def __init__(self, phases: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(phases, str) or not isinstance(phases, Sequence):
            raise ValueError(f"policy.phases={phases!r}: must be a list of mappings")
        units = {unit for phase in phases if isinstance(phase, Mapping) for unit in phase.keys() & _UNITS}
        if len(units) > 1:
            raise ValueError("policy.phases: must have step or epoch in all phases, not both")
        self._unit = units.pop() if units else "step"
        # The step or epoch at which each phase starts, and what it sets.
        self._phases = [_parse(index, phase, self._unit) for index, phase in enumerate(phases)]
        starts = [start for start, _ in self._phases]
        if any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"policy.phases: {self._unit}={starts}: must increase")

    def initial(self) -> Decision | None:
        """Returns the settings of a phase that starts at step or epoch 0."""
        asked = self._asked(0)
        return None if asked.is_empty else asked

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the settings of the phases that have started and that the signals do not show yet."""
        asked = self._asked(signals.in_force_at if self._unit == "step" else signals.epoch)
        # Compare what can be reached: otherwise a setting out of bounds would be asked for at every step.
        goal, _ = asked.clipped(signals.bounds)
        change = Decision(
            batch_size=None if goal.batch_size == signals.batch_size else asked.batch_size,
            lr_scale=None if _same_scale(goal.lr_scale, signals.lr_scale) else asked.lr_scale,
            workers=None if goal.workers == signals.workers else asked.workers,
        )
        return None if change.is_empty else change

    def _asked(self, now: int) -> Decision:
        """The settings of all phases that have started at step or epoch `now`; later ones win."""
        asked = Decision()
        for start, settings in self._phases:
            if start <= now:
                asked = asked.merged(settings)
        return asked

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: decisions depend on the signals alone, and the phases come from the configuration."""
        return {}


def _parse(index: int, phase: Mapping[str, Any], unit: str) -> tuple[int, Decision]:
    """The start of one phase of the configuration, and what it sets. Raises ValueError, which names the key."""
    key = f"policy.phases[{index}]"
    if not isinstance(phase, Mapping) or unit not in phase or not phase.keys() & _SETTINGS:
        raise ValueError(f"{key}={phase!r}: must have step or epoch, and one of {_NAMES}")
    if unknown := sorted(set(phase) - _UNITS - _SETTINGS):
        raise ValueError(f"{key}: unknown {', '.join(unknown)}; must have step or epoch, and some of {_NAMES}")
    for name, least in ((unit, 0), ("batch_size", 1), ("workers", 1)):
        check_whole(f"{key}.{name}", phase.get(name, least), least)
    check_positive(f"{key}.lr_scale", phase.get("lr_scale", 1.0))
    return phase[unit], Decision(phase.get("batch_size"), phase.get("lr_scale"), phase.get("workers"))


def _same_scale(goal: float | None, now: float) -> bool:
    # The factor may have travelled as fp32.
    return goal is None or math.isclose(goal, now, rel_tol=1e-6)
