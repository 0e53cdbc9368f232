"""Scripts with unusual models train as their twins in plain torch (DistributedDataParallel on 2 workers).

GANs, averaged weights, adapters over a frozen base, several heads, gradient accumulation. Where workers are not seeded
alike, each builds other initial values, and all must start from rank 0's, as DistributedDataParallel does.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import kfuse as kf

PAIRS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01), lambda p: kf.FusedAdamW(p, lr=0.01)),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), lambda p: kf.FusedSGD(p, lr=0.05, momentum=0.9)),
    "wrapped": (lambda p: torch.optim.Adam(p, lr=0.01), lambda p: kf.Optimizer(torch.optim.Adam(p, lr=0.01))),
}
WORKERS = pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
STEPS = 4


def each_optimizer(script: str) -> None:
    """Runs this file's function of that name with each pair of optimizers, from other initial values on each worker or
    from the same.
    """
    kf.init()
    if kf.size() > 1:
        dist.init_process_group("gloo")
    for name, (theirs, ours) in PAIRS.items():
        globals()[script](theirs, ours, 0 if name == "wrapped" else kf.rank())


def wrapped(net: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, **options) if kf.size() > 1 else net


def samples(step: int, count: int = 8, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """This worker's inputs of shape (count, 6) and targets of shape (count, 2)."""
    generator = torch.Generator().manual_seed(1000 * step + (kf.rank() if rank is None else rank))
    x = torch.randn(count, 6, generator=generator)
    return x, targets(x)


def targets(x: Tensor) -> Tensor:
    return torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def assert_same(ours: nn.Module | dict[str, Tensor], theirs: nn.Module | dict[str, Tensor]) -> None:
    a, b = (m.state_dict() if isinstance(m, nn.Module) else m for m in (ours, theirs))
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


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
    assert stats.step == steps - 1 and not stats.skipped
    assert stats.micro_batches == micro_batches
    assert (stats.unit, stats.samples) == (
        ("micro-batches", micro_batches) if samples is None else ("samples", samples)
    )
    assert math.isfinite(stats.grad_norm) and 0 < stats.grad_norm < 100
    assert stats.noise_scale is None  # known after 20 steps
    if micro_batches == 1:
        assert stats.grad_variance is None and stats.grad_sq is None
    else:
        assert stats.grad_variance >= -1e-6  # rounding, where all gradients are the same
        assert stats.grad_sq == pytest.approx(stats.grad_norm**2 - stats.grad_variance / stats.samples, abs=1e-4)


def of_all_workers(mine: list[Any]) -> list[Any]:
    if kf.size() == 1:
        return mine
    parts: list[Any] = [None] * kf.size()
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def from_rank_0(net: nn.Module) -> nn.Module:
    twin = copy.deepcopy(net)
    if kf.size() > 1:
        for value in twin.state_dict().values():
            dist.broadcast(value, 0)
    return twin


# -- GANs ---------------------------------------------------------------------------------------------------------


class Gan:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.g: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.d: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def loss(self, x: Tensor, real: bool) -> Tensor:
        scores = self.d(x)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def train_discriminator(self, x: Tensor, fake: Tensor, two_backwards: bool) -> float:
        real_loss = self.loss(x, True)
        if two_backwards:
            real_loss.backward()
        fake_loss = self.loss(fake.detach(), False)
        (fake_loss if two_backwards else real_loss + fake_loss).backward()
        return real_loss.item() + fake_loss.item()


def noise(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + kf.rank()))


def zero_first(gan: Gan, opt_g: Any, opt_d: Any, two_backwards: bool) -> list[float]:
    """The generator's loss leaves gradients in the discriminator, until opt_d.zero_grad()."""
    losses = []
    for step in range(STEPS):
        x, fake = samples(step)[0], gan.g(noise(step))
        opt_d.zero_grad()
        loss_d = gan.train_discriminator(x, fake, two_backwards)
        opt_d.step()
        opt_g.zero_grad()
        loss = gan.loss(fake, True)
        loss.backward()
        opt_g.step()
        losses += [loss_d, loss.item()]
    return losses


def generator_first(gan: Gan, opt_g: Any, opt_d: Any, two_backwards: bool) -> list[float]:
    """As above the other way round, with zero_grad behind each step too: then what is left is a step of its own."""
    losses = []
    for step in range(STEPS):
        x, fake = samples(step)[0], gan.g(noise(step))
        loss = gan.loss(fake, True)
        loss.backward()
        opt_g.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
        loss_d = gan.train_discriminator(x, fake, two_backwards)
        opt_d.step()
        opt_d.zero_grad()
        losses += [loss_d, loss.item()]
    return losses


def frozen_meanwhile(gan: Gan, opt_g: Any, opt_d: Any, two_backwards: bool) -> list[float]:
    """The discriminator takes no gradients of the generator's loss."""
    losses = []
    for step in range(STEPS):
        x, fake = samples(step)[0], gan.g(noise(step))
        gan.d.requires_grad_(True)
        loss_d = gan.train_discriminator(x, fake, two_backwards)
        opt_d.step()
        opt_d.zero_grad()
        gan.d.requires_grad_(False)
        loss = gan.loss(fake, True)
        loss.backward()
        opt_g.step()
        opt_g.zero_grad()
        losses += [loss_d, loss.item()]
    gan.d.requires_grad_(True)
    return losses


def gan_script(theirs: Any, ours: Any, seed: int) -> None:
    for loop in (zero_first, generator_first, frozen_meanwhile):
        gan, twin = Gan(seed), Gan(seed)
        opt_g, opt_d = ours(gan.g.parameters()), ours(gan.d.parameters())
        plain_g, plain_d = theirs(twin.g.parameters()), theirs(twin.d.parameters())
        inner = twin.g, twin.d
        twin.g, twin.d = wrapped(twin.g), wrapped(twin.d)
        expected = loop(twin, plain_g, plain_d, True)
        assert loop(gan, opt_g, opt_d, False) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same(gan.g, inner[0])
        assert_same(gan.d, inner[1])
        assert_same_state(opt_d, plain_d)
        assert_plausible(opt_g, STEPS, None, kf.size())
        assert_plausible(opt_d, STEPS, None, kf.size())


def gan_from_a_loader(theirs: Any, ours: Any, seed: int) -> None:
    """The loader plans the discriminator's steps; the generator's backward is a bare one."""
    gan = Gan(seed)
    twin = copy.copy(gan)
    twin.g, twin.d = from_rank_0(gan.g), from_rank_0(gan.d)
    opt_g, opt_d = ours(gan.g.parameters()), ours(gan.d.parameters())
    x = torch.cat([samples(step, rank=0)[0] for step in range(3)])
    seen = []
    for step in kf.DataLoader((x, targets(x)), gan.d, opt_d, batch_size=8, batch_micro=4, train_steps=STEPS):
        mine = []
        for real, _ in step:
            mine.append((real, torch.randn(len(real), 4)))
            (gan.loss(real, True) + gan.loss(gan.g(mine[-1][1]).detach(), False)).backward()
        opt_d.step()
        opt_g.zero_grad()
        gan.loss(gan.g(torch.cat([z for _, z in mine])), True).backward()
        opt_g.step()
        opt_d.zero_grad()
        seen.append(mine)
    plain_g, plain_d = theirs(twin.g.parameters()), theirs(twin.d.parameters())
    for mine in seen:
        everybodys = of_all_workers(mine)
        real, z = (torch.cat(parts) for parts in zip(*everybodys, strict=True))
        plain_d.zero_grad()
        (twin.loss(real, True) + twin.loss(twin.g(z).detach(), False)).backward()
        plain_d.step()
        plain_g.zero_grad()
        twin.loss(twin.g(z), True).backward()
        plain_g.step()
    assert_same(gan.g, twin.g)
    assert_same(gan.d, twin.d)
    assert_plausible(opt_d, STEPS, 8, 2)


@WORKERS
@pytest.mark.parametrize("script", [gan_script, gan_from_a_loader])
def test_gan(script: Callable[..., None], workers: int) -> None:
    run_workers(workers, each_optimizer, script.__name__)


def gan_whose_discriminators_differ() -> None:
    kf.init(comm_check_every=2)
    gan = Gan(0)
    opt_g, opt_d = kf.FusedSGD(gan.g.parameters(), lr=0.1), kf.FusedSGD(gan.d.parameters(), lr=0.1)
    with torch.no_grad():
        next(gan.d.parameters())[0, 0] += kf.rank()
    with pytest.raises(kf.ConsistencyError, match=r"parameter 0 \(ranks 1 against rank 0"):
        generator_first(gan, opt_g, opt_d, False)


def test_gradients_that_are_dropped_are_no_steps_and_do_not_take_the_check_of_the_next() -> None:
    run_workers(2, gan_whose_discriminators_differ)


def test_two_backwards_before_a_discriminators_step_name_the_sum() -> None:
    gan = Gan(0)
    opt_g, opt_d = kf.FusedSGD(gan.g.parameters()), kf.FusedSGD(gan.d.parameters())
    with pytest.raises(RuntimeError, match="Several losses of the same samples: add them up and call backward once"):
        zero_first(gan, opt_g, opt_d, True)


def test_gradients_of_a_generators_loss_before_the_discriminators_name_zero_grad() -> None:
    gan = Gan(0)
    opt = kf.FusedSGD(gan.d.parameters())
    gan.loss(gan.g(noise(0)), True).backward()
    with pytest.raises(RuntimeError, match=r"as a GAN's generator's is, call opt\.zero_grad\(\) before this one"):
        gan.loss(samples(0)[0], True).backward()
    opt.zero_grad()
    gan.loss(samples(0)[0], True).backward()
    opt.step()


# -- averaged weights ---------------------------------------------------------------------------------------------


class Averages:
    """By hand in a deepcopy, and by torch's AveragedModel, as an exponential moving average and as a plain one."""

    def __init__(self, net: nn.Module) -> None:
        self.copy = copy.deepcopy(net)
        self.ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
        self.swa = AveragedModel(net)

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        for average, p in zip(self.copy.parameters(), net.parameters(), strict=True):
            average.lerp_(p, 0.3)
        self.ema.update_parameters(net)
        self.swa.update_parameters(net)

    @torch.no_grad()
    def losses(self) -> list[float]:
        x, y = samples(99, rank=0)
        return [F.mse_loss(net(x), y).item() for net in (self.copy, self.ema, self.swa)]


def averages_loop(net: nn.Module, inner: nn.Module, opt: Any) -> tuple[Averages, list[float]]:
    averages, losses = Averages(inner), []
    for step in range(STEPS):
        x, y = samples(step)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        averages.update(inner)
        losses.append(loss.item())
    return averages, losses + averages.losses()


def averages_script(theirs: Any, ours: Any, seed: int) -> None:
    net, twin = mlp(seed), mlp(seed)
    opt = ours(net.parameters())
    plain = theirs(twin.parameters())
    expected, expected_losses = averages_loop(wrapped(twin), twin, plain)
    averages, losses = averages_loop(net, net, opt)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    for a, b in ((averages.copy, expected.copy), (averages.ema, expected.ema), (averages.swa, expected.swa)):
        assert_same(a, b)
    assert_same(net, twin)
    assert_plausible(opt, STEPS, None, kf.size())


def averages_from_a_loader(theirs: Any, ours: Any, seed: int) -> None:
    """Steps of 16 samples, each epoch's last one of 5, in micro-batches of 4 and 1."""
    net = mlp(seed)
    twin = from_rank_0(net)
    opt, seen = ours(net.parameters()), []
    averages = Averages(net)
    x, y = samples(0, 37, rank=0)
    for step in kf.DataLoader((x, y), net, opt, batch_size=16, batch_micro=4, train_epochs=2, train_clip_norm=0.3):
        seen.append([])
        for a, b in step:
            step.loss = F.mse_loss(net(a), b)
            step.loss.backward()
            seen[-1].append((a, b))
        opt.step()
        opt.zero_grad()
        averages.update(net)
    plain = theirs(twin.parameters())
    expected = Averages(twin)
    sizes = []
    for mine in seen:
        x, y = (torch.cat(parts) for parts in zip(*of_all_workers(mine), strict=True))
        sizes.append(len(x))
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
        plain.zero_grad()
        expected.update(twin)
    assert sizes == [16, 16, 5] * 2
    assert opt.stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_same(net, twin)
    assert_same(averages.ema, expected.ema)
    assert_same_state(opt, plain)
    assert_plausible(opt, 6, 5, 2)


@WORKERS
@pytest.mark.parametrize("script", [averages_script, averages_from_a_loader])
def test_averaged_weights(script: Callable[..., None], workers: int) -> None:
    run_workers(workers, each_optimizer, script.__name__)


# -- adapters over a frozen base ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.out = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.base(x) + self.up(self.down(x))))
        return out

    def adapters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def plain_loop(net: nn.Module, opt: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, y = samples(step)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def adapters_script(theirs: Any, ours: Any, seed: int) -> None:
    """The frozen base is rank 0's if the optimizer was given all parameters, or after opt.sync_buffers(net)."""
    for everything in (False, True):
        net, twin = Adapted(seed), Adapted(seed)
        opt = ours(net.parameters() if everything else net.adapters())
        if not everything:
            opt.sync_buffers(net)
        plain = theirs(twin.parameters() if everything else twin.adapters())
        expected = plain_loop(wrapped(twin), plain)
        assert plain_loop(net, opt) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same(net, twin)
        assert_same_state(opt, plain)
        assert_plausible(opt, STEPS, None, kf.size())


def adapters_by_fit(theirs: Any, ours: Any, seed: int) -> None:
    """Each step has all samples, so that their order does not matter."""
    net = Adapted(seed)
    twin = from_rank_0(net)
    assert isinstance(twin, Adapted)
    x, y = samples(0, 16, rank=0)
    opt = ours(net.adapters())
    kf.fit(net, (x, y), opt, train_steps=STEPS, batch_size=16, batch_micro=4, loss_fn=F.mse_loss)
    plain = theirs(twin.adapters())
    for _ in range(STEPS):
        F.mse_loss(twin(x), y).backward()
        plain.step()
        plain.zero_grad()
    assert_same(net, twin)
    assert_same_state(opt, plain)
    assert_plausible(opt, STEPS, 16, 4)


@WORKERS
@pytest.mark.parametrize("script", [adapters_script, adapters_by_fit])
def test_adapters_over_a_frozen_base(script: Callable[..., None], workers: int) -> None:
    run_workers(workers, each_optimizer, script.__name__)


# -- several heads --------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """The fourth one is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](torch.tanh(self.trunk(x)))
        return out


def heads_loop(net: nn.Module, opt: Any, shift: int, micro_batch: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        x, y = samples(step)
        with micro_batch():
            loss = F.mse_loss(net(x, (step + shift * kf.rank()) % 3), y)
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def heads_script(theirs: Any, ours: Any, seed: int) -> None:
    """`shift`: whether each worker uses another head."""
    for shift, in_context in ((0, True), (1, True), (1, False)):
        net, twin = Heads(seed), Heads(seed)
        unused = from_rank_0(net.heads[3])
        opt, plain = ours(net.parameters()), theirs(twin.parameters())
        plain_context = contextlib.nullcontext
        context = (lambda opt=opt: opt.micro_batch(samples=8)) if in_context else plain_context
        expected = heads_loop(wrapped(twin, find_unused_parameters=True), plain, shift, plain_context)
        assert heads_loop(net, opt, shift, context) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same(net, twin)
        assert_same_state(opt, plain)
        assert_plausible(opt, STEPS, 8 * kf.size() if in_context else None, kf.size())
        assert all(torch.equal(a, b) for a, b in zip(net.heads[3].parameters(), unused.parameters(), strict=True))


def heads_from_a_loader(theirs: Any, ours: Any, seed: int) -> None:
    """Each micro-batch's data say which head it is for, so that one step may use several."""
    net = Heads(seed)
    twin = from_rank_0(net)
    x, y = samples(0, 40, rank=0)
    opt, seen = ours(net.parameters()), []
    for step in kf.DataLoader((x, y), net, opt, batch_size=8, batch_micro=4, train_steps=STEPS):
        seen.append([])
        for a, b in step:
            head = int(a[0, 0] > 0)
            F.mse_loss(net(a, head), b).backward()
            seen[-1].append((a, b, head))
        opt.step()
        opt.zero_grad()
    plain = theirs(twin.parameters())
    for mine in seen:
        for a, b, head in of_all_workers(mine):
            (F.mse_loss(twin(a, head), b) / 2).backward()
        plain.step()
        plain.zero_grad()
    assert_same(net, twin)
    assert_same_state(opt, plain)


@WORKERS
@pytest.mark.parametrize("script", [heads_script, heads_from_a_loader])
def test_several_heads(script: Callable[..., None], workers: int) -> None:
    run_workers(workers, each_optimizer, script.__name__)


# -- gradient accumulation ------------------------------------------------------------------------------------------

SIZES = [[8, 8, 8], [5, 3, 8], [2, 6, 4], [7]]
"""Micro-batches of each step; the last step is one that the data did not suffice for."""


def accumulations() -> Iterator[list[tuple[Tensor, Tensor]]]:
    for step, sizes in enumerate(SIZES):
        yield [samples(100 * step + j, size) for j, size in enumerate(sizes)]


def plain_accumulation(net: nn.Module, inner: nn.Module, opt: Any, by_samples: bool, clip: float | None) -> list[float]:
    losses = []
    for parts in accumulations():
        for j, (x, y) in enumerate(parts):
            weight = len(x) / sum(len(a) for a, _ in parts) if by_samples else 1 / len(parts)
            alone = j < len(parts) - 1 and isinstance(net, DistributedDataParallel)
            with net.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator,union-attr]
                loss = F.mse_loss(net(x), y)
                (loss * weight).backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(inner.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return losses


def accumulation(net: nn.Module, opt: Any, by_samples: bool, clip: float | None) -> list[float]:
    losses = []
    for parts in accumulations():
        for j, (x, y) in enumerate(parts):
            with opt.micro_batch(samples=len(x) if by_samples else None, last=j == len(parts) - 1):
                loss = F.mse_loss(net(x), y)
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        opt.zero_grad()
    return losses


def accumulation_script(theirs: Any, ours: Any, seed: int) -> None:
    for by_samples, clip, by_hand in ((True, None, False), (False, None, False), (True, 0.1, False), (True, 0.1, True)):
        net, twin = mlp(seed), mlp(seed)
        opt, plain = ours(net.parameters()), theirs(twin.parameters())
        if clip is not None and not by_hand:
            opt.set_clip_norm(clip)
        expected = plain_accumulation(wrapped(twin), twin, plain, by_samples, clip)
        losses = accumulation(net, opt, by_samples, clip if by_hand else None)
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_same(net, twin)
        assert_same_state(opt, plain)
        assert_plausible(opt, len(SIZES), 7 * kf.size() if by_samples else None, kf.size())


def incomplete_accumulation_dropped(theirs: Any, ours: Any, seed: int) -> None:
    """Steps of 3 micro-batches; each epoch has 5, and begins with zero_grad."""
    net, twin = mlp(seed), mlp(seed)
    opt, plain = ours(net.parameters()), theirs(twin.parameters())
    plain_net = wrapped(twin)
    for _ in range(2):
        opt.zero_grad()
        plain.zero_grad()
        for j in range(5):
            x, y = samples(j)
            with opt.micro_batch(samples=len(x), last=j % 3 == 2):
                F.mse_loss(net(x), y).backward()
            alone = j % 3 < 2 and isinstance(plain_net, DistributedDataParallel)
            with plain_net.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator,union-attr]
                (F.mse_loss(plain_net(x), y) / 3).backward()
            if j % 3 == 2:
                for each in (opt, plain):
                    each.step()
                    each.zero_grad()
    assert_same(net, twin)
    assert_plausible(opt, 2, 24 * kf.size(), 3 * kf.size())


def accumulation_by_fit(theirs: Any, ours: Any, seed: int) -> None:
    net = mlp(seed)
    twin = from_rank_0(net)
    x, y = samples(0, 14, rank=0)
    opt = ours(net.parameters())
    kf.fit(net, (x, y), opt, train_steps=STEPS, batch_size=14, batch_micro=4, loss_fn=F.mse_loss, train_clip_norm=0.1)
    plain = theirs(twin.parameters())
    for _ in range(STEPS):
        F.mse_loss(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
    assert_same(net, twin)
    assert_plausible(opt, STEPS, 14, 4)


@WORKERS
@pytest.mark.parametrize("script", [accumulation_script, incomplete_accumulation_dropped, accumulation_by_fit])
def test_gradient_accumulation(script: Callable[..., None], workers: int) -> None:
    run_workers(workers, each_optimizer, script.__name__)


@pytest.mark.parametrize(
    ("contexts", "last", "message"),
    [
        (False, True, r"another backward before opt\.step\(\): .*wrap each in `with opt\.micro_batch"),
        (True, True, r"another backward before opt\.step\(\): .*wrap each in `with opt\.micro_batch\(.*last=\.\.\.\)"),
        (True, False, r"opt\.step\(\) before the step's last micro-batch: .*last=\.\.\.\)"),
    ],
)
def test_accumulation_as_in_plain_torch_names_the_remedy(contexts: bool, last: bool, message: str) -> None:
    net = mlp(0)
    opt = kf.FusedSGD(net.parameters())
    with pytest.raises(RuntimeError, match=message) as error:
        for j in range(2):
            x, y = samples(j)
            with opt.micro_batch(samples=8, last=last) if contexts else contextlib.nullcontext():
                F.mse_loss(net(x), y).backward()
        opt.step()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("by_loader", [False, True])
def test_a_step_inside_a_micro_batch_names_its_place(by_loader: bool, caplog: pytest.LogCaptureFixture) -> None:
    net = mlp(0)
    opt = kf.FusedSGD(net.parameters())
    steps = kf.DataLoader(samples(0), net, opt, batch_size=8, batch_micro=8) if by_loader else [[samples(0)]]
    with pytest.raises(
        RuntimeError, match=r"opt\.step\(\) inside a micro-batch: .*call opt\.step\(\) .*once after the last"
    ):
        for step in steps:
            for x, y in step:
                with contextlib.nullcontext() if by_loader else opt.micro_batch(samples=8):
                    F.mse_loss(net(x), y).backward()
                    opt.step()
    assert not caplog.records


# -- one loop after another -----------------------------------------------------------------------------------------


def one_loop_after_another(theirs: Any, ours: Any, seed: int) -> None:
    """A loader that is left early, a loop of bare backwards, one of micro-batches, and kf.fit, with one optimizer."""
    net = mlp(seed)
    twin = from_rank_0(net)
    x, y = samples(0, 16, rank=0)
    opt = ours(net.parameters())
    for number, step in enumerate(kf.DataLoader((x, y), net, opt, batch_size=16, batch_micro=4, train_epochs=10)):
        if number == 2:
            break
        for a, b in step:
            F.mse_loss(net(a), b).backward()
        opt.step()
        opt.zero_grad()
    assert_plausible(opt, 2, 16, 4)
    F.mse_loss(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    assert_plausible(opt, 3, None, kf.size())
    for half in (slice(0, 8), slice(8, 16)):
        with opt.micro_batch(samples=8, last=half.stop == 16):
            F.mse_loss(net(x[half]), y[half]).backward()
    opt.step()
    opt.zero_grad()
    assert_plausible(opt, 4, 16 * kf.size(), 2 * kf.size())
    kf.fit(net, (x, y), opt, train_steps=2, batch_size=16, batch_micro=4, loss_fn=F.mse_loss)
    assert_plausible(opt, 2, 16, 4)  # a run counts its own steps
    plain = theirs(twin.parameters())
    for _ in range(6):
        F.mse_loss(twin(x), y).backward()
        plain.step()
        plain.zero_grad()
    assert_same(net, twin)
    assert_same_state(opt, plain)


@WORKERS
def test_one_loop_after_another(workers: int) -> None:
    run_workers(workers, each_optimizer, one_loop_after_another.__name__)
