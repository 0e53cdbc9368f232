"""Runs a function in several real worker processes, as torchrun would, and hands back what each one returned.

Processes are forked from a server that has imported what they need and run nothing else.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from warm import CONTEXT

_GRACE_S = 40.0  # after one rank has failed: for the others to notice by themselves, by a timeout perhaps


class WorkersFailed(AssertionError):
    """Some ranks raised, died or did not end in time; the message has each one's traceback."""


def run_workers(
    count: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180.0, env: dict[str, str] | None = None
) -> list[Any]:
    """`function(*args)` in `count` processes, each with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    function: module-level, in a file that children can load by path. Returns every rank's result, in rank order.
    Raises WorkersFailed, after ending all processes; one that hangs shows where each of its threads was.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server imports torch
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store, so no port can be taken meanwhile
        **(env or {}),
    }
    payload = pickle.dumps(args)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(count)]
        processes, receivers = [], []
        for rank, log in enumerate(logs):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            settings = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            what = (inspect.getfile(function), function.__qualname__, payload)
            process = CONTEXT.Process(target=_work, args=(*what, settings, sender, str(log), timeout_s), daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            replies = _collect(receivers, timeout_s)
        finally:
            for process in processes:
                process.join(1.0)
                process.kill()
                process.join()
        reports = [
            f"--- rank {rank}, exit code {process.exitcode}:\n{error or log.read_text()}"
            for rank, ((ended, error, _), process, log) in enumerate(zip(replies, processes, logs, strict=True))
            if not ended or error
        ]
    if reports:
        raise WorkersFailed(
            f"{len(reports)} of {count} workers of {function.__qualname__} failed\n" + "\n".join(reports)
        )
    return [result for _, _, result in replies]


KEPT: list[object] = []
"""What a worker's function leaves here is not destroyed before its process ends: torch's DDP and FSDP models take their
process group along, and its destructor has been seen to wait for ever for a thread of its own."""

Reply = tuple[bool, str, Any]  # ended by itself; traceback, if it raised; result


def on_workers(count: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs in so many worker processes, or in as many as its argument `workers` says: `run_workers`' way.

    It fails where it fails in one of them. Its arguments are pickled.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(**given: Any) -> None:
            run_workers(count or given["workers"], test, *(given[name] for name in names), **options)

        return run

    return decorate


def _collect(receivers: list[Connection], timeout_s: float) -> list[Reply]:
    replies: list[Reply] = [(False, "", None)] * len(receivers)
    waiting = dict(zip(receivers, range(len(receivers)), strict=True))
    deadline = time.monotonic() + timeout_s + 2.0  # the workers' own alarm goes off first, and shows where they were
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), timeout=left):
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                error, payload = receiver.recv()
                replies[rank] = (True, error, pickle.loads(payload) if not error else None)
            except EOFError:
                error = "died"
            if error:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return replies


def _work(
    file: str, name: str, payload: bytes, settings: dict[str, str], sender: Connection, log: str, timeout_s: float
) -> None:
    os.environ.update(settings)
    with open(log, "w") as stream:
        faulthandler.enable(stream)
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=stream)
        torch.set_num_threads(1)
        try:
            result = inspect.unwrap(getattr(load(file), name))(*pickle.loads(payload))
            sender.send(("", pickle.dumps(result)))
        except BaseException:
            sender.send((traceback.format_exc(), b""))
        finally:
            sender.close()
        faulthandler.cancel_dump_traceback_later()
        stream.flush()
    os._exit(0)  # a message under way must not keep a failed worker from ending


def call(file: str, name: str, *args: Any) -> None:
    """The target of a process: calls a function of a test's file, which no process can import by its module's name."""
    getattr(load(file), name)(*args)


def load(file: str) -> Any:
    """The module in `file`, under its own name, with its neighbours importable."""
    name = Path(file).stem
    if name not in sys.modules:
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
