"""The times of a step: what policies see of them, the same on all workers."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from distributed import run_workers
from problems import network, problem
from torch import Tensor

import kfuse as kf
from kfuse.statistics.figures import StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train.reporter import Reporter


class Doubling(kf.BasePolicy):
    """Keeps the signals; doubles the batch size once."""

    def __init__(self) -> None:
        self.seen: list[kf.Signals] = []

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append(signals)
        return kf.Decision(batch_size=32) if signals.step == 8 else None


class Slow:
    """A map-style data set that takes a while."""

    def __init__(self, x: Tensor, y: Tensor, wait_s: float) -> None:
        self.pairs, self.wait_s = list(zip(x, y.tolist(), strict=True)), wait_s

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.wait_s)
        return self.pairs[index]


def trained(sync: str, wait_s: float) -> tuple[list[kf.Signals], dict[int, StepContext]]:
    """What the policy saw, and the steps' settings and times on this worker."""
    contexts: dict[int, StepContext] = {}
    report = Reporter.step

    def step(self: Reporter, stats: StepStats, context: StepContext, signals: kf.Signals, samples: Any) -> None:
        contexts[stats.step] = context
        report(self, stats, context, signals, samples)

    Reporter.step = step  # type: ignore[method-assign]
    kf.init(comm_sync=sync)
    net, policy = network(), Doubling()
    x, y = problem(72)  # the last step of an epoch is shorter
    opt = kf.FusedAdamW(net.parameters())
    kf.fit(net, Slow(x, y, wait_s), opt, kf.Hook(policy), batch_size=16, train_epochs=6)
    return policy.seen, contexts


@pytest.mark.parametrize("sync", ["ssgd", "local:3"])
def test_all_workers_see_the_leaders_times_of_the_step_before(sync: str) -> None:
    results = run_workers(2, trained, sync, 0.0002)
    seen, contexts = results[0]
    assert repr(seen) == repr(results[1][0])
    assert [signals.step for signals in seen] == list(range(len(seen)))
    known = 0
    for before, signals in pairwise(seen):
        context = contexts[before.step]
        is_full = before.samples - (seen[before.step - 1].samples if before.step else 0) == before.batch_size
        if is_full and (before.batch_size, before.workers) == (signals.batch_size, signals.workers):
            assert signals.previous_step_time_s == context.step_time_s == float(np.float32(context.step_time_s)) > 0
            assert signals.previous_data_wait_s == context.data_wait_s and 0 < context.data_wait_s < context.step_time_s
            known += 1
        else:
            assert signals.previous_step_time_s is None and signals.previous_data_wait_s is None
    assert seen[0].previous_step_time_s is None
    assert {signals.batch_size for signals in seen} == {16, 32}
    # A part of the steps: not the first one, the last of an epoch, and the last one before the batch size changed.
    assert 0 < known < len(seen) - 5
