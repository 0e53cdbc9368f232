"""Pair averaging: the snapshot of its weights that a worker offers to the others, and how one of them fetches it.

It travels by plain TCP, one connection for each pull. The puller sends the token of the worker that it pulls from. That
one answers with a header (step, bytes) and the weights, fp32, in the byte order of x86 and ARM. A connection whose
first bytes are not the token is closed unanswered.

Sockets rather than the group's send and receive: with gloo a receive that times out closes all connections that have
something pending, for good (gloo, transport/tcp/unbound_buffer.cc: "Application timeout caused pair closure"), and here
a worker that does not answer is an ordinary case. Each pull connects anew, so nothing needs repair afterwards.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.comm.devices import Device
from kfuse.comm.sync.averaging import views

SILENCE_S = 2.0
"""Seconds without a byte after which a transfer is given up, on both sides. A transfer that goes on has no limit."""
_TOKEN_BYTES = 16
_MAGIC = b"kfuse-pair-1\0\0\0\0"
_HEADER = struct.Struct("<16sqQ")  # magic, step, bytes that follow
_MOST_CONNECTIONS = 64  # at a time; a further one is closed, and its puller asks another worker
_CHUNK = 2**20  # bytes a send; Python's sendall would limit the whole transfer's time


class PairError(RuntimeError):
    """A worker offers a snapshot of another model."""


class Snapshot:
    """A copy of a model's weights in the host's memory, as they were after `step` steps."""

    step = -1
    readers = 0
    """How many read it now; `Snapshots` counts them under its lock."""

    def __init__(self, weights: Sequence[Tensor], device: Device) -> None:
        self.flat = device.pinned((sum(weight.numel() for weight in weights),), torch.float32)
        """fp32 [numel], each weight's elements in logical order."""
        self.views = views(self.flat, weights)
        self.copied = device.event()


class Snapshots:
    """The newest snapshot of one worker, and the buffers that it lies in by turns. Thread-safe.

    A buffer that a reader still reads is not written: where a transfer outlasts a publication a further one is made,
    and kept. So no reader gets parts of two snapshots, and the writer never waits. Needs twice the weights' bytes in
    fp32 on the host, and as much again for each such transfer.
    """

    def __init__(self, weights: Sequence[Tensor], step: int, device: Device) -> None:
        """weights: of the model, fp32 or bf16, on `device`. They are published, as those after `step` steps."""
        self._device, self._lock = device, threading.Lock()
        self.buffers: list[Snapshot] = []
        self._newest: Snapshot | None = None
        self.publish(weights, step)

    def publish(self, weights: Sequence[Tensor], step: int) -> None:
        """Offers these weights, those of before with other values, from now on. For one thread; it does not wait."""
        with self._lock:
            free = next((each for each in self.buffers if each is not self._newest and not each.readers), None)
        if free is None:
            free = Snapshot(weights, self._device)
            self.buffers.append(free)
        # No reader can come to it: only the newest one is given out.
        torch._foreach_copy_(free.views, list(weights), non_blocking=True)
        free.copied.record()
        free.step = step
        with self._lock:
            self._newest = free

    @contextlib.contextmanager
    def newest(self) -> Iterator[Snapshot]:
        """Context: the newest snapshot, complete, which is not written meanwhile."""
        with self._lock:
            assert self._newest is not None
            found = self._newest
            found.readers += 1
        try:
            found.copied.synchronize()
            yield found
        finally:
            with self._lock:
                found.readers -= 1


@dataclass(frozen=True)
class Peer:
    """Where a worker serves its snapshot, and the token that it wants to see."""

    host: str
    port: int
    token: bytes


class SnapshotServer:
    """Serves one worker's newest snapshot to workers that know its token, each connection in a thread of its own."""

    def __init__(self, snapshots: Snapshots, host: str) -> None:
        """host: the address to listen on. Raises OSError where it cannot be."""
        assert sys.byteorder == "little", "snapshots travel in little-endian order"
        self._snapshots = snapshots
        self._listener = socket.create_server((host, 0), backlog=_MOST_CONNECTIONS)
        self.peer = Peer(host, self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self._places = threading.Semaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="kfuse-pair-server", daemon=True).start()

    def close(self) -> None:
        """Accepts no further connection. A transfer under way goes on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept, which close alone does not
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of file descriptors: then nobody can be served
                if self._listener.fileno() < 0:
                    return
                threading.Event().wait(SILENCE_S)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kfuse-pair-serve", daemon=True).start()
            except RuntimeError:  # no further thread can be started
                self._places.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(SILENCE_S)
                token = bytearray(_TOKEN_BYTES)
                _receive(connection, memoryview(token))
                if not hmac.compare_digest(token, self.peer.token):
                    return
                with self._snapshots.newest() as snapshot:
                    weights = _as_bytes(snapshot.flat)
                    connection.sendall(_HEADER.pack(_MAGIC, snapshot.step, len(weights)))
                    while weights:
                        weights = weights[connection.send(weights[:_CHUNK]) :]
        except OSError:
            pass  # another program, or the puller has ended: it has its own timeout
        finally:
            self._places.release()


def pull(peer: Peer, into: Tensor) -> int:
    """Fetches the newest snapshot of `peer` into `into` (fp32 [numel], on the host). Returns its step.

    Raises OSError where the peer cannot be reached, is silent for `SILENCE_S` or is no worker, PairError where its
    model has another size. `into` then holds a part of a snapshot.
    """
    with socket.create_connection((peer.host, peer.port), timeout=SILENCE_S) as connection:
        connection.sendall(peer.token)
        header = bytearray(_HEADER.size)
        _receive(connection, memoryview(header))
        magic, step, size = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise ConnectionError("another program answers there")  # which has got the port of a worker that is gone
        if size != into.nbytes:
            raise PairError(
                f"comm.sync=pair: the worker at {peer.host}:{peer.port} offers {size} bytes, and this worker's weights "
                f"have {into.nbytes}: all must have the same model"
            )
        _receive(connection, _as_bytes(into))
    return int(step)


def _receive(connection: socket.socket, place: memoryview) -> None:
    """Fills `place`. Raises OSError after the socket's timeout without a byte, and where the connection ends before."""
    while place:
        count = connection.recv_into(place)
        if not count:
            raise ConnectionError("the connection ended too early")
        place = place[count:]


def _as_bytes(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]
