"""On one worker the optimizers make torch.optim's updates (LAMB: the paper's), and keep its state and its interface.

`SCRIPTS` are loops of a user's own. Each trains a twin with a kfuse optimizer and one with a plain one.
"""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_lamb import PlainLAMB
from problems import relative
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import kfuse as kf
from kfuse.session import reset


class Net(nn.Module):
    """Two layers, a tied weight, a scalar, an empty parameter, and one used only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 6)
        self.second.weight = nn.Parameter(torch.empty(6, 9))
        nn.init.normal_(self.second.weight, std=0.3)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.first.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.extra = nn.Linear(6, 6, bias=False)
        self.use_extra = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.tied(x.flip(1)))
        out = self.gain * self.second(hidden) + self.empty.sum()
        return out + self.extra(x) if self.use_extra else out


def twins() -> tuple[Net, Net]:
    torch.manual_seed(7)
    net = Net()
    nn.init.zeros_(net.first.bias)  # LAMB moves a tensor of norm 0 by lr * u
    return net, copy.deepcopy(net)


def batches(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, x.roll(1, 1).tanh() + 0.1 * torch.randn(16, 6, generator=generator)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int, seed: int = 0, sign: float = 1.0) -> None:
    for x, y in batches(steps, seed):
        (sign * F.mse_loss(net(x), y)).backward()
        opt.step()
        opt.zero_grad()


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    return relative(ours.parameters(), theirs.parameters())


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(map(torch.equal, ours.parameters(), theirs.parameters()))


KINDS: dict[str, tuple[Any, Any]] = {
    "adamw": (kf.FusedAdamW, torch.optim.AdamW),
    "momentum": (
        lambda p, **more: kf.FusedSGD(p, momentum=0.9, dampening=0.3, **more),
        lambda p, **more: torch.optim.SGD(p, momentum=0.9, dampening=0.3, **more),
    ),
    "sgd": (kf.FusedSGD, torch.optim.SGD),
    "lamb": (kf.FusedLAMB, PlainLAMB),
    "wrapped": (lambda p, **more: kf.Optimizer(torch.optim.Adam(p, **more)), torch.optim.Adam),
}
RATES = {"adamw": 0.01, "momentum": 0.05, "sgd": 0.1, "lamb": 0.01, "wrapped": 0.01}
Make = Callable[..., Any]


def both(kind: str, script: Callable[[Net, Make], object], tolerance: float = 5e-6) -> None:
    """Runs a script with either optimizer: the parameters are the same, and have been trained."""
    nets = twins()
    for net, make in zip(nets, KINDS[kind], strict=True):
        script(net, lambda params, make=make, **more: make(params, **{"lr": RATES[kind], **more}))
    assert difference(*nets) <= tolerance
    assert difference(nets[0], twins()[0]) > 1e-4, "nothing was trained"


def ours(opt: Any) -> bool:
    return hasattr(opt, "engine")


# -- scripts ----------------------------------------------------------------------------------------------------------


def another_group(net: Net, make: Make) -> None:
    net.use_extra = True
    opt = make([p for name, p in net.named_parameters() if "extra" not in name])
    train(net, opt, 5)
    net.zero_grad()
    opt.add_param_group({"params": net.extra.parameters(), "lr": 0.002})
    train(net, opt, 5, seed=1)


def now_and_then(net: Net, make: Make) -> None:
    """Also never used at first: torch leaves such a parameter, its decay and its step count alone."""
    opt = make(net.parameters())
    for k, (x, y) in enumerate(batches(12)):
        net.use_extra = k >= 4 and k % 3 != 0
        F.mse_loss(net(x), y).backward()
        assert (net.extra.weight.grad is not None) == net.use_extra
        opt.step()
        opt.zero_grad()


def freezing(net: Net, make: Make) -> None:
    net.first.requires_grad_(False)
    opt = make(net.parameters())
    for k, trainable in enumerate((False, True, False, True)):
        net.first.requires_grad_(trainable)
        if ours(opt):
            opt.rebuild()
        before = net.first.weight.clone()
        train(net, opt, 3, seed=k)
        assert torch.equal(before, net.first.weight) != trainable


def replaced_data(net: Net, make: Make) -> None:
    opt = make(net.parameters())
    train(net, opt, 3)
    for p in net.parameters():
        p.data = p.data * 0.5
    net.first.bias.data = torch.cat([net.first.bias.data[:6], torch.ones(3)])
    train(net, opt, 3, seed=1)
    net.load_state_dict(twins()[0].state_dict())
    train(net, opt, 3, seed=2)


def edited_gradients(net: Net, make: Make) -> None:
    opt = make(net.parameters())
    for k, (x, y) in enumerate(batches(9)):
        F.mse_loss(net(x), y).backward()
        for p in net.parameters():
            if p.grad is not None and k % 3 == 0:
                p.grad.mul_(0.5).add_(0.01)
            elif p.grad is not None and k % 3 == 1:
                p.grad = p.grad * 0.5 + 0.01
            elif p.dim() < 2:
                p.grad = None
        opt.step()
        opt.zero_grad()


def closures(net: Net, make: Make) -> None:
    opt = make(net.parameters())
    for x, y in batches(5):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        before = F.mse_loss(net(x), y).item()
        assert opt.step(closure).item() == pytest.approx(before)


def gradient_penalty(net: Net, make: Make) -> None:
    opt = make(net.parameters())
    for x, y in batches(3):
        net.zero_grad()
        out = net(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.mse_loss(out, y) + 0.1 * slope.square().mean()).backward()
        opt.step()


def warm_up(net: Net, make: Make) -> None:
    """A scheduler's rate times kfuse's factor is the scheduler's rate to a top that is as many times as high."""
    opt, factor = make(net.parameters()), 0.5
    if ours(opt):
        opt.lr_factor = factor
    schedule = LambdaLR(opt, lambda step: (1.0 if ours(opt) else factor) * min(step, 5) / 5)
    top = opt.param_groups[0]["initial_lr"]
    for x, y in batches(10):
        F.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(top if ours(opt) else top * factor)


def scaled(net: Net, make: Make, unscale: bool = False, clip: bool = False) -> None:
    opt, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for k, (x, y) in enumerate(batches(12)):
        loss = F.mse_loss(net(x), y)
        scaler.scale(loss * float("inf") if k in (0, 5) else loss).backward()
        if unscale:
            scaler.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 2.0**10


def growing(net: Net, make: Make) -> None:
    """Betas follow the batch. Updates of torch's so far are counted in the present batch's: exact corrections."""
    opt, scaler = make(net.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    betas, before, counted = opt.param_groups[0]["betas"], 1, 0
    for k, (x, y) in zip((1, 1, 2, 2, 3, 8, 8, 3, 1), batches(9), strict=True):
        if ours(opt):
            opt.batch_factor = k
        else:
            opt.param_groups[0]["betas"] = tuple(beta**k for beta in betas)
            for state in opt.state.values():
                state["step"] *= before / k
        net.use_extra, overflows = before > 2, before == 2 and k == 3
        loss = F.mse_loss(net(x), y)
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        before, counted = k, counted + (0 if overflows else k)
    if ours(opt):
        assert opt.param_groups[0]["betas"] == betas and opt.state[net.gain]["step"].item() == counted


def clipped_while_scaled(net: Net, make: Make) -> None:
    """`clip_norm` and a GradScaler, beside `unscale_` and clip_grad_norm_."""
    is_ours = ours(make([nn.Parameter(torch.zeros(1))]))
    scaled(net, (lambda p: make(p, clip_norm=0.3)) if is_ours else make, not is_ours, not is_ours)


def wrapped_late(net: Net, make: Make) -> None:
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, opt, 5)
    train(net, kf.Optimizer(opt) if ours(make([nn.Parameter(torch.zeros(1))])) else opt, 5, seed=1)


SCRIPTS: dict[Callable[[Net, Make], None], tuple[str, ...]] = {
    another_group: tuple(KINDS),
    now_and_then: tuple(KINDS),
    freezing: tuple(KINDS),
    replaced_data: ("adamw", "wrapped"),
    edited_gradients: ("adamw", "wrapped"),
    closures: ("adamw",),
    gradient_penalty: ("sgd",),
    warm_up: tuple(KINDS),
    scaled: ("adamw", "momentum", "sgd", "wrapped"),
    growing: ("adamw", "lamb", "wrapped"),
    clipped_while_scaled: ("adamw",),
    wrapped_late: ("wrapped",),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("script", "kind"), [(script, kind) for script, kinds in SCRIPTS.items() for kind in kinds])
def test_a_script_trains_as_with_torchs_optimizer(script: Callable[[Net, Make], None], kind: str) -> None:
    both(kind, script, 2e-5 if kind == "lamb" else 5e-6)


ADAPTIVE: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    {"lr": 0.005, "weight_decay": 0.3, "eps": 1e-3},
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adamw": ADAPTIVE,
    "lamb": ADAPTIVE,
    "sgd": [
        {"lr": 0.05, "nesterov": True},  # without momentum
        {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
        {"lr": 0.03, "momentum": 0.8, "nesterov": True},
    ],
}


@pytest.mark.parametrize(("steps", "maximize"), [(1, True), (50, False)])
@pytest.mark.parametrize("kind", OPTIONS)
def test_several_groups(kind: str, steps: int, maximize: bool) -> None:
    def script(net: Net, make: Make) -> None:
        net.use_extra = True
        params, options = list(net.parameters()), OPTIONS[kind]
        groups = [{"params": params[k :: len(options)], **option} for k, option in enumerate(options)]
        train(net, make(groups, maximize=maximize), steps, sign=-1.0 if maximize else 1.0)

    both(kind, script, 1e-6 if steps == 1 and kind != "lamb" else 2e-5)


@pytest.mark.parametrize("torch_loads", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd", "wrapped"])
def test_state_dict_is_torchs_own_and_training_goes_on(kind: str, torch_loads: bool) -> None:
    net, theirs = twins()
    net.use_extra = theirs.use_extra = True
    save, load = KINDS[kind] if torch_loads else KINDS[kind][::-1]
    plain = KINDS[kind][1]
    first, reference = save(net.parameters(), lr=0.01), plain(theirs.parameters(), lr=0.01)
    train(net, first, 7)
    train(theirs, reference, 7)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    resumed = Net()
    resumed.load_state_dict(net.state_dict())
    resumed.use_extra = True
    second = load(resumed.parameters(), lr=0.01)
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    train(resumed, second, 7, seed=1)
    train(theirs, reference, 7, seed=1)
    assert difference(resumed, theirs) <= 5e-6
    found, wanted = second.state_dict()["state"], reference.state_dict()["state"]
    assert {k: set(v) for k, v in found.items()} == {k: set(v) for k, v in wanted.items()}
    if not torch_loads and kind != "wrapped":
        torch.testing.assert_close(kept, state, rtol=0, atol=0)  # what was loaded was copied


def replace(opt: Any, net: Net) -> None:
    opt.state = collections.defaultdict(dict)


def clear(opt: Any, net: Net) -> None:
    opt.state.clear()


def take_out(opt: Any, net: Net) -> None:
    opt.state.pop(net.first.weight)


@pytest.mark.parametrize("reset_state", [replace, clear, take_out])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "lamb", "wrapped"])
def test_state_that_the_user_takes_away_begins_anew(kind: str, reset_state: Callable[[Any, Net], None]) -> None:
    nets = twins()
    for net, make in zip(nets, KINDS[kind], strict=True):
        opt = make(net.parameters(), lr=0.01)
        train(net, opt, 4)
        reset_state(opt, net)
        train(net, opt, 4, seed=1)
    assert difference(*nets) < 1e-5


def test_hooks_of_torchs_optimizers_run_once() -> None:
    net, calls = twins()[0], list[str]()
    opt = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    opt.register_state_dict_post_hook(lambda opt, state: calls.append("state_dict"))
    opt.register_load_state_dict_pre_hook(lambda opt, state: calls.append("load_state_dict"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("step"))
    try:
        train(net, opt, 1)
    finally:
        handle.remove()
    opt.load_state_dict(opt.state_dict())
    assert calls == ["step", "state_dict", "load_state_dict"]


def test_lr_factor_puts_a_wrapped_optimizers_rate_back_also_when_it_raises() -> None:
    class Fails(torch.optim.SGD):
        seen: float

        def step(self, closure: Any = None) -> None:
            self.seen = float(self.param_groups[0]["lr"])
            raise ArithmeticError

    net, rate = twins()[0], torch.tensor(0.25)
    inner = Fails(net.parameters(), lr=rate)
    opt = kf.Optimizer(inner)
    opt.lr_factor = 0.5
    with pytest.raises(ArithmeticError):
        train(net, opt, 1)
    assert inner.seen == 0.125
    assert opt.param_groups[0]["lr"] is rate and inner.param_groups[0]["lr"] is rate and rate.item() == 0.25


# -- FusedSGD's momentum buffer ---------------------------------------------------------------------------------------


def sgd(kind: Any, net: nn.Sequential, momentum: float, dampening: float) -> Any:
    groups = [{"params": layer.parameters()} for layer in net]
    return kind(groups, lr=0.1, momentum=momentum, dampening=dampening, weight_decay=0.01)


def compare(ours: Any, theirs: Any, net: nn.Module, twin: nn.Module) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(list(net.parameters()), list(twin.parameters()))
    close(ours.state_dict()["state"], theirs.state_dict()["state"])


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
def test_momentum_is_made_kept_and_restored_as_torchs(momentum: float, dampening: float, actions: list[Any]) -> None:
    reset()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    twin = copy.deepcopy(net)
    ours, theirs = sgd(kf.FusedSGD, net, momentum, dampening), sgd(torch.optim.SGD, twin, momentum, dampening)
    x = torch.tensor([[0.5, -1.0, 2.0]])
    for action in [*actions, ("step", (0, 1))]:
        match action:
            case "step", which:
                for model, opt in ((net, ours), (twin, theirs)):
                    sum(model[k](x).square().sum() for k in which).backward()  # type: ignore[union-attr]
                    opt.step()
                    opt.zero_grad()
            case "set", group, (name, value):
                for opt in (ours, theirs):
                    opt.param_groups[group][name] = value
            case ("save and load",):
                state, wanted = (pickle.loads(pickle.dumps(opt.state_dict())) for opt in (ours, theirs))
                ours, theirs = sgd(kf.FusedSGD, net, 0.5, 0.0), sgd(torch.optim.SGD, twin, 0.5, 0.0)
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


# -- clipping, skipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.05, 1e6])
@pytest.mark.parametrize("kind", ["momentum", "lamb", "wrapped"])
def test_clip_norm_is_clip_grad_norm(limit: float, kind: str) -> None:
    net, theirs = twins()
    lr = 0.02 if kind == "lamb" else 0.5
    plain = (torch.optim.SGD if kind == "wrapped" else KINDS[kind][1])(theirs.parameters(), lr=lr)
    if kind == "wrapped":
        opt: Any = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=lr), clip_norm=limit)
    else:
        opt = KINDS[kind][0](net.parameters(), lr=lr, clip_norm=limit)
    train(net, opt, 10)
    for x, y in batches(10):
        F.mse_loss(theirs(x), y).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        plain.step()
        plain.zero_grad()
    assert difference(net, theirs) <= 2e-5
    assert opt.stats is not None and opt.stats.grad_norm == pytest.approx(float(norm), rel=1e-5), "before clipping"


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("kind", "value"), [("adamw", INF), ("momentum", NAN), ("lamb", NAN), ("wrapped", INF)])
def test_a_step_with_a_nonfinite_gradient_is_left_out(kind: str, value: float, caplog: Any) -> None:
    """Each run of such steps is warned of once, by its first."""
    net, theirs = twins()
    opt, plain = (make(each.parameters(), lr=0.01) for make, each in zip(KINDS[kind], (net, theirs), strict=True))
    for k, (x, y) in enumerate(batches(8)):
        bad = k in (0, 4, 5)
        (F.mse_loss(net(x), y) * (value if bad else 1.0)).backward()
        opt.step()
        opt.zero_grad()
        assert opt.stats.skipped == (opt.stats.grad_norm is None) == bad
        if not bad:
            F.mse_loss(theirs(x), y).backward()
            plain.step()
            plain.zero_grad()
    assert difference(net, theirs) <= (2e-5 if kind == "lamb" else 1e-6)
    said = "a gradient is not finite; the update was left out"
    assert [record.message for record in caplog.records] == [f"step 0: {said}", f"step 4: {said}"]
    opt.skip_nonfinite = False
    (F.mse_loss(net(x), y) * value).backward()
    opt.step()
    assert not net.gain.isfinite().item()


@pytest.mark.parametrize(("kind", "clip"), [("sgd", None), ("sgd", 0.5), ("wrapped", 0.5)])
def test_a_huge_finite_gradient_is_no_reason_to_skip(kind: str, clip: float | None) -> None:
    """Its square overflows fp32; the clip coefficient comes from a norm in float64."""
    net, lr = nn.Linear(4, 2), 1e-30 if clip is None else 0.1
    before = net.weight.detach().clone()
    opt: Any = kf.FusedSGD(net.parameters(), lr=lr, clip_norm=clip)
    if kind == "wrapped":
        opt = kf.Optimizer(torch.optim.SGD(net.parameters(), lr=lr), clip_norm=clip)
    (1e30 * net(torch.ones(1, 4)).sum()).backward()
    opt.step()
    moved = lr * 1e30 if clip is None else lr * clip / 10**0.5  # all ten gradients are 1e30
    torch.testing.assert_close(net.weight.detach(), before - moved)
    assert not opt.stats.skipped


# -- what backward may look like --------------------------------------------------------------------------------------


def over_other_parameters(net: Net, opt: Any, x: Tensor) -> None:
    """No parameter gets a second gradient here, but the first loss's gradients would be lost."""
    net.extra(x).mean().backward()
    net.first(x).mean().backward()


def inside_one_context(net: Net, opt: Any, x: Tensor) -> None:
    with opt.micro_batch(samples=16):
        net(x).mean().backward()
        net(x).mean().backward()


def without_zero_grad(net: Net, opt: Any, x: Tensor) -> None:
    net(x).mean().backward()
    opt.step()
    net(x).mean().backward()  # it may be a loss for another optimizer
    opt.step()


def frozen(net: Net, opt: Any, x: Tensor) -> None:
    net.first.requires_grad_(False)
    net(x).mean().backward()
    opt.step()


def moved_to_another_group(net: Net, opt: Any, x: Tensor) -> None:
    opt.param_groups[0]["params"].append(opt.param_groups[1]["params"].pop())
    net(x).mean().backward()
    opt.step()


WRONG: dict[Callable[[Net, Any, Tensor], None], str] = {
    over_other_parameters: r"opt\.micro_batch",
    inside_one_context: r"second gradient.*opt\.micro_batch",
    without_zero_grad: r"opt\.zero_grad\(\)",
    frozen: r"opt\.rebuild\(\)",
    moved_to_another_group: r"moved to another parameter group .*opt\.rebuild\(\)",
}


@pytest.mark.parametrize("act", WRONG)
def test_what_would_lose_a_gradient_names_the_remedy(act: Callable[[Net, Any, Tensor], None]) -> None:
    """After the remedy training goes on."""
    net, _ = twins()
    first, *others = net.parameters()
    opt = kf.FusedSGD([{"params": others}, {"params": [first]}])
    with pytest.raises(RuntimeError, match=WRONG[act]):
        act(net, opt, next(batches(1))[0])
    opt.zero_grad()
    opt.rebuild()
    train(net, opt, 1)


def test_step_without_backward_changes_nothing() -> None:
    net, other = twins()
    opt = kf.FusedAdamW(net.parameters(), weight_decay=0.5)
    assert opt.step() is None
    assert opt.stats is None
    train(net, opt, 1)
    before = copy.deepcopy(net)
    opt.step()
    opt.step()
    assert same(net, before) and not same(net, other)
    assert opt.stats is not None and opt.stats.step == 0


# -- parameters: whose they are, and where their values lie -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "wrapped"])
@pytest.mark.parametrize("use", ["step", "micro_batch"])
def test_an_optimizer_whose_parameters_a_newer_one_took_over_says_so(kind: str, use: str) -> None:
    net, make = nn.Linear(6, 6), KINDS[kind][0]
    older = make(net.parameters(), lr=0.1)
    train(net, older, 1)
    newer = make([net.weight], lr=0.1)
    with pytest.raises(RuntimeError, match="belong to a newer kfuse optimizer"):
        train(net, older, 1) if use == "step" else older.micro_batch()
    net.zero_grad()
    newer.zero_grad()
    before = net.weight.detach().clone()
    train(net, newer, 1)
    assert not torch.equal(before, net.weight)
    older.rebuild()  # takes them back
    train(net, older, 1)
    with pytest.raises(RuntimeError, match="newer kfuse optimizer"):
        newer.step()


def test_after_close_another_optimizer_trains_the_model() -> None:
    net, twin = twins()
    older = kf.FusedSGD(net.parameters(), lr=0.1)
    train(net, older, 1)
    older.close()
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 1)
    for each in (net, twin):
        train(each, torch.optim.AdamW(each.parameters()), 3)
    assert difference(net, twin) < 1e-6


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("kind", ["adamw", "wrapped"])
def test_a_group_that_is_refused_is_not_added(kind: str) -> None:
    """A parameter listed twice, one of another group, and one of a type that is not trained."""
    net = nn.Linear(6, 6)
    more, half = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float16))
    opt = KINDS[kind][0](net.parameters(), lr=0.1)
    bad_groups = {"lists a parameter twice": [more, more], "more than one": [net.bias], "parameter 2": [half]}
    for why, bad in bad_groups.items():
        with pytest.raises(ValueError, match=why):
            opt.add_param_group({"params": bad})
        assert len(opt.param_groups) == 1
    before = net.weight.detach().clone()
    train(net, opt, 1)
    assert not torch.equal(before, net.weight)


def test_weights_tied_through_data_are_refused_by_name() -> None:
    said = r"parameter 0 \(0\.weight\) of shape .* and parameter 2 \(1\.weight\) of .* share .*the same Parameter"
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    opt = kf.FusedAdamW(net.named_parameters())
    net[1].weight.data = net[0].weight.data.view(6, 6)
    with pytest.raises(ValueError, match=said):
        train(net, opt, 1)
    with pytest.raises(ValueError, match=said):
        kf.FusedAdamW(net.named_parameters())


@pytest.mark.parametrize("kind", ["adamw", "wrapped"])
def test_a_model_that_changes_its_type_under_the_optimizer_is_refused(kind: str) -> None:
    net = nn.Linear(4, 2)
    opt = KINDS[kind][0](net.named_parameters())
    net.bfloat16()
    with pytest.raises(RuntimeError, match=r"\((weight|bias)\) was .*float32.* is .*bfloat16.* now: change"):
        net(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    del opt


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(2, dtype=torch.float16), "is torch.float16: .*torch.float32 or torch.bfloat16"),
        (torch.randn(4, 1).expand(4, 3), r"is not dense in memory: .*\(4, 3\) leave gaps or overlap"),
    ],
)
def test_parameters_must_be_dense_and_of_a_type_that_is_trained(param: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"parameter 0 {message}"):
        kf.FusedSGD([nn.Parameter(param)])


@pytest.mark.parametrize("kind", ["adamw", "wrapped"])
def test_saving_one_layer_writes_that_layer_only(kind: str) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(500, 500))
    opt = KINDS[kind][0](net.parameters(), lr=0.1)
    for _ in range(2):
        train(net[0], opt, 1)
        written = io.BytesIO()
        torch.save(net[0].state_dict(), written)
        assert len(written.getvalue()) < 10_000
        written.seek(0)
        assert torch.equal(torch.load(written)["weight"], net[0].weight)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "option", "value", "when"),
    [
        ("adamw", "decoupled_weight_decay", False, "added"),
        ("sgd", "differentiable", True, "set"),
        ("lamb", "amsgrad", True, "made"),
        ("adamw", "amsgrad", True, "loaded"),
    ],
)
def test_options_that_the_kernels_do_not_have_are_refused(kind: str, option: str, value: bool, when: str) -> None:
    net, make = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), KINDS[kind][0]
    first, second = {"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}
    with pytest.raises(ValueError, match=rf"parameter group 1 has {option}={value}, which Fused.* does not offer"):
        if when == "made":
            make([first, second | {option: value}])
        opt = make([first] if when == "added" else [first, second])
        if when == "added":
            opt.add_param_group(second | {option: value})
        if when == "set":
            opt.param_groups[1][option] = value
            train(net, opt, 1)
        state = opt.state_dict()
        state["param_groups"][1] |= {option: value, "lr": 7.0}
        opt.load_state_dict(state)
    assert when != "loaded" or opt.param_groups[1]["lr"] == 0.5, "nothing is loaded"


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(TypeError, match=r"LBFGS.step needs a closure"):
        kf.Optimizer(torch.optim.LBFGS(Net().parameters()))


def test_other_optimizers_and_copies_are_refused() -> None:
    net, _ = twins()
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer, not FusedSGD"):
        kf.Optimizer(kf.FusedSGD(net.parameters()))
    opt = kf.FusedAdamW(net.parameters())
    copies: list[Any] = [copy.deepcopy, pickle.dumps]
    for copied in copies:
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copied(opt)
    train(net, opt, 1)


@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
def test_a_sparse_gradient_is_refused_by_the_parameters_name(kind: str) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    opt = KINDS[kind][0]([("table.weight", table.weight)])
    with pytest.raises(RuntimeError, match=r"parameter 0 \(table\.weight\) of shape .* has a sparse .*sparse=False"):
        table(torch.tensor([1, 3])).sum().backward()
    del opt


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eps": NAN}, "eps=nan: must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\): each must be in \[0, 1\)"),
        ({"clip_norm": 0.0}, r"clip_norm=0\.0: must be above 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kf.FusedLAMB(Net().parameters(), **options)


class SecondOrder(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        torch.autograd.grad([p.grad for p in params], params, [torch.ones_like(p) for p in params])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_an_optimizer_that_differentiates_the_gradient_is_answered_in_one_line() -> None:
    p = nn.Parameter(torch.ones(2))
    opt = kf.Optimizer(SecondOrder([p]))
    for create_graph, said in (
        (True, r"SecondOrder\.step\(\) has failed after backward\(create_graph=True\)"),
        (False, "grad"),
    ):
        p.square().sum().backward(create_graph=create_graph)
        with pytest.raises(RuntimeError, match=said) as raised:
            opt.step()
        assert "\n" not in str(raised.value)
        opt.zero_grad()


@pytest.mark.full
def test_statistics_do_not_pile_up() -> None:
    """A loop that never reads `opt.stats` must not keep every step's record."""
    p = nn.Parameter(torch.zeros(2))
    opt = kf.FusedSGD([p])

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            p.square().sum().backward()
            opt.step()
            opt.zero_grad()
        gc.collect()
        return len(gc.get_objects()) + sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    objects_after(50)
    before = objects_after(50)
    assert objects_after(300) - before < 150
