"""The kernel benchmark uses the real models, and each contestant gives what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full


def test_every_contestant_gives_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import kernels_cases
    import kernels_shapes

    models = kernels_shapes.resnet50(), kernels_shapes.gpt2()
    assert [sum(model.numels) for model in models] == [25_557_032, 124_439_808]
    layout = kernels_shapes.Layout("some", ((3, 50), (4096,), (7,)))
    for kernel in ("pack", "accumulate", "reduce4", "block_sumsq", "adamw", "clip+adamw", "sgd"):
        case = kernels_cases.CASES[kernel](layout, torch.float32, torch.device("cpu"))
        for name in set(case.runs) - {"compile"}:  # compiling takes long; the script checks it each time
            buffers = case.make()
            expected = case.expected(buffers)
            case.runs[name](buffers)
            for key, value in expected.items():
                actual = kernels_cases.ends(buffers[key])
                torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
