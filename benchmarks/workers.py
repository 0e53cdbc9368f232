"""The worker processes of a benchmark: who they are, and what they tell the one that started them."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

LIMIT_S = 1800.0
"""Seconds from one message of the workers to the next one, and from the last one to their end."""


def set_torchrun_variables(rank: int, workers: int, port: int, address: str = "127.0.0.1") -> None:
    """The calling process is this rank, as torchrun would say. A store is there already, as its agent's."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(workers),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )


def free_port() -> int:
    """A port that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def messages_from(workers: Any, messages: Any, limit_s: float = LIMIT_S) -> Iterator[tuple[str, Any]]:
    """The (kind, value) pairs that workers put into the queue, as they come, until all workers have ended.

    workers: what torch.multiprocessing.spawn(..., join=False) returned. messages: a multiprocessing Queue. However this
    ends, no worker is left alive. Raises TimeoutError where nothing comes for `limit_s` seconds, and what the workers'
    `join` raises where one of them fails.
    """
    try:
        ended, heard = False, time.monotonic()
        while not ended:
            ended = workers.join(timeout=0.1)
            while True:  # after the end too: the last message may have come with it
                try:
                    message = messages.get_nowait()
                except queue.Empty:
                    break
                yield message
                heard = time.monotonic()
            if not ended and time.monotonic() - heard > limit_s:
                raise TimeoutError(f"no message of the benchmark's workers for {limit_s:g} s")
    finally:
        for process in workers.processes:
            if process.is_alive():
                process.kill()
            process.join()


def messages_of(
    count: int, work: Callable[..., None], *given: Any, limit_s: float = LIMIT_S
) -> Iterator[tuple[str, Any]]:
    """The messages of `count` processes that run work(rank, *given, port of a store, messages). See `messages_from`."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=600), wait_for_workers=False)
    messages: Any = mp.get_context("spawn").Queue()
    workers = mp.spawn(work, (*given, store.port, messages), nprocs=count, join=False)
    yield from messages_from(workers, messages, limit_s)


def leave(messages: Any) -> None:
    """Ends this worker once all that it has said has been sent, without destructors.

    Those of torch's DDP and gloo have been seen to hang, and to abort the process.
    """
    messages.close()
    messages.join_thread()
    os._exit(0)
