"""Which view comes next, how many workers start, and whom to kill, by rows of who is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from limits import limits

from kfuse.elastic.job import Job
from kfuse.elastic.processes import State, Worker
from kfuse.elastic.protocol import Member, View
from kfuse.elastic.roster import plan

_STATES = {state.value[0]: state for state in State}
_FLAGS = {"n": "noticed", "x": "to_replace", "o": "ended_loop", "k": "why"}
ONE: dict[str, Any] = {"wanted": 1, "places": 1}
THREE: dict[str, Any] = {"wanted": 3, "places": 3}
BROKEN: dict[str, Any] = {"broken": "failure"}


def who(text: str) -> dict[int, Worker]:
    """Workers by words such as "0m 2rn": number, state's first letter, flags ("w": its process waits for room).

    All but those that boot, are ready or are held have joined a view.
    """
    found = {}
    for word in text.split():
        process: Any = SimpleNamespace(running="w" not in word)
        worker = Worker(int(word[0]), process, _STATES[word[1]], joined=word[1] not in "brh")
        for flag in word[2:].replace("w", ""):
            setattr(worker, _FLAGS[flag], True)
        found[worker.number] = worker
    return found


@pytest.mark.parametrize(
    ("there", "view", "job", "reason", "members", "start", "kill"),
    [
        # The first view, and one after all were lost.
        ("", "", {}, "", "", 2, ""),
        ("0b 1r", "", {}, "", "", 0, ""),
        ("0r 1r", "", {}, "start", "01", 0, ""),
        ("0r 1bn", "", {}, "", "", 1, "1"),
        ("2r 3b", "01", {}, "", "", 0, ""),
        ("2r 3bw", "01", {}, "restart", "2", 0, ""),  # with those that have found room
        ("2h", "01", ONE, "restart", "2", 0, ""),
        ("2r 3r", "01", ONE, "restart", "2", 0, ""),  # those that nobody wants any more do not block it
        # Growth, shrinkage and replacement.
        ("0m", "0", {}, "", "", 1, ""),
        ("0m", "0", {"room": 0}, "", "", 0, ""),
        ("0m", "0", {**THREE, "room": 1}, "", "", 1, ""),
        ("0m 1r", "0", {}, "grow", "01", 0, ""),
        ("0m 1h", "0", {}, "", "", 0, ""),
        ("0m 1r 2b", "0", THREE, "", "", 0, ""),
        ("0m 1r 2bw", "0", THREE, "grow", "01", 0, ""),
        ("0m 1m 2m", "012", {}, "shrink", "01", 0, ""),
        ("0mx 1m", "01", ONE, "shrink", "1", 0, ""),
        ("0mx 1m", "01", {}, "", "", 1, ""),
        ("0m 1mx", "01", {"wanted": 3}, "", "", 1, ""),  # a place stays empty
        ("0mx 1m 2r", "01", {}, "replace", "12", 0, ""),
        ("0mx 1r", "0", ONE, "replace", "01", 0, ""),  # the only one hands over its state, and then goes
        # Notice.
        ("0mn 1m", "01", {}, "notice", "1", 0, ""),
        ("0mn 1m", "1", {}, "", "", 0, ""),
        ("0mn", "0", ONE, "", "", 1, ""),  # the only one stays until another has its state
        ("0mn 1b", "0", ONE, "", "", 0, ""),
        ("0mn 1r", "0", ONE, "grow", "01", 0, ""),
        ("0mn 1m", "01", ONE, "notice", "1", 0, ""),
        ("0m 1bn", "0", {}, "", "", 0, "1"),
        ("0mn", "0", {"wanted": 1, "places": 0}, "stop", "", 0, ""),
        ("0mn", "0", {**ONE, "room": 0}, "stop", "", 0, ""),
        ("0mn 1h", "0", ONE, "stop", "", 0, ""),
        ("0mn 1e", "0", ONE, "", "", 0, ""),  # its end was not judged yet
        # Losses.
        ("0m 1e 2r", "01", {}, "", "", 0, ""),
        ("0m 2r", "01", BROKEN, "failure", "0", 0, ""),
        ("0m", "01", BROKEN, "failure", "0", 1, ""),
        ("0m", "01", {**BROKEN, "places": 1}, "failure", "0", 0, ""),
        ("0m 2e", "01", {"broken": "quit"}, "quit", "0", 0, ""),
        ("0mk 1m", "012", {**BROKEN, **THREE}, "failure", "1", 1, ""),
        ("0m 1mo", "01", BROKEN, "failure", "0", 0, ""),
        ("0mo 1m", "0", {**BROKEN, **ONE}, "failure", "1", 0, ""),  # one that was to leave
        ("0m 1mo", "0", {}, "", "", 0, ""),  # as it ends it is judged
        ("0m 1lo", "0", {}, "", "", 1, ""),
        ("0p 1m", "02", BROKEN, "failure", "01", 1, ""),
        ("2r", "01", {**BROKEN, **ONE}, "restart", "2", 0, ""),
        # What has to wait, and the end.
        ("0m 1p 2r", "01", THREE, "", "", 0, ""),
        ("0m 1r", "0", {"inquiry": 1}, "", "", 0, ""),
        ("0m 1r", "0", {"stopping": "terminated"}, "", "", 0, ""),
        ("0m", "01", {**BROKEN, "stopping": "terminated"}, "failure", "0", 0, ""),
        ("0m 1r 2b", "0", {"done": True}, "", "", 0, "12"),
        ("0mo 1m", "01", {**BROKEN, "done": True}, "failure", "1", 0, ""),
    ],
)
def test_plan(there: str, view: str, job: dict[str, Any], reason: str, members: str, start: int, kill: str) -> None:
    """view: the numbers of the newest view's workers, whose generation is their number."""
    state = Job(**limits(2, 1, 3))
    state.view = View(len(view), tuple(Member(int(number), 1, "here") for number in view), ("", 0), "")
    for name, value in job.items():
        setattr(state, name, value)
    found = plan(who(there), state, job.get("room"))
    assert ("stop" if found.stop else found.reason, found.recovers) == (reason, reason == state.broken != "")
    assert "".join(str(worker.number) for worker in found.members) == members
    assert (found.start, "".join(str(worker.number) for worker in found.kill)) == (start, kill)
