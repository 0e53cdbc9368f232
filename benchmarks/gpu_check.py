"""Are the kernels right on this device? Against float64, on repeat, and in pieces. Needs torch and kfuse alone.

    python benchmarks/gpu_check.py --device cuda --json check.json
    python benchmarks/gpu_check.py --device cuda --small       under compute-sanitizer
    python benchmarks/gpu_check.py --device cuda --large       buffers of more than 2^31 elements, where they fit

The test suite goes much further; this runs where there is neither pytest nor hypothesis.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_workers import ABSENT
from machine import machine, versions
from torch import Tensor

import kfuse as kf
from kfuse.kernels import (
    BLOCK,
    CHUNK,
    AdamOptions,
    Measures,
    PackTable,
    SGDOptions,
    adamw,
    balanced,
    block_sumsq,
    lamb,
    num_blocks,
    pack,
    reduce,
    sgd,
    sum_partials,
)
from kfuse.kernels.normalisation import norm_forward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LARGE = 2**31 + 5 * BLOCK + 37
"""Elements: an index that is kept in 32 bits anywhere reads or writes at the wrong place."""
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


def check_merged_adamw(device: torch.device, numel: int, dtype: torch.dtype, count: int) -> str | None:
    """An update from several contributions has the bits of `reduce` into fp32 and then an update."""
    options, step = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1), _number(3.0, device)
    rows = torch.randn(count, numel, device=device).to(dtype)
    state = [torch.randn(numel, device=device) for _ in range(3)]
    state[2].square_()
    p, m, v = (each.clone() for each in state)
    adamw(p, rows.clone(), m, v, options, step=step, merges=balanced(count))
    grad = torch.empty(numel, device=device)
    reduce(rows, balanced(count), grad)
    adamw(state[0], grad, state[1], state[2], options, step=step)
    if not all(torch.equal(a, b) for a, b in zip((p, m, v), state, strict=True)):
        return "not the bits of reduce and adamw"
    return None


def check_lamb(device: torch.device, numels: list[int]) -> str | None:
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 64) * 64
    table = PackTable.build(numels, offsets, device)
    p, g, m, v = (torch.randn(end, device=device) for _ in range(4))
    v.square_()
    p64, g64, m64, v64 = (t.double() for t in (p, g, m, v))
    lr, decay, eps = 1e-2, 0.1, 1e-6
    options = AdamOptions(lr=lr, beta1=0.9, beta2=0.99, eps=eps, weight_decay=decay)
    lamb(p, g, m, v, table, options, step=_number(3.0, device))
    for offset, numel in zip(offsets, numels, strict=True):
        part = slice(offset, offset + numel)
        m64[part] = 0.9 * m64[part] + 0.1 * g64[part]
        v64[part] = 0.99 * v64[part] + 0.01 * g64[part].square()
        update = m64[part] / (1 - 0.9**3) / ((v64[part] / (1 - 0.99**3)).sqrt() + eps) + decay * p64[part]
        of_p, of_update = p64[part].norm(), update.norm()
        p64[part] -= lr * (of_p / of_update if of_p * of_update > 0 else 1.0) * update
    return _near("param", p, p64, 2e-5, 2e-6) or _near("exp_avg", m, m64, 2e-6, 1e-6) or _near("v", v, v64, 2e-6, 1e-9)


def check_measures(device: torch.device, numel: int, dtype: torch.dtype, count: int) -> str | None:
    """What `reduce` measures on its way, each sum over all blocks."""
    shares = torch.rand(count, device=device) + 0.1
    shares /= shares.sum()
    rows = (shares[:, None] * (1 + torch.randn(count, numel, device=device))).to(dtype)
    exp_avg_sq, eps = torch.rand(numel, device=device), 0.1
    blocks = num_blocks(numel)
    of_blocks = {name: torch.full((blocks,), torch.nan, device=device) for name in ("sumsq", "variance", "noise")}
    of_rows = {name: torch.full((count, blocks), torch.nan, device=device) for name in ("row_sumsq", "row_dot")}
    out = torch.empty(numel, device=device)
    measures = Measures(**of_blocks, **of_rows, shares=shares, exp_avg_sq=exp_avg_sq, eps=eps)
    exact, mean = rows.double(), rows.double().sum(0)
    reduce(rows.clone(), balanced(count), out, measures=measures)
    apart = exact / shares.double()[:, None] - mean
    weighted = shares.double()[:, None] * apart.square()
    expected = {
        "sumsq": mean.square().sum(),
        "variance": weighted.sum(),
        "noise": (weighted / (exp_avg_sq.double().sqrt() + eps).square()).sum(),
        "row_sumsq": exact.square().sum(1),
        "row_dot": exact @ mean,
    }
    for name, partials in (of_blocks | of_rows).items():
        wrong = _near(name, partials.double().sum(-1), expected[name], 2e-5)
        if wrong:
            return wrong
    return None


def check_norm(device: torch.device, kind: str, width: int, dtype: torch.dtype) -> str | None:
    """kf.nn's layers against torch's own in float64; each example's squared norm against its own gradients."""
    layer = (kf.nn.LayerNorm if kind == "layer" else kf.nn.RMSNorm)(width).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = (2 * torch.randn(3, 5, width, device=device) + 0.5).to(dtype).requires_grad_()
    dy = torch.randn(3, 5, width, device=device).to(dtype)
    y = layer(x)
    y.backward(dy)
    exact_x = x.detach().double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in layer.parameters()]
    eps = layer.eps if layer.eps is not None else torch.finfo(dtype).eps
    normed = F.layer_norm if kind == "layer" else F.rms_norm
    exact_y = normed(exact_x, (width,), *weights, eps=eps)
    squares = []
    for example in range(3):
        own = torch.autograd.grad(exact_y[example], weights, dy[example].double(), retain_graph=True)
        squares.append(torch.stack([each.square().sum() for each in own]).sum())
    exact_y.backward(dy.double())
    allowed = 5e-6 if dtype == torch.float32 else 4 * ROUNDING[dtype]
    pairs = {"y": (y, exact_y), "dx": (x.grad, exact_x.grad)}
    pairs |= {f"d{name}": (p.grad, w.grad) for (name, p), w in zip(layer.named_parameters(), weights, strict=True)}
    for name, (ours, exact) in pairs.items():
        assert ours is not None and exact is not None
        wrong = _near(name, ours.detach(), exact.detach(), 0.0, allowed * max(1.0, float(exact.detach().abs().max())))
        if wrong:
            return wrong
    assert layer.per_example_sq_norm is not None
    return _near("an example's norm", layer.per_example_sq_norm, torch.stack(squares), 1e-4)


# -- more than 2^31 elements -----------------------------------------------------------------------------------------


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
    return _near("sumsq", sumsq[-1], grads[1].double().square().sum(), 5e-6)


def large_reduce(device: torch.device, numel: int) -> str | None:
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
    options, step = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1), _number(3.0, device)
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


def _number(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


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
            results[name] = _result(check)
    return results


# -- all of them -----------------------------------------------------------------------------------------------------


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
    for name, dtype in DTYPES.items():
        yield f"adamw of 3 merged {name} rows", lambda d=dtype: check_merged_adamw(device, numel, d, 3)  # type: ignore[misc]
    for name, dtype in list(DTYPES.items())[:2]:
        yield f"reduce4 {name}, measured", lambda d=dtype: check_measures(device, numel, d, 4)  # type: ignore[misc]
    yield "lamb", lambda: check_lamb(device, [n for n in ragged if n])
    for kind in ("layer", "rms"):
        for width in (48, 1024) if small else (48, 1024, 5000, 12288):
            yield f"{kind} norm, width {width}", lambda k=kind, w=width: check_norm(device, k, w, torch.float32)  # type: ignore[misc]
        yield f"{kind} norm, bf16", lambda k=kind: check_norm(device, k, 1024, torch.bfloat16)  # type: ignore[misc]


def _result(check: Callable[[], str | None]) -> str:
    try:
        return check() or "ok"
    except Exception as error:  # a launch that fails is a wrong kernel; the others still run
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true", help="small buffers, for compute-sanitizer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", action="store_true", help="buffers of more than 2^31 elements instead")
    parser.add_argument("--elements", type=int, default=LARGE, help="of the large buffers")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.large:
        results = run_large(device, options.elements)
    else:
        results = {name: _result(check) for name, check in checks(device, options.small)}
    for name, result in results.items():
        if result.startswith("absent"):
            print(f"{name} is {result}")
        elif result != "ok":
            print(f"WRONG {name}: {result}")
    if options.json is not None:
        record = {"machine": machine(), "versions": versions(("torch", "triton")), "checks": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    run = [result for result in results.values() if not result.startswith("absent")]
    if not run:
        print(f"none fits: {next(iter(results.values())).removeprefix('absent: ')}")
        return ABSENT
    wrong = sum(result != "ok" for result in run)
    print(f"{len(run) - wrong} of {len(results)} checks passed on {options.device}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
