"""The Triton code passes the kernels' own tests without a GPU, in processes where Triton interprets.

Triton decides at its import whether it interprets, and then for all of the process: hence other processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parent
GROUPS = [["updates", "pack"], ["sums", "norm", "orthogonal", "wire"]]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process"),
]


def test_triton_code_in_the_interpreter() -> None:
    """Two processes at a time."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    started = [
        subprocess.Popen(
            [*command, *(str(TESTS / f"test_kernels_{family}.py") for family in group)],
            env=environment,
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for group in GROUPS
    ]
    said = [process.communicate()[0] for process in started]
    failed = [text for process, text in zip(started, said, strict=True) if process.returncode != 0]
    if failed:
        pytest.fail("with TRITON_INTERPRET=1:\n" + "\n".join(failed), pytrace=False)
