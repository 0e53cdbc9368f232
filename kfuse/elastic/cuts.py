"""Pairs of workers that cannot reach each other, while both reach the supervisor: who they are, and who has to go.

That contact was lost does not tell between whom: a worker waits for one that waits for another. So each is asked whom
it reaches, by a connection that carries nothing (`reach.unreached`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kfuse.elastic.job import Job, Records
from kfuse.elastic.processes import Processes, State, Worker

Pair = tuple[int, int]  # numbers of two workers, the smaller one first

_log = logging.getLogger("kfuse")

_REACH_S = 2.0  # for a connection, twice: a lost packet of it is sent again after 1 s
_ANSWER_S = _REACH_S + 2.0
_AGAIN_S = 10.0  # until a new worker that does not reach the others tries again


class Cuts:
    def __init__(self, job: Job, processes: Processes, records: Records) -> None:
        self._job, self._processes, self._records = job, processes, records
        self._inquiries = 0
        self._answers: dict[int, dict[int, list[int]]] = {}  # by inquiry, by worker: whom it does not reach
        self._answered, self._evicting = asyncio.Condition(), asyncio.Lock()
        self._hosts = set[str]()  # of workers that had to go: a new worker there is tried before it joins

    async def evict(self) -> bool | None:
        """Kills workers of the newest view until all that are left reach each other. False if they do so already.

        None: another view was formed meanwhile, and the answer is not needed any more.
        """
        async with self._evicting:
            return await self._evict()

    async def _evict(self) -> bool | None:
        view, members = self._job.view, self._processes.members()
        pairs = await self._among(dict.fromkeys(members, members))
        if pairs:  # packets are lost elsewhere too: only a pair of which that is said twice does not reach each other
            again = await self._among(dict.fromkeys(members, members))
            pairs = [pair for pair in pairs if pair in again]
        if self._job.view is not view or self._job.is_over:
            return None
        # One that has ended its loop may have closed its socket since.
        there = [each.number for each in self._processes.members() if not (each.ended_loop or each.said_goodbye)]
        gone = to_leave(there, pairs)
        if gone:
            self._tell(pairs, gone)
        for worker in (self._processes.workers[number] for number in gone):
            others = [other for pair in pairs if worker.number in pair for other in pair if other != worker.number]
            self._hosts.add(worker.host)
            if hasattr(worker.process, "cut_off"):
                worker.process.cut_off = True
            self._processes.end(worker, f"did not reach {', '.join(map(self._named, others))}")
        return bool(gone)

    def hold(self, worker: Worker) -> None:
        """Holds a new worker whose host was cut off from others until it reaches all members."""
        if worker.host in self._hosts:
            worker.state = State.HELD
            self._job.run(self._admit(worker))

    async def _admit(self, worker: Worker) -> None:
        told = False
        while worker.state is State.HELD:
            members = self._processes.members()
            pairs = await self._among({worker: members, **{member: [worker] for member in members}})
            if not pairs and worker.state is State.HELD:
                worker.state = State.READY
                return
            if not told:
                self._tell(pairs, [])
            told = True
            await asyncio.sleep(_AGAIN_S)

    async def _among(self, asked: Mapping[Worker, Sequence[Worker]]) -> list[Pair]:
        """The pairs of which one side has been asked for the other, and does not reach it. No answer says nothing."""
        self._inquiries += 1
        number, answers = self._inquiries, dict[int, list[int]]()
        self._answers[number] = answers
        for worker, others in asked.items():
            addresses = {other.number: other.address for other in others if other is not worker and other.address}
            worker.send("reach", inquiry=number, addresses=[*addresses.items()], timeout_s=_REACH_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S), self._answered:
                await self._answered.wait_for(lambda: len(answers) == len(asked))
        del self._answers[number]
        return sorted({(min(one, other), max(one, other)) for one, missing in answers.items() for other in missing})

    async def take(self, worker: Worker, message: dict[str, Any]) -> None:
        """A worker's answer."""
        if (answers := self._answers.get(message["inquiry"])) is not None:
            async with self._answered:
                answers[worker.number] = message["missing"]
                self._answered.notify_all()

    def _tell(self, pairs: Sequence[Pair], gone: Sequence[int]) -> None:
        hosts = [[self._processes.workers[number].host for number in pair] for pair in pairs]
        self._records.event("cut", workers=[[*pair] for pair in pairs], hosts=hosts, evicted=[*gone])
        told = "; ".join(" and ".join(map(self._named, pair)) for pair in pairs)
        _log.warning("workers do not reach each other: %s", told)

    def _named(self, number: int) -> str:
        return f"worker {number} on {self._processes.workers[number].host}"


def to_leave(workers: Sequence[int], pairs: Sequence[Pair]) -> list[int]:
    """Workers without which no pair is left. workers: all of them, in rank order.

    The one that reaches the fewest goes first, so the side with the most workers stays; of several the last one, so
    the leader stays where the sides are equal.
    """
    left, gone = [pair for pair in pairs if {*pair} <= {*workers}], list[int]()
    while left:
        cut = Counter(worker for pair in left for worker in pair)
        gone.append(max(cut, key=lambda worker: (cut[worker], workers.index(worker))))
        left = [pair for pair in left if gone[-1] not in pair]
    return gone
