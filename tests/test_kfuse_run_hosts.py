"""kfuse-run trains on several hosts with one agent each; here the hosts are loopback addresses of one machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elastic_job import DEADLINE_S, is_alive, read_lines, wait_until

from kfuse.cli import kfuse_run

pytestmark = pytest.mark.full

TOKEN = "a-secret-for-this-job"
SCRIPT = """
import pathlib, sys, time
import torch, torch.nn.functional as F
import kfuse as kf
from kfuse.data import load_digits
from kfuse.models import MLP

torch.set_num_threads(1)
kf.init(comm_reproducible=True, comm_timeout_s=60)
torch.manual_seed(0)
digits = load_digits()
model = MLP(digits.spec["input_shape"], digits.spec["num_classes"])
opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
go_on, steps = pathlib.Path(sys.argv[1]), 0
for step in kf.DataLoader(digits.train, model, opt, batch_size=48, batch_micro=8, train_epochs=2, seed=3):
    steps += 1
    while steps == 20 and not go_on.exists():
        time.sleep(0.01)
        try:
            kf.session.current().check()
        except kf.CommError:  # a worker was lost: the step is repeated
            break
    for x, y in step:
        step.loss = F.cross_entropy(model(x), y)
        step.loss.backward()
    opt.step()
    opt.zero_grad()
"""


@contextmanager
def started(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfuse.cli.kfuse_run", *arguments], stdout=stream, stderr=stream
        )
    try:
        yield process
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        process.kill()
        process.wait()


def summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def wait_for_views(count: int, run_dir: Path, *processes: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    def there() -> bool:
        assert all(process.poll() is None for process in processes), "a host's process has ended"
        return len(events(run_dir, "view")) >= count

    wait_until(f"{count} views", there)
    return events(run_dir, "view")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_hosts_share_a_job_and_the_loss_of_one_is_survived(tmp_path: Path) -> None:
    """Three workers on two hosts; one's agent is killed, and its workers with it: the bits are those of one worker."""
    (tmp_path / "train.py").write_text(SCRIPT)
    token, go_on = tmp_path / "token", tmp_path / "go-on"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    job = [str(tmp_path / "train.py"), str(go_on)]
    meeting = [f"127.0.0.1:{free_port()}", "--token-file", str(token), "--slots"]
    run_dir = tmp_path / "run"
    settings = ["--run-dir", str(run_dir), "--workers", "3", "--observe-progress=false", "--elastic-replace=false"]
    with (
        started(tmp_path / "first.log", "--listen", *meeting, "1", *settings, *job) as first,
        started(tmp_path / "other.log", "--join", *meeting, "2") as other,
    ):
        [view] = wait_for_views(1, run_dir, first, other)
        pids = [worker["pid"] for worker in view["workers"]]
        parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
        assert sorted(parents.values()) == sorted([first.pid, other.pid, other.pid])
        other.kill()
        for pid in (pid for pid in pids if parents[pid] == other.pid):
            wait_until(f"worker {pid} to end with its agent", lambda pid=pid: not is_alive(pid))
        wait_for_views(2, run_dir, first)
        go_on.touch()
        assert first.wait(DEADLINE_S) == 0, (tmp_path / "first.log").read_text()
    assert len(events(run_dir, "failure")) == 2
    with started(
        tmp_path / "alone.log", "--run-dir", str(tmp_path / "alone"), "--observe-progress=false", *job
    ) as alone:
        assert alone.wait(DEADLINE_S) == 0
    assert summary(run_dir)["params_sha256"] == summary(tmp_path / "alone")["params_sha256"]


def test_an_agent_ends_its_workers_and_says_so_when_the_supervisor_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    token, run_dir, address = tmp_path / "token", tmp_path / "run", f"127.0.0.1:{free_port()}"
    token.write_text(TOKEN)
    token.chmod(0o600)
    meeting = [address, "--token-file", str(token), "--slots", "1"]
    job = ["--run-dir", str(run_dir), "--workers", "2", str(tmp_path / "train.py"), str(tmp_path / "never")]
    with (
        started(tmp_path / "first.log", "--listen", *meeting, *job) as first,
        started(tmp_path / "other.log", "--join", *meeting) as other,
    ):
        [view] = wait_for_views(1, run_dir, first, other)
        pids = [worker["pid"] for worker in view["workers"]]
        os.kill(first.pid, signal.SIGKILL)
        assert other.wait(DEADLINE_S) == 1
        said = (tmp_path / "other.log").read_text().splitlines()[-1]
        assert said.startswith(f"kfuse-run: error: the supervisor at {address} is gone")
        wait_until("all workers to end", lambda: not any(map(is_alive, pids)))


def test_without_the_token_a_host_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    right, wrong, port = tmp_path / "right", tmp_path / "wrong", free_port()
    right.write_text(TOKEN)
    wrong.write_text(TOKEN[::-1])
    right.chmod(0o600)
    wrong.chmod(0o600)
    listen = ["--listen", f"127.0.0.1:{port}", "--token-file", str(right), "--run-dir", str(tmp_path / "run")]
    with (
        started(tmp_path / "first.log", *listen, str(tmp_path / "train.py")),
        started(tmp_path / "other.log", "--join", f"127.0.0.1:{port}", "--token-file", str(wrong)) as other,
    ):
        assert other.wait(DEADLINE_S) == 1
    assert "refused this host" in (tmp_path / "other.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "here", "train.py"], "argument --listen: here: must be HOST:PORT"),
        (["--listen", "127.0.0.1:70000", "train.py"], "must be HOST:PORT"),
        (["--listen", "127.0.0.1:0", "train.py"], "--token-file: needed with --listen and --join"),
        (["--join", "127.0.0.1:1", "--token-file", "absent"], "--token-file absent: cannot be read"),
        (["--join", "127.0.0.1:1", "--token-file", "short"], "must hold a secret of at least 16 characters"),
        (["--join", "127.0.0.1:1", "--token-file", "open"], "--token-file open: must be readable by its owner alone"),
        (["--join", "127.0.0.1:1", "--token-file", "token", "train.py"], "--join: the supervisor has the script"),
        (["--slots", "0", "train.py"], "--slots 0: must be at least 1"),
        ([], "a Python script is needed"),
        (["--workers", "3", "--max-workers", "2", "train.py"], "workers.max=2"),
        (["absent.py"], "absent.py: no such file"),
    ],
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name, secret, mode in (("short", "secret", 0o600), ("open", TOKEN, 0o640), ("token", TOKEN, 0o600)):
        Path(name).write_text(secret)
        Path(name).chmod(mode)
    with pytest.raises(SystemExit) as stop:
        kfuse_run.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not Path("runs").exists()
