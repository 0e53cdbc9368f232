"""A small model, a session of several workers in one process, and loops over steps: what the recorder looks at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from gpu.recorder import Recorder
from gpu.stand_in import StandInGroup
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.comm.plan import CommOptions, StepPlan

TINY_BUCKETS = 64 * 4 / 2**20  # MB: a bucket for each parameter

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": kf.FusedAdamW,
    "lamb": kf.FusedLAMB,
    "sgd": lambda params: kf.FusedSGD(params, lr=0.1, momentum=0.9),
    "wrapped fused adamw": lambda params: kf.Optimizer(torch.optim.AdamW(params, fused=True)),
    "wrapped adamw": lambda params: kf.Optimizer(torch.optim.AdamW(params)),
}


class Net(nn.Module):
    """With a layer that is used in every other forward, one that never is, and BatchNorm if asked for."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 4)
        self.norm = nn.BatchNorm1d(10) if batch_norm else nn.Identity()
        self.sometimes, self.never = nn.Linear(6, 4), nn.Linear(3, 3)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y: Tensor = self.last(torch.tanh(self.middle(self.norm(torch.tanh(self.first(x))))))
        return y + self.sometimes(x) if self.forwards % 2 else y


class Job:
    """One worker of `size`, on a recorded device."""

    def __init__(self, recorder: Recorder, group: StandInGroup, model: Net, optimizer: Any) -> None:
        self.recorder, self.group, self.model, self.opt = recorder, group, model, optimizer
        self.x, self.y = torch.ones(8, 6, device=torch.device("cpu")), torch.ones(8, 4, device=torch.device("cpu"))

    def loss(self) -> Tensor:
        """Of a forward."""
        return F.mse_loss(self.model(self.x), self.y)

    def bare_step(self) -> None:
        """A loop of one's own: one backward."""
        self.loss().backward()
        self.end_step()

    def step(self, micro_batches: int = 3, several_backwards: bool = False) -> None:
        """Several micro-batches, without a plan."""
        for j in range(micro_batches):
            last = j == micro_batches - 1
            with self.opt.micro_batch(samples=8, last=last, several_backwards=several_backwards) as micro_batch:
                loss = self.loss()
                micro_batch.loss = loss.detach()
                loss.backward()
                if several_backwards:
                    self.loss().backward()
        self.end_step()

    def planned_step(self, ranges: Sequence[range], by_weight: bool = False, local: bool = False) -> None:
        """A step as kf.fit makes it. ranges: each worker's micro-batches."""
        own = 8 * len(ranges[0]) if local else None
        self.opt.begin(StepPlan(8 * ranges[-1].stop, tuple(ranges), own, by_weight=by_weight))
        for j in ranges[0]:
            weight = 1.0 + j if by_weight else None
            with self.opt.micro_batch(samples=8, last=j == ranges[0][-1], weight=weight) as micro_batch:
                loss = self.loss()
                micro_batch.loss = loss.detach()
                loss.backward()
        self.end_step()

    def next_group(self) -> None:
        """As after the loss of a worker: ends the group, and goes on with another."""
        self.group.abort()
        self.group = StandInGroup(
            self.recorder, self.group.size, self.group.check if self.group.waits_each_step else None
        )
        session.current().group = self.group
        self.opt.engine.set_group(self.group)
        gc.collect()

    def end_step(self) -> None:
        """The update."""
        self.opt.step()
        self.opt.zero_grad()
        self.recorder.end_step()


@contextmanager
def job(
    make: Callable[[Any], Any] = kf.FusedAdamW,
    size: int = 2,
    elastic: bool = False,
    lag: int | None = None,
    batch_norm: bool = False,
    current: bool = True,
    **comm: Any,
) -> Iterator[Job]:
    """Context: what runs in it is recorded. At its end there must be no error, unless the test has taken them away.

    current: the session makes its device the current one. comm: CommOptions.
    """
    session.reset()
    model = Net(batch_norm)
    with Recorder(lag) as recorder:
        if current:
            recorder.device.make_current()
        group = StandInGroup(recorder, size, (lambda: None) if elastic else None)
        session._current = session.Session(group, CommOptions(**{"bucket_mb": TINY_BUCKETS, **comm}))
        opt = make(model.parameters())
        if batch_norm:
            opt.sync_buffers(model)
        recorder.host_waits.clear()
        yield Job(recorder, group, model, opt)
    assert not recorder.errors, "\n".join(recorder.errors)
