"""What the compilers make of the kernels on each GPU target, which needs no GPU.

Also that a launch compiles as the wrappers call it: through Triton's own argument binder, on a pretended device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")

aot = pytest.importorskip("kfuse.kernels.aot")
VARIANTS = list(aot.variants())


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_no_spills_wide_accesses_and_no_fusion(variant: aot.Variant, target: str) -> None:
    report = aot.inspect(variant, target)
    assert report.spill_bytes == 0
    if variant.elements:
        # Every bulk stream is moved by 128-bit accesses alone; what is narrower are scalars and ragged ends.
        assert report.loads[128] == variant.wide_accesses(variant.loads)
        assert report.stores.get(128, 0) == variant.wide_accesses(variant.stores)
    if target == "sm_100" and "bf16" in variant.name and TRITON < (3, 7):
        pytest.skip("ptxas 12.9 fuses packed multiplications and additions that say .rn")
    if not variant.name.startswith("adamw"):  # whose exact division and square root are made of them
        assert report.fused_multiply_adds == 0


def test_variants_have_names_of_their_own() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_sum_of_squares_is_laid_out_alike_in_all_variants_of_pack(target: str) -> None:
    """Bits of `sumsq` must not depend on scale or accumulate, and the layout decides the order of addition."""

    def types(variant: aot.Variant) -> str:
        return str(variant.name.split()[1])

    packs = sorted((variant for variant in VARIANTS if variant.name.startswith("pack ")), key=types)
    for name, group in groupby(packs, key=types):
        layouts = set()
        for variant in group:
            ir = aot.compile_variant(variant, aot.TARGETS[target]).asm["ttgir"]
            definitions = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
            operands = re.findall(r"\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", ir)
            assert len(operands) == 2  # the bulk and the ragged end
            layouts.add(tuple(definitions[operand] for operand in operands))
        assert len(layouts) == 1, name


def test_many_rows_are_reduced_without_spills() -> None:
    from kfuse.kernels import triton_reduce

    (base,) = (variant for variant in VARIANTS if variant.name == "reduce 2 rows fp32->fp32")
    for count in (17, 64):
        merges = tuple((0, src) for src in range(1, count))
        flags = base.flags | {
            "PROGRAM": triton_reduce.postfix(count, merges),
            "BLOCK": triton_reduce.block_size(count, 4),
        }
        assert aot.inspect(replace(base, flags=flags), "sm_90").spill_bytes == 0


def test_command_line_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "variants", lambda: iter(VARIANTS[:2]))
    aot.main(["--targets", "sm_90", "--json", str(tmp_path / "aot.json")])
    written = json.loads((tmp_path / "aot.json").read_text())
    assert [kernel["name"] for kernel in written["kernels"]] == [variant.name for variant in VARIANTS[:2]]
    assert len(capsys.readouterr().out.splitlines()) == 3


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
compiled, run = [], JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    if self.__name__ == "pack_kernel":  # which assumes that addresses in its table are aligned
        assert (args[0] % 16 == 0).all(), args[0]
    compiled.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options).metadata.maxnreg))

JITFunction.run = compile_only

from kfuse.kernels import PackTable, triton_adamw, triton_pack, triton_partials, triton_reduce, triton_sgd
for numel in (1, 96):  # 1 is a size that Triton turns into a constant
    table = PackTable.build([numel, 3], [0, 96], torch.device("cpu"))
    sumsq = torch.zeros(table.num_chunks)
    misaligned = torch.ones(numel + 1)[1:]
    triton_pack.pack([misaligned, None], torch.zeros(99), table, scale=1.0, accumulate=True, sumsq=sumsq)
    triton_partials.block_sumsq(torch.ones(numel), torch.zeros(1))
    triton_partials.sum_partials(torch.ones(numel), torch.zeros((), dtype=torch.float64))
    triton_reduce.reduce(torch.ones(3, numel), ((1, 2), (0, 1)), torch.zeros(numel), scale=0.5)
    p, g, m, v = torch.ones(4, numel)
    one, common = torch.ones(()), {"lr": 1, "weight_decay": 0, "maximize": False}
    for guard in (one, None):
        guards = {"grad_scale": guard, "found_inf": guard}
        triton_adamw.adamw(p, g, m, v, step=one, beta1=0.9, beta2=0.99, eps=1e-8, **common, **guards)
        for buffer in (m, None):
            triton_sgd.sgd(
                p, g, buffer, momentum=0, dampening=0, nesterov=False, first_step=False, **common, **guards
            )
assert len(compiled) == 20 and {registers for _, registers in compiled} == {128}, compiled
"""


def test_launches_compile_as_the_wrappers_call_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
