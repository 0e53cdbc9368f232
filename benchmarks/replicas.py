"""What step.py, gpu_step.py and comm.py compare: a model, trained by each peer as its users would.

Every variant is a replica of its own with its own optimizer and communication, so that all of them can take turns in
the same processes. All start from the same parameters, see the same data and update by fused AdamW.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.comm.step import StepPlan
from kfuse.comm.transports import all_to_all
from kfuse.kernels import PackArguments, block_sumsq, pack, reduce, sum_partials
from kfuse.models import GPT

VOCABULARY, POOL = 256, 16


@dataclass(frozen=True)
class Settings:
    """What all variants train, and how."""

    problem: str = "gpt"
    """gpt | mlp"""
    workers: int = 2
    samples: int = 8
    """Sequences, or rows, a micro-batch."""
    micro_batches: int = 1
    """A worker's micro-batches a step."""
    bucket_mb: float = CommOptions().bucket_mb
    """kfuse's comm.bucket_mb. DDP keeps its own default, 25 too."""
    layers: int = 6
    width: int = 256
    block: int = 64
    lr: float = 3e-4
    seed: int = 0
    device: str = "cpu"
    """cpu | cuda"""

    @property
    def torch_device(self) -> torch.device:
        """This worker's: `gpu_workers.place` has made it the one that kfuse chooses."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


class Gpt:
    """A small GPT, on skewed random tokens: there is something to learn, so losses of diverging runs would differ."""

    learns, tolerance = True, 2e-5

    def __init__(self, settings: Settings, rank: int) -> None:
        s, device = settings, settings.torch_device
        gpt = self.model = GPT(VOCABULARY, s.block, s.layers, s.width // 64, s.width, dropout=0.0).to(device)
        generator, shape = torch.Generator().manual_seed(1000 * s.seed + rank), (s.samples, s.block + 1)
        pool = [(torch.rand(shape, generator=generator) ** 3 * VOCABULARY).long() for _ in range(POOL)]
        self._pool = [tokens.to(device) for tokens in pool]
        self.units = [*gpt.blocks, gpt]

    def last(self) -> list[Tensor]:
        """Parameters of which one gets its gradient last."""
        return [self.model.tokens.weight, self.model.positions.weight]

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """Of a micro-batch. As one trains on a GPU: matrix products in bf16, parameters and gradients in fp32."""
        tokens = self._pool[number % POOL]
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            return F.cross_entropy(model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


class Mlp:
    """Square layers without biases, on random numbers: little to compute for its size."""

    learns, tolerance = False, 1e-3

    def __init__(self, settings: Settings, rank: int) -> None:
        width, device = settings.width, settings.torch_device
        layers = [layer for _ in range(settings.layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1]).to(device)
        generator = torch.Generator().manual_seed(1000 * settings.seed + rank)
        self._pool = [torch.randn(2, settings.samples, width, generator=generator).to(device) for _ in range(8)]
        self.units = [*layers[::2], self.model]

    def last(self) -> list[Tensor]:
        """The parameter that gets its gradient last."""
        return [next(self.model.parameters())]

    def loss(self, model: nn.Module, number: int) -> Tensor:
        """Of a micro-batch."""
        x, y = self._pool[number % len(self._pool)]
        loss: Tensor = (model(x) - y).square().mean()
        return loss


PROBLEMS: dict[str, type[Gpt | Mlp]] = {"gpt": Gpt, "mlp": Mlp}


class Variant(ABC):
    """One replica. `step` trains on the next batch.

    `exposed_s` is what the last step spent between the moment its last gradient existed and the moment backward
    returned with all gradients reduced. Packing, waiting and measuring count; what ran beside backward does not.
    """

    base: str | None = "local"
    """The variant whose step is this one's without communication; None where there is none."""
    alone = False
    """Whether it averages nothing over workers, so that its losses are its own."""
    tables = 0
    """Of gradients' addresses, that were copied to the GPU so far."""
    dtype = torch.float32
    """The parameters'."""
    compiled: str | None = None
    """The mode in which torch.compile takes the problem's units, but for the last, one by one."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank, self.device = settings, rank, settings.torch_device
        torch.manual_seed(settings.seed)
        self.problem = PROBLEMS[settings.problem](settings, rank)
        self.model: nn.Module = self.problem.model.to(self.dtype)
        for unit in self.problem.units[:-1] if self.compiled else ():  # on a CPU without a compiler of C++
            how = {"mode": self.compiled} if self.device.type == "cuda" else {"backend": "aot_eager"}
            unit.compile(dynamic=False, **how)  # type: ignore[arg-type]
        self.parameters = list(self.model.parameters())
        self._steps = 0
        self._last_gradient = self.exposed_s = 0.0
        self._watch()  # before kfuse does: its packing counts as exposed
        self.build()

    def _watch(self) -> None:
        def gradient_is_there(_: Tensor) -> None:
            self._last_gradient = time.perf_counter()

        for last in self.problem.last():
            last.register_post_accumulate_grad_hook(gradient_is_there)

    @abstractmethod
    def build(self) -> None:
        """Makes the optimizer, and what communicates."""

    @abstractmethod
    def update(self) -> None:
        """Updates the parameters and drops the gradients."""

    def step(self) -> Tensor:
        """One optimizer step; returns the mean of this worker's losses."""
        self.begin()
        count = self.settings.micro_batches
        total = torch.zeros((), device=self.device)
        for j in range(count):
            with self.micro_batch(last=j == count - 1):
                loss = self.problem.loss(self.model, self._steps * count + j)
                self.backward(loss)
            total += loss.detach()
        self.exposed_s = time.perf_counter() - self._last_gradient
        self.update()
        self._steps += 1
        return total / count

    def begin(self) -> None:  # noqa: B027
        """Before the step's first forward."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The loss is its mean over the micro-batch; gradients shall be those of the mean over the step."""
        (loss / self.settings.micro_batches if self.settings.micro_batches > 1 else loss).backward()

    def turn(self) -> AbstractContextManager[None]:
        """Around this variant's steps: whatever must hold in the process while it has the floor."""
        return nullcontext()


class Local(Variant):
    """Each worker for itself, no reduction: what the computation costs with all workers busy beside each other."""

    alone = True

    def build(self) -> None:
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=self.settings.lr, fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DDP(Local):
    """torch's DistributedDataParallel, its gradients views of its buckets. The models have no buffers to broadcast."""

    alone = False

    def build(self) -> None:
        super().build()
        ids = [self.device.index] if self.device.type == "cuda" else None
        self.model = self.ddp = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class Zero(DDP):
    """DDP with ZeroRedundancyOptimizer. Its overlap with DDP (hook_with_zero_step) refuses gloo."""

    base = None

    def build(self) -> None:
        super().build()
        more: dict[str, Any] = {"parameters_as_bucket_view": True, "lr": self.settings.lr, "fused": True}
        self.optimizer = ZeroRedundancyOptimizer(self.parameters, torch.optim.AdamW, **more)


class FSDP(Local):
    """torch's FSDP2: a unit for each block or layer, and one for the rest.

    Parameters are gathered once a forward: `reshard_after_forward` is off, as its memory is no subject here.
    """

    base = None
    alone = False

    def build(self) -> None:
        mesh = init_device_mesh(self.device.type, (self.settings.workers,))
        for unit in self.problem.units:
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        self._watch()  # these are other parameters than before
        super().build()

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class Kfuse(Variant):
    """kfuse's fused AdamW. With statistics, the host digests a step's record one step later, as the trainer does."""

    comm: dict[str, Any]
    """Of CommOptions."""
    statistics: bool

    def build(self) -> None:
        workers = 1 if self.alone else self.settings.workers
        with ExitStack() as stack:
            if self.alone:  # without torchrun's variables, and without DDP's process group, which it would join
                stack.enter_context(patch.dict(os.environ))
                stack.enter_context(patch.object(dist, "is_initialized", lambda: False))
                for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                    del os.environ[name]
            new_session(CommOptions(**{"bucket_mb": self.settings.bucket_mb, **self.comm}))
            self.optimizer = kf.FusedAdamW(self.parameters, lr=self.settings.lr)
        count = self.settings.micro_batches
        ranges = tuple(range(r * count, (r + 1) * count) for r in range(workers))
        self._plan = StepPlan(self.settings.samples * count * workers, ranges)
        if not self.statistics:
            self.optimizer.statistics.push = lambda *_: None  # type: ignore[method-assign]

    def begin(self) -> None:
        self.optimizer.begin(self._plan)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return self.optimizer.micro_batch(self.settings.samples, last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.statistics:
            self.optimizer.statistics.read(lag=1)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self.statistics else statistics_off()

    @property
    def tables(self) -> int:  # type: ignore[override]
        return sum(bucket.table.copied for bucket in self.optimizer.engine.gradient_buckets)


def kfuse_variant(statistics: bool = True, alone: bool = False, **comm: Any) -> type[Kfuse]:
    base = None if "state" in comm else "kfuse-alone" if statistics else "kfuse-alone-no-stats"
    return type("Kfuse", (Kfuse,), {"comm": comm, "statistics": statistics, "alone": alone, "base": base})


@contextmanager
def statistics_off() -> Iterator[None]:
    """A switch of the benchmarks alone: the engine's measuring calls are replaced. The tail still travels, since it
    carries the control word.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(pack, "run", _pack_only))
        stack.enter_context(patch.object(block_sumsq, "run", lambda given: None))
        stack.enter_context(patch.object(all_to_all, "reduce", lambda *given, sumsq: reduce(*given)))
        stack.enter_context(patch.object(sum_partials, "run", lambda given: None))
        yield


_run_pack = pack.run


def _pack_only(given: PackArguments) -> None:
    """kfuse.kernels.pack without the sums of squares: the step keeps its arguments."""
    given.sumsq = None
    _run_pack(given)


def new_session(options: CommOptions) -> None:
    """A group of its own for one variant, on the store that the benchmark's parent process or rank 0 hosts."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    session.reset()
    kf.init(**options.named())
