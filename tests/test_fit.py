"""`kf.fit` trains users' models on users' data by users' policies, on one worker and on several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import read_lines
from problems import Seen, network, problem
from torch.utils.data import TensorDataset

import kfuse as kf
from kfuse.data import Dataset
from kfuse.session import reset


@pytest.mark.parametrize("wrap", [TensorDataset, lambda x, y: list(zip(x, y.tolist(), strict=True))])
def test_trains_on_what_users_have(wrap: Any) -> None:
    x, y = problem()
    net = network()
    before = F.cross_entropy(net(x), y).item()
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    summary = kf.fit(net, wrap(x, y), opt, epochs=15, batch_size=16, heldout=(x, y))
    assert summary is not None
    after = F.cross_entropy(net(x), y).item()
    assert after < before / 2
    assert summary["heldout_loss"] == pytest.approx(after, rel=1e-4)
    assert summary["heldout_accuracy"] == (net(x).argmax(1) == y).float().mean().item() > 0.8
    names = "steps", "epochs", "samples", "workers", "batch_size", "exit_reason"
    assert [summary[name] for name in names] == [60, 15, 960, 1, 16, "epochs"]


def test_hooks_run_in_order_and_every_step_is_decided_upon_once() -> None:
    class Hooks(Seen):
        pass

    calls: list[str] = []
    for part in ("train", "epoch", "step"):
        for name in (f"before_{part}", f"after_{part}"):
            setattr(Hooks, name, lambda _, name=name: calls.append(name))
    policy, net = Hooks(), network()
    given: Any = {"epochs": 2, "batch_size": 8, "micro_batch": 3}
    kf.fit(net, problem(20), kf.FusedSGD(net.parameters()), policy, **given)
    step = ["before_step", "after_step"]
    epoch = ["before_epoch", *step, *step, *step, "after_epoch"]
    assert calls == ["before_train", *epoch, *epoch, "after_train"]
    assert [s.step for s in policy.signals] == [0, 1, 2, 3, 4, 5]
    assert [s.epoch for s in policy.signals] == [0, 0, 0, 1, 1, 1]
    assert [s.samples for s in policy.signals] == [8, 16, 20, 28, 36, 40]
    assert [s.micro_batches for s in policy.signals] == [3, 3, 2] * 2
    assert all(s.loss is not None and s.grad_variance is not None and s.grad_norm is not None for s in policy.signals)
    assert {s.batch_size for s in policy.signals} == {8} and {s.micro_batch for s in policy.signals} == {3}


class Orders(Seen):
    """Calls verbs after given steps, each with its value; notes what was in force in each step."""

    def __init__(self, orders: dict[int, Any], leader_only: bool = False) -> None:
        super().__init__()
        self.orders, self.leader_only, self.step = orders, leader_only, 0

    @property
    def seen(self) -> list[tuple[int, float]]:
        return [(signals.batch_size, signals.lr) for signals in self.signals]

    def after_step(self) -> None:
        if kf.rank() == 0 or not self.leader_only:
            for verb, value in self.orders.get(self.step, ()):
                getattr(kf, verb)(value)
        self.step += 1


def train(policy: kf.BasePolicy, lr: float = 0.1, samples: int = 64, **arguments: Any) -> Any:
    net = network()
    return kf.fit(net, problem(samples), kf.FusedSGD(net.parameters(), lr=lr), policy, **arguments)


class Initial(Seen):
    def initial(self) -> kf.Decision:
        return kf.Decision(batch_size=8)


def begin(run_dir: str) -> None:
    train(Initial(), batch_size=4, steps=3, epochs=None, run_dir=run_dir)


def test_what_a_policy_begins_with_is_recorded_once(tmp_path: Path) -> None:
    run_workers(2, begin, str(tmp_path / "run"))
    [decision] = [event for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "decision"]
    assert decision["batch_size"] == [4, 8]


def adapt() -> tuple[Any, ...]:
    kf.init()
    net = network()
    orders = (("set_batch_size", 8), ("set_lr", 0.02), ("set_topology", "tree"), ("set_tree", "star"))
    policy = Orders({step: [order] for step, order in zip((1, 4, 7, 9), orders, strict=True)}, leader_only=True)
    opt = kf.FusedSGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.3}], lr=0.1)
    summary = kf.fit(net, problem(128), opt, policy, epochs=1, batch_size=4, micro_batch=2)
    assert summary is not None
    return policy.seen, summary["batch_size"], summary["lr"], summary["samples"], summary["params_sha256"]


@pytest.mark.full
def test_orders_of_the_leader_take_effect_on_every_worker_at_one_step() -> None:
    """At first there is too little work for all."""
    results = run_workers(3, adapt)
    seen, last_batch, last_lr, total, _ = results[0]
    assert all(result == results[0] for result in results), "ranks disagree"
    assert (last_batch, last_lr, total) == (8, pytest.approx(0.02, rel=1e-14), 128)
    batches, rates = [batch for batch, _ in seen], [round(lr, 6) for _, lr in seen]
    assert batches == sorted(batches) and set(batches) == {4, 8}
    assert list(dict.fromkeys(rates)) == [0.1, 0.141421, 0.02]  # it follows the batch size, then set_lr's word counts
    assert batches.index(8) == rates.index(0.141421)


@pytest.mark.parametrize(
    ("verb", "value", "message"),
    [
        ("set_topology", "ring", "must be one of allreduce, all_to_all, reduce_scatter, tree"),
        ("set_topology", "symmetric", "must be named at the start, as comm.schedule"),
        ("set_tree", "oak", "must be one of binary, star, host, latency"),
        ("set_tree", [0.5], r"tree \[0\.5\]: must be one of"),
        ("set_sync", 4, "must be one of ssgd, sma, pair, local:N"),
        ("set_batch_size", 0, "must be at least 1"),
        ("set_lr", -1.0, "must be a finite number above 0"),
        ("set_lr", 1e-40, r"set_lr\(1e-40\): must be 1.18e-38 to 3.4e\+38, fp32's range"),
        ("set_lr", 1e38, r"a learning rate of 5.0 would become 1e\+39, out of fp32's range, 1.18e-38 to 3.4e\+38"),
    ],
)
def test_wrong_orders_say_what_is_allowed(verb: str, value: Any, message: str) -> None:
    net = network()
    opt = kf.FusedSGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 5.0}], lr=0.5)
    with pytest.raises(ValueError, match=message):
        kf.fit(net, problem(), opt, Orders({0: [(verb, value)]}), batch_size=8)


def test_all_parameter_groups_follow_set_lr() -> None:
    net = network()
    opt = kf.FusedSGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.3}], lr=0.1)
    rates: list[list[float]] = []
    step = opt.step
    opt.step = lambda *_: (rates.append([rate * opt.lr_factor for rate in opt.base_rates()]), step())[1]  # type: ignore[method-assign]
    kf.fit(net, problem(), opt, Orders({0: [("set_lr", 0.05)]}), batch_size=4)
    assert rates[0] == [0.1, 0.3] and rates[-1] == pytest.approx([0.05, 0.15], rel=1e-14)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.3]  # they are the user's


@pytest.mark.parametrize(("asked", "expected"), [(10**6, 32), (1, 2), (27, 27)])  # 27 is no whole micro-batches
def test_a_batch_size_is_clipped_to_its_bounds(asked: int, expected: int) -> None:
    policy = Orders({0: [("set_batch_size", asked)]})
    assert train(policy, samples=256, batch_size=8, micro_batch=2, batch_max=32)["batch_size"] == expected


def test_the_same_clipping_is_reported_once(tmp_path: Path) -> None:
    class Greedy(kf.BasePolicy):
        def decide(self, signals: kf.Signals) -> kf.Decision | None:
            if signals.step in (2, 3):
                return None
            sizes = {6: 10**5, 7: 10**5, 9: 16}
            bad = {"lr_scale": math.nan, "topology": "nowhere", "replace": 7}
            return kf.Decision(batch_size=sizes.get(signals.step, 10**6), **bad)  # type: ignore[arg-type]

    train(Greedy(), samples=1600, batch_size=8, batch_max=32, run_dir=tmp_path)
    notes = [(event["step"], event["note"]) for event in events(tmp_path, "clipped")]
    asked = [(step, note.split(" clipped")[0]) for step, note in notes if note.startswith("batch_size")]
    first = asked[0][0]
    assert [note for _, note in asked] == [f"batch_size {10**size}" for size in (6, 5, 6, 6)]
    assert [step - first for step, _ in asked] == [0, 6, 8, 10]
    others = [note for _, note in notes if not note.startswith("batch_size")]
    for words in ("lr_scale nan", "replace 7", "nowhere"):
        assert sum(words in note for note in others) == 1


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / "events.jsonl") if event["kind"] == kind]


@pytest.mark.parametrize("hook", ["before_train", "before_step"])
def test_hooks_before_the_first_step_may_use_the_verbs(hook: str) -> None:
    policy = Orders({})

    def ask() -> None:
        if not policy.signals:
            kf.set_batch_size(16)
            kf.set_lr(0.05)

    setattr(policy, hook, ask)
    train(policy, batch_size=8, lr_scaling="none")
    assert policy.seen[0] == (8, 0.1) and policy.seen[-1] == (16, pytest.approx(0.05))


BATCH, RATE = ("set_batch_size", 64), ("set_lr", 0.02)


def both(calls: dict[int, list[tuple[str, float]]], **arguments: Any) -> list[tuple[int, float]]:
    policy = Orders(calls)
    given = {"batch_size": 16, "micro_batch": 8, "steps": 24, "epochs": 90} | arguments
    train(policy, samples=256, **given)
    return policy.seen


@pytest.mark.parametrize(
    "calls",
    [{5: [BATCH, RATE]}, {5: [RATE, BATCH]}, {5: [BATCH], 6: [RATE]}, {5: [RATE], 6: [BATCH, RATE]}],
    ids=["batch, lr", "lr, batch", "lr while the batch size is under way", "the same lr again"],
)
def test_set_lr_is_the_rate_from_then_on_in_any_order(calls: Any) -> None:
    for lr_scaling in ("none", "sqrt", "linear", "adascale"):
        reset()
        seen = both(calls, lr_scaling=lr_scaling)
        batches, rates = [batch for batch, _ in seen], [rate for _, rate in seen]
        assert batches[:6] == [16] * 6 and set(batches[10:]) == {64}
        first = next(step for step, rate in enumerate(rates) if rate == pytest.approx(0.02, rel=1e-13))
        assert first <= 11 and rates[0] == 0.1
        if lr_scaling == "adascale":
            assert max(rates[first:]) < 0.04, "the gain goes on from there, as its statistics do"
        else:
            assert rates[first:] == pytest.approx([0.02] * (24 - first), rel=1e-13), lr_scaling


def test_a_batch_size_that_is_set_later_scales_the_rate_that_was_set() -> None:
    seen = both({3: [RATE], 10: [BATCH]}, lr_scaling="sqrt")
    assert seen[9] == (16, pytest.approx(0.02, rel=1e-13)) and seen[-1] == (64, pytest.approx(0.04, rel=1e-13))


def test_set_lr_holds_in_its_first_step_under_a_warm_up_and_a_decay() -> None:
    """The step that it applies to has this rate; before, the factor was taken of the step of the request."""
    for arguments, part in (({"lr_warmup_steps": 100}, lambda s: s + 1), ({"lr_decay": "linear"}, lambda s: 24 - s)):
        rates = [rate for _, rate in both({3: [RATE]}, **arguments)]
        first = next(step for step, rate in enumerate(rates) if rate == pytest.approx(0.02, rel=1e-12))
        assert first == 6 and len(rates) == 24
        assert rates[6:] == pytest.approx([0.02 * part(step) / part(6) for step in range(6, 24)])


def test_an_lr_scale_that_fp32_cannot_hold_is_dropped_with_an_event(tmp_path: Path) -> None:
    policy = Seen({step: kf.Decision(lr_scale=1e38, batch_size=8) for step in range(16)})
    summary = train(policy, lr=100.0, batch_size=4, lr_scaling="none", run_dir=tmp_path)
    assert (summary["lr"], summary["batch_size"]) == (100.0, 8)
    (told,) = [event["note"] for event in events(tmp_path, "clipped")]
    assert told.startswith("lr_scale 1e+38 dropped: a learning rate of 100.0 would become 1e+40, out of fp32's range")


def test_set_lr_says_where_the_rate_is_zero() -> None:
    net = network()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    ramp = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 10)
    with pytest.raises(ValueError, match=r"kf.set_lr\(0.05\): the learning rate is 0 now"):
        kf.fit(net, problem(), opt, Orders({0: [("set_lr", 0.05)]}), scheduler=ramp)


def test_verbs_that_change_training_belong_inside_fit() -> None:
    net = network()
    opt = kf.FusedSGD(net.parameters())
    verbs: Any = {"set_batch_size": 8, "set_lr": 0.1, "set_sync": "local:2", "set_topology": "tree", "set_tree": "star"}
    for _ in range(2):
        for verb, value in verbs.items():
            with pytest.raises(RuntimeError, match=rf"kf\.{verb} works in training"):
                getattr(kf, verb)(value)
        kf.fit(net, problem(), opt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"opt": torch.optim.SGD(network().parameters())}, r"kfuse optimizer \(kf\.Optimizer wraps any\), not S"),
        ({"data": [1, 2]}, "int|pair"),
        ({"batch_size": "8"}, "batch_size=8: must be"),
        ({"policy": kf.BasePolicy}, "policy= a kf.BasePolicy, not type"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    net = network()
    with pytest.raises((TypeError, ValueError), match=message):
        kf.fit(net, **{"data": problem(), "opt": kf.FusedSGD(net.parameters()), **arguments})


@pytest.mark.parametrize("given", [None, 4])
def test_how_many_samples_a_forward_sees_is_told_where_nobody_chose_it(given: int | None, caplog: Any) -> None:
    net, how = network(), {"batch_size": 16, "micro_batch": given}
    kf.fit(net, problem(), kf.FusedSGD(net.parameters(), lr=0.1), **how)  # type: ignore[arg-type]
    kf.DataLoader(net, problem(), kf.FusedSGD(net.parameters(), lr=0.1), **how)  # type: ignore[arg-type]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 * (given is None)
    assert all("a forward sees 4 of the batch's 16 samples" in each and "micro_batch=" in each for each in told)


class Growing(Dataset):
    """Each epoch has two samples more."""

    def __init__(self) -> None:
        self.length = 16

    def __len__(self) -> int:
        return self.length

    def fetch(self, indices: np.ndarray, generator: torch.Generator | None) -> Any:  # no default: None is passed
        x, y = problem()
        return x[indices], y[indices]

    def order(self, epoch: int) -> np.ndarray:
        self.length = 16 + 2 * epoch
        return np.arange(16)


def test_held_out_data_without_samples_and_data_that_grow_are_refused() -> None:
    net, data, empty = network(), Growing(), Growing()
    empty.length = 0
    opt = kf.FusedSGD(net.parameters())
    with pytest.raises(ValueError, match="heldout has no samples"):
        kf.fit(net, data, opt, batch_size=8, heldout=empty)
    with pytest.raises(ValueError, match="the data set has 18 samples now, and had 16 as training began"):
        kf.fit(net, data, opt, batch_size=8, heldout=data, epochs=4)
