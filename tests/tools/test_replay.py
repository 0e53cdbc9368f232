"""`kfuse replay`: signals are rebuilt exactly, a run's own policy decides as it did, another takes steps of its own."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_job import DEADLINE_S, Job, assert_none_left, command_line, override, wait_until, words
from policy_signals import BOUNDS
from policy_signals import signals as signals_at
from problems import Seen
from witness import seen

import kfuse as kf
from kfuse.policies import BasePolicy, SchedulePolicy
from kfuse.policies.signals import DECISION_LAG, Decision, Signals
from kfuse.statistics.figures import METRICS
from kfuse.tools.replay.run import run
from kfuse.tools.replay.steps import DecidedSettings, Recorded, RecordedSteps, SimulatedSteps
from kfuse.train.learning_rate import gain

Command = Callable[..., tuple[int, str, str]]

MICRO = 8


def course(noise: Sequence[float | None], batch_size: int = 32, epoch: int | None = None) -> Recorded:
    """A run of constant batch size, with these noise scales. epoch: samples of one."""
    signals = [
        signals_at(
            batch_size,
            None if n is None else (n, n, n),
            step=step,
            epoch=0 if epoch is None else batch_size * step // epoch,
            samples=batch_size * (step + 1),
            grad_sq=2.0,
            grad_variance=None if n is None else 2.0 * n,
            grad_norm=math.sqrt(2.0 + 2.0 * (n or 0.0) / batch_size),
            epoch_samples=epoch,
        )
        for step, n in enumerate(noise)
    ]
    return Recorded(signals, "linear", "ssgd")


class Fixed(Seen):
    """Begins with this batch size."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self._batch_size = batch_size

    def initial(self) -> Decision | None:
        return Decision(batch_size=self._batch_size)


# -- steps of another policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 256])
def test_a_fixed_batch_size_lies_on_the_hyperbola(batch_size: int) -> None:
    """By hand: N = 100 and 3300 steps of 32: each makes 32/132, so Smin = 800 and Emin = 80,000.

    steps = Smin + Emin / B, also where the noise scale grows a hundredfold within a few steps of the new size.
    """
    recorded = course([100.0] * 3300)
    trade_off = recorded.trade_off()
    assert trade_off is not None
    assert (trade_off.least_steps, trade_off.least_samples) == (pytest.approx(800), pytest.approx(80_000))
    assert trade_off.critical_batch == pytest.approx(100)
    replayed = run(Fixed(batch_size), SimulatedSteps(recorded, BOUNDS))
    assert replayed.steps == math.ceil(800 + 80_000 / batch_size - 1e-6) and not replayed.cut_off
    assert replayed.samples == replayed.steps * batch_size
    recorded = course([10.0 + 10.0 * step for step in range(100)])
    trade_off = recorded.trade_off()
    assert trade_off is not None
    replayed = run(Fixed(batch_size), SimulatedSteps(recorded, BOUNDS))
    assert replayed.steps == math.ceil(trade_off.least_steps + trade_off.least_samples / batch_size - 1e-6)


def test_its_signals_follow_its_own_settings() -> None:
    """A decision on step 9 is in force from step 13 on; what the settings decide is computed, the rest unknown."""
    recorded = course([100.0] * 400, epoch=640)
    signals = [
        replace(each, throughput=(1.0,), heldout_accuracy=0.5, loss=1.0, link_latencies=((0.0,),))
        for each in recorded.signals
    ]
    watching = Seen({9: Decision(batch_size=128, workers=2, lr_scale=0.5)})
    result = run(watching, SimulatedSteps(Recorded(signals, "linear"), BOUNDS))
    before, after = watching.signals[12], watching.signals[13]
    assert before == signals[12]  # with the run's own settings: exactly as recorded
    assert (after.step, after.batch_size, after.workers, after.lr_scale) == (13, 128, 2, 0.5)
    assert after.samples == 13 * 32 + 128 and after.micro_batches == 16
    assert after.lr == pytest.approx(0.1 * 4 * 0.5)
    assert after.grad_norm == pytest.approx(math.sqrt(2 + 200 / 128))
    assert (after.grad_sq, after.grad_variance, after.noise_scale, after.loss) == (2.0, 200.0, 100.0, 1.0)
    assert after.heldout_accuracy == 0.5
    assert (after.throughput, after.link_latencies) == ((None, None), None)
    change = result.changes[0]
    assert (change.step, change.samples, change.before) == (9 + DECISION_LAG - 1, 13 * 32, DecidedSettings(32, 1))
    assert change.after == DecidedSettings(128, 2, 0.5)
    epochs = [each.epoch for each in watching.signals]
    assert epochs == [max(0, each.samples - 1) // 640 for each in watching.signals]
    ends = {each.samples for each in watching.signals if each.samples % 640 == 0}
    assert ends == set(range(640, watching.signals[-1].samples + 1, 640)), "an epoch's last step is short"


def test_a_changes_means_are_those_that_had_been_read_as_it_was_applied() -> None:
    """In force from step 13 on, it is applied after step 12: the statistics of step 11 are the newest then."""
    signals = [
        replace(each, mean_grad_sq=float(each.step), mean_grad_variance=1.0) for each in course([9.0] * 20).signals
    ]
    recorded, asking = Recorded(signals, "adascale"), Seen({9: Decision(batch_size=64)})
    (change,) = run(asking, RecordedSteps(recorded)).changes
    assert change.rates == (1.0, gain("adascale", 64, 32, 11.0, 1.0))


def test_a_step_of_one_micro_batch_measures_nothing() -> None:
    watching = Fixed(8)
    run(watching, SimulatedSteps(course([100.0] * 50), BOUNDS))
    assert {
        (each.grad_sq, each.grad_variance, each.noise_scale, each.noise_scale_low) for each in watching.signals
    } == {(None,) * 4}


def test_the_noise_scale_where_it_is_unknown() -> None:
    """It is the last known one, or the low end; where none is known the position is counted in samples."""
    unknown = course([None] * 40)
    replayed = run(Fixed(64), SimulatedSteps(unknown, BOUNDS))
    assert (unknown.trade_off(), replayed.steps, replayed.samples) == (None, 20, 1280)
    recorded = course([None, 50.0, None, 60.0, None])
    assert recorded.noise_scales() == [50.0, 50.0, 50.0, 60.0, 60.0]
    low = [replace(recorded.signals[2], noise_scale_low=value) for value in (40.0, 90.0)]
    signals = [*recorded.signals[:2], *low, recorded.signals[4]]
    assert Recorded(signals).noise_scales() == [50.0, 50.0, 50.0, 90.0, 50.0]


def test_a_replay_that_takes_too_long_is_cut_off() -> None:
    replayed = run(Fixed(8), SimulatedSteps(course([1e6] * 30, 1024), BOUNDS))
    assert replayed.cut_off and replayed.steps == 300


def test_decisions_are_clipped_to_the_bounds_of_their_step_and_said_once() -> None:
    """The second run was resumed at step 20 with a smaller batch.max."""
    policy = SchedulePolicy([{"step": 0, "batch_size": 5000, "workers": 99}])
    replayed = run(policy, SimulatedSteps(course([100.0] * 30), BOUNDS))
    assert [(each.step, each.after) for each in replayed.changes] == [(0, DecidedSettings(1024, 8))]
    assert replayed.changes[0].notes[0].startswith("batch_size 5000 clipped to 1024")
    later = replace(BOUNDS, batch_max=64)
    signals = [replace(each, bounds=later if each.step >= 20 else BOUNDS) for each in course([100.0] * 40).signals]
    replayed = run(Seen(dict.fromkeys((5, 25), Decision(batch_size=999))), RecordedSteps(Recorded(signals)))
    assert [(each.step, each.after.batch_size) for each in replayed.changes] == [(8, 999), (28, 64)]


def test_sync_topology_and_tree_are_reported_where_they_are_new() -> None:
    asked = {"sync": "local:4", "topology": "tree", "tree": (0, 0)}
    replayed = run(Seen(dict.fromkeys(range(30), Decision(**asked))), RecordedSteps(course([100.0] * 30)))  # type: ignore[arg-type]
    assert [(each.step, each.others) for each in replayed.changes] == [(3, asked)]


# -- what is recorded, and read back ------------------------------------------------------------------------------


def test_every_signal_is_rebuilt() -> None:
    """A field of `Signals` that nothing records would be lost: this fails for it by name. The links are in an event."""
    made = Signals(**{each.name: index for index, each in enumerate(fields(Signals))} | {"bounds": BOUNDS})  # type: ignore[arg-type]
    line = {name: getattr(made, name) for name in METRICS if hasattr(made, name)} | {"signals": made.beside_columns()}
    assert Signals.of_record(line) == replace(made, link_latencies=None, link_throughputs=None)


# -- the command --------------------------------------------------------------------------------------------------


def train(directory: Path, policy: kf.BasePolicy | None = None, **arguments: Any) -> None:
    """A script's run, recorded."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randn(64, 1)
    model = torch.nn.Linear(6, 1)
    opt = kf.FusedSGD(model.parameters(), lr=0.05)
    arguments |= {"batch_size": 8, "micro_batch": 2, "epochs": 6, "loss_fn": F.mse_loss}
    kf.fit(model, (x, y), opt, policy, run_dir=directory, **arguments)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    train(tmp_path / "run")
    return tmp_path / "run"


def test_the_table_and_the_summary(recorded: Path, command: Command) -> None:
    phases = "policy.phases=[{step: 8, batch_size: 16, lr_scale: 0.5}]"
    status, out, _ = command("replay", str(recorded), "policy=schedule", phases)
    assert status == 0
    assert "SchedulePolicy on" in out and "another policy" in out
    row = next(line.split() for line in out.splitlines() if "8 -> 16" in line)
    assert row[:2] == ["7", "64"], "in force from step 8 on, as asked for"
    assert "1 -> 0.5" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["recorded", "48"])
    assert row == ["recorded", "48", "1.00", "384", "1.00"]


class Raising(BasePolicy):
    """For `policy._target_`: a rule with a bug."""

    def decide(self, signals: Signals) -> Decision | None:
        return Decision(batch_size=int(1 / (signals.step - 7)))


def test_a_policy_that_raises_is_reported_with_its_traceback(recorded: Path, command: Command) -> None:
    status, out, err = command("replay", str(recorded), f"policy._target_={Raising.__module__}.Raising")
    assert status == 1 and "ZeroDivisionError" in err and "signals.step - 7" in err and "raised an error" in out


# -- real runs: the run's own policy decides as it did --------------------------------------------------------------

DIGITS = words(
    "model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4 batch.max=128 train.epochs=6 lr.base=0.003",
    "workers.max=3 train.heldout_every=20",
)


def assert_replayed(job: Job, command: Command, least: int = 1, since: int = 0) -> None:
    """The run's own policy makes the decisions on the batch size that its events have. Some were made again.

    since: the step from which on they are this job's events: those before may be in another directory.
    """
    made = {(event["step"], *event["batch_size"]) for event in job.of_kind("decision") if "batch_size" in event}
    status, out, _ = command("replay", str(job.directory))
    rows = [line.replace("->", "").split() for line in out.splitlines() if re.match(r" *\d+ +\d+ +\d+ -> \d+ ", line)]
    replayed = {(int(step), int(before), int(after)) for step, _, before, after, *_ in rows}
    here = {each for each in replayed if each[0] >= since}
    assert status == 0 and len(replayed) >= least and here <= made, out
    assert "the run's own policy" in out


def assert_rebuilt(job: Job, had: list[Signals]) -> None:
    """The signals of the metrics are those that each worker's policy had, in every bit, but for the links."""
    rebuilt = {line["step"]: Signals.of_record(line) for line in job.metrics}
    assert {each.step for each in had} == set(rebuilt)
    for each in had:
        assert rebuilt[each.step] == replace(each, link_latencies=None, link_throughputs=None)


def witness(directory: Path, **arguments: Any) -> list[str]:
    directory.mkdir(exist_ok=True)
    given = {"directory": str(directory), **arguments}
    return ["policy._target_=witness.Witness", *(override(f"+policy.{name}", value) for name, value in given.items())]


@pytest.mark.full
def test_workers_that_come_and_go_and_a_killed_leader(tmp_path: Path, command: Command) -> None:
    """By the noise scale, with audits, evaluations, throughputs and links, on up to three workers."""
    saw = tmp_path / "saw"
    slow = witness(saw, pace_s=0.02, alone_s=0.3)  # so that the others come in time
    overrides = [*DIGITS, "comm=reproducible", "comm.audit_every=10", *slow]
    with command_line(tmp_path / "run", overrides) as (process, job):
        wait_until("a second worker", lambda: bool(job.views) and len(job.views[-1]["workers"]) > 1)
        steps = len(job.metrics)
        wait_until("20 more steps", lambda: len(job.metrics) >= steps + 20)
        os.kill(job.views[-1]["workers"][0]["pid"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0
    assert_none_left(job.pids)
    assert job.summary["workers"] > 1 and job.of_kind("failure")
    assert_rebuilt(job, seen(saw))
    assert_replayed(job, command, least=2)


@pytest.mark.full
def test_a_resumed_run(tmp_path: Path, command: Command) -> None:
    """In another directory; and in the same one, where steps after the last checkpoint are made again."""
    saw = tmp_path / "saw"
    overrides = [*DIGITS, "train.epochs=3", "checkpoint.every_steps=25"]
    with command_line(tmp_path / "run", [*overrides, *witness(saw, pace_s=0.05)]) as (process, run):
        wait_until("40 steps", lambda: len(run.metrics) >= 40)
        wait_until("a checkpoint", (run.directory / "checkpoints" / "step-00000025").exists)
        for pid in {process.pid, *run.pids}:  # at once, so that nobody writes another checkpoint
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert_none_left(run.pids)
    first = len(run.metrics)
    for resume, directory in ((str(run.directory), tmp_path / "other"), ("auto", run.directory)):
        again = tmp_path / f"again-{directory.name}"
        resumes = [*overrides, *witness(again, pace_s=0.01), f"checkpoint.resume={resume}"]
        with command_line(directory, resumes) as (process, job):
            assert process.wait(DEADLINE_S) == 0
        assert_none_left(job.pids)
        resumed_at = job.of_kind("resumed")[0]["step"]
        assert 25 <= resumed_at < first
        # Elsewhere too: the checkpoint has the records of the last 128 steps.
        assert [line["step"] for line in job.metrics] == list(range(job.summary["steps"]))
        assert_rebuilt(job, [each for each in seen(saw) if each.step < resumed_at - 1] + seen(again))
        assert_replayed(job, command, since=resumed_at)
