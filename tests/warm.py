"""Workers that come up in a tenth of a second: forked from a process that has imported everything they need."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kfuse.elastic.launchers.local import kill_once_stopped
from kfuse.elastic.protocol import ENV_REPLICA

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "__main__",
        "kfuse.cli.worker",
        "kfuse.elastic.supervisor",
        "elastic_job",
        "chaos",
        "soak_worker",
        "hypothesis",
        "sklearn.datasets",
        "datasets",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.tokenization_auto",
        "trl.trainer.sft_trainer",
        "torch.distributed.fsdp",
        "torch._dynamo",  # torch's own optimizers import it, which takes longer than torch itself
    ]
)  # those that there are; read once, as the first process is started


class WarmProcess:
    running = True
    cause = ""
    env: Mapping[str, str]  # as it was given

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid = process.pid
        self.status: int | None = None

    async def lines(self) -> AsyncIterator[str]:
        """None: they are in the log."""
        return
        yield

    async def wait(self) -> int:
        """May be awaited once."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        watching = asyncio.create_task(kill_once_stopped(self, self.pid))
        try:
            await ended.wait()
        finally:
            watching.cancel()
            loop.remove_reader(self._process.sentinel)
        self._process.join()  # no wait: its end of the pipe is closed
        self.status = self._process.exitcode
        assert self.status is not None
        self._process.close()
        return self.status

    def kill(self) -> None:
        if self.status is None:
            self._process.kill()


class WarmLauncher:
    """Each worker runs what `python -m kfuse.cli.worker` runs, or this script; what it prints is added to `log`."""

    def __init__(self, log: Path, script: Sequence[str] = ()) -> None:
        self.log, self._script = log, script
        self.started: list[WarmProcess] = []

    async def open(self) -> str:
        return "127.0.0.1"

    async def start(self, env: Mapping[str, str], inherited: Collection[int] = ()) -> WarmProcess:
        ends = [socket.socket(fileno=os.dup(number)) for number in inherited]
        self.started.append(WarmProcess(self.fork(work, env, self.log, self._script, ends)))
        self.started[-1].env = env
        for end in ends:
            end.close()
        return self.started[-1]

    def fork(self, target: Callable[..., None], *args: Any) -> BaseProcess:
        process = CONTEXT.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    async def close(self) -> None:
        pass


def work(
    env: Mapping[str, str], log: Path, script: Sequence[str] = (), inherited: Sequence[socket.socket] = ()
) -> None:
    """In the forked process: becomes a worker, and ends with its status. inherited: of one rank of a replica."""
    os.setsid()
    os.environ.update({"TORCH_CPP_LOG_LEVEL": "ERROR", **env})
    if inherited:
        os.environ[ENV_REPLICA] = ",".join(str(end.detach()) for end in inherited)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(stream, standard)
    os.close(stream)
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # may have loaders
    if script:
        sys.argv = [*script]
        runpy.run_path(script[0], run_name="__main__")
        atexit._run_exitfuncs()  # which a forked process leaves out
        return
    sys.modules.pop("kfuse.cli.worker", None)
    runpy.run_module("kfuse.cli.worker", run_name="__main__")
