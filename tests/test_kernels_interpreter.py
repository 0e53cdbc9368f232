"""The Triton code passes the kernels' own tests without a GPU, in a process where Triton interprets.

Triton decides at its import whether it interprets, and then for all of the process: hence another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parent
FAMILIES = ["pack", "partials", "reduce", "optimizers", "fused", "symmetric", "lamb", "norm"]
Runs = dict[str, Future[subprocess.CompletedProcess[str]]]

pytestmark = pytest.mark.full


def interpret(family: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / f"test_kernels_{family}.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    """All families, a process each, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {family: pool.submit(interpret, family) for family in FAMILIES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
@pytest.mark.parametrize("family", FAMILIES)
def test_triton_code_in_the_interpreter(family: str, runs: Runs) -> None:
    done = runs[family].result()
    if done.returncode != 0:
        pytest.fail(f"with TRITON_INTERPRET=1:\n{done.stdout}\n{done.stderr}", pytrace=False)


def test_importing_the_kernels_does_not_import_triton() -> None:
    script = """
import sys, torch
before = "triton" in sys.modules
import kfuse.kernels as kernels
table = kernels.PackTable.build([4], [0], torch.device("cpu"))
kernels.pack([torch.ones(4)], torch.zeros(4), table, scale=1.0, accumulate=False, sumsq=torch.zeros(1))
assert ("triton" in sys.modules) == before
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=TESTS.parent, check=True)
