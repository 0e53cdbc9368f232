"""Each benchmark for machines with GPUs runs to its end on a CPU, and a part of gpu.sh that fails leaves the others.

No GPU has run them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a benchmark; its folder's modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_on_one_gpu_the_parts_limits_are_below_nine_minutes(script: Callable[[str], Any], tmp_path: Path) -> None:
    parts = script("gpu_parts").parts("cuda", 1, tmp_path, None)
    assert sum(part.limit_s for part in parts if part.absent is None or "sanitizer" in part.name) < 9 * 60 - 15


def test_a_part_that_fails_or_hangs_leaves_the_others(script: Callable[[str], Any], tmp_path: Path) -> None:
    gpu, pid = script("gpu_parts"), tmp_path / "child"
    hangs = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open({str(pid)!r}, "w").write(str(child.pid))
time.sleep(1000)
"""
    parts = [
        gpu.Part(name, [sys.executable, "-c", code, str(tmp_path / name)], limit_s)
        for name, code, limit_s in (
            ("hangs", hangs, 5.0),
            ("fails", "raise SystemExit('no')", 60.0),
            ("absent", "raise SystemExit(3)", 60.0),
            ("right", "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}'); print('fine')", 60.0),
        )
    ]
    outcomes = [gpu.run(part) for part in parts]
    assert [each.status for each in outcomes] == ["timed out", "failed", "absent", "ok"]
    assert (outcomes[3].note, outcomes[3].result) == ("fine", {"a": 1})
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid.read_text()}/cmdline").exists() and Path(f"/proc/{pid.read_text()}/cmdline").read_text():
        assert time.monotonic() < deadline, "a process of the part that hung lives on"
        time.sleep(0.02)


def test_a_wrong_kernel_is_seen(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose bits differ between calls, one that is off elsewhere than in the first call, a large buffer's end."""
    check = script("gpu_check")
    plain, calls, wrong_calls = check.k.reduce, list[int](), set[int]()

    def wrong(rows: torch.Tensor, merges: Any, out: torch.Tensor, **more: Any) -> None:
        plain(rows, merges, out, **more)
        calls.append(1)
        out[-1] += 0.5 * (len(calls) in wrong_calls)

    monkeypatch.setattr(check.k, "reduce", wrong)
    for numbers, said in (((), None), ((1, 3), "is off by"), ((1,), "different bits")):
        calls.clear()
        wrong_calls.clear()
        wrong_calls.update(numbers)
        found = check.check(lambda *to: check.reduce(*to, 3, 5000, torch.float32), CPU)
        assert found is None if said is None else said in found
    calls.clear()
    assert check.large_reduce(CPU, 50_037) is not None
    first, middle, last = check.windows(check.LARGE)
    assert first.start == 0 and last.stop == check.LARGE and middle.start < 2**31 < middle.stop == last.start


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "arguments", "last"),
    [
        ("gpu_check", ["--small"], "35 of 35 checks passed"),
        ("gpu_check", ["--large", "70037"], "5 of 5 checks passed"),
        ("step", ["--workers", "1", "--micro-batches", "2", "--rounds", "3", "--steps", "1"], "local-noise-scale"),
        ("gpu_ranks", [], "6 of 6 transports give what one worker gives"),
        ("gpu_elastic", [], "5 of 5 jobs end with one worker's parameters"),
        ("gpu_state", ["--parameters", "2e6"], "2 M parameters: regroup"),
        ("kernels", ["--sizes", "1", "--kernels", "reduce2,sgd", "--peers", "eager,torch", "--rounds", "3"], ""),
    ],
)
def test_a_part_runs_on_a_cpu(name: str, arguments: list[str], last: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--device", "cpu", *arguments, "--json", str(path)]
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last in done.stdout.splitlines()[-1]
    assert json.loads(path.read_text())
