"""A launcher starts processes, reports their ends and their output, and reuses the slots of those that ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import assert_none_left

from kfuse.cores import cores
from kfuse.elastic.launchers import HostsLauncher, LocalLauncher
from kfuse.elastic.launchers.agent import offer
from kfuse.elastic.launchers.local import LocalProcess
from kfuse.elastic.protocol import ENV_LOG, ENV_WORKER
from kfuse.train.build import set_threads


def python(script: str, share: int | None = None) -> LocalLauncher:
    return LocalLauncher([sys.executable, "-c", script], share=share)


def ran(script: str, share: int | None = None, log: str | None = None) -> tuple[int, list[str]]:
    """A process's exit status, and the lines that it had printed a second after its end."""
    lines: list[str] = []

    async def read(process: LocalProcess) -> None:
        async for line in process.lines():
            lines.append(line)

    async def act() -> tuple[int, list[str]]:
        process = await python(script, share).start({} if log is None else {ENV_LOG: log})
        reading = asyncio.create_task(read(process))
        status = await process.wait()
        await asyncio.wait([reading], timeout=1)
        reading.cancel()
        return status, lines

    return asyncio.run(asyncio.wait_for(act(), 60))


def test_a_free_slot_is_used_again() -> None:
    """By LOCAL_RANK a worker finds its GPU: a successor takes over that of who is gone."""

    async def act() -> list[str]:
        launcher = python("import os, time; print(os.environ['LOCAL_RANK'], flush=True); time.sleep(1000)")
        processes = [await launcher.start({}), await launcher.start({})]
        slots = [await anext(process.lines()) for process in processes]
        processes[0].kill()
        assert await processes[0].wait() == -signal.SIGKILL
        processes.append(await launcher.start({}))
        slots.append(await anext(processes[2].lines()))
        for process in processes[1:]:
            process.kill()
            await process.wait()
        return slots

    assert asyncio.run(asyncio.wait_for(act(), 60)) == ["0", "1", "0"]


def test_a_host_that_others_do_not_reach_gets_workers_last() -> None:
    async def act() -> list[bool]:
        launcher = HostsLauncher(["sleep", "1000"], "127.0.0.1", 0, "token", slots=0, most=4, grace_s=1)
        await launcher.open()
        agents = [asyncio.create_task(offer("127.0.0.1", launcher._port, "token", slots)) for slots in (2, 3)]
        while len(launcher._hosts) < 2:
            await asyncio.sleep(0.01)
        processes = [await launcher.start({ENV_WORKER: "0"})]
        processes[0].cut_off = True
        processes[0].kill()
        await processes[0].wait()
        processes += [await launcher.start({ENV_WORKER: str(number)}) for number in (1, 2, 3)]
        await launcher.close()
        assert await asyncio.gather(*agents) == [True, True]
        return [process.agent is processes[0].agent for process in processes]

    assert asyncio.run(asyncio.wait_for(act(), 60)) == [True, False, False, True]


CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session={apart})
open({file!r}, "w").write(str(child.pid))
print("last words", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("apart", [False, True])
def test_a_child_that_holds_the_pipe_hides_no_death_and_ends_too(apart: bool, tmp_path: Path) -> None:
    """But for one in a session of its own, which outlives its parent."""
    try:
        said = ran(CHILD.format(apart=apart, file=str(tmp_path / "child")))
        assert said == (-signal.SIGKILL, ["last words"])
    finally:
        pid = int((tmp_path / "child").read_text())
        if apart:
            os.kill(pid, signal.SIGKILL)
    assert_none_left([pid])


@pytest.mark.parametrize("full", [False, True])
def test_what_a_worker_prints_is_in_its_log(full: bool, tmp_path: Path) -> None:
    """Its file's folder is made. Where the disk is full one line says so, and the worker goes on."""
    log = "/dev/full" if full else str(tmp_path / "logs" / "worker-0.log")
    status, lines = ran("print('one'); print('two', end='')", log=log)
    warning = ["kfuse: warning: /dev/full: can no longer be written: No space left on device"]
    assert (status, lines) == (0, [*warning * full, "one", "two"])
    assert full or Path(log).read_text() == "one\ntwo"


def test_a_line_without_an_end_is_dropped_and_the_rest_is_heard() -> None:
    status, lines = ran("print('x' * 3 * 2**20); print('after it')")
    assert status == 0 and lines[-1] == "after it" and len(lines) <= 2


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "600000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("1:cpuset:/\n2:cpu,cpuacct:/of/the/host", {"cpu/cpu.cfs_quota_us": "40", "cpu/cpu.cfs_period_us": "10"}, 4),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "10"}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_and_of_a_containers_quota(
    group: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(8)})
    for name, content in {"../../../proc/self/cgroup": group, **files}.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(("set_by_user", "workers", "threads"), [(None, 1, None), (None, 10_000, "1"), ("3", 2, "3")])
def test_workers_share_the_cores_unless_the_user_says_otherwise(
    set_by_user: str | None, workers: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    expected = threads or str(cores())
    assert ran("import os; print(os.environ['OMP_NUM_THREADS'])", workers) == (0, [expected])


@pytest.mark.parametrize(
    ("environment", "threads", "reproducible", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, None, False, 3),
        ({"OMP_NUM_THREADS": "3"}, 2, False, 2),
        ({"OMP_NUM_THREADS": "3"}, None, True, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, None, False, 4),  # torchrun's own default
        ({}, None, False, 2),
    ],
)
def test_the_users_number_of_threads_is_taken(
    environment: dict[str, str], threads: int | None, reproducible: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(8)})
    config: dict[str, Any] = {"workers": {"max": 4, "threads": threads}, "comm": {"reproducible": reproducible}}
    set_threads(config)
    assert torch.get_num_threads() == expected
