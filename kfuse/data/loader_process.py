"""A loader process: fetches the micro-batches that its training worker requests, in order, until it is told to end."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from kfuse.data.fetching import Fetcher, Loading, Task

Message = tuple[int, Task | None]
"""To a loader process: the request's number, and its task (None: no longer needed). None in place of a message: it is
to end."""

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
    text: str
    """Where it was raised: the traceback there."""


def serve(connection: Connection, fetcher: Fetcher, number: int, loading: Loading, parent: int) -> None:
    """Fetches what is requested, in that order, until told to end. Sends each batch, or why there is none."""
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
    inbox: SimpleQueue[Message | None] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox, parent), daemon=True).start()
    waiting: dict[int, Task] = {}
    begun = False
    while True:
        while not waiting or not inbox.empty():
            message = inbox.get()
            if message is None:
                os._exit(0)
            request, task = message
            if task is None:
                waiting.pop(request, None)
            else:
                waiting[request] = task
        request = next(iter(waiting))
        task = waiting.pop(request)
        try:
            if not begun and loading.init is not None:
                loading.init(number)
            begun = True
            reply = ForkingPickler.dumps((request, fetcher.fetch(task)))
        except Exception as error:
            reply = ForkingPickler.dumps((request, _failure(error, number)))
        try:
            connection.send_bytes(reply)
        except OSError:  # the training worker is gone
            os._exit(0)


def _listen(connection: Connection, inbox: SimpleQueue[Message | None], parent: int) -> None:
    """Takes messages as they come, in a thread: the training worker never waits for a busy loader process to take one.

    Ends the process where the training worker is gone.
    """
    try:
        while True:
            while not connection.poll(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    os._exit(0)
            inbox.put(connection.recv())
    except (OSError, EOFError):
        os._exit(0)


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
    """An exception as it is sent: itself, or, where it cannot be, a RuntimeError of the same text."""
    text = f"in loader process {number} (pid {os.getpid()}):\n{traceback.format_exc()}".rstrip()
    if "shared memory" in str(error) or "/torch_" in str(error):
        text = f"{SHARED_MEMORY}\n{text}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(error, text)
