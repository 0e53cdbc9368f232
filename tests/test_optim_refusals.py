"""What an optimizer cannot do correctly is refused by name: options, copies, inner optimizers, kinds of gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import kfuse as kf
from kfuse.comm.options import TRANSPORT_NAMES
from kfuse.comm.plan import StepPlan

MAKERS = {
    "adamw": lambda params: kf.FusedAdamW(params, lr=0.01),
    "sgd": lambda params: kf.FusedSGD(params, lr=0.01, momentum=0.9),
    "lamb": lambda params: kf.FusedLAMB(params, lr=0.01),
    "wrapped": lambda params: kf.Optimizer(torch.optim.AdamW(params, lr=0.01)),
}


def step(net: nn.Module, opt: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 4)).square().sum().backward()
    opt.step()
    opt.zero_grad()


# -- options of torch's that the kernels do not have -----------------------------------------------------------------

OPTIONS = [
    ("adamw", "amsgrad", True, "made"),
    ("adamw", "decoupled_weight_decay", False, "added"),
    ("adamw", "differentiable", True, "set"),
    ("sgd", "differentiable", True, "set"),
    ("lamb", "amsgrad", True, "made"),
]


@pytest.mark.parametrize(("kind", "option", "value", "when"), OPTIONS)
def test_options_that_the_kernels_do_not_have_are_refused(kind: str, option: str, value: bool, when: str) -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    group = {"params": second.parameters(), option: value}
    make = MAKERS[kind]
    with pytest.raises(ValueError, match=rf"parameter group 1 has {option}={value}, which Fused.* does not offer"):
        if when == "made":
            make([{"params": first.parameters()}, group])
        elif when == "added":
            make(first.parameters()).add_param_group(group)
        else:
            opt = make([{"params": first.parameters()}, {"params": second.parameters()}])
            opt.param_groups[1][option] = value
            step(first, opt)


def test_a_state_with_such_an_option_is_refused_and_nothing_is_loaded() -> None:
    net = nn.Linear(4, 2)
    opt = kf.FusedAdamW(net.parameters(), lr=0.01)
    state = opt.state_dict()
    state["param_groups"][0] |= {"amsgrad": True, "lr": 5.0}
    with pytest.raises(ValueError, match="parameter group 0 has amsgrad=True"):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.01


def test_a_state_of_adam_is_loaded_as_torchs_adamw_does() -> None:
    ours, theirs = nn.Linear(4, 2), nn.Linear(4, 2)
    theirs.load_state_dict(ours.state_dict())
    other = nn.Linear(4, 2)
    adam = torch.optim.Adam(other.parameters(), weight_decay=0.3, foreach=True)
    step(other, adam)
    for net, kind in ((ours, kf.FusedAdamW), (theirs, torch.optim.AdamW)):
        opt: Any = kind(net.parameters())
        opt.load_state_dict(adam.state_dict())
        step(net, opt)
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-6)


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "wrapped"])
def test_copies_of_an_optimizer_are_refused_with_the_remedy(kind: str) -> None:
    net = nn.Linear(4, 2)
    opt = MAKERS[kind](net.parameters())
    step(net, opt)
    copies: list[Any] = [copy.deepcopy, copy.copy, pickle.dumps]
    for copied in copies:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copied(opt)
    step(net, opt)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_copied_model_with_a_new_optimizer_that_loads_the_state_goes_on_alike(kind: str) -> None:
    net = nn.Linear(4, 2)
    opt = MAKERS[kind](net.parameters())
    average = AveragedModel(net)
    for _ in range(3):
        step(net, opt)
        average.update_parameters(net)
    twin = copy.deepcopy(net)
    other = MAKERS[kind](twin.parameters())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(3):
        step(net, opt)
    assert not torch.equal(twin.weight, net.weight)
    for _ in range(3):
        step(twin, other)
    assert torch.equal(twin.weight, net.weight) and torch.equal(twin.bias, net.bias)
    assert not torch.equal(average.module.weight, net.weight)


# -- inner optimizers, kinds of gradients ----------------------------------------------------------------------------


def test_an_optimizer_that_needs_a_closure_or_sparse_gradients_cannot_be_wrapped() -> None:
    net = nn.Linear(4, 2)
    with pytest.raises(TypeError, match=r"LBFGS\.step needs a closure.*one backward a step"):
        kf.Optimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(TypeError, match=r"SparseAdam takes sparse gradients.*sparse=False"):
        kf.Optimizer(torch.optim.SparseAdam(net.parameters()))
    step(net, torch.optim.SGD(net.parameters()))


@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
def test_a_sparse_gradient_is_refused_by_the_parameters_name(kind: str) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    opt = MAKERS[kind]([("table.weight", table.weight)])
    with pytest.raises(
        RuntimeError, match=r"parameter 0 \(table\.weight\) of shape \(10, 4\) has a sparse .*sparse=False"
    ):
        table(torch.tensor([1, 3])).sum().backward()
    del opt


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda v: torch.tanh(self.first(v)), x, use_reentrant=self.reentrant)
        out: Tensor = checkpoint(self.last, hidden, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("how", ["as it is", "use_reentrant=False", "opt.micro_batch"])
def test_reentrant_checkpointing_in_a_bare_backward_trains_as_without_it(how: str) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    net = Checkpointed(reentrant=how != "use_reentrant=False")
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    twin = Checkpointed(reentrant=False)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    if how == "opt.micro_batch":
        with opt.micro_batch(samples=2):
            net(x).square().sum().backward()
    else:
        net(x).square().sum().backward()
    twin(x).square().sum().backward()
    opt.step()
    plain.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)


# -- a layout that changes keeps what was decided ----------------------------------------------------------------------


@pytest.mark.parametrize("change", ["rebuild", "add_param_group"])
def test_a_new_layout_keeps_the_decided_topology_and_the_coming_steps_plan(change: str) -> None:
    net, more = nn.Linear(4, 2), nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    decided = next(name for name in TRANSPORT_NAMES if name != opt.engine.transport_name)
    opt.engine.use_transport(decided, None)
    plan = StepPlan(6, (range(2),))
    opt.begin(plan)
    if change == "rebuild":
        opt.rebuild()
    else:
        opt.add_param_group({"params": more.parameters()})
    assert opt.engine.transport_name == decided
    assert opt.engine.plan is plan
    with opt.micro_batch(samples=4, last=False):
        net(torch.ones(4, 4)).mean().backward()
    with pytest.raises(RuntimeError, match=r"between steps, not between backward and opt\.step\(\)"):
        opt.rebuild()


def test_nesterov_in_a_group_without_momentum_is_torchs() -> None:
    ours, theirs = nn.Linear(4, 2), nn.Linear(4, 2)
    theirs.load_state_dict(ours.state_dict())
    for net, kind in ((ours, kf.FusedSGD), (theirs, torch.optim.SGD)):
        groups = [{"params": [net.weight], "nesterov": True}, {"params": [net.bias], "momentum": 0.9, "nesterov": True}]
        opt: Any = kind(groups, lr=0.1)
        for _ in range(3):
            F.mse_loss(net(torch.ones(2, 4)), torch.zeros(2, 2)).backward()
            opt.step()
            opt.zero_grad()
    assert torch.allclose(ours.weight, theirs.weight) and torch.allclose(ours.bias, theirs.bias)
