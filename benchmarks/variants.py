"""Noise scales beside DDP and FSDP2 as their users have them, and the table of all variants of step, hooks and comm."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from replicas import DDP, FSDP, Local, Variant, Zero, kfuse_variant
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

import kfuse as kf


class LocalNoiseScale(Local):
    """Local with a noise scale in foreach operations: each micro-batch's own norm, so gradients add up apart."""

    def build(self) -> None:
        super().build()
        self._total = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._squares = torch.zeros((), device=self.device)
        self._means = torch.zeros(2, dtype=torch.float64, device=self.device)

    def backward(self, loss: torch.Tensor) -> None:
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
        super().update()
        torch._foreach_zero_(self._total)
        self._squares.zero_()


class Masters(Local):
    """bf16 parameters, whose fp32 masters torch's fused AdamW updates: by hand, in foreach operations."""

    dtype = torch.bfloat16

    def build(self) -> None:
        super().build()
        self._masters = [parameter.detach().float() for parameter in self.parameters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._updates = torch.optim.AdamW(self._masters, lr=self.settings.lr, fused=True)

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_copy_([m.grad for m in self._masters], [p.grad for p in self.parameters])
        self._updates.step()
        torch._foreach_copy_(self.parameters, self._masters)
        self.optimizer.zero_grad()


class LocalGraphs(Local):
    """Blocks in CUDA graphs. The next micro-batch's would overwrite the gradients before it, so they are cloned."""

    compiled = "reduce-overhead"

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        for parameter in self.parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        return nullcontext()


class Model(Local):
    """Forward and backward alone."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()  # so that nothing is left to update


class DDPInBf16(DDP):
    """DDP with torch's hook that sends gradients in bf16, which gloo refuses."""

    def build(self) -> None:
        super().build()
        self.ddp.register_comm_hook(None, bf16_compress_hook)


class AllReduceHook(DDP):
    """torch's own `allreduce_hook`, which measures nothing: what any communication hook costs that is not in C++."""

    def build(self) -> None:
        super().build()
        self.ddp.register_comm_hook(None, allreduce_hook)


class AdaScale(DDP):
    """DDP with FairScale's AdaScale.

    At scale 1 its gain is 1 while all its statistics are computed: the others' trajectory, at its own cost.
    """

    def build(self) -> None:
        super().build()
        from fairscale.optim import AdaScale as FairScaleAdaScale

        count = self.settings.micro_batches
        self.optimizer = FairScaleAdaScale(self.optimizer, num_gradients_to_accumulate=count, scale=1.0)


class NoiseScale(DDP):
    """DDP with a gradient noise scale as one would write it today.

    Local norms in a communication hook, the norm of the reduced gradients after backward, one scalar all-reduce,
    running means on the host. It knows no accumulation: with micro-batches the first square is of their sum.
    """

    def build(self) -> None:
        super().build()
        self._local_sq = torch.zeros((), device=self.device)
        self._means, self.noise_scale = [0.0, 0.0], float("nan")
        self.ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        self._local_sq += torch.dot(buffer, buffer)
        work = dist.all_reduce(buffer.div_(self.settings.workers), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def update(self) -> None:
        workers, few = self.settings.workers, self.settings.samples * self.settings.micro_batches
        work = dist.all_reduce(self._local_sq, async_op=True)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        assert work is not None
        work.wait()
        small, large = self._local_sq.item() / workers, norm.item() ** 2
        grad_sq = (workers * large - small) / (workers - 1)
        variance = (small - large) * few * workers / (workers - 1)
        for index, value in enumerate((grad_sq, variance)):
            self._means[index] = 0.95 * self._means[index] + 0.05 * value
        self.noise_scale = self._means[1] / self._means[0]
        self._local_sq.zero_()
        super().update()


class KfuseHook(DDP):
    """`kf.ddp_hook`, its figures sent to a callable every step."""

    def build(self) -> None:
        super().build()
        self.monitor = kf.ddp_hook(self.ddp, samples=self.settings.samples, accumulate=self.settings.micro_batches)
        kf.log_to(lambda record: None)


class KfuseMonitor(Local):
    """`kf.monitor`, told which micro-batch is a step's last, as the integrations tell it."""

    def build(self) -> None:
        super().build()
        s = self.settings
        self.monitor = kf.monitor(self.model, samples=s.samples, accumulate=s.micro_batches)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self.monitor.last = last
        return super().micro_batch(last)


class KfuseFSDP(FSDP):
    """`kf.fsdp_monitor`."""

    def build(self) -> None:
        super().build()
        s = self.settings
        self.monitor = kf.fsdp_monitor(self.model, samples=s.samples, accumulate=s.micro_batches)


VARIANTS: dict[str, type[Variant]] = {
    "local": Local,
    "local-noise-scale": LocalNoiseScale,
    "local-masters-bf16": Masters,
    "local-compiled": type("Compiled", (Local,), {"compiled": "default"}),
    "local-graphs": LocalGraphs,
    "local-kf-monitor": KfuseMonitor,
    "model": Model,
    "kfuse-alone": kfuse_variant(alone=True),
    "kfuse-alone-no-stats": kfuse_variant(alone=True, statistics=False),
    "ddp": DDP,
    "ddp-bf16": DDPInBf16,
    "ddp-adascale": AdaScale,
    "ddp-noise-scale": NoiseScale,
    "ddp-allreduce-hook": AllReduceHook,
    "ddp-kf-hook": KfuseHook,
    "fsdp": FSDP,
    "fsdp-kf-monitor": KfuseFSDP,
    "zero": Zero,
    "allreduce-bf16": kfuse_variant(schedule="allreduce", dtype="bf16"),
}
_PROGRAMS: dict[str, dict[str, Any]] = {
    "allreduce": {"schedule": "allreduce"},
    "all_to_all": {"schedule": "all_to_all"},
    "tree": {"schedule": "tree"},
    "reproducible": {"schedule": "all_to_all", "reproducible": True},
    "auto": {"schedule": "auto"},
    "sharded": {"state": "sharded"},
    "sharded-reproducible": {"state": "sharded", "reproducible": True},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "sharded-bf16": {"state": "sharded", "dtype": "bf16"},
    "sharded-int8": {"state": "sharded", "dtype": "int8"},
}
for _name, _options in _PROGRAMS.items():
    VARIANTS[_name] = kfuse_variant(**_options)
    VARIANTS[f"{_name}-no-stats"] = kfuse_variant(statistics=False, **_options)
_CHANGED: dict[str, dict[str, Any]] = {
    "masters-bf16": {"dtype": torch.bfloat16},
    "compiled": {"compiled": "default"},
    "graphs": {"compiled": "reduce-overhead"},
}
for _name, _options in _CHANGED.items():
    VARIANTS[f"allreduce-{_name}"] = type("Kfuse", (VARIANTS["allreduce"],), _options)
