"""Modes are switched while training runs, and go through checkpoints, joins and deaths; what is wrong is refused."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import Job, assert_exact, chaos, run_job, words
from sync_policies import Modes
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.comm.options import CommOptions
from kfuse.comm.sync import EVERY_MAX, Sync

EVERY_ORDER = [mode for pair in permutations(("ssgd", "local:3", "sma"), 2) for mode in pair]


def network(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def data(count: int = 240) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    return x, x[:, :2].sin()


def all_equal(values: list[Tensor]) -> bool:
    """Whether all workers have the same bits of these tensors."""
    flat = torch.cat([value.detach().double().reshape(-1) for value in values])
    return all(torch.equal(each, flat) for each in kf.allgather(flat))


class Compares(Modes):
    """Notes before each step which of the model and the optimizer's state all workers have alike."""

    def __init__(self, modes: dict[int, str], net: nn.Module, opt: Any) -> None:
        super().__init__(modes)
        self._net, self._opt = net, opt
        self.alike: list[tuple[bool, bool]] = []

    def before_step(self) -> None:
        moments = [state[name] for state in self._opt.state.values() for name in ("exp_avg", "exp_avg_sq")]
        model = all_equal(list(self._net.state_dict().values()))
        self.alike.append((model, all_equal(moments) if moments else True))


SPAN = 7
"""Steps that each mode is in force, in the test of all switches."""


def switch(modes: list[str], outer: bool) -> tuple[Any, ...]:
    """Each mode is asked for at a multiple of SPAN steps, and is in force four steps later."""
    kf.init(**CommOptions(check_every=1, **({"outer_lr": 0.7, "outer_momentum": 0.9} if outer else {})).named())
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    policy = Compares({SPAN * k: mode for k, mode in enumerate(modes)}, net, opt)
    steps = SPAN * len(modes) + 4
    summary = kf.fit(
        net, data(), opt, kf.Hook(policy), batch_size=12, batch_micro=3, train_epochs=None, train_steps=steps
    )
    assert summary is not None
    return policy.alike, policy.known, summary["params_sha256"], summary["loss"]


@pytest.mark.parametrize("outer", [False, True])
def test_models_and_optimizer_states_meet_at_every_switch(outer: bool) -> None:
    """Between ssgd, local:3 and sma in every order. With ssgd workers' parameters are compared at every step, too."""
    results = run_workers(3, switch, EVERY_ORDER, outer)
    assert results[0] == results[1] == results[2]
    alike, known, _, loss = results[0]
    assert loss < 0.3
    former = "ssgd"
    for k, mode in enumerate(EVERY_ORDER):
        begins = SPAN * k + 4
        if mode != former:
            assert alike[begins] == (True, True), f"{former} to {mode}"
        during = alike[begins + 1 : begins + SPAN]
        if mode == "ssgd":
            assert during == [(True, True)] * len(during)
        elif mode == "sma":
            assert not any(model for model, _ in during)
        else:
            averaged = [model for model, _ in during]
            assert any(averaged) and not all(averaged)
        expected = [mode == "ssgd"] * (SPAN - 4)  # of the last steps of this mode before the next one is asked for
        assert known[begins + 1 : begins + 1 + len(expected)] == expected
        former = mode


def test_the_central_model_is_evaluated_and_is_the_result() -> None:
    results = run_workers(2, evaluate_centre)
    assert results[0] == results[1]


def evaluate_centre() -> Any:
    """Evaluations leave each worker its own model. The last one is of the model that training ends with."""
    kf.init(comm_sync="sma")
    net, held = network(), data(60)
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    policy = Compares({}, net, opt)
    arguments: dict[str, Any] = dict(heldout=held, train_eval_every=4)
    summary = kf.fit(net, data(), opt, kf.Hook(policy), batch_size=12, batch_micro=3, **arguments)
    assert summary is not None and not any(model for model, _ in policy.alike[1:])
    net.eval()
    with torch.no_grad():
        assert F.mse_loss(net(held[0]), held[1]).item() == pytest.approx(summary["eval_loss"], rel=1e-5)
    assert all_equal(list(net.state_dict().values()))
    digests = kf.allgather(torch.tensor([int(summary["params_sha256"][:12], 16)]))
    assert digests[0] == digests[1]
    return summary["eval_loss"], [value.double().sum().item() for value in net.state_dict().values()]


class FromTheStart(Modes):
    """Begins with a mode."""

    def initial(self) -> kf.Decision:
        return kf.Decision(sync="sma")


def initial() -> list[bool]:
    net, policy = network(), FromTheStart({})
    kf.fit(net, data(), kf.FusedSGD(net.parameters(), lr=0.1), kf.Hook(policy), batch_size=12, batch_micro=6)
    return policy.known


def test_a_policy_may_begin_with_a_mode() -> None:
    for known in run_workers(2, initial):
        assert known == [False] * 20


# Its state


def fitted(sync: str, folder: Path | None, steps: int) -> str:
    session.reset()
    kf.init(comm_sync=sync, comm_outer_lr=0.7, comm_outer_momentum=0.9)
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    more: dict[str, Any] = {}
    if folder is not None:
        more = {"checkpoint_dir": folder, "checkpoint_every_steps": 7, "checkpoint_resume": "auto"}
    summary = kf.fit(net, data(), opt, batch_size=12, batch_micro=4, train_epochs=None, train_steps=steps, **more)
    assert summary is not None and all_equal(list(net.parameters()))
    return str(summary["params_sha256"])


@pytest.mark.parametrize("sync", ["sma", "local:5"])
def test_workers_resume_from_a_checkpoint(sync: str, tmp_path: Path) -> None:
    """On another number of workers too. All end with one model."""
    results = run_workers(2, fitted, sync, tmp_path, 17)
    results += run_workers(3, fitted, sync, tmp_path, 24)
    assert len(set(results)) == 2


def sma_in_two_parts() -> tuple[Any, ...]:
    kf.init(comm_sync="sma")
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    for number, step in enumerate(kf.DataLoader(data(), net, opt, batch_size=12, batch_micro=3)):
        for x, y in step:
            F.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        if number == 7:
            state = kf.state_dict()
            break
    centre = state["synchronisation"]["method"]["centre"]
    other = network(9)
    opt = kf.FusedAdamW(other.parameters(), lr=0.02)
    loader = kf.DataLoader(data(), other, opt, batch_size=12, batch_micro=3)
    kf.load_state_dict(state)
    for step in loader:
        begins = torch.cat([p.detach().reshape(-1) for p in other.parameters()])
        for x, y in step:
            F.mse_loss(other(x), y).backward()
        opt.step()
        opt.zero_grad()
        break
    return begins.tolist(), centre["model"].tolist(), centre["change"].abs().sum().item()


def test_a_training_that_resumes_begins_from_the_central_model() -> None:
    """And with its momentum."""
    results = run_workers(2, sma_in_two_parts)
    assert results[0] == results[1]
    begins, model, change = results[0]
    assert begins == pytest.approx(model, abs=1e-6) and change > 0


# What is refused


def test_a_loop_of_bare_backwards_needs_ssgd() -> None:
    kf.init(comm_sync="local:4")
    net = nn.Linear(3, 1)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"comm\.sync=local:4: must be ssgd in a loop of your own"):
        opt.step()


def freezes(options: dict[str, Any]) -> str:
    """Another layer of the same size is trained in place of a frozen one."""
    kf.init(**CommOptions(**options).named())
    net = nn.Sequential(network(), *(nn.Linear(2, 2) for _ in range(2)))
    net[2].requires_grad_(False)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    try:
        for number, step in enumerate(kf.DataLoader(data(), net, opt, batch_size=12, batch_micro=6)):
            for x, y in step:
                F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
            if number == 3:
                net[1].requires_grad_(False)
                net[2].requires_grad_(True)
                opt.rebuild()
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_trained_parameters_are_refused_where_their_weights_are_kept() -> None:
    for options in ({"sync": "sma"}, {"sync": "local:3", "outer_momentum": 0.5}):
        for said in run_workers(2, freezes, options):
            assert "the trained parameters have changed since this mode began: call kf.set_sync('ssgd')" in said
    assert run_workers(2, freezes, {"sync": "local:3"}) == ["", ""]


@pytest.mark.parametrize("text", ["often", "local:x", "ssgd:2", "8", "local:0", f"local:{EVERY_MAX + 1}"])
def test_what_is_no_mode_is_refused(text: str) -> None:
    assert str(Sync.parse(f"local:{EVERY_MAX}")) == f"local:{EVERY_MAX}"
    with pytest.raises(
        ValueError, match=f"^comm.sync={text}: (must be one of ssgd, local:N, sma, pair|N must be 1 to)"
    ):
        Sync.parse(text)


# Workers come and go

TRAINING = words(
    "model=mlp model.hidden=[16] data=digits batch.size=96 batch.micro=8 train.epochs=5 workers.count=3 workers.max=3",
    "lr.base=0.01 comm.check_every=1",
)


OUTER = words("comm.outer_lr=0.7 comm.outer_momentum=0.5")


def job_of_modes(folder: Path, settings: list[str], modes: dict[str, str], **arguments: Any) -> Job:
    """It trains exactly, whatever happens to its workers."""
    policy = chaos(folder, adaptive=False, modes=modes, **arguments)
    job = run_job(folder / "run", [*TRAINING, *settings, "policy._target_=sync_policies.ChaosOfModes", *policy[1:]])
    assert job.error is None, job.told()
    assert_exact(job)
    assert job.summary["eval_accuracy"] > 0.85
    return job


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "outer", "moment"), [("sma", False, "between_reduction_and_update"), ("local:5", True, "evaluation")]
)
def test_workers_that_are_lost_take_nobody_along(tmp_path: Path, mode: str, moment: str, outer: bool) -> None:
    """The others go on, newcomers join, all meet in one model, and then have the same parameters at each step."""
    events = [
        {"step": 15, "moment": moment, "rank": 1, "how": "kill", "workers": 3},
        {"step": 40, "moment": "after_step", "rank": 0, "how": "kill", "workers": 3},
    ]
    gates, modes = [{"step": 38, "workers": 3}, {"step": 60, "workers": 3}], {"4": mode, "66": "ssgd"}
    job = job_of_modes(tmp_path, OUTER if outer else [], modes, events=events, gates=gates)
    assert [view["reason"] for view in job.views].count("failure") == 2
    changes = [event["sync"] for event in job.of_kind("decision") if "sync" in event]
    assert changes == [["ssgd", mode], [mode, "ssgd"]]
    by_step = {record["step"]: record for record in job.metrics}
    assert all(by_step[step]["grad_norm"] is None for step in range(8, 70) if by_step[step]["workers"] > 1)
    assert all(by_step[step]["grad_norm"] is not None for step in range(70, len(by_step)))
    assert all(record["loss"] is not None for record in job.metrics)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "call", "step", "after"),
    [
        ("sma", "begin", 15, True),
        ("sma", "end", 15, False),
        ("sma", "average", 50, True),  # where models meet, before ssgd
        ("local:5", "average", 66, False),
    ],
)
def test_a_worker_lost_in_the_middle_of_a_synchronisation(
    tmp_path: Path, mode: str, call: str, step: int, after: bool
) -> None:
    """All of it happens, or nothing: the others have one central model, and meet in one model."""
    gates, modes = [{"step": 30, "workers": 3}, {"step": 80, "workers": 3}], {"4": mode, "66": "ssgd"}
    killed = {"step": step, "rank": 1, "call": call, "after": after}
    job = job_of_modes(tmp_path, [] if mode == "sma" else OUTER, modes, gates=gates, killed=killed)
    assert [view["reason"] for view in job.views].count("failure") == 1


@pytest.mark.full
@pytest.mark.parametrize(("mode", "outer"), [("sma", False), ("local:5", True)])
def test_one_worker_becomes_three_and_one_again(tmp_path: Path, mode: str, outer: bool) -> None:
    phases = [{"step": 10, "workers": 3}, {"step": 30, "workers": 1}, {"step": 45, "workers": 2}]
    gates = [{"step": 25, "workers": 3}, {"step": 40, "workers": 1}, {"step": 55, "workers": 2}]
    settings = words("workers.count=1", f"comm.sync={mode}") + (OUTER if outer else [])
    job = job_of_modes(tmp_path, settings, {"62": "ssgd"}, phases=phases, gates=gates)
    assert [len(view["workers"]) for view in job.views] in ([1, 3, 1, 2], [1, 2, 3, 1, 2], [1, 3, 2, 1, 2])
    for record in job.metrics:
        assert (record["grad_norm"] is None) == (record["workers"] > 1 and record["step"] < 66), record
