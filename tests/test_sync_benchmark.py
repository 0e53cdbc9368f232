"""`benchmarks/synchronisation.py` runs, and counts an eighth of the bytes where models meet every eight steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.full
def test_outer_steps_send_an_eighth_of_the_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    variants = ["ssgd", "local:8", "local:8, outer 0.7, 0.5"]
    arguments = ["--seeds", "1", "--steps", "8", "--json", str(out), "--variants", *variants]
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    subprocess.run([sys.executable, str(BENCHMARKS / "synchronisation.py"), *arguments], env=env, check=True)
    runs = json.loads(out.read_text())["runs"]
    sent = {name: found[0]["bytes"] for name, found in runs.items()}
    parameters = runs["ssgd"][0]["parameters"]
    assert sent["ssgd"] == pytest.approx(8 * 4 * parameters, rel=0.01)
    assert sent["local:8, outer 0.7, 0.5"] == pytest.approx(sent["ssgd"] / 8, rel=0.01)
    assert sent["local:8"] == pytest.approx(3 * sent["ssgd"] / 8, rel=0.01)  # with both moments of AdamW
    assert all(found[0]["loss"] > 0 for found in runs.values())
