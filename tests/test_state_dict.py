"""kf.state_dict() holds all that a training depends on: a new session that loads it goes on with the same bits."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from problems import update
from test_fit_checkpoint import ARGUMENTS, Growing, assert_equal, network, problem, with_fit
from torch import nn
from torch.optim.lr_scheduler import StepLR

import kfuse as kf
from kfuse.comm.settings import CommOptions
from kfuse.session import reset

Weights = dict[str, torch.Tensor]


class Saving(Growing):
    """Keeps what kf.state_dict() returns in a hook, once: after these steps."""

    def __init__(self, hook: str, after: int) -> None:
        super().__init__()
        self.after, self.epochs, self.kept = after, 0, b""
        self._hook = hook

    def after_step(self) -> None:
        super().after_step()
        self._save("after_step")

    def after_epoch(self) -> None:
        self.epochs += 1
        self._save("after_epoch")

    def _save(self, hook: str) -> None:
        if hook == self._hook and not self.kept and self.seen >= self.after:
            self.kept = written(kf.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epochs = state["epochs"]


def written(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read(state: bytes) -> dict[str, Any]:
    """Nothing in it can run code."""
    found: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    return found


def weights(net: nn.Module) -> Weights:
    return {name: value.clone() for name, value in net.state_dict().items()}


def loop(loader: Any, net: nn.Module, opt: Any, keep_at: int = -1) -> bytes:
    """Trains to the end; returns kf.state_dict() after that step's update."""
    kept = b""
    for step in loader:
        for x, y in step:
            step.loss = F.cross_entropy(net(x), y)
            step.loss.backward()
        opt.step()
        if step.number == keep_at:
            kept = written(kf.state_dict())
        opt.zero_grad()
    return kept


def new(scheduled: bool = False) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its optimizer and more arguments, in a session of their own."""
    reset()
    net = network()
    opt = kf.Optimizer(torch.optim.AdamW(net.parameters(), lr=0.05))
    return net, opt, {"scheduler": StepLR(opt, 3, 0.9)} if scheduled else {}


@pytest.mark.parametrize(("after", "scheduled"), [(0, False), (7, True), (12, True)])
def test_a_loop_goes_on_with_the_same_bits(after: int, scheduled: bool) -> None:
    """After a step's update, in the middle of an epoch and at its end (7), before and after the batch grows."""
    net, opt, more = new(scheduled)
    kept = loop(kf.DataLoader(net, problem(), opt, policy=Growing(), **ARGUMENTS, **more), net, opt, after)
    undisturbed = weights(net)

    for load in (lambda loader, state: loader.load_state_dict(state), lambda loader, state: kf.load_state_dict(state)):
        net, opt, more = new(scheduled)
        loader = kf.DataLoader(net, problem(), opt, policy=(policy := Growing()), **ARGUMENTS, **more)
        load(loader, read(kept))
        loop(loader, net, opt)
        assert_equal(weights(net), undisturbed)
        assert policy.seen == 22


@pytest.mark.parametrize(("hook", "after"), [("after_step", 13), ("after_epoch", 8)])
def test_fit_goes_on_with_the_same_bits_from_a_hook(hook: str, after: int) -> None:
    """The hook that took the state is not called again for that step."""
    net, opt, more = new(scheduled=True)
    with_fit(net, opt, policy := Saving(hook, after), **ARGUMENTS, **more, scheduler_interval="epoch")
    undisturbed, counts = weights(net), (policy.seen, policy.epochs)

    net, opt, more = new(scheduled=True)
    kf.load_state_dict(read(policy.kept))
    again = Saving("never", 0)
    with_fit(net, opt, again, **ARGUMENTS, **more, scheduler_interval="epoch")
    assert_equal(weights(net), undisturbed)
    assert (again.seen, again.epochs) == counts == (22, 4)


MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a decision under way": ({}, {}),
    "adascale": ({}, {"lr_scaling": "adascale"}),
    "DiLoCo": ({"sync": "local:3", "outer_momentum": 0.9, "outer_lr": 0.7}, {}),
    "sma": ({"sync": "sma", "sma_momentum": 0.5}, {}),
}


def in_mode(mode: str, keep: str, state: dict[str, Any] | None = None, steps: int = 9) -> tuple[Weights, Any]:
    """Weights at the end, and the state after step 5, where the policy asks for another batch size at that moment.

    keep: "body", "break", "end": where it is taken; training goes on after "body" only. It has fewer steps than
    those after which slow workers get fewer micro-batches.
    """
    options, arguments = MODES[mode]
    kf.init(**CommOptions(**options).named())
    net = network()
    opt = kf.FusedSGD(net.parameters(), lr=0.05, momentum=0.9)
    arguments = {"batch_size": 8, "micro_batch": 2, "steps": 6 if keep == "end" else steps, **arguments}
    loader = kf.DataLoader(net, problem(), opt, policy=Growing(at=5), epochs=9, **arguments)
    if state is not None:
        loader.load_state_dict(state)
    kept = None
    for step in loader:
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
        update(opt)
        if step.number == 5 and keep == "body":
            kept = loader.state_dict()
        if step.number == 5 and keep == "break":
            break
    return weights(net), kept if kept is not None else loader.state_dict()


@pytest.mark.parametrize(
    ("mode", "keep"),
    [*((mode, "break") for mode in MODES), ("a decision under way", "end"), ("adascale", "end")],
)
def test_the_state_after_the_loop_is_the_one_in_its_body(mode: str, keep: str) -> None:
    """Also where decisions, AdaScale's statistics, an outer step or a central model are under way."""
    workers = 2 if mode == "sma" else 1
    undisturbed, kept = run_workers(workers, in_mode, mode, "body")[0]
    _, found = run_workers(workers, in_mode, mode, keep)[0]
    states = [read(written(state)) for state in (kept, found)]
    ends = [run_workers(workers, in_mode, mode, "no", state)[0][0] for state in states]
    assert_equal(*ends)
    if mode != "sma":  # there a worker that takes a state begins from the central model
        assert_equal(ends[0], undisturbed)


# -- where it cannot be called ----------------------------------------------------------------------------------------


def test_wrong_places_are_named() -> None:
    with pytest.raises(RuntimeError, match="no training is under way"):
        kf.state_dict()
    net, opt, _ = new()
    for step in kf.DataLoader(net, problem(), opt, batch_size=32):
        with pytest.raises(RuntimeError, match="training has begun: call it before the first step"):
            kf.load_state_dict({})
        for x, y in step:
            F.cross_entropy(net(x), y).backward()
        with pytest.raises(RuntimeError, match=r"a step is under way: call it after opt.step\(\)"):
            kf.state_dict()
        update(opt)


# -- the optimizer's own ----------------------------------------------------------------------------------------------


def steps_by_hand(net: nn.Module, opt: Any, count: int) -> None:
    x, y = problem()
    for _ in range(count):
        for j in range(4):
            with opt.micro_batch(samples=16, last=j == 3):
                F.cross_entropy(net(x[16 * j : 16 * j + 16]), y[16 * j : 16 * j + 16]).backward()
        update(opt)


def running(opt: Any) -> tuple[float | None, ...]:
    """The running means of S and G2, and the noise scale's lower limit."""
    return opt.stats.mean_grad_variance, opt.stats.mean_grad_sq, opt.stats.noise_scale_low


def plain_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", ["wrapped", "fused"])
def test_an_optimizers_state_has_the_statistics(kind: str) -> None:
    """torch's optimizer leaves them alone, and with its state ours are kept."""

    def make(net: nn.Module) -> Any:
        if kind == "fused":
            return kf.FusedAdamW(net.parameters(), lr=0.01)
        return kf.Optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))

    net = plain_network()
    opt = make(net)
    steps_by_hand(net, opt, 20)
    latest = opt.stats
    saved, parameters = read(written(opt.state_dict())), copy.deepcopy(net.state_dict())
    steps_by_hand(net, opt, 5)
    expected = running(opt)

    reset()
    other = plain_network()
    other.load_state_dict(parameters)
    opt = make(other)
    opt.load_state_dict(saved)
    assert repr(opt.stats) == repr(latest)
    plain = torch.optim.AdamW(plain_network().parameters())
    plain.load_state_dict(copy.deepcopy(saved))
    assert set(plain.state_dict()) == {"state", "param_groups"}
    opt.load_state_dict(plain.state_dict())
    steps_by_hand(other, opt, 5)
    assert expected[0] is not None and running(opt) == expected
    assert_equal(weights(other), weights(net))
