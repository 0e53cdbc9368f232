"""`kfuse plan`: what it reads, what it prints, and one clear line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kfuse.cli.app import main
from kfuse.settings.tree import ConfigError
from kfuse.statistics.figures import METRICS
from kfuse.tools.plan.command import read
from kfuse.tools.plan.jobs import LinearStepTime, share

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

GOOD = """
- name: resnet
  samples_left: 60e6
  base_batch: 256
  batch: [256, 8192]
  micro: 32
  noise_scale: [1600, 2500]
  throughput: {1: 410, 2: 790, 4: 1480, 8: 2600}
- name: gpt
  samples_left: 4000000
  base_batch: 64
  noise_scale: null
  workers: [4, 16]
  step_time: [0.02, 0.031, 0.004]
"""
JOB = {"name": "a", "samples_left": 1000, "base_batch": 32, "step_time": [0.1, 0.01, 0.0], "workers": [1, 4]}
POINTS = {key: value for key, value in JOB.items() if key not in ("step_time", "workers")}

# Changes of JOB (None: without the key), and what the error must say: each key once, and what no key alone tells.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"samples_left": 0}, "samples_left=0: must be a number, numbers above 0"),
    ({"samples_left": None}, "samples_left=null: must be given"),
    ({"base_batch": 64, "batch": [8, 32]}, "base_batch=64: must be within batch=[8, 32]"),
    ({"micro": 64}, "workers=[1, 4]: none of them fits workers=8, batch=[32, 32] and 64 samples each"),
    ({"workers": [0, 4]}, "workers=[0, 4]: must be a list of 2"),
    ({"step_time": [0.1, 0, 0]}, "step_time=[0.1, 0, 0]: must be a list of 3"),
    ({"step_time": None}, "must have one of run, throughput, step_time"),
    ({"throughput": {0: 3}, "step_time": None}, "throughput={0: 3}: must be a mapping"),
    ({"run": "nowhere", "step_time": None}, "run=nowhere: must be a run directory of `kfuse`: nowhere/.hydra/config"),
    ({"noise": 3}, "noise: no such key (did you mean noise_scale?); a job has name, run, samples_left"),
]


def write(folder: Path, text: str) -> str:
    path = folder / "jobs.yaml"
    path.write_text(text)
    return str(path)


def as_yaml(folder: Path, job: dict[str, Any]) -> str:
    return write(folder, "- " + str(job).replace("'", "").replace("None", "null"))


def kfuse(capsys: Capsys, monkeypatch: Patch, *words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of `kfuse plan`, in this process."""
    monkeypatch.setattr(sys, "argv", ["kfuse", "plan", *words])
    monkeypatch.setenv("COLUMNS", "140")
    status = main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_wrong_job_is_refused_in_one_line(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    for changes, said in WRONG:
        given = {key: value for key, value in {**JOB, **changes}.items() if value is not None}
        path = as_yaml(tmp_path, given)
        status, out, err = kfuse(capsys, monkeypatch, path, "workers=8")
        assert (status, out) == (2, "")
        assert err.startswith(f"kfuse: error: {path}: job a: ") and err.count("\n") == 1 and said in err
    status, _, err = kfuse(capsys, monkeypatch, path, "workers=0")
    assert status == 2 and "must be one file of jobs and workers=N" in err


def test_the_table_by_hand(tmp_path: Path, capsys: Capsys, monkeypatch: Patch) -> None:
    """Two jobs of at most two workers on four: t = 0.1 + 0.01 * 30 / 2 = 0.25 s, 120 samples/s on two; 75 on one."""
    text = """
- {name: long, samples_left: 864000, base_batch: 30, workers: [1, 2], step_time: [0.1, 0.01, 0]}
- {name: short, samples_left: 432000, base_batch: 30, workers: [1, 2], step_time: [0.1, 0.01, 0]}
"""
    status, out, err = kfuse(capsys, monkeypatch, write(tmp_path, text), "workers=5")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    # 864000 samples at 120 a second: 2 hours, 4 worker-hours. The other one half of that, so it comes first.
    assert ["short", "2", "30", "1", "1", "to", "1", "2", "1", "h"] in lines
    assert ["long", "2", "30", "2", "2", "to", "2", "4", "2", "h"] in lines
    assert out.index("short") < out.index("long")
    assert "4 of 5 workers have a job, 1 are released" in out
    assert "is done in 2 h with 6 worker-hours; released workers save 4" in out
    assert "short: the noise scale is unknown: the batch size stays at 30" in out
    # On one worker the long one waits, as long as the short one takes: 432000 / 75 s.
    status, out, _ = kfuse(capsys, monkeypatch, write(tmp_path, text), "workers=1")
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["short", "1", "30", "1.6", "1.6", "to", "1.6", "1.6", "1.6", "h"] in lines
    assert ["long", "waits", "for", "1", "30", "3.2", "3.2", "to", "3.2", "3.2", "4.8", "h"] in lines


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    (resnet, gpt), notes = read(write(tmp_path, GOOD))
    assert (resnet.name, resnet.samples_left, resnet.base_batch, resnet.batch) == ("resnet", 60e6, 256, (256, 8192))
    assert (resnet.micro, resnet.workers, resnet.noise_scale) == (32, (1, 8), (1600, 2000, 2500))
    assert resnet.step_time is not None and resnet.spread[0] <= 1 <= resnet.spread[1]
    for workers, speed in ((1, 410), (2, 790), (4, 1480), (8, 2600)):
        assert 256 / resnet.step_time(workers, 256 // workers) == pytest.approx(speed, rel=0.02)
    assert (gpt.batch, gpt.micro, gpt.workers, gpt.noise_scale) == ((64, 64), 1, (4, 16), None)
    assert gpt.step_time == LinearStepTime(0.02, 0.031, 0.004) and gpt.spread == (1, 1)
    assert notes == ["gpt: the noise scale is unknown: the batch size stays at 64"]


def test_what_was_not_measured_is_not_planned(tmp_path: Path) -> None:
    given = POINTS | {"workers": [1, 16], "noise_scale": [20, 40]}
    (job,), notes = read(as_yaml(tmp_path, given | {"throughput": {2: 100, 4: 150}}))
    assert job.workers == (2, 4) and job.step_time is None
    assert [(option.workers, option.batch) for option in job.options(range(1, 17))] == [(2, 32), (4, 32)]
    assert notes == ["a: only (workers, batch) [(2, 32), (4, 32)] were measured: no others are planned"]
    (job,), notes = read(as_yaml(tmp_path, given | {"throughput": {2: 100, 3: 130, 4: 150}}))
    assert job.workers == (2, 4) and job.step_time is not None
    assert notes == ["a: only 2 to 4 workers were measured: no others are planned"]


# --- run directories ---

CONFIG = """
batch: {size: 32, micro: 8, min: 8, max: 256}
workers: {count: 1, min: 1, max: 4}
"""
MODEL = LinearStepTime(0.01, 0.001, 0.002)


def run_directory(folder: Path, settings: list[tuple[int, int]], total: int | None = 9600, **last: Any) -> Path:
    """A run of so many samples, epochs of 960, and ten steps for each setting (workers, batch), a tenth of them slow.

    total: None: neither train.epochs nor train.steps is set.
    """
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(CONFIG)
    lines, samples = [], 0
    for k, (workers, batch) in enumerate(each for each in settings for _ in range(10)):
        epoch = samples // 960
        samples += batch
        seconds = MODEL(workers, share(workers, batch, 8)) * (3 if k % 10 == 0 else 1)
        figures = {"step": k, "epoch": epoch, "samples": samples, "batch_size": batch, "workers": workers}
        figures |= {"micro_batches": -(-batch // 8), "step_time_s": seconds}
        done = None if total is None else min(samples / total, 1.0)
        lines.append({**dict.fromkeys(METRICS), **figures, "signals": {"done": done}})
    lines[-1].update(last)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + text[:50])  # the run writes its next line
    return folder


NOISE = {"noise_scale_low": 50.0, "noise_scale": 80.0, "noise_scale_high": 100.0}


def test_a_run_directory_tells_its_job(tmp_path: Path) -> None:
    """Three settings, 960 samples of each, of 9600 in all."""
    settings = [(1, 96), (2, 96), (4, 96)]
    run = run_directory(tmp_path / "run", settings, **NOISE)
    (job,), notes = read(write(tmp_path, f"- run: {run}"))
    assert (job.name, job.base_batch, job.batch, job.micro, job.workers) == (str(run), 32, (8, 256), 8, (1, 4))
    assert job.samples_left == pytest.approx(10 * 960 - 3 * 960)
    assert job.noise_scale == (50, 80, 100)
    assert job.step_time is not None and notes == []
    for workers, most in ((1, 96), (3, 64)):
        assert job.step_time(workers, most) == pytest.approx(MODEL(workers, most))
    assert job.spread[0] == pytest.approx(1) and 1 <= job.spread[1] <= 3
    # What the file gives goes before what the run tells.
    (job,), _ = read(
        write(tmp_path, f"- {{name: b, run: {run}, samples_left: 5, noise_scale: [1, 4], workers: [2, 3]}}")
    )
    assert (job.name, job.samples_left, job.noise_scale, job.workers) == ("b", 5, (1, 2, 4), (2, 3))


def test_a_run_that_tells_too_little(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "endless", [(1, 32)], total=None)
    with pytest.raises(ConfigError, match=r"samples_left=null: must be given; a run tells it until its end, where tr"):
        read(write(tmp_path, f"- run: {run}"))
    (job,), notes = read(write(tmp_path, f"- {{run: {run}, samples_left: 1000}}"))
    assert [(option.workers, option.batch) for option in job.options(range(1, 9))] == [(1, 32)]
    assert len(notes) == 2 and "noise scale is unknown" in notes[1]
    # The last line has no signals: they are those of the line before.
    run = run_directory(tmp_path / "same", [(1, 32)], signals={})
    assert read(write(tmp_path, f"- run: {run}"))[0][0].samples_left == pytest.approx(320 * (9600 - 288) / 288)
    run = run_directory(tmp_path / "done", [(1, 96)] * 10)
    with pytest.raises(ConfigError, match=r"samples_left=0\.0.*until its end"):
        read(write(tmp_path, f"- run: {run}"))


@pytest.mark.full
def test_the_samples_left_of_a_real_run_with_few_lines(tmp_path: Path) -> None:
    """In the middle of a run the samples left are those that it then uses."""
    words = (
        "batch.size=16 batch.micro=8 policy=schedule lr.scaling=adascale workers.max=1 workers.threads=1 train.epochs=2"
    )
    words += " workers.max=1 workers.threads=1 observe.progress=false observe.sinks=[]"
    phases, where = "policy.phases=[{step: 3, batch_size: 64}]", tmp_path / "run"
    command = [sys.executable, "-m", "kfuse", *words.split(), phases, f"hydra.run.dir={where}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = (where / "metrics.jsonl").read_text().splitlines(keepends=True)
    used, half = [json.loads(line)["samples"] for line in lines], len(lines) // 2
    assert len(lines) >= 4
    (where / "metrics.jsonl").write_text("".join(lines[: half + 1]))
    (job,), _ = read(write(tmp_path, f"- run: {where}"))
    assert job.samples_left == pytest.approx(used[-1] - used[half], rel=1e-9)
