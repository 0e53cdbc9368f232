"""A policy that raises an error: it is reported, and training goes on or stops, on all workers alike; nobody hangs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import WorkersFailed, run_workers
from elastic_job import Job, command_line, override, read_lines, run_job, words
from failing import Failing

import kfuse as kf
from kfuse.cli.app import main
from kfuse.config import instantiate
from kfuse.train.policy_calls import PolicyError
from kfuse.train.trainer import Trainer

DIGITS = words(
    "model=mlp data=digits model.hidden=[8] batch.size=16 batch.micro=4 batch.max=128 train.epochs=null train.steps=24",
    "workers.count=2 workers.max=2",
)


def job(directory: Path, on_error: str, *more: str, **arguments: Any) -> Job:
    """A real job of two workers whose policy fails."""
    given = [override(f"+policy.{name}", value) for name, value in arguments.items()]
    policy = ["policy._target_=failing.Failing", f"policy.on_error={on_error}", *given]
    return run_job(directory / "run", [*DIGITS, *policy, *more])


# -- go_on --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("where", ["before_step", "after_step", "decide", "initial", "after_train"])
@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_training_goes_on(where: str, rank: int, tmp_path: Path) -> None:
    """The error of some steps is reported once, by one worker, and nobody is lost."""
    last = 30 if where == "after_train" else 8
    done = job(tmp_path, "go_on", where=where, first=5, last=last, rank=rank, batch=32)
    assert done.error is None, done.told()
    assert done.summary["steps"] == 24 and done.summary["exit_reason"] == "steps"
    assert [line["step"] for line in done.metrics] == list(range(24))
    assert done.of_kind("failure") == [] and len(done.views) == 1, "no worker was lost"
    assert done.metrics[-1]["batch_size"] == 32, "it is asked again"
    events = done.of_kind("policy_failed")
    if where == "decide" and rank == 1:
        assert events == [], "only rank 0's decisions count"
        return
    assert len(events) == 1, done.told()
    (event,) = events
    assert event["method"] == f"Failing.{where}" and event["goes_on"] is True
    assert event["why"].startswith("KeyError") and f"struck in {where}" in event["why"]
    assert "Traceback" in event["traceback"] and "failing.py" in event["traceback"]
    assert any("training goes on" in line for line in done.lines)


@pytest.mark.full
def test_it_is_reported_again_once_it_has_worked(tmp_path: Path) -> None:
    done = job(tmp_path, "go_on", where="decide", first=5, last=8, again=15)
    assert [event["step"] for event in done.of_kind("policy_failed")] == [5, 15], done.told()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_a_hook_early_is_no_hang(rank: int, tmp_path: Path) -> None:
    """The collectives of a hook do not match: all leave it, and it is said."""
    done = job(tmp_path, "go_on", where="after_step", rank=rank, how="leave")
    assert done.error is None and done.summary["steps"] == 24, done.told()
    (event,) = done.of_kind("policy_failed")
    assert f"ranks [{1 - rank}] call a collective" in event["why"]


@pytest.mark.full
def test_a_hook_that_catches_all_errors_is_left_all_the_same(tmp_path: Path) -> None:
    done = job(tmp_path, "go_on", where="after_step", rank=0, how="hide")
    assert done.error is None and done.summary["steps"] == 24, done.told()
    assert done.of_kind("policy_failed")[0]["worker"] == 0


@pytest.mark.full
def test_with_pair_averaging(tmp_path: Path) -> None:
    """Workers at steps of their own tell each other nothing in hooks, where collectives are errors of the policy."""
    done = job(tmp_path, "go_on", "comm.sync=pair", where="decide", first=5, last=8)
    assert done.error is None and done.summary["steps"] == 24, done.told()
    methods = [event["method"] for event in done.of_kind("policy_failed")]
    assert methods.count("Failing.decide") == 1 and {*methods} >= {"Failing.before_step", "Failing.after_step"}


@pytest.mark.full
@pytest.mark.parametrize("how", ["exit", "interrupt"])
@pytest.mark.parametrize("where", ["after_step", "decide"])
def test_training_goes_on_also_where_the_policy_would_end_the_process(where: str, how: str, tmp_path: Path) -> None:
    done = job(tmp_path, "go_on", where=where, how=how)
    assert done.error is None and done.summary["steps"] == 24, done.told()
    (event,) = done.of_kind("policy_failed")
    assert event["why"] == {"exit": "SystemExit: 0", "interrupt": "KeyboardInterrupt"}[how]
    assert "failing.py" in event["traceback"] and event["goes_on"] is True
    assert done.of_kind("failure") == [] and len(done.views) == 1, "no worker was lost"


# -- stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("where", ["after_step", "decide", "initial", "before_train"])
@pytest.mark.parametrize("rank", [-1, 1])
def test_training_stops(where: str, rank: int, tmp_path: Path) -> None:
    """Also where one worker alone fails. It is not tried again, from a checkpoint or by another worker."""
    done = job(tmp_path, "stop", "checkpoint.every_steps=4", where=where, rank=rank)
    assert done.error is not None, done.told()
    assert f"the policy's Failing.{where} has raised KeyError" in done.error
    assert done.of_kind("policy_failed")[0]["goes_on"] is False
    assert any("failing.py" in line for line in done.lines), "the traceback is shown"
    assert len(done.statuses) == 2, "no other worker was started"
    assert not done.of_kind("resumed")


def assert_told_once(done: Job, method: str, why: str) -> None:
    assert done.error is not None, done.told()
    assert f"the policy's Failing.{method} has raised {why}" in done.error
    (event,) = done.of_kind("policy_failed")
    assert (event["method"], event["goes_on"]) == (f"Failing.{method}", False)
    assert "failing.py" in event["traceback"]
    assert sum(line.startswith("Traceback") for line in done.lines) == 1, done.told()
    assert sum("has raised an error; training ends" in line for line in done.lines) == 1, done.told()


@pytest.mark.full
@pytest.mark.parametrize("rank", [-1, 1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["raise", "exit", "interrupt"])
@pytest.mark.parametrize("where", ["decide", "after_step"])
def test_an_error_that_ends_the_job_is_told_once(where: str, how: str, rank: int, tmp_path: Path) -> None:
    """All workers have it, or one alone; SystemExit(0) and KeyboardInterrupt are errors of the policy as well."""
    done = job(tmp_path, "stop", where=where, how=how, rank=rank)
    kinds = {"raise": "KeyError", "exit": "SystemExit: 0", "interrupt": "KeyboardInterrupt"}
    assert_told_once(done, where, kinds[how])


@pytest.mark.full
@pytest.mark.parametrize("on_error", ["stop", "go_on"])
@pytest.mark.parametrize(
    ("where", "how", "more"),
    [
        ("first state_dict", "raise", []),  # for the other worker, as training begins
        ("state_dict", "exit", ["checkpoint.every_steps=3"]),
        ("load_state_dict", "raise", []),
    ],
)
def test_an_error_about_the_policy_s_state_ends_the_job(
    where: str, how: str, more: list[str], on_error: str, tmp_path: Path
) -> None:
    """Whatever on_error says: without the policy's state others, or a run that resumes, would decide otherwise."""
    done = job(tmp_path, on_error, *more, where=where, how=how, first=5, last=23)
    assert_told_once(done, where.removeprefix("first "), "SystemExit: 0" if how == "exit" else "KeyError")
    assert not (tmp_path / "run" / "checkpoints" / "step-00000006").exists()


@pytest.mark.full
def test_a_command_that_the_policy_ends_has_exit_status_1(tmp_path: Path) -> None:
    policy = words("policy._target_=failing.Failing +policy.where=decide +policy.how=exit")
    with command_line(tmp_path / "run", [*DIGITS, *policy]) as (process, done):
        assert process.wait(240) == 1
    assert sum(line.startswith("Traceback") for line in done.lines) == 1, done.lines
    assert "the policy's Failing.decide has raised SystemExit: 0" in done.lines[-1]
    assert len(done.of_kind("policy_failed")) == 1


@pytest.mark.full
@pytest.mark.parametrize("where", ["decide", "after_step"])
def test_a_method_that_hangs_is_named(where: str, tmp_path: Path) -> None:
    done = job(tmp_path, "go_on", "comm.timeout_s=2", "elastic.max_failures=2", where=where, how="hang", rank=1)
    assert done.error is not None
    assert re.search(rf"; worker 1 is in the policy's Failing\.{where} for \d+ s$", done.error), done.error


@pytest.mark.full
def test_before_train_always_stops(tmp_path: Path) -> None:
    done = job(tmp_path, "go_on", where="before_train")
    assert done.error is not None and "before_train" in done.error


# -- scripts, and a fixed number of workers -------------------------------------------------------------------------


def fit(policy: kf.BasePolicy, on_error: Any, **arguments: Any) -> dict[str, Any] | None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    x, y = torch.randn(96, 6), torch.randn(96, 1)
    opt = kf.FusedSGD(model.parameters(), lr=0.05)
    given: dict[str, Any] = {"batch_size": 8, "micro_batch": 2, "steps": 12, "loss_fn": F.mse_loss, **arguments}
    return kf.fit(model, (x, y), opt, kf.Hook(policy, on_error), **given)


def fixed(where: str, rank: int, on_error: str, how: str = "raise") -> tuple[int, int]:
    kf.init().group.timeout_s = 5.0  # to connect may take longer
    policy = Failing(where, rank=rank, how=how)
    summary = fit(policy, on_error)
    assert summary is not None
    return summary["steps"], policy.sums


@pytest.mark.parametrize(("where", "how"), [("after_step", "raise"), ("before_step", "raise"), ("after_step", "leave")])
def test_a_fixed_number_of_workers_goes_on(where: str, how: str) -> None:
    """One rank's hook fails at one step: the sums after that place are missing, on both ranks, and no others."""
    results = run_workers(2, fixed, where, 1, "go_on", how)
    assert results == [(12, 34 if where == "after_step" else 35)] * 2


def told_by(first: int, last: int, again: int) -> int:
    """How often this worker reports an error of the hook that rank 1 leaves early."""
    kf.init().group.timeout_s = 5.0  # to connect may take longer
    with contextlib.redirect_stderr(io.StringIO()) as err:
        fit(Failing("after_step", first, last, rank=1, how="leave", again=again), "go_on")
    return err.getvalue().count("has raised an error")


def test_collectives_that_do_not_match_at_many_steps_are_reported_once_until_they_have() -> None:
    assert run_workers(2, told_by, 3, 9, -1) == [0, 1]
    assert run_workers(2, told_by, 3, 5, 8) == [0, 2]


@pytest.mark.full
def test_a_fixed_number_of_workers_stops() -> None:
    """The rank that fails ends with the policy's own error, and the other one does not wait for ever."""
    with pytest.raises(WorkersFailed, match="struck in after_step"):
        run_workers(2, fixed, "after_step", 1, "stop", timeout_s=60)


class Odd(kf.BasePolicy):
    """Fails at odd steps; else doubles the batch size at step 4."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        if signals.step % 2:
            raise ZeroDivisionError("odd")
        return kf.Decision(batch_size=16) if signals.step == 4 else None


def test_a_script_goes_on_with_the_last_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = fit(Odd(), "go_on", run_dir=tmp_path / "run")
    assert summary is not None and (summary["steps"], summary["batch_size"]) == (12, 16)
    told = [event for event in Job(tmp_path / "run").events if event["kind"] == "policy_failed"]
    assert [event["step"] for event in told] == [2, 4, 6, 8, 10, 12]
    err = capsys.readouterr().err
    assert "the policy's Odd.decide has raised an error; training goes on" in err and "ZeroDivisionError: odd" in err


def test_a_script_stops_with_the_policy_s_own_error() -> None:
    with pytest.raises(ZeroDivisionError, match="odd"):
        fit(Odd(), "stop")
    with pytest.raises(ZeroDivisionError, match="odd"):
        fit(Odd(), *[kf.Hook(kf.BasePolicy()).on_error])


class Ends(kf.BasePolicy):
    """At the `at`-th call of this method: `act`."""

    def __init__(self, method: str, act: Callable[[], object], at: int = 4) -> None:
        self._act, self.at, self.calls = act, at, 0
        setattr(self, method, self._called)

    def _called(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.at:
            self._act()


def own(directory: Path) -> list[dict[str, Any]]:
    return [event for event in Job(directory).events if event["kind"] == "policy_failed"]


@pytest.mark.parametrize("method", ["decide", "before_step", "after_step"])
@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_script_s_policy_cannot_end_the_process(method: str, error: BaseException, tmp_path: Path) -> None:
    def act() -> None:
        raise error

    with pytest.raises(PolicyError, match=rf"^the policy's Ends\.{method} has raised {type(error).__name__}") as ended:
        fit(Ends(method, act), "stop", run_dir=tmp_path / "stop")
    assert ended.value.__cause__ is error
    (event,) = own(tmp_path / "stop")
    assert event["why"].startswith(type(error).__name__) and not event["goes_on"]
    policy = Ends(method, act)
    summary = fit(policy, "go_on", run_dir=tmp_path / "go_on")
    assert summary is not None and (summary["steps"], policy.calls) == (12, 12)
    (event,) = own(tmp_path / "go_on")
    assert event["why"].startswith(type(error).__name__) and event["goes_on"]


def clean_up() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(0)


@pytest.mark.parametrize("method", ["decide", "before_step", "after_train"])
@pytest.mark.parametrize("on_error", ["stop", "go_on"])
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
        (lambda: signal.raise_signal(signal.SIGTERM), SystemExit),  # of a handler of the script's own
        (clean_up, SystemExit),
    ],
    ids=["Ctrl-C", "SIGINT", "SIGTERM", "Ctrl-C, and the policy exits"],
)
def test_a_stop_by_the_user_is_no_error_of_the_policy(
    act: Callable[[], object], expected: type[BaseException], on_error: str, method: str, tmp_path: Path
) -> None:
    def terminate(number: int, frame: Any) -> None:
        sys.exit(143)

    handlers = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, terminate)
    try:
        policy = Ends(method, act, at=1 if method == "after_train" else 4)
        with pytest.raises(expected):
            fit(policy, on_error, run_dir=tmp_path / "run")
        assert policy.calls == policy.at and not own(tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) is handlers[0], "the handler is what it was"
    finally:
        signal.signal(signal.SIGTERM, handlers[1])


class NoState(kf.BasePolicy):
    state: Any = None

    def state_dict(self) -> Any:
        if self.state is None:
            raise KeyError("no state")
        return {"deep": [self.state]}


@pytest.mark.parametrize("on_error", ["stop", "go_on"])
def test_a_checkpoint_without_the_policy_s_state_is_not_written(on_error: str, tmp_path: Path) -> None:
    policy = NoState()
    with pytest.raises(KeyError, match="no state"):
        fit(policy, on_error, checkpoint=tmp_path / "kept", checkpoint_every=4, run_dir=tmp_path / "run")
    (event,) = own(tmp_path / "run")
    assert event["method"] == "NoState.state_dict" and not event["goes_on"]
    policy.state = lambda: 0
    with pytest.raises(TypeError, match=r"the value of NoState.state_dict\['deep'\]\[0\] is a function; what a checkp"):
        fit(policy, on_error, checkpoint=tmp_path / "kept", checkpoint_every=4)
    assert not list((tmp_path / "kept").glob("step-*"))


def test_an_error_of_state_dict_in_a_hook_is_told_once(tmp_path: Path) -> None:
    class Saving(NoState):
        def after_step(self) -> None:
            kf.state_dict()

    with pytest.raises(KeyError, match="no state"):
        fit(Saving(), "go_on", run_dir=tmp_path / "run")
    (event,) = own(tmp_path / "run")
    assert event["method"] == "Saving.state_dict"


class Mistaken(kf.BasePolicy):
    def decide(self, signals: kf.Signals) -> Any:
        return 64


def test_what_is_no_decision_is_an_error_of_the_policy(tmp_path: Path) -> None:
    summary = fit(Mistaken(), "go_on", run_dir=tmp_path / "run")
    assert summary is not None and summary["steps"] == 12
    (event,) = (event for event in Job(tmp_path / "run").events if event["kind"] == "policy_failed")
    assert event["why"] == "TypeError: Mistaken.decide returned a value of type int: it must be a kf.Decision or None"


def test_a_hook_s_argument_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^on_error=ignore: must be one of stop, go_on$"):
        kf.Hook(kf.BasePolicy(), "ignore")  # type: ignore[arg-type]


# -- the setting --------------------------------------------------------------------------------------------------


class Takes(kf.BasePolicy):
    def __init__(self, on_error: str = "") -> None: ...


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("policy.on_error=maybe", "policy.on_error=maybe: must be one of stop, go_on"),
        ("policy._target_=failing.Failing", "policy: Failing needs where"),
        (f"policy._target_={Takes.__module__}.Takes", "its argument on_error must have another name"),
    ],
)
def test_mistakes_are_one_clear_line(
    given: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kfuse", given])
    assert main() == 2
    assert told in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_the_class_does_not_get_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And an own class's `policy.on_error` is kept, where the arguments of the option's class are dropped."""
    from elastic_job import compose

    config = compose(["policy._target_=failing.Failing", "+policy.where=decide", "policy.on_error=go_on"])
    assert config["policy"] == {"_target_": "failing.Failing", "where": "decide", "on_error": "go_on"}
    assert compose([])["policy"]["on_error"] == "stop"
    made: list[Any] = []
    monkeypatch.setattr(Trainer, "__init__", lambda self, *given, **named: made.append(named))
    from kfuse.train.build import build_trainer

    build_trainer({**config, "run_dir": str(tmp_path)})
    assert made[0]["on_error"] == "go_on" and isinstance(made[0]["policy"], instantiate.locate("failing.Failing"))  # type: ignore[arg-type]


class Untellable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text")


def test_an_error_without_a_text_is_told_too(tmp_path: Path) -> None:
    class Fails(kf.BasePolicy):
        def decide(self, signals: kf.Signals) -> kf.Decision | None:
            raise Untellable

    model, data = torch.nn.Linear(3, 1), (torch.randn(64, 3), torch.randn(64, 1))
    hook = kf.Hook(Fails(), on_error="go_on")
    kf.fit(model, data, kf.FusedSGD(model.parameters(), lr=0.01), hook, batch_size=8, run_dir=tmp_path / "run")
    [event] = [each for each in read_lines(tmp_path / "run" / "events.jsonl") if each["kind"] == "policy_failed"]
    assert event["why"] == "Untellable" and "raise Untellable" in event["traceback"]
