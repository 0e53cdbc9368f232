"""What the kernel benchmark runs: each kernel on its buffers, beside plain torch and torch.compile of the same.

Torch's operations are in kernels_peers.py. Gradients have the case's dtype, and so has what `pack` and `reduce` write;
parameters, states and sums are fp32 or wider. (Totals have one element and not none: torch.compile does not write to a
0-dim float64 CPU tensor.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernels_peers as peers
import torch
from kernels_peers import BETA1, BETA2, DECAY, EPS, LR, MAX_NORM, MOMENTUM, STEP
from kernels_shapes import Layout
from torch import Tensor

from kfuse.kernels import (
    AdamOptions,
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
from kfuse.kernels.normalisation import norm_backward, norm_forward

Buffers = dict[str, Any]
Run = Callable[[Buffers], None]
SCALE = 0.25


@dataclass(frozen=True)
class Case:
    floor_bytes: int
    """What must be read and written by any implementation."""
    make: Callable[[], Buffers]
    runs: dict[str, Run]
    """The contestants; ours is `kfuse`."""
    absent: dict[str, str]
    """Peers that do not compete, and why."""
    expected: Callable[[Buffers], dict[str, Tensor]]
    """From buffers before a run: in float64, what the `ends` of the named ones hold after it."""
    arithmetic: float = 0.0
    """Multiplications and additions, where they and not memory are the limit: one set of buffers then suffices."""


def pack_case(layout: Layout, dtype: torch.dtype, device: torch.device, accumulate: bool = False) -> Case:
    """Tensors to a flat buffer, scaled, and the sum of squares of what was read."""

    def make() -> Buffers:
        grads, flat = _normal(layout, dtype, device), _normal(layout, dtype, device)
        return {
            "all": grads,
            "grads": layout.views(grads),
            "flat": flat,
            "segments": layout.views(flat),
            "table": (table := layout.table(device)),  # it keeps the addresses of few sets of buffers
            "sumsq": torch.empty(table.num_chunks, device=device),
            "total": torch.empty(1, dtype=torch.float64, device=device),
        }

    def ours(b: Buffers) -> None:
        pack(b["grads"], b["flat"], b["table"], scale=SCALE, accumulate=accumulate, sumsq=b["sumsq"])
        sum_partials(b["sumsq"], b["total"][0])

    def eager(b: Buffers) -> None:
        norms = []
        for grad, segment in zip(b["grads"], b["segments"], strict=True):
            norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
            if accumulate:
                segment.add_(grad, alpha=SCALE)
            else:
                torch.mul(grad, SCALE, out=segment)
        b["total"].copy_(torch.stack(norms).square().sum())

    def formula(grads: list[Tensor], segments: list[Tensor], total: Tensor) -> None:
        for grad, segment in zip(grads, segments, strict=True):
            segment.copy_(segment + grad * SCALE if accumulate else grad * SCALE)
        total.copy_(torch.stack([grad.float().square().sum() for grad in grads]).sum())

    compiled = torch.compile(formula, dynamic=False)

    def expected(b: Buffers) -> dict[str, Tensor]:
        old = ends(b["flat"]) if accumulate else 0.0
        return {"flat": old + ends(b["all"]) * SCALE, "total": sum_of_squares(b["all"])}

    others, absent = peers.pack(dtype, SCALE, accumulate)
    runs: dict[str, Run] = {"kfuse": ours, "eager": eager, **others}
    runs["compile"] = lambda b: compiled(b["grads"], b["segments"], b["total"])
    bytes_moved = (3 if accumulate else 2) * layout.numel * dtype.itemsize
    return Case(bytes_moved, make, runs, absent, expected)


def accumulate_case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
    """`pack` onto what is there."""
    return pack_case(layout, dtype, device, accumulate=True)


def reduce_case(count: int) -> Callable[..., Case]:
    """`count` contributions along the canonical tree."""
    merges = balanced(count)

    def case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
        def make() -> Buffers:
            rows = torch.randn(count, layout.numel, dtype=dtype, device=device)
            return {"rows": rows, "out": torch.zeros_like(rows[0])}

        def formula(rows: Tensor, out: Tensor) -> None:
            values = [row.float() for row in rows.unbind(0)]
            for dst, src in merges:
                values[dst] = values[dst] + values[src]
            out.copy_(values[0])

        compiled = torch.compile(formula, dynamic=False)
        runs: dict[str, Run] = {
            "kfuse": lambda b: reduce(b["rows"], merges, b["out"]),
            "eager": lambda b: formula(b["rows"], b["out"]),
            "compile": lambda b: compiled(b["rows"], b["out"]),
            "torch": lambda b: torch.sum(b["rows"], 0, out=b["out"]),  # in an order of its own
        }
        moved = (count + 1) * layout.numel * dtype.itemsize
        return Case(moved, make, runs, {}, lambda b: {"out": ends(b["rows"]).sum(0)})

    return case


def block_sumsq_case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
    """The sum of squares of a flat buffer."""

    def make() -> Buffers:
        flat = _normal(layout, dtype, device)
        partials = torch.empty(num_blocks(layout.numel), device=device)
        total = torch.empty(1, dtype=torch.float64, device=device)
        return {"flat": flat, "views": layout.views(flat), "partials": partials, "total": total}

    def ours(b: Buffers) -> None:
        block_sumsq(b["flat"], b["partials"])
        sum_partials(b["partials"], b["total"][0])

    def eager(b: Buffers) -> None:
        b["total"].copy_(torch.linalg.vector_norm(b["flat"], dtype=torch.float32).square())

    def formula(flat: Tensor, total: Tensor) -> None:
        total.copy_(flat.float().square().sum())

    compiled = torch.compile(formula, dynamic=False)
    runs: dict[str, Run] = {"kfuse": ours, "eager": eager, "compile": lambda b: compiled(b["flat"], b["total"])}
    absent = {}
    if dtype != torch.float32:
        absent["torch"] = "foreach_norm rounds to the gradients' dtype"
    else:
        runs["torch"] = lambda b: b["total"].copy_(torch.stack(torch._foreach_norm(b["views"])).square().sum())
    moved = layout.numel * dtype.itemsize
    return Case(moved, make, runs, absent, lambda b: {"total": sum_of_squares(b["flat"])})


def _update_buffers(names: tuple[str, ...], layout: Layout, dtype: torch.dtype, device: torch.device) -> Buffers:
    """Of an optimizer: flat ones by these names (parameter, gradient, states), their tensors, and what ours needs."""
    param, grad, *state = (_normal(layout, torch.float32, device) for _ in names)
    grad = (grad * 1e-2).to(dtype)
    state[-1].square_().mul_(1e-4)
    flat = dict(zip(names, (param, grad, *state), strict=True))
    return {
        **flat,
        **{f"{name}s": layout.views(buffer) for name, buffer in flat.items()},
        "step": torch.tensor(STEP, device=device),
        "partials": torch.empty(num_blocks(layout.numel), device=device),
        "total": torch.empty(1, dtype=torch.float64, device=device),
    }


def optimizer_case(name: str, clip: bool) -> Callable[..., Case]:
    """An update of flat buffers; with `clip`, by the global norm, which is measured first."""
    states = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}[name]
    names = ("param", "grad", *states)

    def ours(b: Buffers) -> None:
        scale = None
        if clip:
            block_sumsq(b["grad"], b["partials"])
            sum_partials(b["partials"], b["total"][0])
            scale = (MAX_NORM / (b["total"][0].sqrt() + 1e-6)).clamp(max=1.0).float()
        _update(name, [b[key] for key in names], b["step"], scale)

    def formula(param: Tensor, grad: Tensor, *state: Tensor) -> None:
        grad = grad.to(param.dtype)
        if clip:
            grad = grad * (MAX_NORM / (grad.square().sum().sqrt() + 1e-6)).clamp(max=1.0)
        _FORMULAS[name](param, grad, *state)

    def case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
        def expected(b: Buffers) -> dict[str, Tensor]:
            values = {key: ends(b[key]) for key in names}
            if clip:
                norm = float(sum_of_squares(b["grad"]).sqrt())
                values["grad"] = values["grad"] * min(1.0, MAX_NORM / (norm + 1e-6))
            _FORMULAS[name](*values.values())
            return {key: value for key, value in values.items() if key != "grad"}

        compiled = torch.compile(formula, dynamic=False)
        others, absent = peers.optimizer(name, clip, layout, dtype)
        runs: dict[str, Run] = {"kfuse": ours, "eager": lambda b: formula(*(b[key] for key in names)), **others}
        runs["compile"] = lambda b: compiled(*(b[key] for key in names))
        states_bytes = 4 * (2 * len(states) + 2) * layout.numel
        moved = states_bytes + (2 if clip else 1) * layout.numel * dtype.itemsize
        return Case(moved, lambda: _update_buffers(names, layout, dtype, device), runs, absent, expected)

    return case


def _update(name: str, buffers: list[Tensor], step: Tensor, scale: Tensor | None) -> None:
    if name == "adamw":
        adamw(*buffers, AdamOptions(LR, BETA1, BETA2, EPS, DECAY), step=step, grad_scale=scale)  # type: ignore[misc, call-arg]
    else:
        sgd(*buffers, SGDOptions(LR, MOMENTUM, weight_decay=DECAY), first_step=False, grad_scale=scale)  # type: ignore[misc, call-arg]


def _adam_denominator(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Updates the moments; returns what Adam's update divides by."""
    exp_avg.lerp_(grad, 1 - BETA1)
    exp_avg_sq.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    return (exp_avg_sq.sqrt() / (1 - BETA2**STEP) ** 0.5).add_(EPS)


def _adamw_formula(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    param.mul_(1 - LR * DECAY)
    denominator = _adam_denominator(grad, exp_avg, exp_avg_sq)
    param.addcdiv_(exp_avg, denominator, value=-LR / (1 - BETA1**STEP))


def _sgd_formula(param: Tensor, grad: Tensor, momentum_buffer: Tensor) -> None:
    momentum_buffer.mul_(MOMENTUM).add_(grad.add(param, alpha=DECAY))
    param.add_(momentum_buffer, alpha=-LR)


_FORMULAS: dict[str, Callable[..., None]] = {"adamw": _adamw_formula, "sgd": _sgd_formula}


def lamb_case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
    """LAMB: moments, each tensor's trust ratio, and the update by it, which takes a second pass."""
    names, table = ("param", "grad", "exp_avg", "exp_avg_sq"), layout.table(device)
    options = AdamOptions(LR, BETA1, BETA2, EPS, DECAY)

    def formula(params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]) -> None:
        for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
            denominator = _adam_denominator(grad.to(param.dtype), exp_avg, exp_avg_sq)
            update = (exp_avg / (1 - BETA1**STEP) / denominator).add_(param, alpha=DECAY)
            param.sub_(update * (LR * param.norm() / update.norm()))

    def expected(b: Buffers) -> dict[str, Tensor]:
        wide = [layout.views(b[name].double()) for name in names]
        formula(*wide)
        changed = {name: views[0]._base for name, views in zip(names, wide, strict=True) if name != "grad"}
        return {name: ends(flat) for name, flat in changed.items() if flat is not None}

    compiled = torch.compile(formula, dynamic=False)
    others, absent = peers.optimizer("lamb", False, layout, dtype)
    runs: dict[str, Run] = {
        "kfuse": lambda b: lamb(*(b[name] for name in names), table, options, step=b["step"]),  # type: ignore[misc]
        "eager": lambda b: formula(*(b[f"{name}s"] for name in names)),
        "compile": lambda b: compiled(*(b[f"{name}s"] for name in names)),
        **others,
    }
    moved = (36 + dtype.itemsize) * layout.numel
    return Case(moved, lambda: _update_buffers(names, layout, dtype, device), runs, absent, expected)


def norm_case(layout: Layout, dtype: torch.dtype, device: torch.device) -> Case:
    """The backward of `kf.nn.LayerNorm`, with per-example norms; the peers go without those."""
    width, examples = 1024, 8
    shape = (examples, max(1, layout.numel // (width * examples)), width)

    def make() -> Buffers:
        x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        weight, bias = torch.randn(width, device=device), torch.randn(width, device=device)
        _, mean, rstd = norm_forward(x.view(-1, width), weight, bias, eps=1e-5, centred=True)
        rest = {"dx": torch.empty_like(x), "dweight": torch.empty_like(weight), "dbias": torch.empty_like(weight)}
        return {"x": x, "dy": dy, "weight": weight, "bias": bias, "mean": mean, "rstd": rstd, **rest}

    def ours(b: Buffers) -> None:
        found = norm_backward(b["dy"], b["x"], b["weight"], b["mean"], b["rstd"], with_bias=True)
        b["dx"], b["dweight"], b["dbias"], _ = found

    def native(b: Buffers) -> None:
        mean, rstd = (b[key].view(*shape[:2], 1) for key in ("mean", "rstd"))
        weight, bias = b["weight"].to(dtype), b["bias"].to(dtype)
        grads = torch.ops.aten.native_layer_norm_backward(
            b["dy"], b["x"], [width], mean, rstd, weight, bias, [True] * 3
        )
        b["dx"], b["dweight"], b["dbias"] = grads

    def formula(b: Buffers) -> tuple[Tensor, Tensor, Tensor]:
        g = b["dy"].to(b["rstd"].dtype)
        normal = (b["x"].to(g.dtype) - b["mean"].view(*shape[:2], 1)) * b["rstd"].view(*shape[:2], 1)
        wg = g * b["weight"]
        dx = wg - normal * (wg * normal).mean(2, keepdim=True) - wg.mean(2, keepdim=True)
        return dx * b["rstd"].view(*shape[:2], 1), (g * normal).sum((0, 1)), g.sum((0, 1))

    def eager(b: Buffers) -> None:
        dx, b["dweight"], b["dbias"] = formula(b)
        b["dx"] = dx.to(dtype)

    compiled = torch.compile(lambda b: [t.to(dtype) if t.dim() == 3 else t for t in formula(b)], dynamic=False)

    def by_compiler(b: Buffers) -> None:
        names = ("x", "dy", "weight", "mean", "rstd")
        b["dx"], b["dweight"], b["dbias"] = compiled({name: b[name] for name in names})

    def expected(b: Buffers) -> dict[str, Tensor]:
        wide = {key: value.double() for key, value in b.items()}
        dx, dweight, dbias = formula(wide)
        return {"dx": ends(dx), "dweight": dweight, "dbias": dbias}

    runs: dict[str, Run] = {"kfuse": ours, "eager": eager, "torch": native, "compile": by_compiler}
    absent = {}
    if dtype != torch.float32 and device.type == "cpu":
        del runs["torch"]
        absent["torch"] = "on a CPU it wants mean and deviation in the dtype of x"
    moved = 3 * shape[0] * shape[1] * width * dtype.itemsize
    return Case(moved, make, runs, absent, expected)


CASES: dict[str, Callable[..., Case]] = {
    "pack": pack_case,
    "accumulate": accumulate_case,
    **{f"reduce{count}": reduce_case(count) for count in (2, 3, 4, 8, 33)},
    "block_sumsq": block_sumsq_case,
    "adamw": optimizer_case("adamw", clip=False),
    "clip+adamw": optimizer_case("adamw", clip=True),
    "sgd": optimizer_case("sgd", clip=False),
    "lamb": lamb_case,
    "layer_norm": norm_case,
}


def _normal(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer of random values, zero between the tensors as it is in a bucket."""
    flat = torch.zeros(layout.numel, dtype=dtype, device=device)
    for view in layout.views(flat):
        view.normal_()
    return flat


def ends(tensor: Tensor, count: int = 2**19) -> Tensor:
    """The first and last `count` elements (of the last dimension), in float64: what is compared."""
    if tensor.dim() == 0 or tensor.shape[-1] <= 2 * count:
        return tensor.double()
    return torch.cat([tensor[..., :count], tensor[..., -count:]], dim=-1).double()


def sum_of_squares(tensor: Tensor) -> Tensor:
    return torch.stack([part.double().square().sum() for part in torch.split(tensor, 2**24)]).sum().reshape(1)
