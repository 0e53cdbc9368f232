"""Compile every kernel ahead of time, without a GPU, and report what the compilers made of it.

    python -m kfuse.kernels.aot [--json FILE] [--targets sm_90 gfx942]

Registers, spills and shared memory come from the compiled binary; global memory accesses are counted by their width in
its assembly, and from them the bytes that a bulk element costs. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kfuse.kernels import triton_lamb, triton_norm, triton_pack, triton_pull, triton_reduce, triton_updates
from kfuse.kernels.launch import NAMES, Case, options

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
THOROUGH = "sm_90"
"""The target on which every case is compiled; elsewhere one or a few stand for each kernel."""

AMD_SIZES = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


@dataclass(frozen=True)
class Binary:
    """Instruction counts and resources of a compiled kernel, from its final assembly.

    Args:
        spill_bytes: per thread.
        loads, stores: global memory instructions by width in bits, widest first.
        fused_multiply_adds: fp32 instructions that round once where the source rounds twice.
    """

    registers: int
    spill_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    fused_multiply_adds: int


def read(compiled: CompiledKernel) -> Binary:
    """The binary's resources and instructions: SASS by Triton's own disassembler, or amdgcn."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
        found = re.findall(r"\b(?:global|buffer)_(load|store)_[us]?(byte|short|dword(?:x\d)?)\b", text)
        accesses = [(kind, AMD_SIZES[size]) for kind, size in found]
        registers, spilled = int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])
        fused = len(re.findall(r"\bv_(?:pk_)?fmac?_f32", text))
    else:
        text = _sass(compiled.asm["cubin"])
        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
        accesses = []
        for kind, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", text):
            size = re.search(r"\.[US]?(8|16|64|128|256)\b", modifiers)
            accesses.append(("load" if kind == "LDG" else "store", int(size.group(1)) if size else 32))
        registers, spilled = int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
        fused = len(re.findall(r"\bFFMA", text))
    loads, stores = (
        dict(sorted(Counter(width for kind, width in accesses if kind == wanted).items(), reverse=True))
        for wanted in ("load", "store")
    )
    return Binary(registers, spilled, loads, stores, fused)


def _sass(cubin: bytes) -> str:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sum_layouts(compiled: CompiledKernel) -> tuple[str, ...]:
    """How values lie in threads at each of the kernel's sums: with it the order of addition is decided."""
    ir = compiled.asm["ttgir"]
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<([\dx]+)xf(?:32|64), (#.*)>\) -> ", ir)
    resolved = [re.sub(r"#\w+", lambda m: definitions.get(m[0], m[0]), name) for _, name in operands]
    return tuple(f"[{shape}] {layout}" for (shape, _), layout in zip(operands, resolved, strict=True))


@dataclass(frozen=True)
class Report:
    """What one case became on one target.

    Args:
        shared_bytes: per program.
        floor: bytes an element that memory has to move; 0 where no stream counts.
        bytes_per_element: what the code's 128-bit accesses move. Narrower ones are scalars and ragged ends.
        sums: layout of each sum's operand in the threads, which decides the order of addition.
    """

    name: str
    target: str
    binary: Binary
    shared_bytes: int
    floor: float
    bytes_per_element: float
    sums: tuple[str, ...]

    def line(self) -> str:
        """This report as a row of the Markdown table."""
        binary = self.binary
        loads, stores = (
            " ".join(f"{bits}x{count}" for bits, count in found.items()) or "-"
            for found in (binary.loads, binary.stores)
        )
        moved = f"{self.bytes_per_element:g} / {self.floor:g}" if self.floor else "-"
        return (
            f"| {self.name:<44} | {self.target:<6} | {binary.registers:>4} | {binary.spill_bytes:>5} "
            f"| {self.shared_bytes:>6} | {loads:<20} | {stores:<12} | {moved:<16} |"
        )


HEADER = (
    f"| {'kernel':<44} | target | regs | spill | shared | {'loads, bits x count':<20} | {'stores':<12} "
    f"| {'B/element / floor':<16} |\n|{'-' * 46}|--------|-----:|------:|-------:|{'-' * 22}|{'-' * 14}|{'-' * 18}|"
)


@cache
def cases() -> dict[str, Case]:
    """Every kernel, in the types and with the flags that training uses, by name."""
    modules = (triton_pack, triton_reduce, triton_pull, triton_updates, triton_lamb, triton_norm)
    return {case.name: case for module in modules for case in module.cases()}


def compile_case(case: Case, target: str) -> CompiledKernel:
    """Compile for `target` as a launch with aligned buffers, and sizes that are multiples of 16, would."""
    launch, names = case.launch, case.launch.kernel.arg_names
    kinds = {name: _kind(value) for name, value in launch.arguments.items() if value is not None}
    aligned = [name for name, kind in kinds.items() if kind.startswith(("*", "i"))]
    source = ASTSource(
        launch.kernel,
        {name: kinds.get(name, "constexpr") for name in names},
        # As at a launch, an optional argument that is not given is the constant None.
        constexprs={name: launch.constants.get(name) for name in names if name not in kinds},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    settings = options(launch.threads, TARGETS[target].warp_size, launch.registers)
    return triton.compile(source, target=TARGETS[target], options=settings)


def _kind(value: Any) -> str:
    """Triton's name for the type of a runtime argument."""
    if isinstance(value, Tensor):
        return "*" + {**NAMES, torch.int32: "i32", torch.int64: "i64", torch.float64: "fp64"}[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def inspect(case: Case, target: str) -> Report:
    """Compile a case and read the report off its binary."""
    compiled = compile_case(case, target)
    binary = read(compiled)
    wide = [found.get(128, 0) for found in (binary.loads, binary.stores)]
    expected = [case.wide_accesses(streams) for streams in (case.loads, case.stores)]
    # A loop over tiles may have been unrolled: the code then shows several turns.
    turns = max(1, wide[1] // expected[1] if expected[1] else wide[0] // max(1, expected[0]))
    per_access = case.launch.threads * 16 / (case.elements * turns) if case.elements else 0.0
    shared = int(compiled.metadata.shared)
    return Report(case.name, target, binary, shared, case.floor, sum(wide) * per_access, sum_layouts(compiled))


def selection(targets: Sequence[str]) -> list[tuple[str, str]]:
    """Names of cases and their targets: all on THOROUGH, elsewhere those that stand for their kernel."""
    pairs = [(case, target) for case in cases().values() for target in targets]
    return [(case.name, target) for case, target in pairs if case.everywhere or target == THOROUGH]


def inspect_all(pairs: Sequence[tuple[str, str]]) -> Iterator[Report]:
    """Reports in the order of `pairs` (a case's name, target), compiled in a process for each core."""
    with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_inspect_named, pairs)


def _inspect_named(pair: tuple[str, str]) -> Report:
    name, target = pair
    return inspect(cases()[name], target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the kernels on each target."""
    parser = argparse.ArgumentParser(prog="python -m kfuse.kernels.aot", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports here as well")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    options = parser.parse_args(arguments)
    reports = []
    print(HEADER)
    for report in inspect_all(selection(options.targets)):
        reports.append(asdict(report))
        print(report.line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"triton": triton.__version__, "kernels": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
