"""Modes are switched while training runs, and go through checkpoints, joins and deaths; what is wrong is refused."""

from __future__ import annotations

import contextlib
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from elastic_job import Job, assert_exact, changes, chaos, events, run_job, words
from problems import all_equal, flat, update
from sync_policies import Modes
from torch import Tensor, nn

import kfuse as kf
from kfuse.checkpoint.format import load
from kfuse.comm.settings import CommOptions, Sync
from kfuse.settings.tree import SETTINGS

EVERY_ORDER = [mode for pair in permutations(("ssgd", "local:3", "sma"), 2) for mode in pair]


def network(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def data(count: int = 240) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    return x, x[:, :2].sin()


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
    summary = kf.fit(net, data(), opt, policy, batch_size=12, micro_batch=3, epochs=None, steps=steps)
    assert summary is not None
    return policy.alike, policy.known, summary["params_sha256"], summary["loss"]


@pytest.mark.parametrize("outer", [False, pytest.param(True, marks=pytest.mark.full)])
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


@on_workers(2)
def test_the_central_model_is_evaluated_and_is_the_result() -> None:
    """Evaluations leave each worker its own model. The last one is of the model that training ends with."""
    kf.init(comm_sync="sma")
    net, held = network(), data(60)
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)
    policy = Compares({}, net, opt)
    arguments: dict[str, Any] = dict(heldout=held, heldout_every=4)
    summary = kf.fit(net, data(), opt, policy, batch_size=12, micro_batch=3, **arguments)
    assert summary is not None and not any(model for model, _ in policy.alike[1:])
    net.eval()
    with torch.no_grad():
        assert F.mse_loss(net(held[0]), held[1]).item() == pytest.approx(summary["heldout_loss"], rel=1e-5)
    assert all_equal(list(net.state_dict().values()))
    figures = [summary["heldout_loss"], float(int(summary["params_sha256"][:12], 16))]
    assert all_equal([torch.tensor(figures, dtype=torch.float64)])


# Its state


def fitted(sync: str, folder: Path, steps: int) -> tuple[str, list[float]]:
    """The hash of the trained model, and the model before this training's first step."""
    kf.init(comm_sync=sync, comm_outer_lr=0.7, comm_outer_momentum=0.9)
    net, first = network(), list[float]()
    opt = kf.FusedAdamW(net.parameters(), lr=0.02)

    class First(kf.BasePolicy):
        def before_step(self) -> None:
            if not first:
                first.extend(flat(net.parameters()).tolist())

    more: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every_steps": 7, "checkpoint_resume": "auto"}
    more |= {"batch_size": 12, "micro_batch": 4, "epochs": None, "steps": steps}
    summary = kf.fit(net, data(), opt, First(), **more)
    assert summary is not None and all_equal(list(net.parameters()))
    return str(summary["params_sha256"]), first


@pytest.mark.parametrize("sync", ["sma", "local:5"])
def test_workers_resume_from_a_checkpoint(sync: str, tmp_path: Path) -> None:
    """On another number of workers too. With sma they begin from the central model, which has its momentum still."""
    results = run_workers(2, fitted, sync, tmp_path, 17)
    shutil.rmtree(tmp_path / "step-00000017")  # of the end, where all have one model
    method = load(max(tmp_path.glob("step-*")))["synchronisation"]["method"]
    resumed = run_workers(3, fitted, sync, tmp_path, 24)
    assert len({digest for digest, _ in results}) == len({digest for digest, _ in resumed}) == 1
    for _, first in resumed if sync == "sma" else []:
        assert first == pytest.approx(method["centre"]["model"].tolist(), abs=1e-6)
        assert method["centre"]["change"].abs().sum() > 0


# What is refused


def test_a_loop_of_bare_backwards_needs_ssgd() -> None:
    kf.init(comm_sync="local:4")
    net = nn.Linear(3, 1)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"comm\.sync=local:4: must be ssgd in a loop of your own"):
        opt.step()


@pytest.mark.parametrize(
    ("options", "refused"),
    [({"sync": "sma"}, True), ({"sync": "local:3", "outer_momentum": 0.5}, True), ({"sync": "local:3"}, False)],
)
def test_other_trained_parameters_are_refused_where_their_weights_are_kept(options: Any, refused: bool) -> None:
    """Another layer of the same size is trained in place of a frozen one."""
    kf.init(**CommOptions(**options).named())
    net = nn.Sequential(network(), *(nn.Linear(2, 2) for _ in range(2)))
    net[2].requires_grad_(False)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    said = r"the trained parameters have changed since this mode began: call kf.set_sync\('ssgd'\)"
    with pytest.raises(RuntimeError, match=said) if refused else contextlib.nullcontext():
        for number, step in enumerate(kf.DataLoader(net, data(), opt, batch_size=12, micro_batch=6)):
            for x, y in step:
                F.mse_loss(net(x), y).backward()
            update(opt)
            if number == 3:
                net[1].requires_grad_(False)
                net[2].requires_grad_(True)
                opt.rebuild()


def test_what_is_no_mode_is_refused() -> None:
    assert str(Sync.parse("local:999999")) == "local:999999" and str(Sync.parse("local:07")) == "local:7"
    assert str(Sync.parse("pair:02,8")) == "pair:2,8" and Sync.parse("pair").far is None
    pairs = ("pair:3", "pair:0,3", "pair:8,2", "pair:1,8,64", "pair:1,1000000")
    for text in ("often", "local:x", "ssgd:2", "8", "local:0", "local:1000000", "local", *pairs):
        with pytest.raises(ValueError, match=f"^comm.sync={text}: must be one of ssgd, sma, pair, local:N with N from"):
            Sync.parse(text)
        assert not SETTINGS["comm_sync"].allows(text)  # what is asked for later has the limits of what is configured


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
    assert job.summary["heldout_accuracy"] > 0.85
    return job


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "moment", "call", "step", "after"),
    [
        ("sma", "between_reduction_and_update", "end", 52, False),
        ("sma", "evaluation", "average", 66, True),  # where models meet, before ssgd
        ("local:5", "evaluation", "average", 66, False),
    ],
)
def test_workers_that_are_lost_take_nobody_along(
    tmp_path: Path, mode: str, moment: str, call: str, step: int, after: bool
) -> None:
    """The others go on, newcomers join, all meet in one model, and then have the same parameters at each step.

    A worker lost in the middle of a synchronisation: all of it happens, or nothing.
    """
    kills, modes = events(f"15 {moment} 1 of 3, 40 after_step 0 of 3"), {"4": mode, "66": "ssgd"}
    killed = {"step": step, "rank": 1, "call": call, "after": after}
    settings = [] if mode == "sma" else OUTER
    job = job_of_modes(tmp_path, settings, modes, events=kills, gates=changes("38:3 50:3 80:3"), killed=killed)
    assert [view["reason"] for view in job.views].count("failure") == 3
    modes_seen = [event["sync"] for event in job.of_kind("decision") if "sync" in event]
    assert modes_seen == [["ssgd", mode], [mode, "ssgd"]]
    by_step = {record["step"]: record for record in job.metrics}
    assert all(by_step[step]["grad_norm"] is None for step in range(8, 70) if by_step[step]["workers"] > 1)
    assert all(by_step[step]["grad_norm"] is not None for step in range(70, len(by_step)))
    assert all(record["loss"] is not None for record in job.metrics)
