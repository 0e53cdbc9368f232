"""What is fixed beforehand: settings by a schedule, and a mode of synchronisation up to a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import reduce
from itertools import pairwise
from typing import Any

from kfuse.policies.signals import (
    DECISION_LAG,
    BasePolicy,
    ConfiguredPolicy,
    Decision,
    Signals,
    check_number,
    check_whole,
)

_UNITS = ("step", "epoch", "samples")
_ALL_UNITS = "step, epoch or samples"
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SETTINGS = {"batch_size", "lr_scale", "workers"}
_NAMES = ", ".join(sorted(_SETTINGS))


class SchedulePolicy(BasePolicy):
    """Changes settings at given steps, epochs or samples.

    phases: a list of mappings, each with `step`, `epoch` or `samples` (all the same one, increasing) and at least
        one of `batch_size`, `lr_scale`, `workers`: [{"epoch": 0, "lr_scale": 1.0},
        {"epoch": 5, "batch_size": 256, "workers": 2}]. Or a text, as Megatron-LM's --step-batch-size-schedule takes:
        "0:768 250M:1536 1B:3072" has the batch size 1536 from 250 million samples on. The suffixes are K, M, B and T;
        the numbers are always samples (Megatron-LM's are tokens where it has a --seq-length).

    A setting holds until a later phase changes it.

    A phase applies from its step on, from the first step of its epoch, or from the first step that begins with so many
    samples: the policy asks for it as many steps before as a decision takes (signals.in_force_at). What would start at
    steps 1 to 3 applies from step 4 on. Phases that no step is left for are skipped. How far the steps in between get
    is reckoned with the batch sizes of the phases, where the batch size is theirs by now, and else with the present
    one.

    Where the length of an epoch is unknown (signals.epoch_samples) its last step counts as a whole one, so that phases
    by samples may apply too soon, by less than a step's samples for each epoch that ended in the five steps before; and
    a phase that starts at an epoch applies from its fifth step on, or sooner.

    The policy asks until the signals show the settings, also in a run that resumes later. lr_scale is a factor beside
    lr.scaling, which follows the batch size by itself.

    Raises ValueError for phases that are not of that form.
    """

    is_plan = True

    def __init__(self, phases: str | Sequence[Mapping[str, Any]]) -> None:
        given = _parse_text(phases) if isinstance(phases, str) else phases
        if not isinstance(given, Sequence):
            raise ValueError(f"policy.phases={phases!r}: must be a list of mappings, or a text such as 0:768 250M:1536")
        units = {unit for phase in given if isinstance(phase, Mapping) for unit in phase.keys() & set(_UNITS)}
        if len(units) > 1:
            raise ValueError(f"policy.phases: must have {_ALL_UNITS} in all phases, the same one")
        self.unit = units.pop() if units else "step"
        # The step, epoch or number of samples at which each phase starts, and what it sets.
        self._phases = [_parse(index, phase, self.unit) for index, phase in enumerate(given)]
        starts = [start for start, _ in self._phases]
        if any(later <= earlier for earlier, later in pairwise(starts)):
            raise ValueError(f"policy.phases: {self.unit}={starts}: must increase")
        self.batch_sizes = [asked.batch_size for _, asked in self._phases if asked.batch_size is not None]
        last = self._asked(max(starts, default=0))
        self.owned_fields = tuple(name for name in sorted(_SETTINGS) if getattr(last, name) is not None)

    def initial(self) -> Decision | None:
        asked = self._asked(0)
        return None if asked.is_empty else asked

    def decide(self, signals: Signals) -> Decision | None:
        """Returns the settings of the phases that have started by the step that this decision applies to.

        Left out are those that the signals show already, unless the steps until then have others.
        """
        *before, now = self._coming(signals)
        asked = self._asked(now)
        changed = asked.changes(signals) or Decision()
        for each in map(self._asked, before):
            others = [name for name in _SETTINGS if getattr(each, name) not in (None, getattr(asked, name))]
            changed = changed.merged(Decision(**{name: getattr(asked, name) for name in others}))
        return None if changed.is_empty else changed

    def _coming(self, signals: Signals) -> list[int]:
        """Returns where the coming steps begin, in steps, samples or epochs, as far as that is known.

        The last one is that of the step to which a decision on these signals applies.
        """
        steps = range(signals.step + 1, signals.in_force_at + 1)
        if self.unit == "step":
            return list(steps)
        known = self._is_of_phases(signals)
        out: list[int] = []
        epoch, samples, length = signals.epoch, signals.samples, signals.epoch_samples
        left = math.inf if length is None else (epoch + 1) * length - samples  # of the epoch's samples
        for step in steps:
            if left == 0 and length is not None:
                epoch, left = epoch + 1, length
            out.append(epoch if self.unit == "epoch" else samples)
            count = self._batch_size(signals, step, out[-1]) if known else signals.batch_size
            count = int(min(count, left))
            samples, left = samples + count, left - count
        return out if known else out[-1:]

    def _is_of_phases(self, signals: Signals) -> bool:
        """Whether the step's batch size is that of the phases. An epoch's last step is short: it may begin later."""
        if self.unit == "epoch":
            return self._batch_size(signals, signals.step, signals.epoch) == signals.batch_size
        earliest = signals.samples - signals.batch_size
        begins = [earliest, *(start for start, _ in self._phases if earliest < start < signals.samples)]
        return any(self._batch_size(signals, signals.step, begin) == signals.batch_size for begin in begins)

    def _batch_size(self, signals: Signals, step: int, begin: int) -> int:
        """Returns the phases' batch size in this step, which begins at `begin`; the present one where they have none.

        No decision applies to the first steps of a run: they have what it began with.
        """
        of_phases, _ = self._asked(begin if step >= DECISION_LAG else 0).clipped(signals.bounds)
        return of_phases.batch_size or signals.batch_size

    def _asked(self, now: int) -> Decision:
        """Returns the settings of all phases that have started at step, epoch or sample `now`; later ones win."""
        started = (settings for start, settings in self._phases if start <= now)
        return reduce(Decision.merged, started, Decision())

    def state_dict(self) -> dict[str, Any]:
        return {}  # decisions depend on the signals and the phases alone


def _parse_text(text: str) -> list[dict[str, int]]:
    """Returns the phases of a text such as "0:768 250M:1536". Raises ValueError for another text."""
    phases = []
    for entry in text.split() or [text]:
        try:
            start, batch_size = map(_number, entry.split(":"))
        except (ValueError, ArithmeticError):
            message = f"policy.phases={text}: {entry} must be SAMPLES:BATCH_SIZE, as in 0:768 250M:1536"
            raise ValueError(message) from None
        phases.append({"samples": start, "batch_size": batch_size})
    return phases


def _number(text: str) -> int:
    """Returns the whole number that a text such as 1536, 250M or 1.5B stands for. Raises an error for another text."""
    unit = _SUFFIXES.get(text[-1:].upper())
    value = Decimal(text[:-1] if unit else text) * (unit or 1)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _parse(index: int, phase: Mapping[str, Any], unit: str) -> tuple[int, Decision]:
    """Returns the start of a phase and what it sets. Raises ValueError, which names the key."""
    key = f"policy.phases[{index}]"
    if not isinstance(phase, Mapping) or unit not in phase or not phase.keys() & _SETTINGS:
        raise ValueError(f"{key}={phase!r}: must have {_ALL_UNITS}, and one of {_NAMES}")
    if unknown := sorted(set(phase) - set(_UNITS) - _SETTINGS):
        raise ValueError(f"{key}: unknown {', '.join(unknown)}; must have {_ALL_UNITS}, and some of {_NAMES}")
    for name, least in ((unit, 0), ("batch_size", 1), ("workers", 1)):
        check_whole(f"{key}.{name}", phase.get(name, least), least)
    check_number(f"{key}.lr_scale", phase.get("lr_scale", 1.0))
    return phase[unit], Decision(phase.get("batch_size"), phase.get("lr_scale"), phase.get("workers"))


class SyncSwitchPolicy(ConfiguredPolicy):
    """sma up to a step, ssgd from it on: KungFu's AdaptiveSGDOptimizer (Mai et al., OSDI 2020; lsds/KungFu,
    srcs/python/kungfu/tensorflow/optimizers/ada_sgd.py: its `change_step`).

    At the change all workers take the central model, and the mean of their optimizer states (docs/synchronisation.md),
    where KungFu's take rank 0's model. It asks once, so a mode that the script sets later stays.

    step: the first step with ssgd; at least 1. From 4 on it is that step, below it is step 4: a decision takes so long.
    """

    modes = ("sma", "ssgd")
    owned_fields = ("sync",)

    def __init__(self, step: int) -> None:
        check_whole("policy.step", step, 1)
        self.step = step
        self.asked_at: int | None = None  # The step on whose signals it has asked for ssgd

    def initial(self) -> Decision:
        return Decision(sync="sma")

    def decide(self, signals: Signals) -> Decision | None:
        if self.asked_at is None and signals.in_force_at >= self.step:
            self.asked_at = signals.step
        return Decision(sync="ssgd") if self.asked_at == signals.step else None
