"""A GAN's loop with two optimizers: with kf.DataLoader, where workers may be lost in each part, and in plain torch.

python gan_loop.py FOLDER: what a worker of an elastic job runs. FOLDER keeps marks of the faults that have struck.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from chaos import Chaos
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.data import EpochSampler
from kfuse.train.step import random_key, seed_forward

BATCH, MICRO, EPOCHS, SAMPLES, NOISE = 16, 4, 14, 64, 4
EVERY = 2  # the generator steps in every second body
CPU = torch.device("cpu")


def make(normalise: bool) -> nn.ModuleDict:
    """normalise: with BatchNorm, whose statistics are those of micro-batches, so that no plain twin has them."""
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(16) if normalise else nn.Identity()
    generator = nn.Sequential(nn.Linear(NOISE, 16), norm, nn.Tanh(), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    average = copy.deepcopy(generator).requires_grad_(False)
    return nn.ModuleDict({"generator": generator, "critic": critic, "average": average})


def data() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3)) * 0.5 + 1


def critics_loss(nets: nn.ModuleDict, x: Tensor, noise: Tensor) -> Tensor:
    real, fake = nets["critic"](x), nets["critic"](nets["generator"](noise))  # not detached: kfuse drops the rest
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generators_loss(nets: nn.ModuleDict, noise: Tensor) -> Tensor:
    return F.softplus(-nets["critic"](nets["generator"](noise))).mean()


def optimizers(nets: nn.ModuleDict, ours: bool) -> tuple[Any, Any]:
    """One of kfuse's own and one that wraps torch's."""
    critic, generator = nets["critic"].parameters(), nets["generator"].parameters()
    sgd = torch.optim.SGD(generator, 0.05, momentum=0.9)
    if ours:
        return kf.FusedAdamW(critic, lr=0.01), kf.Optimizer(sgd)
    return torch.optim.AdamW(critic, lr=0.01, weight_decay=0.01), sgd


def schedulers(opts: Sequence[Any]) -> list[Any]:
    return [StepLR(opt, 7, 0.8) for opt in opts]


@torch.no_grad()
def average(nets: nn.ModuleDict) -> None:
    """A moving average of the generator's weights: what must happen once a step is done in a policy's after_step."""
    for mean, p in zip(nets["average"].parameters(), nets["generator"].parameters(), strict=True):
        mean.lerp_(p, 0.1)


class Averaging(kf.BasePolicy):
    def __init__(self, nets: nn.ModuleDict) -> None:
        self._nets = nets

    def after_step(self) -> None:
        average(self._nets)


def train(
    nets: nn.ModuleDict,
    opts: Sequence[Any],
    at: Callable[[int, str], None] = lambda step, moment: None,
    policy: kf.BasePolicy | None = None,
    **settings: Any,
) -> list[int]:
    """Returns the numbers of the bodies. at(step, moment): called in each part of a body."""
    opt_c, opt_g = opts
    given: Any = {"batch_size": BATCH, "micro_batch": MICRO, "epochs": EPOCHS, "clip_norm": 1.0, **settings}
    bodies = []
    given |= {"policy": policy, "scheduler": schedulers(opts)}
    for step in kf.DataLoader(nets, TensorDataset(data()), [opt_c, opt_g], **given):
        bodies.append(step.number)
        for (x,) in step.micro_batches(opt_c):
            at(step.number, "critic's forward")
            step.loss = critics_loss(nets, x, torch.randn(len(x), NOISE))
            step.loss.backward()
        at(step.number, "critic's reduced")
        opt_c.step()
        opt_c.zero_grad()
        if step.number % EVERY:
            for (x,) in step.micro_batches(opt_g):
                at(step.number, "generator's forward")
                step.loss = generators_loss(nets, torch.randn(len(x), NOISE))
                step.loss.backward()
            at(step.number, "generator's reduced")
            opt_g.step()
            opt_g.zero_grad()
        at(step.number, "end")
    return bodies


def plain(nets: nn.ModuleDict, opts: Sequence[Any]) -> None:
    opt_c, opt_g = opts
    after = schedulers(opts)
    for step, (x, noise) in enumerate(batches()):
        opt_c.zero_grad()
        critics_loss(nets, x, noise).backward()
        nn.utils.clip_grad_norm_(nets["critic"].parameters(), 1.0)
        opt_c.step()
        if step % EVERY:
            opt_g.zero_grad()
            generators_loss(nets, noise).backward()
            nn.utils.clip_grad_norm_(nets["generator"].parameters(), 1.0)
            opt_g.step()
        for each in after:
            each.step()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The samples of each step, and the noise that kfuse draws for each of its micro-batches."""
    x, sampler = data(), EpochSampler(SAMPLES, 0)
    of_an_epoch = SAMPLES // BATCH
    for step in range(EPOCHS * of_an_epoch):
        epoch, within = divmod(step, of_an_epoch)
        noise = []
        for j in range(BATCH // MICRO):
            seed_forward(CPU, random_key(0, step, j))
            noise.append(torch.randn(MICRO, NOISE))
        yield x[torch.as_tensor(sampler.indices(epoch, within * BATCH, BATCH))], torch.cat(noise)


# -- faults -----------------------------------------------------------------------------------------------------------

# Step, moment and rank. The leader is lost too, after the critic's messages have carried what it announced.
KILLS = [(9, "critic's forward", 1), (19, "critic's reduced", 1), (29, "generator's forward", 0)]
KILLS += [(39, "generator's reduced", 1)]
GROWS = 40  # a third worker is asked for
BREAKS = [(49, "opt_c", 1), (53, "opt_g", 0)]  # one worker alone does not get the result of this reduction
GATES = [*({"step": step, "workers": 2} for step, *_ in KILLS), *({"step": step, "workers": 3} for step, *_ in BREAKS)]


class Struck(Chaos):
    def __init__(self, nets: nn.ModuleDict, folder: Path) -> None:
        super().__init__(str(folder / "events"), gates=GATES, adaptive=False)
        self._nets = nets

    def after_step(self) -> None:
        super().after_step()
        average(self._nets)


class Faults:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _strikes(self, step: int, rank: int) -> bool:
        if kf.rank() != rank or (self._folder / f"mark-{step}").exists():
            return False
        (self._folder / f"mark-{step}").touch()
        return True

    def kill(self, step: int, moment: str) -> None:
        for fault_step, fault_moment, rank in KILLS:
            if (step, moment) == (fault_step, fault_moment) and self._strikes(step, rank):
                os.kill(os.getpid(), signal.SIGKILL)

    def break_connection(self, opt: Any, name: str, number: Callable[[], int]) -> None:
        finish = opt.engine.finish

        def broken() -> None:
            finish()
            for step, fault_name, rank in BREAKS:
                if name == fault_name and number() == step and self._strikes(step, rank):
                    time.sleep(0.3)  # the other one goes on meanwhile
                    assert opt.engine.leave_to_loop(CommError("a broken connection, for a test"))

        opt.engine.finish = broken


def main(folder: Path) -> None:
    kf.init(comm_reproducible=True, comm_timeout_s=60)
    nets, faults = make(normalise=True), Faults(folder)
    opts = optimizers(nets, ours=True)
    now = 0

    def at(step: int, moment: str) -> None:
        nonlocal now
        now = step
        faults.kill(step, moment)
        if (step, moment) == (GROWS, "end"):
            kf.resize(3)

    for name, opt in zip(("opt_c", "opt_g"), opts, strict=True):
        faults.break_connection(opt, name, lambda: now)
    train(nets, opts, at, Struck(nets, folder))
    assert [opt.engine.step for opt in opts] == [56, 28]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
