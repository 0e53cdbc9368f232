"""The normalisation kernels compiled ahead of time: no spills, and wide loads and stores."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kfuse.kernels import aot, triton_norm
from kfuse.kernels.aot_variants import Variant

WIDTH, BLOCK = 768, 1024


def variant(kind: str, dtype: str, centred: bool) -> Variant:
    threads = int(triton_norm._options(BLOCK)["num_warps"]) * triton_norm.launch.WARP_SIZE
    mean = {"mean": "*fp32"} if centred else {}
    if kind == "forward":
        bias = {"bias": "*fp32"} if centred else {}
        arguments = {"x": f"*{dtype}", "weight": "*fp32", **bias, "y": f"*{dtype}", **mean, "rstd": "*fp32"}
        flags = {"CENTRED": centred, "BLOCK": BLOCK}
        arguments |= {"width": "i32", "eps": "fp32"}
        return Variant(f"norm {kind}", triton_norm.norm_forward_kernel, arguments, flags, threads, BLOCK)
    arguments = {"dy": f"*{dtype}", "x": f"*{dtype}", "weight": "*fp32", **mean, "rstd": "*fp32", "dx": f"*{dtype}"}
    arguments |= {"weight_parts": "*fp32"} | ({"bias_parts": "*fp32"} if centred else {})
    arguments |= {"tokens": "i32", "width": "i32"}
    flags = {"ROWS": triton_norm.ROWS, "CENTRED": centred, "BLOCK": BLOCK}
    return Variant(f"norm {kind}", triton_norm.norm_backward_kernel, arguments, flags, threads, BLOCK)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(("dtype", "centred"), [("fp32", True), ("bf16", False)])
def test_no_spills_and_wide_access(kind: str, dtype: str, centred: bool, target: str) -> None:
    report = aot.inspect(variant(kind, dtype, centred), target)
    assert report.binary.spill_bytes == 0
    assert report.binary.loads.get(128, 0) >= 2 and report.binary.stores.get(128, 0) >= 1
