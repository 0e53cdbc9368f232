"""kfuse-run trains a user's script, survives the loss of a worker, and reports how the script ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from distributed import run_workers
from elastic_job import DEADLINE_S, Job, assert_exact, assert_none_left, wait_until

from kfuse.cli import kfuse_run
from kfuse.tools.report.recorded import _read
from kfuse.train.evaluation import params_sha256


class Ended(Job):
    """What a script has done under kfuse-run, and printed."""

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.metrics]


def run_script(
    folder: Path,
    text: str,
    *arguments: str,
    workers: int = 2,
    after: Sequence[str] | None = None,
    status: int = 0,
) -> Ended:
    """What a script does under kfuse-run, with the arguments `after` it: by itself, the path of a file `marker`.

    Fails if it does not end with this status.
    """
    path, run_dir = folder / "train.py", folder / "run"
    path.write_text(text)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--run-dir", str(run_dir)]
    command += ["--workers", str(workers), *arguments, str(path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    given = [str(folder / "marker")] if after is None else after
    done = subprocess.run([*command, *given], **pipes, timeout=DEADLINE_S, cwd=folder)
    assert done.returncode == status, done.stdout
    return Ended(run_dir, done.stdout.splitlines())


PRELUDE = """
import os, pathlib, signal, sys, time, torch, torch.nn.functional as F, kfuse as kf
number = int(os.environ.get("KFUSE_WORKER", 0))
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 3))
    return model, kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)

def loop(until=None, hook=lambda step: None):
    global model
    model, opt = make()
    done = 0
    for step in kf.DataLoader(model, (x, y), opt, batch_size=16, epochs=5):
        for a, b in step:
            step.loss = F.cross_entropy(model(a), b)
            hook(done)
            step.loss.backward()
        opt.step()
        opt.zero_grad()
        done += 1
        if done == until:
            break
    return done
"""
DEATH = """
def die(done):
    marker = pathlib.Path(sys.argv[1])
    if done == 10 and kf.rank() == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

kf.init(comm_reproducible=True, comm_timeout_s=60)
steps = loop(hook=die)
"""


def trained_alone(marker: str) -> tuple[int, str]:
    """The script's steps without kfuse-run, and the hash of its parameters in the end."""
    names: dict[str, Any] = {}
    with patch.object(sys, "argv", ["train.py", marker]):
        exec(PRELUDE + DEATH, names)
    return names["steps"], params_sha256(names["model"])


def test_a_module_is_run_and_its_prints_come_as_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = "import pathlib, sys, time\nprint(sys.argv[1:])\n"
    text += "while not pathlib.Path('go-on').exists():\n    time.sleep(0.01)"
    (tmp_path / "mine" / "train.py").write_text(text)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--observe-sinks", "[]", "--log-dir", "logs"]
    command += ["-m", "mine.train", "--workers"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "['--workers']\n"
        (tmp_path / "go-on").touch()
    assert process.returncode == 0 and (tmp_path / "logs" / "worker-0.log").read_text() == "['--workers']\n"


def test_a_run_has_its_settings_and_the_commit_of_its_script(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        me = ["-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.run(["git", "-C", tmp_path, *me, *words], check=True, capture_output=True, text=True).stdout

    (tmp_path / "train.py").write_text(PRELUDE.replace("epochs=5", "steps=1") + "loop()")
    for words in ("init", "add train.py", "commit -m first"):
        git(*words.split())
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--run-dir", "run", "--max-workers", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=DEADLINE_S)
    found = _read(tmp_path / "run", "run").settings
    commit = git("rev-parse", "HEAD").strip()
    given = {"batch.size": 16, "train.steps": 1, "workers.max": 2, "run.commit": commit}
    assert given.items() <= found.items() and found["run.command"].endswith("--max-workers 2 train.py")


def test_lists_are_written_as_at_the_shell(workplace: Path) -> None:
    Path("train.py").touch()
    for text, expected in (("[]", []), ("[tensorboard, 'csv']", ["tensorboard", "csv"]), ("csv", ["csv"])):
        assert kfuse_run._parse(["--observe-sinks", text, "train.py"]).settings["observe_sinks"] == expected


def test_checkpoints_that_cannot_be_written_end_the_job_at_its_start(tmp_path: Path) -> None:
    """The script is a folder, as for Python."""
    script = PRELUDE.replace("epochs=5", "epochs=5, checkpoint_dir='taken'") + "loop()"
    (tmp_path / "taken").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text(script)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "1", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1, done.stdout
    assert f"checkpoint_dir={tmp_path}/taken: must be writable: File exists" in done.stderr + done.stdout


@pytest.mark.full
def test_a_script_may_ask_for_the_ledger(tmp_path: Path) -> None:
    """Also where the run goes on, whose lines of steps that come again are replaced."""
    ask = "epochs=5, observe_ledger=True, checkpoint_dir='kept', checkpoint_every_steps=2"
    for until in ("5", "None"):
        ended = run_script(tmp_path, PRELUDE.replace("epochs=5", ask) + f"loop({until})", workers=1)
    assert [line["step"] for line in ended.ledger if line["micro_batch"] == 0] == list(range(20))


@pytest.mark.full
def test_a_loop_of_ones_own_survives_a_death_with_the_same_bits(tmp_path: Path) -> None:
    shown = ["--observe-progress=false", "--observe-ledger=true"]
    ended = run_script(tmp_path, PRELUDE + DEATH, "--elastic-replace=false", *shown)
    assert_exact(ended)
    assert [event["kind"] for event in ended.events] == ["view", "failure", "view"]
    [alone] = run_workers(1, trained_alone, str(tmp_path / "marker"))
    assert alone == (20, ended.summary["params_sha256"])


ADDS = """
last = torch.nn.Linear(3, 3)
model = torch.nn.Sequential(make()[0], last)
opt = kf.FusedAdamW(model[0].parameters())
for step in kf.DataLoader(model, (x, y), opt, batch_size=16):
    opt.add_param_group({"params": list(last.parameters())})
"""


TWO_PASSES = """
model, opt = make()
for step in kf.DataLoader(model, (x, y), opt, batch_size=16):
    for _ in range(2):
        opt.zero_grad()
        for a, b in step:
            F.cross_entropy(model(a), b).backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (ADDS, "opt.add_param_group in the training of an elastic job"),
        pytest.param(
            TWO_PASSES, "opt.step() in an elastic job: its gradients must come from one pass", marks=pytest.mark.full
        ),
    ],
)
def test_what_a_joining_worker_would_not_have_is_refused(script: str, why: str, tmp_path: Path) -> None:
    said = run_script(tmp_path, PRELUDE + script, workers=1, status=1).said
    assert f"error: worker 0 ended with exit status 1: RuntimeError: {why}" in said


@pytest.mark.full
def test_a_script_trains_once(tmp_path: Path) -> None:
    """What was trained first is kept, and one line says what to do."""
    fit = "model, opt = make()\nkf.fit(model, (x, y), opt, batch_size=16, epochs=2, run_dir='mine')\n"
    ended = run_script(tmp_path, PRELUDE + fit + "loop()", status=1)
    assert (ended.summary["exit_reason"], ended.summary["steps"]) == ("epochs", 8)
    assert "after training had ended: RuntimeError: under kfuse-run a script trains once" in ended.said
    assert [*tmp_path.rglob("model.pt")] == [ended.directory / "model.pt"], "it is the job's directory"


@pytest.mark.full
def test_a_script_leaves_by_a_notice_and_keeps_its_own_handler(tmp_path: Path) -> None:
    """One gets its notice before it calls kf.init, and one while it trains, whose children end by the signal."""
    text = (
        PRELUDE
        + """
marker = pathlib.Path(sys.argv[1])
if number == 1:
    marker.touch()
    os.kill(os.getpid(), signal.SIGUSR1)  # before kf.init
own = []
signal.signal(signal.SIGTERM, lambda *_: own.append(os.getpid()))

def notice(done):
    if done == 10 and number == 0 and not own:
        child = os.fork()
        if not child:
            time.sleep(1000)
        for sent in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), sent)
        os.kill(child, signal.SIGUSR1)
        print("child", os.waitpid(child, 0)[1])
    if done > 10:
        time.sleep(0.1)

kf.init(comm_reproducible=True, comm_timeout_s=60)
print(number, loop(hook=notice), len(own))
"""
    )
    settings = ["--elastic-notice-signals", "[SIGUSR1]", "--min-workers", "2", "--elastic-replace=false"]
    ended = run_script(tmp_path, text, *settings, "--observe-progress=false")
    assert ended.steps == list(range(20)) and ended.of_kind("failure") == []
    assert [event["worker"] for event in ended.of_kind("notice")] == [1, 0]
    printed = [line.partition("] ")[2] for line in ended.lines if line.startswith("[")]
    assert f"child {int(signal.SIGUSR1)}" in printed and any(line.startswith("2 20 0") for line in printed)
    [left] = [line.split() for line in printed if line.startswith("0 ")]
    assert int(left[1]) < 20 and left[2] == "1", "its own handler was called, and its loop has ended"
    [alone] = run_workers(1, trained_alone, str(tmp_path / "marker"))
    assert alone == (20, ended.summary["params_sha256"])


@pytest.mark.full
def test_a_stop_does_not_wait_for_the_import_of_torch(tmp_path: Path) -> None:
    """Which takes long on a busy machine, and begins in the supervisor with the second worker: here without end."""
    (tmp_path / "train.py").write_text("import os, time\nopen(f'{__file__}-{os.getpid()}', 'w')\ntime.sleep(1000)")
    (tmp_path / "run.py").write_text(
        "import sys, time, types\nfrom kfuse.cli import kfuse_run\nfrom kfuse.elastic import processes\n"
        "processes.importlib = types.SimpleNamespace(import_module=lambda name: time.sleep(1000))\n"
        "sys.exit(kfuse_run.main())"
    )
    command = [sys.executable, "run.py", "--workers", "2", "--run-dir", "run", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        wait_until("both scripts", lambda: len(list(tmp_path.glob("train.py-*"))) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        assert_none_left([int(path.name.rpartition("-")[2]) for path in tmp_path.glob("train.py-*")])
    finally:
        process.kill()


@pytest.mark.full
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_supervisor_that_ends_leaves_no_script_behind(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    """Not even one that knows nothing of kfuse."""
    (tmp_path / "train.py").write_text("import os, time\nopen(f'{__file__}-{os.getpid()}', 'w')\ntime.sleep(1000)")
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "2", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*command, str(tmp_path / "train.py")])
    try:
        wait_until("both scripts", lambda: len(list(tmp_path.glob("train.py-*"))) == 2)
        process.send_signal(sent)
        assert process.wait(DEADLINE_S) == status
        assert_none_left([int(path.name.rpartition("-")[2]) for path in tmp_path.glob("train.py-*")])
    finally:
        process.kill()


@pytest.mark.full
def test_a_script_that_prints_leaves_a_last_checkpoint_as_its_supervisor_is_killed(tmp_path: Path) -> None:
    """Its print raises BrokenPipeError in the loop's body, as nobody reads any more, before it knows of the loss."""
    settings = "steps=10**6, checkpoint_dir='kept', checkpoint_every_steps=10**6"
    body = "        done += 1\n        print('step', step.number, flush=True)"
    text = PRELUDE.replace("epochs=5", settings).replace("        done += 1", body)
    (tmp_path / "train.py").write_text(text + "loop()")
    job = Ended(tmp_path / "run")
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "2", "--run-dir", "run", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        wait_until("steps", lambda: len(job.steps) > 9)
        process.kill()
        process.wait()
        assert_none_left([*job.pids])
    finally:
        process.kill()
    [checkpoint] = (tmp_path / "kept").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) >= len(job.steps)
