# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Triton `orthogonalise`: a stack of matrices of one shape, and one kernel for the three products of an iteration.

The stack is padded with zeros to multiples of a tile, which the products keep zero. So the kernel needs no masks, all
its accesses are aligned, and one binary of each product serves every shape.

How a matrix is cut into tiles, and the order in which a tile is summed up, depend on its type alone. So its bits do not
depend on how many others are in the call. Those of cuBLAS' batched products may: it chooses its kernel by the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.dispatch import Launch, Launches
from kfuse.kernels.orthogonal import OrthogonaliseArguments

# TILE: rows, and columns, of a program's tile. DEPTH: what one turn of its loop sums up. And the program's threads.
# On tensor cores, 64 sums a thread: a larger tile needs more than 128 registers, a smaller one reads more for each
# product. fp32 without tensor cores: 32 sums, since the operands lie in registers as well.
LAYOUTS = {torch.bfloat16: (128, 32, 256), torch.float32: (64, 16, 128)}
MAX_COLUMNS = 2**23  # of the longer side: places within a tile are numbered in 32 bits


@triton.jit
def product_kernel(
    left, right, added, out,
    rows, columns, inner, alpha, beta,
    SYMMETRIC: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of out = alpha left right + beta added: [k, rows, inner], [k, inner, columns], [k, rows, columns] twice.

    SYMMETRIC: for left's transpose in place of `right`. Only tiles on and below the diagonal are computed; those below
    are written above it as well.
    """
    column, row, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if SYMMETRIC:
        if column > row:
            return
    across, deep = tl.arange(0, TILE), tl.arange(0, DEPTH)
    # Tiles start at 64-bit places: a stack may be large.
    left += (matrix * rows + row * TILE) * inner
    left_at = across[:, None] * inner + deep[None, :]
    if SYMMETRIC:
        right = left + (column - row).to(tl.int64) * TILE * inner
        right_at = across[None, :] * inner + deep[:, None]
        step = DEPTH
    else:
        right += matrix * inner * columns + column * TILE
        right_at = deep[:, None] * columns + across[None, :]
        step = DEPTH * columns
    # Spares registers: no case for a loop without turns, and no sign of a size in 64 bits.
    tl.assume((rows > 0) & (columns > 0) & (inner > 0))
    total = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, inner, DEPTH):
        total = tl.dot(tl.load(left + left_at), tl.load(right + right_at), total, input_precision="ieee")
        left += DEPTH
        right += step

    at = across[:, None] * columns + across[None, :]
    start = (matrix * rows + row * TILE) * columns + column * TILE
    total = total * alpha
    # Keeps the loads of `added` from being begun earlier, for which registers would be spilled on sm_100.
    tl.debug_barrier()
    if added is not None:
        total += tl.load(added + start + at).to(tl.float32) * beta
    value = total.to(out.dtype.element_ty)
    tl.store(out + start + at, value)
    if SYMMETRIC:
        if column < row:
            tl.store(out + (matrix * rows + column * TILE) * columns + row * TILE + at, tl.trans(value))


def orthogonalise(given: OrthogonaliseArguments) -> Launches:
    a, b, c = (float(each) for each in given.coefficients)
    rows, columns = sorted(given.first.shape)
    if columns > MAX_COLUMNS:
        raise ValueError(f"orthogonalise: a side may have {MAX_COLUMNS} elements on a GPU, got {[*given.first.shape]}")
    tile = LAYOUTS[given.first.dtype][0]
    count, padded_rows, padded_columns = len(given.outs), *(triton.cdiv(size, tile) * tile for size in (rows, columns))
    x = torch.zeros(count, padded_rows, padded_columns, dtype=given.first.dtype, device=given.first.device)
    other = torch.empty_like(x)
    gram = torch.empty(count, padded_rows, padded_rows, dtype=x.dtype, device=x.device)
    update = torch.empty_like(gram)

    torch._foreach_copy_(_places(x, given), [*given.matrices])
    # The norm of each, and not all norms of the stack: torch divides that work among threads by the number of norms.
    norms = torch.stack(torch._foreach_norm([*x.unbind()]))
    x.div_(norms.clamp_(min=given.eps)[:, None, None])
    for _ in range(given.steps):
        yield _product(x, None, None, gram)
        yield _product(gram, None, gram, update, alpha=c, beta=b)
        yield _product(update, x, x, other, beta=a)
        x, other = other, x
    torch._foreach_copy_([*given.outs], _places(x, given))


def _places(x: Tensor, given: OrthogonaliseArguments) -> list[Tensor]:
    """Where the matrices lie in the padded stack, each in its own orientation."""
    rows, columns = given.first.shape
    return [*(x.mT if rows > columns else x)[:, :rows, :columns].unbind()]


def _product(
    left: Tensor, right: Tensor | None, added: Tensor | None, out: Tensor, alpha: float = 1.0, beta: float = 0.0
) -> Launch:
    """The launch for a stack of products; without `right`, of left with its own transpose."""
    tile, depth, threads = LAYOUTS[out.dtype]
    count, rows, columns = out.shape
    values = {"left": left, "right": right, "added": added, "out": out, "alpha": alpha, "beta": beta}
    values |= {"rows": rows, "columns": columns, "inner": left.shape[2]}
    constants = {"SYMMETRIC": right is None, "TILE": tile, "DEPTH": depth}
    return Launch(product_kernel, (columns // tile, rows // tile, count), values, constants, threads)
