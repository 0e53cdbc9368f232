"""On one worker the optimizers make torch.optim's updates, and keep its state and its interface."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import kfuse as kf

Loss = Callable[[nn.Module], Tensor]


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
    """The largest relative difference of any parameter, in the 2-norm."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs if b.numel())


def groups(net: Net, *options: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters in as many groups as there are options."""
    params = list(net.parameters())
    return [{"params": params[k :: len(options)], **option} for k, option in enumerate(options)]


ADAMW = [
    {},
    {"lr": 0.01, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    {"lr": 0.003, "weight_decay": 0.3, "eps": 1e-4},
]
SGD = [
    {"lr": 0.05},
    {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
    {"lr": 0.03, "momentum": 0.8, "nesterov": True},
]


@pytest.mark.parametrize(("steps", "maximize"), [(1, True), (50, False)])
@pytest.mark.parametrize(
    ("fused", "plain", "options"), [(kf.FusedAdamW, torch.optim.AdamW, ADAMW), (kf.FusedSGD, torch.optim.SGD, SGD)]
)
def test_same_update_as_torch_with_several_groups(
    fused: Any, plain: Any, options: list[dict[str, Any]], steps: int, maximize: bool
) -> None:
    ours, theirs = twins()
    ours.use_extra = theirs.use_extra = True
    sign = -1.0 if maximize else 1.0
    train(ours, fused(groups(ours, *options), maximize=maximize), steps, sign=sign)
    train(theirs, plain(groups(theirs, *options), maximize=maximize), steps, sign=sign)
    assert difference(ours, theirs) <= (1e-6 if steps == 1 else 2e-5)
    assert difference(ours, twins()[0]) > 1e-4, "nothing was trained"


@pytest.mark.parametrize("inner", ["SGD", "RMSprop", "Adagrad", "NAdam", "Rprop"])
def test_any_torch_optimizer_wrapped_is_that_optimizer(inner: str) -> None:
    ours, theirs = twins()
    make = getattr(torch.optim, inner)
    train(ours, kf.Optimizer(make(ours.parameters(), lr=0.01)), 20)
    train(theirs, make(theirs.parameters(), lr=0.01), 20)
    assert difference(ours, theirs) <= 1e-6


def test_wrapping_keeps_the_state_that_the_optimizer_has() -> None:
    ours, theirs = twins()
    mine = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    train(ours, mine, 5)
    train(theirs, plain, 5)
    train(ours, kf.Optimizer(mine), 5, seed=1)
    train(theirs, plain, 5, seed=1)
    assert difference(ours, theirs) <= 1e-6


def test_only_a_torch_optimizer_can_be_wrapped() -> None:
    net, _ = twins()
    with pytest.raises(TypeError, match=r"wraps a torch.optim.Optimizer, not FusedSGD"):
        kf.Optimizer(kf.FusedSGD(net.parameters()))
    with pytest.raises(TypeError, match="not Net"):
        kf.Optimizer(net)  # type: ignore[arg-type]


PAIRS = [
    (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    (lambda p: kf.FusedSGD(p, lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    (lambda p: kf.FusedSGD(p, lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    (lambda p: kf.Optimizer(torch.optim.Adam(p, lr=0.01)), lambda p: torch.optim.Adam(p, lr=0.01)),
]
NAMES = ["adamw", "momentum", "sgd", "wrapped adam"]


@pytest.mark.parametrize("direction", ["torch loads ours", "we load torch's", "we load ours"])
@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_state_dict_is_torchs_own_and_training_goes_on(fused: Any, plain: Any, direction: str) -> None:
    ours, theirs = twins()
    ours.use_extra = theirs.use_extra = True
    save, load = {
        "torch loads ours": (fused, plain),
        "we load torch's": (plain, fused),
        "we load ours": (fused, fused),
    }[direction]
    first = save(ours.parameters())
    reference = plain(theirs.parameters())
    train(ours, first, 7)
    train(theirs, reference, 7)
    state = pickle.loads(pickle.dumps(first.state_dict()))

    resumed = Net()
    resumed.load_state_dict(ours.state_dict())
    resumed.use_extra = True
    second = load(resumed.parameters())
    second.load_state_dict(state)
    train(resumed, second, 7, seed=1)
    train(theirs, reference, 7, seed=1)
    assert difference(resumed, theirs) <= 5e-6
    ours_state, torch_state = second.state_dict()["state"], reference.state_dict()["state"]
    assert {k: set(v) for k, v in ours_state.items()} == {k: set(v) for k, v in torch_state.items()}


def test_a_loaded_state_dict_is_copied() -> None:
    ours, _ = twins()
    opt = kf.FusedAdamW(ours.parameters())
    train(ours, opt, 2)
    state = copy.deepcopy(opt.state_dict())
    before = copy.deepcopy(state)
    opt.load_state_dict(state)
    train(ours, opt, 2)
    for key, moments in before["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, state["state"][key][name])


@pytest.mark.parametrize(
    ("fused", "plain"),
    [*PAIRS, (lambda p: kf.FusedLAMB(p, lr=0.01), lambda p: kf.FusedLAMB(p, lr=0.01))],
    ids=[*NAMES, "lamb"],
)
@pytest.mark.filterwarnings("error")
def test_lr_factor_multiplies_a_schedulers_rate_and_leaves_it_alone(fused: Any, plain: Any) -> None:
    """A warm-up from 0, times a factor of kfuse's, is the same warm-up to a rate that is as many times as high."""
    factor = 0.5
    ours, theirs = twins()
    rates: list[list[float]] = [[], []]
    for which, (net, make) in enumerate(((ours, fused), (theirs, plain))):
        opt = make(net.parameters())
        if which == 0:
            opt.lr_factor = factor
        schedule = LambdaLR(opt, lambda step, top=factor if which else 1.0: top * min(step, 5) / 5)
        for x, y in batches(10):
            rates[which].append(opt.param_groups[0]["lr"])
            F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
    assert rates[0][0] == 0.0
    assert rates[1] == pytest.approx([factor * rate for rate in rates[0]])
    assert difference(ours, theirs) <= 1e-5
    assert difference(ours, twins()[0]) > 1e-3, "nothing was trained"


def test_lr_factor_puts_a_wrapped_optimizers_rate_back_also_when_it_raises() -> None:
    class Fails(torch.optim.SGD):
        seen: float

        def step(self, closure: Any = None) -> None:
            self.seen = float(self.param_groups[0]["lr"])
            raise ArithmeticError

    net, _ = twins()
    rate = torch.tensor(0.25)
    inner = Fails(net.parameters(), lr=rate)
    opt = kf.Optimizer(inner)
    opt.lr_factor = 0.5
    x, y = next(batches(1))
    F.mse_loss(net(x), y).backward()
    with pytest.raises(ArithmeticError):
        opt.step()
    assert inner.seen == 0.125
    assert opt.param_groups[0]["lr"] is rate and inner.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_add_param_group(fused: Any, plain: Any) -> None:
    ours, theirs = twins()
    for net, make in ((ours, fused), (theirs, plain)):
        net.use_extra = True
        opt = make([p for name, p in net.named_parameters() if "extra" not in name])
        train(net, opt, 5)
        net.zero_grad()
        opt.add_param_group({"params": net.extra.parameters(), "lr": 0.002})
        train(net, opt, 5, seed=1)
    assert difference(ours, theirs) <= 5e-6


# -- gradient scaling ---------------------------------------------------------------------------------------------


def scaled_training(
    net: nn.Module, opt: torch.optim.Optimizer, unscale: bool, clip: bool, bad: set[int], steps: int = 12
) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for k, (x, y) in enumerate(batches(steps)):
        loss = F.mse_loss(net(x), y)
        scaler.scale(loss * float("inf") if k in bad else loss).backward()
        if unscale:
            scaler.unscale_(opt)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return float(scaler.get_scale())


@pytest.mark.parametrize("unscale, clip", [(False, False), (True, True)])
@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_grad_scaler(fused: Any, plain: Any, unscale: bool, clip: bool) -> None:
    ours, theirs = twins()
    bad = {0, 5}
    scale = scaled_training(ours, fused(ours.parameters()), unscale, clip, bad)
    assert scale == scaled_training(theirs, plain(theirs.parameters()), unscale, clip, bad)
    assert difference(ours, theirs) <= 5e-6


def test_grad_scaler_skips_a_first_step_with_dampening() -> None:
    ours, theirs = twins()
    scaled_training(ours, kf.FusedSGD(ours.parameters(), 0.05, 0.9, 0.5), False, False, {0})
    plain = torch.optim.SGD(theirs.parameters(), 0.05, 0.9, 0.5, foreach=False)
    scaled_training(theirs, plain, False, False, {0})
    assert difference(ours, theirs) <= 5e-6


def test_grad_scaler_statistics_are_of_the_true_gradient() -> None:
    ours, theirs = twins()
    measured = []
    for net, scale in ((ours, 1.0), (theirs, 2.0**12)):
        opt = kf.FusedSGD(net.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for j, (x, y) in enumerate(batches(2)):
            with opt.micro_batch(samples=16, last=j == 1):
                scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.step(opt)
        assert opt.stats is not None
        measured.append((opt.stats.grad_norm, opt.stats.grad_variance, opt.stats.grad_sq))
    assert measured[1] == pytest.approx(measured[0], rel=1e-5)


def test_grad_scaler_with_clip_norm() -> None:
    ours, theirs = twins()
    opt = kf.FusedAdamW(ours.parameters(), lr=0.01, clip_norm=0.3)
    scaled_training(ours, opt, unscale=False, clip=False, bad={3})
    scaled_training(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01), unscale=True, clip=True, bad={3})
    assert difference(ours, theirs) <= 1e-5


# -- clipping, skipping, closures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.05, 1e6])
@pytest.mark.parametrize("wrapped", [False, True])
def test_clip_norm_is_clip_grad_norm(limit: float, wrapped: bool) -> None:
    ours, theirs = twins()
    opt: torch.optim.Optimizer
    if wrapped:
        opt = kf.Optimizer(torch.optim.SGD(ours.parameters(), lr=0.5, momentum=0.9), clip_norm=limit)
    else:
        opt = kf.FusedSGD(ours.parameters(), lr=0.5, momentum=0.9, clip_norm=limit)
    train(ours, opt, 10)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    for x, y in batches(10):
        F.mse_loss(theirs(x), y).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        plain.step()
        plain.zero_grad()
    assert difference(ours, theirs) <= 1e-5
    assert isinstance(opt, kf.FusedSGD | kf.Optimizer)
    assert opt.stats is not None and opt.stats.grad_norm == pytest.approx(float(norm), rel=1e-5), "before clipping"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_clip_norm_must_be_positive(value: float) -> None:
    with pytest.raises(ValueError, match=r"clip_norm=.*must be above 0"):
        kf.FusedSGD(Net().parameters(), clip_norm=value)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("kind", "value"), [("adamw", INF), ("sgd", NAN), ("wrapped", INF), ("wrapped", NAN)])
def test_a_step_with_a_nonfinite_gradient_is_left_out(kind: str, value: float) -> None:
    ours, theirs = twins()
    opt: Any = {
        "adamw": lambda: kf.FusedAdamW(ours.parameters()),
        "sgd": lambda: kf.FusedSGD(ours.parameters(), momentum=0.9),
        "wrapped": lambda: kf.Optimizer(torch.optim.AdamW(ours.parameters())),
    }[kind]()
    plain: Any = (
        torch.optim.SGD(theirs.parameters(), momentum=0.9) if kind == "sgd" else torch.optim.AdamW(theirs.parameters())
    )
    skipped = []
    for k, (x, y) in enumerate(batches(8)):
        bad = k in (0, 4)
        (F.mse_loss(ours(x), y) * (value if bad else 1.0)).backward()
        opt.step()
        opt.zero_grad()
        skipped.append(opt.stats.skipped)
        assert (opt.stats.grad_norm is None) == bad
        if not bad:
            F.mse_loss(theirs(x), y).backward()
            plain.step()
            plain.zero_grad()
    assert skipped == [True, False, False, False, True, False, False, False]
    assert difference(ours, theirs) <= 1e-6


def test_without_skip_nonfinite_the_update_is_torchs(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = twins()
    opt = kf.FusedSGD(ours.parameters(), lr=0.1, skip_nonfinite=False)
    x, y = next(batches(1))
    (F.mse_loss(ours(x), y) * float("nan")).backward()
    opt.step()
    assert ours.gain.isnan().item()
    [record] = caplog.records
    assert record.message.startswith("step 0: a gradient is not finite; the update was made all the same")


def test_each_run_of_skipped_steps_is_warned_of_once_by_its_first(caplog: pytest.LogCaptureFixture) -> None:
    net, _ = twins()
    opt = kf.FusedAdamW(net.parameters())
    for k, (x, y) in enumerate(batches(9)):
        (F.mse_loss(net(x), y) * (float("inf") if k in (2, 3, 4, 7) else 1.0)).backward()
        opt.step()
        opt.zero_grad()
    assert [record.message for record in caplog.records] == [
        f"step {step}: a gradient is not finite; the update was left out" for step in (2, 7)
    ]


def test_skips_that_a_grad_scaler_asked_for_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    net, _ = twins()
    scaled_training(net, kf.FusedAdamW(net.parameters()), unscale=False, clip=False, bad={0, 5})
    assert not caplog.records


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
def test_a_huge_finite_gradient_is_no_reason_to_skip(kind: str, clip: float | None) -> None:
    """Its square overflows fp32; the clip coefficient comes from a norm in float64."""
    ours, theirs = (nn.Linear(4, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    lr = 1e-30 if clip is None else 0.1
    opt = (
        kf.FusedSGD(ours.parameters(), lr=lr, clip_norm=clip)
        if kind == "sgd"
        else kf.Optimizer(torch.optim.SGD(ours.parameters(), lr=lr), clip_norm=clip)
    )
    before = ours.weight.detach().clone()
    for net in (ours, theirs):
        (1e30 * net(torch.ones(1, 4)).sum()).backward()
    opt.step()
    if clip is not None:
        norm = torch.stack([p.grad.double().norm() for p in theirs.parameters() if p.grad is not None]).norm()
        for p in theirs.parameters():
            p.grad = (p.grad.double() * (clip / norm)).float() if p.grad is not None else None
    torch.optim.SGD(theirs.parameters(), lr=lr).step()
    assert opt.stats is not None and not opt.stats.skipped
    assert difference(ours, theirs) <= 1e-6
    assert not torch.allclose(ours.weight, before)


def test_grad_scaler_with_clip_norm_where_only_the_scaled_square_overflows() -> None:
    ours, theirs = twins()
    opt, plain = kf.FusedSGD(ours.parameters(), lr=0.1, clip_norm=0.3), torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = next(batches(1))
    for net, each in ((ours, opt), (theirs, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**75)
        scaler.scale(F.mse_loss(net(x), y)).backward()
        if each is plain:
            scaler.unscale_(each)
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        scaler.step(each)
    assert difference(ours, theirs) <= 1e-6
    assert difference(ours, twins()[0]) > 1e-4


def test_closure() -> None:
    ours, theirs = twins()
    losses: list[list[float]] = [[], []]
    for which, (net, opt) in enumerate(
        (
            (ours, kf.FusedAdamW(ours.parameters(), lr=0.01)),
            (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01)),
        )
    ):
        for x, y in batches(5):

            def closure(net: nn.Module = net, opt: Any = opt, x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return loss

            losses[which].append(opt.step(closure).item())  # type: ignore[union-attr]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert difference(ours, theirs) <= 1e-6


# -- parameters that come and go ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_a_parameter_used_now_and_then(fused: Any, plain: Any) -> None:
    """Also never used at first: torch leaves such a parameter, its decay and its step count alone."""
    ours, theirs = twins()
    for net, make in ((ours, fused), (theirs, plain)):
        opt = make(net.parameters())
        for k, (x, y) in enumerate(batches(12)):
            net.use_extra = k >= 4 and k % 3 != 0
            F.mse_loss(net(x), y).backward()
            assert (net.extra.weight.grad is not None) == net.use_extra
            opt.step()
            opt.zero_grad()
    assert difference(ours, theirs) <= 1e-6


@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_freezing_and_unfreezing(fused: Any, plain: Any) -> None:
    ours, theirs = twins()
    for net, make in ((ours, fused), (theirs, plain)):
        net.first.requires_grad_(False)
        opt = make(net.parameters())
        for k, trainable in enumerate((False, True, False, True)):
            net.first.requires_grad_(trainable)
            if isinstance(opt, kf.FusedAdamW | kf.FusedSGD | kf.Optimizer):
                opt.rebuild()
            before = net.first.weight.clone()
            train(net, opt, 3, seed=k)
            assert torch.equal(before, net.first.weight) != trainable
    assert difference(ours, theirs) <= 5e-6


def test_freezing_without_rebuild_is_an_error() -> None:
    net, _ = twins()
    opt = kf.FusedSGD(net.parameters())
    net.first.requires_grad_(False)
    x, y = next(batches(1))
    F.mse_loss(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"opt\.rebuild\(\)"):
        opt.step()


@pytest.mark.parametrize("make", [kf.FusedAdamW, lambda groups: kf.Optimizer(torch.optim.AdamW(groups))])
def test_moving_a_parameter_to_another_group_without_rebuild_is_an_error(make: Any) -> None:
    net = nn.Linear(3, 2)
    opt = make([{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "lr": 0.0}])
    opt.param_groups[0]["params"].append(opt.param_groups[1]["params"].pop())
    before = net.bias.detach().clone()
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"moved to another parameter group .*opt\.rebuild\(\)"):
        opt.step()
    opt.zero_grad()
    opt.rebuild()
    net(torch.ones(2, 3)).sum().backward()
    opt.step()
    assert (net.bias.detach() - before).abs().min() > 0.1, "it has its new group's learning rate"


def test_rebuilding_between_backward_and_step_does_not_update_with_other_gradients() -> None:
    """Either an error, or the gradient that backward made."""
    ours, theirs = twins()
    opt, plain = kf.FusedSGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = next(batches(1))
    for net in (ours, theirs):
        F.mse_loss(net(x), y).backward()
    try:
        opt.rebuild()
        opt.step()
    except RuntimeError:
        return
    plain.step()
    assert difference(ours, theirs) <= 1e-6


@pytest.mark.parametrize(("fused", "plain"), PAIRS, ids=NAMES)
def test_data_replaced_by_the_user(fused: Any, plain: Any) -> None:
    ours, theirs = twins()
    for net, make in ((ours, fused), (theirs, plain)):
        opt = make(net.parameters())
        train(net, opt, 3)
        for p in net.parameters():
            p.data = p.data * 0.5
        train(net, opt, 3, seed=1)
    assert difference(ours, theirs) <= 1e-6


def edits(net: nn.Module, how: str) -> None:
    for p in net.parameters():
        if p.grad is None:
            continue
        if how == "in place":
            p.grad.mul_(0.5).add_(0.01)
        elif how == "replaced":
            p.grad = p.grad * 0.5 + 0.01
        elif p.dim() < 2:
            p.grad = None


@pytest.mark.parametrize("how", ["in place", "replaced", "dropped"])
@pytest.mark.parametrize(("fused", "plain"), [PAIRS[0], PAIRS[-1]], ids=[NAMES[0], NAMES[-1]])
def test_gradients_changed_by_the_user_before_step(fused: Any, plain: Any, how: str) -> None:
    ours, theirs = twins()
    for net, make in ((ours, fused), (theirs, plain)):
        opt = make(net.parameters())
        for x, y in batches(4):
            F.mse_loss(net(x), y).backward()
            edits(net, how)
            opt.step()
            opt.zero_grad()
    assert difference(ours, theirs) <= 1e-6


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_copies_of_the_model_stand_alone(make: Any) -> None:
    net, _ = twins()
    opt = kf.FusedAdamW(net.parameters())
    train(net, opt, 2)
    twin = make(net)
    assert difference(twin, net) == 0.0
    frozen = copy.deepcopy(twin.state_dict())
    train(net, opt, 1)
    assert all(torch.equal(a, b) for a, b in zip(frozen.values(), twin.state_dict().values(), strict=True))
    before = copy.deepcopy(net.state_dict())
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
    train(net, opt, 1)


def test_loading_the_models_state_dict_after_the_optimizer_was_made() -> None:
    ours, theirs = twins()
    opt = kf.FusedSGD(ours.parameters(), lr=0.1)
    train(ours, opt, 3)
    ours.load_state_dict(theirs.state_dict())
    train(ours, opt, 3)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 3)
    assert difference(ours, theirs) <= 1e-6


# -- what backward may look like ----------------------------------------------------------------------------------


def test_gradients_are_torchs_after_backward() -> None:
    ours, theirs = twins()
    opt = kf.FusedSGD(ours.parameters())
    x, y = next(batches(1))
    for net in (ours, theirs):
        F.mse_loss(net(x), y).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or (a.grad.shape == b.shape and torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-8))
    opt.zero_grad()
    assert all(p.grad is None for p in ours.parameters())


def test_second_backward_without_a_context_names_the_remedy() -> None:
    net, _ = twins()
    opt = kf.FusedSGD(net.parameters())
    x, y = next(batches(1))
    F.mse_loss(net(x), y).backward()
    with pytest.raises(RuntimeError, match=r"opt\.micro_batch"):
        F.mse_loss(net(x), y).backward()
    opt.zero_grad()
    train(net, opt, 1)


def test_second_backward_over_other_parameters_names_the_remedy() -> None:
    """No parameter gets a second gradient here, but the first loss's gradients would be lost."""
    a, b = nn.Linear(3, 1), nn.Linear(3, 1)
    opt = kf.FusedSGD([*a.parameters(), *b.parameters()], lr=0.1)
    x = torch.randn(4, 3)
    a(x).mean().backward()
    with pytest.raises(RuntimeError, match=r"opt\.micro_batch"):
        b(x).mean().backward()
    del opt


def test_second_backward_inside_one_context_names_the_remedy() -> None:
    net, _ = twins()
    opt = kf.FusedSGD(net.parameters())
    x, y = next(batches(1))
    with pytest.raises(RuntimeError, match=r"second gradient.*opt\.micro_batch"), opt.micro_batch(samples=16):
        F.mse_loss(net(x), y).backward()
        F.mse_loss(net(x), y).backward()
    opt.zero_grad()
    train(net, opt, 1)


def test_forgotten_zero_grad_is_an_error_and_can_be_put_right() -> None:
    ours, theirs = twins()
    opt, plain = kf.FusedSGD(ours.parameters(), lr=0.1), torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = next(batches(1))
    F.mse_loss(ours(x), y).backward()
    opt.step()
    F.mse_loss(ours(x), y).backward()  # it may be a loss for another optimizer
    with pytest.raises(RuntimeError, match=r"opt\.zero_grad\(\)"):
        opt.step()
    with pytest.raises(RuntimeError, match=r"opt\.zero_grad\(\)"), opt.micro_batch(samples=16):
        F.mse_loss(ours(x), y).backward()
    opt.zero_grad()
    train(ours, opt, 2, seed=1)
    F.mse_loss(theirs(x), y).backward()
    plain.step()
    plain.zero_grad()
    train(theirs, plain, 2, seed=1)
    assert difference(ours, theirs) <= 1e-6


def test_step_without_backward_changes_nothing() -> None:
    net, other = twins()
    opt = kf.FusedAdamW(net.parameters(), weight_decay=0.5)
    assert opt.step() is None
    assert opt.stats is None
    train(net, opt, 1)
    before = copy.deepcopy(net)
    opt.step()
    opt.step()
    assert difference(net, before) == 0.0
    assert opt.stats is not None and opt.stats.step == 0
    assert difference(net, other) > 0


def test_zero_grad_after_backward_drops_the_step() -> None:
    """As in adversarial training, where another loss's backward goes through parameters of this optimizer."""
    generator, critic = nn.Linear(4, 3), nn.Linear(3, 1)
    twins_ = copy.deepcopy(generator), copy.deepcopy(critic)
    for (g, c), make in (((generator, critic), kf.FusedSGD), (twins_, torch.optim.SGD)):
        opt_g, opt_c = make(g.parameters(), lr=0.1), make(c.parameters(), lr=0.1)
        for x, _ in batches(6):
            noise = x[:, :4]
            opt_c.zero_grad()
            (c(g(noise).detach()) ** 2).mean().backward()
            opt_c.step()
            opt_c.zero_grad()
            ((c(g(noise)) - 1) ** 2).mean().backward()
            opt_g.step()
            opt_g.zero_grad()
    assert difference(generator, twins_[0]) <= 1e-6
    assert difference(critic, twins_[1]) <= 1e-6


def test_model_zero_grad_will_do() -> None:
    ours, theirs = twins()
    for net, opt in (
        (ours, kf.FusedAdamW(ours.parameters())),
        (theirs, torch.optim.AdamW(theirs.parameters())),
    ):
        for x, y in batches(3):
            net.zero_grad()
            F.mse_loss(net(x), y).backward()
            opt.step()
    assert difference(ours, theirs) <= 1e-6


@pytest.mark.parametrize("inside_context", [False, True])
def test_reentrant_checkpointing(inside_context: bool) -> None:
    ours, theirs = twins()
    for net, opt in (
        (ours, kf.FusedSGD(ours.parameters(), lr=0.1)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)),
    ):
        for x, y in batches(3):
            x = x.requires_grad_()

            def backward(net: Net = net, x: Tensor = x, y: Tensor = y) -> None:
                hidden = checkpoint(lambda v, net=net: torch.tanh(net.first(v)), x, use_reentrant=True)
                out = checkpoint(net.second, hidden, use_reentrant=True)
                F.mse_loss(net.gain * out, y).backward()

            if inside_context and isinstance(opt, kf.FusedSGD):
                with opt.micro_batch(samples=16):
                    backward()
            else:
                backward()
            opt.step()
            opt.zero_grad()
    assert difference(ours, theirs) <= 1e-6


def test_gradient_penalty_through_autograd_grad() -> None:
    ours, theirs = twins()
    for net, opt in (
        (ours, kf.FusedSGD(ours.parameters(), lr=0.1)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)),
    ):
        for x, y in batches(3):
            x = x.requires_grad_()
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (F.mse_loss(out, y) + 0.1 * slope.square().mean()).backward()
            opt.step()
            opt.zero_grad()
    assert difference(ours, theirs) <= 1e-6


def test_a_second_optimizer_on_the_same_parameters_works_or_says_so() -> None:
    """What a notebook cell does when it is run twice."""
    ours, theirs = twins()
    kf.FusedSGD(ours.parameters(), lr=0.1)
    try:
        train(ours, kf.FusedSGD(ours.parameters(), lr=0.1), 3)
    except RuntimeError as error:
        assert "optimizer" in str(error)
        return
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 3)
    assert difference(ours, theirs) <= 1e-6


def test_sparse_gradients_are_refused_clearly() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    opt = kf.FusedSGD(table.parameters())
    with pytest.raises((RuntimeError, TypeError, ValueError), match="sparse"):
        table(torch.tensor([1, 3])).sum().backward()
    del opt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_parameters_must_be_fp32_or_bf16(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"parameter 0 is {dtype}: .*torch.float32 or torch.bfloat16"):
        kf.FusedSGD(nn.Linear(2, 2, dtype=dtype).parameters())


@pytest.mark.parametrize(
    "values", [torch.randn(4, 5)[:, :3], torch.randn(4, 1).expand(4, 3), torch.randn(9).as_strided((4, 3), (2, 1))]
)
def test_parameters_must_be_dense(values: Tensor) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 is not dense in memory: .*\(4, 3\) leave gaps or overlap"):
        kf.FusedSGD([nn.Parameter(values)])


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.full
def test_statistics_do_not_pile_up(read: bool) -> None:
    """A loop that reads `opt.stats`, or never does, must not keep every step's record."""
    p = nn.Parameter(torch.zeros(2))
    opt = kf.FusedSGD([p])

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            p.square().sum().backward()
            opt.step()
            opt.zero_grad()
            if read:
                _ = opt.stats
        gc.collect()
        return len(gc.get_objects()) + sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    objects_after(50)
    before = objects_after(50)
    assert objects_after(300) - before < 150
