"""Monitors beside plain DDP and FSDP2: what the gradient noise scale costs those who keep them and their optimizer.

    python benchmarks/hooks.py --json benchmarks/results/hooks.json
    python benchmarks/hooks.py --micro-batches 4 --samples 2
    python benchmarks/hooks.py --variants fsdp,fsdp-kf-monitor

`ddp` and `fsdp` are plain, with torch's fused AdamW; the others are the same, each with a communication hook or a
monitor. The measurement is that of step.py: interleaved, paired within rounds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from step import measure
from step_variants import DDP, VARIANTS, Settings, Variant
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import kfuse as kf
from kfuse.models import GPT


class KfuseHook(DDP):
    """`kf.ddp_hook`, its figures sent to a callable every step."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.latest: dict[str, Any] = {}
        self.monitor = kf.ddp_hook(self.ddp, samples=settings.samples, accumulate=settings.micro_batches)
        kf.log_to(self._take)

    def _take(self, record: dict[str, Any]) -> None:
        self.latest = record


class AllReduceHook(DDP):
    """torch's own `allreduce_hook`, which measures nothing: what any communication hook costs that is not in C++."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.ddp.register_comm_hook(None, allreduce_hook)


class KDiffusion(DDP):
    """The formula of k-diffusion's hook (k_diffusion/gns.py), written anew.

    Squares of a bucket before and after its reduction in the hook; then their sums averaged over the workers by one
    all-reduce, read one by one, and running means on the host. It averages with the operation AVG, which gloo lacks:
    here the bucket is divided first. It knows no accumulation: with micro-batches the first square is of their sum.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self._small: list[torch.Tensor] = []
        self._large: list[torch.Tensor] = []
        self._means = [0.0, 0.0]
        self.noise_scale = float("nan")
        self.ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        self._small.append(buffer.pow(2).sum(dtype=torch.float32))
        work = dist.all_reduce(buffer.div_(self.settings.workers), async_op=True)
        assert work is not None

        def reduced(future):  # type: ignore[no-untyped-def]
            mean = future.value()[0]
            self._large.append(mean.pow(2).sum(dtype=torch.float32))
            return mean

        return work.get_future().then(reduced)

    def update(self) -> None:
        sums = torch.stack([torch.stack(self._small).sum(), torch.stack(self._large).sum()])
        self._small, self._large = [], []
        dist.all_reduce(sums)
        small, large = sums[0].item() / self.settings.workers, sums[1].item() / self.settings.workers
        few = self.settings.samples * self.settings.micro_batches
        many = few * self.settings.workers
        grad_sq = (many * large - few * small) / (many - few)
        variance = (small - large) / (1 / few - 1 / many)
        for index, value in enumerate((grad_sq, variance)):
            self._means[index] = 0.9998 * self._means[index] + 0.0002 * value
        self.noise_scale = max(self._means[1], 1e-8) / max(self._means[0], 1e-8)
        super().update()


class FSDP(Variant):
    """torch's FSDP2 with fused AdamW: a unit for each block of the GPT, and one for the rest.

    Parameters are gathered once a forward: `reshard_after_forward` is off, as its memory is no subject here.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        gpt, mesh = self.model, init_device_mesh("cpu", (settings.workers,))
        assert isinstance(gpt, GPT)
        for unit in (*gpt.blocks, gpt):
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        for last in (gpt.tokens.weight, gpt.positions.weight):  # sharded: other parameters than before
            last.register_post_accumulate_grad_hook(self._gradient_is_there)
        self.optimizer = torch.optim.AdamW(gpt.parameters(), lr=settings.lr, fused=True)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class KfuseFSDP(FSDP):
    """`kf.fsdp_monitor`."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings, rank)
        self.monitor = kf.fsdp_monitor(self.model, samples=settings.samples, accumulate=settings.micro_batches)


# Workers import this file too: there step.py finds these variants.
VARIANTS.update({"ddp-allreduce-hook": AllReduceHook, "ddp-kf-hook": KfuseHook, "ddp-k-diffusion": KDiffusion})
VARIANTS.update({"fsdp": FSDP, "fsdp-kf-monitor": KfuseFSDP})

if __name__ == "__main__":
    measure(
        "hooks",
        __doc__ or "",
        ("local", "ddp", "ddp-allreduce-hook", "ddp-kf-hook", "ddp-noise-scale", "ddp-k-diffusion"),
        (
            ("ddp-kf-hook", "ddp-allreduce-hook"),
            ("ddp-kf-hook", "ddp-noise-scale"),
            ("ddp-kf-hook", "ddp-k-diffusion"),
            ("fsdp-kf-monitor", "fsdp"),
        ),
    )
