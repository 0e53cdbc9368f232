"""The batch size doubles where the critical batch size has, by figures computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from policy_signals import BOUNDS, signals

from kfuse.policies import CriticalBatchPolicy
from kfuse.policies.signals import Decision
from kfuse.train.lr_schedule import gain


def test_critical_batch_doubles_as_computed_by_hand() -> None:
    for factor, batch_size, noise, expected in [
        # B* = 1 * low = 128 does not exceed 2 * 64; 129 does, and 300 doubles once at a time.
        (1.0, 64, (128.0, 200.0, 300.0), None),
        (1.0, 64, (129.0, 200.0, 300.0), 128),
        (1.0, 64, (300.0, 400.0, 900.0), 128),
        # Half of B* is the noise scale: 0.5 * 250 = 125 is not enough, 0.5 * 260 = 130 is. Twice: 2 * 65 = 130.
        (0.5, 64, (250.0, 300.0, 400.0), None),
        (0.5, 64, (260.0, 300.0, 400.0), 128),
        (2.0, 64, (65.0, 70.0, 80.0), 128),
        # 512 doubles to batch.max = 1024; 520 would double beyond it, and stays.
        (1.0, 512, (5000.0, 6000.0, 7000.0), 1024),
        (1.0, 520, (5000.0, 6000.0, 7000.0), None),
        # It never shrinks.
        (1.0, 512, (1.0, 2.0, 3.0), None),
    ]:
        decided = CriticalBatchPolicy(factor).decide(signals(batch_size, noise))
        assert decided == (None if expected is None else Decision(batch_size=expected))


def test_critical_batch_goes_by_the_low_end_alone() -> None:
    assert CriticalBatchPolicy().decide(signals(64, noise_scale_low=129.0)) == Decision(batch_size=128)
    for unknown in (None, math.nan, math.inf):
        assert CriticalBatchPolicy().decide(signals(64, noise_scale_low=unknown)) is None


def test_critical_batch_follows_merrills_warmup_by_powers_of_two() -> None:
    """The critical batch size of OLMo 1B reaches 2048 and 4096; the authors begin with 1024, and end with 4096."""
    bounds, batch_size, sizes = replace(BOUNDS, batch_max=2**24), 1024, []
    for critical in (500, 1500, 2049, 3000, 4000, 4097, 8000):
        seen = signals(batch_size, noise_scale_low=float(critical), bounds=bounds)
        batch_size = (CriticalBatchPolicy().decide(seen) or Decision(batch_size)).batch_size or 0
        sizes.append(batch_size)
    assert sizes == [1024, 1024, 2048, 2048, 2048, 4096, 4096]
    # The rate with lr.scaling=sqrt, which the policy leaves to it: sqrt(2) at each doubling.
    assert [gain("sqrt", size, 1024) for size in (2048, 4096)] == pytest.approx([math.sqrt(2), 2.0])
