"""Scripts with unusual models and loops train as in plain torch (DistributedDataParallel on 2 workers).

A script is written once and runs in two worlds. Unless the optimizer is a wrapped one, each worker builds other initial
values, as unseeded scripts do, and all must start from rank 0's, as DistributedDataParallel does. Where kf.DataLoader
or kf.fit deals out the samples, the twin in plain torch gets all workers' micro-batches, in one process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import on_workers
from problems import OPTIMIZERS, update
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import kfuse as kf

STEPS = 4
Parts = list[tuple[Tensor, ...]]
"""A step's micro-batches: inputs, targets, and what else the model is given."""


class World:
    """kfuse, or plain torch."""

    def __init__(self, ours: bool, kind: str) -> None:
        self.ours, self.kind = ours, kind
        self.seed = 0 if kind == "wrapped" else kf.rank()

    def optimizer(self, params: Any) -> Any:
        ours, theirs = OPTIMIZERS[self.kind]
        return (ours if self.ours else theirs)(params)

    def wrap(self, net: nn.Module, **options: Any) -> nn.Module:
        return net if self.ours or kf.size() == 1 else DistributedDataParallel(net, **options)

    def backward(
        self,
        net: nn.Module,
        opt: Any,
        parts: Parts,
        by_samples: bool = True,
        done: bool = True,
        loss_of: Callable[..., Tensor] = lambda net, x, y, *more: F.mse_loss(net(x, *more), y),
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> list[float]:
        """The backwards of a step, or of a part of it that is not its end: the losses."""
        losses = []
        for j, (x, *more) in enumerate(parts):
            last = done and j == len(parts) - 1
            weight = len(x) / sum(len(part[0]) for part in parts) if by_samples else 1 / len(parts)
            context: Any = contextlib.nullcontext()
            if self.ours:
                context, weight = opt.micro_batch(samples=len(x) if by_samples else None, last=last), 1.0
            elif not last and isinstance(net, DistributedDataParallel):
                context = net.no_sync()
            with context:
                loss = loss_of(net, x, *more)
                scale(loss * weight).backward()
            losses.append(loss.item())
        return losses


def samples(step: int, count: int = 8, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """This worker's inputs of shape (count, 6) and targets of shape (count, 2)."""
    generator = torch.Generator().manual_seed(1000 * step + (kf.rank() if rank is None else rank))
    x = torch.randn(count, 6, generator=generator)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def micro_batches(step: int) -> Parts:
    return [samples(2 * step + j) for j in range(2)]


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def assert_same(ours: Any, theirs: Any) -> None:
    a, b = ({name.removeprefix("module."): value for name, value in m.state_dict().items()} for m in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for index, state in b.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(a[index][name], value, rtol=1e-4, atol=1e-6)


def assert_plausible(opt: Any, steps: int, samples: float | None, micro_batches: int) -> None:
    """The statistics of the last of `steps` steps, of so many samples (None: they were not given)."""
    stats = opt.stats
    assert (stats.step, stats.micro_batches) == (steps - 1, micro_batches) and not stats.skipped
    assert (stats.unit, stats.samples) == (
        ("micro-batches", micro_batches) if samples is None else ("samples", samples)
    )
    assert 0 < stats.grad_norm < 100 and stats.noise_scale is None  # known after 20 steps
    if micro_batches > 1:
        assert stats.grad_sq == pytest.approx(stats.grad_norm**2 - stats.grad_variance / stats.samples, abs=1e-4)


# -- the script deals out its samples ---------------------------------------------------------------------------------

Outcome = tuple[Sequence[Any], Sequence[Any], list[float], tuple[float | None, int] | None]
"""Models, optimizers, figures such as losses; and of the last step, over all workers, samples and micro-batches;
None where they may be unknown."""


class Gan:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.g: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.d: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def loss(self, x: Tensor, real: bool) -> Tensor:
        scores = self.d(x)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def fake(self, step: int) -> Tensor:
        noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + kf.rank()))
        return self.g(noise)  # type: ignore[no-any-return]


def train_gan(gan: Gan, opt_g: Any, opt_d: Any, loop: str) -> list[float]:
    """zero first: the generator's loss leaves gradients in the discriminator, until opt_d.zero_grad(). generator first:
    the other way round, with zero_grad behind each step too. frozen: the discriminator takes no gradients of it.
    """
    losses = []
    for step in range(STEPS):

        def generator(step: int = step) -> None:
            loss = gan.loss(gan.fake(step), True)
            loss.backward()
            update(opt_g)
            losses.append(loss.item())

        if loop == "generator first":
            generator()
        opt_d.zero_grad()
        gan.d.requires_grad_(True)
        (gan.loss(samples(step)[0], True) + gan.loss(gan.fake(step).detach(), False)).backward()
        opt_d.step()
        if loop != "zero first":
            opt_d.zero_grad()
        gan.d.requires_grad_(loop != "frozen")
        if loop != "generator first":
            generator()
    gan.d.requires_grad_(True)
    return losses


def gan(world: World, loop: str) -> Outcome:
    it = Gan(world.seed)
    opts = [world.optimizer(net.parameters()) for net in (it.g, it.d)]
    inner = [it.g, it.d]
    it.g, it.d = world.wrap(it.g), world.wrap(it.d)
    losses = train_gan(it, *opts, loop)
    return inner, opts, losses, (None, kf.size())


class Adapted(nn.Module):
    """Adapters over a frozen base."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.out = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.base(x) + self.up(self.down(x))))  # type: ignore[no-any-return]

    def adapters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def adapters(world: World, everything: bool) -> Outcome:
    """The frozen base is rank 0's if the optimizer was given all parameters, or after opt.sync_buffers(net)."""
    inner = Adapted(world.seed)
    opt = world.optimizer(inner.parameters() if everything else inner.adapters())
    if world.ours and not everything:
        opt.sync_buffers(inner)
    net, losses = world.wrap(inner), list[float]()
    for step in range(STEPS):
        losses += world.backward(net, opt, [samples(step)])
        update(opt)
    return [inner], [opt], losses, (8 * kf.size(), kf.size())


class Heads(nn.Module):
    """The fourth one is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


def heads(world: World, shift: int) -> Outcome:
    """shift: whether each worker uses another head."""
    inner = Heads(world.seed)
    opt = world.optimizer(inner.parameters())
    net, losses = world.wrap(inner, find_unused_parameters=True), list[float]()
    for step in range(STEPS):
        losses += world.backward(net, opt, [(*samples(step), (step + shift * kf.rank()) % 3)])  # type: ignore[list-item]
        update(opt)
    return [inner], [opt], losses, (8 * kf.size(), kf.size())


def accumulation(world: World, by_samples: bool, clip: float | None, by_hand: bool) -> Outcome:
    """Micro-batches of unlike sizes; the last step is one that the data did not suffice for."""
    inner = mlp(world.seed)
    opt = world.optimizer(inner.parameters())
    if world.ours and clip is not None and not by_hand:
        opt.set_clip_norm(clip)
    net, losses = world.wrap(inner), list[float]()
    for step, sizes in enumerate([[8, 8, 8], [5, 3, 8], [2, 6, 4], [7]]):
        parts = [samples(100 * step + j, size) for j, size in enumerate(sizes)]
        losses += world.backward(net, opt, parts, by_samples)
        if clip is not None and (by_hand or not world.ours):
            nn.utils.clip_grad_norm_(inner.parameters(), clip)
        update(opt)
    return [inner], [opt], losses, (7 * kf.size() if by_samples else None, kf.size())


def dropped_accumulation(world: World) -> Outcome:
    """Steps of 3 micro-batches; each epoch has 5, and begins with zero_grad."""
    inner = mlp(world.seed)
    opt = world.optimizer(inner.parameters())
    net = world.wrap(inner)
    for _ in range(2):
        opt.zero_grad()
        world.backward(net, opt, [samples(j) for j in range(3)])
        update(opt)
        if world.ours:  # torch's would be dropped too
            world.backward(net, opt, [samples(j) for j in range(3, 5)], done=False)
    return [inner], [opt], [], (24 * kf.size(), 3 * kf.size())


def mixed_precision(world: World, clip: bool, parts: int) -> Outcome:
    """Autocast and GradScaler; on the last rank the loss of step 2 overflows. parts: micro-batches of a step."""
    inner = mlp(world.seed)
    opt, net, seen = world.optimizer(inner.parameters()), world.wrap(inner), list[float]()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(6):
        overflow = torch.inf if step == 2 and kf.rank() == kf.size() - 1 else 1.0

        def loss_of(net: nn.Module, x: Tensor, y: Tensor, overflow: float = overflow) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.mse_loss(net(x).float(), y) * overflow

        batches = [samples(2 * step + j) for j in range(parts)]
        seen += world.backward(net, opt, batches, loss_of=loss_of, scale=scaler.scale)
        if clip:
            scaler.unscale_(opt)
            seen.append(nn.utils.clip_grad_norm_(inner.parameters(), 0.1).item())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        seen.append(scaler.get_scale())
    assert 512.0 in seen
    return [inner], [opt], seen, None


SCRIPTS: list[Any] = [
    *((gan, loop) for loop in ("zero first", "generator first", "frozen")),
    *((adapters, everything) for everything in (False, True)),
    *((heads, shift) for shift in (0, 1)),
    *((accumulation, *how) for how in ((False, None, False), (True, 0.1, False), (True, 0.1, True))),
    (dropped_accumulation,),
    *((mixed_precision, *how) for how in ((True, 1), (False, 2))),
]


def in_both_worlds(script: Callable[..., Outcome], *how: Any, kind: str) -> None:
    expected = script(World(False, kind), *how)
    nets, opts, figures, last = script(World(True, kind), *how)
    assert figures == pytest.approx(expected[2], rel=1e-5, abs=1e-6, nan_ok=True)
    for ours, theirs in zip(nets, expected[0], strict=True):
        assert_same(ours, theirs)
    for opt, theirs in zip(opts, expected[1], strict=True):
        assert_same_state(opt, theirs)
        if last is not None:
            assert_plausible(opt, opt.stats.step + 1, *last)


# -- kfuse deals out the samples --------------------------------------------------------------------------------------


def of_all_workers(mine: list[Any]) -> list[Any]:
    if kf.size() == 1:
        return mine
    parts: list[Any] = [None] * kf.size()
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def from_rank_0(net: Any) -> Any:
    twin = copy.deepcopy(net)
    if kf.size() > 1:
        for value in twin.state_dict().values():
            dist.broadcast(value, 0)
    return twin


def step_of(step: Any, net: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """The backwards of a loader's step: its micro-batches."""
    for x, y in step:
        step.loss = F.mse_loss(net(x), y)
        step.loss.backward()
        yield x, y


def replay(
    net: nn.Module,
    opt: Any,
    seen: list[Parts],
    clip: float,
    after: Callable[[], None],
) -> None:
    """Trains the twin with what all workers have seen."""
    for mine in seen:
        World(False, "").backward(net, opt, of_all_workers(mine))
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        update(opt)
        after()


def scheduled_in_a_loader(theirs: Any, ours: Any, seed: int) -> None:
    """The loader steps a scheduler that it is given, here one that changes the momentum too; else the body does.

    Steps of 8 samples, each epoch's last one of 5; the last micro-batch has 1.
    """
    for given in (True, False):
        net = mlp(seed)
        twin = from_rank_0(net)
        opt, plain, seen = ours(net.parameters()), theirs(twin.parameters()), list[Parts]()
        scheduler, reference = (OneCycleLR(each, 0.1, total_steps=12) for each in (opt, plain))
        more: Any = {"batch_size": 8, "micro_batch": 2, "epochs": 2, "steps": 10, "clip_norm": 0.3}
        for step in kf.DataLoader(net, samples(0, 45, rank=0), opt, scheduler=scheduler if given else None, **more):
            seen.append(list(step_of(step, net)))
            update(opt)
            if not given:
                scheduler.step()
        replay(twin, plain, seen, 0.3, reference.step)
        assert len(seen) == 10
        assert_same(net, twin)
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def one_loop_after_another(theirs: Any, ours: Any, seed: int) -> None:
    """A loader that is left early, a loop of bare backwards, one of micro-batches, and kf.fit, with one optimizer."""
    net = Adapted(seed)
    twin = from_rank_0(net)
    x, y = samples(0, 14, rank=0)
    given: dict[str, Any] = {"batch_size": 14, "micro_batch": 4}  # the last micro-batch has 2 samples
    opt, plain = ours(net.adapters()), theirs(twin.adapters())
    for number, step in enumerate(kf.DataLoader(net, (x, y), opt, epochs=10, **given)):
        if number == 2:
            break
        assert list(step_of(step, net))
        update(opt)
    assert_plausible(opt, 2, 14, 4)
    F.mse_loss(net(x), y).backward()
    update(opt)
    assert_plausible(opt, 3, None, kf.size())
    World(True, "").backward(net, opt, [(x[:7], y[:7]), (x[7:], y[7:])])
    update(opt)
    assert_plausible(opt, 4, 14 * kf.size(), 2 * kf.size())
    kf.fit(net, (x, y), opt, steps=2, loss_fn=F.mse_loss, **given)
    assert_plausible(opt, 2, 14, 4)  # a run counts its own steps
    for _ in range(6):
        F.mse_loss(twin(x), y).backward()
        update(plain)
    assert_same(net, twin)
    assert_same_state(opt, plain)


LOADED = [scheduled_in_a_loader, one_loop_after_another]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
@on_workers(timeout_s=300.0)
def test_scripts_train_as_in_plain_torch(workers: int) -> None:
    kf.init()
    if kf.size() > 1:
        dist.init_process_group("gloo")
    for kind, (ours, theirs) in OPTIMIZERS.items():
        try:
            for script, *how in SCRIPTS:
                in_both_worlds(script, *how, kind=kind)
            for script in LOADED:
                script(theirs, ours, 0 if kind == "wrapped" else kf.rank())
        except AssertionError as error:
            raise AssertionError(f"{script.__name__} {kind}: {error}") from error


# -- what is refused --------------------------------------------------------------------------------------------------


@on_workers(2)
def test_gradients_that_are_dropped_are_no_steps_and_do_not_take_the_check_of_the_next() -> None:
    kf.init(comm_check_every=2)
    gan = Gan(0)
    opt_g, opt_d = kf.FusedSGD(gan.g.parameters(), lr=0.1), kf.FusedSGD(gan.d.parameters(), lr=0.1)
    with torch.no_grad():
        next(gan.d.parameters())[0, 0] += kf.rank()
    with pytest.raises(kf.ConsistencyError, match=r"parameter 0 \(ranks 1 against rank 0"):
        train_gan(gan, opt_g, opt_d, "generator first")
