"""Loader processes: they fetch a training worker's coming micro-batches ahead of their use.

The processes are forked, so that any data set can be used, and share nothing but one pipe each with their training
worker: one that is killed leaves no lock behind that others wait for. (torch's DataLoader shares a queue, and raises
the loss of a process from a signal handler.) Tensors travel in shared memory, as with torch's DataLoader.

What is fetched is a function of the seed and the task, so results are kept by their task: where the plan changes (the
number of workers, the batch size), those that are still needed are used, and the others dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import pickle
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.multiprocessing  # for tensors in messages
from torch.utils.data._utils import worker as torch_worker

from kfuse.data.dataset import Dataset, MapData
from kfuse.data.fetching import EpochSampler, Fetcher, LoaderError, Loading, StreamSampler, Task, TaskPlan
from kfuse.data.sources import Stream

_LOG = logging.getLogger("kfuse")

_END_S = 1.0  # for a loader process to finish what it is fetching, when training is over
_SAY_S = 60.0  # without a batch, after which a line says so
# By loader processes: these are sent to a whole job (`elastic.notice_signals`).
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class _Loader:
    number: int
    process: BaseProcess
    connection: Connection
    tasks: list[Task] = field(default_factory=list)  # what it is to fetch and has not sent yet

    def request(self, task: Task) -> None:
        self.tasks.append(task)
        with contextlib.suppress(OSError):  # it has ended: `_receive` finds out
            self.connection.send(task)

    def how_it_ended(self) -> str:
        status = self.process.exitcode
        if status is None or status >= 0:
            return f"ended with exit status {status}"
        why = " (is /dev/shm too small? docker run --shm-size=8g, or lower data.prefetch)" * (status == -signal.SIGBUS)
        return f"was ended by {signal.Signals(-status).name}{why}"


class Feeder(Fetcher):
    """Fetches one training worker's micro-batches in loader processes, in the order in which they will be asked for."""

    def __init__(
        self,
        data: Dataset | Stream,
        sampler: EpochSampler | StreamSampler,
        loading: Loading,
        on_loss: Callable[[int, str], None] = lambda pid, how: None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """on_loss(pid, how): called when a loader process has ended unexpectedly, and another takes its place."""
        super().__init__(data, sampler, part, parts)
        self._loading, self._on_loss = loading, on_loss
        self._loaders: list[_Loader] = []
        self._plan: TaskPlan | None = None
        self._order: deque[Task] = deque()  # the next tasks, in order: each is ready, or requested from a loader
        self._coming: Iterator[Task] = iter(())  # the tasks after those of `_order`
        # Batches that have arrived and are not used yet, each with ""; or an exception, with the traceback there.
        self._ready: dict[Task, tuple[Any, str]] = {}
        self._lost = 0  # loader processes that ended unexpectedly since a batch was last used

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of a training: starts the loader processes; on exit none is left."""
        try:
            atexit.register(self.close)  # runs before multiprocessing waits for its processes
            self._loaders = [self._start(number) for number in range(self._loading.workers)]
            yield
        finally:
            self.close()

    def expect(self, plan: TaskPlan) -> None:
        """A step begins. Where its tasks are not those that were predicted, the prediction starts anew."""
        first = next(plan.tasks(), None)
        if plan != self._plan or first != (self._order[0] if self._order else None):
            self._plan, self._coming = plan, plan.tasks()
            self._order.clear()
            self._predict()
            self._ready = {task: ready for task, ready in self._ready.items() if task in self._order}
        self._request_more()

    def fetch(self, task: Task) -> Any:
        """Returns the task's batch; raises the exception that the data set raised for it, at the step that needs it.

        Raises LoaderError where a second loader process has ended unexpectedly before a batch could be used.
        """
        expected = self._order.popleft()
        assert task == expected, f"{task} is asked for, and {expected} was expected"
        batch = self._await(task)
        self._lost = 0
        self._request_more()
        return batch

    def fetch_out_of_turn(self, task: Task) -> Any:
        self._least_busy().request(task)
        return self._await(task)

    def _await(self, task: Task) -> Any:
        """Waits for the batch of a task that was requested, and takes it. Raises as `fetch`."""
        while task not in self._ready:
            self._receive(task)
        batch, trace = self._ready.pop(task)
        if trace:
            batch.add_note(trace)
            raise batch
        return batch

    def close(self) -> None:
        """Ends the loader processes. One that is still busy after a second is killed."""
        atexit.unregister(self.close)
        loaders, self._loaders = self._loaders, []
        self._plan, self._coming = None, iter(())
        self._order.clear()
        self._ready.clear()
        for loader in loaders:
            with contextlib.suppress(OSError):
                loader.connection.send(None)
        deadline = time.monotonic() + _END_S
        for loader in loaders:
            loader.process.join(max(0.0, deadline - time.monotonic()))
            loader.process.kill()
            loader.process.join()
            loader.connection.close()

    def _start(self, number: int) -> _Loader:
        context = torch.multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(theirs, Fetcher(self.data, self.sampler, self.part, self.parts), number, self._loading, os.getpid()),
            name=f"kfuse-loader-{number}",
            daemon=True,
        )
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until the loader process ignores them
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads, whose locks the child might wait for. It uses none of theirs.
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # else it would stay open, and this end would not notice the other's death
        return _Loader(number, process, ours)

    def _least_busy(self) -> _Loader:
        return min(self._loaders, key=lambda loader: len(loader.tasks))

    def _predict(self) -> None:
        capacity = self._loading.workers * self._loading.prefetch
        while len(self._order) < capacity and (task := next(self._coming, None)) is not None:
            self._order.append(task)

    def _request_more(self) -> None:
        """Requests the predicted tasks that are neither ready nor requested, each from the least busy process."""
        self._predict()
        there = {task for loader in self._loaders for task in loader.tasks}.union(self._ready)
        for task in self._order:
            if task not in there:
                self._least_busy().request(task)

    def _receive(self, wanted: Task) -> None:
        """Waits until a loader process has sent something, and takes what has arrived.

        Keeps what is wanted now or predicted. The rest was requested under an earlier plan.
        """
        by_connection = {loader.connection: loader for loader in self._loaders}
        arrived = wait(list(by_connection), _SAY_S)
        if not arrived:
            why = "the data are slow, or the data set had started threads, which do not live in forked processes"
            pids = [loader.process.pid for loader in self._loaders]
            _LOG.warning("no batch for %.0f s from the loader processes %s: %s: num_workers=0", _SAY_S, pids, why)
        for connection in arrived:
            assert isinstance(connection, Connection)
            loader = by_connection[connection]
            try:
                task, *answer = connection.recv()
            except (OSError, EOFError) as error:
                loader.process.join(_END_S)
                if loader.process.is_alive():
                    raise
                loader.tasks = [task for task in loader.tasks if task == wanted or task in self._order]
                self._replace(loader, error)
                continue
            loader.tasks.remove(task)
            if task == wanted or task in self._order:
                self._ready[task] = tuple(answer)

    def _replace(self, loader: _Loader, error: Exception) -> None:
        """A loader process has ended: another takes its place. A second one before a batch is used: LoaderError."""
        how, pid = loader.how_it_ended(), loader.process.pid or 0
        self._lost += 1
        if self._lost > 1:
            raise LoaderError(
                f"loader process {loader.number} (pid {pid}) {how}, the second one lost before a batch"
            ) from error
        _LOG.warning("loader process %d (pid %d) %s: another takes its place", loader.number, pid, how)
        self._on_loss(pid, how)
        for file in Path("/dev/shm").glob(f"torch_{pid}_*"):  # torch unlinks each one as soon as it is mapped
            file.unlink(missing_ok=True)
        loader.connection.close()
        other = self._loaders[loader.number] = self._start(loader.number)
        for task in loader.tasks:
            other.request(task)


def serve(connection: Connection, fetcher: Fetcher, number: int, loading: Loading, parent: int) -> None:
    """Fetches the tasks that come, in their order, until None comes. Sends each one's batch, or why there is none."""
    # The kernel ends this process with the thread that has forked it. The training worker's connections are open here
    # too: other workers notice that it is lost once this process has ended as well.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)
    sys.excepthook = _silent_without_parent
    # By sockets tensors are handed over: files may have too long a path, and stay.
    connections.arbitrary_address = _without_file  # type: ignore[attr-defined]
    gc.freeze()  # objects of the training worker, such as its process groups, must not be destroyed here
    for number_of_signal in _IGNORED:
        signal.signal(number_of_signal, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    torch.set_num_threads(1)
    dataset: Any = fetcher.data.dataset if isinstance(fetcher.data, MapData | Stream) else fetcher.data
    # For torch.utils.data.get_worker_info; default_collate then collates into shared memory.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=loading.workers, seed=fetcher.sampler.seed, dataset=dataset
    )
    waiting: deque[Task] = deque()
    begun = False
    while True:
        try:
            while not waiting or connection.poll():
                if (task := connection.recv()) is None:
                    os._exit(0)
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
        return ForkingPickler.dumps((task, fetcher.fetch(task), ""))
    except Exception as error:
        text = f"in loader process {number} (pid {os.getpid()}):\n{traceback.format_exc()}".rstrip()
        sent: Exception = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it cannot be sent
            sent = RuntimeError(f"{type(error).__name__}: {error}")
        return ForkingPickler.dumps((task, sent, text))


def _without_file(family: str) -> Any:
    """Returns an address as multiprocessing's own function does, but without a socket's file in TMPDIR."""
    return f"\0kfuse-{secrets.token_hex(16)}" if family == "AF_UNIX" else ("localhost", 0)


def _silent_without_parent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a thread of torch's that hands tensors over: a connection breaks as the training worker ends. No news."""
    if not isinstance(error, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)
