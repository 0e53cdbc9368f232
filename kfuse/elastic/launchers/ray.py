"""Workers on a Ray cluster: one plain actor each, which runs an agent for this one worker (see `hosts`).

Ray finds a node for each actor, or waits for one. The worker is a process of its own, so that it can be killed whatever
state it is in; the kernel ends it with the actor.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from kfuse import cores
from kfuse.elastic import protocol
from kfuse.elastic.launchers import agent, local
from kfuse.elastic.launchers.agent import offer
from kfuse.elastic.launchers.hosts import HostProcess, HostsLauncher
from kfuse.settings.tree import SETTINGS

_log = logging.getLogger("kfuse")

_CONNECT_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 20.0
_LAST_WORDS_S = 1.0
_DRAINED_S = 1.0  # between two looks for nodes that are drained


class Keeper:
    """The actor. Ray pickles it by value, so its process imports neither kfuse nor torch."""

    async def run(self, host: str, port: int, token: str, number: int) -> None:
        """Runs process `number` for the launcher at host:port. Raises AgentError, where that is gone."""
        await offer(host, port, token, slots=1, only=number)

    async def node(self) -> str:
        """The id of the node that Ray has found for it, in hexadecimal digits."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class RayLauncher(HostsLauncher):
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
        grace_s = SETTINGS["elastic_grace_s"].default
        super().__init__(None, host or "", 0, secrets.token_hex(16), slots=0, most=1, grace_s=grace_s)
        self._address, self._cpus, self._needed_gpus = address, cpus, gpus
        self._keeping: set[asyncio.Task[None]] = set()  # tasks until `close`: one for each actor, and `_watch_nodes`
        self._nodes: dict[HostProcess, str] = {}  # where each one runs
        self._closing = threading.Event()

    async def open(self) -> str:
        """Connects to the cluster; returns this machine's address, as the nodes reach it. Raises OSError."""
        # Not the main thread, where Ray would take over SIGTERM; and one that may be left behind: for an address where
        # nothing is, Ray waits for ever. A cluster that the thread has started ends with it: it stays until `close`.
        opened: Future[str] = Future()
        opened.set_running_or_notify_cancel()  # after the timeout, too, the thread may set its result
        self._holder = threading.Thread(target=self._hold, args=[opened], name="kfuse-ray", daemon=True)
        self._holder.start()
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(opened), _CONNECT_TIMEOUT_S)
        except TimeoutError:
            where = self._address or os.environ.get("RAY_ADDRESS") or "the address of the newest one on this machine"
            raise OSError(f"no Ray cluster answered within {_CONNECT_TIMEOUT_S:.0f} s at {where}") from None
        self._host = self._host or found
        self._keeping.add(asyncio.create_task(self._watch_nodes()))
        return await super().open()

    def _hold(self, opened: Future[str]) -> None:
        """Connects to the cluster, and stays connected until `close`."""
        import ray

        ours = not ray.is_initialized()
        try:
            if ours:
                logging.getLogger("ray").setLevel(logging.ERROR)
                ray.init(self._address, logging_level=logging.ERROR, log_to_driver=False)
            opened.set_result(str(ray.util.get_node_ip_address()))
        except Exception as error:  # Ray's are of many kinds
            opened.set_exception(OSError(f"Ray: {' '.join(str(error).split())}"))
            return
        self._closing.wait()
        if ours:
            ray.shutdown()

    async def start(self, env: Mapping[str, str]) -> HostProcess:
        settings = {"OMP_NUM_THREADS": str(max(1, int(self._cpus)))}
        if not self._needed_gpus:
            settings["CUDA_VISIBLE_DEVICES"] = ""  # whether or not Ray hides them from workers that asked for none
        process = await super().start({**settings, **env})

        def kept(task: asyncio.Task[None]) -> None:
            self._keeping.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                process.end(1, f"could not be started by Ray: {error}")

        task = asyncio.create_task(self._keep(process))
        self._keeping.add(task)
        task.add_done_callback(kept)
        return process

    async def _watch_nodes(self) -> None:
        """A node that is drained is about to be taken away: by the autoscaler, or as `ray drain-node` has asked."""
        import ray

        client, told = None, False
        while True:
            await asyncio.sleep(_DRAINED_S)
            try:
                from ray._raylet import GcsClient  # type: ignore[attr-defined]

                client = client or GcsClient(address=ray.get_runtime_context().gcs_address)
                drained = await asyncio.to_thread(client.get_draining_nodes, timeout=_CONNECT_TIMEOUT_S)
            except Exception as error:  # Ray's are of many kinds; it is asked again
                if not told:
                    _log.warning("ray: which nodes are drained cannot be asked: %s", error)
                told = True
                continue
            for process, node in self._nodes.items():
                process.noticed = process.noticed or node in drained

    async def _keep(self, process: HostProcess) -> None:
        """Has an actor run the process, until one of them has ended."""
        import ray

        for module in (cores, local, agent, protocol, sys.modules[__name__]):
            ray.cloudpickle.register_pickle_by_value(module)
        needs = {"num_cpus": self._cpus, "num_gpus": self._needed_gpus}
        actor = ray.remote(Keeper).options(**needs, max_restarts=0).remote()
        run = actor.run.remote(self._host, self._port, self._token, process.number).future()
        running, ended = asyncio.wrap_future(run), asyncio.ensure_future(process.wait())
        placed = asyncio.wrap_future(actor.node.remote().future())
        try:
            await asyncio.wait([running, ended, placed], return_when=asyncio.FIRST_COMPLETED)
            if placed.done() and placed.exception() is None:
                self._nodes[process] = placed.result()
            await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
            if process.cause:  # its actor is lost, and Ray may know more of it
                await asyncio.wait([running], timeout=_LAST_WORDS_S)
            if running.done() and running.exception() is not None:
                _log.warning("ray: %s", str(running.exception()).strip().splitlines()[-1])
            process.end(-signal.SIGKILL, "was lost with its Ray actor")
        finally:
            for future in (running, ended, placed):
                future.cancel()
            self._nodes.pop(process, None)
            ray.kill(actor)  # its place is free again

    async def close(self) -> None:
        await super().close()
        tasks = [*self._keeping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._closing.set()
        await asyncio.to_thread(self._holder.join, _CLOSE_TIMEOUT_S)
