# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
"""Triton `pull`: contributions that lie in other GPUs' memory are read over the links between them, added and measured.

They are read by their addresses, which a table holds beside the order of additions. So it is one binary for every
number of contributions and every order.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kfuse.kernels.launch import Launch, Launches
from kfuse.kernels.reduction import Merges, PullArguments
from kfuse.kernels.table import BLOCK, num_blocks, upload
from kfuse.kernels.triton_reduce import AHEAD, DEPTH, THREADS, adding_program, lane_sums, placed, stack_depth, tile_size

TILE = tile_size(4)


@triton.jit
def sum_of_addresses(table, count, index, mask, AHEAD: tl.constexpr, DEPTH: tl.constexpr):
    """The sum of the contributions' elements at `index`, pulled and added as the lines of `table` say."""
    stack = (tl.zeros((index.shape[0],), tl.float32),) * DEPTH
    for at in range(0, count, AHEAD):
        values = ()  # unpacking is not in Triton's language
        for k in tl.static_range(AHEAD):
            address = tl.load(table + (at + k) * 4)
            # The compiler cannot see through the table that addresses are aligned; `PullArguments` has made sure.
            row = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            values = values + (tl.load(row + index, mask=mask & (address != 0), other=0.0),)  # noqa: RUF005
        for k in tl.static_range(AHEAD):
            low = tl.load(table + (at + k) * 4 + 1).to(tl.int32)
            high = tl.load(table + (at + k) * 4 + 2).to(tl.int32)
            stack = placed(stack, values[k], low, high, DEPTH)
    return stack[0]


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sumsq"])
def pull_kernel(
    table, out, sumsq,
    count, numel,
    AHEAD: tl.constexpr, DEPTH: tl.constexpr, LANE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the sum, a tile at a time; its squares are added in the order of `block_sumsq`."""
    tl.assume(count > 0)  # no second copy of the loop that writes zeros
    block = tl.program_id(0)
    squares = tl.zeros((TILE // LANE,), tl.float32)
    for at in range(0, BLOCK, TILE):
        index = block.to(tl.int64) * BLOCK + at + tl.arange(0, TILE)
        mask = index < numel
        total = sum_of_addresses(table, count, index, mask, AHEAD, DEPTH)
        if sumsq is not None:
            squares += lane_sums(total * total, LANE)
        tl.store(out + index, total, mask=mask)
    if sumsq is not None:
        tl.store(sumsq + block, tl.sum(squares, axis=0))


def pull(given: PullArguments) -> Launches:
    """As `kfuse.kernels.pull`, a program a block."""
    rows, out = given.rows, given.out
    device = out.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    addresses = tuple(row.data_ptr() for row in rows)
    table, depth = _uploaded_table(addresses, given.merges, device, stream)
    values = vars(given) | {"table": table, "count": len(table), "numel": out.numel()}
    constants = {
        "AHEAD": AHEAD,
        "DEPTH": max(DEPTH, triton.next_power_of_2(depth)),
        "LANE": TILE // THREADS,
        "TILE": TILE,
        "BLOCK": BLOCK,
    }
    # Other buckets have other shards: one may end between multiples of 16 elements.
    later = tuple({"numel": length} for length in (TILE, TILE - 1))
    yield Launch(pull_kernel, (num_blocks(out.numel()),), values, constants, THREADS, later)


@lru_cache(maxsize=1024)
def _uploaded_table(
    addresses: tuple[int, ...], merges: Merges, device: torch.device, stream: int
) -> tuple[Tensor, int]:
    """`adding_program` on the device with addresses in place of rows (0: none), and the depth of its stack.

    A stream uses what was copied there on the same stream.
    """
    program = adding_program(len(addresses), merges)
    lines = [(addresses[row] if row >= 0 else 0, low, high, 0) for row, low, high, _ in program]
    return upload(torch.tensor(lines, dtype=torch.int64), device), stack_depth(program)
