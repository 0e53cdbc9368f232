"""Compile every kernel ahead of time, without a GPU, and report what the compilers made of it.

    python -m kfuse.kernels.aot [--json FILE] [--targets sm_90 gfx942]

Registers, spills and shared memory come from the compiled binary. Global memory accesses are counted by their
width in the final assembly: SASS, by the disassembler in Triton's wheel, or amdgcn.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kfuse.kernels import launch, triton_adamw, triton_pack, triton_partials, triton_reduce, triton_sgd
from kfuse.kernels.table import BLOCK, CHUNK

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_BYTES = {"fp32": 4, "bf16": 2}
_GUARDS = {"grad_scale": "*fp32", "found_inf": "*fp32"}
_DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16}


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
    """Elements of each bulk stream that one program handles; 0 where no stream is bulk."""
    loads: tuple[str, ...] = ()
    """Element type of each bulk stream that is read."""
    stores: tuple[str, ...] = ()

    def wide_accesses(self, streams: tuple[str, ...]) -> int:
        """128-bit accesses a thread needs for these streams when none is narrower."""
        return sum(self.elements * _BYTES[dtype] for dtype in streams) // (self.threads * 16)


@dataclass(frozen=True)
class Report:
    """What one variant became on one target. Spilled bytes are per thread, shared ones per program."""

    name: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: dict[int, int]
    """Global load instructions by width in bits."""
    stores: dict[int, int]
    fused_multiply_adds: int
    """fp32 instructions that round once where the source rounds twice."""


def variants() -> Iterator[Variant]:
    """Every combination of types and flags that training uses."""
    yield from _pack_variants()
    yield from _partials_variants()
    yield from _reduce_variants()
    yield from _adamw_variants()
    yield from _sgd_variants()


def _pack_variants() -> Iterator[Variant]:
    dtypes = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")]
    for (grad, flat), accumulate, scaled in product(dtypes, (False, True), (False, True)):
        yield Variant(
            f"pack {grad}->{flat}{' accumulate' * accumulate}{' scaled' * scaled}",
            triton_pack.pack_kernel,
            {"pointers": "*i64", "chunks": "*i64", "flat": f"*{flat}", "sumsq": "*fp32", "scale": "fp32"},
            {
                "GRAD": _DTYPES[grad],
                "OFFSET_ALIGNMENT": 16,
                "SCALED": scaled,
                "ACCUMULATE": accumulate,
                "CHUNK": CHUNK,
            },
            triton_pack.THREADS,
            CHUNK,
            (grad, flat) if accumulate else (grad,),
            (flat,),
        )


def _partials_variants() -> Iterator[Variant]:
    for dtype in ("fp32", "bf16"):
        yield Variant(
            f"block_sumsq {dtype}",
            triton_partials.block_sumsq_kernel,
            {"flat": f"*{dtype}", "out": "*fp32", "numel": "i32"},
            {"BLOCK": BLOCK},
            triton_partials.THREADS,
            BLOCK,
            (dtype,),
        )
    yield Variant(
        "sum_partials",
        triton_partials.sum_partials_kernel,
        {"partials": "*fp32", "out": "*fp64", "numel": "i32"},
        {"WIDTH": triton_partials.WIDTH},
        triton_partials.THREADS,
        0,
    )


def _reduce_variants() -> Iterator[Variant]:
    dtypes = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
    for (rows, out), (count, scaled) in product(dtypes, ((2, False), (2, True), (8, False), (16, True))):
        yield Variant(
            f"reduce {count} rows {rows}->{out}{' scaled' * scaled}",
            triton_reduce.reduce_kernel,
            {"rows": f"*{rows}", "out": f"*{out}", "numel": "i32", "stride": "i32", "scale": "fp32"},
            {
                "PROGRAM": triton_reduce.postfix(count, _balanced(count)),
                "SCALED": scaled,
                "BLOCK": triton_reduce.block_size(count, _BYTES[rows]),
            },
            triton_reduce.THREADS,
            triton_reduce.block_size(count, _BYTES[rows]),
            (rows,) * count,
            (out,),
        )


def _balanced(count: int) -> tuple[tuple[int, int], ...]:
    """Merges along the binary tree over `count` rows."""
    steps = [1 << level for level in range(count.bit_length()) if 1 << level < count]
    return tuple((dst, dst + step) for step in steps for dst in range(0, count - step, 2 * step))


def _adamw_variants() -> Iterator[Variant]:
    moments = {"exp_avg": "*fp32", "exp_avg_sq": "*fp32", "step": "*fp32"}
    scalars = ["lr", "decay", "beta1", "beta2", "one_minus_beta1", "one_minus_beta2"]
    scalars += ["log_beta1", "log_beta2", "eps"]
    for param, grad, guards in (
        ("fp32", "fp32", {}),
        ("fp32", "fp32", _GUARDS),
        ("fp32", "bf16", _GUARDS),
        ("bf16", "bf16", _GUARDS),
    ):
        yield Variant(
            f"adamw {param} param {grad} grad{' guarded' * bool(guards)}",
            triton_adamw.adamw_kernel,
            {"param": f"*{param}", "grad": f"*{grad}"}
            | moments
            | guards
            | {"numel": "i32"}
            | dict.fromkeys(scalars, "fp32"),
            {"MAXIMIZE": False, "BLOCK": triton_adamw.BLOCK},
            triton_adamw.THREADS,
            triton_adamw.BLOCK,
            (param, grad, "fp32", "fp32"),
            (param, "fp32", "fp32"),
        )


def _sgd_variants() -> Iterator[Variant]:
    scalars = ["lr", "momentum", "one_minus_dampening", "weight_decay"]
    for dtype, mode in product(("fp32", "bf16"), ("plain", "first step", "momentum", "nesterov")):
        buffer = {} if mode == "plain" else {"momentum_buffer": "*fp32"}
        yield Variant(
            f"sgd {dtype} {mode}",
            triton_sgd.sgd_kernel,
            {"param": f"*{dtype}", "grad": f"*{dtype}"}
            | buffer
            | _GUARDS
            | {"numel": "i32"}
            | dict.fromkeys(scalars, "fp32"),
            {
                "NESTEROV": mode == "nesterov",
                "MAXIMIZE": False,
                "FIRST_STEP": mode == "first step",
                "BLOCK": triton_sgd.BLOCK,
            },
            triton_sgd.THREADS,
            triton_sgd.BLOCK,
            (dtype, dtype) + ("fp32",) * (mode in ("momentum", "nesterov")),
            (dtype,) + ("fp32",) * len(buffer),
        )


def compile_variant(variant: Variant, target: GPUTarget) -> CompiledKernel:
    """Compile for `target` as a launch with aligned buffers would."""
    names = variant.kernel.arg_names
    signature = {name: variant.arguments.get(name, "constexpr") for name in names}
    # As at a launch, an optional argument that is not given is the constant None.
    constants = {name: variant.flags.get(name) for name in names if name not in variant.arguments}
    aligned = [name for name, kind in variant.arguments.items() if kind.startswith(("*", "i"))]
    source = ASTSource(
        variant.kernel,
        signature,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = launch.options(variant.threads, target.warp_size)
    return triton.compile(source, target=target, options=options)


def inspect(variant: Variant, target: str) -> Report:
    """Compile a variant and read the report off its binary."""
    compiled = compile_variant(variant, TARGETS[target])
    read = _read_amdgcn if "amdgcn" in compiled.asm else _read_sass
    resources, loads, stores, fused = read(compiled)
    return Report(
        name=variant.name,
        target=target,
        registers=resources["registers"],
        spill_bytes=resources["spills"],
        shared_bytes=int(compiled.metadata.shared),
        loads=dict(sorted(loads.items())),
        stores=dict(sorted(stores.items())),
        fused_multiply_adds=fused,
    )


_Reading = tuple[dict[str, int], Counter[int], Counter[int], int]


def _read_sass(compiled: CompiledKernel) -> _Reading:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    resources = {"registers": int(usage["REG"]), "spills": int(usage["STACK"]) + int(usage["LOCAL"])}
    widths: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for operation, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", text):
        size = re.search(r"\.[US]?(8|16|64|128|256)\b", modifiers)
        widths[operation][int(size.group(1)) if size else 32] += 1
    return resources, widths["LDG"], widths["STG"], len(re.findall(r"\bFFMA", text))


def _read_amdgcn(compiled: CompiledKernel) -> _Reading:
    text = compiled.asm["amdgcn"]
    usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
    resources = {"registers": int(usage["vgpr_count"]), "spills": int(usage["private_segment_fixed_size"])}
    sizes = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    widths: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
    pattern = r"\b(?:global|buffer)_(load|store)_[us]?(byte|short|dword(?:x\d)?)\b"
    for operation, size in re.findall(pattern, text):
        widths[operation][sizes[size]] += 1
    return resources, widths["load"], widths["store"], len(re.findall(r"\bv_(?:pk_)?fmac?_f32", text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of all variants on all targets."""
    parser = argparse.ArgumentParser(prog="python -m kfuse.kernels.aot", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports here as well")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args(arguments)
    reports = []
    print(f"{'kernel':<52} {'target':<7} {'regs':>4} {'spill':>5} {'shared':>6}  loads and stores, bits x count")
    for variant, target in product(variants(), options.targets):
        report = inspect(variant, target)
        reports.append(asdict(report))
        loads, stores = (
            " ".join(f"{bits}x{count}" for bits, count in reversed(found.items()))
            for found in (report.loads, report.stores)
        )
        print(
            f"{report.name:<52} {target:<7} {report.registers:>4} {report.spill_bytes:>5} "
            f"{report.shared_bytes:>6}  {loads} | {stores}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"triton": triton.__version__, "kernels": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
