"""Each file of the run directory has its records in time, also where the disk is full for a while."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kfuse.observe import write_whole
from kfuse.observe.run_dir import RunDirectory
from kfuse.observe.sinks import services
from kfuse.statistics.figures import METRICS

STEP = {"step": 3, "epoch": 1, "samples": 96, "loss": 0.5, "lr": 0.01, "batch_size": 32, "workers": 2}


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_file_has_its_records(tmp_path: Path) -> None:
    """Read before anything is closed: a line is on disk once it is written."""
    directory = RunDirectory(tmp_path / "run", sinks=(), ledger=True)
    directory.metrics(
        {
            **dict.fromkeys(METRICS),
            **STEP,
            "noise_scale": math.nan,
            "grad_sq": -math.inf,
            "figures": {"a": [math.inf, 1.5]},
        }
    )
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert line.pop("figures") == {"a": [None, 1.5]}
    assert tuple(line) == METRICS
    assert {key: value for key, value in line.items() if value is not None} == STEP
    workers = [{"rank": 0, "pid": 7, "host": "a"}]
    directory.event({"workers": workers, "pause_s": math.nan, "kind": "view", "step": 4, "time": 5.0})
    directory.event({"kind": "failure", "step": None})
    first, second = lines(tmp_path / "run" / "events.jsonl")
    assert first == {"time": 5.0, "step": 4, "kind": "view", "workers": workers, "pause_s": None}
    assert list(first)[:3] == ["time", "step", "kind"] and second["step"] is None and second["time"] > 5.0
    record = {"step": 0, "micro_batch": 1, "samples": [5, 2]}
    directory.ledger(record)
    assert lines(tmp_path / "run" / "ledger.jsonl") == [record]
    without = RunDirectory(tmp_path / "without", sinks=())
    without.ledger(record)
    assert not (tmp_path / "without" / "ledger.jsonl").exists()


def test_tensorboard_has_the_numbers_and_each_step_once_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    for first, steps in ((0, 4), (2, 5)):
        directory = RunDirectory(tmp_path)
        directory.rewind(first)
        for step in range(first, steps):
            directory.metrics({**STEP, "step": step, "loss": first + step, "noise_scale": math.nan})
        directory.event({"kind": "evaluation", "step": steps, "accuracy": 0.75, "loss": 0.5})
        directory.close()
    with caplog.at_level("WARNING", "tensorboard"):
        board = EventAccumulator(str(tmp_path / "tb")).Reload()
    known = {f"train/{key}" for key in STEP if key != "step"}
    assert set(board.Tags()["scalars"]) == known | {"heldout/accuracy", "heldout/loss"}
    losses = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert losses == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]
    assert [event.value for event in board.Scalars("heldout/accuracy")] == [0.75]
    (layout,) = board.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    (series,) = Layout.FromString(layout).category[0].chart[0].margin.series
    assert (series.value, series.lower, series.upper) == tuple(
        f"train/noise_scale{end}" for end in ("", "_low", "_high")
    )
    assert not any("plugin" in record.getMessage() for record in caplog.records)


FULL_DISK = """
import json, pathlib, resource, sys
from kfuse.observe.run_dir import RunDirectory

said, path = [], pathlib.Path(sys.argv[1])
directory = RunDirectory(path, warn=said.append)
directory.metrics({"step": 0, "figures": {str(number): 1.0 for number in range(50)}})
size = (path / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))  # room for a part of a line
for step in range(1, 4):
    directory.metrics({"step": step})
directory.event({"step": 3, "kind": "view"})
during = (path / "metrics.jsonl").read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
directory.metrics({"step": 4})
directory.close()
print(json.dumps([said, during]))
"""


def test_records_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    """One warning at once; nothing is torn, nothing is lost, and an event says that there is room again."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, during = json.loads(done.stdout)
    assert during.count("\n") == 1 and during.endswith("}\n"), "no part of a line is left behind"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(5))
    assert [event["kind"] for event in lines(tmp_path / "events.jsonl")] == ["view", "disk"]
    assert "/tb: no more is written" in said.pop(0)
    assert len(said) == 2 and "cannot be written: File too large; training goes on" in said[0]
    assert "can be written again" in said[1]


def test_rewinding_drops_what_comes_again_and_torn_lines(tmp_path: Path) -> None:
    """With pair averaging each worker is at a step of its own: one may have written an earlier step later."""
    directory = RunDirectory(tmp_path, sinks=(), ledger=True)
    for step in range(4):
        directory.metrics({"step": step})
    for step, worker in ((0, 0), (3, 0), (0, 1), (1, 1)):
        directory.ledger({"step": step, "micro_batch": 0, "worker": worker})
    directory.close()
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "ep')
    directory = RunDirectory(tmp_path, sinks=(), ledger=True)
    directory.rewind(2)
    directory.event({"kind": "note", "step": 2})
    assert [line["kind"] for line in lines(tmp_path / "events.jsonl")] == ["note"]
    assert [directory.metrics({"step": step}) for step in (1, 2, 2, 3)] == [False, True, False, True]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    for step, worker in ((1, 1), (2, 1), (1, 0)):  # the first one is there already
        directory.ledger({"step": step, "micro_batch": 0, "worker": worker})
    found = [(line["step"], line["worker"]) for line in lines(tmp_path / "ledger.jsonl")]
    assert found == [(0, 0), (0, 1), (1, 1), (2, 1), (1, 0)]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    RunDirectory(tmp_path, sinks=()).summary({"steps": 10, "eval": {"loss": math.nan}})
    first, others = path.read_text(), set(tmp_path.iterdir())
    assert json.loads(first) == {"steps": 10, "eval": {"loss": None}} and path.stat().st_mode & 0o777 == 0o644

    def stopped(to: Path) -> None:
        to.write_text("sec")
        assert to.name.startswith(".summary.json.") and path.read_text() == first
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, stopped)
    assert path.read_text() == first and set(tmp_path.iterdir()) == others


def test_a_service_gets_each_step_once_through_resumptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three processes of a run, each of which goes back. A service takes nothing back."""
    got = list[int]()

    class Service:
        def __init__(self, about: object, run: object) -> None: ...

        def log(self, rows: Sequence[tuple[int, dict[str, float]]]) -> None:
            got.extend(step for step, _ in rows)

        def finish(self, summary: object) -> None: ...

    monkeypatch.setitem(services.SERVICES, "wandb", Service)
    for first, end in ((0, 20), (10, 15), (12, 22)):
        directory = RunDirectory(tmp_path / "run", ["wandb"])
        directory.rewind(first)
        for step in range(first, end):
            directory.metrics({"step": step, "loss": 1.0})
        directory.close()
    assert got == list(range(22))
