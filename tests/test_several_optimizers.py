"""kf.Optimizer over several torch optimizers trains as a plain loop that steps each of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import relative
from test_fit_checkpoint import Growing, Interrupted, assert_equal, problem, with_fit, with_loader
from test_kfuse_run import run_script
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import kfuse as kf
from kfuse.session import reset


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def pair(net: nn.Sequential, lr: float = 0.02) -> tuple[Any, Any]:
    """Each of their three groups has a rate of its own."""
    hidden = net[2].weight
    rest = [p for p in net.parameters() if p is not hidden]
    groups = [{"params": rest[:1], "lr": 0.1 * lr}, {"params": rest[1:]}]
    return torch.optim.Muon([hidden], lr=lr), torch.optim.AdamW(groups, lr=0.3 * lr)


def with_sgd(net: nn.Sequential) -> tuple[Any, Any]:
    """Unlike Muon and AdamW it sees how long a gradient is."""
    muon, adamw = pair(net)
    return muon, torch.optim.SGD(adamw.param_groups[0]["params"] + adamw.param_groups[1]["params"], 0.5, momentum=0.5)


def same_steps(clip_norm: float | None, steps: int = 6) -> float:
    """The largest relative difference of the parameters, with a change of states in the middle."""
    kf.init()
    rank, size = kf.rank(), kf.size()
    x, y = problem()
    ours = network()
    theirs = copy.deepcopy(ours)
    make = pair if clip_norm is None else with_sgd
    opt, plain = kf.Optimizer(*make(ours), clip_norm=clip_norm), make(theirs)
    for step in range(steps):
        here = slice(rank, None, size)
        F.cross_entropy(ours(x[here]), y[here]).backward()
        F.cross_entropy(theirs(x), y).backward()
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
            assert norm > clip_norm
        opt.step()
        if clip_norm is not None:
            assert opt.stats is not None and opt.stats.grad_norm == pytest.approx(float(norm), rel=1e-3)
        for each in plain:
            each.step()
        for each in (opt, *plain):
            each.zero_grad()
        if step == 2:  # a state goes both ways
            saved = copy.deepcopy(opt.state_dict())
            opt.load_state_dict({"optimizers": [each.state_dict() for each in plain]})
            for each, state in zip(plain, saved["optimizers"], strict=True):
                each.load_state_dict(state)
    return relative(ours.parameters(), theirs.parameters())


def test_one_worker_has_the_bits_of_a_plain_loop() -> None:
    assert run_workers(1, same_steps, None)[0] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_one_clip_over_all_parameters(workers: int) -> None:
    """Rounding differs, and Muon computes in bf16."""
    for error in run_workers(workers, same_steps, 0.05):
        assert error < 1e-3


def local() -> list[float]:
    """Local SGD averages the states too, also where a worker has none yet."""
    kf.init(comm_sync="local:2")
    net = network()
    opt = kf.Optimizer(*pair(net))
    arguments: dict[str, Any] = {"batch_size": 16, "batch_micro": 8, "train_steps": 4}
    with_loader(net, opt, kf.NoPolicy(), **arguments)
    states = [value for p in net.parameters() for _, value in sorted(opt.state[p].items())]
    return [float(value.double().sum()) for value in (*net.parameters(), *states)]


def test_models_and_states_are_averaged() -> None:
    one, other = run_workers(2, local)
    assert one == other and len(one) == 6 + 1 + 5 * 3


# -- schedulers, checkpoints ------------------------------------------------------------------------------------------


def train(how: Any, tmp_path: Path | None = None, until: int | None = None) -> dict[str, Tensor]:
    """With schedulers of different kinds, and a batch that grows."""
    reset()
    net = network()
    muon, adamw = pair(net)
    opt = kf.Optimizer(muon, adamw)
    arguments: dict[str, Any] = {"batch_size": 8, "train_epochs": 4, "train_clip_norm": 0.5}
    arguments["scheduler"] = [StepLR(adamw, 3, 0.5), LambdaLR(muon, lambda step: 0.9**step)]
    if until == 13:
        arguments["scheduler"].reverse()  # the same training
    if tmp_path is not None:
        arguments |= {"checkpoint_dir": tmp_path, "checkpoint_every_steps": 3, "checkpoint_resume": "auto"}
    how(net, opt, Growing(until=until), **arguments)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx(
        [0.02 * 0.9**22, 0.002 * 0.5**7, 0.006 * 0.5**7]
    )
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("how", [with_fit, with_loader])
def test_a_resumed_training_has_the_same_bits(how: Any, tmp_path: Path) -> None:
    """Each optimizer's rates follow its own scheduler."""
    undisturbed = train(how)
    for until in (5, 13):
        with pytest.raises(Interrupted):
            train(how, tmp_path, until)
    assert_equal(train(how, tmp_path), undisturbed)


# -- wrong uses -------------------------------------------------------------------------------------------------------


def test_wrong_optimizers_are_refused() -> None:
    net = network()
    muon, adamw = pair(net)
    empty = torch.optim.SGD([{"params": []}])
    every = torch.optim.SGD(net.parameters())
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((muon, every), ValueError, r"parameter 2 of SGD, of shape \(12, 12\), is a parameter of Muon too"),
        ((muon, adamw, muon), ValueError, "the same Muon is given twice"),
        ((muon, empty), ValueError, "SGD has no parameters: leave it out"),
        ((muon, [adamw]), TypeError, "wraps a torch.optim.Optimizer, not list"),
        ((muon, kf.FusedSGD(network().parameters())), TypeError, "not FusedSGD"),
    ]
    for given, error, message in wrong:
        with pytest.raises(error, match=message) as raised:
            kf.Optimizer(*given)
        assert "\n" not in str(raised.value)


def test_wrong_uses_are_refused() -> None:
    net = network()
    muon, adamw = pair(net)
    opt = kf.Optimizer(muon, adamw)
    with pytest.raises(ValueError, match="give the group to one of them before"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match='must have "optimizers": a list of the state_dict of Muon, AdamW'):
        opt.load_state_dict({"optimizers": [adamw.state_dict(), muon.state_dict()]})
    states: list[tuple[Any, Any, str]] = [
        (opt, adamw.state_dict(), "optimizers"),
        (opt, [muon.state_dict(), adamw.state_dict()], "optimizers"),
        (kf.Optimizer(torch.optim.SGD(network().parameters())), {"state": {}}, "param_groups"),
    ]
    for loads, state, needed in states:
        with pytest.raises(ValueError, match=rf'load_state_dict: a dictionary with "{needed}" is needed'):
            loads.load_state_dict(state)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        kf.FusedSGD(network().parameters()).load_state_dict(opt.state_dict())
    other = StepLR(pair(network())[0], 1)
    with pytest.raises(ValueError, match="scheduler: it belongs to another optimizer"):
        kf.fit(net, problem(), opt, scheduler=[other])
    first = StepLR(muon, 1)
    with pytest.raises(ValueError, match="scheduler: the same StepLR is given twice"):
        kf.fit(net, problem(), opt, scheduler=[first, first])
    for left_out in (adamw, opt):
        StepLR(left_out, 1)
        with pytest.raises(ValueError, match=r"kf\.fit would not step it"):
            kf.fit(net, problem(), opt, scheduler=first)
        del left_out.step  # the scheduler's mark
    net(problem()[0]).sum().backward()
    adamw.load_state_dict(adamw.state_dict())
    with pytest.raises(RuntimeError, match=r"one has other param_groups than when kf\.Optimizer was made"):
        opt.step()


def test_a_step_of_one_alone_is_refused() -> None:
    """Left in the loop beside opt.step(), it would make each update twice."""
    net = network()
    muon, adamw = pair(net)
    kf.Optimizer(muon, adamw)
    opt = kf.Optimizer(muon, adamw)
    net(problem()[0]).sum().backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"AdamW\.step\(\): kf\.Optimizer has this AdamW and steps it"):
        adamw.step()


def test_sharded_state_is_refused() -> None:
    reset()
    kf.init(comm_state="sharded")
    with pytest.raises(ValueError, match=r"comm\.state=sharded: kf\.Optimizer has whole state only"):
        kf.Optimizer(*pair(network()))


# -- a worker that joins -----------------------------------------------------------------------------------------------


SCRIPT = """
import time
import torch, torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
import kfuse as kf

kf.init(comm_check_every=1)

class Grow(kf.BasePolicy):
    def decide(self, signals):
        return kf.Decision(workers=2) if signals.step == 5 else None

net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
muon = torch.optim.Muon([net[0].weight])
adamw = torch.optim.AdamW([net[0].bias, *net[2].parameters()], lr=0.002)
opt = kf.Optimizer(adamw, muon)
schedulers = [LambdaLR(muon, lambda step: 0.5), LambdaLR(adamw, lambda step: 1 / (1 + step))]
x, y = torch.randn(512, 6), torch.randint(3, (512,))
settings = {"batch_size": 8, "batch_micro": 4, "train_epochs": 10, "policy": Grow(), "scheduler": schedulers}
for step in kf.DataLoader((x, y), net, opt, **settings):
    time.sleep(0.1 if kf.size() == 1 else 0.002)  # minutes for the second one to come
    for inputs, targets in step:
        F.cross_entropy(net(inputs), targets).backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.full
def test_a_worker_that_joins_has_all_states_and_schedules(tmp_path: Path) -> None:
    """The parameters stay the same on both: the check would end the job."""
    metrics = run_script(tmp_path, SCRIPT, "--max-workers", "2", workers=1).metrics
    assert metrics[-1]["workers"] == 2
    for record in metrics:
        assert record["lr"] == pytest.approx(0.002 / (1 + record["step"]))
