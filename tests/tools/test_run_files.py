"""What `kfuse replay`, `plan` and `cbs` say of a recorded run whose files are cut off or of another version."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_job import compose, override, read_lines
from omegaconf import OmegaConf

import kfuse as kf
from kfuse.cli.app import main
from kfuse.policies import SchedulePolicy
from kfuse.tools.ramp import ramp_of
from kfuse.tools.run_files import read_metrics

Capsys = pytest.CaptureFixture[str]

PHASES = [{"step": 60, "batch_size": 16, "lr_scale": 0.7}, {"step": 90, "batch_size": 8}]
CONFIG = ["policy=schedule", override("policy.phases", PHASES), "batch.size=8", "batch.micro=2", "lr.scaling=linear"]
CONFIG += ["lr.base=0.05", "train.epochs=16", "workers.max=1"]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose policy decides twice, with checkpoints."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("valid") / "run"
    net = torch.nn.Linear(6, 1)
    data, opt = (torch.randn(64, 6), torch.randn(64, 1)), kf.FusedSGD(net.parameters(), lr=0.05)
    settings: dict[str, Any] = {"batch_size": 8, "micro_batch": 2, "epochs": 16, "lr_scaling": "linear"}
    settings |= {"run_dir": folder, "checkpoint_dir": folder / "checkpoints", "checkpoint_every_steps": 50}
    kf.fit(net, data, opt, SchedulePolicy(PHASES), loss_fn=F.mse_loss, **settings)
    (folder / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(compose(CONFIG)), folder / ".hydra" / "config.yaml")
    return folder


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> Path:
    """A copy of its own for one test."""
    return Path(shutil.copytree(valid, tmp_path / "run"))


def kfuse(*words: object) -> int:
    """Exit status of the command line, in this process."""
    before, sys.argv = sys.argv, ["kfuse", *map(str, words)]
    try:
        return main()
    finally:
        sys.argv = before


def commands(run: Path, tmp_path: Path) -> dict[str, list[object]]:
    """The commands that read a run directory."""
    (tmp_path / "jobs.yaml").write_text(json.dumps([{"name": "a", "run": str(run), "samples_left": 1000}]))
    return {
        "replay": ["replay", run],
        "replay another policy": ["replay", run, "policy=gns"],
        "plan": ["plan", tmp_path / "jobs.yaml", "workers=2"],
        "ramp": ["ramp", run],
        "cbs": ["cbs", f"run={run}", "factors=[1,2]", "samples=128"],
    }


def change_lines(file: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = read_lines(file)
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(words: list[object], said: str, capsys: Capsys) -> None:
    """The command ends in one line that says it."""
    assert kfuse(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and captured.err.count("\n") == 1, captured


def test_the_valid_run_is_taken(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    given = commands(run, tmp_path)
    for name in ("replay", "replay another policy", "plan"):
        assert kfuse(*given[name]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "8 -> 16" in out and "GNSPolicy, predicted" in out, out
    assert [*read_metrics(run)] == read_lines(run / "metrics.jsonl")


def test_a_ramp_has_the_batch_sizes_that_stayed(run: Path, capsys: Capsys) -> None:
    """The run has gone from 8 to 16 samples a step and back to 8."""
    assert kfuse("ramp", run) == 0
    phases, rule = capsys.readouterr().out.splitlines()
    assert phases == 'kfuse:        policy=schedule policy.phases="0:8"'
    assert rule.startswith("lr.scaling=linear: the learning rate was multiplied by batch size / 8, beside"), rule
    change_lines(run / "metrics.jsonl", lambda lines: lines.__delitem__(slice(80, None)))  # it is 16 then
    assert kfuse("ramp", run, 4) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == 'Megatron-LM:  --step-batch-size-schedule "0:8 1920:16"'
    assert said[2].endswith("(batch_sizes=[32, 64], schedule=[Duration.tokens(0), Duration.tokens(1920)])")
    sizes = [16, 16, 32, 32, 16, 24, 24, 40, 64, 72]  # 32 was tried; from 64 to 72 it is an eighth
    steps = list(zip(accumulate(sizes), sizes, strict=True))
    assert ramp_of(steps) == [(0, 16), (112, 24), (160, 40), (200, 64)]
    for words, told in ((["ramp"], "must be given"), (["ramp", run, "x"], "whole number")):
        refused(words, told, capsys)
    change_lines(run / "metrics.jsonl", lambda lines: lines.__delitem__(0))
    refused(["ramp", run], "its first step is 1: must be a run from step 0 on", capsys)


def test_damaged_lines_are_refused_with_their_number(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    given = commands(run, tmp_path)
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for text in (b"garbage", b"[]", b"[" * 100_000, b"\xff\xfe"):
        file.write_bytes(b"".join([*lines[:1], text + b"\n", *lines[2:]]))
        refused(given["replay"], f"{file}: line 2 is damaged: it must be a JSON object", capsys)
    file.write_bytes(whole)
    change_lines(file, lambda lines: lines[4].pop("noise_scale_low"))
    refused(given["plan"], f"{file}: line 5: noise_scale_low: missing: another version of kfuse", capsys)
    file.write_bytes(b"")
    refused(given["replay"], "has no step yet", capsys)


def test_damaged_configurations_are_refused(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = run / ".hydra" / "config.yaml"
    text, given = file.read_text(), commands(run, tmp_path)
    for old, new, said, names in (
        (
            "  scaling: linear",
            "  scaling: abc",
            "lr.scaling=abc: must be one of none, linear, sqrt",
            ("replay", "cbs", "ramp"),
        ),
        ("policy:", "policy: null\nwas:", "policy._target_: missing: another version of kfuse", ("replay", "cbs")),
        ("batch:", "batch: 3\nwas:", "batch.size: missing: another version", ("plan",)),
        ("seed: 0", "seed: 0\nseed: 1", "cannot be read: ", given),
    ):
        assert f"\n{old}\n" in f"\n{text}"
        file.write_text(f"\n{text}".replace(f"\n{old}\n", f"\n{new}\n", 1)[1:])
        for name in names:
            refused(given[name], f"{file}: {said}", capsys)
    file.write_bytes(b"\xff")
    for words in given.values():
        refused(words, f"{file}: ", capsys)
