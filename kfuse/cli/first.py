"""The first worker of a run, whose process starts before the run does and checks the configuration.

So torch is imported once, by the worker: the command does without it. The process and the command talk in three lines
of JSON. The command sends the configuration; a fork of the process tells what its check has found, so that no trace of
the check is left in the worker; then the command sends the environment of a worker. The process ends with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

from kfuse.elastic.launchers.local import LocalLauncher, LocalProcess, open_log
from kfuse.settings.tree import ConfigError

ENV_FIRST = "KFUSE_FIRST"  # the two file descriptors of the process: it reads from the first, and answers on the second
_LONGEST_ANSWER = 2**24  # bytes

_Result = TypeVar("_Result")


class FirstWorker(LocalLauncher):
    """Starts workers on this machine, the first of them early. Context manager: that one does not outlive it.

    Its process belongs to an event loop, which therefore is that of the whole run.
    """

    gpus = 0  # as the check has found

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self.process: LocalProcess | None = None  # once it has been started
        self._taken = False

    def __enter__(self) -> FirstWorker:
        return self

    def __exit__(self, *_: object) -> None:
        process, self.process = self.process, None
        if process is not None:
            self._runner.run(process.end())
        self._runner.close()

    @staticmethod
    def fits(config: Mapping[str, Any]) -> bool:
        """Whether this launcher does what the configured one would, and saves this process the import of torch.

        Of several workers it would not: their view needs a store of torch's, which this process hosts.
        """
        local = {"_target_": f"{LocalLauncher.__module__.rpartition('.')[0]}.{LocalLauncher.__name__}"}
        alone = config["launcher"] == local and config["workers"]["count"] == 1
        return alone and sys.platform == "linux" and "torch" not in sys.modules

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """As asyncio.run. Afterwards the process has ended, whether `work` has used it or not."""
        with self:
            return self._runner.run(work)

    def check(self, config: Mapping[str, Any]) -> None:
        """Starts the process, and waits for its check of these plain values. Raises ConfigError as the check does."""
        self._runner.run(self._check(config))

    async def _check(self, config: Mapping[str, Any]) -> None:
        (self._requests, read), (answers, answer) = socket.socketpair(), socket.socketpair()
        with read, answer:  # the process alone is to hold these two, so that its end is noticed
            ends = read.fileno(), answer.fileno()
            self.process = await super().start({ENV_FIRST: "{} {}".format(*ends)}, ends)
        self._send(config)
        showing = asyncio.create_task(self._show(self.process))
        reader, writer = await asyncio.open_connection(sock=answers, limit=_LONGEST_ANSWER)
        found = json.loads(await reader.readline() or '{"error": "the check of the configuration ended by itself"}')
        writer.close()
        if "error" in found:
            self.process.kill()
            await showing
            raise ConfigError(found["error"])
        showing.cancel()  # what comes from now on the supervisor shows
        self.gpus = found["gpus"]

    async def _show(self, process: LocalProcess) -> None:
        async for line in process.lines():
            print(line, flush=True)

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the process has ended, which is noticed elsewhere
            self._requests.sendall(json.dumps(message).encode() + b"\n")

    async def start(self, env: Mapping[str, str], inherited: Collection[int] = ()) -> LocalProcess:
        if self.process is None or self._taken:
            return await super().start(env, inherited)
        self._taken, self.process.log = True, open_log(env)
        self._send(env)
        self._requests.close()
        return self.process


# -- in the worker's process -------------------------------------------------------------------------------------------


def become_worker() -> None:
    """Has a fork check the configuration; returns once the command has sent the environment of a worker."""
    requests, answers = map(int, os.environ.pop(ENV_FIRST).split())
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    with os.fdopen(requests) as lines:
        config = lines.readline()
        check = multiprocessing.get_context("fork").Process(target=_answer, args=[config, answers])
        if config:
            check.start()
        os.close(answers)
        environment = lines.readline()
    if not environment:  # the command has ended
        os.killpg(0, signal.SIGKILL)
    check.join()
    os.environ.update(json.loads(environment))


def _answer(config: str, answers: int) -> None:
    """Checks a configuration (JSON), and tells its error in one line, or else how many GPUs this process sees."""
    from kfuse.cli import classes
    from kfuse.comm import devices
    from kfuse.settings.tree import by_key, flat

    values = json.loads(config)
    found: dict[str, Any]
    try:
        classes.check(values, settings := flat(values), by_key(settings))
        found = {"gpus": devices.count()}
    except Exception as error:  # a user's class may raise anything
        from kfuse.settings.shell import explain

        found = {"error": explain(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answers, json.dumps(found).encode() + b"\n")
