"""Network namespaces as hosts: each with an address of its own on one bridge, and workers that run inside.

The supervisor's host has the bridge. Whoever calls is moved there while the hosts exist, so that what listens, listens
on the bridge's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from warm import WarmLauncher, WarmProcess, work

_NETWORK = "10.213.77"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    def run(self, command: str) -> None:
        """Raises CalledProcessError."""
        _sh(f"ip netns exec {self.name} {command}")


def why_not() -> str | None:
    """Why this machine has no network namespaces for us; None if it has."""
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"no program {program} (packages iproute2, iptables)"
    try:
        with network(1):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"network namespaces are not permitted here: {said.strip()}"


@contextlib.contextmanager
def network(count: int) -> Iterator[tuple[Host, list[Host]]]:
    """A host for the supervisor, where this thread is meanwhile, and `count` others. Raises CalledProcessError."""
    names = [f"kfuse-{os.getpid()}-{index}" for index in range(count + 1)]
    hosts = [Host(name, f"{_NETWORK}.{index + 1}") for index, name in enumerate(names)]
    first, others = hosts[0], hosts[1:]
    forkserver.ensure_running()  # else it would begin on the first host, and keep the workers of later jobs there
    try:
        for host in hosts:
            _sh(f"ip netns add {host.name}")
            host.run("ip link set lo up")
        first.run("ip link add br0 type bridge")
        first.run(f"ip address add {first.address}/24 dev br0")
        first.run("ip link set br0 up")
        for index, host in enumerate(others):  # the link of others[index] comes to port{index}: see `let_pass`
            first.run(f"ip link add name port{index} type veth peer name eth0 netns {host.name}")
            first.run(f"ip link set port{index} master br0 up")
            host.run(f"ip address add {host.address}/24 dev eth0")
            host.run("ip link set eth0 up")
        with _inside(first):
            yield first, others
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def _inside(host: Host) -> Iterator[None]:
    """This thread, and those that it starts, in the host's namespace."""
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{host.name}") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def _enter(namespace: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def let_pass(first: Host, index: int, packets: bool) -> None:
    """From now on the bridge passes packets from and to the host of this index, or none. Neither side is told."""
    first.run(f"bridge link set dev port{index} state {3 if packets else 0}")


def _sh(command: str) -> None:
    subprocess.run(command.split(), capture_output=True, text=True, check=True, timeout=20)


class FarProcess(WarmProcess):
    """As on a host that may be cut off: no signal of ours gets there, and no word of a bad end comes back."""

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        status = await super().wait()
        if status:
            await asyncio.Event().wait()
        return status


class HostLauncher(WarmLauncher):
    """Starts each worker on the next host; what it prints goes to worker-N.log in `logs`."""

    def __init__(self, address: str, hosts: list[Host], logs: Path) -> None:
        super().__init__(logs / "worker.log")
        self._address, self._hosts, self._logs = address, hosts, logs
        self._started = 0

    async def open(self) -> str:
        return self._address

    async def start(self, env: Mapping[str, str]) -> FarProcess:
        number = self._started
        self._started += 1
        host = self._hosts[number % len(self._hosts)]
        return FarProcess(self.fork(_work_inside, host, env, self._logs / f"worker-{number}.log"))


class NamedHosts(WarmLauncher):
    """Starts workers on this machine, each under the name of the next of these hosts."""

    def __init__(self, names: Sequence[str], log: Path) -> None:
        super().__init__(log)
        self._names = names

    async def start(self, env: Mapping[str, str]) -> WarmProcess:
        name = self._names[len(self.started) % len(self._names)]
        self.started.append(WarmProcess(self.fork(_work_as, name, env, self.log)))
        return self.started[-1]


def _work_as(name: str, env: Mapping[str, str], log: Path) -> None:
    socket.gethostname = lambda: name
    work(env, log)


def _work_inside(host: Host, env: Mapping[str, str], log: Path) -> None:
    with open(f"/run/netns/{host.name}") as there:
        _enter(there.fileno())
    _work_as(host.name, env, log)
