"""Workers on a Ray cluster: one plain actor each, which starts the worker's process on its node and watches over it.

The process is not the actor itself, so that it can be killed whatever state it is in; the kernel ends it with the
actor. Ray detects lost actors and nodes, and finds a node for new ones, or waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kfuse.elastic import protocol
from kfuse.elastic.launchers import local
from kfuse.elastic.launchers.local import LocalLauncher, follow

_CONNECT_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 20.0
_KILL_GRACE_S = 1.0
_PATIENCE_S = 10.0


class Keeper:
    """The actor. Ray pickles it by value, so its process imports neither kfuse nor torch."""

    async def start(self, env: dict[str, str], folder: str) -> None:
        """Starts the worker, in `folder` if this node has it. Raises OSError."""
        self._lines: list[str] = []
        self._status: int | None = None
        self._changed = asyncio.Event()
        launcher = LocalLauncher(folder=folder if os.path.isdir(folder) else None, parent_end_signal=signal.SIGKILL)
        self._process = await launcher.start(env)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        self._status = await follow(self._process, self._printed)
        self._changed.set()

    async def _printed(self, line: str) -> None:
        self._lines.append(line)
        self._changed.set()

    async def poll(self) -> tuple[list[str], int | None]:
        """The lines printed since the last call, as soon as there are any; the exit status once it has ended."""
        await self._changed.wait()
        self._changed.clear()
        lines, self._lines = self._lines, []
        return lines, self._status

    async def kill(self) -> None:
        """Ends the worker at once, with everything it started."""
        self._process.kill()


class RayProcess:
    """A worker in a Ray actor, as the supervisor sees it."""

    def __init__(self, actor: Any, needs: str, env: dict[str, str]) -> None:
        self.running = False
        self._actor, self._needs = actor, needs
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._killing: asyncio.Task[None] | None = None
        self._ending = asyncio.create_task(self._follow(env))

    async def _follow(self, env: dict[str, str]) -> int:
        import ray

        try:
            await self._start(env)
            while True:
                lines, status = await self._actor.poll.remote()
                for line in lines:
                    self._lines.put_nowait(line)
                if status is not None:
                    return int(status)
        except ray.exceptions.RayError as error:
            if self._killing is None:
                self._lines.put_nowait(f"ray: {str(error).strip().splitlines()[-1]}")
            return -signal.SIGKILL
        finally:
            self._lines.put_nowait(None)
            ray.kill(self._actor)  # its place is free again

    async def _start(self, env: dict[str, str]) -> None:
        started = asyncio.wrap_future(self._actor.start.remote(env, os.getcwd()).future())
        if not (await asyncio.wait([started], timeout=_PATIENCE_S))[0]:
            self._lines.put_nowait(f"ray: a worker waits for a node with room for it ({self._needs})")
        await started
        self.running = True

    async def lines(self) -> AsyncIterator[str]:
        """What it prints, line by line, until it ends."""
        while (line := await self._lines.get()) is not None:
            yield line

    async def wait(self) -> int:
        """Its exit status once it has ended; -SIGKILL if its actor or node was lost."""
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """Ends it at once, whether or not its node answers."""
        if self._killing is None and not self._ending.done():
            self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        import ray

        # By the actor first, so that what the worker has started ends too; whether or not its node answers.
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._actor.kill.remote().future()), _KILL_GRACE_S)
        ray.kill(self._actor)


class RayLauncher:
    """Starts each worker by an actor of its own, wherever the cluster has room for it, now or later."""

    def __init__(
        self, address: str | None = None, host: str | None = None, cpus: float = 1.0, gpus: float = 0.0
    ) -> None:
        """address: the cluster's; None: RAY_ADDRESS, or the one that runs on this machine, or a new one. host: this
        machine's address, as the nodes reach it; None: Ray's own. cpus, gpus: what one worker takes.

        Raises ValueError where a number is negative or Ray is not installed.
        """
        for name, value in (("cpus", cpus), ("gpus", gpus)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be a number, at least 0")
        if gpus % 1:
            raise ValueError(f"gpus={gpus}: must be a whole number, as NCCL needs a GPU for each worker")
        if importlib.util.find_spec("ray") is None:
            raise ValueError("launcher=ray: Ray is not installed; needed is pip install 'kfuse[ray]'")
        self._address, self._host = address, host
        self._cpus, self._gpus = cpus, gpus
        self._ours = False
        """Whether this launcher has connected to Ray, not the program around it."""
        self._closing = threading.Event()

    async def open(self) -> str:
        """Connects to the cluster; returns this machine's address, as the nodes reach it. Raises OSError."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[str] = loop.create_future()

        def resolve(host: str, error: OSError | None = None) -> None:
            if not opened.done():
                opened.set_result(host) if error is None else opened.set_exception(error)

        def hold() -> None:
            try:
                host = self._connect()
            except Exception as error:  # Ray's are of many kinds
                with contextlib.suppress(RuntimeError):  # nobody waits any more
                    loop.call_soon_threadsafe(resolve, "", OSError(f"Ray: {' '.join(str(error).split())}"))
                return
            loop.call_soon_threadsafe(resolve, host)
            self._closing.wait()
            self._disconnect()

        # Not the main thread, where Ray would take over SIGTERM; and one that may be left behind: for an address where
        # nothing is, Ray waits for ever. A cluster that the thread has started ends with it: it stays until `close`.
        self._holder = threading.Thread(target=hold, name="kfuse-ray", daemon=True)
        self._holder.start()
        try:
            host = await asyncio.wait_for(opened, _CONNECT_TIMEOUT_S)
        except TimeoutError:
            where = self._address or os.environ.get("RAY_ADDRESS") or "the address of the newest one on this machine"
            raise OSError(f"no Ray cluster answered within {_CONNECT_TIMEOUT_S:.0f} s at {where}") from None
        return self._host or host

    def _connect(self) -> str:
        import ray

        if not ray.is_initialized():
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(self._address, logging_level=logging.ERROR, log_to_driver=False)
            self._ours = True
        for module in (local, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        self._actors = ray.remote(Keeper).options(
            num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, max_concurrency=8
        )
        return str(ray.util.get_node_ip_address())

    def _disconnect(self) -> None:
        import ray

        if self._ours:
            ray.shutdown()

    async def start(self, env: Mapping[str, str]) -> RayProcess:
        """A worker that starts as soon as a node has room for it."""
        path = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        settings = {protocol.ENV_THREADS: str(max(1, int(self._cpus)))}
        if not self._gpus:
            settings["CUDA_VISIBLE_DEVICES"] = ""  # whether or not Ray hides them from workers that asked for none
        return RayProcess(self._actors.remote(), f"cpus={self._cpus}, gpus={self._gpus}", {**path, **settings, **env})

    async def close(self) -> None:
        """Disconnects from the cluster."""
        self._closing.set()
        await asyncio.to_thread(self._holder.join, _CLOSE_TIMEOUT_S)
