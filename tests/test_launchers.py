"""A launcher starts processes, reports their ends and their output, and reuses the slots of those that ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from elastic_job import assert_none_left

from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.launchers.hosts import follow
from kfuse.elastic.launchers.local import LocalProcess

DEADLINE_S = 60.0


def python(script: str) -> LocalLauncher:
    return LocalLauncher([sys.executable, "-c", script])


def run(act: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), DEADLINE_S))


async def heard(process: LocalProcess) -> tuple[int, list[str]]:
    lines: list[str] = []

    async def say(line: str) -> None:
        lines.append(line)

    return await follow(process, say), lines


def test_a_free_slot_is_used_again() -> None:
    """By LOCAL_RANK a worker finds its GPU: a successor takes over that of who is gone."""
    script = "import os, time; print(os.environ['LOCAL_RANK'], flush=True); time.sleep(1000)"

    async def act() -> None:
        launcher = python(script)
        slots = []
        first, second = await launcher.start({}), await launcher.start({})
        for process in (first, second):
            slots.append(await anext(process.lines()))
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        third = await launcher.start({})
        slots.append(await anext(third.lines()))
        for process in (second, third):
            process.kill()
            await process.wait()
        assert slots == ["0", "1", "0"]

    run(act)


def test_a_child_that_holds_the_pipe_hides_no_death(tmp_path: Path) -> None:
    """Not even one in a session of its own, which outlives its parent."""
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    script = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
while not os.path.exists({str(tmp_path / "child")!r}) or not open({str(tmp_path / "child")!r}).read():
    time.sleep(0.01)
print("last words", flush=True)
os.kill(os.getpid(), 9)
"""

    async def act() -> None:
        assert await heard(await python(script).start({})) == (-signal.SIGKILL, ["last words"])

    try:
        run(act)
    finally:
        pid = int((tmp_path / "child").read_text())
        os.kill(pid, signal.SIGKILL)
    assert_none_left([pid])


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
"""

    async def act() -> None:
        assert await heard(await python(script).start({})) == (0, [])

    run(act)
    assert_none_left([int((tmp_path / "child").read_text())])


def test_a_line_without_an_end_is_dropped_and_the_rest_is_heard() -> None:
    async def act() -> None:
        status, lines = await heard(await python("print('x' * 3 * 2**20); print('after it')").start({}))
        assert status == 0
        assert lines[-1] == "after it"
        assert len(lines) <= 2

    run(act)


@pytest.mark.parametrize(("set_by_user", "workers", "threads"), [(None, 1, None), (None, 10_000, "1"), ("3", 2, "3")])
def test_workers_share_the_cores_unless_the_user_says_otherwise(
    set_by_user: str | None, workers: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    expected = threads or str(len(os.sched_getaffinity(0)))

    async def act() -> None:
        process = await LocalLauncher(command, share=workers).start({})
        assert await heard(process) == (0, [expected])

    run(act)
