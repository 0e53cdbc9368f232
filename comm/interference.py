"""Interference: something else slows this job's messages down. Found by vote, as in KungFu (Mai et al., OSDI 2020).

1) Each worker times its exposed communication: from the end of its own backward until all sums are there. A step sends
   the same bytes as the one before, so its throughput is in proportion to 1 / seconds.
2) Its reference is the median of the REFERENCE steps before its last WINDOW steps. It votes for interference if three
   quarters of the last WINDOW steps have below SLOW of the reference's throughput, until their median has RECOVERED of
   it. So the reference moves on with the steps, and a lasting slow-down is in it after some REFERENCE / 2 steps: it is
   told once. (KungFu compares averages with one reference window, by the same factor: 1.25 times the duration.)
   It votes anew every EVERY steps, since sorting the times costs as much as a small kernel.
3) The vote travels in the worker's slots of the tail: no message is added.
4) There is interference if more than half of the workers vote for it, the one that computes slowest among them. The
   others wait for that one, so a worker that becomes slow makes them vote too. It waits for nobody itself. It is over
   when more than half vote that their throughput is as before.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

SLOW, RECOVERED = 0.8, 0.9  # of the reference's throughput
WINDOW, REFERENCE, EVERY = 16, 64, 4  # steps
_LEAST = 16  # steps of a reference
UNKNOWN, AS_BEFORE, SLOWER = 0.0, 1.0, 2.0
"""Votes, as the tail has them."""


class Voter:
    """One worker's times, and its vote. Made anew where workers or the transport change."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW + REFERENCE)
        self._steps = 0
        self.vote = UNKNOWN
        """UNKNOWN during the first steps, then AS_BEFORE or SLOWER."""

    def forget(self) -> None:
        self._seconds.clear()
        self.vote = UNKNOWN

    def take(self, seconds: float) -> None:
        """Another step's exposed communication; 0.0 is unknown, and left out."""
        if seconds > 0:
            self._seconds.append(seconds)
        self._steps += 1
        if self._steps % EVERY or len(self._seconds) < WINDOW + _LEAST:
            return
        known = list(self._seconds)
        before, now = statistics.median(known[:-WINDOW]), sorted(known[-WINDOW:])
        if before / now[WINDOW // 4] < SLOW:
            self.vote = SLOWER
        elif self.vote == UNKNOWN or before / statistics.median(now) >= RECOVERED:
            self.vote = AS_BEFORE


def verdict(votes: Sequence[float], throughput: Sequence[float | None]) -> bool | None:
    """Whether there is interference, by ranks' votes and micro-batches a second; None where the votes do not say."""
    if 2 * sum(vote == AS_BEFORE for vote in votes) > len(votes):
        return False
    known = [(each, rank) for rank, each in enumerate(throughput) if each is not None]
    if known and 2 * sum(vote == SLOWER for vote in votes) > len(votes):
        _, slowest = min(known)
        return True if votes[slowest] == SLOWER else None
    return None
