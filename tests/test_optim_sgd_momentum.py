"""FusedSGD makes, keeps and restores its momentum buffer whenever torch.optim.SGD does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kfuse as kf
from kfuse.session import reset


class Net(nn.Module):
    """Two layers, each of which can be left out of a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])


def make(kind: Any, net: Net, momentum: float, dampening: float) -> Any:
    groups = [{"params": layer.parameters()} for layer in net.layers]
    return kind(groups, lr=0.1, momentum=momentum, dampening=dampening, weight_decay=0.01)


def compare(ours: Any, theirs: Any, net: Net, twin: Net) -> None:
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    state, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert set(state) == set(wanted)
    for key in wanted:
        assert set(state[key]) == set(wanted[key])
        for name, value in wanted[key].items():
            assert (state[key][name] is None) == (value is None)
            assert value is None or torch.allclose(state[key][name], value, rtol=1e-5, atol=1e-6)


SETTINGS = st.sampled_from([("momentum", 0.0), ("momentum", 0.9), ("dampening", 0.0), ("dampening", 0.4), ("lr", 0.02)])
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.sampled_from([(0,), (1,), (0, 1)])),
    st.tuples(st.just("set"), st.integers(0, 1), SETTINGS),
    st.tuples(st.sampled_from(["save and load", "load torch's", "rebuild"])),
)


@settings(max_examples=60)
@given(
    momentum=st.sampled_from([0.0, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    actions=st.lists(ACTIONS, min_size=1, max_size=12),
)
def test_the_buffer_and_the_update_are_torchs(momentum: float, dampening: float, actions: list[Any]) -> None:
    reset()
    net = Net()
    twin = copy.deepcopy(net)
    ours, theirs = make(kf.FusedSGD, net, momentum, dampening), make(torch.optim.SGD, twin, momentum, dampening)
    x = torch.tensor([[0.5, -1.0, 2.0]])
    for action in [*actions, ("step", (0, 1))]:
        match action:
            case "step", which:
                for model, opt in ((net, ours), (twin, theirs)):
                    sum(model.layers[k](x).square().sum() for k in which).backward()  # type: ignore[union-attr]
                    opt.step()
                    opt.zero_grad()
            case "set", group, (name, value):
                for opt in (ours, theirs):
                    opt.param_groups[group][name] = value
            case ("save and load",):
                state, wanted = (pickle.loads(pickle.dumps(opt.state_dict())) for opt in (ours, theirs))
                ours, theirs = make(kf.FusedSGD, net, 0.5, 0.0), make(torch.optim.SGD, twin, 0.5, 0.0)
                ours.load_state_dict(state)
                theirs.load_state_dict(wanted)
            case ("load torch's",):
                ours.load_state_dict(theirs.state_dict())
            case _:
                ours.rebuild()
        compare(ours, theirs, net, twin)


def test_a_state_of_another_shape_is_refused_by_name_and_nothing_is_loaded() -> None:
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    opt, saved = (kf.FusedSGD(n.named_parameters(), momentum=0.9) for n in (net, other))
    other(torch.ones(2, 4)).sum().backward()
    saved.step()
    state = copy.deepcopy(saved.state_dict())
    state["state"][1]["momentum_buffer"] = torch.ones(1)
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"parameter 1 \(bias\) of shape \(3,\): the saved momentum_buffer has shape"):
        opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] != 7.0 and not opt.state_dict()["state"]
