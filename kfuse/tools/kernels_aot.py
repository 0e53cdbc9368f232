"""Compiles every kernel ahead of time, without a GPU, and reports what the compilers made of it.

    python -m kfuse.tools.kernels_aot [--targets sm_90 gfx942]

Registers, spills and shared memory come from the compiled binary; global memory accesses are counted by their width in
its assembly, and from them the bytes that a bulk element costs. The table is Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kfuse.kernels import triton_normalisation, triton_orthogonal, triton_reduction, triton_updates
from kfuse.kernels.dispatch import Launch, options
from kfuse.kernels.normalisation import NormBackwardArguments, NormForwardArguments
from kfuse.kernels.orthogonal import OrthogonaliseArguments
from kfuse.kernels.reduction import BlockSumsqArguments, PackArguments, ReduceArguments, SumPartialsArguments, balanced
from kfuse.kernels.table import BLOCK, CHUNK, PackTable
from kfuse.kernels.updates import AdamOptions, AdamWArguments, LAMBArguments, SGDArguments, SGDOptions
from kfuse.kernels.wire import WIRE

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {F32: "fp32", BF16: "bf16", F16: "fp16", torch.float64: "fp64"}
NAMES |= {torch.int8: "i8", torch.int32: "i32", torch.int64: "i64"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
THOROUGH = "sm_90"  # the target on which every case is compiled; elsewhere one or a few stand for each kernel

AMD_SIZES = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}

# What each kernel reads, and writes, 128 bits at a time from end to end, by the names of its arguments; those that are
# None do not. (`block_sumsq` stores `visible` 64 bits at a time: its tile decides the order of its sums. `sum_rows`
# reads messages of eight bits 32 bits at a time: sixteen elements a thread would need too many registers.)
STREAMS = {
    "pack_kernel": ("grads flat", "flat wire"),
    "sum_rows_kernel": ("rows", "out"),
    "block_sumsq_kernel": ("flat", ""),
    "adamw_kernel": ("param master grad visible exp_avg exp_avg_sq", "param master exp_avg exp_avg_sq"),
    "sgd_kernel": ("param master grad visible momentum_buffer", "param master momentum_buffer"),
    "lamb_moments_kernel": ("param master grad visible exp_avg exp_avg_sq", "exp_avg exp_avg_sq"),
    "lamb_apply_kernel": ("param master exp_avg exp_avg_sq", "param master"),
}


@dataclass(frozen=True)
class Case:
    """One launch as training makes it, to be compiled ahead of time, and the memory traffic that it needs.

    everywhere: stands for its kernel on every target; the others differ in flags and types, and one target shows them.
    """

    name: str
    launch: Launch
    everywhere: bool = False

    @property
    def elements(self) -> int:
        """Returns how many elements of each stream a program handles at a time; 0 where no stream counts."""
        constants = self.launch.constants
        return constants.get("TILE", constants.get("CHUNK", 0)) if self.launch.kernel.__name__ in STREAMS else 0

    @property
    def streams(self) -> tuple[list[int], list[int]]:
        """Returns the bytes an element of each stream that is read, and of each that is written."""
        reads, writes = STREAMS.get(self.launch.kernel.__name__, ("", ""))
        constants = self.launch.constants
        if constants.get("ACCUMULATE") is False or constants.get("FIRST_STEP"):
            reads = reads.replace(" flat", "").replace(" momentum_buffer", "")
        if self.launch.given.get("scales") is not None:
            reads = reads.replace("rows", "")
        loads, stores = ([self.launch.given[name] for name in names.split()] for names in (reads, writes))
        return _itemsizes(loads), _itemsizes(stores)

    def wide_accesses(self) -> list[int]:
        """Returns how many 128-bit loads, and stores, a thread needs when none is narrower."""
        return [sum(self.elements * size for size in sizes) // (self.launch.threads * 16) for sizes in self.streams]


def _itemsizes(values: Sequence[Any]) -> list[int]:
    given = [value for value in values if value is not None]
    several = [[value] if isinstance(value, Tensor) and value.dim() == 1 else value for value in given]
    return [row.dtype.itemsize for rows in several for row in rows]


@cache
def cases() -> dict[str, Case]:
    """Every kernel's launches, in the types and with the flags that training uses, by name."""
    found: dict[str, Case] = {}
    for label, everywhere, launches in _launches():
        for launch in launches:
            name = f"{launch.kernel.__name__.removesuffix('_kernel')} {label}"
            found[name] = Case(name, launch, everywhere)
    return found


def _launches() -> Iterator[tuple[str, bool, Iterable[Launch]]]:
    """For each case its label, whether it stands for its kernels on every target, and their launches."""
    one, few, flat, wire = like(), like(1), like(BLOCK), like(WIRE, dtype=torch.int8)
    table = PackTable.build([CHUNK], [0], torch.device("meta"))
    for (of_grad, of_flat), accumulate in product(((F32, F32), (BF16, F32), (BF16, BF16), (F16, F32)), (False, True)):
        label = f"{NAMES[of_grad]}->{NAMES[of_flat]}{' accumulate' * accumulate}"
        grads, to = [like(CHUNK, dtype=of_grad)], like(CHUNK, dtype=of_flat)
        stored = few if of_flat == F32 else None
        pack = PackArguments(grads, to, table, scale=0.5, accumulate=accumulate, sumsq=few, stored=stored)
        yield label, accumulate and of_grad == F32, triton_reduction.pack(pack)
        if of_flat == F32:
            sends = replace(pack, stored=None, wire=wire, added=few)
            yield f"{label} and a message", accumulate and of_grad == F32, triton_reduction.pack(sends)

    for dtype, visible in ((F32, None), (BF16, None), (F32, like(BLOCK, dtype=BF16))):
        squares = triton_reduction.block_sumsq(BlockSumsqArguments(like(BLOCK, dtype=dtype), few, visible))
        yield f"{NAMES[dtype]}{'' if visible is None else ' rounded'}", dtype == F32, squares
    yield "", True, triton_reduction.sum_partials(SumPartialsArguments(like(16), like(dtype=torch.float64)))
    ahead, order = triton_reduction.AHEAD, balanced(triton_reduction.AHEAD)
    for (of_rows, of_out), sumsq in product(((F32, F32), (BF16, BF16), (BF16, F32)), (None, few)):
        label = f"{NAMES[of_rows]}->{NAMES[of_out]}{'' if sumsq is None else ' norm'}"
        rows, out = like(ahead, BLOCK, dtype=of_rows), like(BLOCK, dtype=of_out)
        everywhere = of_rows == F32 and sumsq is not None
        for launch in triton_reduction.reduce(ReduceArguments(rows, order, out, sumsq=sumsq)):
            yield label, everywhere, [launch]
            if everywhere:
                deeper = launch.constants | {"DEPTH": triton_reduction.DEEPER}
                yield f"of many rows {label}", False, [replace(launch, constants=deeper)]
        if of_rows == F32:
            apart = ReduceArguments(rows.unbind(), order, out, sumsq)
            yield f"by address {label}", everywhere, triton_reduction.reduce(apart)

    messages = like(ahead, WIRE, dtype=torch.int8)
    for label, sumsq, sent in ((" norm and a message", few, wire), (" norm", few, None), ("", None, None)):
        added = ReduceArguments(messages, order, flat, sumsq, sent)
        yield f"messages->fp32{label}", True, triton_reduction.reduce(added)

    adam = AdamOptions(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    for param, grad, master in ((F32, F32, 0), (F32, BF16, 0), (BF16, BF16, 0), (BF16, BF16, 1), (BF16, F32, 1)):
        mixed = param != grad == F32
        label = f"{NAMES[param]} param{' fp32 master' * master} {NAMES[grad]} grad{' visible' * mixed}"
        given: dict[str, Any] = {"param": like(BLOCK, dtype=param), "grad": like(BLOCK, dtype=grad)}
        given |= {"grad_scale": one, "found_inf": one, "master": flat if master else None}
        given["visible"] = like(BLOCK, dtype=param) if mixed else None
        moments: dict[str, Any] = {"exp_avg": flat, "exp_avg_sq": flat, "options": adam, "step": one}
        everywhere = param == grad == F32
        yield label, everywhere, triton_updates.adamw(AdamWArguments(**given, **moments))
        if everywhere or master:
            yield label, everywhere, triton_updates.lamb(LAMBArguments(**given, **moments, table=table))
        if param == grad or mixed:
            for mode in ("plain", "first step", "momentum", "nesterov") if param == F32 else ("momentum",):
                momentum = 0.0 if mode == "plain" else 0.9
                sgd = SGDOptions(lr=0.1, momentum=momentum, nesterov=mode == "nesterov")
                given |= {"momentum_buffer": flat if momentum else None, "first_step": mode == "first step"}
                everywhere = mode == "momentum" and param == F32
                yield f"{mode}, {label}", everywhere, triton_updates.sgd(SGDArguments(**given, options=sgd))

    width, tokens = 768, triton_normalisation.ROWS
    weight, rstd = like(width), like(tokens)
    for dtype, centred in ((F32, True), (BF16, True), (BF16, False)):
        label = f"{'layer' if centred else 'rms'} {NAMES[dtype]}"
        x, mean, bias = like(1, tokens, width, dtype=dtype), rstd if centred else None, weight if centred else None
        forward = NormForwardArguments(x[0], weight, bias, eps=1e-5, centred=centred)
        backward = NormBackwardArguments(x, x, weight, mean, rstd, with_bias=centred)
        yield label, dtype == F32, triton_normalisation.norm_forward(forward)
        yield label, dtype == F32, triton_normalisation.norm_backward(backward)

    for dtype in (F32, BF16):
        matrix, out = like(256, 512), like(256, 512, dtype=dtype)
        iteration = OrthogonaliseArguments([matrix], [out], (3.4, -4.8, 2.0), steps=1, eps=1e-7)
        products = zip(("gram", "polynomial", "result"), triton_orthogonal.orthogonalise(iteration), strict=True)
        yield from ((f"{NAMES[dtype]} {which}", True, [launch]) for which, launch in products)


def like(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """A tensor without memory, as an argument of a launch that is only compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _read(compiled: CompiledKernel) -> dict[str, Any]:
    """Returns the figures of a `Report` that are in the binary: SASS by Triton's own disassembler, or amdgcn."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
        instructions = re.findall(r"\b(?:global|buffer)_(load|store)_[us]?(byte|short|dword(?:x\d)?)\b", text)
        accesses = [(kind, AMD_SIZES[size]) for kind, size in instructions]
        registers, spilled = int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])
        fused = len(re.findall(r"\bv_(?:pk_)?fmac?_f32", text))
    else:
        text = _sass(compiled.asm["cubin"])
        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
        accesses = []
        for kind, modifiers in re.findall(r"\b(LDG|LDGSTS|STG)\b((?:\.\w+)*)", text):  # LDGSTS: to shared memory
            size = re.search(r"\.[US]?(8|16|64|128|256)\b", modifiers)
            accesses.append(("store" if kind == "STG" else "load", int(size.group(1)) if size else 32))
        registers, spilled = int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
        fused = len(re.findall(r"\bFFMA", text))
    found: dict[str, Any] = {"registers": registers, "spill_bytes": spilled, "fused_multiply_adds": fused}
    for wanted in ("load", "store"):
        widths = Counter(width for kind, width in accesses if kind == wanted)
        found[f"{wanted}s"] = dict(sorted(widths.items(), reverse=True))
    return found


def _sass(cubin: bytes) -> str:
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _sum_layouts(compiled: CompiledKernel) -> tuple[str, ...]:
    """Returns how values lie in threads at each of the kernel's sums: with it the order of addition is decided."""
    ir = compiled.asm["ttgir"]
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<([\dx]+)xf(?:32|64), (#.*)>\) -> ", ir)
    resolved = [re.sub(r"#\w+", lambda m: definitions.get(m[0], m[0]), name) for _, name in operands]
    return tuple(f"[{shape}] {layout}" for (shape, _), layout in zip(operands, resolved, strict=True))


@dataclass(frozen=True)
class Report:
    """What one case became on one target.

    spill_bytes: per thread. shared_bytes: per program. loads, stores: global memory instructions by width in bits,
    widest first. fused_multiply_adds: fp32 instructions that round once where the source rounds twice.
    floor: bytes an element that memory has to move, each stream once; 0 where no stream counts. bytes_per_element:
    those of the 128-bit accesses; narrower ones are scalars and ragged ends. sums: layout of each sum's operand in the
    threads, which decides the order of addition.
    """

    name: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    fused_multiply_adds: int
    floor: float
    bytes_per_element: float
    sums: tuple[str, ...]

    def line(self) -> str:
        """Returns this report as a row of the Markdown table."""
        accesses = [" ".join(f"{bits}x{n}" for bits, n in each.items()) or "-" for each in (self.loads, self.stores)]
        moved = f"{self.bytes_per_element:g} / {self.floor:g}" if self.floor else "-"
        used = (self.registers, self.spill_bytes, self.shared_bytes)
        return "| " + " | ".join(map(str, (self.name, self.target, *used, *accesses, moved))) + " |"


HEADER = """| kernel | target | regs | spill | shared | loads, bits x count | stores | B/element / floor |
|---|---|---:|---:|---:|---|---|---|"""


def _compile(case: Case, target: str) -> CompiledKernel:
    """Compiles for `target` as a launch with aligned buffers, and sizes that are multiples of 16, would."""
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
    settings = options(launch.threads, TARGETS[target].warp_size)
    return triton.compile(source, target=TARGETS[target], options=settings)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def inspect(case: Case, target: str) -> Report:
    """Compiles a case and reads the report off its binary."""
    compiled = _compile(case, target)
    found = _read(compiled)
    wide = [found[name].get(128, 0) for name in ("loads", "stores")]
    expected = case.wide_accesses()
    # A loop over tiles may have been unrolled: the code then shows several turns.
    turns = max(1, wide[1] // expected[1] if expected[1] else wide[0] // max(1, expected[0]))
    per_access = case.launch.threads * 16 / (case.elements * turns) if case.elements else 0.0
    found |= {"shared_bytes": int(compiled.metadata.shared), "sums": _sum_layouts(compiled)}
    floor = float(sum(map(sum, case.streams)))
    return Report(case.name, target, **found, floor=floor, bytes_per_element=sum(wide) * per_access)


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
    parser = argparse.ArgumentParser(prog="python -m kfuse.tools.kernels_aot", description=main.__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    print(HEADER)
    for report in inspect_all(selection(parser.parse_args(arguments).targets)):
        print(report.line(), flush=True)


if __name__ == "__main__":
    main()
