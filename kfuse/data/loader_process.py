"""A loader process: fetches the micro-batches that its training worker requests, in order, until it is told to end."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from kfuse.data.fetching import Fetcher, Loading, Task

IGNORED = (signal.SIGINT, signal.SIGTERM)
"""By loader processes: these signals are sent to a whole job, and the training worker decides what to do."""
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 5.0  # where the kernel does not end a loader process with its parent
SHARED_MEMORY = (
    "shared memory is short (/dev/shm): give it more (docker run --shm-size=8g), or lower data.prefetch "
    "(prefetch_factor) or data.workers (num_workers)"
)


@dataclass(frozen=True)
class Failure:
    """An exception in a loader process, in place of a batch."""

    error: Exception
    text: str  # the traceback there


def serve(connection: Connection, fetcher: Fetcher, number: int, loading: Loading, parent: int) -> None:
    """Fetches the tasks that come, in their order, until None comes. Sends each one's batch, or why there is none."""
    _die_with(parent)
    sys.excepthook = _silent_without_parent
    gc.freeze()  # objects of the training worker, such as its process groups, must not be destroyed here
    for number_of_signal in IGNORED:
        signal.signal(number_of_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    torch.set_num_threads(1)
    dataset: Any = getattr(fetcher.data, "dataset", fetcher.data)
    # For torch.utils.data.get_worker_info; default_collate then collates into shared memory.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=loading.workers, seed=fetcher.sampler.seed, dataset=dataset
    )
    waiting: deque[Task] = deque()
    begun = False
    while True:
        try:
            while not waiting or connection.poll():
                if not connection.poll(_PARENT_CHECK_S):
                    if os.getppid() != parent:
                        os._exit(0)
                elif (task := connection.recv()) is None:
                    os._exit(0)
                else:
                    waiting.append(task)
            connection.send_bytes(_reply(fetcher, waiting.popleft(), number, None if begun else loading.init))
            begun = True
        except (OSError, EOFError):  # the training worker is gone
            os._exit(0)


def _reply(fetcher: Fetcher, task: Task, number: int, init: Callable[[int], object] | None) -> memoryview:
    """Returns the message of a task's batch, or of why there is none. init: called first."""
    try:
        if init is not None:
            init(number)
        return ForkingPickler.dumps((task, fetcher.fetch(task)))
    except Exception as error:
        return ForkingPickler.dumps((task, _failure(error, number)))


def _die_with(parent: int) -> None:
    """Has the kernel end this process with the thread that has forked it.

    The training worker's connections are open here too: other workers notice that it is lost once this process has
    ended as well.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _silent_without_parent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a thread of torch's that hands tensors over: a connection breaks as the training worker ends. No news."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


def _failure(error: Exception, number: int) -> Failure:
    """Returns an exception as it is sent: itself, or, where it cannot be, a RuntimeError of the same text."""
    text = f"in loader process {number} (pid {os.getpid()}):\n{traceback.format_exc()}".rstrip()
    if "shared memory" in str(error) or "/torch_" in str(error):
        text = f"{SHARED_MEMORY}\n{text}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, text)
