"""The soak, for 300 events: see `benchmarks/soak.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_jobs_that_are_struck_300_times_end_with_undisturbed_bits(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--events", "300", "--json", str(tmp_path / "soak.json")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2900, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
