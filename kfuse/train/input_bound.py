"""Input-bound training: the workers wait for data for much of a step, so that more workers bring little.

The part of the steps' time that the leader waits for data is an exponentially weighted mean. Every worker computes the
same value, from the times in the steps' tails.
"""

from __future__ import annotations

from kfuse.train.load_balance import running_mean

_DECAY = 0.95  # of the means, a step: they follow about the last 20 steps
_BEGINS = 0.5  # part of the time that the leader waits for data: from here on training is input-bound
_ENDS = 0.4  # below it training is no longer input-bound: lower, so that noise does not switch it back and forth
_LEAST_STEPS = 10  # that are measured before training is said to be input-bound

Waiting = tuple[float, float, int]
"""Means of a step's seconds and of the seconds of it that the leader waited for data; steps that were measured."""


def measured(known: Waiting, step_time_s: float | None, data_wait_s: float | None) -> Waiting:
    """The means after another step. None: the step was not measured, and the means stay."""
    if step_time_s is None or data_wait_s is None:
        return known
    time, wait, steps = known
    return running_mean(time, step_time_s, steps, _DECAY), running_mean(wait, data_wait_s, steps, _DECAY), steps + 1


def fraction(known: Waiting) -> float | None:
    """The part of the time that the leader waits for data; None while too few steps are measured."""
    time, wait, steps = known
    return wait / time if steps >= _LEAST_STEPS and time > 0 else None


def is_bound(known: Waiting, before: bool) -> bool:
    """Whether training is input-bound. before: whether it was."""
    part = fraction(known)
    return part is not None and part >= (_ENDS if before else _BEGINS)
