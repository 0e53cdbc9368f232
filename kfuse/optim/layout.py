"""A bucket's parameters and optimizer state as flat buffers, and the pieces of them that one kernel call updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from kfuse.comm.buckets import Bucket, flat_zeros

MASTER = "master"  # the name in a state_dict of a 16-bit parameter's fp32 weights


class Extent(NamedTuple):
    """Where a piece lies: this worker's part of a bucket, or of one parameter of it."""

    place: slice  # of the bucket
    within: slice  # of `Part.place`
    numels: tuple[int, ...]  # of each parameter in it
    offsets: tuple[int, ...]  # where each one begins, counted from the start of `place`
    tensors: tuple[int, ...]  # which of the bucket's parameters they are; they follow each other


@dataclass
class Entry:
    """What there is of one parameter's state. The same on each worker, as its number of updates is."""

    known: bool = False  # it has moments (torch makes them at the first update)
    mastered: bool = False  # its master is a part of the state: from the first update on, or since it was loaded


@dataclass
class Part:
    """The optimizer state of a part of a bucket: all of it, or with sharded state a worker's shard, or a mirror."""

    place: slice  # of the bucket, in elements
    # fp32, 1-D, each as long as the place: the moments by torch's names, once an update needs them; where parameters
    # are 16-bit their fp32 weights, as MASTER: these are updated, and the parameters are their rounded values.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    extents: dict[range, Extent | None] = field(default_factory=dict)  # what `extent` has found: every step asks again
    pieces: dict[range, Piece] = field(default_factory=dict)  # kept by `piece_of`
    made_of: tuple[Tensor, ...] = ()  # the tensors that the pieces are parts of

    @property
    def width(self) -> int:
        return int(self.place.stop - self.place.start)

    @property
    def master(self) -> Tensor | None:
        return self.tensors.get(MASTER)

    @property
    def moments(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name != MASTER}

    def move_to(self, place: slice) -> None:
        """Drops the tensors; those that come are of `place`."""
        self.place, self.tensors, self.extents, self.pieces, self.made_of = place, {}, {}, {}, ()

    def make(self, names: Iterable[str], device: torch.device) -> None:
        """Makes those of these tensors that are lacking: zeros."""
        for name in names:
            if name not in self.tensors:  # after the gradients and the parameters
                self.tensors[name] = flat_zeros(self.width, 2 + len(self.tensors), device)

    def cut(self, name: str, place: slice) -> Tensor:
        """The tensor's elements of a smaller place."""
        return self.tensors[name][self.within(place)]

    def within(self, part: slice) -> slice:
        """A part of the bucket that lies in `place`, counted from where that starts."""
        return slice(part.start - self.place.start, part.stop - self.place.start)

    def fill(self, bucket: Bucket, name: str, values: Sequence[Tensor | None]) -> None:
        """Copies the parameters' values to their places in a tensor; None: zeros. values: whole."""
        if not bucket.sharded:
            fill(bucket.view(self.tensors[name]), values)
            return
        for k, value in enumerate(values):
            part = self._of_parameter(bucket, k)
            if part.stop == part.start:
                continue
            if value is None:
                self.cut(name, part).zero_()
            else:
                offset = bucket.layout.offsets[k]
                whole = bucket.laid_out(k, value).reshape(-1)
                self.cut(name, part).copy_(whole[part.start - offset : part.stop - offset])

    def _of_parameter(self, bucket: Bucket, k: int) -> slice:
        start = bucket.layout.offsets[k]
        first = max(start, self.place.start)
        return slice(first, max(first, min(start + bucket.shapes[k].numel(), self.place.stop)))

    def extent(self, bucket: Bucket, which: range) -> Extent | None:
        """Where the piece of these parameters lies, one or all; None where nothing of them lies in `place`."""
        if which in self.extents:
            return self.extents[which]
        every = [(k, self._of_parameter(bucket, k)) for k in which]
        filled = [at for at, (_, part) in enumerate(every) if part.stop > part.start]
        found = None
        if filled:
            parts = every[filled[0] : filled[-1] + 1]
            place = self.place if len(which) > 1 or len(bucket.shapes) == 1 else parts[0][1]
            numels = tuple(part.stop - part.start for _, part in parts)
            offsets = tuple(part.start - place.start for _, part in parts)
            found = Extent(place, self.within(place), numels, offsets, tuple(k for k, _ in parts))
        self.extents[which] = found
        return found


@dataclass
class Piece:
    """What one call updates.

    All tensors are flat and of one length, and fp32, but for 16-bit parameters, which have a master, and `visible`.
    """

    extent: Extent
    param: Tensor
    master: Tensor | None
    grad: Tensor
    visible: Tensor | None  # the same rounded to 16 bits, and perhaps changed: see `kernels.updates.UpdateArguments`
    moments: dict[str, Tensor]
    step: Tensor  # 0-dim fp32, the number of this update, from 1
    first: bool  # it is the first update of these parameters
    skip: Tensor | None  # where it is not 0 the update is left out; None: 0
    arguments: Any = None  # the kernel's, which the rule keeps here: checked once


def piece_of(
    bucket: Bucket, param: Tensor, steps: Tensor, part: Part, which: range, first: bool, skip: Tensor | None
) -> Piece | None:
    """The piece of these parameters, one or all; None where nothing of them lies in the part. Kept while it fits.

    param, steps: as in `BucketState`.
    """
    made_of = (param, bucket.mean, steps, *part.tensors.values())
    if len(part.made_of) != len(made_of) or not all(map(is_, part.made_of, made_of)):
        part.made_of, part.pieces = made_of, {}
    if (kept := part.pieces.get(which)) is not None:
        kept.first, kept.skip = first, skip
        return kept
    extent = part.extent(bucket, which)
    if extent is None:
        return None
    part.pieces[which] = Piece(
        extent,
        param=_cut(param, extent.place),
        master=None if part.master is None else _cut(part.master, extent.within),
        grad=_cut(bucket.mean, extent.place),
        visible=None if bucket.rounded is None else _cut(bucket.rounded, extent.place),
        moments={name: _cut(tensor, extent.within) for name, tensor in part.moments.items()},
        step=steps[extent.tensors[0]],
        first=first,
        skip=skip,
    )
    return part.pieces[which]


def _cut(tensor: Tensor, place: slice) -> Tensor:
    """`tensor[place]`; where that is all of it the tensor itself, since a new view takes as long as a small kernel."""
    return tensor if place.stop - place.start == tensor.numel() else tensor[place]


def with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage begins and ends with it (and keeps the whole buffer alive).

    What writes a tensor writes its storage: torch.save of one layer would write the whole buffer.
    """
    if not view.numel():
        return view
    own = from_dlpack(view)  # which may set the stride of a dimension of one element to 1
    return own if own.stride() == view.stride() else own.as_strided(view.shape, view.stride())


def refuse_overlaps(named: list[tuple[Parameter, str]]) -> None:
    """Raises ValueError where two parameters lie in the same memory, as after `a.data = b.data`."""
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), i) for i, (p, _) in enumerate(named))
    ranges = [(start, end, i) for start, end, i in ranges if end > start]
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            (p, first), (q, second) = (named[i] for i in sorted((one, other)))
            raise ValueError(
                f"{first} of shape {tuple(p.shape)} and {second} of shape {tuple(q.shape)} share their memory through "
                ".data: to tie weights, give both modules the same Parameter (b.weight = a.weight)"
            )


def fill(places: Iterable[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copies each value to its place; None: zeros. One that lies there already is not copied."""
    for place, value in zip(places, values, strict=True):
        if value is None:
            place.zero_()
        elif value.data_ptr() != place.data_ptr():
            place.copy_(value)
