"""Are the kernels right on this device? Against float64, on repeat, and in pieces. Needs torch and kfuse alone.

The test suite goes much further; this runs where there is neither pytest nor hypothesis, under compute-sanitizer too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from machine import machine, versions
from torch import Tensor

from kfuse.kernels import (
    BLOCK,
    CHUNK,
    AdamOptions,
    PackTable,
    SGDOptions,
    adamw,
    balanced,
    block_sumsq,
    num_blocks,
    pack,
    reduce,
    sgd,
    sum_partials,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
Check = tuple[str, Callable[[], str | None]]


def check_pack(device: torch.device, numels: list[int], dtype: torch.dtype, accumulate: bool) -> str | None:
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 64) * 64
    table = PackTable.build(numels, offsets, device)
    grads = [torch.randn(numel, device=device).to(dtype) for numel in numels]
    before = torch.randn(end, device=device)
    results = []
    for _ in range(2):
        flat = before.clone()
        sumsq = torch.full((table.num_chunks,), torch.nan, device=device)
        pack([g.clone() for g in grads], flat, table, scale=0.3, accumulate=accumulate, sumsq=sumsq)
        results.append((flat, sumsq))
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        return "two runs have different bits"
    flat, sumsq = results[0]
    expected = before.clone()
    for grad, offset, numel in zip(grads, offsets, numels, strict=True):
        scaled = (grad.double() * torch.tensor(0.3).double().item()).float()  # rounded before it is added
        part = slice(offset, offset + numel)
        expected[part] = before[part] + scaled if accumulate else scaled
    if not torch.equal(flat, expected):
        return f"flat is off by {float((flat - expected).abs().max()):.1e}"
    chunks = [chunk.double().square().sum() for grad in grads for chunk in torch.split(grad, CHUNK) if chunk.numel()]
    return _near("sumsq", sumsq, torch.stack(chunks), 5e-6)


def check_block_sumsq(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    flat = torch.randn(numel, device=device).to(dtype)
    whole = torch.empty(num_blocks(numel), device=device)
    block_sumsq(flat, whole)
    pieces = torch.empty_like(whole)
    middle = numel // BLOCK // 2
    for part, out in ((flat[: middle * BLOCK], pieces[:middle]), (flat[middle * BLOCK :], pieces[middle:])):
        block_sumsq(part, out)
    if not torch.equal(whole, pieces):
        return "the bits depend on how the buffer is cut"
    total = torch.empty((), dtype=torch.float64, device=device)
    sum_partials(whole, total)
    return _near("total", total, flat.double().square().sum(), 5e-6)


def check_reduce(device: torch.device, numel: int, dtype: torch.dtype, count: int) -> str | None:
    rows = torch.randn(count, numel, device=device).to(dtype)
    merges = balanced(count)
    values = list(rows.float().unbind(0))
    for dst, src in merges:
        values[dst] = values[dst] + values[src]
    out = torch.empty(numel, dtype=dtype, device=device)
    reduce(rows.clone(), merges, out)
    return None if torch.equal(out, values[0].to(dtype)) else "not the bits of the fold"


def check_adamw(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    param, grad, m, v = (torch.randn(numel, device=device) for _ in range(4))
    grad, v = grad.to(dtype), v.square()
    p64, g64, m64, v64 = (t.double() for t in (param, grad, m, v))
    scale = torch.tensor(0.4, device=device)
    g64 = g64 * scale.double()
    options = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
    step, fine = torch.tensor(3.0, device=device), torch.zeros((), device=device)
    adamw(param, grad, m, v, options, step=step, grad_scale=scale, found_inf=fine)
    m64 = 0.9 * m64 + 0.1 * g64
    v64 = 0.99 * v64 + 0.01 * g64.square()
    p64 = p64 * (1 - 1e-3) - 1e-2 / (1 - 0.9**3) * m64 / ((v64 / (1 - 0.99**3)).sqrt() + 1e-6)
    kept = [t.clone() for t in (param, m, v)]
    bad = torch.ones((), device=device)
    adamw(param, grad, m, v, options, step=step, grad_scale=scale, found_inf=bad)
    if not all(torch.equal(a, b) for a, b in zip(kept, (param, m, v), strict=True)):
        return "found_inf did not skip"
    return _near("param", param, p64, 2e-6, 1e-6) or _near("exp_avg", m, m64, 2e-6, 1e-6) or _near("v", v, v64, 2e-6)


def check_sgd(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    param, grad, buffer = (torch.randn(numel, device=device) for _ in range(3))
    grad = grad.to(dtype)
    p64, g64, b64 = (t.double() for t in (param, grad, buffer))
    sgd(param, grad, buffer, SGDOptions(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True), first_step=False)
    g64 = g64 + 0.01 * p64
    b64 = 0.9 * b64 + g64
    p64 = p64 - 0.1 * (g64 + 0.9 * b64)
    return _near("param", param, p64, 2e-6, 1e-6) or _near("buffer", buffer, b64, 2e-6, 1e-6)


def _near(name: str, actual: Tensor, exact: Tensor, relative: float, absolute: float = 0.0) -> str | None:
    worst = float(((actual.double() - exact).abs() - absolute - relative * exact.abs()).max())
    return None if worst <= 0 else f"{name} is beyond its tolerance by {worst:.1e}"


def checks(device: torch.device, small: bool) -> Iterator[Check]:
    numel = 3 * BLOCK + 37 if small else 2**22 + 37
    ragged = [1, 0, CHUNK, 37, 2 * CHUNK + 5, 16, 7 if small else 3_000_001]
    for name, dtype in DTYPES.items():
        for accumulate in (False, True):
            label = f"pack {name}{' accumulate' * accumulate}"
            yield label, lambda dtype=dtype, accumulate=accumulate: check_pack(device, ragged, dtype, accumulate)  # type: ignore[misc]
        yield f"block_sumsq {name}", lambda dtype=dtype: check_block_sumsq(device, numel, dtype)  # type: ignore[misc]
        for count in (2, 3, 4, 7, 8):
            yield f"reduce{count} {name}", lambda d=dtype, count=count: check_reduce(device, numel, d, count)  # type: ignore[misc]
        yield f"adamw {name} gradients", lambda dtype=dtype: check_adamw(device, numel, dtype)  # type: ignore[misc]
        yield f"sgd {name} gradients", lambda dtype=dtype: check_sgd(device, numel, dtype)  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true", help="small buffers, for compute-sanitizer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    for name, check in checks(torch.device(options.device), options.small):
        try:
            results[name] = check() or "ok"
        except Exception as error:  # a launch that fails is a wrong kernel; the others still run
            results[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if results[name] != "ok":
            print(f"WRONG {name}: {results[name]}")
    wrong = sum(result != "ok" for result in results.values())
    print(f"{len(results) - wrong} of {len(results)} checks passed on {options.device}")
    if options.json is not None:
        record = {"machine": machine(), "versions": versions(("torch", "triton")), "checks": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
