"""Compile every kernel ahead of time, without a GPU, and report what the compilers made of it.

    python -m kfuse.kernels.aot [--json FILE] [--targets sm_90 gfx942] [--kernels reduce adamw] [--all] [--jobs 2]

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
    return _read_amdgcn(compiled) if "amdgcn" in compiled.asm else _read_sass(compiled)


def sum_layouts(compiled: CompiledKernel) -> tuple[str, ...]:
    """How values lie in threads at each of the kernel's sums: with it the order of addition is decided."""
    ir = compiled.asm["ttgir"]
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<([\dx]+)xf(?:32|64), (#.*)>\) -> ", ir)
    resolved = [re.sub(r"#\w+", lambda m: definitions.get(m[0], m[0]), name) for _, name in operands]
    return tuple(f"[{shape}] {layout}" for (shape, _), layout in zip(operands, resolved, strict=True))


def _read_sass(compiled: CompiledKernel) -> Binary:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    widths: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for operation, modifiers in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", text):
        size = re.search(r"\.[US]?(8|16|64|128|256)\b", modifiers)
        widths[operation][int(size.group(1)) if size else 32] += 1
    return Binary(
        registers=int(usage["REG"]),
        spill_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        loads=_widest_first(widths["LDG"]),
        stores=_widest_first(widths["STG"]),
        fused_multiply_adds=len(re.findall(r"\bFFMA", text)),
    )


def _read_amdgcn(compiled: CompiledKernel) -> Binary:
    text = compiled.asm["amdgcn"]
    usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
    sizes = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    widths: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
    pattern = r"\b(?:global|buffer)_(load|store)_[us]?(byte|short|dword(?:x\d)?)\b"
    for operation, size in re.findall(pattern, text):
        widths[operation][sizes[size]] += 1
    return Binary(
        registers=int(usage["vgpr_count"]),
        spill_bytes=int(usage["private_segment_fixed_size"]),
        loads=_widest_first(widths["load"]),
        stores=_widest_first(widths["store"]),
        fused_multiply_adds=len(re.findall(r"\bv_(?:pk_)?fmac?_f32", text)),
    )


def _widest_first(widths: Counter[int]) -> dict[int, int]:
    return dict(sorted(widths.items(), reverse=True))


@dataclass(frozen=True)
class Report:
    """What one case became on one target.

    Args:
        shared_bytes: per program.
        floor: bytes an element that memory has to move; 0 where no stream counts.
        bytes_per_element: what the code's 128-bit accesses move. Narrower ones are scalars and ragged ends.
        cached_bytes: of these, what is read a second time, from the cache.
        sums: layout of each sum's operand in the threads, which decides the order of addition.
    """

    name: str
    target: str
    binary: Binary
    shared_bytes: int
    floor: float
    bytes_per_element: float
    cached_bytes: float
    sums: tuple[str, ...]

    def line(self) -> str:
        """This report as a row of the Markdown table."""
        loads, stores = (
            " ".join(f"{bits}x{count}" for bits, count in found.items()) or "-"
            for found in (self.binary.loads, self.binary.stores)
        )
        cached = f" + {self.cached_bytes:g} cached" if self.cached_bytes else ""
        moved = f"{self.bytes_per_element - self.cached_bytes:g}{cached} / {self.floor:g}" if self.floor else "-"
        binary = self.binary
        return (
            f"| {self.name:<44} | {self.target:<6} | {binary.registers:>4} | {binary.spill_bytes:>5} "
            f"| {self.shared_bytes:>6} | {loads:<20} | {stores:<12} | {moved:<16} |"
        )


HEADER = (
    f"| {'kernel':<44} | target | regs | spill | shared | {'loads, bits x count':<20} | {'stores':<12} "
    f"| {'B/element / floor':<16} |\n|{'-' * 46}|--------|-----:|------:|-------:|{'-' * 22}|{'-' * 14}|{'-' * 19}|"
)


def cases() -> Iterator[Case]:
    """Every kernel, in the types and with the flags that training uses."""
    for module in (triton_pack, triton_reduce, triton_pull, triton_updates, triton_lamb, triton_norm):
        yield from module.cases()


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
    expected = [case.wide_accesses(streams) for streams in (case.loads + case.cached, case.stores)]
    # A loop over tiles may have been unrolled: the code then shows several turns.
    turns = max(1, wide[1] // expected[1] if expected[1] else wide[0] // max(1, expected[0]))
    per_access = case.launch.threads * 16 / (case.elements * turns) if case.elements else 0.0
    return Report(
        name=case.name,
        target=target,
        binary=binary,
        shared_bytes=int(compiled.metadata.shared),
        floor=case.floor,
        bytes_per_element=sum(wide) * per_access,
        cached_bytes=case.wide_accesses(case.cached) * turns * per_access,
        sums=sum_layouts(compiled),
    )


def selection(
    targets: Sequence[str], kernels: Sequence[str] = (), everything: bool = False
) -> Iterator[tuple[str, str]]:
    """Names of cases and their targets: all on THOROUGH, elsewhere those that stand for their kernel."""
    for case in cases():
        for target in targets:
            wanted = not kernels or case.name.split()[0] in kernels
            if wanted and (everything or case.everywhere or target == THOROUGH):
                yield case.name, target


def inspect_all(pairs: Sequence[tuple[str, str]], jobs: int) -> Iterator[Report]:
    """Reports in the order of `pairs` (a case's name, target), compiled in `jobs` processes."""
    if jobs == 1:
        yield from map(_inspect_named, pairs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_inspect_named, pairs)


def _inspect_named(pair: tuple[str, str]) -> Report:
    name, target = pair
    return inspect(_by_name()[name], target)


@cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for case in cases()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the kernels on each target."""
    kernels = sorted({case.name.split()[0] for case in cases()})
    parser = argparse.ArgumentParser(prog="python -m kfuse.kernels.aot", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports here as well")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=[], metavar="KERNEL", help=", ".join(kernels))
    parser.add_argument("--all", action="store_true", help=f"every case on every target, not on {THOROUGH} alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that compile")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: must be at least 1")
    reports = []
    print(HEADER)
    for report in inspect_all(list(selection(options.targets, options.kernels, options.all)), options.jobs):
        reports.append(asdict(report))
        print(report.line(), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"triton": triton.__version__, "kernels": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
