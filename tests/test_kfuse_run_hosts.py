"""kfuse-run trains on several hosts with one agent each; here the hosts are loopback addresses of one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elastic_job import DEADLINE_S, Job, assert_none_left, parent, wait_until
from test_kfuse_run import PRELUDE

from kfuse.cli import kfuse_run

pytestmark = pytest.mark.full

TOKEN = "a-secret-for-this-job"
SCRIPT = f"""
{PRELUDE}
import pathlib
go_on = pathlib.Path(sys.argv[1])

def wait(steps):
    while steps == 10 and not go_on.exists():
        time.sleep(0.01)
        try:
            kf.session.current().check()
        except kf.CommError:  # a worker was lost: the step is repeated
            break

kf.init(comm_reproducible=True, comm_timeout_s=60)
loop(hook=wait)
"""

WAIT = "def wait(steps):"
SLOW_UNTIL_LEFT = """
    if steps > 10 and not go_on.with_name("left").exists():
        time.sleep(1)
"""
WAIT_FOR_ANOTHER = """
    own = kf.session.current()
    while steps > 10 and own.group.size < 2 and not own.proposed_generation():
        time.sleep(0.01)
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


@contextmanager
def line(address: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """An address that leads to this one, and what cuts all connections through it. Another one can be made at once."""
    host, port = address.split(":")

    def there() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    wait_until("somebody listens", there)
    ends: list[socket.socket] = []

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while more := one.recv(2**16):
                other.sendall(more)
        cut()

    def cut() -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                ends.append(server.accept()[0])
            except OSError:  # the test is over
                return
            ends.append(socket.create_connection((host, int(port))))
            pair = ends[-2], ends[-1]
            for one, other in (pair, pair[::-1]):
                threading.Thread(target=pass_on, args=(one, other), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", cut
        server.shutdown(socket.SHUT_RDWR)
    cut()
    for end in ends:
        end.close()


def wait_for_views(count: int, job: Job, *processes: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the first view's workers, once there are so many views."""

    def there() -> bool:
        assert all(process.poll() is None for process in processes), "a host's process has ended"
        return len(job.views) >= count

    wait_until(f"{count} views", there)
    return [worker["pid"] for worker in job.views[0]["workers"]]


@pytest.fixture
def meeting(tmp_path: Path) -> list[str]:
    """Where hosts meet, and the job's secret; the script is beside it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, secret in (("token", TOKEN + "\n"), ("wrong", TOKEN[::-1])):
        (tmp_path / name).write_text(secret)
        (tmp_path / name).chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return [address, "--token-file", str(tmp_path / "token"), "--slots"]


def test_hosts_share_a_job_and_the_loss_of_one_is_survived(meeting: list[str], tmp_path: Path) -> None:
    """Three workers on two hosts; one's agent is killed, and its workers with it: the bits are those of one worker.

    A host without the job's secret is refused.
    """
    script = [str(tmp_path / "train.py"), str(tmp_path / "go-on")]
    job, alone = Job(tmp_path / "run"), Job(tmp_path / "alone")
    settings = ["--run-dir", str(job.directory), "--workers", "3", "--elastic-replace=false"]
    with (
        started(tmp_path / "first.log", "--listen", *meeting, "1", *settings, *script) as first,
        started(tmp_path / "stranger.log", "--join", meeting[0], "--token-file", str(tmp_path / "wrong")) as stranger,
        started(tmp_path / "other.log", "--join", *meeting, "2") as other,
    ):
        assert stranger.wait(DEADLINE_S) == 1
        assert "refused this host" in (tmp_path / "stranger.log").read_text()
        pids = wait_for_views(1, job, first, other)
        parents = {pid: parent(pid) for pid in pids}
        assert sorted(parents.values()) == sorted([first.pid, other.pid, other.pid])
        other.kill()
        assert_none_left([pid for pid in pids if parents[pid] == other.pid])
        wait_for_views(2, job, first)
        (tmp_path / "go-on").touch()
        assert first.wait(DEADLINE_S) == 0, (tmp_path / "first.log").read_text()
    failures, [lost] = job.of_kind("failure"), job.of_kind("host_lost")
    assert [event["slots"] for event in job.of_kind("host_joined")] in ([1, 2], [2, 1])
    assert lost["host"] == socket.gethostname() and lost["workers"] == [failure["worker"] for failure in failures]
    assert len(failures) == 2 and all("was lost with its host" in failure["how"] for failure in failures)
    with started(tmp_path / "alone.log", "--run-dir", str(alone.directory), *script) as process:
        assert process.wait(DEADLINE_S) == 0
    assert job.summary["params_sha256"] == alone.summary["params_sha256"]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_hosts_meet_at_an_address_of_ipv6(meeting: list[str], tmp_path: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        meeting[0] = f"[::1]:{server.getsockname()[1]}"
    (tmp_path / "go-on").touch()
    script = ["--run-dir", str(tmp_path / "run"), "--workers", "2", str(tmp_path / "train.py"), str(tmp_path / "go-on")]
    with (
        started(tmp_path / "other.log", "--join", *meeting, "1") as other,
        started(tmp_path / "first.log", "--listen", *meeting, "1", *script) as first,
    ):
        assert first.wait(DEADLINE_S) == 0, (tmp_path / "first.log").read_text()
        assert other.wait(DEADLINE_S) == 0, (tmp_path / "other.log").read_text()
    assert Job(tmp_path / "run").summary["workers"] == 2


@pytest.mark.parametrize("in_time", [True, False])
def test_an_agent_with_notice_has_its_workers_leave(in_time: bool, meeting: list[str], tmp_path: Path) -> None:
    """Its host, which has a free slot, gets no worker any more. Those that do not leave in time are lost."""
    job = Job(tmp_path / "run")
    (tmp_path / "train.py").write_text(SCRIPT.replace(WAIT, WAIT + SLOW_UNTIL_LEFT))
    settings = ["--run-dir", str(job.directory), "--workers", "3", "--elastic-grace-s", "60" if in_time else "3"]
    script = [str(tmp_path / "train.py"), str(tmp_path / "go-on")]
    with (
        started(tmp_path / "first.log", "--listen", *meeting, "1", *settings, *script) as first,
        started(tmp_path / "other.log", "--join", *meeting, "3") as other,
    ):
        pids = wait_for_views(1, job, first, other)
        parents = {pid: parent(pid) for pid in pids}
        wait_until("step 9", lambda: len(job.metrics) == 9)  # they wait in step 10
        other.send_signal(signal.SIGTERM)
        wait_until("2 notices", lambda: len(job.of_kind("notice")) == 2)
        if in_time:
            (tmp_path / "go-on").touch()
        assert other.wait(DEADLINE_S) == (0 if in_time else 143), (tmp_path / "other.log").read_text()
        for name in ("go-on", "left"):
            (tmp_path / name).touch()
        assert first.wait(DEADLINE_S) == 0, (tmp_path / "first.log").read_text()
    assert len(job.of_kind("failure")) == (0 if in_time else 2) and len(job.of_kind("host_left")) == 1
    assert f"connected to {meeting[0]}: offers 3 slots" in (tmp_path / "other.log").read_text()
    last = [worker["pid"] for worker in job.views[-1]["workers"]]
    assert len(pids) == 3 and last == [pid for pid in pids if parents[pid] == first.pid]
    with started(tmp_path / "alone.log", "--run-dir", str(tmp_path / "alone"), *script) as process:
        assert process.wait(DEADLINE_S) == 0
    assert job.summary["params_sha256"] == Job(tmp_path / "alone").summary["params_sha256"]


def test_an_agent_that_loses_its_supervisor_offers_its_slots_again(meeting: list[str], tmp_path: Path) -> None:
    """Its workers end. A supervisor that is started anew at the same place gets others, and the agent ends with it."""
    jobs = Job(tmp_path / "run"), Job(tmp_path / "again")
    script = [str(tmp_path / "train.py"), str(tmp_path / "go-on")]
    words = [["--run-dir", str(job.directory), "--workers", "2", *script] for job in jobs]
    with started(tmp_path / "other.log", "--join", *meeting, "1") as other:
        with started(tmp_path / "first.log", "--listen", *meeting, "1", *words[0]) as first:
            pids = wait_for_views(1, jobs[0], first, other)
            os.kill(first.pid, signal.SIGKILL)
            assert_none_left(pids)
        said = f"kfuse-run: the supervisor at {meeting[0]} is gone"
        wait_until("its loss is told", lambda: said in (tmp_path / "other.log").read_text())
        with started(tmp_path / "again.log", "--listen", *meeting, "1", *words[1]) as again:
            pids = wait_for_views(1, jobs[1], again, other)
            assert sorted(parent(pid) for pid in pids) == sorted([again.pid, other.pid])
            (tmp_path / "go-on").touch()
            assert again.wait(DEADLINE_S) == 0, (tmp_path / "again.log").read_text()
        assert other.wait(DEADLINE_S) == 0, (tmp_path / "other.log").read_text()
    assert jobs[1].summary["exit_reason"]


def test_an_agent_that_was_cut_off_takes_part_again(meeting: list[str], tmp_path: Path) -> None:
    """For the supervisor it is lost, and then a new one, which gets the lost worker's replacement."""
    job, script = Job(tmp_path / "run"), [str(tmp_path / "train.py"), str(tmp_path / "go-on")]
    (tmp_path / "train.py").write_text(SCRIPT.replace(WAIT, WAIT + WAIT_FOR_ANOTHER))
    settings = ["--run-dir", str(job.directory), "--workers", "2", "--elastic-grace-s", "2"]
    with (
        started(tmp_path / "first.log", "--listen", *meeting, "1", *settings, *script) as first,
        line(meeting[0]) as (address, cut),
        started(tmp_path / "other.log", "--join", address, *meeting[1:], "1") as other,
    ):
        wait_for_views(1, job, first, other)
        wait_until("step 9", lambda: len(job.metrics) == 9)  # they wait in step 10
        cut()
        assert first.wait(DEADLINE_S) == 0, (tmp_path / "first.log").read_text()
        assert other.wait(DEADLINE_S) == 0, (tmp_path / "other.log").read_text()
    [lost], [failure] = job.of_kind("host_lost"), job.of_kind("failure")
    assert lost["workers"] == [failure["worker"]]
    assert [len(view["workers"]) for view in job.views] == [2, 1, 2]


def test_an_agent_that_waits_for_its_supervisor_ends_in_order_at_sigterm(meeting: list[str], tmp_path: Path) -> None:
    log = tmp_path / "other.log"
    with started(log, "--join", *meeting, "1") as other:
        wait_until("it waits", lambda: f"kfuse-run: waits for a supervisor at {meeting[0]}" in log.read_text())
        other.send_signal(signal.SIGTERM)
        assert other.wait(DEADLINE_S) == 0, log.read_text()
    assert log.read_text().splitlines()[1:] == [
        f"kfuse-run: ended by SIGTERM as it waited for the supervisor at {meeting[0]}"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "127.0.0.1:70000", "train.py"], "argument --listen: 127.0.0.1:70000: must be HOST:PORT"),
        (["--join", "::1:29400"], "argument --join: ::1:29400: must be HOST:PORT, or [ADDRESS]:PORT for IPv6"),
        (["--listen", "127.0.0.1:0", "train.py"], "--token-file: needed with --listen and --join"),
        (["--join", "127.0.0.1:1", "--token-file", "absent"], "--token-file absent: cannot be read"),
        (["--join", "127.0.0.1:1", "--token-file", "short"], "must hold a secret of at least 16 characters"),
        (["--join", "127.0.0.1:1", "--token-file", "open"], "--token-file open: must be readable by its owner alone"),
        (["--workers", "3", "--max-workers", "2", "train.py"], "error: --max-workers 2: must be at least --workers 3"),
        (["--worker", "2", "train.py"], "error: --worker: no such option (did you mean --workers?)"),
        (["--rank", "2", "train.py"], "error: --rank: no such option (did you mean --ranks?)"),
        (["--ranks", "0", "train.py"], "error: --ranks 0: must be at least 1"),
        (
            ["--listen", "127.0.0.1:0", "--token-file", "good", "--slots", "1", "--ranks", "2", "train.py"],
            "error: --slots 1: must be at least 2, the processes of a worker",
        ),
        (["--max_workers", "2", "train.py"], "error: --max_workers: no such option (did you mean --max-workers?)"),
        (["workers.max=2", "train.py"], "error: workers.max=2: no such file (did you mean --max-workers?)"),
        (["--slots", "2", "train.py"], "error: --slots and --token-file: must be used with --listen or --join"),
        (["--join", "127.0.0.1:1", "--token-file", "good", "--workers", "2"], "--join: the supervisor has the script"),
        ([], "error: a script is needed: kfuse-run --workers 2 train.py"),
        (["absent.py"], "absent.py: no such file"),
        (["-m", "absent.train"], "-m absent.train: no such module"),
        (["--run-dir", "used", "train.py"], "--run-dir used: must be a new directory: the run in it has ended"),
    ],
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    Path("used").mkdir()
    Path("used/summary.json").write_text('{"exit_reason": "epochs"}')
    Path("used/.lock").touch()
    for name, secret, mode in (("short", "secret", 0o600), ("open", TOKEN, 0o640), ("good", TOKEN, 0o600)):
        Path(name).write_text(secret)
        Path(name).chmod(mode)
    before = sorted(workplace.rglob("*"))
    try:
        status: Any = kfuse_run.main(arguments)
    except SystemExit as stop:
        status = stop.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2 and message in line
    assert sorted(workplace.rglob("*")) == before
