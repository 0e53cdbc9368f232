"""Buckets: parameters whose gradients are reduced together in one flat buffer, and buffers that are averaged too.

The layout is a pure function of the parameters' sizes, so that every worker, and every later view, has the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.devices import Place, quick
from kfuse.comm.sum_tree import LeafStep
from kfuse.kernels import BLOCK, PackArguments, PackTable, pack
from kfuse.kernels.wire import wire_numel

ALIGN = 64  # elements: keeps every tensor's place in a flat buffer 128-byte aligned, for 16-bit buffers too
JOINED = 4  # configured buckets that are one where a GPU sends no messages


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters (by index, in the order of their offsets) a bucket holds, and where each starts."""

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int  # of the flat buffer, padding included
    dtype: torch.dtype = torch.float32  # of the parameters
    strides: tuple[tuple[int, ...] | None, ...] = ()  # of each parameter; None, or no entry: those of a fresh tensor
    # What each parameter's update costs its owner, in units of any kind, where it needs the whole gradient; else empty.
    costs: tuple[int, ...] = ()


def plan_buckets(
    numels: Sequence[int], kinds: Sequence[object], capacity: int, costs: Sequence[int | None] = ()
) -> list[BucketLayout]:
    """Cuts parameters into buckets of at most `capacity` elements; a larger parameter has a bucket of its own.

    The last parameter comes first, as in backward. Parameters of different kinds (parameter groups) share no bucket.
    costs: see `BucketLayout`. A parameter that has one begins at a block of the sums of squares: buckets are cut there.
    """
    costs = costs or [None] * len(numels)
    layouts: list[BucketLayout] = []
    places: dict[int, int] = {}  # of the bucket under way: each parameter's offset
    end = 0
    for index in reversed(range(len(numels))):
        first = next(iter(places), index)
        if places and (kinds[index] != kinds[first] or end + numels[index] > capacity):
            layouts.append(_layout(places, end, costs))
            places, end = {}, 0
        places[index] = end
        unit = ALIGN if costs[index] is None else BLOCK
        end += -(-numels[index] // unit) * unit
    if places:
        layouts.append(_layout(places, end, costs))
    return layouts


def _layout(places: Mapping[int, int], numel: int, costs: Sequence[int | None]) -> BucketLayout:
    known = tuple(cost for index in places if (cost := costs[index]) is not None)
    return BucketLayout(tuple(places), tuple(places.values()), numel, costs=known)


def plan_parameters(
    params: Sequence[Tensor], kinds: Sequence[object], capacity: int, costs: Sequence[int | None] = ()
) -> list[BucketLayout]:
    """Cuts the parameters of each dtype as `plan_buckets` does: dtypes that alternate do not cut buckets short.

    The buckets are in the order in which backward completes them.
    """
    layouts: list[BucketLayout] = []
    for dtype in dict.fromkeys(p.dtype for p in params):
        mine = [index for index, p in enumerate(params) if p.dtype == dtype]
        of_mine = [costs[i] for i in mine] if costs else ()
        for layout in plan_buckets([params[i].numel() for i in mine], [kinds[i] for i in mine], capacity, of_mine):
            indices = tuple(mine[k] for k in layout.params)
            fresh = [torch.empty(params[i].shape, device="meta").stride() for i in indices]
            strides = tuple(
                None if params[i].stride() == usual else params[i].stride()
                for i, usual in zip(indices, fresh, strict=True)
            )
            layouts.append(replace(layout, params=indices, dtype=dtype, strides=strides))
    return sorted(layouts, key=lambda layout: -layout.params[-1])


def dense_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions, the outermost in memory first; None if the memory has gaps or overlaps.

    `tensor.permute(dense_order(tensor))` is contiguous.
    """
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))  # stable: equal ones stay as they are
    return order if tensor.permute(order).is_contiguous() else None


def flat_zeros(numel: int, nth: int, device: torch.device, dtype: torch.dtype = torch.float32, room: int = 0) -> Tensor:
    """A flat buffer of zeros. nth: which of the buffers it is that one pass reads side by side, from 0. room: elements
    that follow it in its memory.

    On a CPU each begins at another line of its page: large buffers that begin at the same one take up to a fifth
    longer to update (AdamW, four of 64 MB).
    """
    first = 0 if devices.of(device).asynchronous else nth * ALIGN
    return torch.zeros(first + numel + room, dtype=dtype, device=device)[first : first + numel]


class Bucket:
    """One bucket's tensors on a device: gradients as they come, and the flat buffers ("slots") that hold them: fp32, of
    float64 parameters float64.

    With the canonical tree a worker may hold several partial sums, one a slot. After the reduction `sum` holds the sum
    over all workers. `tail` extra elements follow the gradients in every slot.

    A bucket of parameters holds each one's elements in the order of the parameter's memory, so that a view in the
    parameter's shape has its strides too (channels_last). One of averaged buffers holds them in logical order.
    """

    room = 0  # elements behind each slot, so that messages are of equal parts: NCCL has no others
    tensors: list[Any]  # its parameters, or buffers, in the order of their offsets
    orders: list[tuple[int, ...] | None]  # each parameter's `dense_order`; None: the logical one
    tails: list[Place]  # of each slot
    mean: Tensor  # [body], `sum` without the tail: after the reduction, the mean gradient
    visible: Tensor  # [body], what each p.grad is a view of: `mean`, or `rounded`
    rounded: Tensor | None  # of 16-bit parameters the mean's rounded values, which the user may change. None: no copy
    shards: list[slice]  # each rank's part, where the program splits the bucket
    owned: list[slice]  # each rank's parameters, where an update needs the whole gradient of each; else empty
    part: slice  # this worker's of `shards`, which it adds up and measures
    mirrored: slice  # the shard of the worker before, whose updates this one repeats; empty where there is no mirror
    own: Tensor  # `mean[shard]`
    # Each parameter's gradient, a view of `visible`; with sharded state None, since no worker has all of it.
    views: Sequence[Tensor | None]
    sumsq: Tensor  # fp32: sums of squares of one micro-batch's own gradient, which `pack` writes. Measurement sets it
    stored: Tensor | None  # fp32: the same of the slot after `pack`. None: the reduced sum is measured instead
    message: Tensor | None = None  # what travels in the sum's place: bf16 [body], or int8 as `kernels.wire` has it
    added: Tensor | None = None  # fp32, of an int8 message: what rounding adds to the sum of squares. Else None
    places: list[Tensor]  # of each parameter in `mean`, laid out as its gradients are
    grads: list[Tensor | None]  # of the micro-batch; none once they are packed
    missing: int  # how many of these have not come
    _packings: dict[tuple[int, bool, bool], PackArguments]  # see `packing`

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        tensors: Sequence[Tensor],
        device: torch.device,
        name: str,
        sharded: bool,
    ) -> None:
        """tensors: all that the layout's indices refer to. There is no tail until `renew` gives one.

        device: of the tensors, and of the messages: a bucket of the tail alone has no tensors.
        sharded: of the mean gradient only this worker's shard is computed.
        """
        self.index, self.layout, self.name, self.sharded = index, layout, name, sharded
        self.body = layout.numel  # elements of the gradients, padding included
        self.tensors = mine = [tensors[i] for i in layout.params]
        self.device = device
        self.shapes = [t.shape for t in mine]
        self.orders = [
            None if strides is None else dense_order(torch.empty_strided(shape, strides, device="meta"))
            for shape, strides in zip(self.shapes, layout.strides or (None,) * len(mine), strict=True)
        ]
        self.is_permuted = any(order is not None for order in self.orders)
        self.shards, self.owned = [slice(0, self.body)], []
        self.part, self.mirrored = slice(0, self.body), slice(0, 0)
        self.table = PackTable.build([t.numel() for t in mine], list(layout.offsets), self.device)
        self.renew(0)
        self.begin_micro_batch()

    def renew(self, tail: int | None = None, new_slot: Callable[[int], Tensor] | None = None) -> None:
        """Takes fresh slots, perhaps with another tail; messages under way may still write to the old ones.

        new_slot(k): where slot k is to lie, [body + tail], zeros; None: in memory of its own.
        """
        numel = self.body + (self.tail if tail is None else tail)
        self._new_slot = new_slot or partial(flat_zeros, numel, device=self.device, dtype=self.kind, room=self.room)
        self.slots, self.tails, self._packings = list[Tensor](), list[Place](), {}
        self.mean = self.slot(0)[: self.body]
        self.assign(self.part, self.mirrored)
        self.places = [self.laid_out(k, view) for k, view in enumerate(self.view(self.mean))]
        self.visible, self.rounded = self.mean, None
        if self.layout.dtype != self.kind and not self.sharded:
            self.visible = self.rounded = torch.zeros(self.body, dtype=self.layout.dtype, device=self.device)
        self.renew_views()

    def renew_views(self) -> None:
        """Makes `views` anew."""
        self._shown = [] if self.sharded else self.view(self.visible)
        self.views = self._shown or [None] * len(self.shapes)
        self._shown_at = [view.data_ptr() for view in self._shown], [view.stride() for view in self._shown]

    @property
    def kind(self) -> torch.dtype:
        """The dtype of the slots."""
        return torch.float64 if self.layout.dtype is torch.float64 else torch.float32

    @property
    def sum(self) -> Tensor:
        """[body + tail], slot 0."""
        return self.slots[0]

    @property
    def tail(self) -> int:
        return self.slots[0].numel() - self.body

    @property
    def shard(self) -> slice:
        """The part of `mean` that this worker updates; all of it with replicated state."""
        return self.part if self.sharded else slice(0, self.body)

    def assign(self, part: slice, mirrored: slice) -> None:
        """Sets this worker's parts of `mean`. Between steps."""
        self.part, self.mirrored = part, mirrored
        self.own = self.mean[self.shard]

    def slot(self, k: int) -> Tensor:
        """Slot k, allocated (zeros, so that padding stays zero) on first use."""
        while len(self.slots) <= k:
            self.slots.append(self._new_slot(len(self.slots)))
            self.tails.append(quick(self.slots[-1][self.body :]))
        return self.slots[k]

    def send_as(self, kind: str) -> None:
        """Takes memory for messages that are rounded to bf16 or int8; none for fp32. Between steps."""
        self.message = self.added = None
        self._packings = {}
        if kind == "bf16":
            self.message = flat_zeros(self.body, 0, self.device, torch.bfloat16, self.room)
        elif kind == "int8":
            self.message = flat_zeros(wire_numel(self.body), 0, self.device, torch.int8, wire_numel(self.room))
            self.added = torch.zeros_like(self.sumsq)

    def packing(self, k: int, accumulate: bool, sends: bool) -> PackArguments:
        """The arguments of `pack` into slot k, kept: they are given a micro-batch's gradients and scale.

        sends: it writes the bucket's message, where that is int8.
        """
        if (k, accumulate, sends) not in self._packings:
            none = [None] * len(self.shapes)
            message = (self.message, self.added) if sends and self.added is not None else ()
            given = PackArguments(none, self.slot(k), self.table, 1.0, accumulate, self.sumsq, None, *message)
            self._packings[k, accumulate, sends] = given
        return self._packings[k, accumulate, sends]

    def place(self, flat: Tensor, k: int) -> Tensor:
        """The k-th parameter's elements in a flat buffer of this layout, 1-D."""
        offset = self.layout.offsets[k]
        return flat[offset : offset + self.shapes[k].numel()]

    def view(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat buffer of this layout, one for each parameter, in its shape and with its strides."""
        return [self.shaped(self.place(flat, k), k) for k in range(len(self.shapes))]

    def shaped(self, elements: Tensor, k: int) -> Tensor:
        """The k-th parameter's elements, 1-D, in its shape and with its strides."""
        strides = self.layout.strides[k] if self.layout.strides else None
        return elements.view(self.shapes[k]) if strides is None else elements.as_strided(self.shapes[k], strides)

    def laid_out(self, k: int, gradient: Tensor) -> Tensor:
        """A gradient of the k-th parameter, its dimensions in the order in which this bucket holds its elements."""
        order = self.orders[k]
        return gradient if order is None else gradient.permute(order)

    def are_views(self) -> bool:
        """Whether all of `views` are views still: `p.grad.data = tensor` gives one other memory, or other strides."""
        addresses, strides = self._shown_at
        same = list(map(Tensor.data_ptr, self._shown)) == addresses
        return same and list(map(Tensor.stride, self._shown)) == strides

    def begin_micro_batch(self) -> None:
        self.grads = [None] * len(self.shapes)
        self.missing = len(self.shapes)


def make_buckets(
    layouts: Sequence[BucketLayout],
    params: Sequence[Tensor],
    others: Sequence[Tensor] | None,
    device: torch.device,
    sharded: bool,
) -> list[Bucket]:
    """A bucket for each layout of `params`, and where `others` are given (perhaps none) a last one for them.

    device, sharded: see `Bucket`; the last one is never sharded.
    """
    given = [(layout, params, sharded) for layout in layouts]
    if others is not None or not layouts:
        others = others or ()
        apart = plan_buckets([tensor.numel() for tensor in others], [0] * len(others), 2**62)
        given.append((apart[0] if apart else BucketLayout((), (), 0), others, False))
    return [
        Bucket(i, layout, tensors, device, f"bucket {i + 1} of {len(given)}", of_shards)
        for i, (layout, tensors, of_shards) in enumerate(given)
    ]


class AveragedBuffers:
    """The buffers, and their values at the start of the step.

    Changes are averaged, not values, so that a buffer which nothing changes keeps its bits. Each micro-batch starts
    from the step's first values, so that the result does not depend on which worker ran which. An element that is not
    finite then (a minimum that begins with inf, a mask's -inf) has no change: the micro-batches' values are averaged.
    """

    def __init__(self, buffers: Mapping[str, Tensor], summed: Sequence[Tensor] = ()) -> None:
        """buffers: by name. summed: those of which each element is changed by one micro-batch of a step at most: it
        gets that change.
        """
        self.named, self.summed, self.tensors = buffers, summed, list(buffers.values())
        self._is_summed = [any(b is other for other in summed) for b in self.tensors]
        self._first = [b.clone() for b in self.tensors]
        self._shapes = [b.shape for b in self.tensors]
        self._base: list[Tensor] | None = None  # what changes are from: `_first`, with 0 for what is not finite

    def begin_step(self) -> None:
        """A planned step starts from the values now.

        A bare backward does not call it: its forward has changed the buffers already, since the step before.
        """
        if self.tensors:
            torch._foreach_copy_(self._first, self.tensors)
            self._base = None

    def put_back(self) -> None:
        """Restores the values at the start of the step: for the next micro-batch, or because the step is aborted."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self._first)

    def pack(self, bucket: Bucket, leaf: LeafStep, scale: float) -> None:
        """Packs the changes since the step began into their bucket's slot, as `leaf` says: times `scale`, or as they
        are of those that are summed, where the scales of a step's micro-batches add up to 1.

        Raises RuntimeError where forward has given buffers another shape; they have the first one again then.
        """
        if [b.shape for b in self.tensors] != self._shapes:
            self._refuse_resized()
        changes = torch._foreach_sub(self.tensors, self._changes_from())
        values = [changes[i].to(torch.float32) for i in bucket.layout.params]
        values = [v / scale if self._is_summed[i] else v for i, v in zip(bucket.layout.params, values, strict=True)]
        pack(values, bucket.slot(leaf.slot), bucket.table, scale=scale, accumulate=leaf.accumulate, sumsq=None)

    def apply(self, indices: Sequence[int], changes: Sequence[Tensor], total_weight: Tensor | None) -> None:
        """Sets each buffer to its value at the step's start plus its mean change; a counter is rounded.

        indices: each change's buffer. total_weight: scalar, by which changes are divided; None: they are means.
        """
        base = self._changes_from()
        for index, change in zip(indices, changes, strict=True):
            buffer = self.tensors[index]
            change = change if total_weight is None else change / total_weight
            change = change if buffer.is_floating_point() else change.round().to(buffer.dtype)
            torch.add(base[index], change, out=buffer)
        self.begin_step()

    def _changes_from(self) -> list[Tensor]:
        if self._base is None:
            self._base = [torch.nan_to_num(b, 0.0, 0.0, 0.0) if b.is_floating_point() else b for b in self._first]
        return self._base

    def _refuse_resized(self) -> None:
        told = [
            f"buffer {name} of shape {tuple(shape)} was given the shape {tuple(buffer.shape)} by a forward"
            for (name, buffer), shape in zip(self.named.items(), self._shapes, strict=True)
            if buffer.shape != shape
        ]
        for buffer, shape in zip(self.tensors, self._shapes, strict=True):
            buffer.resize_(shape)  # so that the step can be dropped
        raise RuntimeError(
            f"{told[0]}: its changes could not be averaged. Run one forward before the optimizer is made, or register "
            "it with persistent=False, which leaves it to each worker"
        )
