"""A supervised job that a benchmark acts upon: what its workers report, and what it is asked for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from kfuse.elastic.processes import State, Worker
from kfuse.elastic.supervisor import Supervisor
from kfuse.observe.run_dir import RunDirectory

_DEADLINE_S = 180.0
_POLL_S = 0.01


class Recorder:
    """Keeps what workers report in the run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(directory, sinks=(), ledger=True)
        self.step = -1
        self.lost: dict[int, str] = {}
        """How each lost worker ended, by pid."""
        self.cuts = 0
        """How often workers that do not reach each other were found."""

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Records as workers report them."""
        with self.directory.batch():
            for kind, data in records:
                if kind == "start":
                    self.directory.rewind(data["step"])
                    self.step = data["step"] - 1
                elif kind != "line":
                    getattr(self.directory, kind)(data)
                if kind == "metrics":
                    self.step = max(self.step, data["step"])
                elif kind == "event" and data["kind"] == "failure":
                    self.lost[data["pid"]] = data["how"]
                elif kind == "event" and data["kind"] == "cut":
                    self.cuts += 1

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        """Raises AssertionError after the deadline."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while not true():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(f"waited {_DEADLINE_S:.0f} s for {what}") from None


class Driver:
    """Asks a running job for workers, and waits for what it does."""

    def __init__(self, supervisor: Supervisor, recorder: Recorder, requests: Path) -> None:
        """requests: the file that `soak_worker.Obedient` reads."""
        self.supervisor, self.recorder, self._requests = supervisor, recorder, requests
        self.wanted = 0  # workers

    def ask_for(self, workers: int) -> None:
        self.wanted = workers
        part = self._requests.with_suffix(".part")
        part.write_text(json.dumps({"workers": workers}))
        os.replace(part, self._requests)

    def members(self) -> list[Worker]:
        return self.supervisor.processes.members()

    def settled(self, workers: int | None = None) -> bool:
        """Whether the newest view is active: with so many workers, if told."""
        members = self.members()
        enough = bool(members) if workers is None else len(members) == workers
        return enough and all(worker.state is State.MEMBER for worker in members)

    async def steps(self, count: int) -> None:
        """Waits for so many further steps."""
        goal = self.recorder.step + count
        await self.recorder.until(f"step {goal}", lambda: self.recorder.step >= goal)


async def run_beside(supervisor: Supervisor, acting: Coroutine[Any, Any, None] | None) -> str | None:
    """Runs the job, and what acts upon it, until the job ends; returns the stop reason. An error of one ends both."""
    running = asyncio.create_task(supervisor.run())
    tasks = [running, *([] if acting is None else [asyncio.create_task(acting)])]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks[1:]:
            if task.done():
                task.result()
        return await running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
