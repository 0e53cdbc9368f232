"""What a step on a GPU costs the host, in numbers that no machine's speed moves: launches and Python's calls.

`benchmarks/fixed_cost.py` has the time. A bound is a few calls above what is counted now: who needs more raises it, and
says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from gpu.host_stub import BUCKET_MB, gpt_steps, no_gpu

import kfuse as kf
from kfuse.kernels import dispatch

pytestmark = pytest.mark.skipif(dispatch.INTERPRETED, reason="the interpreter has no driver")


def calls_of(steps: Callable[[int], None]) -> int:
    """Python's calls in a step, all of them."""
    count = 0

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        steps(1)
    finally:
        sys.setprofile(before)
    return count


def test_launches_and_calls_of_a_step() -> None:
    """Of a GPT of 148 tensors in 16 buckets, 2 micro-batches, one worker; calls beside those of the model."""
    kf.init(comm_bucket_mb=BUCKET_MB)

    def without(params: Any, lr: float) -> Any:
        params = list(params)
        return SimpleNamespace(step=lambda: None, zero_grad=lambda: [setattr(p, "grad", None) for p in params])

    with no_gpu() as launched:
        steps, model = gpt_steps(kf.FusedAdamW), gpt_steps(without)
        for each in (steps, model):
            each(3)
        launched.clear()
        calls = calls_of(steps) - calls_of(model)
    assert len(launched) <= 67
    assert calls <= 4100
