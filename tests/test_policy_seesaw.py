"""Seesaw against figures computed by hand, the authors' milestones, and exact linear regression."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_signals import BOUNDS, signals

import kfuse as kf
from kfuse.policies import SeesawPolicy
from kfuse.policies.signals import Decision, Signals
from kfuse.train.lr_schedule import gain

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HALVES = SeesawPolicy(cut=2)


def at(done: float | None, batch_size: int = 32, **changes: Any) -> Signals:
    """A step of a run that began with 32 samples a step, when `done` of it is over."""
    return signals(batch_size, done=done, base_batch_size=changes.pop("base_batch_size", 32), **changes)


def test_seesaw_cuts_as_computed_by_hand() -> None:
    for policy, done, expected in [
        # (1 + cos(pi d)) / 2: 0.516 at 0.49, 0.5 at 0.5, 0.25 at 2/3.
        (HALVES, 0.49, None),
        (HALVES, 0.5, Decision(batch_size=64, lr_scale=0.5)),
        (HALVES, 2 / 3, Decision(batch_size=128, lr_scale=0.25)),
        # cos(pi d / 2): 0.707 at 0.5, 0.5 at 2/3.
        (SeesawPolicy(2, "quarter_cosine"), 0.5, None),
        (SeesawPolicy(2, "quarter_cosine"), 2 / 3, Decision(batch_size=64, lr_scale=0.5)),
        # 0.9045 at 0.2 is below 1 / 1.1 and above 1 / 1.21; 32 * 1.1 = 35.2 is still four micro-batches of 8.
        (SeesawPolicy(), 0.2, Decision(lr_scale=1 / 1.1)),
        # 0.6545 at 0.4: 4.45, four cuts; 32 * 1.4641 = 46.85, five micro-batches.
        (SeesawPolicy(), 0.4, Decision(batch_size=40, lr_scale=1 / 1.4641)),
    ]:
        decided = policy.decide(at(done))
        if expected is None or decided is None:
            assert decided == expected
        else:
            assert decided.batch_size == expected.batch_size
            assert decided.lr_scale == pytest.approx(expected.lr_scale)
    # A first batch that is not of whole micro-batches stays until the first cut.
    assert HALVES.decide(at(0.1, 20, base_batch_size=20)) is None
    assert HALVES.decide(at(0.5, 20, base_batch_size=20)) == Decision(batch_size=40, lr_scale=0.5)
    assert SeesawPolicy(cut=3).decide(at(0.7, 96, lr_scale=float(np.float32(1 / 3)))) is None, "1/3 is rounded"


def test_seesaw_cuts_where_the_authors_do() -> None:
    """Their StepCosineHalfWithWarmup.get_decay_tokens (olmo/optim.py), with alpha_f=0, no warm-up and 10,000 tokens.

    Its k-th milestone is round(10,000 acos(2 f^k - 1) / pi) with f = lr_decay_factor.
    """
    theirs = {2.0: [5000, 6667, 7699, 8391], 1.1: [1950, 2736, 3324, 3807]}
    for cut, milestones in theirs.items():
        left = [SeesawPolicy(cut).left(token / 10_000) for token in range(10_000)]
        ours = [next(t for t, c in enumerate(left) if c < cut ** (0.5 - k)) for k in range(1, 5)]
        assert all(abs(a - b) <= 1 for a, b in zip(ours, milestones, strict=True)), (cut, ours)


def test_seesaw_cuts_the_rate_in_full_where_the_batch_cannot_grow() -> None:
    """batch.max = 100 is 96 in micro-batches of 8, three times 32: c = 1/8, so that the rate is sqrt(3) / 8."""
    decided = HALVES.decide(at(0.77, bounds=replace(BOUNDS, batch_max=100)))
    assert decided == Decision(batch_size=96, lr_scale=0.125)
    assert 0.125 * gain("sqrt", 96, 32) == pytest.approx(0.21650635)
    assert 0.125 * gain("sqrt", 256, 32) == pytest.approx(math.sqrt(0.125))  # the root of the cut, with room
    assert 0.125 * gain("linear", 256, 32) == 1.0  # for SGD, the batch in place of the rate


def test_seesaw_saves_the_steps_of_the_lemma() -> None:
    """For small cuts and fine batches its steps are the integral of the curve: of a quarter cosine, 1 - 2/pi saved."""
    for curve, integral in [("cosine", 1 / 2), ("quarter_cosine", 2 / math.pi)]:
        policy = SeesawPolicy(1.0005, curve)
        left = [policy.left((k + 0.5) / 20_000) for k in range(20_000)]
        assert float(np.mean(left)) == pytest.approx(integral, abs=5e-4)


def test_seesaw_has_the_risk_of_the_decay_on_linear_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact recursion of benchmarks/seesaw.py, at a rate that curvature does not limit, as the theorem asks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import seesaw

    curve, policy, samples, base = seesaw.CURVES["quarter_cosine"], SeesawPolicy(1.01, "quarter_cosine"), 2**18, 64
    for optimizer, lr in [("normalised SGD", 0.0884), ("SGD", 0.25)]:
        scaling = seesaw.SCALING[optimizer]
        decay = seesaw.train(optimizer, samples, base, lr, lambda done, batch, scale: curve(done))
        rate = partial(lambda scaling, done, batch, scale: scale * gain(scaling, batch, base), scaling)
        found = seesaw.train(optimizer, samples, base, lr, rate, policy, 2**24)
        assert decay.steps == 4096
        assert found.steps / decay.steps == pytest.approx(2 / math.pi, abs=0.015)
        assert found.risk / decay.risk == pytest.approx(1, abs=0.05)


class Watched(SeesawPolicy):
    """Keeps the signals."""

    def __init__(self) -> None:
        super().__init__(cut=2)
        self.seen: list[Signals] = []

    def decide(self, signals: Signals) -> Decision | None:
        self.seen.append(signals)
        return super().decide(signals)


def train(policy: kf.BasePolicy, **options: Any) -> dict[str, Any] | None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    opt = kf.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.randn(800, 3), torch.randint(0, 2, (800,))
    return kf.fit(model, data, opt, kf.Hook(policy), batch_size=8, batch_micro=2, **options)


def test_seesaw_trains_the_same_samples_in_fewer_steps() -> None:
    policy = Watched()
    result = train(policy, train_epochs=2)
    assert result is not None and result["samples"] == 1600
    # In the limit half of 200 steps; cuts that come when the curve has fallen by half cost up to twice as many.
    assert 100 < result["steps"] < 150
    sizes = [seen.batch_size for seen in policy.seen]
    assert sizes == sorted(sizes) and sizes[0] == 8 and {16, 32, 64} < set(sizes)
    for seen in policy.seen:
        assert seen.done == seen.samples / 1600 and seen.base_batch_size == 8
        assert seen.lr == pytest.approx(0.1 * seen.lr_scale * math.sqrt(seen.batch_size / 8))
    first = next(seen for seen in policy.seen if seen.lr_scale == 0.5)
    assert (first.batch_size, first.samples - first.batch_size) == (16, 824)  # half of the samples, and three steps on


def test_seesaw_goes_by_steps_where_they_end_the_run() -> None:
    policy = Watched()
    result = train(policy, train_steps=50)
    assert result is not None and result["steps"] == 50 and result["samples"] > 400
    assert [seen.done for seen in policy.seen] == [(seen.step + 1) / 50 for seen in policy.seen]
