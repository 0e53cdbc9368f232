"""Agents of `kfuse-run --join` on this machine, where wanted in network namespaces between which links can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hosts import Host

from kfuse.elastic.launchers import HostsLauncher

_KFUSE_RUN = (sys.executable, "-m", "kfuse.cli.kfuse_run")


class Agents:
    """Each has one slot. command, grace_s: as for HostsLauncher.

    hosts: what network namespaces they are in, in turn, and before them the supervisor's own one.
    """

    def __init__(self, directory: Path, command: list[str] | None, grace_s: float, hosts: Sequence[Host] = ()) -> None:
        self._log, self._secret = directory / "agents.log", directory / "token"
        self._secret.touch(0o600)
        self._secret.write_text(token := secrets.token_hex(16))
        self._address = hosts[0].address if hosts else "127.0.0.1"
        self._hosts = hosts[1:]
        self.launcher = HostsLauncher(command, self._address, 0, token, 0, 1, grace_s, notice_signals=("SIGTERM",))
        self._processes: list[subprocess.Popen[bytes]] = []

    async def start(self, count: int) -> None:
        while not self.launcher._port:  # the supervisor has not opened it yet
            await asyncio.sleep(0.01)
        address = f"{self._address}:{self.launcher._port}"
        command = [*_KFUSE_RUN, "--join", address, "--token-file", str(self._secret), "--slots", "1"]
        for _ in range(count):
            inside: list[str] = []
            if self._hosts:
                name = self._hosts[len(self._processes) % len(self._hosts)].name
                inside = [*f"ip netns exec {name} unshare --uts sh -c".split(), 'hostname "$0"; exec "$@"', name]
            with self._log.open("ab") as log:
                self._processes.append(subprocess.Popen([*inside, *command], stdout=log, stderr=log))

    @contextlib.contextmanager
    def apart(self, one: str, other: str) -> Iterator[None]:
        """What a host sends does not reach the other one meanwhile. one, other: their names."""
        by_name = {host.name: host for host in self._hosts}
        rule = f"INPUT -s {by_name[one].address} -j DROP"
        by_name[other].run(f"iptables -w -A {rule}")
        try:
            yield
        finally:
            by_name[other].run(f"iptables -w -D {rule}")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
