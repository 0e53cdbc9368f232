"""The kernels as training launches them: argument types, compile-time flags, and the streams each one must move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton.language as tl

from kfuse.kernels import (
    launch,
    triton_adamw,
    triton_lamb,
    triton_norm,
    triton_pack,
    triton_partials,
    triton_reduce,
    triton_sgd,
)
from kfuse.kernels.merges import balanced
from kfuse.kernels.table import BLOCK, CHUNK

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
_GUARDS = {"grad_scale": "*fp32", "found_inf": "*fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its argument types and compile-time flags."""

    name: str
    kernel: Any
    arguments: dict[str, str]
    """Type of each runtime argument in the kernel's order; pointers and sizes are divisible by 16."""
    flags: dict[str, Any]
    threads: int
    elements: int
    """Elements of each bulk stream that one program handles, or one turn of its loop; 0 where no stream is bulk."""
    loads: tuple[str, ...] = ()
    """Element type of each bulk stream that is read."""
    stores: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    """Streams read once more while they are in the cache, which is none of the memory's business."""
    registers: int = 128
    """Most that a thread may have."""
    everywhere: bool = False
    """Stands for its kernel on every target; the others differ in flags and types, and one target shows them."""

    @property
    def floor(self) -> float:
        """Bytes an element that memory has to move, whatever the kernel: each stream once."""
        return float(sum(BYTES[dtype] for dtype in self.loads + self.stores))

    def wide_accesses(self, streams: tuple[str, ...]) -> int:
        """128-bit accesses a thread needs for these streams when none is narrower."""
        return sum(self.elements * BYTES[dtype] for dtype in streams) // (self.threads * 16)


def variants() -> Iterator[Variant]:
    """The combinations of types and flags that training uses."""
    yield from _pack_variants()
    yield from _partials_variants()
    yield from _reduce_variants()
    yield from _measured_variants()
    yield from _adamw_variants()
    yield from _sgd_variants()
    yield from _lamb_variants()
    yield from _norm_variants()


def _pack_variants() -> Iterator[Variant]:
    dtypes = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
    shapes = [*product(dtypes, (False, True), (False, True)), (("fp16", "fp32"), True, True)]
    for (grad, flat), accumulate, scaled in shapes:
        yield Variant(
            f"pack {grad}->{flat}{' accumulate' * accumulate}{' scaled' * scaled}",
            triton_pack.pack_kernel,
            {"pointers": "*i64", "chunks": "*i64", "flat": f"*{flat}", "sumsq": "*fp32", "scale": "fp32"},
            {
                "GRAD": DTYPES[grad],
                "OFFSET_ALIGNMENT": 16,
                "SCALED": scaled,
                "ACCUMULATE": accumulate,
                "CHUNK": CHUNK,
            },
            triton_pack.THREADS,
            CHUNK,
            (grad, flat) if accumulate else (grad,),
            (flat,),
            everywhere=scaled and accumulate and flat == "fp32" and grad != "fp16",
        )


def _partials_variants() -> Iterator[Variant]:
    for dtype in ("fp32", "bf16"):
        tile = triton_partials.tile_size(BYTES[dtype])
        yield Variant(
            f"block_sumsq {dtype}",
            triton_partials.block_sumsq_kernel,
            {"flat": f"*{dtype}", "out": "*fp32", "numel": "i32"},
            {"LANE": tile // triton_partials.THREADS, "TILE": tile, "BLOCK": BLOCK},
            triton_partials.THREADS,
            BLOCK,
            (dtype,),
            everywhere=dtype == "fp32",
        )
    yield Variant(
        "sum_partials",
        triton_partials.sum_partials_kernel,
        {"partials": "*fp32", "out": "*fp64", "numel": "i32"},
        {"WIDTH": triton_partials.WIDTH},
        triton_partials.THREADS,
        0,
        everywhere=True,
    )


def _reduce_variants() -> Iterator[Variant]:
    dtypes = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
    for (rows, out), (count, scaled) in product(dtypes, ((2, True), (8, False), (16, True))):
        yield _reduce(
            f"reduce {count} rows {rows}->{out}{' scaled' * scaled}",
            count,
            rows,
            out,
            scaled=scaled,
            everywhere=count == 8 and out == "fp32",
        )
    for count in (32, 64):
        yield _reduce(f"reduce {count} rows fp32->fp32", count, "fp32", "fp32")


def _measured_variants() -> Iterator[Variant]:
    norm = {"sumsq": "*fp32"}
    centred = norm | {"variance": "*fp32", "shares": "*fp32"}
    of_rows = norm | {"row_sumsq": "*fp32", "row_dot": "*fp32"}
    everything = centred | of_rows | {"noise": "*fp32", "exp_avg_sq": "*fp32"}
    for count, rows, what, measures in (
        (2, "fp32", "norm", norm),
        (8, "fp32", "norm", norm),
        (8, "bf16", "norm", norm),
        (2, "fp32", "variance", centred),
        (8, "fp32", "variance", centred),
        (8, "bf16", "variance", centred),
        (16, "fp32", "variance", centred),
        (8, "fp32", "cosines", of_rows),
        (8, "fp32", "everything", everything),
        (8, "bf16", "everything", everything),
        (16, "fp32", "everything", everything),
        (32, "fp32", "variance", centred),
    ):
        everywhere = (count, rows, what) == (8, "fp32", "everything")
        yield _reduce(f"reduce {count} rows {rows}->fp32 {what}", count, rows, "fp32", measures, everywhere=everywhere)


def _reduce(
    name: str,
    count: int,
    rows: str,
    out: str,
    measures: dict[str, str] | None = None,
    *,
    scaled: bool = False,
    everywhere: bool = False,
) -> Variant:
    measures = measures or {}
    of_rows = "row_dot" in measures
    shape = triton_reduce.constants(count, BYTES[rows], balanced(count), bool(measures), of_rows)
    again = not shape["HELD"] and (of_rows or "shares" in measures)
    return Variant(
        name,
        triton_reduce.reduce_kernel,
        {"rows": f"*{rows}", "out": f"*{out}"}
        | measures
        | {"numel": "i32", "stride": "i32", "scale": "fp32", "eps": "fp32"},
        shape | {"SCALED": scaled},
        triton_partials.THREADS,
        shape["TILE"],
        (rows,) * count + ("fp32",) * ("exp_avg_sq" in measures),
        (out,),
        cached=(rows,) * ((count if of_rows else 1) * again),
        registers=triton_reduce.registers(count, BYTES[rows], bool(measures), of_rows),
        everywhere=everywhere,
    )


def _adamw_variants() -> Iterator[Variant]:
    scalars = ["lr", "decay", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2"]
    scalars += ["log_beta1", "log_beta2", "eps"]
    for param, grad, count, master in (
        ("fp32", "fp32", 1, False),
        ("fp32", "bf16", 1, False),
        ("bf16", "bf16", 1, False),
        ("bf16", "bf16", 1, True),
        ("fp32", "fp32", 2, False),
        ("fp32", "fp32", 8, False),
        ("bf16", "bf16", 8, True),
        ("bf16", "bf16", 16, True),
        ("bf16", "fp32", 8, True),
        ("fp32", "fp32", 32, False),
    ):
        yield _update(
            "adamw",
            triton_adamw,
            (param, grad, count, master),
            {"exp_avg": "*fp32", "exp_avg_sq": "*fp32", "step": "*fp32"},
            scalars,
            {"MAXIMIZE": False},
            ("fp32", "fp32"),
            everywhere=(param, grad, count) in (("fp32", "fp32", 1), ("fp32", "fp32", 8)) or (master and count == 1),
        )


def _sgd_variants() -> Iterator[Variant]:
    scalars = ["lr", "momentum", "one_minus_dampening", "weight_decay"]
    for (param, grad, count, master), mode in (
        (("fp32", "fp32", 1, False), "plain"),
        (("fp32", "fp32", 1, False), "first step"),
        (("fp32", "fp32", 1, False), "momentum"),
        (("fp32", "fp32", 1, False), "nesterov"),
        (("bf16", "bf16", 1, False), "momentum"),
        (("bf16", "bf16", 1, True), "momentum"),
        (("fp32", "fp32", 8, False), "momentum"),
    ):
        yield _update(
            f"sgd {mode}",
            triton_sgd,
            (param, grad, count, master),
            {} if mode == "plain" else {"momentum_buffer": "*fp32"},
            scalars,
            {"NESTEROV": mode == "nesterov", "MAXIMIZE": False, "FIRST_STEP": mode == "first step"},
            ("fp32",) * (mode in ("momentum", "nesterov")),
            written=("fp32",) * (mode != "plain"),
            everywhere=(param, mode, count) == ("fp32", "momentum", 1),
        )


def _update(
    name: str,
    module: Any,
    what: tuple[str, str, int, bool],
    state: dict[str, str],
    scalars: list[str],
    flags: dict[str, Any],
    read: tuple[str, ...],
    *,
    written: tuple[str, ...] | None = None,
    everywhere: bool,
) -> Variant:
    """An optimizer's update of `what`: parameter type, gradient type, contributions, with master weights or not."""
    param, grad, count, master = what
    shape = triton_reduce.fused_constants(count, min(BYTES[grad], BYTES[param]), balanced(count))
    rows = f"{count} rows of {grad}" if count > 1 else f"{grad} grad"
    weights = {"param": f"*{param}"} | ({"master": "*fp32"} if master else {})
    return Variant(
        f"{name} {param} param{' fp32 master' * master} {rows}",
        getattr(module, f"{name.split()[0]}_kernel"),
        weights
        | {"grad": f"*{grad}"}
        | state
        | _GUARDS
        | {"numel": "i32", "stride": "i32"}
        | dict.fromkeys(scalars, "fp32"),
        flags | shape,
        module.THREADS,
        shape["BLOCK"],
        ("fp32" if master else param,) + (grad,) * count + read,
        (param,) + ("fp32",) * master + (read if written is None else written),
        everywhere=everywhere,
    )


def _lamb_variants() -> Iterator[Variant]:
    moments = {"exp_avg": "*fp32", "exp_avg_sq": "*fp32"}
    found_inf = {"found_inf": "*fp32"}
    logs = ["log_beta1", "log_beta2", "eps", "decay"]
    for grad in ("fp32", "bf16"):
        yield Variant(
            f"lamb moments {grad} grad",
            triton_lamb.lamb_moments_kernel,
            {"chunks": "*i64", "param": "*fp32", "grad": f"*{grad}"}
            | moments
            | {"partials": "*fp32", "step": "*fp32"}
            | _GUARDS
            | dict.fromkeys(["beta1", "beta2", "gain1", "gain2", *logs], "fp32"),
            triton_lamb.MOMENTS_SHAPE | {"MAXIMIZE": False, "OFFSET_ALIGNMENT": 16},
            triton_lamb.THREADS,
            triton_lamb.TILE,
            ("fp32", grad, "fp32", "fp32"),
            ("fp32", "fp32"),
            everywhere=True,
        )
    yield Variant(
        "lamb trust",
        triton_lamb.lamb_trust_kernel,
        {"first_chunks": "*i64", "partials": "*fp32", "trust": "*fp32", "num_chunks": "i32"},
        {"WIDTH": triton_lamb.WIDTH},
        triton_lamb.THREADS,
        0,
        everywhere=True,
    )
    yield Variant(
        "lamb apply",
        triton_lamb.lamb_apply_kernel,
        {"chunks": "*i64", "param": "*fp32"}
        | moments
        | {"trust": "*fp32", "step": "*fp32"}
        | found_inf
        | dict.fromkeys(["lr", *logs], "fp32"),
        {"OFFSET_ALIGNMENT": 16, "CHUNK": CHUNK},
        triton_lamb.THREADS,
        CHUNK,
        ("fp32", "fp32", "fp32"),
        ("fp32",),
        everywhere=True,
    )


def _norm_variants() -> Iterator[Variant]:
    """Weights, and sums over tokens, move once a program: no count of bytes an element is read off these."""
    block = 1024  # rows of 768
    threads = int(triton_norm.options(block)["num_warps"]) * launch.WARP_SIZE
    for dtype, centred in (("fp32", True), ("bf16", True), ("bf16", False)):
        name = f"{'layer' if centred else 'rms'} {dtype}"
        mean = {"mean": "*fp32"} if centred else {}
        bias = {"bias": "*fp32"} if centred else {}
        yield Variant(
            f"norm_forward {name}",
            triton_norm.norm_forward_kernel,
            {"x": f"*{dtype}", "weight": "*fp32", **bias, "y": f"*{dtype}", **mean, "rstd": "*fp32"}
            | {"width": "i32", "eps": "fp32"},
            {"CENTRED": centred, "BLOCK": block},
            threads,
            0,
            everywhere=dtype == "fp32",
        )
        yield Variant(
            f"norm_backward {name}",
            triton_norm.norm_backward_kernel,
            {"dy": f"*{dtype}", "x": f"*{dtype}", "weight": "*fp32", **mean, "rstd": "*fp32", "dx": f"*{dtype}"}
            | {"weight_parts": "*fp32"}
            | ({"bias_parts": "*fp32"} if centred else {})
            | {"tokens": "i32", "width": "i32"},
            {"ROWS": triton_norm.ROWS, "CENTRED": centred, "BLOCK": block},
            threads,
            0,
            everywhere=dtype == "fp32",
        )
    yield Variant(
        "norm_finish",
        triton_norm.norm_finish_kernel,
        {"parts": "*fp32", "sums": "*fp32", "squares": "*fp32", "count": "i32", "width": "i32"},
        {"PARTS": triton_norm.PARTS, "COLUMNS": triton_norm.COLUMNS},
        triton_norm.FINISH_THREADS,
        0,
        everywhere=True,
    )
