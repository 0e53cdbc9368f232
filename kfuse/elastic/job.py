"""The state of one job, which the parts of the supervisor share: its limits, how far it is, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED, View
from kfuse.settings.tree import SETTINGS


@dataclass(frozen=True)
class Elasticity:
    """How many workers a job has, and what happens when one is lost."""

    count: int
    min: int
    max: int
    replace: bool = True
    """Restore the wanted number of workers after a loss; otherwise only `min`."""
    heartbeat_timeout_s: float = SETTINGS["elastic_heartbeat_timeout_s"].default
    """A worker without a heartbeat for this long is killed."""
    max_failures: int = SETTINGS["elastic_max_failures"].default
    """Workers lost in a row, with no step completed in between, after which the job fails. Workers lost together, as
    with a host, count as one."""
    boot_timeout_s: float = SETTINGS["elastic_boot_timeout_s"].default
    restart: bool = False
    """If all workers are lost: start new ones, which resume from the last checkpoint. A script says so as it begins."""
    script: bool = False
    """Workers run a user's script. It may end before a training does or go on after it, and may train more than
    once."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], restart: bool = False, script: bool = False) -> Elasticity:
        """Returns those among `settings`, by name; what is not there has its default."""
        names = [f"{section}_{each.name}" for each in fields(cls) for section in ("workers", "elastic")]
        given = {name.partition("_")[2]: settings[name] for name in names if name in settings}
        return cls(**given, restart=restart, script=script)


class JobFailed(RuntimeError):
    """Training cannot go on; the message says why."""


class Job:
    """The state of one job."""

    def __init__(self, elasticity: Elasticity) -> None:
        self.elasticity = elasticity
        self.wanted = elasticity.count
        """How many workers the job is to have."""
        self.view: View | None = None
        """The newest view, proposed or active."""
        self.training = 0
        """Which training is under way, from 1; 0 before the first one."""
        self.done = False
        """The summary of that training has arrived."""
        self.stopping: str | None = None
        """Why the job was asked to stop."""
        self.outcome: str | None = None
        """NOT_TRAINED or LOOP_LEFT where all scripts have ended before a training did."""
        self.late_failure: JobFailed | None = None
        """A script that failed when its training was over."""
        self.over = asyncio.Event()
        self.error: BaseException | None = None
        """What ended the job, once `over` is set; None if it ended in order."""

    def end(self, error: BaseException | None = None) -> None:
        """Ends the job; only the first call counts."""
        if not self.over.is_set():
            self.error = error
            self.over.set()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a part of the supervisor beside the rest; an error in it ends the job."""

        def finished(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.end(task.exception())

        task = asyncio.create_task(work)
        task.add_done_callback(finished)
        return task

    def end_with_last_worker(self) -> None:
        """All workers have ended, and what each end means has been decided."""
        if not (self.done or self.stopping):
            self.outcome = NOT_TRAINED if self.training == 0 else LOOP_LEFT
        self.end(self.late_failure)

    @property
    def takes_newcomers(self) -> bool:
        """Whether a new worker can join: it would run a script from its start, so only during the first training."""
        return self.training <= 1 and not (self.done or self.over.is_set())

    @property
    def advice(self) -> str:
        """For the end of a message about a job that lost all its workers: what would have saved it; or ""."""
        may = not (self.elasticity.script or self.elasticity.restart)
        return "; with checkpoints, training would go on" if may else ""
