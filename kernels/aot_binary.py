"""What a compiled kernel is made of, read from its final assembly: SASS, by Triton's own disassembler, or amdgcn."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia
from triton.compiler import CompiledKernel


@dataclass(frozen=True)
class Binary:
    """Instruction counts and resources. Spilled bytes are per thread."""

    registers: int
    spill_bytes: int
    loads: dict[int, int]
    """Global load instructions by width in bits, widest first."""
    stores: dict[int, int]
    fused_multiply_adds: int
    """fp32 instructions that round once where the source rounds twice."""


def read(compiled: CompiledKernel) -> Binary:
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
