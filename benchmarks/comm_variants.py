"""What the communication benchmark compares: one MLP, trained by each schedule of kfuse and by each peer.

Every variant is a replica of its own with its own optimizer and communication. All start from the same parameters, see
the same data and update by fused AdamW.
"""

from __future__ import annotations

import contextlib
import gc
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from step_variants import new_session, statistics_off
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.comm.step_state import StepPlan

LAYERS, LR, POOL = 8, 1e-3, 8


@dataclass(frozen=True)
class Settings:
    """What all variants train."""

    workers: int
    megabytes: float
    """MiB of fp32 parameters."""
    samples: int = 32
    """A worker's, a step."""
    bucket_mb: float = CommOptions().bucket_mb
    """kfuse's comm.bucket_mb. DDP keeps its own default, 25 too."""
    seed: int = 0

    @property
    def width(self) -> int:
        """Of each of the square layers."""
        return max(8, round((self.megabytes * 2**20 / 4 / LAYERS) ** 0.5))


class Variant(ABC):
    """One replica. `step` trains on the next batch and returns its loss."""

    base: str | None = "local"
    """The variant whose step is this one's without communication; None where there is none: see `exposed ms` in the
    README."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        torch.manual_seed(settings.seed)
        width = settings.width
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
        self.model: nn.Module = nn.Sequential(*layers[:-1])
        generator = torch.Generator().manual_seed(1000 * settings.seed + rank)
        self._pool = [torch.randn(2, settings.samples, width, generator=generator) for _ in range(POOL)]
        self._steps = 0
        self.at_peak = lambda: None
        """Called at the end of backward, and after the update."""
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Makes the optimizer, and what communicates."""

    @abstractmethod
    def update(self) -> None:
        """Updates the parameters and drops the gradients."""

    def step(self) -> Tensor:
        """One optimizer step; returns this worker's loss."""
        with self.micro_batch():
            x, y = self._pool[self._steps % POOL]
            loss = (self.model(x) - y).square().mean()
            loss.backward()
        self.at_peak()
        self.update()
        self.at_peak()
        self._steps += 1
        return loss.detach()

    def micro_batch(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of the step's only micro-batch."""
        return contextlib.nullcontext()

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Around this variant's steps: what must hold in the process meanwhile."""
        return contextlib.nullcontext()


class Local(Variant):
    """torch alone, no communication."""

    def build(self) -> None:
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DDP(Local):
    """torch's DistributedDataParallel, gradients as views of its buckets."""

    def build(self) -> None:
        super().build()
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class Zero(Local):
    """DDP with ZeroRedundancyOptimizer. Its overlap with DDP (hook_with_zero_step) refuses gloo."""

    base = None

    def build(self) -> None:
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
        )
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class FSDP2(Local):
    """torch's fully_shard: each layer a unit, parameters kept whole between forward and backward."""

    base = None

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (self.settings.workers,))
        for layer in self.model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        super().build()


class Kfuse(Variant):
    """kfuse's fused AdamW."""

    options: dict[str, Any]
    """Of CommOptions."""
    statistics: bool
    alone: bool
    """Each worker for itself."""

    def build(self) -> None:
        alone = self.alone
        with contextlib.ExitStack() as stack:
            if alone:  # without torchrun's variables, and without DDP's process group, which it would join
                session.reset()
                stack.enter_context(patch.dict(os.environ))
                stack.enter_context(patch.object(dist, "is_initialized", lambda: False))
                del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
                kf.init(**self.comm.named())
            else:
                new_session(self.comm)
            self.optimizer = kf.FusedAdamW(self.model.parameters(), lr=LR)
        workers = 1 if alone else self.settings.workers
        self._plan = StepPlan(self.settings.samples * workers, tuple(range(r, r + 1) for r in range(workers)))
        if not self.statistics:
            self.optimizer.statistics.push = lambda *_: None  # type: ignore[method-assign]

    @property
    def comm(self) -> CommOptions:
        """The options, with the bucket size of the settings."""
        given: dict[str, Any] = {"bucket_mb": self.settings.bucket_mb, **self.options}
        return CommOptions(**given)

    def micro_batch(self) -> contextlib.AbstractContextManager[Any]:
        self.optimizer.begin(self._plan)
        return self.optimizer.micro_batch(self.settings.samples)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.statistics:
            self.optimizer.statistics.read(lag=1)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.statistics else statistics_off()


def _kfuse(statistics: bool = True, alone: bool = False, **options: Any) -> type[Kfuse]:
    base = None if "state" in options else "kfuse-alone" if statistics else "kfuse-alone-no-stats"
    found = {"options": options, "statistics": statistics, "alone": alone, "base": base}
    return type("Kfuse", (Kfuse,), found)


_PROGRAMS: dict[str, dict[str, Any]] = {
    "allreduce": {"schedule": "allreduce"},
    "all_to_all": {"schedule": "all_to_all"},
    "tree": {"schedule": "tree"},
    "reproducible": {"reproducible": True},
    "auto": {"schedule": "auto"},
    "sharded": {"state": "sharded"},
    "sharded-reproducible": {"state": "sharded", "reproducible": True},
}
VARIANTS: dict[str, type[Variant]] = {
    "local": Local,
    "ddp": DDP,
    "zero": Zero,
    "fsdp2": FSDP2,
    "kfuse-alone": _kfuse(alone=True),
    "kfuse-alone-no-stats": _kfuse(alone=True, statistics=False),
}
for _name, _options in _PROGRAMS.items():
    VARIANTS[_name] = _kfuse(**_options)
    VARIANTS[f"{_name}-no-stats"] = _kfuse(statistics=False, **_options)


def storages() -> set[tuple[int, int]]:
    """The memory of all tensors of this process that Python knows of, and of parameters' gradients: (start, end)."""
    found = set()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    gradients = [each.grad for each in tensors if isinstance(each, nn.Parameter) and each.grad is not None]
    for tensor in (*tensors, *gradients):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors without memory of their own
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


def average(value: Tensor) -> Tensor:
    """The mean over all workers."""
    dist.all_reduce(value)
    return value / dist.get_world_size()
