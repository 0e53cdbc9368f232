"""A policy that raises an error: it is reported once, and ends the job on all workers; nobody hangs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import WorkersFailed, run_workers
from elastic_job import Job, override, run_job, words
from failing import Failing

import kfuse as kf

DIGITS = words(
    "model=mlp data=digits model.hidden=[8] batch.size=16 batch.micro=4 batch.max=128 train.epochs=null train.steps=24",
    "workers.count=2 workers.max=2 policy._target_=failing.Failing",
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "rank", "more"),
    [
        ("decide", -1, []),  # all workers have it
        ("after_step", 1, []),  # one alone, while the other waits for it in a collective
        ("first state_dict", -1, []),  # for the other worker, as training begins
        ("state_dict", -1, ["checkpoint.every_steps=3"]),
    ],
)
def test_the_error_is_told_once_and_ends_the_job(where: str, rank: int, more: list[str], tmp_path: Path) -> None:
    """It is not tried again, from a checkpoint or by another worker."""
    arguments = {"where": where, "rank": rank, "last": 23}
    done = run_job(tmp_path / "run", [*DIGITS, *[override(f"+policy.{k}", v) for k, v in arguments.items()], *more])
    method = where.removeprefix("first ")
    assert done.error is not None, done.told()
    assert f"the policy's Failing.{method} has raised KeyError" in done.error
    (event,) = done.of_kind("policy_failed")
    assert event["method"] == f"Failing.{method}" and "failing.py" in event["traceback"]
    assert sum(line.startswith("Traceback") for line in done.lines) == 1, done.told()
    assert sum("has raised an error; training ends" in line for line in done.lines) == 1, done.told()
    assert len(done.statuses) == 2 and not done.of_kind("resumed"), "no other worker was started"
    assert not (tmp_path / "run" / "checkpoints" / "step-00000006").exists()


def fit(policy: kf.BasePolicy, **arguments: Any) -> dict[str, Any] | None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    x, y = torch.randn(96, 6), torch.randn(96, 1)
    opt = kf.FusedSGD(model.parameters(), lr=0.05)
    given: dict[str, Any] = {"batch_size": 8, "micro_batch": 2, "steps": 12, "loss_fn": F.mse_loss, **arguments}
    return kf.fit(model, (x, y), opt, policy, **given)


def fixed() -> None:
    kf.init().group.timeout_s = 5.0  # to connect may take longer
    fit(Failing("after_step", rank=1))


@pytest.mark.full
def test_a_fixed_number_of_workers_stops() -> None:
    """The rank that fails ends with the policy's own error, and the other one does not wait for ever."""
    with pytest.raises(WorkersFailed, match="struck in after_step"):
        run_workers(2, fixed, timeout_s=60)


class Ends(kf.BasePolicy):
    """Does what a method's call must not: raises an error, returns no decision, has a state that is none."""

    def __init__(self, method: str, value: Any) -> None:
        self.value = value
        setattr(self, method, self._called)

    def _called(self, *_: object) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Saves(Ends):
    def after_step(self) -> None:
        kf.state_dict()


@pytest.mark.parametrize(
    ("policy", "error", "why"),
    [
        (Ends("initial", KeyError("none")), KeyError, "KeyError: 'none'"),
        (Ends("decide", ZeroDivisionError("odd")), ZeroDivisionError, "ZeroDivisionError: odd"),
        (Ends("decide", 64), TypeError, "decide returned a value of type int: it must be a kf.Decision or None"),
        (Ends("state_dict", {"deep": [print]}), TypeError, r"state_dict\['deep'\]\[0\] is a builtin_function"),
        (Saves("state_dict", KeyError("none")), KeyError, "KeyError: 'none'"),  # told once, not by after_step too
    ],
)
def test_a_script_ends_with_the_policy_s_own_error(
    policy: Ends, error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error):
        fit(policy, checkpoint_dir=tmp_path / "kept", checkpoint_every_steps=4, run_dir=tmp_path / "run")
    (event,) = Job(tmp_path / "run").of_kind("policy_failed")
    assert re.search(why, event["why"]) and "Traceback" in event["traceback"]
    assert not list((tmp_path / "kept").glob("step-*"))


def test_a_stop_of_the_process_is_no_error_of_the_policy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(Ends("decide", SystemExit(5)), run_dir=tmp_path / "run")
    assert not Job(tmp_path / "run").of_kind("policy_failed")
