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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kfuse.kernels import launch
from kfuse.kernels.aot_binary import Binary, read, sum_layouts
from kfuse.kernels.aot_variants import Variant, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
THOROUGH = "sm_90"
"""The target on which every variant is compiled; elsewhere one or a few stand for each kernel."""


@dataclass(frozen=True)
class Report:
    """What one variant became on one target. Shared bytes are per program."""

    name: str
    target: str
    binary: Binary
    shared_bytes: int
    floor: float
    """Bytes an element that memory has to move; 0 where no stream is bulk."""
    bytes_per_element: float
    """Bytes an element that the code's 128-bit accesses move. Narrower ones are scalars and ragged ends."""
    cached_bytes: float
    """Of these, what is read a second time, from the cache."""
    sums: tuple[str, ...]
    """Layout of each sum's operand in the threads, which decides the order of addition."""

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


def compile_variant(variant: Variant, target: str) -> CompiledKernel:
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
    options = launch.options(variant.threads, TARGETS[target].warp_size, variant.registers)
    return triton.compile(source, target=TARGETS[target], options=options)


def inspect(variant: Variant, target: str) -> Report:
    """Compile a variant and read the report off its binary."""
    compiled = compile_variant(variant, target)
    binary = read(compiled)
    wide = [found.get(128, 0) for found in (binary.loads, binary.stores)]
    expected = [variant.wide_accesses(streams) for streams in (variant.loads + variant.cached, variant.stores)]
    # A loop over tiles may have been unrolled: the code then shows several turns.
    turns = max(1, wide[1] // expected[1] if expected[1] else wide[0] // max(1, expected[0]))
    per_access = variant.threads * 16 / (variant.elements * turns) if variant.elements else 0.0
    return Report(
        name=variant.name,
        target=target,
        binary=binary,
        shared_bytes=int(compiled.metadata.shared),
        floor=variant.floor,
        bytes_per_element=sum(wide) * per_access,
        cached_bytes=variant.wide_accesses(variant.cached) * turns * per_access,
        sums=sum_layouts(compiled),
    )


def selection(
    targets: Sequence[str], kernels: Sequence[str] = (), everything: bool = False
) -> Iterator[tuple[str, str]]:
    """Names of variants and their targets: all on THOROUGH, elsewhere those that stand for their kernel."""
    for variant in variants():
        for target in targets:
            wanted = not kernels or variant.name.split()[0] in kernels
            if wanted and (everything or variant.everywhere or target == THOROUGH):
                yield variant.name, target


def inspect_all(pairs: Sequence[tuple[str, str]], jobs: int) -> Iterator[Report]:
    """Reports in the order of `pairs` (variant's name, target), compiled in `jobs` processes."""
    if jobs == 1:
        yield from map(_inspect_named, pairs)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_inspect_named, pairs)


def _inspect_named(pair: tuple[str, str]) -> Report:
    name, target = pair
    return inspect(_by_name()[name], target)


@cache
def _by_name() -> dict[str, Variant]:
    return {variant.name: variant for variant in variants()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the kernels on each target."""
    kernels = sorted({variant.name.split()[0] for variant in variants()})
    parser = argparse.ArgumentParser(prog="python -m kfuse.kernels.aot", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports here as well")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=[], metavar="KERNEL", help=", ".join(kernels))
    parser.add_argument("--all", action="store_true", help=f"every variant on every target, not on {THOROUGH} alone")
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
