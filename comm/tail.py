"""The tail: a few fp32 numbers at the end of the last bucket, which are summed with the gradients in one message.

First one flag per parameter (how many micro-batches gave it a gradient), then the slots named below, then RANK_SLOTS
for each rank, which only that rank writes. Last come the figures of a step function, if there is one, each times the
micro-batch's samples.

Sums over all micro-batches come out of the same reduction as the gradients. Where one rank alone writes, the sum is
what it wrote: integers up to 2^24, and all fp32 values, stay exact when zeros are added.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kfuse.comm import devices

SUM_SQUARES = 0  # sum over micro-batches of b_j |g_j|^2
SAMPLES = 1  # sum of b_j
LOSS = 2  # sum of b_j times the micro-batch's mean loss; NaN where a loss was not given
MICRO_BATCHES = 3
STEP_TIME = 4  # seconds that the step before took on the leader; 0.0: unknown
DATA_WAIT = 5  # the part of it that the leader waited for data
FISHER_TRACE = 6  # of the diagonal Fisher information, by the leader's optimizer state before the step; 0.0: unknown
FISHER_MAX = 7  # its largest entry
DECISION = 8  # number of the leader's decision that this step announces; 0.0: none
TAIL_SLOTS = 9

GRAD_SQ = TAIL_SLOTS  # in a step's record, after the slots: |gbar|^2
SKIPPED = TAIL_SLOTS + 1  # 1 if the update was left out
RECORD_SLOTS = TAIL_SLOTS + 2

RANK_SLOTS = 4  # of each rank: seconds a micro-batch (0.0: unknown), and the three slots of a digest
_LOW, _MIDDLE, _HIGH = 0xFFFFFF, 0xFFFFFF, 0xFFFF  # a digest's 64 bits, from the lowest
_PRESENT = 1 << 16  # in a digest's third slot: tells a digest of zero from none
_ROW = 1024  # elements of a tensor whose bits a digest adds up first
# Odd factors of splitmix64 (Steele, Lea, Flood 2014), as signed integers: a product with one can be undone.
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


Place = Tensor | NDArray[Any]  # see `quick`


def quick(tensor: Tensor) -> Place:
    """Numbers that a step reads and writes one by one: on the CPU an array, whose calls take a fraction of the time."""
    return tensor if devices.of(tensor.device).asynchronous else tensor.numpy()


class Tail:
    """The tail for `params` parameters on rank `rank` of `ranks`: writes a micro-batch's, reads the reduced one.

    figures: how many slots a step function's figures have.
    """

    def __init__(self, params: int, rank: int, ranks: int, figures: int = 0) -> None:
        self._slots, self._of_ranks = params, params + TAIL_SLOTS
        self.own = TAIL_SLOTS + RANK_SLOTS * rank  # the first slot that only this rank writes
        self._figures = self._of_ranks + RANK_SLOTS * ranks
        self.numel = self._figures + figures
        self._usual = np.zeros(self.numel, np.float32)  # what every micro-batch's tail begins from
        self._usual[:params] = self._usual[params + MICRO_BATCHES] = 1.0
        self._usual[params + LOSS] = math.nan

    def write(
        self,
        place: Place,
        accumulate: bool,
        samples: float,
        sum_squares: Tensor | float,
        loss: Tensor | float | None,
        missed: Collection[int] = (),
        figures: Sequence[Tensor | float] = (),
        own: Mapping[int, Tensor | float] | None = None,
    ) -> None:
        """Writes a micro-batch's tail to `place` (fp32 [numel]), or adds it to what is there. Never waits for a GPU.

        sum_squares: |g_j|^2, float64 on the device. loss: its mean loss. missed: parameters that it gave no gradient.
        figures: scalars, means over the micro-batch's samples. own: with a rank's first one of the step, what
        it alone writes, by slot: one named above, or one of the rank's, which begin with `own`.
        """
        slots, values = self._slots, self._usual.copy()
        for index in missed:
            values[index] = 0.0
        weighted: dict[int, Tensor | float] = {slots + SUM_SQUARES: sum_squares}  # times the samples
        if loss is not None:
            weighted[slots + LOSS] = loss
        if figures:
            weighted.update(enumerate(figures, self._figures))
        on_device: dict[int, Tensor] = {}
        with np.errstate(all="ignore"):
            values[slots + SAMPLES] = samples
            for slot, number in own.items() if own else ():
                if isinstance(number, Tensor):
                    on_device[slots + slot] = number
                else:
                    values[slots + slot] = number
            if not isinstance(place, Tensor):
                for index, scalar in weighted.items():
                    values[index] = (scalar.item() if isinstance(scalar, Tensor) else scalar) * samples
                for index, number in on_device.items():
                    values[index] = number.item()
                place[:] = place + values if accumulate else values
                return
        host_values = devices.of(place.device).pinned((self.numel,), torch.float32)
        host_values.copy_(torch.from_numpy(values))
        tail = host_values.to(place.device, non_blocking=True)
        for index, scalar in weighted.items():
            tail[index] = (scalar.detach().double() if isinstance(scalar, Tensor) else scalar) * samples
        for index, number in on_device.items():
            tail[index] = number
        place.add_(tail) if accumulate else place.copy_(tail)

    def write_digest(self, place: Tensor, digest: Tensor) -> None:
        """Writes this rank's digest to `place` (fp32 [numel], zeros), where it has no micro-batch to write of."""
        first = self._slots + self.own
        place[first + 1 : first + RANK_SLOTS] = digest_slots(digest)

    def record(self, tail: Place, totals: Place) -> Tensor:
        """A step's figures from the reduced tail: float64 [RECORD_SLOTS + ranks * RANK_SLOTS + figures], on the device.

        The slots named above, `totals` (float64 [2]: |gbar|^2, and 0 for an update that is not left out), what each
        rank alone wrote, then the sums of a step function's figures.
        """
        slots, of_ranks = self._slots, self._of_ranks
        parts: Any = (tail[slots:of_ranks], totals, tail[of_ranks:])
        return torch.cat(parts) if isinstance(tail, Tensor) else torch.from_numpy(np.concatenate(parts))


def digest(tensors: Sequence[Tensor], salt: int = 0) -> Tensor:
    """A number that is computed from the tensors' bits and their order: int64 scalar on their device, without a wait.

    It changes where an element differs, and where two swap places, but for a chance of about 2^-64, and for differences
    that cancel in each row and column of `_words`.
    tensors: on one device, of elements of 1, 2, 4 or 8 bytes, read in logical order. salt: added to it.
    """
    words = [word for tensor in tensors for word in _words(tensor.detach())]
    if not words:
        return torch.full((), _signed(salt), dtype=torch.int64)
    mixed = torch.cat(words).to(torch.int64)
    mixed ^= _ODD[0] * torch.arange(1, mixed.numel() + 1, device=mixed.device)  # place by place another value
    for shift, factor in ((32, _ODD[1]), (29, _ODD[2])):
        mixed ^= _shifted(mixed, shift)
        mixed *= factor
    return (mixed ^ _shifted(mixed, 32)).sum() + _signed(salt)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shifts right with zeros from the left: torch's shift repeats the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _words(tensor: Tensor) -> list[Tensor]:
    """The tensor's bits as integers, added up in rows of `_ROW` elements and in columns of such rows, modulo 2^32.

    What does not fill a row stays as it is. No copy of the tensor in 64 bits is made.
    """
    bits = tensor.reshape(-1)
    bits = bits.view({1: torch.int8, 2: torch.int16}.get(bits.element_size(), torch.int32))
    full = bits.numel() // _ROW * _ROW
    rows = bits[:full].view(-1, _ROW)
    sums = [rows.sum(dim, dtype=torch.int32) for dim in (0, 1)] if full else []
    return [*sums, bits[full:].to(torch.int32)]


def digest_slots(value: Tensor) -> Tensor:
    """Returns a digest as three fp32 numbers, which stay exact when zeros are added."""
    parts = [value & _LOW, (value >> 24) & _MIDDLE, ((value >> 48) & _HIGH) | _PRESENT]
    return torch.stack(parts).to(torch.float32)


def digest_from_slots(values: Sequence[float]) -> int | None:
    """The digest, unsigned; None where that rank sent none."""
    low, middle, high = map(int, values)
    return low | middle << 24 | (high & _HIGH) << 48 if high & _PRESENT else None


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
