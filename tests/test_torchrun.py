"""launcher=torchrun trains with a fixed number of workers and resumes after a loss, without a supervisor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import (
    DEADLINE_S,
    assert_none_left,
    assert_same_training,
    changes,
    chaos,
    command_line,
    environment,
    reference,
    wait_until,
    words,
)

pytestmark = pytest.mark.full

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.002 train.clip_norm=0.5 lr.base=0.003 model=mlp data=digits",
    "model.hidden=[24] model.dropout=0.1 batch.size=16 batch.micro=4 batch.max=64 train.epochs=2",
    "train.heldout_every=20",
    "checkpoint.every_steps=10",
)
FOUR = changes("5:4")
"""Workers that nobody starts."""


def test_a_lost_worker_ends_the_job_and_the_next_one_resumes(tmp_path: Path) -> None:
    """First SIGTERM, as at preemption, then a death: each time it goes on where it was, to the same end."""
    undisturbed = reference([*TRAINING, "workers.max=1"], phases=FOUR)  # by the local launcher
    settings = [*TRAINING, "launcher=torchrun", "checkpoint.resume=auto"]
    slowly = [*settings, *chaos(tmp_path, phases=FOUR, pace_s=0.1)]
    with command_line(tmp_path / "run", slowly, TORCHRUN) as (process, job):
        wait_until("15 steps", lambda: len(job.metrics) >= 15)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) != 0
        assert_none_left(job.pids)
    stopped = job.summary["steps"]
    assert job.summary["exit_reason"] == "terminated" and 15 <= stopped < len(undisturbed.metrics)
    assert [(view["reason"], len(view["workers"])) for view in job.views] == [("start", 2)]
    assert len(job.pids) == 2
    assert not job.of_kind("clipped"), "policies know that the workers are fixed"
    config = (job.directory / ".hydra" / "config.yaml").read_text()
    assert "count: 2" in config and "max: 2" in config
    with command_line(tmp_path / "run", slowly, TORCHRUN) as (process, job):
        wait_until("10 more steps", lambda: len(job.metrics) >= stopped + 10)
        os.kill(job.views[-1]["workers"][1]["pid"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) != 0
        assert_none_left(job.pids)
    assert job.summary["exit_reason"] == "failed"
    assert any(line.startswith("kfuse: error: ") and "lost contact with rank 1" in line for line in job.lines)
    (failure,) = job.of_kind("failure")
    assert "rank 1" in failure["why"]
    with command_line(tmp_path / "run", [*settings, *chaos(tmp_path, phases=FOUR)], TORCHRUN) as (process, job):
        assert process.wait(DEADLINE_S) == 0
    resumed = [event["step"] for event in job.of_kind("resumed")]
    assert resumed[0] == stopped and resumed[1] >= stopped + 9, "a checkpoint was the last act of what was left"
    assert_same_training(job, undisturbed)
    assert sum("params sha256" in line for line in job.lines) == 2, "one process has the display"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.log"]


def test_a_signal_while_the_failure_is_recorded(tmp_path: Path) -> None:
    """torchrun terminates what is left of a job as soon as it has seen a loss."""
    settings = [*TRAINING, "launcher=torchrun", "policy._target_=sync_policies.LostThenTerminated"]
    with command_line(tmp_path / "run", settings, [*TORCHRUN[:-1], "1"]) as (process, job):
        assert process.wait(DEADLINE_S) == 1
    assert job.summary["exit_reason"] == "failed"
    assert [failure["why"] for failure in job.of_kind("failure")] == ["lost contact with rank 1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launcher=torchrun workers.count=3 workers.max=3", "workers.count=3: must be equal to 2 (torchrun"),
        (
            "launcher=torchrun policy._target_=sync_policies.PairLater",
            "policy=PairLater: it sets comm.sync=pair: must be",
        ),
        ("launcher=local", "must be launcher=torchrun"),
        ("-m launcher=torchrun seed=1,2", "-m: "),
    ],
)
def test_rank_0_alone_says_what_is_wrong(
    words: str, said: str, workplace: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others end with the same status."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    status, out, err = command(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("kfuse: error: ") and err.count("\n") == 1 and said in err
    monkeypatch.setenv("RANK", "1")
    assert command(*words.split()) == (2, "", "")
    assert list(workplace.iterdir()) == []
    monkeypatch.delenv("RANK")
    assert command(*words.split()) == (2, "", "kfuse: error: WORLD_SIZE=2, but not set: RANK\n")


THREADS_AT_THE_END = """
import atexit, os, pathlib, sys, time

def at_the_end():  # after all that is registered later
    names = {pathlib.Path(task, "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()}
    sys.stdout.write(f"{any('gloo' in name for name in names)} {marker.exists()}\\n")

atexit.register(at_the_end)
import kfuse as kf
marker = pathlib.Path(sys.argv[1])
kf.barrier()
assert any("gloo" in task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm"))
if kf.rank() == 0:
    time.sleep(1)
    marker.touch()
"""


def test_groups_end_before_the_interpreter_and_when_all_are_done(tmp_path: Path) -> None:
    """A thread of gloo that outlives the interpreter's state ends the process with SIGABRT, now and then."""
    script = tmp_path / "train.py"
    script.write_text(THREADS_AT_THE_END)
    command = [*TORCHRUN, str(script), str(tmp_path / "marker")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **environment()}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False True"] * 2
