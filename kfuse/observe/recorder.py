"""A run on the terminal, and the recorder: it writes what workers report to the run directory, and shows it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kfuse.elastic.protocol import NOT_TRAINED
from kfuse.observe import flattened
from kfuse.observe.run_dir import RunDirectory
from kfuse.observe.sentences import sentence
from kfuse.statistics.figures import display_text

LINE_EVERY_S = 2.0
REFRESH_HZ = 4  # each redraw takes CPU time that workers on this machine need
_RATE_WINDOW_S = 5.0


class Display:
    """Shows a run. Not thread-safe: one thread calls it (rich's own redraws the live part).

    On a terminal: a bar and the latest figures, redrawn four times a second whatever the rate of steps. Elsewhere:
    plain lines, one every two seconds at most, and each event. With `progress` off, only the closing summary.
    """

    def __init__(
        self,
        progress: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        takes_output: bool = False,
    ) -> None:
        """takes_output: what this process itself prints while the live part is on goes above it."""
        self._progress, self._takes_output = progress, takes_output
        # No highlighting: numbers coloured wherever they stand make plain lines hard to read.
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._live: Live | None = None
        self._title = ""
        name = TextColumn("{task.description}", "bold", markup=False)
        columns = name, BarColumn(None), TaskProgressColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=self._console, get_time=clock, expand=True)
        self._begin(None, None)

    def _begin(self, total_samples: int | None, total_steps: int | None) -> None:
        self._totals = {"samples": total_samples, "step": total_steps}
        self._latest: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._rates: deque[tuple[float, int]] = deque()  # moments, and the samples until then
        self._last_line = -float("inf")

    def start(self, total_samples: int | None, total_steps: int | None, title: str) -> None:
        """Starts the display, or starts it again. total_samples, total_steps: the run's length; None where unknown."""
        self._title = title
        self._begin(total_samples, total_steps)
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(title, total=1.0 if total_samples or total_steps else None)
        if not self._progress or self._live is not None:
            return
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=REFRESH_HZ,
                transient=True,
                redirect_stdout=self._takes_output,
                redirect_stderr=self._takes_output,
            )
            self._live.start()
        else:
            self.line(title)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """The latest step's figures, with the keys of metrics.jsonl."""
        now = self._clock()
        self._latest = record
        if not self._rates or now - self._rates[-1][0] >= _RATE_WINDOW_S / 20:
            self._rates.append((now, record["samples"]))
            while now - self._rates[0][0] > _RATE_WINDOW_S and len(self._rates) > 2:
                self._rates.popleft()
        done = max((record[key] / total for key, total in self._totals.items() if total), default=0.0)
        if self._live is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(done, 1.0))
        if self._progress and self._live is None and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self.line("  ".join(self._fields()))

    def event(self, record: Mapping[str, Any]) -> None:
        """Something that happened, as in events.jsonl, as a sentence; an evaluation joins the latest figures."""
        if record.get("kind") == "evaluation":
            self._evaluation = record
        elif self._progress and (text := sentence(record)) is not None:
            self.line(text if record.get("step") is None else f"step {record['step']}  {text}")

    def line(self, text: str) -> None:
        """A line as it is, above the live part; also with `progress` off."""
        self._console.print(Text(text), soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the live part and prints the summary, a key and its value a line."""
        self.stop()
        rows = summary_rows(summary)
        width = max((len(label) for label, _ in rows), default=0)
        if self._title:
            self.line(self._title)
        for label, value in rows:
            self._console.print(Text.assemble((label.ljust(width), "bold"), "  ", value), soft_wrap=True)

    def stop(self) -> None:
        """Gives the terminal back, as after an error. Stopping twice does no harm."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _rate(self) -> float | None:
        """Returns samples a second over the last few seconds; None before there are two moments."""
        if len(self._rates) < 2:
            return None
        (t0, samples0), (t1, samples1) = self._rates[0], self._rates[-1]
        return (samples1 - samples0) / (t1 - t0) if t1 > t0 else None

    def _fields(self) -> list[str]:
        record, rate, noise, quality = self._latest, self._rate(), None, None
        low, high = record.get("noise_scale_low"), record.get("noise_scale_high")
        if record.get("noise_scale") is not None:
            interval = f" ({figure(low)} to {figure(high)})" if low is not None and high is not None else ""
            noise = f"noise scale {figure(record['noise_scale'])}{interval}"
        elif low is not None:
            noise = f"noise scale above {figure(low)}"
        elif record.get("micro_batches") == 1 and record.get("grad_variance") is None:
            noise = "noise scale unknown: one micro-batch a step"
        if self._evaluation.get("accuracy") is not None:
            quality = f"held-out accuracy {self._evaluation['accuracy']:.1%}"
        elif self._evaluation.get("loss") is not None:
            quality = f"held-out loss {self._evaluation['loss']:.4g}"
        known = [*(display_text(name, record) for name in ("step", "epoch", "loss")), noise]
        known += [*(display_text(name, record) for name in ("batch_size", "lr", "workers")), quality]
        known += [None if rate is None else f"{figure(rate)} samples/s"]
        return [text for text in known if text is not None]

    def _render(self) -> RenderableType:
        if not self._latest:
            return self._bar
        return Group(self._bar, Columns([Text(field) for field in self._fields()], padding=(0, 2)))


def figure(value: float | None) -> str:
    """Returns a number with at least three digits; no exponent from 100 to a million: "0.0123", "1,136", "2e+07"."""
    if value is None or math.isnan(value):
        return "unknown"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def table(*columns: str, texts: int = 1) -> Table:
    """Returns an empty table: its first `texts` columns are of texts, the others of numbers. No cell is wrapped."""
    made = Table(box=None, padding=(0, 1))
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < texts else "right", no_wrap=True)
    return made


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the content of summary.json for people: labels and values."""
    return [
        (key.removesuffix("_s").replace("_", " "), value_text(key, value)) for key, value in flattened(summary, " ")
    ]


def value_text(key: str, value: Any) -> str:
    """Returns a value of summary.json as text: a percentage for accuracies, seconds for `..._s`."""
    if value is None:
        return "unknown"
    if isinstance(value, float):
        text = f"{value:.1%}" if key.endswith("accuracy") else f"{value:.4g}"
        return text + (" s" if key.endswith("_s") else "")
    return str(value)


class Recorder:
    """Writes and shows the records of a job."""

    def __init__(self, directory: RunDirectory, display: Display, begins: Callable[[], object] | None = None) -> None:
        """begins: of a run that is its training, as the command line's is: called when that begins. The summary is
        written as it ends, and not only by `close`.
        """
        self.directory, self._display = directory, display
        self._begins = begins
        directory.warn = self.line = display.line
        self._begun = False  # training has
        self.summary: dict[str, Any] | None = None  # that the workers report as the training ends
        self._started = time.time()
        self._last: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {"loss": None, "accuracy": None, "metrics": {}}

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Writes and shows records, in order; of several steps' metrics the newest ones are shown."""
        shown: dict[str, Any] | None = None
        ended = False
        with self.directory.batch():
            for kind, data in records:
                match kind:
                    case "start":
                        self._start(data)
                        shown = None
                    case "metrics":
                        if self.directory.metrics(data):  # else it came before: a new leader sends steps again
                            self._last = shown = data
                    case "event":
                        if data["kind"] == "evaluation":
                            self._evaluation = {name: data[name] for name in ("loss", "accuracy", "metrics")}
                        self.directory.event(data)
                        self._display.event(data)
                    case "ledger":
                        self.directory.ledger(data)
                    case "summary":
                        self.summary, ended = data, self._begins is not None
                    case "line":
                        self.line(data["text"])
        if ended:  # all records before it are written
            self._write_summary(None)
        if shown is not None:
            self._display.metrics(shown)

    def _start(self, data: dict[str, Any]) -> None:
        self._begun = True
        if self._begins is not None:
            self._begins()
        self.directory.begin(data.get("settings", {}))
        self.directory.rewind(data["step"], data.get("ledger", False))
        self._display.start(data["samples"], data["steps"], f"kfuse  {self.directory.path}")

    def failed(self, why: str) -> None:
        """Writes the event that the job has failed. It is not shown: the command prints the reason."""
        self.directory.event({"step": self._last.get("step"), "kind": "failure", "why": why})

    def close(self, why: str | None) -> None:
        """Writes and shows the summary. If the workers reported none, it is made from the last step that they reported.

        why: the exit reason of such a summary.
        """
        summary = self._write_summary(why)
        self.directory.close()
        if self.summary is None and why in ("failed", NOT_TRAINED):
            self._display.stop()
        else:
            self._display.finish({**summary, "report": f"kfuse report {self.directory.path}"})

    def _write_summary(self, why: str | None) -> dict[str, Any]:
        summary = self.summary or {
            "steps": self._last["step"] + 1 if self._last else 0,
            "epochs": self._last.get("epoch", 0),
            "samples": self._last.get("samples", 0),
            "wall_s": time.time() - self._started,
            **{name: self._last.get(name) for name in ("loss", "batch_size", "lr", "workers")},
            **{f"heldout_{name}": value for name, value in self._evaluation.items()},
            "params_sha256": None,
            "exit_reason": why,
        }
        missing = {name: getattr(self.directory, name) for name in ("lines_lost", "steps_left_out")}
        summary = {**summary, **{name: count for name, count in missing.items() if count}}
        try:
            if self._begun or self.directory.is_new:  # else it holds a run that could not be gone on with
                self.directory.summary(summary)
        except OSError as error:
            self.line(f"kfuse: warning: {self.directory.path / 'summary.json'}: cannot be written: {error.strerror}")
        return summary
