"""Buckets: parameters whose gradients are reduced together in one flat buffer, and buffers that are averaged too.

The layout is a pure function of the parameters' sizes, so that every worker, and every later view, has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.sum_tree import LeafStep
from kfuse.kernels import PackTable, pack

ALIGN = 64  # elements: keeps every tensor's place in a flat buffer 128-byte aligned, for 16-bit buffers too


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters (by index, in the order of their offsets) a bucket holds, and where each one starts."""

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int  # of the flat buffer, padding included


def plan_buckets(numels: Sequence[int], kinds: Sequence[object], capacity: int) -> list[BucketLayout]:
    """Cuts parameters into buckets of at most `capacity` elements, last parameter first.

    Backward produces gradients roughly in reverse order of definition, so the first bucket is complete early.
    `kinds`: parameters of different kinds (parameter group) never share a bucket. A parameter
    larger than the capacity has a bucket of its own.
    """
    layouts: list[BucketLayout] = []
    params: list[int] = []
    offsets: list[int] = []
    end = 0

    def close() -> None:
        nonlocal params, offsets, end
        if params:
            layouts.append(BucketLayout(tuple(params), tuple(offsets), end))
        params, offsets, end = [], [], 0

    for index in reversed(range(len(numels))):
        if params and (kinds[index] != kinds[params[0]] or end + numels[index] > capacity):
            close()
        params.append(index)
        offsets.append(end)
        end += -(-numels[index] // ALIGN) * ALIGN
    close()
    return layouts


class Bucket:
    """One bucket's tensors on a device: gradients as they come, and the flat buffers ("slots") they are packed into.

    Slot k is a flat fp32 buffer; with the canonical tree a worker may hold several partial sums, one a slot. After
    the reduction slot 0 holds the sum over all workers. `tail` extra elements follow the gradients in every slot.
    """

    def __init__(self, index: int, layout: BucketLayout, tensors: Sequence[Tensor], name: str) -> None:
        """`tensors`: all tensors that the layout's indices refer to. There is no tail until `renew` gives one."""
        self.index, self.layout, self.name = index, layout, name
        mine = [tensors[i] for i in layout.params]
        self.device = mine[0].device if mine else torch.device("cpu")
        self.shapes = [t.shape for t in mine]
        self.body, self.tail = layout.numel, 0
        self.table = PackTable.build([t.numel() for t in mine], list(layout.offsets), self.device)
        self.renew()
        self.begin_micro_batch()

    def renew(self, tail: int | None = None) -> None:
        """Takes fresh slots, perhaps with another tail; messages under way may still write to the old ones."""
        self.tail = self.tail if tail is None else tail
        self._on_host: list[Tensor] = []
        self.slots: list[Tensor] = []
        self.mean = self.slot(0)[: self.body]
        """Slot 0 without the tail: after the reduction, the mean gradient."""
        self.views = self.view(self.mean)
        """Tensor views of `mean`, one for each parameter, in its shape."""

    def slot(self, k: int) -> Tensor:
        """Slot k, allocated (zeroed, so that padding stays zero) on first use."""
        while len(self.slots) <= k:
            self.slots.append(torch.zeros(self.body + self.tail, device=self.device))
        return self.slots[k]

    def view(self, flat: Tensor) -> list[Tensor]:
        """Tensor views of a flat buffer of this layout, one for each parameter, in its shape."""
        places = zip(self.layout.offsets, self.shapes, strict=True)
        return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in places]

    def begin_micro_batch(self) -> None:
        """No gradient is there yet."""
        self.grads: list[Tensor | None] = [None] * len(self.shapes)
        self.missing = len(self.shapes)
        self.packed = False

    def save(self, leaf: LeafStep) -> None:
        """Before the leaf is written: copies the sums to the host in whose slots others come. Does not wait."""
        for slot, place in leaf.saves:
            while len(self._on_host) <= place:
                pinned = devices.of(self.device).pinned((self.body + self.tail,), torch.float32)
                self._on_host.append(pinned)
            self._on_host[place].copy_(self.slot(slot), non_blocking=True)

    def merge(self, leaf: LeafStep) -> None:
        """After the leaf was written: adds up partial sums, older ones with what the host has of them."""
        for k, (destination, source) in enumerate(leaf.merges):
            if leaf.loads and (place := leaf.loads[k]) is not None:
                self.slot(destination).copy_(self._on_host[place], non_blocking=True)
            self.slot(destination).add_(self.slot(source))


def make_buckets(
    layouts: Sequence[BucketLayout], params: Sequence[Tensor], others: Sequence[Tensor] | None
) -> list[Bucket]:
    """A bucket for each layout of `params`, and where `others` are given (perhaps none) a last one for them."""
    pairs = [(layout, params) for layout in layouts]
    if others is not None or not layouts:
        others = others or ()
        apart = plan_buckets([tensor.numel() for tensor in others], [0] * len(others), 2**62)
        pairs.append((apart[0] if apart else BucketLayout((), (), 0), others))
    names = [f"bucket {i + 1} of {len(pairs)}" for i in range(len(pairs))]
    return [Bucket(i, *pair, name) for i, (pair, name) in enumerate(zip(pairs, names, strict=True))]


class AveragedBuffers:
    """The buffers, and their values at the start of the step.

    Changes are averaged, not values, so that a buffer which nothing changes keeps its bits. Each micro-batch starts
    from the step's first values, so that the result does not depend on which worker ran which.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.tensors = list(buffers)
        self._first = [b.clone() for b in self.tensors]
        self._infinite = [i for i, b in enumerate(self.tensors) if not b.isfinite().all()]  # a mask's -inf

    def begin_step(self) -> None:
        """A planned step starts from the values now.

        A bare backward does not call it: its forward has changed the buffers already, since the step before.
        """
        if self.tensors:
            torch._foreach_copy_(self._first, self.tensors)

    def put_back(self) -> None:
        """Restores the values at the start of the step: for the next micro-batch, or because the step is aborted."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self._first)

    def changes(self) -> list[Tensor]:
        """Each buffer's change since the step began, fp32, in its shape."""
        if not self.tensors:
            return []
        changes = list(torch._foreach_sub(self.tensors, self._first))
        for i in self._infinite:  # inf - inf is not 0
            changes[i] = torch.where(self.tensors[i] == self._first[i], 0, changes[i])
        return [change.to(torch.float32) for change in changes]

    def pack(self, bucket: Bucket, leaf: LeafStep, scale: float) -> None:
        """Packs the changes, multiplied by `scale`, into their bucket's slot, as `leaf` says."""
        changes = self.changes()
        values = [changes[i] for i in bucket.layout.params]
        unused = torch.empty(bucket.table.num_chunks, device=bucket.device)
        pack(values, bucket.slot(leaf.slot), bucket.table, scale=scale, accumulate=leaf.accumulate, sumsq=unused)

    def apply(self, bucket: Bucket, total_weight: Tensor | None) -> None:
        """Sets each buffer to its value at the step's start plus the bucket's mean change; a counter is rounded.

        total_weight: scalar, by which the bucket's sums are divided; None: they are means.
        """
        for index, change in zip(bucket.layout.params, bucket.views, strict=True):
            buffer, first = self.tensors[index], self._first[index]
            change = change if total_weight is None else change / total_weight
            change = change if buffer.is_floating_point() else change.round().to(buffer.dtype)
            torch.add(first, change, out=buffer)
            first.copy_(buffer)
