"""Runs elastic jobs for tests: the supervisor in this process or behind the real command line, with real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from limits import limits
from omegaconf import OmegaConf
from warm import WarmLauncher, WarmProcess

from kfuse.cli.check import prepare, validate
from kfuse.elastic import job as control
from kfuse.elastic.job import JobFailed
from kfuse.elastic.launchers import Launcher
from kfuse.elastic.launchers.replica import ReplicaLauncher
from kfuse.elastic.supervisor import Supervisor
from kfuse.observe.run_dir import RunDirectory
from kfuse.settings.tree import flat

TESTS = Path(__file__).parent
DEADLINE_S = 300.0  # against hanging for ever; a busy machine may take long
# What a step's record has that may differ between two runs of the same training.
_OF_THE_RUN = ("workers", "step_time_s", "data_wait_s", "data_bytes_per_s", "signals")

During = Callable[[Supervisor, "Job"], Awaitable[None]]


@dataclass
class Job:
    """A run directory, and what else was seen of the job."""

    directory: Path
    lines: list[str] = field(default_factory=list)
    error: str | None = None  # of a job that was given up
    statuses: dict[int | None, int | None] = field(default_factory=dict)  # of worker processes, by pid
    loop_errors: list[str] = field(default_factory=list)  # of the supervisor's event loop
    processes: Sequence[WarmProcess] = ()  # that were forked for it so far

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "events.jsonl")

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "ledger.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def views(self) -> list[dict[str, Any]]:
        return self.of_kind("view")

    @property
    def pids(self) -> set[int]:
        return {worker["pid"] for view in self.views for worker in view["workers"]} | set(self.statuses)

    def told(self) -> str:
        """The end of everything, for a failed test's message."""
        events = [json.dumps(event) for event in self.events[-40:]] if self.directory.exists() else []
        return "\n".join([f"error: {self.error}", *events, "the last lines of all workers:", *self.lines[-80:]])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none if it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def words(*texts: str) -> list[str]:
    """Overrides written as on a command line."""
    return " ".join(texts).split()


def override(key: str, value: Any) -> str:
    """`key=value` in Hydra's syntax, for plain values nested in lists and mappings."""

    def say(value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{name}:{say(item)}" for name, item in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(say, value)) + "]"
        return json.dumps(value) if value is None or isinstance(value, bool | str) else repr(value)

    return f"{key}={say(value)}"


def chaos(directory: Path, **arguments: Any) -> list[str]:
    """`chaos.Chaos` with these arguments as the policy; its events leave their marks in `directory`."""
    given = {"directory": str(directory / "events"), **arguments}
    return ["policy._target_=chaos.Chaos", *(override(f"+policy.{name}", value) for name, value in given.items())]


def changes(text: str) -> list[dict[str, Any]]:
    """Phases or gates of "5:2 25:3": by step, how many workers."""
    return [
        {"step": int(step), "workers": int(workers)} for step, _, workers in (w.partition(":") for w in text.split())
    ]


_EVENT = re.compile(r"(\d+) ([a-z_ ]+) (\d)(?: by (\w+))?(?: of (\d))?(?: in message (\d+))?")


def events(text: str) -> list[dict[str, Any]]:
    """`chaos.Chaos`'s events of "STEP MOMENT RANK [by HOW] [of WORKERS] [in message NUMBER], ..."; how: kill."""
    found = []
    for part in filter(None, text.split(", ")):
        match = _EVENT.fullmatch(part)
        assert match is not None, part
        step, moment, rank, how, workers, message = match.groups()
        found.append({"step": int(step), "moment": moment, "rank": int(rank), "how": how or "kill"})
        found[-1] |= {"workers": int(workers or 2)} | ({"message": int(message)} if message else {})
    return found


def pids(view: dict[str, Any]) -> list[int]:
    """The view's processes, by rank."""
    return [worker["pid"] for worker in view["workers"]]


def compose(overrides: Iterable[str]) -> dict[str, Any]:
    """The configuration as the command line makes and checks it, in plain values."""
    given = list(overrides)
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        cfg = hydra.compose("config", given)
    prepare(cfg, given)
    validate(cfg)
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return dict(plain)


def environment() -> dict[str, str]:
    """For workers: the tests' modules importable, one thread each."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class FileRecorder:
    """Writes what workers report to the job's run directory."""

    def __init__(self, job: Job) -> None:
        self._directory = RunDirectory(job.directory, sinks=(), ledger=True)
        self._job = job

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        with self._directory.batch():
            for kind, data in records:
                if kind == "start":
                    self._directory.rewind(data["step"])
                elif kind == "line":
                    self._job.lines.append(data["text"])
                else:
                    getattr(self._directory, kind)(data)


_references: dict[tuple[str, ...], Job] = {}
REFERENCES = Path()  # where they are made: a folder of the session


def reference(training: Iterable[str], **arguments: Any) -> Job:
    """The training on one worker to which nothing happens, but for these arguments of `chaos.Chaos`.

    It is what other jobs are compared with, and is made once a session.
    """
    key = (*training, repr(arguments))
    if key not in _references:
        folder = REFERENCES / str(len(_references))
        job = run_job(folder / "run", [*training, *chaos(folder, **arguments)])
        assert job.error is None, job.told()
        _references[key] = job
    return _references[key]


def run_job(
    directory: Path, overrides: Iterable[str], during: During | None = None, launcher: Launcher | None = None
) -> Job:
    """Runs a job to its end, good or bad. `during` runs beside it, and is cancelled when the job ends.

    launcher: None for forked processes; only of those the exit status is known, and their lines are in the log.
    Fails, with all that was seen, if the job does not end in time or leaves a process behind.
    """
    config = compose(["observe.ledger=true", "workers.threads=1", *overrides])
    given = {"settings": flat(config), "restart": config["checkpoint"]["every_steps"] is not None}
    return _run(directory, config, given, during, launcher)


def run_script(
    directory: Path,
    given: dict[str, Any],
    *script: str,
    launcher: Launcher | None = None,
    ranks: int = 1,
    during: During | None = None,
) -> Job:
    """Runs a script, with its arguments, as kfuse-run would, to its end: on forked processes, or by `launcher`.

    given: see `limits`. ranks: processes of each worker. during: see `run_job`.
    """
    return _run(directory, {}, given, during, launcher, script, ranks)


def script_job(folder: Path, text: str, workers: int, *words: str) -> Job:
    """The job of a script with this text on so many workers, of which none is replaced."""
    script = folder / "script.py"
    script.write_text(text)
    return run_script(folder / "run", limits(workers, 1, workers, replace=False, script=True), str(script), *words)


def _run(
    directory: Path,
    config: dict[str, Any],
    elasticity: dict[str, Any],
    during: During | None,
    launcher: Launcher | None,
    script: Sequence[str] = (),
    ranks: int = 1,
) -> Job:
    job, warm = Job(directory), WarmLauncher(directory.with_suffix(".log"), script=script)
    settings = {**config, "run_dir": str(directory)}
    job.processes, forks = warm.started, ReplicaLauncher(warm, ranks) if ranks > 1 else warm
    supervisor = Supervisor(launcher or forks, settings, FileRecorder(job), control.Job(**elasticity))

    async def go() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: job.loop_errors.append(repr(context)))
        beside = asyncio.create_task(during(supervisor, job)) if during else None
        try:
            await asyncio.wait_for(supervisor.run(), DEADLINE_S)
            if beside is not None and beside.done():
                beside.result()
        finally:
            if beside is not None:
                beside.cancel()
            for process in warm.started:
                process.kill()

    with patch.dict(os.environ, environment()):
        try:
            asyncio.run(go())
        except JobFailed as error:
            job.error = str(error)
        except TimeoutError:
            raise AssertionError(f"the job did not end within {DEADLINE_S:.0f} s\n{job.told()}") from None
    if launcher is None:
        job.statuses = {process.pid: process.status for process in warm.started}
        job.lines += warm.log.read_text().splitlines() if warm.log.exists() else []
    print(job.told())  # pytest shows it where the test fails
    assert_none_left(job.pids)
    assert not job.loop_errors, job.loop_errors
    return job


# -- the real command line ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def command_line(
    directory: Path, overrides: Iterable[str], starter: Iterable[str] = (sys.executable,)
) -> Iterator[tuple[subprocess.Popen[bytes], Job]]:
    """`python -m kfuse` under way in `directory`; whatever happens, neither it nor its workers survive the block."""
    quiet = ["observe.progress=false", "observe.sinks=[]", "observe.ledger=true", "workers.threads=1"]
    command = [*starter, "-m", "kfuse", f"hydra.run.dir={directory}", *quiet, *overrides]
    job, log = Job(directory), directory.with_suffix(".log")
    with log.open("ab") as stream:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
        process = subprocess.Popen(command, **pipes, env={**os.environ, **environment()})
        try:
            yield process, job
        except BaseException:
            print(log.read_text()[-8000:])
            print(job.told())
            raise
        finally:
            process.kill()
            process.wait()
            for pid in filter(is_alive, job.pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            job.lines = log.read_text().splitlines()


def wait_until(what: str, true: Callable[[], Any]) -> Any:
    """Returns the first true value of `true`. Fails after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (value := true()):
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.01)
    return value


async def until(what: str, true: Callable[[], Any]) -> None:
    """`wait_until` beside a job (`run_job`'s `during`)."""
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s for {what}"
        await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def assert_none_left(pids: Iterable[int]) -> None:
    wait_until(f"processes {sorted(pids)} to end", lambda: not any(map(is_alive, pids)))


# -- what every job must keep -------------------------------------------------------------------------------------


def assert_exact(job: Job) -> None:
    """Each step was recorded once, and each sample of each epoch was used once; of one under way, at most once."""
    metrics, ledger = job.metrics, job.ledger
    steps = [record["step"] for record in metrics]
    wrong = [(step, number) for number, step in enumerate(steps) if step != number][:1]
    assert not wrong and len(steps) == job.summary["steps"], f"{len(steps)} steps recorded, {wrong}\n{job.told()}"
    entries = [(entry["step"], entry["micro_batch"]) for entry in ledger]
    expected = [(record["step"], j) for record in metrics for j in range(record["micro_batches"])]
    assert entries == expected, job.told()
    epoch_of = {record["step"]: record["epoch"] for record in metrics}
    used: dict[int, Counter[int]] = {}
    for entry in ledger:
        used.setdefault(epoch_of[entry["step"]], Counter()).update(entry["indices"])
    complete = job.summary["epochs"]
    assert sorted(used) in (list(range(complete)), list(range(complete + 1)))
    samples = set(used[0])
    assert samples == set(range(len(samples))) or not complete
    for epoch, counts in used.items():
        assert set(counts.values()) == {1}, f"epoch {epoch}: {counts.most_common(5)}"
        assert set(counts) == samples or epoch == complete, f"epoch {epoch}: {len(counts)} samples"


def assert_same_training(job: Job, reference: Job) -> None:
    """`job` came to its end and trained exactly as `reference` did, bit by bit."""
    assert job.error is None, job.told()
    assert_exact(job)
    assert_same_steps(job, reference)
    for name in (
        "steps",
        "epochs",
        "samples",
        "loss",
        "heldout_loss",
        "heldout_accuracy",
        "batch_size",
        "lr",
        "exit_reason",
    ):
        assert job.summary[name] == reference.summary[name], name
    assert _evaluations(job) == _evaluations(reference)


def assert_same_steps(job: Job, reference: Job) -> None:
    """The same parameters by the same steps, bit by bit."""
    assert job.summary["params_sha256"] == reference.summary["params_sha256"], first_difference(job, reference)
    assert _training(job.metrics) == _training(reference.metrics), first_difference(job, reference)
    assert job.ledger == reference.ledger


def _training(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in _OF_THE_RUN} for record in metrics]


def _evaluations(job: Job) -> list[tuple[int, float, float]]:
    return [(event["step"], event["accuracy"], event["loss"]) for event in job.of_kind("evaluation")]


def first_difference(job: Job, reference: Job) -> str:
    pairs = zip(_training(job.metrics), _training(reference.metrics), strict=False)
    found = next((f"{ours}\ninstead of\n{theirs}" for ours, theirs in pairs if ours != theirs), "none in the metrics")
    return f"first difference: {found}\n{job.told()}"
