"""A digest of tensors: one number, by which workers find out whether their values are the same."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

_ROW = 1024  # elements of a tensor whose bits a digest adds up first
# Odd factors of splitmix64 (Steele, Lea, Flood 2014), as signed integers: a product with one can be undone.
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def digest(tensors: Sequence[Tensor], salt: int = 0) -> Tensor:
    """A number that is computed from the tensors' bits and their order: int64 scalar on their device, without a wait.

    It changes where an element differs, and where two swap places, but for a chance of about 2^-64, and for differences
    that cancel in each row and column of `_words`.
    tensors: on one device, of elements of 1, 2, 4 or 8 bytes, read in logical order. salt: added to it.
    """
    words, signed = [word for tensor in tensors for word in _words(tensor.detach())], c_int64(salt).value
    if not words:
        return torch.full((), signed, dtype=torch.int64)
    mixed = torch.cat(words).to(torch.int64)
    mixed ^= _ODD[0] * torch.arange(1, mixed.numel() + 1, device=mixed.device)  # place by place another value
    for shift, factor in ((32, _ODD[1]), (29, _ODD[2])):
        mixed ^= _shifted(mixed, shift)
        mixed *= factor
    return (mixed ^ _shifted(mixed, 32)).sum() + signed


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
