"""What torch makes of each combination of tests/support.py: by DistributedDataParallel and torch's optimizer.

Where workers have models of their own: by the published update of the mode of synchronisation.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support import (
    ADAMW,
    BATCH,
    CLIP_NORM,
    LAMB,
    MICRO,
    SAMPLES,
    SEED,
    SGD,
    STEPS,
    Case,
    Refused,
    data,
    loss_of,
    net,
    train,
)
from test_optim_lamb import PlainLAMB
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.data.sampler import permutation


class Reference:
    """The same training as `support.train`, on a worker of torch's default process group.

    With ssgd fp32 parameters are trained by DistributedDataParallel. bf16 parameters have fp32 masters, where kfuse
    has them; LAMB is the paper's, in float64.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.rank, self.size = case, dist.get_rank(), dist.get_world_size()
        self.model = net(case)
        self.params = list(self.model.parameters())
        self.sixteen_bit = case.precision == "bf16 parameters"
        together = case.sync == "ssgd" and not self.sixteen_bit
        self.wrapped = DistributedDataParallel(self.model) if together else self.model
        self.weights = self.params
        if case.optimizer == "lamb":
            self.weights = [nn.Parameter(p.detach().double()) for p in self.params]
        elif self.sixteen_bit and case.optimizer != "torch":
            self.weights = [nn.Parameter(p.detach().float()) for p in self.params]
        makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": partial(torch.optim.SGD, **SGD),  # type: ignore[arg-type]
            "lamb": partial(PlainLAMB, **LAMB),
        }
        self.opt = makes.get(case.optimizer, partial(torch.optim.AdamW, **ADAMW))(self.weights)  # type: ignore[arg-type]
        self.start = self._flat()
        """The common model of the round, or the central model."""
        self.velocity = torch.zeros_like(self.start)

    def train(self) -> list[Tensor]:
        """The parameters after all steps."""
        order = torch.from_numpy(permutation(SAMPLES, SEED))
        for step in range(STEPS):
            before = self._flat()
            gradients = self._gradients(order[step * BATCH :][:BATCH])
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient.to(weight.dtype)
            if self.case.clip == "clip_norm":
                nn.utils.clip_grad_norm_(self.weights, CLIP_NORM)
            self.opt.step()
            self.opt.zero_grad()
            if self.case.sync.startswith("local"):
                self._average(step)
            elif self.case.sync == "sma" and self.size > 1:
                self._move_centre(before, step)
            with torch.no_grad():
                for p, weight in zip(self.params, self.weights, strict=True):
                    if p is not weight:
                        p.copy_(weight)
            self.model.zero_grad()
        return [p.detach() for p in self.params]

    def _gradients(self, chosen: Tensor) -> list[Tensor]:
        """fp32: with ssgd the mean over all workers, else over this one's micro-batches."""
        parts = BATCH // MICRO
        mine = range(parts * self.rank // self.size, parts * (self.rank + 1) // self.size)
        total = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        for j in mine:
            x, y = (t[chosen[j * MICRO :][:MICRO]] for t in data())
            if isinstance(self.wrapped, DistributedDataParallel):
                with self.wrapped.no_sync() if j != mine[-1] else contextlib.nullcontext():
                    loss_of(self.case, self.wrapped, x, y).backward()
                continue
            loss_of(self.case, self.model, x, y).backward()
            for each, p in zip(total, self.params, strict=True):
                assert p.grad is not None
                each += p.grad.float()
            self.model.zero_grad()
        if isinstance(self.wrapped, DistributedDataParallel):
            return [p.grad / len(mine) for p in self.params if p.grad is not None]
        if self.case.sync == "ssgd":
            for each in total:
                dist.all_reduce(each)
            return [each / parts for each in total]
        return [each / len(mine) for each in total]

    def _average(self, step: int) -> None:
        """Local SGD: every second step, and at the end; the outer step (DiLoCo, algorithm 1) every second step."""
        outer, round_ends = "outer" in self.case.sync, step % 2 == 1
        if not (round_ends or step == STEPS - 1):
            return
        mean = self._mean(self._flat())
        if not outer:
            for state in self.opt.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.copy_(self._mean(value))
        elif round_ends:
            gradient = self.start - mean
            self.velocity = 0.5 * self.velocity + gradient
            mean = self.start = self.start - 0.7 * (gradient + 0.5 * self.velocity)
        self._write(mean)

    def _move_centre(self, before: Tensor, step: int) -> None:
        """CROSSBOW's update, alpha = 1 / workers and momentum 0.9. The central model is the result."""
        correction = (before - self.start) / self.size
        self.velocity = 0.9 * self.velocity + self._mean(correction) * self.size
        self.start = self.start + self.velocity
        self._write(self.start if step == STEPS - 1 else self._flat() - correction)

    def _mean(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def _flat(self) -> Tensor:
        return torch.cat([weight.detach().double().reshape(-1) for weight in self.weights])

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        for weight, part in zip(self.weights, flat.split([w.numel() for w in self.weights]), strict=True):
            weight.copy_(part.view(weight.shape))


def tolerance(case: Case) -> float:
    """Of `distance`: what rounding may do."""
    if case.precision == "bf16 parameters" and case.optimizer == "torch":
        return 0.2  # no fp32 masters: each step, average and moment is rounded to bf16
    return {"fp32": 5e-5, "autocast bf16": 5e-3, "bf16 parameters": 0.01, "bf16 messages": 0.03}[case.precision]


@torch.no_grad()
def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """How far parameters are from others, as a part of what training did to these: of the tensor where it is most."""
    each = zip(ours, theirs, start, strict=True)
    return max(float((a.double() - b.double()).norm() / (b.double() - c.double()).norm()) for a, b, c in each)


@dataclass
class Trained:
    """What one worker has after a training."""

    digest: str
    """Of the parameters' bits."""
    error: float
    """`distance` from the reference."""


def trained(cases: Sequence[Case]) -> list[Trained | str]:
    """For a worker: trains with one combination after the other. A text: why it failed."""
    gc.freeze()  # each first step looks for a DistributedDataParallel among all objects but the frozen ones
    group = kf.init().group
    alone: dict[str, Any] = dict(store=dist.HashStore(), rank=0, world_size=1) if group.size == 1 else {}
    dist.init_process_group("gloo", **alone)
    references: dict[Case, list[Tensor]] = {}
    found: list[Trained | str] = []
    for case in cases:
        try:
            params = [p.detach() for p in train(case, group).parameters()]
        except Refused as refused:
            found.append(str(refused))
            continue
        precision = "fp32" if case.precision == "bf16 messages" else case.precision
        clip = "clip_norm" if case.clip == "clip_norm" else "none"
        plain = Case(sync=case.sync, precision=precision, clip=clip, optimizer=case.optimizer)
        if plain not in references:
            references[plain] = Reference(plain).train()
        digest = hashlib.sha256()
        for p in params:
            digest.update(p.contiguous().view(torch.uint8).numpy().tobytes())
        error = distance(params, references[plain], list(net(case).parameters()))
        found.append(Trained(digest.hexdigest()[:16], error))
    return found
