"""What Weights & Biases, MLflow, Trackio, a CSV file and TensorBoard have of a run is what metrics.jsonl has."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import trackio
import wandb
from elastic_job import Job, chaos, command_line, read_lines, words
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto.wandb_internal_pb2 import Record

import kfuse as kf

Figures = dict[tuple[str, int], float]  # by name and step
# What repeated steps may have another value of.
OF_THE_PROCESS = {"train/step_time_s", "train/data_wait_s", "train/data_bytes_per_s", "train/workers"}
SERVICES = "wandb,mlflow,trackio"
SMALL = words("model.hidden=[8] train.epochs=null batch.size=32 batch.micro=8 workers.threads=1 observe.progress=false")


@pytest.fixture(scope="module", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    with pytest.MonkeyPatch.context() as patch:
        uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/all.db"
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        yield MlflowClient(uri)


def once(found: Iterable[tuple[str, int, float]]) -> Figures:
    figures = {}
    for name, step, value in found:
        assert (name, step) not in figures
        figures[name, step] = value
    return figures


def of_records(records: Iterable[dict[str, Any]], group: str) -> Figures:
    """Those of an event or a line of metrics.jsonl."""
    return {
        (f"{group}/{name}", record["step"]): value
        for record in records
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }


def of_run(directory: Path) -> Figures:
    evaluations = [event for event in read_lines(directory / "events.jsonl") if event["kind"] == "evaluation"]
    return of_records(read_lines(directory / "metrics.jsonl"), "train") | of_records(evaluations, "heldout")


def wandb_records(folder: Path) -> Iterator[Record]:
    """Of offline runs: protobufs in the log format of LevelDB, after a header."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 2**15 - at % 2**15) < 7:
                at += left
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or a last part
                yield Record.FromString(record)
                record = b""


def of_wandb(folder: Path) -> Figures:
    found = []
    for record in wandb_records(folder):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found += [(name, row["step"], value) for name, value in row.items() if "/" in name]
    return once(found)


def of_mlflow(client: MlflowClient, run: Any) -> Figures:
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return once((point.key, point.step, point.value) for history in histories for point in history)


def of_trackio(name: str) -> Figures:
    found = []
    for row in SQLiteStorage.get_logs("kfuse", name):
        found += [(key, row["step"], value) for key, value in row.items() if "/" in key]
    return {key: value for key, value in once(found).items() if not key[0].startswith("summary/")}


def of_csv(path: Path) -> Figures:
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return once(
        (name, int(row["step"]), json.loads(v)) for row in rows for name, v in row.items() if v and name != "step"
    )


def of_tensorboard(folder: Path) -> Figures:
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return once((tag, event.step, event.value) for tag in board.Tags()["scalars"] for event in board.Scalars(tag))


def ids(folder: Path) -> tuple[str, str]:
    """A run's id, and its name in Trackio."""
    number = (folder / "run_id").read_text().split()[0]
    return number, f"{folder.parent.name}/{folder.name}-{number[:8]}"


def test_each_sink_has_the_figures_once_after_a_loss_and_a_resume(tmp_path: Path, database: MlflowClient) -> None:
    """A worker is killed; the batch grows; a second process repeats steps from an earlier checkpoint."""
    run = tmp_path / "run"
    training = [
        *SMALL,
        f"observe.sinks=[tensorboard,csv,{SERVICES}]",
        *words("checkpoint.every_steps=8 train.heldout_every=5"),
    ]
    training += words("workers.count=2 workers.max=2 workers.min=2 comm.reproducible=true")
    training += chaos(
        tmp_path,
        adaptive=False,
        phases=[{"step": 6, "batch_size": 64}],
        events=[{"step": 11, "rank": 1, "moment": "after_step", "how": "kill"}],
    )

    def train(*more: str) -> tuple[Job, Figures]:
        with command_line(run, [*training, *more]) as (process, job):
            assert process.wait(120) == 0
        return job, of_run(run)

    job, first = train("train.steps=20")
    assert len(job.views) > 1 and max(value for (name, _), value in first.items() if name == "train/batch_size") == 64
    job, last = train("train.steps=26", f"checkpoint.resume={run / 'checkpoints' / 'step-00000016'}")
    assert [record["step"] for record in job.metrics] == [*range(26)]
    repeated = {key for key in first.keys() & last.keys() if first[key] != last[key]}
    assert repeated and {name for name, _ in repeated} <= OF_THE_PROCESS
    sent = last | first  # no service takes anything back

    assert of_csv(run / "metrics.csv") == last
    single = {key: struct.unpack("f", struct.pack("f", value))[0] for key, value in last.items()}
    assert of_tensorboard(run / "tb") == single
    number, name = ids(run)
    assert of_wandb(run) == sent
    assert of_trackio(name) == sent
    (of_job,) = database.search_runs([database.get_experiment_by_name("kfuse").experiment_id])
    assert of_mlflow(database, of_job) == sent

    summary = json.loads((run / "summary.json").read_text())
    config = {"batch.size": "32", "model._target_": "kfuse.models.MLP", "versions.torch": version("torch")}
    assert config.items() <= of_job.data.params.items()
    assert of_job.data.tags["summary.params_sha256"] == summary["params_sha256"] and of_job.info.status == "FINISHED"
    records = [*wandb_records(run)]
    configs = {item.key: json.loads(item.value_json) for r in records for item in r.run.config.update}
    assert configs["batch"]["size"] == 32 and configs["versions"]["torch"] == version("torch")
    summaries = {item.key: json.loads(item.value_json) for r in records for item in r.summary.update}
    assert summaries["params_sha256"] == summary["params_sha256"]
    assert {r.run.run_id for r in records if r.run.run_id} == {number}
    axes = {r.metric.name: r.metric.step_metric for r in records if r.metric.name}
    assert axes["train/loss"] == axes["heldout/loss"] == "step"
    assert SQLiteStorage.get_run_config("kfuse", name)["batch"]["size"] == 32


def test_each_run_of_a_sweep_is_a_run_of_its_own(tmp_path: Path, database: MlflowClient) -> None:
    command = [sys.executable, "-m", "kfuse", "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}", *SMALL, "train.steps=3"]
    subprocess.run([*command, f"observe.sinks=[{SERVICES}]"], check=True, timeout=120)
    runs = {run.data.tags["kfuse.run"]: run for run in database.search_runs(["1"])}
    for folder in (tmp_path / "0", tmp_path / "1"):
        figures, (number, name) = of_run(folder), ids(folder)
        assert figures == of_wandb(folder) == of_trackio(name) == of_mlflow(database, runs[number])
        assert runs[number].data.params["seed"] == folder.name


def test_log_to_takes_the_scripts_own_runs_else_makes_some(
    tmp_path: Path, database: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, records = torch.nn.Linear(3, 1), list[dict[str, Any]]()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wandb.init(dir=str(tmp_path), settings=wandb.Settings(silent=True))
    own = trackio.init("mine", "a", embed=False, auto_log_cpu=False)
    kf.log_to("wandb", "mlflow", "trackio", tmp_path / "a.csv", records.append)
    monitor = kf.monitor(model)
    for _ in range(4):
        for _ in range(2):
            (model(torch.randn(5, 3)) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
    monitor.close()
    kf.log_to()
    run.log({"mine": 1.0})
    run.finish()
    own.finish()
    figures = of_records(records, records[0]["monitor"])
    assert ("train/grad_norm", 3) in figures
    (made,) = [run for run in database.search_runs(["1"]) if run.data.tags["mlflow.runName"].endswith(tmp_path.name)]
    assert figures == of_csv(tmp_path / "a.csv") == of_mlflow(database, made) == of_wandb(tmp_path)
    logs = SQLiteStorage.get_logs("mine", "a")
    assert figures == once((key, row["step"], value) for row in logs for key, value in row.items() if "/" in key)
