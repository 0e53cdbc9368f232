"""The times of a step: what policies see of them, the same on all workers; input-bound training is not grown."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import run_workers
from problems import network, problem
from torch import Tensor

import kfuse as kf
from kfuse.policies import SchedulePolicy
from kfuse.statistics.figures import StepContext
from kfuse.statistics.step_stats import StepStats
from kfuse.train.decisions import Decisions
from kfuse.train.load_balance import Waiting, is_input_bound, take_measured, waiting_after, waiting_fraction
from kfuse.train.lr_schedule import LRSchedule
from kfuse.train.policy_calls import PolicyCalls
from kfuse.train.progress import Progress
from kfuse.train.reporter import Reporter
from kfuse.train.settings import Settings
from kfuse.train.step import StepSamples


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


def test_with_pair_averaging_they_are_unknown() -> None:
    """Each worker makes steps of its own there, and its record is its own too."""
    plan = StepSamples(0, 0, np.arange(16), 4, 2).plan_alone(0, by_weight=False)
    assert plan.times == (0.0, 0.0) and plan.fisher is None


# -- input-bound -----------------------------------------------------------------------------------------------------


def after(steps: int, waits: float) -> Waiting:
    known: Waiting = (0.0, 0.0, 0)
    for _ in range(steps):
        known = waiting_after(known, 0.01, 0.01 * waits)
    return known


def test_the_part_of_the_time_is_known_after_some_steps() -> None:
    assert waiting_fraction(after(9, 0.7)) is None
    assert waiting_fraction(after(10, 0.7)) == pytest.approx(0.7)
    known = after(10, 0.7)
    assert waiting_after(known, None, None) == known


def test_the_mean_of_the_first_steps_is_plain_and_later_ones_count_a_twentieth() -> None:
    known = waiting_after(waiting_after((0.0, 0.0, 0), 1.0, 0.5), 3.0, 0.5)
    assert known == (2.0, 0.5, 2)
    time_s, wait_s, steps = waiting_after((1.0, 0.5, 100), 2.0, 0.0)
    assert (time_s, wait_s, steps) == pytest.approx((1.05, 0.475, 101))


def test_training_is_input_bound_from_one_half_and_until_below_two_fifths() -> None:
    for waits, before, bound in [
        (0.49, False, False),
        (0.51, False, True),
        (0.41, True, True),
        (0.39, True, False),
        (math.nan, True, False),
    ]:
        assert is_input_bound(after(20, waits), before) is bound


class Growing(kf.BasePolicy):
    """Asks for one more worker at each step."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        return kf.Decision(workers=signals.workers + 1)


class Named(Growing):
    grows_when_input_bound = True


class Session:
    """An elastic job's session; keeps what is requested of the supervisor."""

    def __init__(self) -> None:
        self.elastic, self.workers = True, [0, 1]
        self.group, self.control_client = SimpleNamespace(size=2, rank=0, links=None), None
        self.asked: list[int] = []

    def ask_supervisor(self, what: str, workers: int) -> None:
        self.asked.append(workers)


def deciding(policy: kf.BasePolicy, waits: Sequence[float]) -> tuple[list[int], list[tuple[int, dict[str, Any]]]]:
    """What is requested of the supervisor, and the events of refusals, in steps that wait so long for data."""
    session: Any = Session()
    settings = Settings.of({"batch_size": 16, "batch_micro": 4, "batch_max": 64}, workers_bounds=(1, 8))
    at, events = Progress(16), []
    reporter: Any = SimpleNamespace(event=lambda step, kind, **fields: events.append((step, kind, fields)))
    shared = {"session": session, "progress": at, "reporter": reporter, "settings": settings, "policy": policy}
    training: Any = SimpleNamespace(**shared, opt=None, schedule=LRSchedule())
    decisions = Decisions(training)
    calls = PolicyCalls(training, decisions)
    figures: dict[str, Any] = {"loss": None, "seconds": (0.01, 0.01), "votes": (0.0, 0.0)}
    context = StepContext(
        epoch=0,
        cursor=0,
        samples=16,
        lr=0.1,
        lr_scale=1.0,
        batch_size=16,
        workers=2,
        members=(0, 1),
        step_time_s=0.1,
        data_wait_s=0.0,
    )
    for step, wait_s in enumerate(waits):
        stats = StepStats(
            step=step,
            samples=16.0,
            micro_batches=4,
            unit="samples",
            skipped=False,
            previous_step_time_s=0.1,
            previous_data_wait_s=wait_s,
            **figures,
        )
        take_measured(training, stats, context)
        calls.decide(calls.signals(stats, context))
        decisions.workers_requested = 0
        at.step += 1
    return session.asked, [(step, fields) for step, kind, fields in events if kind == "input_bound"]


def test_input_bound_training_is_not_grown_and_it_is_said_once() -> None:
    asked, said = deciding(Growing(), [0.07] * 30)
    assert asked == [3] * 9  # while too few steps are measured
    assert said == [(9, {"workers": [2, 3], "waiting": pytest.approx(0.7)})]


def test_training_that_is_no_longer_input_bound_is_grown_and_said_anew() -> None:
    asked, said = deciding(Growing(), [0.07] * 20 + [0.0] * 60 + [0.09] * 60)
    # The mean falls by a twentieth a step: 0.7 x 0.95^11 = 0.398 is the first below 0.4, and from nearly 0 on
    # 0.9 (1 - 0.95^16) = 0.504 the first of one half.
    assert [step for step, _ in said] == [9, 95]
    assert len(asked) == 9 + (95 - 30)


def test_a_policy_of_given_worker_counts_is_not_held_back() -> None:
    asked, said = deciding(Named(), [0.07] * 30)
    assert asked == [3] * 30 and not said
    assert SchedulePolicy([]).grows_when_input_bound and not kf.BasePolicy.grows_when_input_bound


def test_fewer_workers_and_another_batch_size_are_granted() -> None:
    class Shrinking(kf.BasePolicy):
        def decide(self, signals: kf.Signals) -> kf.Decision | None:
            return kf.Decision(workers=1, batch_size=64)

    asked, said = deciding(Shrinking(), [0.07] * 30)
    assert asked == [1] * 30 and not said
