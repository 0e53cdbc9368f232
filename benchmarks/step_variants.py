"""What the step benchmark compares: the same small GPT, trained by each peer as its users would.

Every variant is a model replica of its own with its own optimizer and communication, so that all of them can take turns
in the same processes. They start from the same parameters and see the same data.
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.comm.step_state import StepPlan
from kfuse.comm.transports import all_to_all
from kfuse.kernels import Merges, PackArguments, block_sumsq, pack, reduce, sum_partials
from kfuse.models import GPT

VOCABULARY, POOL = 256, 16


@dataclass(frozen=True)
class Settings:
    """What all variants train, and how."""

    workers: int = 2
    samples: int = 8
    """Sequences a micro-batch."""
    micro_batches: int = 1
    """A worker's micro-batches a step."""
    bucket_mb: float = CommOptions().bucket_mb
    """kfuse's comm.bucket_mb. DDP keeps its own default."""
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


class Variant(ABC):
    """One replica. `step` trains on the next batch.

    `exposed_s` is what the last step spent between the moment its last gradient existed and the moment backward
    returned with all gradients reduced. Packing, waiting and measuring count; what ran beside backward does not.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        torch.manual_seed(settings.seed)
        self.device = settings.torch_device
        shape = (VOCABULARY, settings.block, settings.layers, settings.width // 64, settings.width)
        gpt = GPT(*shape, dropout=0.0).to(self.device)
        for last in (gpt.tokens.weight, gpt.positions.weight):  # one of these gets its gradient last
            last.register_post_accumulate_grad_hook(self._gradient_is_there)
        self.model: nn.Module = gpt
        self.parameters = list(gpt.parameters())
        self._pool = [tokens.to(self.device) for tokens in _token_pool(settings, rank)]
        self._steps = 0
        self._last_gradient = 0.0
        self.exposed_s = 0.0

    def _gradient_is_there(self, _: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def step(self) -> Tensor:
        """One optimizer step; returns the mean of this worker's losses."""
        self.begin()
        count = self.settings.micro_batches
        total = torch.zeros((), device=self.device)
        for j in range(count):
            tokens = self._pool[(self._steps * count + j) % POOL]
            with self.micro_batch(last=j == count - 1):
                # As one trains on a GPU: matrix products in bf16, parameters and gradients in fp32.
                with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
                    logits = self.model(tokens[:, :-1])
                    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
                self.backward(loss)
            total += loss.detach()
        self.exposed_s = time.perf_counter() - self._last_gradient
        self.update()
        self._steps += 1
        return total / count

    def begin(self) -> None:  # noqa: B027
        """Before the step's first forward."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The loss is its mean over the micro-batch; gradients shall be those of the mean over the step."""
        (loss / self.settings.micro_batches if self.settings.micro_batches > 1 else loss).backward()

    @abstractmethod
    def update(self) -> None:
        """Updates the parameters and drops the gradients."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around this variant's steps: whatever must hold in the process while it has the floor."""
        yield


class Local(Variant):
    """Each worker for itself, no reduction: what the computation costs with all workers busy beside each other."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.lr, fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class LocalNoiseScale(Local):
    """The same with a noise scale in foreach operations: each micro-batch's own norm, so gradients add up apart."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self._total = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._squares = torch.zeros((), device=self.device)
        self._means = torch.zeros(2, dtype=torch.float64, device=self.device)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._squares += torch.stack(torch._foreach_norm(grads)).square().sum()
        torch._foreach_add_(self._total, grads, alpha=1 / self.settings.micro_batches)
        self.optimizer.zero_grad()

    def update(self) -> None:
        few, count = self.settings.samples, self.settings.micro_batches
        mean = torch.stack(torch._foreach_norm(self._total)).square().sum().double()
        variance = (few * self._squares.double() - few * count * mean) / max(1, count - 1)
        self._means.lerp_(torch.stack([variance, mean - variance / (few * count)]), 0.05)  # read when wanted
        for parameter, total in zip(self.parameters, self._total, strict=True):
            parameter.grad = total
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_zero_(self._total)
        self._squares.zero_()


class DDP(Local):
    """torch's DistributedDataParallel with fused AdamW, its gradients views of its buckets.

    `broadcast_buffers` makes no difference: GPT has no buffers.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        ids = [self.device.index] if self.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
        self.model = self.ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class DDPInBf16(DDP):
    """The same with torch's hook that sends gradients in bf16, which gloo refuses."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.ddp.register_comm_hook(None, bf16_compress_hook)


class AdaScale(DDP):
    """DDP with FairScale's AdaScale.

    At scale 1 its gain is 1 while all its statistics are computed: the others' trajectory, at its own cost.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        from fairscale.optim import AdaScale as FairScaleAdaScale

        count = settings.micro_batches
        self.optimizer = FairScaleAdaScale(self.optimizer, num_gradients_to_accumulate=count, scale=1.0)


class NoiseScale(DDP):
    """DDP with a gradient noise scale as one would write it today.

    Local norms in a communication hook, the norm of the reduced gradients after backward, one scalar all-reduce,
    running means on the host.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self._local_sq = torch.zeros((), device=self.device)
        self._means = [0.0, 0.0]
        self.noise_scale = float("nan")
        self.ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        self._local_sq += torch.dot(buffer, buffer)
        work = dist.all_reduce(buffer.div_(self.settings.workers), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def update(self) -> None:
        workers = self.settings.workers
        work = dist.all_reduce(self._local_sq, async_op=True)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        assert work is not None
        work.wait()
        small, large = self._local_sq.item() / workers, norm.item() ** 2
        samples = self.settings.samples * self.settings.micro_batches
        grad_sq = (workers * large - small) / (workers - 1)
        variance = (small - large) * samples * workers / (workers - 1)
        for index, value in enumerate((grad_sq, variance)):
            self._means[index] = 0.95 * self._means[index] + 0.05 * value
        self.noise_scale = self._means[1] / self._means[0]
        self._local_sq.zero_()
        super().update()


class Kfuse(Variant):
    """kfuse's fused AdamW. With statistics, the host digests a step's record one step later, as the trainer does."""

    def __init__(self, settings: Settings, rank: int, *, statistics: bool, **comm: Any) -> None:
        """comm: CommOptions."""
        super().__init__(settings, rank)
        new_session(CommOptions(bucket_mb=settings.bucket_mb, **comm))
        self.statistics = statistics
        self.optimizer = kf.FusedAdamW(self.parameters, lr=settings.lr)
        count = settings.micro_batches
        ranges = tuple(range(r * count, (r + 1) * count) for r in range(settings.workers))
        self._plan = StepPlan(settings.samples * count * settings.workers, ranges)
        if not statistics:
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


@contextmanager
def statistics_off() -> Iterator[None]:
    """A switch of the benchmarks alone: the engine's measuring calls are replaced. The tail still travels, since it
    carries the control word.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(pack, "run", pack_only))
        stack.enter_context(patch.object(block_sumsq, "run", lambda given: None))
        stack.enter_context(patch.object(all_to_all, "reduce", reduce_only))
        stack.enter_context(patch.object(sum_partials, "run", lambda given: None))
        yield


def reduce_only(rows: Any, merges: Merges, out: Tensor, *, sumsq: Tensor | None) -> None:
    """kfuse.kernels.reduce without the sums of squares."""
    reduce(rows, merges, out)


@torch.no_grad()
def pack_only(given: PackArguments) -> None:
    """kfuse.kernels.pack on the CPU without the sums of squares, as fast as we can write it."""
    for grad, segment in zip(given.grads, given.segments, strict=True):
        assert grad is not None
        if given.accumulate:
            segment.add_(grad.reshape(-1), alpha=given.scale)
        else:
            torch.mul(grad.reshape(-1), given.scale, out=segment)


def _kfuse(schedule: str, statistics: bool = True, **comm: Any) -> Any:
    return lambda settings, rank: Kfuse(settings, rank, schedule=schedule, statistics=statistics, **comm)


VARIANTS = {
    "local": Local,
    "local-noise-scale": LocalNoiseScale,
    "ddp": DDP,
    "ddp-bf16": DDPInBf16,
    "ddp-adascale": AdaScale,
    "ddp-noise-scale": NoiseScale,
    "allreduce": _kfuse("allreduce"),
    "allreduce-no-stats": _kfuse("allreduce", statistics=False),
    "allreduce-bf16": _kfuse("allreduce", dtype="bf16"),
    "reproducible": _kfuse("all_to_all", reproducible=True),
    "reproducible-no-stats": _kfuse("all_to_all", reproducible=True, statistics=False),
    "auto": _kfuse("auto"),
}


def new_session(options: CommOptions) -> None:
    """A group of its own for one variant, on the store that the benchmark's parent process hosts."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    session.reset()
    kf.init(**options.named())


def _token_pool(settings: Settings, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * settings.seed + rank)
    shape = (settings.samples, settings.block + 1)
    # Skewed tokens: there is something to learn, so that the losses of two diverging runs would differ.
    return [(torch.rand(shape, generator=generator) ** 3 * VOCABULARY).long() for _ in range(POOL)]
