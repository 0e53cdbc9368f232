"""What elastic.py reads off the lines that a system's workers write: how it went on, and what the final model is of."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from elastic_systems import BATCH, EPOCH_STEPS, SAMPLES, WORKERS


@dataclass(frozen=True)
class Line:
    """See `elastic_systems.Log`."""

    time: float
    """Seconds since the epoch."""
    pid: int
    step: int
    workers: int
    """0: the step has begun; else it is done."""
    rank: int
    epoch: int
    samples: tuple[int, ...]


@dataclass
class Reader:
    """The lines so far, in the order in which they were written."""

    path: Path
    begun: list[Line] = field(default_factory=list)
    done: list[Line] = field(default_factory=list)
    _read: int = 0

    def update(self) -> None:
        if not self.path.exists():
            return
        with self.path.open() as file:
            file.seek(self._read)
            text = file.read()
        complete = text[: text.rfind("\n") + 1]
        self._read += len(complete)
        for nanoseconds, *numbers, samples in map(json.loads, complete.splitlines()):
            line = Line(nanoseconds / 1e9, *numbers, tuple(samples))
            (self.done if line.workers else self.begun).append(line)

    def since(self, moment: float) -> list[Line]:
        """Completed steps."""
        recent = []
        for line in reversed(self.done):
            if line.time < moment - 1:  # lines of different processes may be a little out of order
                break
            recent.append(line)
        return sorted((line for line in recent if line.time >= moment), key=lambda line: line.time)


def longest_gap(lines: list[Line]) -> float:
    return max((b.time - a.time for a, b in pairwise(lines)), default=0.0)


def made_again(lines: list[Line], going_on: Line) -> int:
    """Of the completed steps, those that count no more: made by workers that are gone, and again by those after them.

    lines: from before the disturbance until all are back. going_on: the first line of the workers after it.
    """
    there = {line.pid for line in lines[-4 * WORKERS :] if line.time >= going_on.time}
    again = {line.step for line in lines if line.time >= going_on.time and line.pid in there}
    gone = Counter(line.step for line in lines if line.pid not in there and line.step in again)
    # A survivor's line says that a step which a dead worker completed was its own too, in the same update.
    shared = {line.step for line in lines if line.time < going_on.time and line.pid in there}
    return sum(-(-count // WORKERS) for step, count in gone.items() if step not in shared)


@dataclass(frozen=True)
class Contents:
    """Which samples the updates of the final model are of."""

    planned: int
    """Samples of the epochs that the job's steps are."""
    lost: int
    """In no update."""
    twice: int
    """Uses beyond the first one."""
    steps: int
    drifted: int
    """Steps whose global batch was not the one that was asked for."""


def contents(reader: Reader, epochs: int) -> Contents:
    """An update that was undone, by going back to a checkpoint or with its worker's death, is no part of the model.

    Of a step that was made several times the last one counts, with as many workers as it says. They are those that
    began it last before that.
    """
    last = {line.step: line for line in sorted(reader.done, key=lambda line: line.time)}
    begun: dict[int, list[Line]] = defaultdict(list)
    for line in reader.begun:
        begun[line.step].append(line)
    used, drifted = Counter[tuple[int, int]](), 0
    for step, line in last.items():
        latest = {each.pid: each for each in begun[step] if each.time <= line.time}
        others = sorted((each for pid, each in latest.items() if pid != line.pid), key=lambda each: -each.time)
        parts = [latest[line.pid], *others[: line.workers - 1]]
        drifted += sum(len(part.samples) for part in parts) != BATCH
        used.update(_named(parts))
    within = {name: count for name, count in used.items() if name[0] < epochs}
    twice = sum(used.values()) - len(used)
    planned = epochs * SAMPLES
    return Contents(planned, planned - len(within), twice, epochs * EPOCH_STEPS, drifted)


def _named(parts: Iterable[Line]) -> Iterable[tuple[int, int]]:
    return ((part.epoch, sample) for part in parts for sample in part.samples)
