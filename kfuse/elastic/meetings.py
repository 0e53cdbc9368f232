"""Where the workers of a view meet, while each is at a step of its own (pair averaging).

A worker that is to meet the others stands still, and tells its step. Once all of its view have, each gets the same
answer (`protocol.Met`): where their steps differ, those behind go on to the highest and tell it again. What the answer
says of views, stopping and announcements is the same for all. A lost worker ends a meeting by the view without it.
"""

from __future__ import annotations

import math
from typing import Any

from kfuse.elastic.job import Job
from kfuse.elastic.processes import Processes, Worker, send_to_all
from kfuse.elastic.protocol import HEARTBEAT_S


class Meetings:
    def __init__(self, job: Job, processes: Processes) -> None:
        self._job, self._processes = job, processes
        self._generation, self._members = 0, frozenset[int]()  # of the view whose workers stand still
        self._waiting: dict[int, dict[str, Any]] = {}  # the message of each of them, by its number
        self._told_at = -math.inf  # when those that stand still were told that another one moves
        self._steps: dict[int, int] = {}  # by worker: the newest step that its heartbeats have told of
        self._announced = 0
        # By number: announcements that some worker may still have to apply.
        self._unapplied: dict[int, dict[str, Any]] = {}

    def announce(self, announcement: dict[str, Any]) -> None:
        """Passes on what the leader announces, numbered from 1, to all workers in the same order."""
        self._announced += 1
        self._unapplied[self._announced] = announcement
        send_to_all(self._processes.alive(), "announce", number=self._announced, announcement=announcement)

    def connected(self, worker: Worker) -> None:
        """A new worker gets the announcements of before: after a loss it may be with the others before they meet."""
        if not self._processes.members():  # those that were to apply them are lost
            self._unapplied.clear()
        for number, announcement in self._unapplied.items():
            worker.send("announce", number=number, announcement=announcement)

    def arrive(self, worker: Worker, message: dict[str, Any]) -> None:
        """A worker waits for the others. Where it is the last of its view's members, all get the answer."""
        members, generation = message["members"], message["generation"]
        if generation < self._generation:  # of a view that lost a worker: not all will come
            return
        if generation > self._generation:
            self._generation, self._members, self._waiting = generation, frozenset(members), {}
        self._waiting[worker.number] = message
        if len(self._waiting) < len(members):
            return
        found, self._waiting = self._waiting.values(), {}
        steps, by_all = [each["step"] for each in found], min(each["applied"] for each in found)
        self._unapplied = {number: each for number, each in self._unapplied.items() if number > by_all}
        answer: dict[str, Any] = {
            "view": generation,
            "low": min(steps),
            "high": max(steps),
            "generation": self._job.view.generation,
            "stop": self._job.stopping or "",
            "announced": self._announced,
        }
        send_to_all(map(self._processes.workers.__getitem__, members), "met", **answer)

    @property
    def under_way(self) -> bool:
        return bool(self._waiting) and self._generation == self._job.view.generation

    def moved(self, worker: Worker, step: int | None) -> None:
        """A heartbeat tells how many steps a worker has made. Those that wait learn that another one moves,
        once for all heartbeats of a period.
        """
        if step is None or step == self._steps.get(worker.number):
            return
        self._steps[worker.number] = step
        now = worker.last_message_at
        if self._waiting and now - self._told_at >= HEARTBEAT_S and worker.number in self._members:
            self._told_at = now
            others = (self._processes.workers[number] for number in self._waiting if number != worker.number)
            send_to_all(others, "moving")
