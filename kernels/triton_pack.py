# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `pack`: gradients to flat buffer, cast, scaled, accumulated and measured in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.launch import Launch, Launches
from kfuse.kernels.reduction import PackArguments
from kfuse.kernels.table import CHUNK

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pack_span(source, target, index, read, write, scale, ACCUMULATE: tl.constexpr):
    raw = tl.load(source + index, mask=read, other=0.0).to(tl.float32)
    value = (raw * scale).to(target.dtype.element_ty)  # a scale of 1 changes no bits
    if ACCUMULATE:
        old = tl.load(target + index, mask=read, other=0.0)
        value = (old.to(tl.float32) + value.to(tl.float32)).to(target.dtype.element_ty)
    tl.store(target + index, value, mask=write)
    return tl.sum(raw * raw, axis=0)


@triton.jit(do_not_specialize_on_alignment=["sumsq"])
def pack_kernel(
    pointers, chunks, flat, sumsq, scale,
    GRAD: tl.constexpr, OFFSET_ALIGNMENT: tl.constexpr, ACCUMULATE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Pack one chunk. The chunk table says which tensor it is of, and the pointer table where that tensor lies."""
    chunk = tl.program_id(0)
    row = chunks + chunk.to(tl.int64) * 4
    address = tl.load(pointers + tl.load(row))
    start = tl.multiple_of(tl.load(row + 1), CHUNK)
    length = tl.load(row + 2).to(tl.int32)
    offset = tl.multiple_of(tl.load(row + 3), OFFSET_ALIGNMENT)
    # The compiler cannot see through the table that addresses are aligned; the launcher has made sure.
    source = tl.multiple_of(address.to(tl.pointer_type(GRAD)), 16) + start
    target = flat + offset
    readable = tl.where(address == 0, 0, length)
    writable = readable if ACCUMULATE else length

    # A mask that changes only at multiples of 16 elements keeps 128-bit accesses; the few elements after it go apart.
    whole = length // 16 * 16
    index = tl.arange(0, CHUNK)
    read = index < readable // 16 * 16
    write = index < writable // 16 * 16
    total = _pack_span(source, target, index, read, write, scale, ACCUMULATE)
    if whole < length:
        rest = whole + tl.arange(0, 16)
        total += _pack_span(source, target, rest, rest < readable, rest < writable, scale, ACCUMULATE)
    tl.store(sumsq + chunk, total)


def pack(given: PackArguments) -> Launches:
    table = given.table
    dtypes = {grad.dtype for grad in given.grads if grad is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    sources = [None if grad is None else _loadable(grad, dtype) for grad in given.grads]
    pointers = table.pointers(tuple(0 if grad is None else grad.data_ptr() for grad in sources))
    constants = {
        "GRAD": _TRITON_DTYPES[dtype],
        "OFFSET_ALIGNMENT": table.offset_alignment,
        "ACCUMULATE": given.accumulate,
        "CHUNK": CHUNK,
    }
    values = vars(given) | {"pointers": pointers, "chunks": table.chunks, "scale": float(given.scale)}
    # A step of more micro-batches accumulates where the steps before it did not.
    later = ({"ACCUMULATE": not given.accumulate},)
    yield Launch(pack_kernel, (table.num_chunks,), values, constants, later=later)


def _loadable(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient as the kernel reads it: one dtype for the launch, contiguous, 16-byte aligned.

    A gradient that is not so, which is rare, is copied. A second kernel for it would sum squares in another order, and
    bits would depend on where the allocator happened to put a tensor.
    """
    grad = grad.to(dtype).contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()
