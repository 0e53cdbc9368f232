"""The kernels compile well for each GPU target: no spills, and wide loads and stores. This needs no GPU.

Also that a launch compiles as the wrappers call it: through Triton's own argument binder, on a pretended device.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from kfuse.kernels import triton_normalisation
from kfuse.kernels.dispatch import REGISTERS, Launch, options
from kfuse.kernels.normalisation import NormBackwardArguments, NormForwardArguments
from kfuse.tools import kernels_aot as aot
from kfuse.tools.kernels_aot import BF16, F32, Case

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"),
]

CASES = aot.cases()
KERNELS = sorted({name.split()[0] for name in CASES})
Reports = Mapping[tuple[str, str], Any]


@pytest.fixture(scope="module")
def reports() -> Reports:
    """Every pair compiled once, on all cores."""
    found = aot.inspect_all(aot.selection(list(aot.TARGETS)))
    return {(report.name, report.target): report for report in found}


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills_wide_accesses_and_no_fusion(reports: Reports, kernel: str) -> None:
    found = [report for (name, _), report in reports.items() if name.split()[0] == kernel]
    assert {report.target for report in found} == set(aot.TARGETS)
    for report in found:
        check(report, CASES[report.name])


def check(report: aot.Report, case: Case) -> None:
    """Raises AssertionError with the case's name and target."""
    where, amd = (report.name, report.target), report.target == "gfx942"
    assert report.spill_bytes == 0, where
    assert amd or report.registers * case.launch.threads <= REGISTERS, where
    if case.elements:
        # Every bulk stream is moved by 128-bit accesses alone; what is narrower are scalars and ragged ends.
        assert report.stores.get(128, 0) % max(1, case.wide_accesses()[1]) == 0, where
        # On AMD the lines of the table of addresses, which lie side by side, are loaded 128 bits wide, too.
        of_table = amd and report.name.startswith("sum_rows by address")
        scalars = case.launch.constants["AHEAD"] * 16 * 256 / case.elements if of_table else 0.0
        assert report.floor <= report.bytes_per_element <= report.floor + scalars, where
    if report.name.startswith(("norm_forward", "norm_backward")):
        # A row's load and store, and the weight's, for each thread; what is narrower are the row's own scalars.
        for accesses, wide in ((report.loads, 2), (report.stores, 1)):
            assert accesses.get(128, 0) >= wide, where
            assert sum(count for bits, count in accesses.items() if bits < 128) <= 4, where
    if report.name.startswith("product"):
        # Operands, what is added, and results, which the layout of AMD's products leaves in pieces of four elements.
        assert set(report.loads) == {128} and set(report.stores) <= ({64, 128} if amd else {128}), where
    fused_by_ptxas = report.target in ("sm_100", "sm_120") and TRITON < (3, 7)  # packed operations that say .rn
    if not fused_by_ptxas and not report.name.startswith(FUSED) and "and a message" not in report.name:
        assert report.fused_multiply_adds == 0, where


FUSED = ("adamw", "lamb", "norm", "product fp32")
"""Kernels with exact divisions or square roots, which are made of fused operations (on AMD GPUs every division is), and
sums of products. So is the division by a group's scale, in those that write a quantised message."""


def wide_rows(width: int, dtype: torch.dtype, centred: bool) -> list[Launch]:
    """The launches of a normalisation's two passes over rows of this width."""
    weight, rstd, x = aot.like(width), aot.like(64), aot.like(1, 64, width, dtype=dtype)
    mean, bias = (rstd, weight) if centred else (None, None)
    forward = triton_normalisation.norm_forward(NormForwardArguments(x[0], weight, bias, eps=1e-5, centred=centred))
    backward = triton_normalisation.norm_backward(NormBackwardArguments(x, x, weight, mean, rstd, with_bias=centred))
    return [*forward, next(backward)]


WIDEST = [(16384, F32, True), (16384, BF16, False), (4096, F32, True)]


def test_rows_of_every_width_can_be_normalised() -> None:
    """A multiprocessor has registers for one program at the least; up to 4096 columns none is spilled."""
    for target, (width, dtype, centred) in itertools.product(("sm_80", "sm_120"), WIDEST):
        for launch in wide_rows(width, dtype, centred):
            found = aot.inspect(Case(f"{width}", launch), target)
            assert found.registers * launch.threads <= REGISTERS, (width, launch.kernel.__name__, found)
            assert width > 4096 or found.spill_bytes == 0
    for width in range(1, triton_normalisation.MAX_WIDTH + 1, 31):
        threads = triton_normalisation._threads(1 << (width - 1).bit_length())
        assert threads * int(options(threads, 32)["maxnreg"]) <= REGISTERS


def test_bytes_are_read_off_the_code() -> None:
    """A kernel that lost its alignment, and with it wide accesses, does not pass for one at the floor."""
    packed = CASES["pack fp32->fp32"]
    launch = replace(packed.launch, constants=packed.launch.constants | {"OFFSET_ALIGNMENT": 1})
    report = aot.inspect(replace(packed, launch=launch), "sm_90")
    assert report.bytes_per_element < report.floor


def test_sum_of_squares_is_laid_out_alike_in_all_cases_of_pack(reports: Reports) -> None:
    """Bits of `sumsq` must not depend on scale or accumulate, and the layout decides the order of addition."""
    layouts: dict[tuple[str, bool, str], set[frozenset[str]]] = {}
    for (name, target), report in reports.items():
        if name.startswith("pack "):
            sends = "a message" in name  # it is the step's last one, and has another layout
            assert sends or len(set(report.sums)) == 2  # the bulk and the ragged end
            layouts.setdefault((name.split()[1], sends, target), set()).add(frozenset(report.sums))
    assert all(len(found) == 1 for found in layouts.values()), layouts


def order_of_sum(layout: str, lanes: int) -> tuple[str, ...]:
    """Of a layout's description: what decides the order in which a sum over it is formed.

    Neighbours (the last dimension) must all be held by one thread. Sums of them: which thread holds which.
    """
    per_thread, per_warp, warps = (re.findall(rf"{name} = \[([\d, ]+)\]", layout)[-1] for name in LAYOUT)
    if f"x{lanes}]" in layout.split()[0]:
        assert per_thread.endswith(f", {lanes}"), layout
        return (f"{lanes} neighbours in a thread",)
    assert per_thread.split(", ")[0] == "1", layout
    return (layout.split()[0], per_warp.split(", ")[0], warps.split(", ")[0])


LAYOUT = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")


def test_squares_are_added_up_as_by_block_sumsq(reports: Reports) -> None:
    """Their bits are promised to be the same for any number of rows."""
    for target in aot.TARGETS:
        by_address, reduce, squares = (
            {order_of_sum(layout, 4) for layout in reports[case, target].sums}
            for case in ("sum_rows by address fp32->fp32 norm", "sum_rows fp32->fp32 norm", "block_sumsq fp32")
        )
        assert by_address == reduce == squares


LAUNCHES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Device:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_device_interface = staticmethod(lambda: torch.cpu)

triton.runtime.driver.set_active(Device())
compiled, ahead, run = [], [], JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    if self.__name__ == "pack_kernel":  # which assumes that addresses in its table are aligned
        assert (options["pointers"] % 16 == 0).all(), options["pointers"]
    binary = run(self, *args, grid=grid, warmup=True, **options)
    (ahead if warmup else compiled).append((self.__name__, binary.metadata.maxnreg))
    return binary

JITFunction.run = compile_only

from kfuse.kernels import adamw, dispatch, pack, reduce
from kfuse.kernels.table import PackTable
from kfuse.tools.doctor.kernel_checks import ADAM, CHECKS
dispatch.INTERPRETED = True  # sends CPU tensors to the Triton code
for call in CHECKS.values():
    call(torch.device("cpu"), lambda *shape, dtype=torch.float32: torch.ones(shape, dtype=dtype))
for numel in (1, 96):  # 1 is a size that Triton turns into a constant; and arguments that may be left out are
    table = PackTable.build([numel, 3], [0, 96], torch.device("cpu"))
    sumsq = torch.zeros(table.num_chunks)
    misaligned = torch.ones(numel + 1)[1:]
    pack([misaligned, None], torch.zeros(99), table, scale=1.0, accumulate=True, sumsq=sumsq)
    reduce(torch.ones(3, numel), ((1, 2), (0, 1)), torch.zeros(numel))
    reduce([torch.ones(numel), torch.ones(numel)], ((0, 1),), torch.zeros(numel))
    adamw(*torch.ones(4, numel), ADAM, step=torch.ones(()))
assert len(compiled) == 36 and {registers for _, registers in compiled} == {128}, compiled
later = {"sum_rows_kernel": 4, "pack_kernel": 1}  # what later launches need
assert {name for name, _ in ahead} == set(later), ahead
"""


def test_launches_compile_as_the_wrappers_call_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
