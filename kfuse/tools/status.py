"""The command `kfuse status RUN_DIR`: what a run does now, for people and for probes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfuse.elastic.protocol import STOP_STATUS
from kfuse.observe.lock import in_use
from kfuse.observe.recorder import figure
from kfuse.observe.sentences import sentence, since
from kfuse.settings.tree import ConfigError
from kfuse.tools.run_files import read_lines, read_summary

USAGE = """\
kfuse status RUN_DIR [SECONDS]

Prints what the run recorded in RUN_DIR does now: its phase, step, rate, workers and hosts, the age of the last step,
and the latest events.
Exit status 0: the run begins, trains, or has ended as it should. 1: it has failed or was stopped, its processes are
gone, or, where SECONDS is given, it has recorded nothing for longer than that. 2: RUN_DIR is no run's directory.
As a probe of Kubernetes: command: [kfuse, status, /runs/a, "300"] (docs/operate.md)."""

_LATEST = 5  # events that are shown
_LATEST_BYTES = 2**22  # that are read of the end of a file
_RATE_STEPS = 50  # the rate is of so many steps


@dataclass(frozen=True)
class State:
    """What a run's files say. None is unknown."""

    phase: str  # begins, trains, ended, stopped (by a signal), failed, gone (its processes ended without an end)
    steps: int  # completed
    rate: float | None  # samples a second
    workers: int | None
    hosts: dict[str, int]  # workers of the newest view by host
    written: float | None  # when the newest line of its files was written (Unix time)
    events: list[dict[str, Any]]  # the latest ones, in order
    summary: dict[str, Any]  # empty while it trains

    def is_well(self, silent_s: float | None) -> bool:
        """Whether it begins, trains or has ended as it should. silent_s: how old its newest line may be; None: any."""
        if self.phase in ("begins", "trains"):
            return silent_s is None or (self.written is not None and time.time() - self.written <= silent_s)
        return self.phase == "ended"


def main(words: Sequence[str]) -> int:
    """Prints the run's state. Returns the exit status. Raises ConfigError for what is no run directory."""
    if not 1 <= len(words) <= 2 or not all(word.isdigit() for word in words[1:]):
        raise ConfigError("kfuse status: must be given a run's directory, and a whole number of seconds or none")
    try:
        return _show(state_of(Path(words[0])), float(words[1]) if len(words) == 2 else None)
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{words[0]}: another version of kfuse, or another program, has written there") from error


def _show(state: State, silent_s: float | None) -> int:
    rows = {
        "phase": state.phase + (f" ({state.summary['exit_reason']})" if state.summary.get("exit_reason") else ""),
        "steps": f"{state.steps:,}",
        "rate": f"{figure(state.rate)} samples/s",
        "workers": "unknown" if state.workers is None else str(state.workers),
        "hosts": ", ".join(f"{host} {count}" for host, count in state.hosts.items()) or "unknown",
        "last record": "none" if state.written is None else f"{since(state.written)} ago",
    }
    for label, value in rows.items():
        print(f"{label:<12} {value}")
    for event in state.events:
        step = "" if event.get("step") is None else f"step {event['step']}  "
        print(f"{since(event['time']) + ' ago':<12} {step}{sentence(event)}")
    return 0 if state.is_well(silent_s) else 1


def state_of(run_dir: Path) -> State:
    """Returns the state of the run recorded in this directory. Raises ConfigError if there is none."""
    files = [run_dir / "metrics.jsonl", run_dir / "events.jsonl"]
    if not files[0].exists():
        raise ConfigError(f"{run_dir}: must be the directory of a run: it has no metrics.jsonl")
    (steps, events), summary = ([*read_lines(path, _LATEST_BYTES)] for path in files), read_summary(run_dir)
    views = [event for event in events if event.get("kind") == "view"]
    times = [path.stat().st_mtime for path, lines in zip(files, (steps, events), strict=True) if lines]
    recent = steps[-_RATE_STEPS:]
    seconds = sum(step.get("step_time_s") or 0.0 for step in recent[1:])
    reason = summary.get("exit_reason")
    if reason in (*STOP_STATUS, "failed") and in_use(run_dir):  # another command goes on with the run
        summary = {}
    if summary:
        phase = "failed" if reason == "failed" else "stopped" if reason in STOP_STATUS else "ended"
    elif not in_use(run_dir):
        phase = "gone"
    else:
        phase = "trains" if steps else "begins"
    return State(
        phase,
        steps=steps[-1]["step"] + 1 if steps else 0,
        rate=(recent[-1]["samples"] - recent[0]["samples"]) / seconds if seconds else None,
        workers=steps[-1].get("workers") if steps else None,
        hosts=dict(Counter(worker["host"] for worker in views[-1]["workers"])) if views else {},
        written=max(times, default=None),
        events=[event for event in events if sentence(event) is not None][-_LATEST:],
        summary=summary,
    )
