"""Links with a rate between the workers of one machine: network namespaces, joined by a bridge, shaped by tc's tbf.

    with links(2, "2gbit") as places:      # each worker's process calls places[rank].enter() before it opens a socket
        ...

Needs root and Linux. Each worker has one link to all others, as a host has one network card: what it sends to several
others shares it. It has its rate in both directions. Latency is what the kernel takes, some 30 us: this adds none. The
bytes that went over a link are its interface's own counters (`received_bytes`), headers included.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from workers import set_torchrun_variables

_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000  # linux/sched.h
_PACKET = 16384  # bytes that TCP hands over at once, in place of 64 KB: else a burst is as large as a small message
_BURST_S = 0.001  # what a link may send at once after a pause; shorter ones need a host that is never busy
_LATENCY = "20ms"  # how long a packet may wait in a link's queue before it is dropped
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Place:
    namespace: str | None
    """None: the machine's own."""
    address: str
    interface: str

    def enter(self) -> None:
        """Moves the calling thread, and those that it starts from now on, into the namespace. Raises OSError.

        Where each worker has a link, each is a host of its own, with a name of its own.
        """
        if self.namespace is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"entering {self.namespace}")
        if self.interface != "lo" and libc.unshare(_CLONE_NEWUTS) == 0:
            socket.sethostname(self.namespace)


LOOPBACK = Place(None, "127.0.0.1", "lo")


def join(places: Sequence[Place], rank: int, port: int) -> TCPStore | None:
    """The calling process is rank `rank` of the workers at these places, as torchrun's variables say, with one thread.

    Rank 0 hosts the store at the port, and gets it: it must be kept while any worker needs it.
    """
    places[rank].enter()
    torch.set_num_threads(1)
    set_torchrun_variables(rank, len(places), port, places[0].address)
    if rank != 0:
        return None
    return TCPStore("0.0.0.0", port, None, True, timedelta(seconds=120), wait_for_workers=False)


def allowed() -> bool:
    """Whether this process may make namespaces."""
    there = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))
    return there and subprocess.run(["ip", "netns"], capture_output=True).returncode == 0


@contextlib.contextmanager
def links(workers: int, rate: str | None) -> Iterator[list[Place]]:
    """Context: a place for each worker. It ends what runs in the namespaces only with their processes.

    rate: of each worker's link, as tc writes it ("2gbit", "200mbit"); None: all workers share one loopback interface,
    in a namespace of their own where that is allowed. Raises RuntimeError where tc or ip fails.
    """
    if rate is None and not allowed():
        yield [LOOPBACK] * workers
        return
    prefix, names = f"kf{os.getpid()}", list[str]()
    try:
        if rate is None:
            names.append(_add(f"{prefix}-lo"))
            yield [Place(names[0], "127.0.0.1", "lo")] * workers
            return
        hub = _add(f"{prefix}-hub")
        names.append(hub)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        places = []
        for rank in range(workers):
            here = Place(_add(f"{prefix}-{rank}"), f"10.77.0.{rank + 1}", "eth0")
            names.append(f"{prefix}-{rank}")
            _cable((names[-1], "eth0"), (hub, f"to{rank}"), rate)
            _run("ip", "-n", hub, "link", "set", f"to{rank}", "master", "br0")
            _run("ip", "-n", names[-1], "address", "add", f"{here.address}/24", "dev", "eth0")
            places.append(here)
        yield places
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _cable(one: tuple[str, str], other: tuple[str, str], rate: str) -> None:
    """Between two namespaces, each with the name of its end there."""
    (here, near), (there, far) = one, other
    _run("ip", "-n", here, "link", "add", near, "type", "veth", "peer", "name", far, "netns", there)
    for namespace, interface in (one, other):
        _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(_PACKET), "up")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shaper(rate))


def shaper(rate: str) -> list[str]:
    """tc's arguments for a token bucket of this rate. Raises ValueError for a rate without a unit of `_UNITS`."""
    unit = next((unit for unit in _UNITS if rate.endswith(unit)), None)
    if unit is None:
        raise ValueError(f"rate {rate!r}: must be a number and one of {', '.join(_UNITS)}, as 2gbit")
    burst = max(2 * _PACKET, round(float(rate.removesuffix(unit)) * _UNITS[unit] / 8 * _BURST_S))
    return ["tbf", "rate", rate, "burst", str(burst), "latency", _LATENCY]


def received_bytes(interface: str) -> int:
    """Bytes that the interface, in this thread's namespace, has received so far."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[0])
    raise ValueError(f"no interface {interface}")


def _add(name: str) -> str:
    """A new namespace, with its own loopback interface up."""
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
