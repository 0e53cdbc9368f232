"""With betas that follow the batch size, Adam's bias correction is by the betas of each parameter's own updates.

The oracle is the update itself: by a constant gradient it is lr * sign(g) in every step, in any batch size, for every
parameter, whenever its first gradient comes. The other one is AdamW in float64 that keeps the products itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from constant import SAMPLES, Model, settings
from distributed import run_workers
from elastic_job import chaos, run_job, words
from torch import Tensor, nn

import kfuse as kf
from kfuse.optim.batch_betas import BIAS_CORRECTION, CHANGED_BETAS, BatchBetas
from kfuse.policies import SchedulePolicy
from kfuse.session import reset

RATE, BATCH = 1e-3, 16
RULES = ["marek", "malladi"]
SIZES = {0: 16, 20: 128, 40: 64, 55: 8, 70: 128}
"""Batch sizes by the step from which they hold."""

Moves = list[dict[str, float]]
"""Of each step, each parameter's move over its learning rate: 1 where it is right, 0 without a gradient."""


class Net(Model):
    """Which parameters a step uses is said by `used`. `sizes` has three."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(3))
        self.used: tuple[str, ...] = ("early",)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        named = dict(self.named_parameters())
        return {"loss": torch.stack([named[name].sum() for name in self.used]).sum() * x.mean()}


def samples() -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(())}] * SAMPLES


def optimizer(net: nn.Module) -> kf.FusedAdamW:
    return kf.FusedAdamW(net.parameters(), lr=RATE, weight_decay=0.0)


def moves(
    net: Model,
    opt: kf.FusedAdamW,
    steps: int,
    rule: str,
    sizes: Mapping[int, int] | None = None,
    before: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
    first: int = 0,
    fisher: list[tuple[float | None, float | None]] | None = None,
    **options: Any,
) -> Moves:
    """Trains up to `steps` steps. before, after: called before each one, and after its update. first: the step that a
    resumed training begins with. fisher: gets trace and largest entry of each step.

    With local SGD the moves are this worker's own, before models are averaged.
    """
    sizes, found, at = {0: BATCH} if sizes is None else sizes, Moves(), dict[str, float]()

    class Watched(SchedulePolicy):
        fisher_every = None if fisher is None else 1

        def decide(self, signals: kf.Signals) -> kf.Decision | None:
            if fisher is not None:
                fisher.append((signals.fisher_trace, signals.fisher_max))
            return super().decide(signals)

        def before_step(self) -> None:
            before(first + len(found))
            at.update(net.values)

        def after_step(self) -> None:
            size = next(size for step, size in reversed(sizes.items()) if step <= first + len(found))
            rate = RATE * math.sqrt(size / BATCH)
            found.append({name: (at[name] - now) / rate for name, now in net.values.items()})
            after(first + len(found) - 1)

    policy = Watched([{"step": step, "batch_size": size} for step, size in sizes.items()])
    kf.fit(
        net,
        samples(),
        opt,
        kf.Hook(policy),
        **{
            "batch_size": BATCH,
            "micro_batch": 4,
            "max_batch_size": 128,
            "epochs": 50,
            "steps": steps,
            "lr_scaling": "sqrt",
            "lr_betas": rule,
            **options,
        },
    )
    return found


Used = Callable[[int], tuple[str, ...]]


def assert_right(found: Moves, used: Used = lambda step: ("early",), first: int = 0) -> None:
    """used: the parameters that a step had gradients for."""
    assert found
    for step, of_step in enumerate(found, first):
        for name, move in of_step.items():
            assert move == pytest.approx(float(name in used(step)), abs=3e-4), f"step {step}, {name}: {of_step}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bucket_mb", [None, 8e-6], ids=["one bucket", "a bucket each"])
def test_a_parameter_whose_first_gradient_comes_late_moves_as_the_others(rule: str, bucket_mb: float | None) -> None:
    """And one that has a gradient in each third step only."""

    def used(step: int) -> tuple[str, ...]:
        return ("early", *["late"] * (step >= 60), *["other"] * (step % 3 == 1))

    def choose(step: int) -> None:
        net.used = used(step)

    kf.init(kf.CommOptions(bucket_mb=bucket_mb))
    try:
        net = Net()
        opt = optimizer(net)
        assert_right(moves(net, opt, 90, rule, SIZES, choose), used)
    finally:
        reset()
    # What is kept is what the docstrings say: one minus the product of the betas of the parameter's updates.
    batches = [next(size for at, size in reversed(SIZES.items()) if at <= step) for step in range(90)]
    for name, p in net.named_parameters():
        first = second = 1.0
        for step, size in enumerate(batches):
            if name in used(step):
                k = size / BATCH
                first *= 0.9 if rule == "marek" else 1 - k * 0.1
                second *= 0.999**k if rule == "marek" else 1 - k * 0.001
        assert opt.state[p][BIAS_CORRECTION].tolist() == pytest.approx([1 - first, 1 - second], rel=1e-12)
        assert opt.state[p]["step"] == sum(name in used(step) for step in range(90))


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_that_is_unfrozen(rule: str) -> None:
    """Its bucket is laid out anew, beside parameters that have had as many updates, by other betas."""

    def change(step: int) -> None:
        if step == 30:
            net.early.requires_grad_(False)
            net.late.requires_grad_(True)
            net.used = ("late",)
            opt.rebuild()
        if step == 60:
            net.early.requires_grad_(True)
            net.used = ("early", "late")
            opt.rebuild()

    net = Net()
    for p in (net.late, net.other):
        p.requires_grad_(False)
    opt = optimizer(net)
    sizes = {0: 16, 24: 128, 40: 16, 52: 64}
    found = moves(net, opt, 80, rule, sizes, change)
    assert opt.state[net.early]["step"] == opt.state[net.late]["step"] == 50
    assert_right(found, lambda step: ("early",) if step < 30 else ("late",) if step < 60 else ("early", "late"))


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_group_that_is_added_while_the_betas_are_others(rule: str) -> None:
    def change(step: int) -> None:
        if step == 30:
            opt.add_param_group({"params": [net.late], "betas": (0.8, 0.99)})
            net.used = ("early", "late")

    net = Net()
    opt = kf.FusedAdamW([net.early], lr=RATE, weight_decay=0.0)
    sizes = {0: 16, 20: 64, 50: 16}
    found = moves(net, opt, 60, rule, sizes, change, max_batch_size=64)
    assert_right(found, lambda step: ("early", "late") if step >= 30 else ("early",))


def test_a_group_that_is_added_after_the_betas_of_the_coming_update_were_set() -> None:
    """As in the body of a loop."""
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    opt = kf.FusedAdamW([first], lr=RATE, weight_decay=0.0)
    for step, k in enumerate((1.0, 4.0, 1.0, 2.0)):
        opt.set_batch_betas(BatchBetas("marek", k))
        if step == 1:
            opt.add_param_group({"params": [second]})
        before = [p.detach()[0].item() for p in (first, second)]
        for p in (first, second)[: 1 + (step >= 1)]:
            p.grad = torch.ones(3)
        opt.step()
        opt.zero_grad()
        moved = [(was - p.detach()[0].item()) / RATE for was, p in zip(before, (first, second), strict=True)]
        assert moved == pytest.approx([1.0, float(step >= 1)], abs=3e-4), step


@pytest.mark.parametrize("rule", RULES)
def test_updates_that_are_skipped_do_not_count(rule: str) -> None:
    def infinite(step: int) -> None:
        nonlocal scale
        scale = math.inf if 4 <= step < 30 or step % 7 == 3 else 1.0

    def loss(net: Net, batch: dict[str, Tensor]) -> Tensor:
        return net(**batch)["loss"] * scale

    scale, net = 1.0, Net()
    found = moves(net, optimizer(net), 60, rule, {0: 16, 20: 128}, infinite, step_fn=loss)
    assert_right(found, lambda step: () if 4 <= step < 30 or step % 7 == 3 else ("early",))


# -- one optimizer in several trainings -------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [("keep", "marek"), ("marek", "marek"), ("marek", "malladi"), ("malladi", "keep")])
def test_a_second_fit_and_a_loop_of_ones_own(rules: tuple[str, str]) -> None:
    net = Net()
    opt = optimizer(net)
    assert_right(moves(net, opt, 50, rules[0], {0: 16, 30: 64}))
    assert_right(moves(net, opt, 30, rules[1], {0: 128, 20: 32}))
    for _ in range(10):
        before = net.early[0].item()
        net.early.sum().backward()
        opt.step()
        opt.zero_grad()
        assert before - net.early[0].item() == pytest.approx(RATE, rel=3e-4)


@pytest.mark.parametrize(
    "rule", [RULES[0], *(pytest.param(rule, marks=pytest.mark.full) for rule in ("keep", *RULES[1:]))]
)
def test_branches_of_critical_batch(rule: str) -> None:
    """Of a run in the first batch size only, and of one whose batch has changed. No branch leaves a trace."""
    net = Net()
    opt = optimizer(net)
    for sizes in ({0: 16}, {0: 64, 40: 128}):
        moves(net, opt, 60, rule, sizes)
        before, entries = net.early[0].item(), [{**state} for state in opt.state_dict()["state"].values()]
        of_branches: list[tuple[float, list[float]]] = []
        values: list[float] = []

        def loss(net: Net, batch: dict[str, Tensor], values: list[float] = values) -> Tensor:
            if not values or values[-1] != net.early[0].item():
                values.append(net.early[0].item())
            return net(**batch)["loss"]

        def branch_ended(k: float, repetition: int, values: list[float] = values) -> None:
            of_branches.append((k, values.copy()))  # noqa: B023
            values.clear()

        kf.critical_batch(
            net,
            samples(),
            opt,
            batch_size=BATCH,
            micro_batch=4,
            factors=(1, 8),
            repetitions=2,
            samples=1024,
            lr_scaling="sqrt",
            lr_betas=rule,  # type: ignore[arg-type]
            step_fn=loss,
            after_branch=branch_ended,
        )
        assert sorted(k for k, _ in of_branches) == [1, 1, 8, 8]
        for k, seen in of_branches:
            assert len(seen) == 1024 / BATCH / k and seen[0] == before
            steps = [(one - other) / RATE / math.sqrt(k) for one, other in pairwise(seen)]
            assert steps == pytest.approx([1.0] * len(steps), abs=3e-4), k
        assert net.early[0].item() == before
        for was, now in zip(entries, opt.state_dict()["state"].values(), strict=True):
            assert was.keys() == now.keys() and all(torch.equal(was[name], now[name]) for name in was)


# -- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [("keep", "marek"), ("marek", "keep"), ("keep", "malladi"), ("malladi", "marek"), ("marek", "marek")],
    ids="-".join,
)
def test_a_resume_with_other_betas(rules: tuple[str, str], tmp_path: Path) -> None:
    """Batches change before the checkpoint and after it."""
    sizes = {0: 16, 20: 128, 62: 32}
    for rule, first, last in ((rules[0], 0, 50), (rules[1], 50, 90)):
        net = Net()
        found = moves(net, optimizer(net), last, rule, sizes, first=first, checkpoint=tmp_path, resume="auto")
        assert len(found) == last - first
        assert_right(found, first=first)


def test_the_state_dict_is_torchs_until_betas_change() -> None:
    net = Net()
    opt, twin = optimizer(net), torch.optim.AdamW(Net().parameters())
    for rule in ("keep", *RULES):
        moves(net, opt, 12, rule, {0: 16})
        saved = opt.state_dict()
        twin.load_state_dict(saved)
        assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert CHANGED_BETAS not in saved["param_groups"][0]
        assert saved["param_groups"][0].keys() == torch.optim.AdamW(Net().parameters()).param_groups[0].keys()
    moves(net, opt, 12, "keep", {0: 16, 4: 64})
    assert opt.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


def changed(dtype: torch.dtype = torch.float32) -> tuple[kf.FusedAdamW, dict[str, Any]]:
    """An optimizer whose betas have changed, and its state."""
    p = nn.Parameter(torch.zeros(3, dtype=dtype))
    opt = kf.FusedAdamW([p], lr=RATE, weight_decay=0.0)
    for k in (1.0, 1.0, 8.0, 4.0):
        opt.set_batch_betas(BatchBetas("marek", k))
        p.grad = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
        opt.step()
        opt.zero_grad()
    opt.set_batch_betas(None)
    return opt, opt.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_with_the_same_bits_where_it_is_loaded(dtype: torch.dtype) -> None:
    opt, state = changed(dtype)
    state = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
    assert state["state"][0][BIAS_CORRECTION].dtype == torch.float64
    p = nn.Parameter(opt.param_groups[0]["params"][0].detach().clone())
    other = kf.FusedAdamW([p])
    other.load_state_dict(state)
    for each in (opt, other):
        for k in (2.0, 1.0):
            each.set_batch_betas(BatchBetas("marek", k))
            each.param_groups[0]["params"][0].grad = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
            each.step()
            each.zero_grad()
    one, two = opt.state_dict()["state"][0], other.state_dict()["state"][0]
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(p, opt.param_groups[0]["params"][0])


def test_a_state_without_the_correction_replaces_one_that_has_it() -> None:
    opt, _ = changed()
    p = nn.Parameter(torch.zeros(3))
    torchs = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    torchs.step()
    opt.load_state_dict(torchs.state_dict())
    assert BIAS_CORRECTION not in opt.state_dict()["state"][0]
    opt.set_batch_betas(BatchBetas("marek", 2.0))
    assert opt.state_dict()["state"][0][BIAS_CORRECTION].tolist() == pytest.approx([1 - 0.9, 1 - 0.999], rel=1e-12)


def test_optimizers_that_would_correct_wrongly_refuse_it() -> None:
    _, state = changed()
    told = "the optimizer state's betas have followed the batch size .* must be loaded by kf.FusedAdamW$"
    for other in (
        kf.FusedLAMB([nn.Parameter(torch.zeros(3))]),
        kf.Optimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(3))])),
    ):
        before = repr(other.state_dict())
        with pytest.raises(ValueError, match=told):
            other.load_state_dict(state)
        assert repr(other.state_dict()) == before
    # torch's own takes it; what it saves then is refused, since it does not count its updates in the correction.
    torchs = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    torchs.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^the saved bias_correction is torch.float32 \[2\], must be torch.float64"):
        changed()[0].load_state_dict(torchs.state_dict())


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["keep", *RULES])
def test_the_fisher_trace_of_a_constant_gradient_is_its_square(rule: str) -> None:
    """In the first step after a change too, which has the coming update's betas already; and of a late parameter."""

    def choose(step: int) -> None:
        net.used = ("early", "late") if step >= 50 else ("early",)

    net, fisher = Net(), list[tuple[float | None, float | None]]()
    moves(net, optimizer(net), 90, rule, SIZES, choose, fisher=fisher)
    assert fisher[0] == (None, None)
    for step, (trace, largest) in enumerate(fisher[1:], 1):  # as they are before the step's update
        assert (trace, largest) == pytest.approx((6.0 if step > 50 else 3.0, 1.0), rel=1e-5), step


# -- several workers --------------------------------------------------------------------------------------------------


def together(state: str, rule: str) -> tuple[Moves, Moves, dict[int, Any], dict[str, Tensor]]:
    kf.init(kf.CommOptions(state=state, bucket_mb=1e-5, reproducible=True))

    def choose(step: int) -> None:
        net.used = ("early", *["late"] * (step >= 30), *["other"] * (step % 3 == 1))

    net = Net()
    opt = optimizer(net)
    found = moves(net, opt, 50, rule, {0: 16, 20: 128, 40: 64}, choose)
    saved = opt.state_dict()["state"]
    saved = {key: {name: value.clone() for name, value in of.items()} for key, of in saved.items()}
    net.other.requires_grad_(False)
    opt.rebuild()
    net.used = ("early", "late")
    again = moves(net, opt, 20, rule, {0: 128, 10: 16})
    return found, again, saved, {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("rule", [RULES[0], pytest.param(RULES[1], marks=pytest.mark.full)])
def test_one_worker_or_several_with_whole_or_sharded_state(rule: str) -> None:
    """All of it right, and the same bits, those of the saved state included."""
    try:
        reference = together("replicated", rule)
    finally:
        reset()
    found, again, saved, parameters = reference
    assert_right(found, lambda step: ("early", *["late"] * (step >= 30), *["other"] * (step % 3 == 1)))
    assert_right(again, lambda step: ("early", "late"))
    for count, state in ((2, "replicated"), (3, "sharded")):
        for theirs, after, of_state, values in run_workers(count, together, state, rule):
            assert (theirs, after) == (found, again)
            assert of_state.keys() == saved.keys()
            for key, of in saved.items():
                assert of.keys() == of_state[key].keys() and of.keys() >= {"step", BIAS_CORRECTION}
                assert all(torch.equal(value, of_state[key][name]) for name, value in of.items())
            assert all(torch.equal(value, values[name]) for name, value in parameters.items())


def apart(sync: str, rule: str) -> Moves:
    kf.init(kf.CommOptions(sync=sync))
    net = Net()
    return moves(net, optimizer(net), 60, rule, {0: 16, 12: 4, 30: 64, 44: 16})


@pytest.mark.parametrize("rule", [RULES[0], pytest.param(RULES[1], marks=pytest.mark.full)])
def test_workers_that_make_updates_of_their_own(rule: str) -> None:
    """With the smallest batch one of two has nothing to do: it makes no update. Averages of states are right too."""
    both = run_workers(2, apart, "local:4", rule)
    for step, (one, other) in enumerate(zip(*both, strict=True)):
        made = [one["early"], other["early"]]
        assert max(made) == pytest.approx(1.0, abs=3e-4), step
        assert min(made) == pytest.approx(float(not 12 <= step < 30), abs=3e-4), step


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_workers_that_come_and_are_lost(state: str, rule: str, tmp_path: Path) -> None:
    """From one to three. The loss is the parameters' sum, so that it falls by what they move; `late` comes in late."""
    phases = [
        {"step": 10, "batch_size": 64, "workers": 2},
        {"step": 40, "batch_size": 16, "workers": 3},
        {"step": 60, "batch_size": 128},
    ]
    kill = {"how": "kill", "rank": 1}
    moments = ["updating", "sharing"] if state == "sharded" else ["between_reduction_and_update", "after_step"]
    events = [{"step": step, "moment": at, **kill} for step, at in zip((30, 64), moments, strict=True)]
    gates = [{"step": 24, "workers": 2}, {"step": 56, "workers": 3}]
    job = run_job(
        tmp_path / "run",
        [
            *settings(threshold=-0.05, sizes="[9000,7000]"),
            *words("batch.size=16 batch.micro=4 batch.max=128 train.epochs=null train.steps=90 train.save_model=false"),
            *words(f"lr.base={RATE} lr.scaling=sqrt lr.betas={rule} comm.state={state} comm.bucket_mb=0.001"),
            *words("workers.count=1 workers.min=1 workers.max=3 elastic.max_failures=8 train.eval_every=1000"),
            *chaos(tmp_path, phases=phases, gates=gates, events=events, adaptive=False),
        ],
    )
    assert job.error is None, job.told()
    assert len(job.of_kind("failure")) == len(events), job.told()
    records = {record["step"]: record for record in job.metrics}
    assert sorted(records) == list(range(90))
    assert {record["workers"] for record in records.values()} == {1, 2, 3}
    early = 0.0
    for step in range(89):
        lr, before, after = records[step]["lr"], records[step]["loss"], records[step + 1]["loss"]
        used = early < -0.05
        assert (before - after) / lr == pytest.approx(9000 + 7000 * used, rel=1e-3), (step, job.told())
        early -= lr
