"""The kernel benchmark uses the real models, notices a wrong result, and refuses wrong arguments."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.full


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernels_cases
    import kernels_shapes

    return {"cases": kernels_cases, "shapes": kernels_shapes}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_models_have_their_published_numbers_of_parameters(modules: dict[str, Any]) -> None:
    resnet, gpt2 = modules["shapes"].resnet50(), modules["shapes"].gpt2()
    assert (len(resnet.shapes), sum(resnet.numels)) == (161, 25_557_032)
    assert (len(gpt2.shapes), sum(gpt2.numels)) == (148, 124_439_808)


@pytest.mark.parametrize("kernel", ["pack", "accumulate", "reduce4", "block_sumsq", "adamw", "clip+adamw", "sgd"])
def test_every_contestant_gives_what_is_expected(kernel: str, modules: dict[str, Any]) -> None:
    layout = modules["shapes"].Layout("some", ((3, 50), (4096,), (7,)))
    case = modules["cases"].CASES[kernel](layout, torch.float32, torch.device("cpu"))
    for name in set(case.runs) - {"compile"}:  # compiling takes long; the script checks it each time
        buffers = case.make()
        expected = case.expected(buffers)
        case.runs[name](buffers)
        for key, value in expected.items():
            actual = modules["cases"].ends(buffers[key])
            torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    what = ["--sizes", "1", "--kernels", "reduce2,sgd", "--peers", "eager,torch"]
    done = run(*what, "--rounds", "3", "--block-ms", "1", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert [(r["kernel"], r["bytes"]) for r in record["results"]] == [("reduce2", 3 * 2**20), ("sgd", 5 * 2**20)]
    for number, result in enumerate(record["results"]):
        (line,) = [
            line for line in done.stderr.splitlines() if line.startswith(f"[{number + 1}/2] {result['kernel']} ")
        ]
        assert f"{result['summary']['kfuse']['gb_per_s']:.1f} GB/s" in line and "of torch's time" in line
        assert set(result["us_by_round"]) == {"copy", "kfuse", "eager", "torch"} and not result["wrong"]
        assert all(len(times) == 3 for times in result["us_by_round"].values())


def test_a_terminal_has_a_bar_and_each_result_as_it_comes() -> None:
    leader, follower = pty.openpty()
    what = ["--device", "cpu", "--threads", "1", "--sizes", "1", "--kernels", "reduce2,sgd", "--peers", "torch"]
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), *what, "--rounds", "3", "--block-ms", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env={**os.environ, "TERM": "xterm"}) as run:
        os.close(follower)
        shown = b""
        with suppress(OSError):  # at the end
            while part := os.read(leader, 4096):
                shown += part
        assert run.wait(60) == 0
    os.close(leader)
    assert b"reduce2 fp32 1 MB" in shown and "━".encode() in shown and b"0/2" in shown
    assert b"[1/2] reduce2 fp32 1 MB: " in shown and b"[2/2] sgd fp32 1 MB: " in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "big"], "'big' is neither a number of MB nor one of resnet50, gpt2"),
        (["--kernels", "pack,unpack"], "'unpack' is not one of pack, accumulate"),
        (["--full", "--sizes", "1"], "allowed is --full or --sizes"),
        (["--rounds", "1"], "--rounds must be 3 or more"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
