"""Workers whose settings, or whose sharded states, are not the same end with an error that names what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn

import kfuse as kf
from kfuse.optim.consistency import numeric_options, salt


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 3))


def sample(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + kf.rank()))
    return x, x[:, :3].sin()


def option(name: str, value: object) -> Callable[[Any, Any], None]:
    return lambda opt, net: opt.param_groups[1].__setitem__(name, value)


def changed(opt: Any, net: Any) -> None:
    net[2].bias.data.add_(1.0)


def nothing(opt: Any, net: Any) -> None:
    """Its backward is left out."""


ADAMW: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "learning rate": (option("lr", 0.5), "the learning rate of group 1 (ranks 1 against rank 0"),
    "betas": (option("betas", (0.9, 0.5)), "betas[1] of group 1 (ranks 1 against rank 0"),
    "one more": (option("mine", 2), "the parameter groups, or their options (ranks 1 have others than rank 0)"),
    "clip_norm": (lambda opt, net: opt.set_clip_norm(0.5), "clip_norm (ranks 1 against rank 0"),
    "skip_nonfinite": (lambda opt, net: setattr(opt, "skip_nonfinite", False), "skip_nonfinite (ranks 1 against"),
    "a parameter": (changed, "parameter 3 (ranks 1 against rank 0"),
    "an older state": (
        lambda opt, net: opt.load_state_dict(opt.first_state),
        "the number of updates of parameter ",
    ),
    "a step without a backward": (nothing, "the number of opt.step() calls without a backward (ranks 1 "),
}


def of_updates(state: str, name: str) -> bool:
    """Whether the workers differ in what each has of sharded state; with replicated state it changes parameters."""
    return state == "replicated" and name == "an older state"


def differ(state: str) -> dict[str, tuple[int, str]]:
    """Rank 1 alone does each of these things, in step 3. The step in which it was noticed, and how."""
    kf.init(comm_state=state, comm_check_every=1, comm_bucket_mb=0.02)
    found = {}
    for name, (act, _) in ADAMW.items():
        if of_updates(state, name):
            continue
        net = network()
        groups = [{"params": list(net[0].parameters())}, {"params": [*net[2].parameters(), *net[4].parameters()]}]
        opt: Any = kf.FusedAdamW(groups, lr=0.01)
        opt.first_state = opt.state_dict()
        step = 0
        try:
            for step in range(12):
                differs = kf.rank() == 1 and step == 3
                if differs and act is changed:
                    act(opt, net)
                if not (differs and act is nothing):
                    x, y = sample(step)
                    F.mse_loss(net(x), y).backward()
                if differs and act is not changed:
                    act(opt, net)
                opt.step()
                opt.zero_grad()
        except kf.ConsistencyError as error:
            found[name] = (step, str(error))
    return found


@pytest.mark.parametrize("state", ["sharded", "replicated"])
def test_workers_that_differ_are_told_what_differs(state: str) -> None:
    expected = {name: said for name, (_, said) in ADAMW.items() if not of_updates(state, name)}
    for found in run_workers(2, differ, state):
        assert found.keys() == expected.keys()
        for name, (step, said) in found.items():
            assert expected[name] in said and "\n" not in said, said
            assert 3 <= step <= 4, (name, step)


def scheduled() -> int:
    kf.init(comm_state="sharded", comm_check_every=1)
    net = network()
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}, {"params": net[4].weight}]
    opt = kf.FusedAdamW(groups, lr=0.01, clip_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.01, 0.03], total_steps=13)
    for step in range(12):
        x, y = sample(step)
        F.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()  # it changes betas too
        if step == 6:
            opt.load_state_dict(opt.state_dict())
            opt.set_clip_norm(0.5)
        if step == 8:
            net[2].requires_grad_(False)
            opt.rebuild()
    return opt.engine.step


def test_what_all_workers_change_alike_is_no_difference() -> None:
    assert run_workers(2, scheduled) == [12, 12]


def one_idles() -> str:
    """The second of three workers never has a micro-batch; its learning rate differs."""
    kf.init(comm_check_every=1, comm_state="sharded")
    net = nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    idle = None
    try:
        for step in kf.DataLoader(net, (torch.randn(24, 4), torch.randn(24, 2)), opt, batch_size=2, micro_batch=1):
            idle = len(step.mine) == 0
            if idle:
                opt.param_groups[0]["lr"] = 0.3
            for x, y in step:
                F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
    except kf.ConsistencyError as error:
        return str(error)
    return f"not noticed, idle: {idle}"


def test_a_worker_without_a_micro_batch_is_compared() -> None:
    said = run_workers(3, one_idles)
    assert all("the learning rate of group 0 (ranks" in each for each in said), said


def test_options_are_numbers_by_name() -> None:
    group = {"params": [], "lr": 0.1, "betas": (0.9, 0.99), "eps": torch.tensor(1e-8), "nesterov": True, "name": "head"}
    found = numeric_options([{"fused": True, "foreach": None}, group | {"rho": None}])
    assert math.isnan(found.pop("rho of group 1"))
    assert found == {
        "betas[0] of group 1": 0.9,
        "betas[1] of group 1": 0.99,
        "eps of group 1": pytest.approx(1e-8),
        "nesterov of group 1": 1.0,
    }


def test_the_salt_tells_numbers_and_names_apart() -> None:
    salts = [{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "c": 2.0}, {"a": 1.0}, {"a": math.nan, "b": 2.0}]
    assert len({salt(numbers) for numbers in salts}) == len(salts)


def averaged() -> bool:
    torch.manual_seed(0)
    opt = kf.FusedSGD(nn.Linear(200, 100).parameters(), lr=0.1)
    before = [weight.clone() for weight in opt.updates.weights()]
    opt.updates.average_models()
    return all(map(torch.equal, before, opt.updates.weights()))


def test_an_average_of_equal_models_is_that_model() -> None:
    assert all(run_workers(5, averaged))
