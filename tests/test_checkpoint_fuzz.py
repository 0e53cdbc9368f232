"""A job that is killed at random instants while it writes checkpoints always resumes with the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distributed import call
from elastic_job import (
    DEADLINE_S,
    FileRecorder,
    Job,
    assert_exact,
    assert_none_left,
    assert_same_steps,
    compose,
    environment,
    override,
    wait_until,
    words,
)
from warm import CONTEXT, WarmLauncher

from kfuse.elastic.supervisor import Elasticity, Supervisor
from kfuse.settings.tree import flat

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.02 lr.base=0.003 model=mlp model.hidden=[64] model.dropout=0.1 data=digits",
    "batch.size=32 batch.micro=8 batch.max=64 train.epochs=1000000 train.eval_every=50 observe.ledger=true",
    "workers.max=2 workers.threads=1 policy._target_=chaos.Chaos",
)
STEPS_A_KILL = 60
_PACE_S = 0.02  # with _LONGEST_LIFE_S, far fewer steps than STEPS_A_KILL: a busy machine kills late
_LONGEST_LIFE_S = 0.35


@dataclass
class Outcome:
    steps: int
    mid_write: int
    """Kills that left a checkpoint half written, or half removed."""
    resumed: list[int]
    """Step of each resumption."""
    wall_s: float


def fuzz(directory: Path, kills: int, seed: int, done: Callable[[], Any] = lambda: None) -> Outcome:
    """SIGKILL to supervisor and workers at `kills` random instants, a checkpoint being due at each step.

    Raises AssertionError unless every step, before and after every resumption, is bit by bit that of an undisturbed
    run on one worker, and the ledger exact.
    """
    chance, started, mid_write = random.Random(seed), time.perf_counter(), 0
    steps = f"train.steps={kills * STEPS_A_KILL}"
    undisturbed = [*TRAINING, steps, "workers.count=1", override("+policy.directory", str(directory / "none"))]
    slow = [override("+policy.directory", str(directory / "none")), override("+policy.pace_s", _PACE_S)]
    often = ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.resume=auto", "workers.count=2"]
    with patch.dict(os.environ, environment()):
        _finish(_start(directory / "alone", undisturbed))
        job, alone = Job(directory / "run"), Job(directory / "alone")
        for kill in range(kills):
            process, before = _start(job.directory, [*TRAINING, steps, *often, *slow]), len(job.views)
            try:
                wait_until("workers", lambda: len(job.views) > before)  # noqa: B023
                if kill:  # all but the first kill come after a checkpoint: each later start resumes
                    wait_until("a checkpoint", lambda: any((job.directory / "checkpoints").glob("step-*")))
                time.sleep(chance.uniform(0, _LONGEST_LIFE_S))  # not for correctness: any instant will do
                assert process.is_alive(), "the job came to its end before it was killed"
            finally:
                _kill(process, job.directory)
            mid_write += any((job.directory / "checkpoints").glob(".step-*"))
            done()
        _finish(_start(job.directory, [*TRAINING, steps, *often, *slow]))
    assert_exact(job)
    assert_same_steps(job, alone)
    resumed = [event["step"] for event in job.of_kind("resumed")]
    assert not job.of_kind("checkpoint_rejected"), job.of_kind("checkpoint_rejected")
    return Outcome(job.summary["steps"], mid_write, resumed, time.perf_counter() - started)


def _start(directory: Path, overrides: list[str]) -> ForkServerProcess:
    """The supervisor, in a process of its own."""
    process = CONTEXT.Process(target=call, args=(__file__, _supervise.__name__, str(directory), compose(overrides)))
    process.start()
    return process


def _supervise(directory: str, config: dict[str, Any]) -> None:
    path = Path(directory)
    elasticity = Elasticity.of(flat(config))
    launcher = WarmLauncher(path.with_suffix(".log"), multiprocessing.get_context("fork"))
    supervisor = Supervisor(launcher, {**config, "run_dir": directory}, FileRecorder(Job(path)), elasticity)
    asyncio.run(supervisor.run())


def _kill(process: ForkServerProcess, directory: Path) -> None:
    pids = [int(line) for line in directory.with_suffix(".pids").read_text().split()]
    for pid in (process.pid or 0, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    assert_none_left(pids)
    directory.with_suffix(".pids").write_text("")


def _finish(process: ForkServerProcess) -> None:
    process.join(DEADLINE_S)
    assert process.exitcode == 0, f"the job ended with {process.exitcode}"


@pytest.mark.full
def test_killed_at_random_instants(tmp_path: Path) -> None:
    """`benchmarks/soak.py --checkpoints 50` has more of them."""
    kills = 4
    outcome = fuzz(tmp_path, kills, seed=0)
    assert len(outcome.resumed) >= kills - 1  # the first kill may have come before the first checkpoint
    assert outcome.resumed == sorted(outcome.resumed) and outcome.resumed[-1] > 0
