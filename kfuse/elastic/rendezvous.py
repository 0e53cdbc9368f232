"""How the workers of a job of fixed size find each other: torchrun's environment variables and its store."""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOB_TIMEOUT_S = 600.0  # rank 0 loads the data before it announces the job


@dataclass(frozen=True)
class Rendezvous:
    """This process's rank among `size` workers, and the address of the store over which they connect."""

    rank: int
    size: int
    host: str
    port: int
    agent_hosts: bool
    """torchrun's agent hosts the store; otherwise rank 0 does."""
    attempt: str
    """How often torchrun has restarted the workers. Keys that an earlier attempt left in the store are not read."""

    @staticmethod
    def of_environment() -> Rendezvous | None:
        """None where no such environment was set. Raises RuntimeError where a part of it is missing."""
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise RuntimeError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but not set: {', '.join(missing)}")
            return None
        rank, size, host, port = (os.environ[name] for name in _VARIABLES)
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Rendezvous(int(rank), int(size), host, int(port), agent_hosts, attempt)

    def store(self, timeout_s: float) -> Store:
        """The store, with a name space of this attempt's own. Raises RuntimeError if nobody hosts it."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = _connect(self)
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(f"kfuse/{self.attempt}", store)

    # -- rank 0 reads the command line and sends the job to the others --------------------------------------------

    def announce(self, job: dict[str, Any]) -> None:
        """Rank 0: sends the job's configuration (plain JSON values) to the others."""
        self.store(_JOB_TIMEOUT_S).set("job", json.dumps({"job": job}))

    def dismiss(self, status: int) -> None:
        """Rank 0, at its end: if no job was announced, the others exit with this status."""
        self.store(_JOB_TIMEOUT_S).compare_set("job", "", json.dumps({"status": status}))

    def await_job(self) -> dict[str, Any] | int:
        """The job that rank 0 sends, or the status to exit with. Raises RuntimeError if it sends nothing in time."""
        try:
            message: dict[str, Any] = json.loads(self.store(_JOB_TIMEOUT_S).get("job"))
        except RuntimeError as error:
            raise RuntimeError(f"rank 0, at {self.host}:{self.port}, has announced no job: {error}") from error
        return message["job"] if "job" in message else int(message["status"])


@functools.cache
def _connect(rendezvous: Rendezvous) -> Store:
    """One connection per process: where rank 0 hosts the store, it can open it only once."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    master = rendezvous.rank == 0 and not rendezvous.agent_hosts
    timeout = timedelta(seconds=_JOB_TIMEOUT_S)
    return TCPStore(rendezvous.host, rendezvous.port, None, master, timeout, wait_for_workers=False)


def own_address(host: str, port: int) -> str:
    """The address of this machine that connections to host:port leave from: the process there can reach it.

    Raises OSError where no way leads there.
    """
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
