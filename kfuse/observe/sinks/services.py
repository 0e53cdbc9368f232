"""Services that compare experiments: Weights & Biases, MLflow and Trackio. Each is imported when it is used."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfuse.elastic.protocol import STOP_STATUS
from kfuse.observe import first_line, flattened, write_whole
from kfuse.observe.origin import versions
from kfuse.observe.sinks import Groups, Sink, SinkError, flat, numbers

_MOST_WAITING = 100_000  # rows
_CLOSES_WITHIN_S = 60.0
Row = tuple[int, dict[str, float]]


@dataclass(frozen=True)
class About:
    """What a service is told of a run."""

    folder: Path  # a service's own files lie in it
    settings: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_new: bool = True
    furthest: int = -1  # the last step that an earlier process of the run has recorded

    @classmethod
    def of_directory(cls, folder: Path, settings: Mapping[str, Any], recorded: int) -> About:
        """Id and furthest step are kept in the folder: a resumed run goes on in the same run of a service.

        recorded: the last step in metrics.jsonl, which loses what is made again. Raises OSError.
        """
        path = folder / "run_id"
        known = path.read_text().split() if path.exists() else []
        if not known:
            about = cls(folder, settings)
        else:
            about = cls(folder, settings, known[0], is_new=False, furthest=max(int(known[1]), recorded))
        write_whole(path, lambda to: to.write_text(f"{about.id} {about.furthest}\n"))
        return about

    @property
    def name(self) -> str:
        return "/".join(self.folder.absolute().parts[-2:])

    @property
    def config(self) -> dict[str, Any]:
        return {**self.settings, "versions": versions()}


class Sender(Sink):
    """A sink that passes figures on to a service, from a thread of its own: the service delays nothing.

    No service takes back what it was sent. So a step's figures are sent once: those that come again after a rewind are
    left out.
    """

    def __init__(self, name: str, about: About, sent: Mapping[str, int], run: Any = None) -> None:
        """sent: of each kind of rows ("train", "heldout") the last step that is not to be sent again.

        run: of the user's own, which is logged to; None: a new one.
        """
        self.name = name
        self._sent = dict(sent)
        self._rows: list[Row] = []  # in the hands of this class; the thread's are `_due`
        self._due: list[Row] = []
        self._summary: Mapping[str, Any] | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(about, run), name=f"kfuse-{name}", daemon=True)
        self._thread.start()

    def log(self, groups: Groups, step: int) -> None:
        kind = next(iter(groups))
        if step > self._sent.get(kind, -1):
            self._sent[kind] = step
            self._rows.append((step, flat(groups)))

    def write(self) -> None:
        if self._error is not None:
            raise SinkError(first_line(self._error))
        if self._rows:
            with self._changed:
                self._due += self._rows
                self._rows.clear()
                self._changed.notify()
            if len(self._due) > _MOST_WAITING:
                raise SinkError("too slow: too many steps wait for it")

    def close(self, summary: Mapping[str, Any]) -> None:
        self.write()
        with self._changed:
            self._summary = summary
            self._changed.notify()
        self._thread.join(_CLOSES_WITHIN_S)
        if self._thread.is_alive():
            raise SinkError(f"too slow: not all was sent within {_CLOSES_WITHIN_S:.0f} s of the end")
        self.write()

    def _run(self, about: About, run: Any) -> None:
        try:
            service = SERVICES[self.name](about, run)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._due or self._summary is not None)
                    rows, self._due = self._due, []
                if rows:
                    service.log(rows)
                elif self._summary is not None:
                    if run is None:  # else its end is the user's
                        service.finish(self._summary)
                    return
        except BaseException as error:  # a client may end its thread
            self._error = error


class Wandb:
    """Weights & Biases. Its own step may not go back, so each row has ours as a figure, which is the charts' x axis."""

    def __init__(self, about: About, run: Any) -> None:
        self._run, self._known = run, set[str]()
        if run is None:
            import wandb

            settings = wandb.Settings(silent=True, console="off")
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                raise SinkError("no API key: `wandb login`, or WANDB_MODE=offline")
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "kfuse"),
                id=about.id,
                name=about.name,
                dir=str(about.folder),
                config=about.config,
                allow_val_change=True,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )

    @staticmethod
    def current() -> Any:
        return sys.modules["wandb"].run

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            for name in values.keys() - self._known:
                self._run.define_metric(name, step_metric="step")
                self._known.add(name)
            self._run.log({"step": step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=int(summary.get("exit_reason") == "failed"))


class Mlflow:
    """MLflow. Without MLFLOW_TRACKING_URI its database is a file in the folder."""

    def __init__(self, about: About, run: Any) -> None:
        from mlflow import MlflowClient, is_tracking_uri_set
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        if run is not None:
            self._client, self._id = MlflowClient(), run
            return
        folder, place, files = about.folder.absolute(), None, None
        if not is_tracking_uri_set():
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # tells of each table
            place, files = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        self._client = client = MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kfuse")
        try:
            experiment = client.create_experiment(name, files)
        except MlflowException:
            if (there := client.get_experiment_by_name(name)) is None:
                raise
            experiment = there.experiment_id
        found = [] if about.is_new else client.search_runs([experiment], f"tags.`kfuse.run` = '{about.id}'")
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, "RUNNING")
            return
        self._id = client.create_run(experiment, tags={"kfuse.run": about.id}, run_name=about.name).info.run_id
        params = [Param(key, value[:6000]) for key, value in _leaves(about.config)]
        for first in range(0, len(params), 100):  # the most that it takes at once
            client.log_batch(self._id, params=params[first : first + 100])

    @staticmethod
    def current() -> Any:
        run = sys.modules["mlflow"].active_run()
        return run and run.info.run_id

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(key), value, now, step) for step, row in rows for key, value in row.items()]
        for first in range(0, len(metrics), 1000):  # the most that it takes at once
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def finish(self, summary: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(f"summary.{key}", value) for key, value in _leaves(summary)]
        self._client.log_batch(self._id, tags=tags)
        reason = summary.get("exit_reason")
        status = "FAILED" if reason == "failed" else "KILLED" if reason in STOP_STATUS else "FINISHED"
        self._client.set_terminated(self._id, status)


class Trackio:
    """Trackio, which is local unless its own environment variables say otherwise."""

    def __init__(self, about: About, run: Any) -> None:
        self._run, self._step = run, 0
        if run is None:
            import trackio

            name = f"{about.name}-{about.id[:8]}"  # by which a run is found again
            self._run = trackio.init(
                "kfuse", name, config=about.config, resume="allow", auto_log_cpu=False, embed=False
            )

    @staticmethod
    def current() -> Any:
        return sys.modules["trackio"].context_vars.current_run.get()

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._run.log(values, step)
            self._step = step

    def finish(self, summary: Mapping[str, Any]) -> None:
        if summary:
            self._run.log({f"summary/{key}": value for key, value in numbers(summary).items()}, self._step)
        self._run.finish()


SERVICES: dict[str, Any] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The values of nested mappings as text, by the path to each; those that are not known are left out."""
    return ((_mlflow_name(key), str(value)) for key, value in flattened(tree, ".") if value is not None)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def current_run(name: str) -> Any:
    """Returns the run of this service that the script has begun itself; None without one."""
    return SERVICES[name].current() if name in sys.modules else None
