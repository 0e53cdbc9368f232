"""The learning rate is scaled, warmed up and decayed as configured; its schedule ends with the run, whatever the batch
size does.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Seen, network, problem, relative

import kfuse as kf
from kfuse.session import reset
from kfuse.settings.tree import AT_SHELL
from kfuse.train.learning_rate import LRSchedule, gain

batch = st.integers(1, 1 << 20)
moment = st.one_of(st.none(), st.floats(-1e12, 1e12))


@pytest.mark.parametrize(
    ("scaling", "sizes", "statistics", "expected"),
    [
        ("none", (512, 128), (), 1.0),
        ("linear", (512, 128), (), 4.0),
        ("sqrt", (512, 128), (), 2.0),
        ("adascale", (512, 128), (1.0, 256.0), 2.0),  # sigma2 = 256 / 128, mu2 = 1, s = 4: (2 + 1) / (2 / 4 + 1)
        ("adascale", (512, 128), (1.0, 0.0), 1.0),
        ("adascale", (512, 128), (1.0, -5.0), 1.0),
        ("adascale", (512, 128), (-0.5, 3.0), 4.0),
        ("adascale", (128, 128), (1.0, 3.0), 1.0),
        ("adascale", (512, 128), (), 1.0),  # cautious while the statistics are unknown
        ("adascale", (32, 128), (1.0,), 0.25),
        ("adascale", (32, 128), (-1.0, 0.0), 0.25),
        # fairscale's (grad_var + grad_sqr) / (grad_var / scale + grad_sqr); its grad_var is of the base batch's mean
        ("adascale", (32, 16), (1.0, 16 * 2.0), 1.5),
        ("adascale", (8 * 16, 16), (1.0, 16 * 4.0), 10 / 3),
        ("adascale", (32 * 16, 16), (0.0, 16 * 4.0), 32.0),
    ],
)
def test_gain_by_rule(scaling: str, sizes: tuple[int, int], statistics: tuple[float, ...], expected: float) -> None:
    assert gain(scaling, *sizes, *statistics) == pytest.approx(expected, rel=1e-12)


@given(batch, batch, moment, moment)
def test_adascale_lies_between_one_and_the_ratio(
    batch_size: int, base: int, grad_sq: float | None, variance: float | None
) -> None:
    r = gain("adascale", batch_size, base, grad_sq, variance)
    assert min(1.0, batch_size / base) <= r <= max(1.0, batch_size / base)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"warmup_steps": 4}, (0, 1, 2, 3, 4, 5), [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"steps": 40}, (0, 20, 40), [1, 1, 1]),
        ({"decay": "constant", "steps": 40}, (0, 20, 40), [1, 1, 1]),
        ({"decay": "linear", "steps": 40}, (0, 10, 20, 30, 40), [1, 0.75, 0.5, 0.25, 0]),
        ({"decay": "cosine", "steps": 40}, (0, 10, 20, 40, 10**6), [1, (1 + math.sqrt(0.5)) / 2, 0.5, 0, 0]),
        ({"decay": "cosine", "steps": 110, "warmup_steps": 10}, (4, 10, 60, 110), [0.5, 1, 0.5, 0]),
        ({"decay": "wsd", "steps": 40, "decay_fraction": 0.5}, (0, 20, 30, 40), [1, 1, 1 - math.sqrt(0.5), 0]),
        ({"decay": "wsd", "steps": 40, "decay_fraction": 1.0}, (0, 10, 40), [1, 0.5, 0]),
        ({"decay": "wsd", "steps": 40, "decay_fraction": 0.01}, (0, 30, 40), [1, 1, 0]),
    ],
)
def test_warm_up_and_decays_have_known_values(options: Any, steps: tuple[int, ...], expected: list[float]) -> None:
    schedule = LRSchedule(**options)
    found = [schedule.shape(step, schedule.done(step, step)) for step in steps]
    assert found == pytest.approx(expected, abs=1e-12)


@given(
    sizes=st.lists(st.integers(1, 512), min_size=2, max_size=40),
    scaling=st.sampled_from(AT_SHELL["lr.scaling"].setting.choices),
    decay=st.sampled_from(["cosine", "linear", "wsd"]),
    by_steps=st.booleans(),
    warmup=st.floats(0, 0.5),
)
def test_a_decay_ends_with_the_run_whatever_the_batch_does(
    sizes: list[int], scaling: str, decay: Any, by_steps: bool, warmup: float
) -> None:
    """It falls steadily, is above zero at each step, and zero after the last one: in epochs as in steps."""
    length: dict[str, Any] = {"steps": len(sizes)} if by_steps else {"samples": sum(sizes)}
    total = len(sizes) if by_steps else sum(sizes) / sizes[0]
    schedule = LRSchedule(scaling, warmup * total, decay, sizes[0], decay_fraction=0.5, **length)
    progress, samples, decays = 0.0, 0, []
    for step, size in enumerate(sizes):
        plain = LRSchedule("none", 0, decay, sizes[0], decay_fraction=0.5, **length)
        decays.append(plain.shape(progress, schedule.done(step, samples)))
        progress += schedule.gain(size, 1.0, 50.0) if scaling == "adascale" else size / sizes[0]
        samples += size
    assert all(before >= after > 0 for before, after in itertools.pairwise(decays))
    assert schedule.done(len(sizes), samples) == 1.0
    assert schedule.shape(progress, 1.0) == pytest.approx(0.0, abs=1e-12)


# -- in a training ----------------------------------------------------------------------------------------------------

BASE = 16


def decayed(decay: str, done: float, start: float) -> float:
    """The decay by its formula. start: the part of the run at which it begins."""
    part = max(0.0, (done - start) / (1 - start))
    formulas = {"cosine": 0.5 + 0.5 * math.cos(math.pi * part), "linear": 1 - part, "wsd": 1 - math.sqrt(part)}
    return formulas[decay]


@pytest.mark.parametrize(
    ("decay", "scaling", "by_steps", "sizes", "warmup"),
    [
        ("cosine", "none", True, {2: 64}, 0),
        ("cosine", "sqrt", False, {15: 48}, 4),
        ("linear", "linear", True, {2: 4}, 4),
        ("linear", "adascale", False, {2: 64}, 0),
        ("wsd", "adascale", True, {15: 48}, 0),
        ("wsd", "linear", False, {2: 4}, 0),
    ],
)
def test_a_training_ends_where_its_schedule_does(
    decay: Any, scaling: Any, by_steps: bool, sizes: dict[int, int], warmup: int
) -> None:
    """Each step's rate, as recorded, is that of the formulas; the first rate that would be 0 is that after the end."""
    length: Any = {"steps": 24} if by_steps else {"epochs": 2}
    policy = Seen({step: kf.Decision(batch_size=size) for step, size in sizes.items()})
    net, epoch = network(), 200
    opt = kf.FusedSGD(net.parameters(), lr=0.5)
    given: Any = {"lr_scaling": scaling, "lr_decay": decay, "lr_warmup_steps": warmup, **length}
    kf.fit(net, problem(epoch), opt, policy, batch_size=BASE, micro_batch=2, **given)
    start = 0.9 if decay == "wsd" else warmup / (24 if by_steps else 2 * epoch / BASE)
    progress, samples, done, gains = 0.0, 0, [], []
    for step, seen in enumerate(policy.signals):
        done.append((progress if scaling == "adascale" else step) / 24 if by_steps else samples / (2 * epoch))
        warm = min(1.0, (progress + 1) / warmup) if warmup else 1.0
        gains.append(seen.lr / 0.5 / min(warm, decayed(decay, done[-1], start)))
        used, samples = seen.samples - samples, seen.samples
        progress += gains[-1] if scaling == "adascale" else used / BASE
        k = seen.batch_size / BASE
        low, high = {"none": (1, 1), "linear": (k, k), "sqrt": (k**0.5, k**0.5)}.get(scaling, (min(1, k), max(1, k)))
        assert low - 1e-9 <= gains[-1] <= high + 1e-9, step
        assert seen.lr > 0
    assert {seen.batch_size for seen in policy.signals} == {BASE, *sizes.values()}
    assert [seen.done for seen in policy.signals] == pytest.approx([*done[1:], 1.0])  # what policies see
    if not by_steps:
        assert samples == 2 * epoch and done[-1] < 1
    elif scaling == "adascale":  # it ends with the first step that reaches the planned count
        assert progress - gains[-1] < 24 <= progress + 1e-9
    else:
        assert len(policy.signals) == 24


def test_adams_betas_follow_the_batch_where_the_rate_follows_its_root() -> None:
    """An update counts as its batch over the first one, and the two implementations of AdamW stay near each other."""
    weights = []
    for scaling, make in (("linear", kf.FusedAdamW), ("sqrt", kf.FusedAdamW), ("sqrt", torch.optim.AdamW)):
        reset()
        net = network()
        made = make(net.parameters(), lr=0.01)
        opt = made if isinstance(made, kf.FusedAdamW) else kf.Optimizer(made)
        policy = Seen({2: kf.Decision(batch_size=2 * BASE), 8: kf.Decision(batch_size=BASE // 2)})
        summary = kf.fit(net, problem(256), opt, policy, batch_size=BASE, micro_batch=4, lr_scaling=scaling, epochs=2)
        assert len({seen.batch_size for seen in policy.signals}) == 3
        counted = 2 * 256 / BASE if scaling == "sqrt" else summary["steps"]
        assert {state["step"].item() for state in opt.state.values()} == {counted}
        assert opt.batch_factor == 1 and opt.param_groups[0]["betas"] == (0.9, 0.999)
        weights.append(list(net.parameters()))
    assert relative(weights[1], weights[2]) < 1e-5
