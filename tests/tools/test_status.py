"""`kfuse status`: what it says of a run that begins, trains, loses a worker, is stopped, hangs and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_job import read_lines, wait_until

from kfuse.observe.lock import taken
from kfuse.tools.status import State, main, state_of

RUN = "data=digits model=mlp policy=none observe.sinks=[] batch.size=32 batch.micro=8 workers.count=2 workers.max=2"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two workers that trains until it is stopped."""
    words = [*RUN.split(), "train.epochs=100000", "train.heldout_every=1000000", f"hydra.run.dir={tmp_path / 'run'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "kfuse", *words], stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def state(folder: Path) -> State | None:
    return state_of(folder) if (folder / "metrics.jsonl").exists() else None


def test_through_a_kill_a_stop_and_the_end(
    job: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    wait_until("steps", lambda: (found := state(folder)) and found.steps > 60)
    assert main([str(folder), "30"]) == 0
    said = capsys.readouterr().out
    assert "phase        trains" in said and "2 workers train: training begins" in said
    views = [event for event in read_lines(folder / "events.jsonl") if event["kind"] == "view"]
    os.kill(views[-1]["workers"][1]["pid"], signal.SIGKILL)
    wait_until("the loss", lambda: any("SIGKILL" in str(event.get("how")) for event in state_of(folder).events))
    job.send_signal(signal.SIGSTOP)  # nothing is recorded any more
    time.sleep(2.5)
    assert main([str(folder)]) == 0 and main([str(folder), "1"]) == 1
    job.send_signal(signal.SIGCONT)
    job.terminate()
    job.wait(100)
    found = state_of(folder)
    assert (found.phase, found.is_well(None)) == ("stopped", False)
    lines = read_lines(folder / "metrics.jsonl")
    assert (found.steps, found.workers) == (lines[-1]["step"] + 1, lines[-1]["workers"])
    rate = (lines[-1]["samples"] - lines[-50]["samples"]) / sum(line["step_time_s"] for line in lines[-49:])
    assert found.rate == pytest.approx(rate)


def test_a_lost_supervisor_is_seen(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wait_until("steps", lambda: (found := state(folder)) and found.steps > 5)
    job.kill()
    wait_until("the end of its workers", lambda: state_of(folder).phase == "gone")
    assert main([str(folder)]) == 1


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "samples": 40, "workers": 1}) + '\n{"torn')
    for reason, status in (("epochs", 0), ("failed", 1), ("interrupted", 1)):
        (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason}))
        assert main([str(tmp_path)]) == status
    assert state_of(tmp_path).steps == 5
    with taken(tmp_path, "a test"):  # by a command that goes on
        assert state_of(tmp_path).phase == "trains"
