"""How long a worker's own part of a step takes: from its first micro-batch's forward to its last one's backward."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Does not count waiting for other workers. On a CUDA device it times the stream, and never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )
        self._began = self._seconds = 0.0
        self._micro_batches = 0

    def start(self) -> None:
        """At the first micro-batch's forward."""
        if self._events is not None:
            self._events[0].record()
        self._began = time.perf_counter()

    def stop(self, micro_batches: int) -> None:
        """At the end of the last one's backward; `micro_batches`: how many there were."""
        if self._events is not None:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._began
        self._micro_batches = micro_batches

    def seconds_each(self) -> float:
        """Of the last step, seconds a micro-batch; 0.0 where none was run, or the device has not finished it."""
        if not self._micro_batches:
            return 0.0
        seconds = self._seconds
        if self._events is not None:
            if not self._events[1].query():  # type: ignore[no-untyped-call]
                return 0.0
            seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return seconds / self._micro_batches

    def forget(self) -> None:
        """The last step had no micro-batch for this worker."""
        self._micro_batches = 0
