"""Are the kernels right on buffers of more than 2^31 elements? Those that fit, in bf16. Needs torch and kfuse alone.

    python benchmarks/gpu_large.py --device cuda --json large.json
    python benchmarks/gpu_large.py --device cpu --elements 70037

An index that is kept in 32 bits anywhere reads or writes at the wrong place.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_check import device_of, near, number, report, result_of
from gpu_workers import ABSENT
from torch import Tensor

from kfuse.kernels import BLOCK, AdamOptions, PackTable, adamw, block_sumsq, num_blocks, pack, reduce
from kfuse.kernels.normalisation import norm_forward

LARGE = 2**31 + 5 * BLOCK + 37
"""Elements."""


def large_checks(device: torch.device, numel: int) -> Iterator[tuple[str, int, Callable[[], str | None]]]:
    """(name, bytes needed, check). bf16, so that they fit one GPU; windows are compared with small buffers of theirs.

    That suffices: an element's bits depend neither on where it lies nor on the buffer's length.
    """
    size = 2 * numel
    yield "block_sumsq", size + numel // 512, lambda: large_block_sumsq(device, numel)
    yield "pack", 2 * size, lambda: large_pack(device, numel)
    yield "reduce", 3 * size, lambda: large_reduce(device, numel)
    yield "adamw", 4 * size, lambda: large_adamw(device, numel)
    yield "norm_forward", 2 * size, lambda: large_norm(device, numel)


def windows(numel: int) -> list[slice]:
    """The buffer's start, what lies around element 2^31 (the middle of a smaller buffer), and its end."""
    middle = (2**31 if numel > 2**31 else numel // 2) // BLOCK * BLOCK
    return [slice(0, 2 * BLOCK), slice(middle - 2 * BLOCK, middle + 2 * BLOCK), slice(middle + 2 * BLOCK, numel)]


def large_block_sumsq(device: torch.device, numel: int) -> str | None:
    """Sums of squares of the windows' blocks."""
    flat = _noise(numel, device)
    partials = torch.full((num_blocks(numel),), torch.nan, device=device)
    block_sumsq(flat, partials)
    for part in windows(numel):
        own = torch.empty(num_blocks(part.stop - part.start), device=device)
        block_sumsq(flat[part].clone(), own)
        if not torch.equal(own, partials[part.start // BLOCK : part.start // BLOCK + len(own)]):
            return f"other bits at element {part.start}"
    return None


def large_pack(device: torch.device, numel: int) -> str | None:
    """The windows, and a small tensor that lies behind the large one."""
    numels = [numel, 100]
    table = PackTable.build(numels, [0, -(-numel // 64) * 64], device)
    grads = [_noise(each, device) for each in numels]
    flat = torch.zeros(table.end, dtype=torch.bfloat16, device=device)
    sumsq = torch.full((table.num_chunks,), torch.nan, device=device)
    pack(grads, flat, table, scale=1.0, accumulate=False, sumsq=sumsq)
    for part in windows(numel):
        if not torch.equal(flat[part], grads[0][part]):
            return f"wrong at element {part.start}"
    if not torch.equal(flat[table.offsets[1] : table.offsets[1] + 100], grads[1]):
        return "the tensor behind is wrong"
    return near("sumsq", sumsq[-1], grads[1].double().square().sum(), 5e-6)


def large_reduce(device: torch.device, numel: int) -> str | None:
    """Two rows."""
    rows = torch.empty(2, numel, dtype=torch.bfloat16, device=device)
    for row in rows:
        row.normal_()
    out = torch.empty(numel, dtype=torch.bfloat16, device=device)
    expected = [(rows[0, part].float() + rows[1, part].float()).to(torch.bfloat16) for part in windows(numel)]
    reduce(rows, ((0, 1),), out)
    for part, exact in zip(windows(numel), expected, strict=True):
        if not torch.equal(out[part], exact):
            return f"wrong at element {part.start}"
    return None


def large_adamw(device: torch.device, numel: int) -> str | None:
    """One update."""
    options, step = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1), number(3.0, device)
    state = [_noise(numel, device) for _ in range(4)]
    state[3].abs_()
    before = [[each[part].clone() for each in state] for part in windows(numel)]
    p, g, m, v = state
    adamw(p, g, m, v, options, step=step)
    for part, (own_p, own_g, own_m, own_v) in zip(windows(numel), before, strict=True):
        adamw(own_p, own_g, own_m, own_v, options, step=step)
        if not all(torch.equal(a[part], b) for a, b in zip((p, m, v), (own_p, own_m, own_v), strict=True)):
            return f"other bits at element {part.start}"
    return None


def large_norm(device: torch.device, numel: int) -> str | None:
    """Rows of 1024 elements."""
    width = 1024
    x = _noise(numel // width * width, device).view(-1, width)
    weight, bias = torch.randn(width, device=device), torch.randn(width, device=device)
    y, mean, _ = norm_forward(x, weight, bias, eps=1e-5, centred=True)
    for part in windows(numel):
        rows = slice(part.start // width, min(part.stop // width, len(x)))
        own, own_mean, _ = norm_forward(x[rows].clone(), weight, bias, eps=1e-5, centred=True)
        assert mean is not None and own_mean is not None
        if not (torch.equal(own, y[rows]) and torch.equal(own_mean, mean[rows])):
            return f"other bits at element {part.start}"
    return None


def _noise(numel: int, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=torch.bfloat16, device=device).normal_()


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def run_large(device: torch.device, numel: int) -> dict[str, str]:
    """Each check's result: ok, absent with the reason, or what is wrong."""
    results: dict[str, str] = {}
    for name, needed, check in large_checks(device, numel):
        free = _free_bytes(device)
        if needed > 0.9 * free:
            results[name] = f"absent: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
        else:
            results[name] = result_of(check)
    return results


def main() -> int:
    """Runs all checks. Exit status 1 where one found something wrong, `ABSENT` where no buffer fits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--elements", type=int, default=LARGE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = device_of(options.device)
    results = run_large(device, options.elements)
    wrong = report(results, device, options.json)
    if all(result.startswith("absent") for result in results.values()):
        print(f"none fits: {next(iter(results.values())).removeprefix('absent: ')}")
        return ABSENT
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
