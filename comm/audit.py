"""The gradient of one micro-batch as a digest, taken twice: as its worker's backward made it, and as another one does.

`kfuse.train.audit` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.digest import digest


class AuditedGradient:
    """Digests of the gradients of these buckets' parameters, all of an engine's: its `audited`."""

    repeats = False  # the backward under way is that of `again`: the engine leaves its gradients alone

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._buckets, self._device = buckets, devices.of(device)
        self._digests: dict[int, Tensor] = {}  # by bucket

    def take(self, bucket: Bucket) -> None:
        """The bucket has all of the audited micro-batch's gradients, as backward produced them."""
        self._digests[bucket.index] = self._digest_of(bucket.grads)

    def digest(self) -> Tensor:
        """Returns the digest of the plan's audited micro-batch, once that is over, until the next step begins.

        int64 scalar on the device, without a wait.
        """
        digests = [self._digests[bucket.index] for bucket in self._buckets]
        self._keep_here(digests)  # forwards on other streams have their hooks there
        return digest([torch.stack(digests)])

    def again(self, backward: Callable[[], object]) -> Tensor:
        """Runs the backward of a micro-batch that is not part of this worker's step; returns its `digest`.

        Its gradients are left in `p.grad`, which must be None before, and reach no bucket. Between micro-batches.
        """
        self.repeats = True
        try:
            backward()
        finally:
            self.repeats = False
        grads = [
            [bucket.laid_out(k, p.grad) for k, p in enumerate(bucket.tensors) if p.grad is not None]
            for bucket in self._buckets
        ]
        self._keep_here([grad for each in grads for grad in each])
        return digest([torch.stack([self._digest_of(each) for each in grads])])

    def _keep_here(self, tensors: Sequence[Tensor]) -> None:
        """The current stream reads these, whose memory may be another stream's."""
        self._device.keep(tensors, self._device.current_stream())

    def _digest_of(self, grads: Sequence[Tensor | None]) -> Tensor:
        return digest([grad for grad in grads if grad is not None]).to(self._device.name)
