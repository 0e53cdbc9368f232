"""No schedule of the learning rate stops short or runs over, whatever the batch size does: its end is the run's end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import network, problem

import kfuse as kf
from kfuse.settings.tree import SETTINGS
from kfuse.train.evaluation import params_sha256
from kfuse.train.lr_schedule import BatchChange, LRSchedule, gain

SCALINGS, DECAYS = (SETTINGS[name].setting.choices for name in ("lr_scaling", "lr_decay"))

BASE = 16
GRAD_SQ, VARIANCE = 1.0, 64.0  # a noise scale of 64
CHANGES: dict[str, Callable[[int], int]] = {
    "never": lambda step: BASE,
    "up": lambda step: 128 if step >= 7 else BASE,
    "down": lambda step: 4 if step >= 7 else BASE,
    "late": lambda step: 64 if step >= 55 else BASE,
    "at first": lambda step: 64,
    "up and down": lambda step: (BASE, 64, 8, 24)[step // 5 % 4],
}
"""The batch size of each step."""
SAMPLES, STEPS = 1000.0, 60
"""The length of a run by its epochs, which is no multiple of a batch; and by its steps."""


class Sizes(kf.BasePolicy):
    """Asks for batch sizes: {step that is measured: samples}. Notes what each step had."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes, self.seen = dict(sizes), []
        self.seen: list[kf.Signals]

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.seen.append(signals)
        return kf.Decision(batch_size=self.sizes[signals.step]) if signals.step in self.sizes else None

    def state_dict(self) -> dict[str, Any]:
        return {}


def decayed(decay: str, done: float, start: float) -> float:
    """The decay by its formula. start: the part of the run at which it begins."""
    part = max(0.0, (done - start) / (1 - start))
    formulas = {"cosine": 0.5 + 0.5 * math.cos(math.pi * part), "linear": 1 - part, "wsd": 1 - math.sqrt(part)}
    return formulas.get(decay, 1.0)


@dataclass
class Run:
    """A run of a schedule, driven as the trainer drives it, with figures of each step and of its end."""

    schedule: LRSchedule
    sizes: Callable[[int], int]
    by_steps: bool
    done: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    samples: int = 0
    progress: float = 0.0

    def __post_init__(self) -> None:
        schedule, change, before = self.schedule, None, BASE
        statistics = (GRAD_SQ, VARIANCE)
        for step in itertools.count():
            if self._counted(step) >= STEPS if self.by_steps else self.samples >= SAMPLES:
                break
            assert step < 10_000
            size = self.sizes(step)
            if size != before:
                change = BatchChange(self.progress, schedule.gain(self.progress, before, *statistics, change))
                before = size
            used = size if self.by_steps else min(size, int(SAMPLES) - self.samples)
            self.done.append(schedule.done(self._counted(step), self.samples))
            self.factors.append(schedule.factor(self.progress, self.done[-1], size, 1.0, *statistics, change))
            self.gains.append(schedule.gain(self.progress, size, *statistics, change))
            self.progress = schedule.advance(self.progress, used, size, *statistics, change)
            self.samples += used

    def _counted(self, steps: int) -> float:
        return self.progress if self.schedule.scaling == "adascale" else steps


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_pair_ends_with_the_run(scaling: str) -> None:
    tried = 0
    for decay, by_steps, (name, sizes), warmup, change_warmup in itertools.product(
        DECAYS, [True, False], CHANGES.items(), [0.0, 6.0], [0.0, 12.0]
    ):
        tried += 1
        length: dict[str, Any] = {"steps": STEPS} if by_steps else {"samples": SAMPLES}
        options: dict[str, Any] = {"decay_fraction": 0.25, "change_warmup_steps": change_warmup, **length}
        schedule = LRSchedule(scaling, warmup, decay, BASE, **options)
        run, what = Run(schedule, sizes, by_steps), (by_steps, name, warmup, change_warmup)
        start = 0.75 if decay == "wsd" else warmup / (STEPS if by_steps else SAMPLES / BASE)
        decays = [decayed(decay, done, start) for done in run.done]
        # Until its last step the decay is above 0: it has not stopped short.
        assert min(decays) > 0 and min(run.factors) > 0, what
        # After it, it is at its end, and the run over: it does not run over.
        steps = run.progress if scaling == "adascale" else len(run.done)
        assert schedule.done(steps, run.samples) == 1, what
        end = schedule.factor(run.progress, 1.0, sizes(len(run.done)), 1.0, GRAD_SQ, VARIANCE)
        goal = gain(scaling, sizes(len(run.done)), BASE, GRAD_SQ, VARIANCE)
        assert end == pytest.approx(goal if decay in ("none", "constant") else 0.0, abs=1e-12), what
        # The last step had all of the way but its own.
        if by_steps:
            last = run.gains[-1] if scaling == "adascale" else 1
            left = (1 - run.done[-1]) * STEPS
            assert 0 < left <= last + 1e-9, what
        else:
            assert 0 < (1 - run.done[-1]) * SAMPLES <= sizes(len(run.done) - 1) + 1e-9, what
        # In between it is what the formulas give: warm-up and decay by their own, times the gain.
        progress = 0.0
        sizes_used = map(sizes, range(len(run.done)))
        for done, factor, scale, size in zip(run.done, run.factors, run.gains, sizes_used, strict=True):
            warm = min(1.0, (progress + 1) / warmup) if warmup else 1.0
            assert factor == pytest.approx(min(warm, decayed(decay, done, start)) * scale, rel=1e-9), what
            progress += scale if scaling == "adascale" else size / BASE
        if not change_warmup:
            goals = [gain(scaling, sizes(step), BASE, GRAD_SQ, VARIANCE) for step in range(len(run.done))]
            assert run.gains == goals, what
    assert tried == len(DECAYS) * 2 * len(CHANGES) * 2 * 2


REAL = [
    (decay, SCALINGS[number % 4], by_steps, name, number % 3 == 0)
    for number, (decay, by_steps, name) in enumerate(
        itertools.product(["cosine", "linear", "wsd"], [True, False], ["up", "down", "late"])
    )
    if number % 2 == 0 or name == "late"
]


@pytest.mark.parametrize(("decay", "scaling", "by_steps", "change", "warms_up"), REAL)
def test_a_training_ends_where_its_schedule_does(
    decay: Any, scaling: Any, by_steps: bool, change: str, warms_up: bool
) -> None:
    """Each step's rate, as recorded, is that of the formulas; the first rate that would be 0 is that after the end."""
    sizes = {"up": {2: 64}, "down": {2: 4}, "late": {15: 48}}[change]
    length: dict[str, Any] = {"train_steps": 24} if by_steps else {"train_epochs": 2}
    net, policy, epoch = network(), Sizes(sizes), 200
    warmup = 4 if warms_up else 0
    options: dict[str, Any] = {"lr_warmup_steps": warmup, "lr_change_warmup_steps": 8 if warms_up else 0}
    kf.fit(
        net,
        problem(epoch),
        kf.FusedSGD(net.parameters(), lr=0.5),
        kf.Hook(policy),
        batch_size=BASE,
        batch_micro=2,
        lr_scaling=scaling,
        lr_decay=decay,
        **length,
        **options,
    )
    total = 24 if by_steps else 2 * epoch / BASE
    start = 0.9 if decay == "wsd" else warmup / total
    progress, samples, done, gains = 0.0, 0, [], []
    for step, seen in enumerate(policy.seen):
        counted = progress if scaling == "adascale" else step
        done.append(counted / 24 if by_steps else samples / (2 * epoch))
        warm = min(1.0, (progress + 1) / warmup) if warmup else 1.0
        gains.append(seen.lr / 0.5 / min(warm, decayed(decay, done[-1], start)))
        used, samples = seen.samples - samples, seen.samples
        progress += gains[-1] if scaling == "adascale" else used / BASE
        k = seen.batch_size / BASE
        low, high = {"none": (1, 1), "linear": (k, k), "sqrt": (k**0.5, k**0.5)}.get(scaling, (min(1, k), max(1, k)))
        if not warms_up:
            assert low - 1e-9 <= gains[-1] <= high + 1e-9, step
        assert seen.lr > 0
    assert {seen.batch_size for seen in policy.seen} == {BASE, *sizes.values()}
    assert [seen.done for seen in policy.seen] == pytest.approx([*done[1:], 1.0])  # what policies see
    if not by_steps:
        assert samples == 2 * epoch and done[-1] < 1
    elif scaling == "adascale":  # it ends with the first step that reaches the planned count
        assert progress - gains[-1] < 24 <= progress + 1e-9
    else:
        assert len(policy.seen) == 24


def test_adascales_steps_are_those_of_the_base_batch() -> None:
    """At the base batch size as many as planned, also where epochs end with smaller steps; at 4 times it fewer."""

    def train(scaling: Any, sizes: dict[int, int], **options: Any) -> tuple[dict[str, Any], Sizes]:
        net, policy = network(), Sizes(sizes)
        torch.manual_seed(0)
        data = (problem(72)[0], torch.randint(0, 3, (72,)))  # noise: large batches pay
        opt = kf.FusedSGD(net.parameters(), lr=0.05)
        summary = kf.fit(
            net, data, opt, kf.Hook(policy), train_steps=60, batch_size=16, batch_micro=2, lr_scaling=scaling, **options
        )
        assert summary is not None and summary["exit_reason"] == "steps"
        return summary, policy

    assert train("adascale", {})[0]["steps"] == train("linear", {})[0]["steps"] == 60
    summary, policy = train("adascale", {0: 64})
    gains = [seen.lr / 0.05 for seen in policy.seen]
    assert gains[:4] == [1.0] * 4 and max(gains) <= 4
    assert sum(gains[:-1]) < 60 <= sum(gains) + 1e-9
    assert 15 < summary["steps"] < 60  # between 60 / 4 and 60
    assert train("linear", {0: 64})[0]["steps"] == 60


def test_fairscales_figures() -> None:
    """Micro-batches with the gradients 1, 3, 2 and 6, four times the base batch. fairscale 0.4's adascale.py has

    grad_var = 50 * (4 / 4) / 3 - 9 * 4 / 3 = 4.6667,  grad_sqr = 9 - grad_var / 4 = 7.8333,  gain = 12.5 / 9
    """
    w = torch.nn.Parameter(torch.zeros(()))
    opt = kf.FusedSGD([w], lr=0.0)
    for j, slope in enumerate((1.0, 3.0, 2.0, 6.0)):
        with opt.micro_batch(samples=8, last=j == 3):
            (w * slope).backward()
    opt.step()
    assert opt.stats is not None and opt.stats.grad_variance is not None
    assert opt.stats.grad_variance / 8 == pytest.approx(14 / 3, rel=1e-6)
    assert opt.stats.grad_sq == pytest.approx(47 / 6, rel=1e-6)
    assert gain("adascale", 32, 8, opt.stats.grad_sq, opt.stats.grad_variance) == pytest.approx(12.5 / 9, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "grad_var", "grad_sqr", "expected"),
    [(1, 3.0, 1.0, 1.0), (2, 2.0, 1.0, 1.5), (8, 4.0, 1.0, 10 / 3), (32, 4.0, 0.0, 32.0), (32, 0.0, 4.0, 1.0)],
)
def test_the_gain_is_fairscales(scale: int, grad_var: float, grad_sqr: float, expected: float) -> None:
    """(grad_var + grad_sqr) / (grad_var / scale + grad_sqr), whose grad_var is of the base batch's mean gradient."""
    assert gain("adascale", 16 * scale, 16, grad_sqr, 16 * grad_var) == pytest.approx(expected, rel=1e-12)


def test_decision_table_of_the_warm_up_after_a_change() -> None:
    """From a base batch of 16, linear scaling, 8 base steps of warm-up. The batch grows to 64 at progress 10."""
    schedule = LRSchedule("linear", base_batch_size=16, change_warmup_steps=8)
    change = BatchChange(10.0, 1.0)
    gains = [schedule.gain(10.0 + 4 * step, 64, change=change) for step in range(4)]  # a step of 64 counts 4
    assert gains == pytest.approx([1 + 3 * 1 / 8, 1 + 3 * 5 / 8, 4.0, 4.0])
    # To 128 during that warm-up: from where it is.
    again = BatchChange(14.0, schedule.gain(14.0, 64, change=change))
    gains = [schedule.gain(14.0 + 8 * step, 128, change=again) for step in range(2)]
    assert gains == pytest.approx([2.875 + (8 - 2.875) / 8, 8.0])
    # Back to 16: at once.
    assert schedule.gain(14.0, 16, change=again) == 1.0


def test_the_warm_up_after_a_change_takes_as_many_samples_at_any_batch_size() -> None:
    for size in (32, 64, 256):
        schedule, progress, samples = LRSchedule("sqrt", base_batch_size=16, change_warmup_steps=64), 5.0, 0
        while schedule.gain(progress, size, change=BatchChange(5.0, 1.0)) < math.sqrt(size / 16):
            progress, samples = schedule.advance(progress, size, size), samples + size
        assert abs(samples - 64 * 16) <= size


def test_a_training_warms_up_after_each_change_that_raises_the_rate() -> None:
    net, policy = network(), Sizes({2: 64, 20: 16})
    opt = kf.FusedSGD(net.parameters(), lr=0.01)
    options: dict[str, Any] = {"train_steps": 30, "batch_size": 16, "batch_micro": 2, "lr_scaling": "linear"}
    kf.fit(net, problem(4096), opt, kf.Hook(policy), lr_change_warmup_steps=20, **options)
    gains = [seen.lr / 0.01 for seen in policy.seen]
    rising = [1 + 3 * min(1.0, (4 * step + 1) / 20) for step in range(18)]
    assert gains == pytest.approx([1.0] * 6 + rising + [1.0] * 6)


@pytest.mark.parametrize("at", [7, 20])
def test_a_training_resumed_in_the_warm_up_after_a_change_has_the_same_bits(at: int, tmp_path: Path) -> None:
    def train(steps: int, **where: Any) -> str:
        net = network()
        opt = kf.FusedAdamW(net.parameters(), lr=0.01)
        options: dict[str, Any] = {"lr_change_warmup_steps": 100, "batch_micro": 2, "batch_size": 8, "batch_max": 64}
        kf.fit(net, problem(4096), opt, kf.Hook(Sizes({2: 64, 12: 16})), train_steps=steps, **options, **where)
        return params_sha256(net)

    whole = train(30)
    train(at, checkpoint_dir=tmp_path, train_save_model=False)
    assert train(30, checkpoint_dir=tmp_path, checkpoint_resume="auto", train_save_model=False) == whole
