"""Messages of eight bits, as `pack` and `reduce` write and read them, are those of a plain rounding in NumPy.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from devices import DEVICES, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kfuse.kernels import BLOCK, PackTable, balanced, block_sumsq, num_blocks, pack, reduce
from kfuse.kernels.wire import GROUP, in_wire, wire_numel

Values = NDArray[np.float32]
EXAMPLES = 5 if INTERPRETED else 40
pytestmark = pytest.mark.parametrize("device", DEVICES)


def message(flat: Values) -> tuple[bytes, Values]:
    """The message of these values, byte by byte, and what its reader has."""
    sent, read = b"", []
    for start in range(0, len(flat), BLOCK):
        block = np.zeros(BLOCK, np.float32)
        part = flat[start : start + BLOCK]
        block[: len(part)] = part
        groups = block.reshape(-1, GROUP)
        largest = np.abs(groups).max(axis=1, keepdims=True)
        largest[largest < 2.0**-100] = 0.0
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        values, scales = np.rint(groups * inverse).astype(np.int8), largest * np.float32(1 / 127)
        sent += values.tobytes() + scales.tobytes()
        read.append((values.astype(np.float32) * scales).reshape(-1)[: len(part)])
    return sent, np.concatenate(read)


def as_bytes(wire: Tensor) -> bytes:
    return wire.cpu().numpy().tobytes()


def draw(numel: int, seed: int) -> Tensor:
    """Values of magnitudes far apart, among them zeros and a group of tiny ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 6, (numel,), generator=generator)
    values[::7] = 0.0
    values[:GROUP] *= 1e-37
    return values


@settings(max_examples=EXAMPLES)
@given(numels=st.lists(st.sampled_from([1, 15, 16, 63, 64, 65, 1000, BLOCK, BLOCK + 1, 9000]), min_size=1, max_size=4))
def test_pack_writes_the_message_of_what_it_stores(device: str, numels: list[int]) -> None:
    """With what rounding adds to the sum of squares. What is read is off by m / 254 of its group at most."""
    places = [-(-numel // GROUP) * GROUP for numel in numels]
    table = PackTable.build(numels, [sum(places[:k]) for k in range(len(places))], torch.device(device))
    grads = [draw(numel, seed).to(device) for seed, numel in enumerate(numels)]
    flat, plain = (torch.zeros(sum(places), device=device) for _ in range(2))
    wire = torch.zeros(wire_numel(len(flat)), dtype=torch.int8, device=device)
    sumsq, added = (torch.full((table.num_chunks,), math.nan, device=device) for _ in range(2))
    for accumulate in (False, True):
        pack(grads, plain, table, scale=0.3, accumulate=accumulate, sumsq=None)
        pack(grads, flat, table, scale=0.3, accumulate=accumulate, sumsq=sumsq, wire=wire, added=added)
        assert torch.equal(flat, plain)
        values = flat.cpu().numpy()
        sent, read = message(values)
        assert as_bytes(wire) == sent
        changes = read.astype(np.float64) - values
        more = float((read.astype(np.float64) ** 2 - values.astype(np.float64) ** 2).sum())
        assert float(added.double().sum()) == pytest.approx(
            more, abs=1e-6 * float(np.abs(changes) @ np.abs(values)) + 1e-30
        )
        largest = np.abs(values.reshape(-1, GROUP)).max(axis=1, keepdims=True).astype(np.float64)
        assert (np.abs(changes.reshape(-1, GROUP)) <= largest / 254 * (1 + 1e-4) + 2.0**-100).all()


@settings(max_examples=EXAMPLES)
@given(count=st.integers(1, 5), groups=st.sampled_from([1, 63, 64, 65, 150]))
def test_reduce_adds_what_messages_hold_and_sends_the_sum(device: str, count: int, groups: int) -> None:
    numel = groups * GROUP
    read = [message(draw(numel, seed).numpy()) for seed in range(count)]
    rows = torch.stack([torch.frombuffer(bytearray(sent), dtype=torch.int8) for sent, _ in read]).to(device)
    folded = [values for _, values in read]
    for destination, source in balanced(count):
        folded[destination] = folded[destination] + folded[source]
    sumsq, squares = (torch.full((num_blocks(numel),), math.nan, device=device) for _ in range(2))
    wire = rows[0]  # as where a worker's own message is one of the rows
    for given_rows in (rows, list(rows)):
        reduce(given_rows, balanced(count), out := torch.full((numel,), math.nan, device=device))
        assert np.array_equal(out.cpu().numpy(), folded[0])
    reduce(rows.clone(), balanced(count), out, sumsq=sumsq, wire=wire)
    block_sumsq(out, squares)
    assert np.array_equal(out.cpu().numpy(), folded[0]) and torch.equal(sumsq, squares)
    assert as_bytes(wire) == message(folded[0])[0]


def test_what_is_not_finite_stays_so(device: str) -> None:
    """And leaves nothing behind where no parameter is, so that the next step is as if it had not been."""
    table = PackTable.build([GROUP - 5, GROUP], [0, GROUP], torch.device(device))
    nvidia = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
    flat, sumsq, added = torch.zeros(2 * GROUP, device=device), *(torch.zeros(2, device=device) for _ in range(2))
    wire, total = (torch.zeros(wire_numel(len(flat)), dtype=torch.int8, device=device) for _ in range(2))
    for value in (math.inf, -math.inf, math.nan, nvidia, 1.0):
        grads = [torch.ones(numel, device=device) for numel in table.numels]
        grads[0][3] = value
        pack(grads, flat, table, scale=1.0, accumulate=False, sumsq=sumsq, wire=wire, added=added)
        reduce(torch.stack([wire, wire]), ((0, 1),), flat, wire=total)
        assert flat.isfinite().all() == added.isfinite().all() == (value == 1.0)
        reduce([total], (), flat)
        expected = torch.full_like(flat, 2.0) if value == 1.0 else torch.tensor([0.0] * 3 + [math.inf] + [0.0] * 60)
        assert torch.equal(flat[: GROUP - 5], expected[: GROUP - 5].to(device)), value
        assert (flat[GROUP - 5 : GROUP] == 0).all() and torch.allclose(flat[GROUP:], torch.tensor(2.0, device=device))


def test_shards_are_contiguous_and_what_does_not_fit_is_refused(device: str) -> None:
    ends = [0, BLOCK, 3 * BLOCK, 3 * BLOCK + GROUP, 3 * BLOCK + GROUP]
    parts = [in_wire(slice(start, stop)) for start, stop in pairwise(ends)]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[-1].start == parts[-1].stop == wire_numel(ends[-1])
    flat = torch.zeros(100, device=device)
    with pytest.raises(ValueError, match="or messages of an fp32 one"):
        reduce([flat], (), flat.clone(), wire=torch.zeros(wire_numel(100), dtype=torch.int8, device=device))
