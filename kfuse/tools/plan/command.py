"""`kfuse plan jobs.yaml workers=N`: how many workers, and which batch size, each of some jobs on one cluster gets."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kfuse.observe.recorder import table
from kfuse.settings.instantiate import describe, fits
from kfuse.settings.tree import ConfigError, did_you_mean, show
from kfuse.tools.plan import logs
from kfuse.tools.plan.jobs import Job, LinearStepTime, Option, fit, forecast, plan, service, share
from kfuse.tools.run_files import read_config, read_metrics, read_yaml

USAGE = """\
kfuse plan JOBS.yaml workers=N

Prints how many of N workers, and which batch size, each job of the file gets, its time left with low and high ends, and
worker-hours. docs/planning.md has an example of such a file.

kfuse plan CLUSTER_LOG.csv gpus=CLUSTER_GPU_NUMBER.csv

Replays a cluster's log in the format of the Helios traces: what an order by predicted durations brings, and what
releasing idle nodes. Nodes have 8 GPUs."""

MIN_STEPS = 5  # a setting (workers, batch size) with fewer steps in a run counts as not measured
# The keys of a job, and the types of their values.
KEYS: dict[str, Any] = {
    "name": str,
    "run": str,
    "samples_left": float,
    "base_batch": int,
    "batch": tuple[int, int],
    "micro": int,
    "workers": tuple[int, int],
    "noise_scale": tuple[float, float] | None,
    "throughput": dict[int, float],
    "step_time": tuple[float, float, float],
}
# The settings that a run tells of its job.
_OF_A_RUN = ("batch.size", "batch.min", "batch.max", "batch.micro", "workers.min", "workers.max")


def main(words: Sequence[str]) -> int:
    """Prints the plan. Returns the exit status. Raises ConfigError, one line, for wrong words and wrong files."""
    files = [word for word in words if "=" not in word]
    gpus = [word.removeprefix("gpus=") for word in words if word.startswith("gpus=")]
    if len(files) == len(gpus) == 1 and len(words) == 2:
        for name, value in logs.compare(logs.read(files[0], gpus[0])).items():
            print(f"{value:12,.2f}  {name}")
        return 0
    counts = [match for word in words if (match := re.fullmatch("workers=([1-9][0-9]{0,4})", word))]
    if len(files) != 1 or len(counts) != 1 or len(words) != 2:
        what = "must be one file of jobs and workers=N, a whole number above 0, or a log and gpus=FILE"
        raise ConfigError(f"{' '.join(['kfuse plan', *words])}: {what}")
    path, workers = files[0], int(counts[0][1])
    jobs, notes = read(path)
    options = [job.options(range(1, workers + 1)) for job in jobs]
    for job, each in zip(jobs, options, strict=True):
        if not each:
            why = f"none of them fits workers={workers}, batch={[*job.batch]} and {job.micro} samples each"
            if job.step_time is None:
                why += f", and was measured: (workers, batch) {sorted(job.measured)}"
            raise ConfigError(f"{path}: job {job.name}: workers={[*job.workers]}: {why}")
    _print(jobs, options, workers)
    print(*notes, sep="\n", end="\n" * bool(notes))
    return 0


def read(path: str) -> tuple[list[Job], list[str]]:
    """Returns the jobs of a file, and notes on what is not known of them. Raises ConfigError."""
    found = read_yaml(Path(path))
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{path}: must be a list of jobs, each with some of {', '.join(KEYS)}")
    jobs, notes = list[Job](), list[str]()
    for number, given in enumerate(found, 1):
        name = " ".join(str(given.get("name", given.get("run", number))).split())
        try:
            jobs.append(_job(name, given, notes))
        except ValueError as error:
            raise ConfigError(f"{path}: job {name}: {' '.join(str(error).split())}") from error
    return jobs, notes


def _job(name: str, given: Mapping[Any, Any], notes: list[str]) -> Job:
    """Returns one job of the file, checked. Adds to the notes what is not known. Raises ValueError."""
    about = _figures(given)
    base, batch, micro = about["base_batch"], about["batch"], about["micro"]
    times = about.get("times") or {(n, base): [base / speed] for n, speed in about.get("throughput", {}).items()}
    measured = {setting: float(np.median(seconds)) for setting, seconds in times.items()}
    step_time = LinearStepTime(*about["step_time"]) if "step_time" in about else fit(measured, micro)

    counts = [n for n, _ in measured] or about["workers"]
    wanted = about.get("workers", [min(counts), max(counts)])
    if wanted[0] > max(counts) or wanted[1] < min(counts):
        raise ValueError(f"workers={wanted}: must include some of those that were measured, {sorted({*counts})}")
    workers = max(wanted[0], min(counts)), min(wanted[1], max(counts))
    if step_time is None:
        notes.append(f"{name}: only (workers, batch) {sorted(measured)} were measured: no others are planned")
    elif [*workers] != wanted:
        notes.append(f"{name}: only {min(counts)} to {max(counts)} workers were measured: no others are planned")

    noise = about.get("noise_scale")
    if noise is None:
        notes.append(f"{name}: the noise scale is unknown: the batch size stays at {base}")
    elif len(noise) == 2:
        noise = (noise[0], math.sqrt(noise[0] * noise[1]), noise[1])
    expected = {(n, b): step_time(n, share(n, b, micro)) for n, b in measured} if step_time else measured
    ratios = [each / expected[setting] for setting, seconds in times.items() for each in seconds]
    low, high = np.quantile(ratios or [1.0], (0.1, 0.9))
    spread = min(low, 1.0), max(high, 1.0)
    return Job(name, about["samples_left"], base, tuple(batch), micro, workers, noise, step_time, measured, spread)


def _figures(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns what is known of a job: its own figures before those of its run. Raises ValueError."""
    for key, value in given.items():
        if key not in KEYS:
            raise ValueError(f"{key}: no such key{did_you_mean(str(key), KEYS)}; a job has {', '.join(KEYS)}")
        if not fits(value, KEYS[key]) or not _are_right(key, value):
            raise ValueError(f"{key}={show(value)}: must be {describe(KEYS[key])}, numbers above 0")
    if len({"run", "throughput", "step_time"} & {*given}) != 1:
        raise ValueError("must have one of run, throughput, step_time")
    about: dict[str, Any] = {"micro": 1, **(_of_run(given["run"]) if "run" in given else {}), **given}
    for key in ("samples_left", "base_batch", *(("workers",) if "step_time" in about else ())):
        if not about.get(key):
            why = "; a run tells it until its end, where train.epochs or train.steps is set" if "run" in given else ""
            raise ValueError(f"{key}={show(about.get(key))}: must be given{why}")
    base = about["base_batch"]
    batch = about.setdefault("batch", [base, base])
    if not batch[0] <= base <= batch[1]:
        raise ValueError(f"base_batch={base}: must be within batch={batch}")
    return about


def _are_right(key: str, value: Any) -> bool:
    """Whether a key's numbers are above 0; of `step_time` only the time of a sample must be."""
    if value is None or isinstance(value, str):
        return True
    if key == "step_time":
        return bool(value[1] > 0)
    numbers = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return fits(numbers, list[float]) and min(numbers, default=0) > 0


def _of_run(folder: str) -> dict[str, Any]:
    """Returns what a run directory tells of its job, by the keys of a job, and `times`. Raises ValueError."""
    path, done, times = Path(os.path.expanduser(folder)), None, dict[tuple[int, int], list[float]]()
    try:
        config, lines = read_config(path, _OF_A_RUN), [*read_metrics(path)]
    except ConfigError as error:
        raise ValueError(f"run={folder}: must be a run directory of `kfuse`: {error}") from error
    batch, workers = config["batch"], config["workers"]
    for line in lines:
        if line["step_time_s"] is not None:
            times.setdefault((line["workers"], line["batch_size"]), []).append(line["step_time_s"])
        done = line.get("signals", {}).get("done", done)  # a line has it where it has changed
    times = {setting: seconds for setting, seconds in times.items() if len(seconds) >= MIN_STEPS}
    if not times:
        raise ValueError(f"run={folder}: must have {MIN_STEPS} steps or more with one batch size and number of workers")
    last = lines[-1]
    noise = tuple(last[key] for key in ("noise_scale_low", "noise_scale", "noise_scale_high"))
    return {
        "samples_left": last["samples"] * (1 - done) / done if done else None,
        "noise_scale": None if None in noise else noise,
        "times": times,
        "base_batch": batch["size"],
        "batch": [batch["min"], batch["max"]],
        "micro": batch["micro"],
        "workers": [workers["min"], workers["max"]],
    }


def _print(jobs: Sequence[Job], options: Sequence[Sequence[Option]], workers: int) -> None:
    left = [job.samples_left for job in jobs]
    given, (ends, busy_s) = plan(options, left, workers), forecast(options, left, workers)
    shown = table("job", "workers", "batch", "hours left", "low to high", "worker-hours", "done in")
    for j in sorted(range(len(jobs)), key=lambda j: (given[j] is None, service(options[j], left[j]))):
        option = given[j] or options[j][0]
        hours, low, high = (left[j] / goodput / 3600 for goodput in (option.goodput, option.high, option.low))
        shown.add_row(
            Text(jobs[j].name),
            f"{'' if given[j] else 'waits for '}{option.workers}",
            str(option.batch),
            f"{hours:.3g}",
            f"{low:.3g} to {high:.3g}",
            f"{hours * option.workers:.3g}",
            f"{ends[j] / 3600:.3g} h",
        )
    Console().print(shown)
    used, hours, busy = sum(option.workers for option in given if option), max(ends) / 3600, busy_s / 3600
    print(f"{used} of {workers} workers have a job, {workers - used} are released. If each end brings a new plan, all")
    saved = abs(round(workers * hours - busy, 9))  # no -0
    print(f"is done in {hours:.3g} h with {busy:.3g} worker-hours; released workers save {saved:.3g}")
