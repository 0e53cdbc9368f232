"""What a run directory holds of an earlier run, and whether a training goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from kfuse.elastic.protocol import LOOP_LEFT, NOT_TRAINED, STOP_STATUS
from kfuse.settings.tree import ConfigError, spell

RECORDS = ("metrics.jsonl", "events.jsonl", "ledger.jsonl", "summary.json")

# Exit reasons of runs that can go on. Nobody knows why a loop was left: its end, an error, Ctrl-C.
_NOT_ENDED = (*STOP_STATUS, "failed", NOT_TRAINED, LOOP_LEFT, None)


class Earlier(NamedTuple):
    """A run that a directory holds."""

    has_steps: bool  # some are recorded
    ended: str | None  # the exit reason of a run that has come to its end; None: it can go on


def earlier(run_dir: Path) -> Earlier | None:
    """The run whose records the directory holds; None if there are none."""
    if not any((run_dir / name).exists() for name in RECORDS):
        return None
    metrics = run_dir / "metrics.jsonl"
    try:
        reason = json.loads((run_dir / "summary.json").read_bytes())["exit_reason"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = None
    return Earlier(metrics.exists() and metrics.stat().st_size > 0, None if reason in _NOT_ENDED else reason)


def choose_resume(run_dir: Path, checkpoints: Path | None, asked: str | None, where: str, shell: bool = False) -> str:
    """Where a training begins whose directory was given: "never" (at its first step), "auto" or a checkpoint's path.

    checkpoints: the folder that is resumed from, if there is one. asked: one of these, by the user; None: nothing.
    where: how messages name the directory. shell: how they spell settings. Raises ConfigError where another run's
    records would be replaced, or those of one that has ended, unless "auto" is to train that longer; and where nothing
    is asked and there is no checkpoint to go on from, or a checkpoint of an unknown run.
    """
    run, auto, kept = earlier(run_dir), f"{spell('checkpoint.resume', shell)}=auto", has_checkpoint(checkpoints)
    if asked is not None and asked != "auto":
        path = Path(asked).expanduser().resolve()
        own = asked != "never" and any(path.is_relative_to(it.resolve()) for it in (run_dir, checkpoints) if it)
        if run is not None and not own:
            raise ConfigError(f"{where}: holds a run already: must be a new one, or {auto} goes on with it")
        return asked
    if run is not None and run.ended and not (kept and asked):
        longer = f"; to train longer: {auto}" if kept else " and left no checkpoint"
        raise ConfigError(f"{where}: must be a new one: the run in it has ended ({run.ended}){longer}")
    if asked is not None:
        return asked
    if run is not None and run.has_steps and not kept:
        anew = "" if checkpoints is None else f"; to begin anew in it, in place of its records: {auto}"
        raise ConfigError(f"{where}: must be a new one: the run in it has left no checkpoint to go on from{anew}")
    if run is None and kept:
        must = f"must be this run's own, or {auto} goes on from them"
        raise ConfigError(f"{where} holds no run, but {checkpoints} has checkpoints: {must}")
    return "never" if run is None or checkpoints is None else "auto"


def has_checkpoint(folder: Path | None) -> bool:
    """Returns whether the folder of checkpoints has one, good or not."""
    return folder is not None and next(folder.glob("step-*/manifest.json"), None) is not None
