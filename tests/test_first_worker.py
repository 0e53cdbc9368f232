"""The first worker of a run starts early and checks the configuration: the command itself imports no torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc, and no early worker")

JOB = ["policy=none", "train.epochs=null", "train.steps=1", "observe.sinks=[]", "hydra.run.dir=run"]
USER = """
import os, pathlib, sys, time
import torch

made = 0

class Net(torch.nn.Linear):
    def __init__(self, input_shape: list[int], num_classes: int, waits: str = "", leaves: str = ""):
        global made
        stage = "build" if "KFUSE_CONTROL" in os.environ else "check"
        if stage == waits:
            pathlib.Path(stage).touch()
            time.sleep(300)
        if stage == leaves:
            print("is printed")
            sys.stdout.flush()
            os._exit(3)
        if made and stage == "build":
            raise RuntimeError("the check has left something behind")
        made += 1
        if stage == "build":
            print("is built")
        super().__init__(64, num_classes)

    def forward(self, x):
        return super().forward(x.flatten(1))
"""
MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored: in the background
from kfuse.cli.app import main

status = main()
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""
OWN = "model._target_=users_net.Net"
PLENTY_S = 120.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a user's model. Processes started from now on are known by it: see `processes`."""
    (tmp_path / "users_net.py").write_text(USER)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("TEST_PLACE", str(tmp_path))
    return tmp_path


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, *JOB, *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(place: Path, *words: str) -> tuple[int, str, str]:
    process = start(place, *words)
    out, err = process.communicate(timeout=PLENTY_S)
    return process.returncode, out, err


def processes(place: Path) -> Iterator[int]:
    """The processes that have been started from there, but for ended ones that nobody has waited for."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"TEST_PLACE={place}\0".encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has ended
            continue


def wait_until_all_have_ended(place: Path) -> None:
    deadline = time.monotonic() + PLENTY_S
    while left := [*processes(place)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)


def wait_until(done: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PLENTY_S
    while not done():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)


def test_a_run_of_one_worker_needs_torch_in_the_worker_alone(place: Path) -> None:
    assert run(place, OWN, "observe.log_dir=logs")[0::2] == (0, "False\n")
    assert (place / "logs" / "worker-0.log").read_text() == "is built\n"


@pytest.mark.full
def test_the_command_imports_torch_when_a_second_worker_comes(place: Path) -> None:
    words = ["policy=schedule", "policy.phases=[{step: 4, workers: 2}]", "train.steps=100000000"]
    process, events = start(place, OWN, *words, "observe.progress=false"), place / "run" / "events.jsonl"
    wait_until(lambda: events.exists() and '"reason": "grow"' in events.read_text(), process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=PLENTY_S)[1]
    assert process.returncode == 130
    assert err in ("True\n", ""), err  # "": a part of torch was enough, and the end waits for no more of it


@pytest.mark.parametrize(
    ("words", "out", "said"),
    [
        (["model.hidden=[a]"], "", "model.hidden=['a']: must be a list, each a whole number"),
        ([OWN, "+model.leaves=check"], "is printed\n", "ended by itself"),
    ],
)
def test_what_it_refuses_is_one_line_and_leaves_nothing(words: list[str], out: str, said: str, place: Path) -> None:
    status, printed, err = run(place, *words)
    assert (status, printed) == (2, out) and said in err and err.startswith("kfuse: error: ")
    assert err.count("\n") == 2, err
    assert [path.name for path in place.iterdir()] == ["users_net.py"]
    wait_until_all_have_ended(place)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["import", "check", "build", "train"])
def test_an_end_at_any_moment_of_the_start_leaves_no_worker(moment: str, number: signal.Signals, place: Path) -> None:
    process = start(place, OWN, f"+model.waits={moment}", "train.steps=100000000", "observe.progress=false")
    sign = place / ("run/metrics.jsonl" if moment == "train" else moment)
    wait_until((lambda: len([*processes(place)]) > 1) if moment == "import" else sign.exists, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=PLENTY_S)
    if number == signal.SIGINT:
        assert (process.returncode, err.splitlines()[:-1]) == (130, [])
        assert (place / "run").exists() == (moment in ("build", "train"))
    wait_until_all_have_ended(place)


def test_ctrl_c_before_the_event_loop_runs_the_job(place: Path) -> None:
    at_creation = f"""
import asyncio, os, signal
created = asyncio.BaseEventLoop.create_task

def create_task(loop, work, **options):
    task = created(loop, work, **options)
    if work.__qualname__ == "supervise.<locals>.work":
        os.kill(os.getpid(), signal.SIGINT)
    return task

asyncio.BaseEventLoop.create_task = create_task
{MAIN}"""
    done = subprocess.run([sys.executable, "-c", at_creation, *JOB, OWN], cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "False\n")
    wait_until_all_have_ended(place)
