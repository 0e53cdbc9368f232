"""What a script leaves behind and shows: checkpoints, a run directory, the model.

Under kfuse-run the supervisor keeps the job's run directory and display; else rank 0 keeps them here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfuse.elastic.protocol import LOOP_LEFT
from kfuse.membership import Session
from kfuse.session import current
from kfuse.settings import rules
from kfuse.settings.tree import ConfigError, by_key

if TYPE_CHECKING:
    from kfuse.checkpoint.manager import Checkpoints, SavedModel
    from kfuse.observe.recorder import Display, Recorder

_LOG = logging.getLogger("kfuse")

_TROUBLE = ("checkpoint_failed", "checkpoint_rejected", "model_failed")  # events that a silent script must not hide
_KEPT_ELSEWHERE = "run_dir={} is not used: kfuse-run keeps the run directory, --run-dir"


class Output:
    """The files and the display of one training, as kf.fit's and kf.DataLoader's arguments ask for them."""

    def __init__(self, session: Session, settings: Mapping[str, Any]) -> None:
        """settings: resolved, by name. Raises ConfigError, in one line, for what cannot be used."""
        self._session, self._lock = session, threading.Lock()  # checkpoints are reported by the thread that writes them
        self._recorder: Recorder | _Shown | None = None  # during training, on the rank that keeps the records
        rules.check(by_key(settings))
        given = settings["checkpoint_dir"], settings["run_dir"]
        folder, directory = (None if path is None else Path(path).expanduser().absolute() for path in given)
        if session.elastic and directory is not None:
            session.link.report("event", {"step": None, "kind": "note", "note": _KEPT_ELSEWHERE.format(directory)})
            directory = Path(session.link.job["run_dir"])
        terminal = sys.stdout is not None and sys.stdout.isatty()
        leads = not session.elastic and session.group.rank == 0
        progress = settings["observe_progress"]
        self._shown = leads and (terminal if progress is None else progress)
        self._directory = directory if leads else None
        # Whether somebody keeps or shows what this process reports.
        self.keeps = session.elastic or self._directory is not None or self._shown
        resume = self._resume(settings["checkpoint_resume"], folder)
        self._kept = settings["observe_sinks"], settings["observe_ledger"]
        self._settings = by_key(settings)
        if self._directory is not None:
            from kfuse.observe.sinks import missing

            if why := missing(settings["observe_sinks"]):
                raise ConfigError(f"observe_sinks: {why}")
        if (leads or session.elastic) and folder is not None:  # any worker of an elastic job may have to write
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"checkpoint_dir={folder}: must be writable: {error.strerror or error}"
                session.link.give_up(why)
                raise ConfigError(why) from error
        self.checkpoints: Checkpoints | None = None
        if folder is not None or resume != "never":
            from kfuse.checkpoint.manager import Checkpoints

            every = settings["checkpoint_every_steps"]
            self.checkpoints = Checkpoints(
                folder,
                session,
                every_steps=every,
                each_epoch=folder is not None and every is None,
                keep=settings["checkpoint_keep"],
                resume=resume,
                script=True,
                report=self.report,
            )
        where = directory or folder
        self.saved_model: SavedModel | None = None
        if where is not None and settings["train_save_model"] is not False:
            from kfuse.checkpoint.manager import SavedModel

            self.saved_model = SavedModel(where, session, report=self.report)

    def _resume(self, asked: str | None, folder: Path | None) -> str:
        """Where this training begins: see `checkpoint_resume`. Raises ConfigError.

        asked: as the script says. folder: of its checkpoints.
        """
        link, default = self._session.link, "never" if folder is None else "auto"
        if link.elastic:  # the supervisor has looked at the run directory, but does not know the checkpoints
            has_steps = link.job.get("has_steps")  # of the run that it holds; None: it holds none
            if has_steps and asked in (None, "never"):
                from kfuse.observe.earlier import has_checkpoint

                if asked == "never" or not has_checkpoint(folder):
                    none = "it has left no checkpoint to go on from" if asked is None else "checkpoint_resume='never'"
                    why = f"the run directory holds a run, and {none}: must be a new one"
                    link.give_up(why)
                    raise ConfigError(why)
            return asked or ("never" if has_steps is None else default)
        if self._directory is None:
            return asked or "never"
        from kfuse.observe.earlier import choose_resume

        return choose_resume(self._directory, folder, asked, f"run_dir={self._directory}")

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Takes a record of rank 0's: it is written and shown, or sent to the supervisor."""
        self._session.link.report(kind, data)
        if self._recorder is not None:
            with self._lock:
                self._recorder.keep([(kind, data)])
        if kind == "event" and data["kind"] in _TROUBLE and not (self._shown or self._session.elastic):
            _LOG.warning("%s %s: %s", data["kind"].replace("_", " "), data.get("path", data.get("step")), data["why"])

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of the training. Its end writes and shows the summary, also where it fails or is left.

        Raises ValueError for a run directory that cannot be written.
        """
        self._recorder = recorder = self._new_recorder()
        if recorder is None:
            yield
            return
        why: str | None = LOOP_LEFT
        try:
            yield
            why = None
        except KeyboardInterrupt:
            why = "interrupted"
            raise
        except Exception as error:
            why = "failed"
            recorder.failed(" ".join(f"{type(error).__name__}: {error}".split()))
            raise
        finally:
            if self.checkpoints is not None:
                self.checkpoints.close()  # what is being written is reported at its end
            if self.saved_model is not None:
                self.saved_model.close()
            self._recorder = None
            recorder.close(why)

    def _new_recorder(self) -> Recorder | _Shown | None:
        """None where nothing is written or shown by this process."""
        if self._directory is None and not self._shown:
            return None
        from rich.console import Console  # by a script that shows or records its training only

        from kfuse.observe.recorder import Display, Recorder
        from kfuse.observe.run_dir import RunDirectory

        display = Display(self._shown, None if self._shown else Console(quiet=True), takes_output=True)
        if self._directory is None:
            return _Shown(display)
        try:
            directory = RunDirectory(self._directory, *self._kept, settings=self._settings)
            directory.code = Path(getattr(sys.modules["__main__"], "__file__", "")).parent
        except OSError as error:
            raise ValueError(f"run_dir={self._directory}: cannot be written: {error.strerror or error}") from error
        recorder = Recorder(directory, display)
        if not self._shown:
            directory.warn = _LOG.warning
        return recorder


class _Shown:
    """Shows a training that has no run directory."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._summary: dict[str, Any] | None = None

    def keep(self, records: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, data in records:
            match kind:
                case "start":
                    self._display.start(data["samples"], data["steps"], "kfuse")
                case "metrics":
                    self._display.metrics(data)
                case "event":
                    self._display.event(data)
                case "summary":
                    self._summary = data

    def failed(self, why: str) -> None:
        """The exception itself is shown by Python."""

    def close(self, why: str | None) -> None:
        if self._summary is None:
            self._display.stop()
        else:
            self._display.finish(self._summary)


def log_remarks(remarks: Iterable[str]) -> None:
    """Logs what the user must know of the data, as warnings, on one worker."""
    session = current()
    if session.worker == 0:
        for remark in remarks:
            _LOG.warning("%s", remark)
