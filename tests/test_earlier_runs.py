"""A run directory that holds a run: what goes on in it, what is refused, and who waits for whom."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
from elastic_job import DEADLINE_S, environment, read_lines, wait_until

import kfuse.cli.run
from kfuse.observe.earlier import choose_resume
from kfuse.observe.lock import share, taken
from kfuse.settings.tree import ConfigError


def put(run_dir: Path, reason: str | None = None, steps: int = 0, checkpoint: bool = False) -> Path:
    """The records of a run, with its exit reason if it has told one."""
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n' * steps)
    if reason is not None:
        (run_dir / "summary.json").write_text(json.dumps({"exit_reason": reason}))
    if checkpoint:
        (run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
        (run_dir / "checkpoints" / "step-00000001" / "manifest.json").touch()
    return run_dir


ENDED, NOTHING_LEFT = r"run: must be a new one: .* has ended \(.*resume=auto", "run: .* left no checkpoint.*resume=auto"
HOLDS = "run: holds a run already: must be a new one, or checkpoint.resume=auto goes on with it"
CASES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"reason": None, "steps": 9, "checkpoint": True}, None, "auto"),
    ({"reason": "terminated", "steps": 9, "checkpoint": True}, None, "auto"),
    ({"reason": "failed", "steps": 9, "checkpoint": True}, None, "auto"),
    ({"reason": "loop_left", "steps": 9, "checkpoint": True}, None, "auto"),  # by an error, for all that is known
    ({"reason": None}, None, "auto"),  # lost before its first step was recorded: nothing is overwritten
    ({"reason": "not_trained"}, None, "auto"),
    ({"reason": "interrupted", "steps": 9}, None, NOTHING_LEFT),
    ({"reason": None, "steps": 9}, None, NOTHING_LEFT),
    ({"reason": "loop_left", "steps": 9}, None, NOTHING_LEFT),
    ({"reason": "epochs", "steps": 9, "checkpoint": True}, None, ENDED),
    ({"reason": "epochs", "steps": 9, "checkpoint": True}, "auto", "auto"),
    ({"reason": "epochs", "steps": 9}, "auto", r"run: .* has ended \(epochs\) and left no checkpoint$"),
    ({"reason": "interrupted", "steps": 9}, "never", HOLDS),
    ({"reason": "epochs", "steps": 9, "checkpoint": True}, "other/step-1", HOLDS),
    (
        {"reason": "epochs", "steps": 9, "checkpoint": True},
        "run/checkpoints/step-00000001",
        "run/checkpoints/step-00000001",
    ),
]


@pytest.mark.parametrize(("left", "asked", "expected"), CASES)
def test_what_a_directory_holds_decides(
    left: dict[str, Any], asked: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = put(Path("run"), **left)
    if expected in ("auto", asked):
        assert choose_resume(run_dir, run_dir / "checkpoints", asked, "run", shell=True) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            choose_resume(run_dir, run_dir / "checkpoints", asked, "run", shell=True)


def test_checkpoints_of_an_unknown_run_are_gone_on_from_if_that_is_asked(tmp_path: Path) -> None:
    folder = put(tmp_path / "other", checkpoint=True) / "checkpoints"
    with pytest.raises(ConfigError, match=r"new holds no run, but .*checkpoints: must be this run's own, or .*auto"):
        choose_resume(tmp_path / "new", folder, None, "new")
    assert choose_resume(tmp_path / "new", folder, "auto", "new") == "auto"


def test_a_folder_that_is_not_there_holds_no_run(tmp_path: Path) -> None:
    assert choose_resume(tmp_path / "other", None, None, "run") == "never"


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "resume"),
    [
        ("hydra.run.dir=here", "auto"),
        ("hydra.run.dir=here checkpoint.resume=never", None),
        ("-m seed=1 hydra.sweep.dir=. hydra.sweep.subdir=here", None),
        ("-m seed=1 hydra.sweep.dir=. hydra.sweep.subdir=here hydra.run.dir=here", None),
        ("hydra.run.dir=new", "auto"),
        ("", "never"),
        ("-m seed=1 hydra.sweep.dir=new", "never"),
    ],
)
def test_the_command_resumes_in_a_directory_that_it_was_given(
    words: str, resume: str | None, workplace: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(kfuse.cli.run, "run", lambda cfg, run_dir, first: seen.append(cfg.checkpoint.resume) or 0)
    put(workplace / "here", steps=9, checkpoint=True)
    (workplace / "here" / ".hydra").mkdir()
    (workplace / "here" / ".hydra" / "config.yaml").touch()
    status, _, err = command(*words.split())
    assert seen == ([resume] if resume else [])
    assert (status, "holds a run already" in err) == ((0, False) if resume else (2, True))


WORDS = "model=mlp data=digits policy=none train.steps=4 hydra.run.dir=run observe.sinks=[] observe.progress=false"


def trained(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kfuse", *WORDS.split(), *more]
    env = {**os.environ, **environment()}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second", "status", "why"),
    [
        ([], ["train.steps=8", "checkpoint.resume=auto"], 2, "the run in it has ended (steps) and left no checkpoint"),
        (
            ["checkpoint.every_steps=2"],
            ["train.steps=8", "seed=1", "checkpoint.resume=auto"],
            1,
            "it has seed=0, not 1",
        ),
    ],
)
def test_a_refused_command_leaves_a_run_as_it_is(
    first: list[str], second: list[str], status: int, why: str, tmp_path: Path
) -> None:
    assert trained(tmp_path, *first).returncode == 0
    names = ("metrics.jsonl", "summary.json", "model.pt", ".hydra/config.yaml")
    before = [(tmp_path / "run" / name).read_bytes() for name in names]
    refused = trained(tmp_path, *first, *second)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (status, 1), refused.stderr
    assert why in refused.stderr
    assert [(tmp_path / "run" / name).read_bytes() for name in names] == before


@pytest.mark.full
def test_a_run_whose_training_is_over_has_ended(tmp_path: Path) -> None:
    """Its command is killed while a policy's after_train is under way."""
    (tmp_path / "mine.py").write_text(
        "import os, time, pathlib, kfuse as kf\n"
        "class Kills(kf.BasePolicy):\n"
        "    def after_train(self):\n"
        "        while not pathlib.Path('run/summary.json').exists(): time.sleep(0.01)\n"
        "        os.kill(os.getppid(), 9)\n"
    )
    policy = "policy={_target_:mine.Kills}"
    assert trained(tmp_path, policy).returncode == -signal.SIGKILL
    again = trained(tmp_path, policy)
    assert again.returncode == 2 and "has ended (steps)" in again.stderr, again.stderr


def test_a_directory_is_taken_once_and_by_nobody_before_all_that_share_it_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with taken(tmp_path, "run"):
        own = share(tmp_path)
        why = "run: must be one that no run uses: processes of another run in it have not ended within 0 s"
        with pytest.raises(ConfigError, match=why):
            taken(tmp_path, "run", wait_s=0.0).__enter__()
    assert own is not None
    code = "import sys, time; from pathlib import Path; from kfuse.observe.lock import share\n"
    code += "held = share(Path(sys.argv[1])); print(flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        own.close()

        def say(text: str, file: TextIO) -> None:
            said.append(text)
            os.kill(worker.pid, signal.SIGKILL)

        monkeypatch.setattr("kfuse.observe.lock.print", say, raising=False)
        with taken(tmp_path, "run"):
            wait_until("the worker's end", lambda: worker.poll() is not None)
    assert said == ["kfuse: run: waiting until the processes of the run in it have ended"]


def test_a_file_system_without_locks_ends_no_run(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    words = "model=mlp data=digits policy=none train.steps=1 observe.sinks=[] hydra.run.dir=run"
    status, _, err = command(*words.split())
    assert (status, err) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("resume", [None, "never"])
def test_a_script_changes_no_record_where_it_cannot_go_on(resume: str | None, tmp_path: Path) -> None:
    """The supervisor does not know where its checkpoints are."""
    run_dir = put(tmp_path / "run", "terminated", steps=9)
    before = {path.name: path.read_bytes() for path in (run_dir / "metrics.jsonl", run_dir / "summary.json")}
    (tmp_path / "train.py").write_text(
        "import torch, kfuse as kf\nnet = torch.nn.Linear(2, 3)\n"
        "kf.fit(net, (torch.randn(8, 2), torch.randint(3, (8,))), kf.FusedSGD(net.parameters(), lr=0.1), "
        f"checkpoint_dir='kept', checkpoint_resume={resume!r})"
    )
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--run-dir", "run", "--workers", "2", "train.py"]
    env = {**os.environ, **environment()}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kfuse: error: the run directory holds a run, and ")
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    assert [event["kind"] for event in read_lines(run_dir / "events.jsonl")] == ["failure"]
