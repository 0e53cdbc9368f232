"""Each benchmark runs to its end on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import is_alive, wait_until

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
Script = Callable[[str], Any]
STEPS = "local,local-noise-scale,ddp,allreduce-no-stats,reproducible"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Imports a benchmark; its folder's modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def run(folder: Path, name: str, *arguments: str) -> tuple[Any, list[str]]:
    """What the script writes with --json, and the lines that it prints."""
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json", str(folder / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text()), done.stdout.splitlines()


@pytest.mark.full
def test_every_variant_trains_alike_and_sends_what_the_model_says(tmp_path: Path, script: Script) -> None:
    """It ends with status 1 where a variant's losses are not DDP's. ZeRO broadcasts parameters beside the gradients."""
    compared = "local,ddp,zero,fsdp,kfuse-alone,allreduce,allreduce-no-stats,sharded"
    [size] = run(tmp_path, "comm", "--rounds", "2", "--megabytes", "1", "--variants", compared)[0]["sizes"]
    assert {"allreduce / allreduce-no-stats", "sharded / zero"} < {*size["pairs"]}
    if script("links").allowed():  # else the interface counts other processes' bytes too
        sent = {name: variant["bytes_a_parameter"] for name, variant in size["variants"].items()}
        assert sent["allreduce"] == pytest.approx(4.0, rel=0.1)
        assert sent["zero"] == pytest.approx(6.0, rel=0.1)
        assert sent["kfuse-alone"] < 0.1
    without = {name for name, variant in size["variants"].items() if variant["over_alone_ms"] is None}
    assert without == {name for name in size["variants"] if "sharded" in name} | {"zero", "fsdp"}
    assert [size["variants"][name]["over_alone_ms"] for name in ("local", "kfuse-alone")] == [0.0, 0.0], "its own base"


def test_a_part_that_fails_or_hangs_leaves_the_others(script: Script, tmp_path: Path) -> None:
    gpu, pid = script("gpu_parts"), tmp_path / "pid"
    right = """import sys; open(sys.argv[1], 'w').write('{"a": 1}'); print('fine')"""
    parts = [
        gpu.Part("hangs", ["sh", "-c", f"sleep 1000 & echo $! > {pid}; wait"], 1.0),
        *(
            gpu.Part(name, [sys.executable, "-c", code, str(tmp_path / name)], 60.0)
            for name, code in (("fails", "raise SystemExit('no')"), ("absent", "raise SystemExit(3)"), ("right", right))
        ),
    ]
    outcomes = [gpu.run(part, "cuda") for part in parts]
    assert [each.status for each in outcomes] == ["timed out", "failed", "absent", "ok"]
    assert (outcomes[3].note, outcomes[3].result) == ("fine", {"a": 1})
    assert [row["verdict"] for each in outcomes for row in each.rows.values()] == ["miss", "miss", "accept"]
    wait_until("the end of the part that hung", lambda: not is_alive(int(pid.read_text())))


def test_a_wrong_kernel_is_seen(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
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
        found = check.check(lambda *to: check.checks.reduce(*to, 3, 5000, torch.float32), CPU)
        assert found is None if said is None else said in found
    calls.clear()
    assert check.check_large("reduce", CPU, 50_037) is not None
    first, middle, last = check.windows(check.LARGE)
    assert first.start == 0 and last.stop == check.LARGE and middle.start < 2**31 < middle.stop == last.start


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "arguments", "last"),
    [
        ("gpu_check", "--device cpu --small", "47 of 47 checks passed"),
        ("step", f"--workers 1 --micro-batches 2 --samples 1 --rounds 3 --steps 1 --variants {STEPS}", ""),
        ("gpu_ranks", "--device cpu", "9 of 9 transports give what one worker gives"),
        ("gpu_state", "--device cpu --parameters 2e5", "0 M parameters: regroup"),
        ("kernels", "--device cpu --graphs --sizes 1 --kernels pack,reduce33 --rounds 3", ""),
        ("kernels", "--device cpu --sizes 1 --kernels reduce4,clip+adamw,sgd --peers eager,torch --rounds 3", ""),
        ("time_to_accuracy", "--problems quadratic --seeds 1 --part 0.03", ""),
    ],
)
def test_a_benchmark_runs_on_a_cpu(name: str, arguments: str, last: str, tmp_path: Path) -> None:
    record, said = run(tmp_path, name, *arguments.split())
    assert record and last in said[-1]


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize("part", [["steps beside torch"], ["steps beside DDP", "--two"]])
def test_gpu_sh_is_rehearsed(part: list[str], script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as gpu_parts sets it
    monkeypatch.setattr(sys, "argv", ["gpu_parts", "--device", "cpu", "--out", str(tmp_path), "--only", *part])
    assert script("gpu_parts").main() == 0


@pytest.mark.full
@pytest.mark.jobs
def test_an_elastic_job_for_gpus_runs_on_a_cpu(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_elastic, name = script("gpu_elastic"), "SIGKILL while a group forms"
    monkeypatch.setattr(gpu_elastic, "JOBS", {name: gpu_elastic.JOBS[name]})
    monkeypatch.setattr(sys, "argv", ["gpu_elastic", "--device", "cpu"])
    assert gpu_elastic.main() == 0


@pytest.mark.full
@pytest.mark.jobs
def test_a_supervisor_of_stand_ins_goes_through_all_phases(tmp_path: Path) -> None:
    result = run(tmp_path, "control_plane", "--sizes", "4", "--rounds", "1")[0]["sizes"]["4"]
    assert (result["failures"], len(result["phases"])) == (1 + 2 + 2, 6)
    assert all(phase["views"] >= 1 and phase["cpu_s"] > 0 for phase in result["phases"].values())


def test_the_elastic_benchmarks_log_tells_what_the_final_model_is_of(script: Script, tmp_path: Path) -> None:
    """An epoch of 28 steps of 64: one worker is lost before its line, a step is rolled back, a batch is cut in half."""
    log = script("elastic_log")
    clock = iter(range(10**6))

    def line(pid: int, step: int, workers: int, samples: Sequence[int] = ()) -> str:
        return json.dumps([next(clock) * 10**9, pid, step, workers, 0, 0, list(samples)]) + "\n"

    def part(step: int, which: int) -> range:
        return range(64 * (step - 1) + 32 * which, 64 * (step - 1) + 32 * (which + 1))

    lines = []
    for step in range(1, 29):
        lines += [line(pid, step, 0, part(step, which)) for which, pid in enumerate((11, 12))]
        lines += [line(11, step, 2)] + ([line(12, step, 2)] if step != 5 else [])
        if step == 9:  # both end; others go back to step 8, with the same samples
            for again in (8, 9):
                lines += [line(pid, again, 0, part(again, which)) for which, pid in enumerate((21, 22))]
                lines += [line(pid, again, 2) for pid in (21, 22)]
        if step == 20:  # again, by one alone, with half of the samples, of which one was used in step 1
            lines += [line(11, step, 0, [0, *part(step, 0)[1:]]), line(11, step, 1)]
    (tmp_path / "log").write_text("".join(lines))
    reader = log.Reader(tmp_path / "log")
    reader.update()
    assert log.contents(reader, 1) == log.Contents(planned=1792, lost=33, twice=1, steps=28, drifted=1)
    until = [each for each in reader.done if each.step <= 9]
    going_on = next(each for each in until if each.pid == 21)
    assert log.made_again(until, going_on) == 2


def test_a_survivors_own_update_is_not_one_that_was_made_again(script: Script) -> None:
    log = script("elastic_log")

    def done(time: float, pid: int, step: int, workers: int) -> Any:
        return log.Line(time, pid, step, workers, 0, 0, ())

    both = [done(step + pid / 100, pid, step, 2) for step in (1, 2, 3) for pid in (1, 2)]
    later = [done(step, 1, step, 1) for step in range(4, 20)]
    assert log.made_again([*both, *later], later[0]) == 0, "2 is dead, 1 has made the same updates"
    redone = done(3.5, 1, 3, 1)
    assert log.made_again([*both[:4], both[5], redone, *later], redone) == 1, "only 2 had completed step 3"


@pytest.mark.full
@pytest.mark.jobs
def test_the_elastic_benchmark_strikes_a_job(tmp_path: Path) -> None:
    strike = "--rounds 1 --kills 1 --notices 0 --every 0.5 --epochs 20 --systems kfuse-reproducible"
    figures = run(tmp_path, "elastic", *strike.split())[0]["figures"]["kfuse-reproducible"]
    assert figures["kills"] == 1
    assert figures["samples lost, %"] == figures["samples done twice, %"] == figures["steps with another batch, %"] == 0
    assert figures["samples lost or done twice, undisturbed"] == figures["largest difference of a parameter"] == 0
