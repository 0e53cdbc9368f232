"""kf.fit and kf.DataLoader keep checkpoints and a run directory, and resume with the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import DEADLINE_S, assert_none_left, environment, read_lines, wait_until
from problems import update
from torch import nn

import kfuse as kf
from kfuse.session import reset
from kfuse.train.evaluation import params_sha256

Train = Callable[..., dict[str, Any] | None]


class Interrupted(Exception):
    """What ends a training in the middle."""


class Growing(kf.BasePolicy):
    """Doubles the batch once, at the step given, and counts the steps that it has seen. until: then it raises."""

    def __init__(self, at: int = 9, until: int | None = None) -> None:
        self.at, self.until, self.seen = at, until, 0

    def before_step(self) -> None:
        if self.seen == self.until:
            raise Interrupted

    def after_step(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            kf.set_batch_size(16)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def problem(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def with_fit(net: nn.Module, opt: Any, policy: kf.BasePolicy, **arguments: Any) -> dict[str, Any] | None:
    return kf.fit(net, problem(), opt, policy, **arguments)


def with_loader(net: nn.Module, opt: Any, policy: kf.BasePolicy, **arguments: Any) -> None:
    for step in kf.DataLoader(net, problem(), opt, policy=policy, **arguments):
        for x, y in step:
            step.loss = F.cross_entropy(net(x), y)
            step.loss.backward()
        update(opt)


ARGUMENTS: dict[str, Any] = {"batch_size": 8, "epochs": 4, "lr_warmup_steps": 4, "lr_decay": "cosine"}
ARGUMENTS |= {"clip_norm": 0.5}


def train(how: Train, policy: kf.BasePolicy | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """The model's state after a training in a session of its own."""
    reset()
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.05)
    how(net, opt, policy or Growing(), **{**ARGUMENTS, **arguments})
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("how", "every"), [(with_fit, None), (with_fit, 3), (with_loader, 3)])
def test_an_interrupted_training_resumes_with_the_same_bits(how: Train, every: int | None, tmp_path: Path) -> None:
    undisturbed = train(how)
    arguments: Any = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every_steps": every}
    arguments |= {"checkpoint_resume": "auto", "run_dir": tmp_path / "run"}
    stops = (5, 13, 20)
    for until in stops:
        with pytest.raises(Interrupted):
            train(how, Growing(until=until), **arguments)
    for _ in range(2):  # one that has ended only reports again
        assert_equal(train(how, **arguments), undisturbed)
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(22))
    *resumed, last = [e["step"] for e in read_lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "resumed"]
    assert last == 22 and len(resumed) >= 2
    assert all(step <= until for step, until in zip(reversed(resumed), reversed(stops), strict=False))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["exit_reason"]) == (22, "epochs")
    assert len(list((tmp_path / "kept").glob("step-*"))) == 3
    assert [path.parent.name for path in tmp_path.glob("*/model.pt")] == ["run"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint_dir": "file"}, "checkpoint_dir=.*: must be writable"),
        ({"run_dir": "file/below"}, "run_dir=.*: cannot be written"),
        ({"checkpoint_resume": "new"}, "checkpoint_resume=.*: no good checkpoint there"),
        ({"run_dir": "run"}, r"run_dir=.*: must be a new one"),
        (
            {"run_dir": "run", "checkpoint_dir": "kept", "checkpoint_resume": "auto"},
            r"has ended \(epochs\) and left no checkpoint",
        ),
    ],
)
def test_wrong_places_are_refused(given: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    train(with_fit, run_dir=tmp_path / "run", epochs=1)
    with pytest.raises((ValueError, RuntimeError), match=message):
        train(with_fit, **{name: place if place == "auto" else str(tmp_path / place) for name, place in given.items()})


@pytest.mark.parametrize(("error", "why"), [(Interrupted, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_training_that_fails_leaves_its_reason(tmp_path: Path, error: type[BaseException], why: str) -> None:
    class Failing(kf.BasePolicy):
        def after_epoch(self) -> None:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("on purpose")

    with pytest.raises(error):
        train(with_fit, Failing(), run_dir=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["params_sha256"]) == (why, None)
    failures = [event["why"] for event in read_lines(tmp_path / "events.jsonl") if event["kind"] == "failure"]
    assert failures == (["Interrupted: on purpose"] if why == "failed" else [])
    assert not (tmp_path / "model.pt").exists()


def test_what_is_shown(capsys: Any, tmp_path: Path) -> None:
    train(with_fit)
    train(with_fit, run_dir=tmp_path / "silent")
    assert capsys.readouterr() == ("", "")
    train(with_loader, observe_progress=True)
    assert "params sha256" in capsys.readouterr().out


# -- killed -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, sys, time
import torch
import kfuse as kf
import test_fit_checkpoint as t
from kfuse.train.evaluation import params_sha256

how, folder, pace_s = sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3])

class Paced(t.Growing):
    def before_step(self):
        time.sleep(pace_s)

kf.init(comm_reproducible=True)
net = t.network()
opt = kf.FusedAdamW(net.parameters(), lr=0.05)
{"fit": t.with_fit, "loader": t.with_loader}[how](
    net, opt, Paced(), **t.ARGUMENTS | {"epochs": 12}, micro_batch=2, checkpoint_dir=folder / "kept",
    checkpoint_every_steps=3, run_dir=folder / "run",
)
(folder / f"ended-{kf.rank()}").write_text(params_sha256(net))
"""


def start(folder: Path, name: str, pace_s: float, before: list[str], how: str = "fit") -> subprocess.Popen[bytes]:
    """Starts SCRIPT with files in folder/name. before: what starts a script."""
    (folder / name).mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, *before, str(folder / "train.py"), how, str(folder / name), str(pace_s)]
    return subprocess.Popen(command, env={**os.environ, **environment()}, start_new_session=True)


def reproducible(epochs: int, **arguments: Any) -> str:
    """The hash of the model after the same training."""
    kf.init(comm_reproducible=True)
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.05)
    with_fit(net, opt, Growing(), micro_batch=2, **ARGUMENTS | {"epochs": epochs} | arguments)
    return params_sha256(net)


def under_supervisor(run_dir: Path) -> list[str]:
    return [*["-m", "kfuse.cli.kfuse_run", "--workers", "2", "--observe-progress=false", "--run-dir"], str(run_dir)]


def newest(folder: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-????????")), default=0)


@pytest.mark.full
@pytest.mark.parametrize(("how", "starter"), [("fit", "kfuse-run"), ("loader", "plain")])
def test_killed_twice_it_ends_with_the_undisturbed_bits(how: str, starter: str, tmp_path: Path) -> None:
    """All processes get SIGKILL, the supervisor too. Then the same command comes again; and once more at the end."""
    run_dir = tmp_path / "killed" / "run"
    before = under_supervisor(run_dir) if starter == "kfuse-run" else []
    resumed = []
    for target in (6, 18):
        process = start(tmp_path, "killed", 0.1, before, how)
        wait_until("a checkpoint", lambda target=target: newest(tmp_path / "killed" / "kept") >= target)
        pids = descendants(process.pid)
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert_none_left(pids)
        resumed.append(newest(tmp_path / "killed" / "kept"))
    assert start(tmp_path, "killed", 0.0, before, how).wait(DEADLINE_S) == 0
    assert resumed == sorted(set(resumed)) and resumed[-1] < newest(tmp_path / "killed" / "kept")
    ends = [path.read_text() for path in tmp_path.glob("killed/ended-*")]
    assert ends == run_workers(1, reproducible, 12) * (1 if starter == "plain" else 2)
    files = {path: path.read_bytes() for path in run_dir.glob("*.json*")}
    assert start(tmp_path, "killed", 0.0, before, how).wait(DEADLINE_S) == (1 if starter == "plain" else 2)
    assert {path: path.read_bytes() for path in run_dir.glob("*.json*")} == files
    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl")]
    assert steps == list(range(len(steps))) and len(steps) == json.loads(files[run_dir / "summary.json"])["steps"]


def descendants(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children += map(int, task.read_text().split())
    return [*children, *(below for child in children for below in descendants(child))]


@pytest.mark.parametrize(
    ("steps", "other", "why"),
    [
        (8, {"batch_size": 16}, "it has batch_size=8, not 16"),
        (12, {"seed": 1}, "it has seed=0, not 1"),
        (12, {"samples": 72}, "it has dataset size=64, not 72"),
        (8, {"seed": 1}, None),
        (8, {"samples": 72}, None),
        (12, {"optimizer": kf.FusedSGD}, "it has optimizer=AdamW, not SGD"),
        (12, {"width": 13}, "its model does not fit"),
        (12, {"optimizer": lambda params, lr: kf.Optimizer(torch.optim.AdamW(params, lr=lr))}, None),
    ],
)
def test_a_state_is_refused_where_training_would_go_on_as_another(
    steps: int, other: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    """8 steps end the first epoch. 12 end within the second one, where the order of the samples counts."""

    def fit(steps: int, optimizer: Any = kf.FusedAdamW, width: int = 12, samples: int = 64, **given: Any) -> Any:
        net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
        given = {"batch_size": 8, "epochs": 4, "checkpoint_resume": "auto", "steps": steps} | given
        return kf.fit(net, problem(samples), optimizer(net.parameters(), lr=0.01), checkpoint_dir=tmp_path, **given)

    fit(steps)
    if why is None:
        assert fit(16, **other)["steps"] == 16
    else:
        with pytest.raises(ValueError, match=f"another (training|program)'s state: {why}"):
            fit(16, **other)


def test_the_summary_names_no_best_model_of_another_training(tmp_path: Path) -> None:
    for heldout, has_best in ((problem(), True), (None, False)):
        net = network()
        opt = kf.FusedSGD(net.parameters(), lr=0.01)
        summary = kf.fit(net, problem(), opt, batch_size=8, checkpoint_dir=tmp_path, heldout=heldout)
        assert summary is not None and ("best_model" in summary) == has_best


class OverATree(kf.BasePolicy):
    def after_step(self) -> None:
        kf.set_topology("tree")


def test_a_transport_that_was_decided_is_not_taken_where_other_settings_rule_it_out(tmp_path: Path) -> None:
    """It would add up messages of eight bits as numbers."""
    train(with_fit, OverATree(), checkpoint_dir=tmp_path, steps=8)
    train(with_fit, OverATree(), checkpoint_dir=tmp_path, steps=10, checkpoint_resume="auto")
    for settings in ({"comm_dtype": "int8"}, {"comm_reproducible": True}):
        reset()
        kf.init(**settings)
        net = network()
        opt = kf.FusedAdamW(net.parameters(), lr=0.05)
        with pytest.raises(
            ValueError,
            match=r"has decided a topology: comm_schedule=tree: must be one of auto, all_to_all.* with comm_",
        ):
            with_fit(net, opt, OverATree(), **ARGUMENTS, checkpoint_dir=tmp_path, steps=12, checkpoint_resume="auto")
