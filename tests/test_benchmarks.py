"""Each benchmark runs to its end on a CPU, and its figures follow from its measurements, and agree where two must.

No GPU has run those for machines with GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kfuse.comm.group import Pending
from kfuse.comm.sum_tree import aligned_ranges, bound, bytes_a_parameter, plan_range
from kfuse.models import MLP
from kfuse.tools.plan.jobs import forecast

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
PADDING = 0.15  # bytes a parameter: the tail, tables of chunks, and shards that are not all of one size
Script = Callable[[str], Any]


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
    [size] = run(tmp_path, "comm", "--rounds", "2", "--megabytes", "1")[0]["sizes"]
    assert {"ddp", "zero", "fsdp2", "allreduce", "sharded", "auto"} < {*size["variants"]}
    assert {"allreduce / allreduce-no-stats", "sharded / zero"} < {*size["pairs"]}
    if script("links").allowed():  # else the interface counts other processes' bytes too
        sent = {name: variant["bytes_a_parameter"] for name, variant in size["variants"].items()}
        assert sent["allreduce"] == pytest.approx(4.0, rel=0.1)
        assert sent["all_to_all"] == pytest.approx(4.0, rel=0.1)
        assert sent["zero"] == pytest.approx(6.0, rel=0.1)
        assert sent["kfuse-alone"] < 0.1
    without = {name for name, variant in size["variants"].items() if variant["exposed_ms"] is None}
    assert without == {name for name in size["variants"] if "sharded" in name} | {"zero", "fsdp2"}
    own = [size["variants"][name]["exposed_ms"] for name in ("local", "kfuse-alone", "kfuse-alone-no-stats")]
    assert own == [0.0, 0.0, 0.0], "each is its own base"


def test_a_slow_pair_has_a_cable_of_its_own(script: Script) -> None:
    if not script("links").allowed():
        return
    with script("links").links(3, "200mbit", {(0, 2): "20mbit"}) as places:
        way = ["ip", "-n", places[0].namespace, "route", "get"]
        to = {rank: subprocess.check_output([*way, places[rank].address], text=True) for rank in (1, 2)}
        assert "dev eth0" in to[1]
        assert "dev slow2" in to[2]
        for here, interface, rate in ((0, "eth0", "200Mbit"), (0, "slow2", "20Mbit"), (2, "slow0", "20Mbit")):
            shaped = ["tc", "-n", places[here].namespace, "qdisc", "show", "dev", interface]
            assert f"rate {rate} " in subprocess.check_output(shaped, text=True)


ELASTIC = json.loads((BENCHMARKS / "results" / "elastic.json").read_text())


@pytest.mark.parametrize("name", ELASTIC["measured"])
def test_committed_figures_are_those_of_the_measurements(name: str, script: Script) -> None:
    report = script("elastic_report")
    measured: dict[str, Any] = ELASTIC["measured"][name]
    episodes = [report.Episode(**episode) for episode in measured["episodes"]]
    figures = report.summarize(SimpleNamespace(**{**measured, "episodes": episodes}), back_s=60.0)  # type: ignore[arg-type]
    assert figures == ELASTIC["figures"][name]
    samples, seconds = sum(e.samples for e in episodes), sum(e.seconds for e in episodes)
    assert figures["samples a second, under kills"] == pytest.approx(samples / seconds)


def test_on_one_gpu_the_parts_limits_are_below_nine_minutes(script: Script, tmp_path: Path) -> None:
    parts = script("gpu_parts").parts("cuda", 1, tmp_path)
    assert sum(part.limit_s for part in parts if part.absent is None or "sanitizer" in part.name) < 9 * 60 - 15


def test_a_part_that_fails_or_hangs_leaves_the_others(script: Script, tmp_path: Path) -> None:
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
    record, said = run(tmp_path, name, "--device", "cpu", *arguments)
    assert record and last in said[-1]


@pytest.mark.full
def test_every_contestant_gives_what_is_expected(script: Script) -> None:
    kernels_cases, kernels_shapes = script("kernels_cases"), script("kernels_shapes")
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


def expected(ranges: Sequence[range]) -> float:
    """By the formula. Two workers on CPUs do not copy their own contributions to their shard."""
    if len(ranges) > 2:
        return bytes_a_parameter(ranges)
    plans = [plan_range(r.start, len(r), ranges[-1].stop) for r in ranges]
    return bytes_a_parameter(ranges) - 4 * len(max(plans, key=lambda plan: plan.slots).pieces) / 2


@pytest.mark.parametrize(("total", "workers"), [(7, 2), (20, 3), (13, 8)])
def test_a_worker_holds_what_the_formula_says(script: Script, total: int, workers: int) -> None:
    row = script("memory").reproducible(workers, total)
    assert row["counted"] == pytest.approx(expected(aligned_ranges(total, workers)), abs=PADDING)
    assert row["counted"] <= bound(total, workers) + PADDING


def test_buckets_share_their_receive_buffers(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are messages under way: the rows of two of the four buckets, or those of one."""
    memory = script("memory")
    monkeypatch.setattr(memory, "TENSORS", 4)
    ranges = aligned_ranges(40, 4)
    rows = 4 * sum(len(plan_range(r.start, len(r), 40).pieces) for r in ranges) / 4
    slow, quick = (memory.measure(memory.REPRODUCIBLE, ranges, 0, message) for message in (memory.Slow, Pending))
    assert slow - quick == pytest.approx(1 / 4 * rows, abs=PADDING)


@pytest.mark.full
def test_other_transports_hold_one_gradient_and_their_messages(script: Script) -> None:
    memory = script("memory")
    row = memory.without_order(2)
    assert row["allreduce"] == pytest.approx(16, abs=PADDING)
    assert row["allreduce, bf16 wire"] == pytest.approx(18, abs=PADDING)
    assert row["all_to_all"] == pytest.approx(16 + 2, abs=PADDING)  # and what is received for half of them
    assert row["all_to_all, bf16 wire"] == pytest.approx(18 + 1, abs=PADDING)
    assert row["sharded"] == pytest.approx(8 + 2 + 8 / 2, abs=PADDING)  # parameter, gradient, received; moments
    row = memory.without_order(3)
    assert row["all_to_all"] == pytest.approx(20, abs=PADDING)
    assert row["all_to_all, bf16 wire"] == pytest.approx(20, abs=PADDING)
    assert row["sharded"] == pytest.approx(12 + 8 / 3, abs=2 * PADDING)  # whole blocks


def test_the_stored_table_is_of_this_code() -> None:
    """If it is not: python benchmarks/memory.py --json benchmarks/results/memory.json, and the table in docs/gpu.md."""
    stored = json.loads((BENCHMARKS / "results" / "memory.json").read_text())
    assert {row["workers"] for row in stored["reproducible"]} == {2, 3, 4, 8, 16, 32, 64}
    for row in stored["reproducible"]:
        ranges = aligned_ranges(row["micro_batches"], row["workers"])
        assert row["formula"] == pytest.approx(bytes_a_parameter(ranges))
        assert row["counted"] == pytest.approx(expected(ranges), abs=PADDING)
        assert row["load"] == pytest.approx(max(map(len, ranges)) * row["workers"] / row["micro_batches"])
        assert row["formula"] <= row["bound"] == bound(row["micro_batches"], row["workers"])
    for row in stored["without_order"]:
        assert row["allreduce"] == pytest.approx(16, abs=PADDING)
        received = 4 if row["workers"] > 2 else 2
        assert row["sharded"] == pytest.approx(8 + received + 8 / row["workers"], abs=2 * PADDING)  # whole blocks


@pytest.mark.full
def test_time_to_accuracy_trains_kfuse_and_ddp_alike_at_the_small_batch(tmp_path: Path) -> None:
    systems = ["fixed", "ddp-small", "gns", "goodput", "seesaw", "adascale", "linear"]
    arguments = ["--problems", "quadratic", "--systems", *systems, "--seeds", "1", "--part", "0.03"]
    record = run(tmp_path, "time_to_accuracy", *arguments)[0]
    curves = {run["system"]: run["curve"] for run in record["runs"]}
    assert set(curves) == {*systems, "ddp-best"}
    assert len({curve[-1][0] for curve in curves.values()}) == 1  # all use the same samples
    rows = [[row[:2] + row[3:] for row in curves[name]] for name in ("fixed", "ddp-small")]
    assert np.array(rows[0]) == pytest.approx(np.array(rows[1]), rel=1e-4)
    assert curves["adascale"][-1][1] < curves["fixed"][-1][1] / 4  # steps
    assert record["figures"]["quadratic"]["fixed"]["steps / fixed"]["median"] == 1.0


@pytest.mark.full
def test_noise_quality_has_the_optimizers_estimate_of_the_same_gradients(script: Script, tmp_path: Path) -> None:
    """What kfuse's engine measured agrees with the estimator that got the products of samples' gradients."""
    noise_quality = script("noise_quality")
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(2))
    tiny = noise_quality.Problem("tiny", "rows", lambda: MLP((6,), 3, (8,)), x, x[:, :3].argmax(1), batch=64, runs=1)
    found = noise_quality.train(tiny, seed=0, steps=76, every=4)
    pairs = zip(found.course["kfuse"], found.course["kfuse, M = 8"], strict=True)
    shown = [(a, b) for a, b in pairs if a.low is not None]
    assert shown
    for ours, same in shown:
        assert (ours.noise_scale, ours.low, ours.high) == pytest.approx(
            (same.noise_scale, same.low, same.high), rel=1e-3
        )
    assert run(tmp_path, "noise_quality", "--problems", "digits", "--runs", "1", "--steps", "41", "--every", "20")


def test_seesaw_runs(tmp_path: Path) -> None:
    assert run(tmp_path, "seesaw", "--samples", "65536", "--batch-sizes", "64")


def test_the_planner_without_pauses_and_arrivals_is_the_forecast(script: Script) -> None:
    plan = script("plan")
    trace = [plan.Arrival(0.0, each.samples, each.options) for each in plan.draw(12, 16, 1.0, 0)]
    outcome = plan.simulate(trace, 16, "planner", pause_s=0.0)
    ends, worker_seconds = forecast([each.options for each in trace], [each.samples for each in trace], 16)
    assert outcome.ends == pytest.approx(np.array(ends), rel=1e-9)
    assert outcome.worker_hours * 3600 == pytest.approx(worker_seconds, rel=1e-9)
    for rule in ("static", "fifo"):
        assert (plan.simulate(plan.draw(40, 16, 1.2, 3), 16, rule).completion > 0).all()
