"""Are the kernels right on this device? Against float64, on repeat, and in pieces. Needs torch and kfuse alone.

    python benchmarks/gpu_check.py --device cuda --json check.json
    python benchmarks/gpu_check.py --device cuda --small       under compute-sanitizer

The test suite goes much further; this runs where there is neither pytest nor hypothesis.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
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
    pull,
    reduce,
    sgd,
    sum_partials,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
Check = tuple[str, Callable[[], str | None]]
"""A name, and what is run: it returns what is wrong in words, or None."""


def _table(numels: list[int], device: torch.device) -> PackTable:
    """Tensors of these sizes one behind the other, each 64-element aligned."""
    places = [-(-numel // 64) * 64 for numel in numels]
    return PackTable.build(numels, [sum(places[:k]) for k in range(len(places))], device)


def check_pack(device: torch.device, numels: list[int], dtype: torch.dtype, accumulate: bool) -> str | None:
    """Gradients of these sizes: the buffer bit by bit, sums of squares against float64, the same bits twice."""
    table = _table(numels, device)
    offsets, end = table.offsets, -(-table.end // 64) * 64  # behind the last one is padding too
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
    return near("sumsq", sumsq, torch.stack(chunks), 5e-6)


def check_block_sumsq(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    """Sums of squares against float64; the same bits however the buffer is cut."""
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
    return near("total", total, flat.double().square().sum(), 5e-6)


def check_reduce(device: torch.device, numel: int, dtype: torch.dtype, count: int) -> str | None:
    """`count` rows: the bits of the same additions in fp32."""
    rows = torch.randn(count, numel, device=device).to(dtype)
    merges = balanced(count)
    values = list(rows.float().unbind(0))
    for dst, src in merges:
        values[dst] = values[dst] + values[src]
    out = torch.empty(numel, dtype=dtype, device=device)
    reduce(rows.clone(), merges, out)
    return None if torch.equal(out, values[0].to(dtype)) else "not the bits of the fold"


def check_adamw(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    """An update with a scale against float64; one with found_inf changes nothing."""
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
    return near("param", param, p64, 2e-6, 1e-6) or near("exp_avg", m, m64, 2e-6, 1e-6) or near("v", v, v64, 2e-6)


def check_sgd(device: torch.device, numel: int, dtype: torch.dtype) -> str | None:
    """A Nesterov update against float64."""
    param, grad, buffer = (torch.randn(numel, device=device) for _ in range(3))
    grad = grad.to(dtype)
    p64, g64, b64 = (t.double() for t in (param, grad, buffer))
    sgd(param, grad, buffer, SGDOptions(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True), first_step=False)
    g64 = g64 + 0.01 * p64
    b64 = 0.9 * b64 + g64
    p64 = p64 - 0.1 * (g64 + 0.9 * b64)
    return near("param", param, p64, 2e-6, 1e-6) or near("buffer", buffer, b64, 2e-6, 1e-6)


def check_pull(device: torch.device, numel: int, count: int) -> str | None:
    """The sum of several contributions, read by their addresses, has the bits of `reduce` and `block_sumsq`."""
    peers = [torch.randn(numel, device=device) for _ in range(count)]  # in buffers of their own, as other workers' are
    out, expected = torch.empty(2, numel, device=device)
    sumsq, squares = torch.empty(2, num_blocks(numel), device=device)
    reduce(torch.stack(peers), balanced(count), expected)
    block_sumsq(expected, squares)
    pull(peers, balanced(count), out, sumsq)
    if not torch.equal(sumsq, squares):
        return "|g|^2 has not the bits of block_sumsq"
    return None if torch.equal(out, expected) else "not the bits of reduce"


def check_lamb(device: torch.device, numels: list[int]) -> str | None:
    """An update of tensors of these sizes against float64."""
    table = _table(numels, device)
    offsets, end = table.offsets, -(-table.end // 64) * 64  # behind the last one is padding too
    p, g, m, v = (torch.randn(end, device=device) for _ in range(4))
    v.square_()
    p64, g64, m64, v64 = (t.double() for t in (p, g, m, v))
    lr, decay, eps = 1e-2, 0.1, 1e-6
    options = AdamOptions(lr=lr, beta1=0.9, beta2=0.99, eps=eps, weight_decay=decay)
    lamb(p, g, m, v, table, options, step=number(3.0, device))
    for offset, numel in zip(offsets, numels, strict=True):
        part = slice(offset, offset + numel)
        m64[part] = 0.9 * m64[part] + 0.1 * g64[part]
        v64[part] = 0.99 * v64[part] + 0.01 * g64[part].square()
        update = m64[part] / (1 - 0.9**3) / ((v64[part] / (1 - 0.99**3)).sqrt() + eps) + decay * p64[part]
        of_p, of_update = p64[part].norm(), update.norm()
        p64[part] -= lr * (of_p / of_update if of_p * of_update > 0 else 1.0) * update
    return near("param", p, p64, 2e-5, 2e-6) or near("exp_avg", m, m64, 2e-6, 1e-6) or near("v", v, v64, 2e-6, 1e-9)


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
        wrong = near(name, partials.double().sum(-1), expected[name], 2e-5)
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
        wrong = near(name, ours.detach(), exact.detach(), 0.0, allowed * max(1.0, float(exact.detach().abs().max())))
        if wrong:
            return wrong
    assert layer.per_example_sq_norm is not None
    return near("an example's norm", layer.per_example_sq_norm, torch.stack(squares), 1e-4)


def number(value: float, device: torch.device) -> Tensor:
    """A scalar on the device."""
    return torch.tensor(value, device=device)


def near(name: str, actual: Tensor, exact: Tensor, relative: float, absolute: float = 0.0) -> str | None:
    """What is wrong where an element is off by more than `absolute` and the part `relative` of it; else None."""
    worst = float(((actual.double() - exact).abs() - absolute - relative * exact.abs()).max())
    return None if worst <= 0 else f"{name} is beyond its tolerance by {worst:.1e}"


# -- all of them -----------------------------------------------------------------------------------------------------


def checks(device: torch.device, small: bool) -> Iterator[Check]:
    """All of them. small: on buffers of some blocks, since compute-sanitizer is slow."""
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
    yield "pull", lambda: check_pull(device, numel, 3)
    for name, dtype in list(DTYPES.items())[:2]:
        yield f"reduce4 {name}, measured", lambda d=dtype: check_measures(device, numel, d, 4)  # type: ignore[misc]
    yield "lamb", lambda: check_lamb(device, [n for n in ragged if n])
    for kind in ("layer", "rms"):
        for width in (48, 1024) if small else (48, 1024, 5000, 12288):
            yield f"{kind} norm, width {width}", lambda k=kind, w=width: check_norm(device, k, w, torch.float32)  # type: ignore[misc]
        yield f"{kind} norm, bf16", lambda k=kind: check_norm(device, k, 1024, torch.bfloat16)  # type: ignore[misc]


def result_of(check: Callable[[], str | None]) -> str:
    """Runs a check: "ok", or what is wrong."""
    try:
        return check() or "ok"
    except Exception as error:  # a launch that fails is a wrong kernel; the others still run
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def report(results: dict[str, str], device: torch.device, path: Path | None) -> int:
    """Prints what is wrong or absent, and writes all results to `path`, as JSON. Returns how many are wrong."""
    for name, result in results.items():
        if result.startswith("absent"):
            print(f"{name} is {result}")
        elif result != "ok":
            print(f"WRONG {name}: {result}")
    if path is not None:
        record = {"machine": machine(), "versions": versions(("torch", "triton")), "checks": results}
        path.write_text(json.dumps(record, indent=1) + "\n")
    run = [result for result in results.values() if not result.startswith("absent")]
    wrong = sum(result != "ok" for result in run)
    if run:
        print(f"{len(run) - wrong} of {len(results)} checks passed on {device.type}")
    return wrong


def device_of(name: str) -> torch.device:
    """The device of the option --device, made the current one."""
    if name != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def main() -> int:
    """Runs all checks. Exit status 1 where one found something wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--small", action="store_true", help="small buffers, for compute-sanitizer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = device_of(options.device)
    results = {name: result_of(check) for name, check in checks(device, options.small)}
    return int(report(results, device, options.json) > 0)


if __name__ == "__main__":
    sys.exit(main())
