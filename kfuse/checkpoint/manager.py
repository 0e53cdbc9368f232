"""When a run writes checkpoints, and which one it resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kfuse.checkpoint.format import Checkpointer, CheckpointError, load, load_newest
from kfuse.membership import Record, Session

_log = logging.getLogger("kfuse")

_LAST_TIMEOUT_S = 15.0  # a part of the grace period that a preempted job usually has
_ADVICE = "; a run goes on with its own hydra.run.dir=DIR, or checkpoint.resume=PATH"

CaptureState = Callable[[], dict[str, Any]]


class Checkpoints:
    """The checkpoints of one run, on every worker. Only the leader writes: the others have the same state.

    With sharded optimizer state the others send it their shards, so all of them call it at the same points.
    """

    def __init__(
        self,
        directory: Path | None,
        session: Session,
        *,
        every_steps: int | None = None,
        each_epoch: bool = False,
        keep: int = 3,
        resume: str = "never",
        script: bool = False,
        report: Record | None = None,
    ) -> None:
        """directory: of the checkpoints; None: there is none to look in. every_steps: steps between two.

        each_epoch: one at the end of each epoch. With neither, none are written. keep: how many of the newest are kept.
        resume: which one to resume from: never, auto (the newest valid one in `directory`, if there is one), or a path.
        script: the directory is a script's, which may hold another run's too. report: gets events, as ("event",
        fields); None: `session.report`.
        """
        self._directory, self._every_steps, self._keep, self._resume = directory, every_steps, keep, resume
        self._each_epoch, self._script, self._session = each_epoch, script, session
        self._reported = report or session.report
        self._writer: Checkpointer | None = None
        self._written = -1  # step of the newest, written or under way
        self._written_epoch = 0  # epochs that were over then

    @property
    def restarts(self) -> bool:
        """Whether this training, started anew, resumes from the checkpoints that it writes."""
        return bool(self._every_steps or self._each_epoch) and self._resume == "auto"

    def load(self, restarted: bool = False) -> dict[str, Any] | None:
        """Returns the state to resume from; None to start from the beginning.

        restarted: all workers were lost, so this run's own checkpoints come first. Raises CheckpointError if the one
        asked for by path cannot be used.
        """
        found = None
        if self._directory is not None and (self._resume == "auto" or (restarted and not self._script)):
            found = load_newest(self._directory, self._report)
        if found is None and self._resume not in ("never", "auto"):
            found = self._load_path(Path(self._resume).expanduser())
        if found is None:
            if self._resume == "auto" and not restarted:
                advice = "" if self._script else _ADVICE
                self._report({"kind": "started", "note": f"no checkpoint to resume from in {self._directory}{advice}"})
            return None
        state, path = found
        self._written, self._written_epoch = state["progress"]["step"], state["progress"]["epoch"]
        self._report({"kind": "resumed", "step": self._written, "path": str(path)})
        _log.info("checkpoint of step %d loaded from %s", self._written, path)
        return state

    def _load_path(self, path: Path) -> tuple[dict[str, Any], Path]:
        """`path` is a checkpoint, a folder of them, or a run directory."""
        for folder in (path, path / "checkpoints"):
            if (folder / "manifest.json").exists():
                return load(folder), folder
            if (found := load_newest(folder, self._report)) is not None:
                return found
        raise CheckpointError(f"checkpoint{'_' if self._script else '.'}resume={path}: no good checkpoint there")

    def save_when_due(self, step: int, epoch: int, state: CaptureState) -> None:
        """Starts a checkpoint every `every_steps` steps, or each epoch; later if the last is still being written.

        step, epoch: how many are over. state: returns the state to write; called on the leader, and with sharded state
        on every worker. Raises CommError.
        """
        every = self._every_steps
        due = every and step // every > max(self._written, 0) // every
        if (due or (self._each_epoch and epoch > self._written_epoch)) and self._save(step, state):
            self._written, self._written_epoch = step, epoch

    def is_due_after(self, steps: int) -> bool:
        """Whether `every_steps` asks for a checkpoint after so many steps. The same on every worker."""
        return bool(self._every_steps) and steps % (self._every_steps or 1) == 0

    def save_last(self, step: int, state: CaptureState) -> None:
        """Writes one more and waits for it (`_LAST_TIMEOUT_S` at most), unless this step has one."""
        if not (self._every_steps or self._each_epoch):
            return
        if self._session.group.rank != 0 and not self._session.comm.sharded:
            return
        if self._writer is not None:
            self._writer.wait(_LAST_TIMEOUT_S)
        if step != self._written and self._save(step, state) and self._writer is not None:
            self._writer.wait(_LAST_TIMEOUT_S)

    def close(self) -> None:
        """Waits for the write under way, however long it takes."""
        if self._writer is not None:
            self._writer.wait()

    def agree(self) -> None:
        """In a new view, on every worker: with sharded state all must find the same ones due. Raises CommError."""
        if self._session.comm.sharded:
            group = self._session.group
            written = torch.tensor([self._written, self._written_epoch], device=group.device)
            group.broadcast(written, "the newest checkpoint").wait()
            self._written, self._written_epoch = (int(number) for number in written)

    def _save(self, step: int, state: CaptureState) -> bool:
        """Unless the leader is still writing the last one. With sharded state all workers send it what it lacks."""
        group = self._session.group
        leads = group.rank == 0
        if self._session.comm.sharded:
            ready = int(not leads or self._writer is None or self._writer.wait(0.0))
            told = torch.tensor([ready], device=group.device)
            group.broadcast(told, "whether a checkpoint can be written").wait()
            if not told.item():
                return False
        captured = state() if leads or self._session.comm.sharded else {}
        if not leads:
            return True
        if self._writer is None:
            assert self._directory is not None
            self._writer = Checkpointer(self._directory, self._keep, self._report)
        return self._writer.save(step, captured)

    def _report(self, event: dict[str, Any]) -> None:
        self._reported("event", {"step": None, **event})
