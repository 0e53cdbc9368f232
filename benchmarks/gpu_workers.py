"""Processes for the parts of gpu.sh that need several workers: where they run, how they start, how they are waited for.

Workers have a GPU each where there are as many; else they share the first one. NCCL refuses that unless told otherwise:
up to 2.29 each rank must claim another host, from 2.30 on there is a switch.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine, versions
from torch.multiprocessing import get_context
from workers import set_torchrun_variables

import kfuse as kf
from kfuse import session
from kfuse.comm.settings import CommOptions
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Elasticity, Supervisor

ABSENT = 3
"""Exit status of a part that cannot run here. Its last line says why."""
_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def report(device: str, results: Iterable[tuple[str, dict[str, Any]]], path: Path | None, what: str) -> int:
    """Prints each named result as it comes, and writes them to `path`. Exit status 1 where a verdict is not "ok".

    what: for the last line, what those that are "ok" do.
    """
    done: dict[str, dict[str, Any]] = {}
    found = versions(("torch", "triton")) | {"nccl": ".".join(map(str, nccl())) or "none"}
    record = {"device": device, "machine": machine(), "versions": found, "results": done}
    for name, result in results:
        done[name] = result
        print(f"{name:<40} {result['verdict']}", flush=True)
        if path is not None:  # what is there is kept if a later one is cut off
            path.write_text(json.dumps(record, indent=1) + "\n")
    good = sum(result["verdict"] == "ok" for result in done.values())
    print(f"{good} of {len(done)} {what}")
    return int(good < len(done))


def nccl() -> tuple[int, ...]:
    """NCCL's version; empty where torch sees no GPU."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]


def place(device: str, rank: int, count: int) -> torch.device:
    """In a worker, before anything touches CUDA: one GPU each of `count` workers, or the first for all of them.

    Returns the device that kfuse will choose. rank: the worker's number on this machine.
    """
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for reproducible sums, before the GPU is used
    if torch.cuda.device_count() >= count:
        os.environ["LOCAL_RANK"] = str(rank)
        return torch.device("cuda", rank)
    os.environ["LOCAL_RANK"] = "0"
    if nccl() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"kfuse-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return torch.device("cuda", 0)


def new_session(options: CommOptions, timeout_s: float, alone: bool = False) -> kf.Session:
    """Another session of this process, on the store that `Ranks` hosts. alone: of this worker only."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    kept = {name: os.environ.pop(name) for name in _GROUP} if alone else {}
    session.reset()
    try:
        return kf.init(**options.named(), comm_timeout_s=timeout_s)
    finally:
        os.environ.update(kept)


class Ranks:
    """Context: `count` processes that run work(device, *arguments, answer) as the ranks of a job of fixed size.

    work: a function of a module. It calls `answer` with one value after the other.
    """

    def __init__(self, count: int, device: str, work: Callable[..., None], *arguments: Any) -> None:
        wait = timedelta(seconds=60)
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
        context = get_context("spawn")
        self._answers: Any = context.Queue()
        given = (count, device, self._store.port, work, arguments, self._answers)
        self._processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(count)]
        self._waiting: dict[int, deque[Any]] = defaultdict(deque)

    def __enter__(self) -> Ranks:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def next(self, limit_s: float) -> list[Any]:
        """The next answer of each rank. Raises RuntimeError when one fails or ends, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        count = len(self._processes)
        # A rank may be ahead: what it answered, or failed at, since then is the next call's.
        while not all(self._waiting[rank] for rank in range(count)):
            for rank, answers in self._waiting.items():
                if answers and answers[0][0] == "error":
                    raise RuntimeError(f"rank {rank} of {count}: {answers[0][1]}")
            try:
                rank, kind, value = self._answers.get(timeout=0.2)
                self._waiting[rank].append((kind, value))
                continue
            except queue.Empty:
                pass
            late = [rank for rank in range(count) if not self._waiting[rank]]
            for rank in late:
                if self._processes[rank].exitcode is not None:
                    raise RuntimeError(f"rank {rank} of {count} ended with exit code {self._processes[rank].exitcode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer of rank {late[0]} of {count} within {limit_s:.0f} s")
        heads = [self._waiting[rank].popleft() for rank in range(count)]
        for rank, (kind, value) in enumerate(heads):
            if kind == "error":
                raise RuntimeError(f"rank {rank} of {count}: {value}")
        return [value for _, value in heads]


def _rank(
    rank: int, count: int, device: str, port: int, work: Callable[..., None], arguments: Sequence[Any], answers: Any
) -> None:
    set_torchrun_variables(rank, count, port)
    try:
        work(place(device, rank, count), *arguments, lambda value: answers.put((rank, "answer", value)))
    except Exception as error:
        answers.put((rank, "error", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))
    answers.close()
    answers.join_thread()  # all has been sent
    os._exit(0)  # the destructors of torch's DDP and of process groups have been seen to hang


class Recorder:
    """Keeps what the workers of an elastic job report."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.summary: dict[str, Any] = {}

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Events, and the summary, as they come."""
        for kind, data in records:
            if kind == "event":
                self.events.append(data)
            elif kind == "summary":
                self.summary = data

    def line(self, text: str) -> None:
        """A line that a worker has printed."""
        self.lines.append(text)


class _Launcher(LocalLauncher):
    """Workers get their GPU from `place`. A supervisor that counts GPUs would refuse two workers on one."""

    gpus = 0


def supervise(script: str, arguments: Sequence[str], elasticity: Elasticity, limit_s: float, folder: str) -> Recorder:
    """Runs an elastic job whose workers run `script ARGUMENTS` to its end.

    Raises RuntimeError, with the last lines of the workers' output, if it fails or takes longer than `limit_s`.
    """
    recorder = Recorder()

    async def run() -> None:
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        launcher = _Launcher(command, parent_end_signal=signal.SIGKILL)
        supervisor = Supervisor(launcher, {"run_dir": folder}, recorder, elasticity)
        await asyncio.wait_for(supervisor.run(), limit_s)

    try:
        asyncio.run(run())
    except (RuntimeError, TimeoutError) as error:
        why = str(error) or f"not over after {limit_s:.0f} s"
        raise RuntimeError("\n".join([*recorder.lines[-20:], why])) from error
    return recorder


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted with its context."""
    return tempfile.TemporaryDirectory(prefix="kfuse-gpu-", ignore_cleanup_errors=True)
