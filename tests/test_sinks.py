"""Sinks beside the JSON lines: a CSV file through rewinds and kills, and services that fail or hang."""

from __future__ import annotations

import csv
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import kfuse as kf
from kfuse.cli import kfuse_run
from kfuse.observe.run_dir import RunDirectory
from kfuse.observe.sinks import services
from kfuse.settings.tree import ConfigError


def rows(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: json.loads(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def test_the_csv_file_has_each_step_once_and_new_columns(tmp_path: Path) -> None:
    """An evaluation comes before its step's figures and stays where they come again; a torn line is dropped."""
    for first, last in ((0, 4), (2, 6)):
        directory = RunDirectory(tmp_path, sinks=["csv"])
        directory.rewind(first)
        for step in range(first, last):
            if step == 3:
                directory.event({"kind": "evaluation", "step": 4, "accuracy": 1 / 3})
            directory.metrics({"step": step, "loss": first + 0.1, "figures": {"hits": step} if step > 2 else {}})
        directory.close()
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("7,0.")
    steps = [{"step": step, "train/loss": 0.1} for step in (0, 1)]
    again: list[dict[str, float]] = [{"step": step, "train/loss": 2.1} for step in range(2, 6)]
    for row in again[1:]:
        row["figures/hits"] = row["step"]
    directory = RunDirectory(tmp_path, sinks=["csv"])
    directory.rewind(6)
    assert rows(tmp_path / "metrics.csv") == [*steps, {"step": 4, "heldout/accuracy": 1 / 3}, *again]


def test_prometheus_reads_what_the_newest_line_of_the_records_says(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, sinks=["prometheus"])
    for step in range(3):
        known = {"loss": 0.5 / (1 + step), "samples": 8 * step, "noise_scale": 5.0 if step < 2 else None}
        directory.metrics({"step": step, **known, "grad_norm": float("nan")})
    directory.event({"kind": "evaluation", "step": 3, "accuracy": 0.75})
    directory.close()
    families = text_string_to_metric_families((tmp_path / "metrics.prom").read_text())
    found = {each.name: each.value for family in families for each in family.samples}
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()][-1]
    assert (found["kfuse_train_loss"], found["kfuse_train_samples"]) == (last["loss"], last["samples"])
    assert (found["kfuse_step"], found["kfuse_heldout_accuracy"]) == (last["step"] + 1, 0.75)
    assert math.isnan(found["kfuse_train_noise_scale"]), "it was known, and is not now"
    assert "kfuse_train_grad_norm" not in found and found["kfuse_written"] > 1e9


def test_scripts_and_kfuse_run_name_sinks_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(*sinks: str) -> None:
        net = torch.nn.Linear(2, 2)
        data, opt = (torch.ones(64, 2), torch.zeros(64, dtype=torch.int64)), kf.FusedSGD(net.parameters(), lr=0.1)
        kf.fit(net, data, opt, epochs=1, run_dir=tmp_path / "run", observe_sinks=sinks)

    with pytest.raises(ConfigError, match="observe_sinks: wandb is not installed: pip install"):
        train("csv", "wandb")
    train("csv")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["train/loss"] for row in rows(tmp_path / "run" / "metrics.csv")] == [each["loss"] for each in records]
    assert not (tmp_path / "run" / "tb").exists()
    with pytest.raises(SystemExit, match="2"):
        kfuse_run.main(["--observe-sinks", "csv,wandb", __file__])
    assert "error: --observe-sinks: wandb is not installed" in capsys.readouterr().err


class Fake:
    """A service that keeps what it gets, and hangs or fails where a test says so."""

    got: Sequence[services.Row] = ()
    hangs = threading.Event()

    def __init__(self, about: services.About, run: Any) -> None:
        Fake.got = []
        if about.settings.get("fails"):
            raise RuntimeError("no such project\nand more")

    def log(self, rows: Sequence[services.Row]) -> None:
        self.hangs.wait()
        Fake.got = [*Fake.got, *rows]

    def finish(self, summary: Mapping[str, Any]) -> None:
        Fake.got = [*Fake.got, (-1, dict(summary))]


def test_a_service_that_hangs_or_fails_delays_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(services.SERVICES, "wandb", Fake)
    said: list[str] = []

    def run(name: str, **settings: Any) -> None:
        directory = RunDirectory(tmp_path / name, sinks=["wandb"], warn=said.append, settings=settings)
        for step in range(3):
            directory.metrics({"step": step, "loss": 0.5})
        directory.summary({"steps": 3})
        directory.close()

    run("failing", fails=True)
    assert said == ["kfuse: warning: wandb: no more is written: no such project"]
    monkeypatch.setattr(services, "_CLOSES_WITHIN_S", 0.1)
    run("hanging")
    assert said[1:] == ["kfuse: warning: wandb: no more is written: too slow: not all was sent within 0 s of the end"]
    Fake.hangs.set()
    monkeypatch.setattr(services, "_CLOSES_WITHIN_S", 60.0)
    run("well")
    assert len(said) == 2
    assert [*Fake.got] == [*((step, {"train/loss": 0.5}) for step in range(3)), (-1, {"steps": 3})]
