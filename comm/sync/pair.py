"""Asynchronous pair averaging: each worker averages its model with another one's, and waits for nobody.

AD-PSGD (Lian, Zhang, Zhang, Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", algorithm 1)
as KungFu's PairAveragingOptimizer does it (Mai et al. 2020; lsds/KungFu,
srcs/python/kungfu/tensorflow/optimizers/async_sgd.py). In its step k worker i, with the model x_i,

1) chooses another worker j, uniformly at random, and asks for its newest snapshot y_j (in the background);
2) computes its gradient g(x_i) over its own samples;
3) averages: x_i <- (x_i + y_j) / 2, if y_j has arrived by then; if not, y_j is averaged in at a later step;
4) updates: x_i <- optimizer(x_i, g), so SGD subtracts lr * g;
5) publishes x_i as its newest snapshot.

The gradient is that of the model before the averaging, as in the paper (line 6: the gradient at x^, which may be older
than the model that it is subtracted from). Two differences to the paper are KungFu's: only the worker that pulls
averages (in the paper both of the pair do, in one atomic exchange), so an exchange keeps the mean of all models in
expectation only; and a snapshot may be some steps old. KungFu waits for the answer before 3); here no step waits.

With `pair:N,M` a worker has up to two pulls under way: a near one, from a worker of its own host, and a far one, from a
worker of another host. A far one may take many steps over a slow link. So it is averaged in by what the other worker
was ahead as it began: with the own model x_i0 of that moment, x_i <- x_i + (y_j - x_i0) / 2. (x_i + y_j) / 2 would take
back half of the steps made since.

A snapshot travels by plain TCP, one connection for each pull. The puller sends the token of the worker that it pulls
from. That one answers with a header (step, bytes) and the weights, fp32, in the byte order of x86 and ARM. A connection
whose first bytes are not the token is closed unanswered. Sockets rather than the group's send and receive: with gloo a
receive that times out closes all connections that have something pending, for good (gloo,
transport/tcp/unbound_buffer.cc: "Application timeout caused pair closure"), and here that is an ordinary case.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import random
import secrets
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.group import Group
from kfuse.comm.sync.averaging import flatten, views

_LOG = logging.getLogger("kfuse")
_LEFT_OUT_S = 2.0  # how long a worker that has not answered is not asked again
_TOLD_AFTER = 3  # pulls from each of the others, on average, that have failed, and none that has not in between
_ADDRESS_BYTES = 256
SILENCE_S = 2.0  # seconds without a byte after which both sides give a transfer up; one that goes on has no limit
_TOKEN_BYTES = 16
_MAGIC = b"kfuse-pair-1\0\0\0\0"
_HEADER = struct.Struct("<16sqQ")  # magic, step, bytes that follow
_MOST_CONNECTIONS = 64  # at a time; a further one is closed, and its puller asks another worker
_CHUNK = 2**20  # bytes a send; Python's sendall would limit the whole transfer's time


# -- one worker's side ------------------------------------------------------------------------------------------------

Choose = Callable[[int, Sequence[int]], int]  # choose(step, ranks): which of these workers to pull from in this step


class Pull:
    """One pull of the snapshot of another worker, of this rank, in a thread of its own."""

    wanted = True  # its snapshot is of use: workers have not met since it began
    error: Exception | None = None

    def __init__(self, rank: int, fetch: Callable[[], object]) -> None:
        self.rank, self._fetch, self.ended = rank, fetch, threading.Event()
        threading.Thread(target=self._run, name="kfuse-pair-pull", daemon=True).start()

    def _run(self) -> None:
        try:
            self._fetch()
        except Exception as error:
            self.error = error
        self.ended.set()


class Inbox:
    """Where snapshots of other workers arrive, one at a time. In a far one what they are ahead of this worker's own."""

    pull: Pull | None = None  # under way, or ended and still to be taken; a step never waits for it
    due = 0  # the step from which on the next one may begin
    failures = 0  # pulls that have failed since a snapshot last arrived
    step = -1  # after which the snapshot was made

    def __init__(self, numel: int, device: devices.Device, is_far: bool = False) -> None:
        self.is_far = is_far
        self.averaged: dict[int, int] = {}  # by rank: the step of the newest snapshot that was averaged in
        self.arrived = device.pinned((numel,), torch.float32)
        self.weights = self.arrived  # the same, on the device
        self.copied = device.event()  # they are there, and a GPU has read `arrived`
        self.copied.record()

    @property
    def is_full(self) -> bool:
        """Whether a snapshot of use has arrived.

        A far worker that stands at a meeting is averaged in once: each time more would halve again what this one is
        ahead.
        """
        pull = self.pull
        if pull is None or not pull.ended.is_set() or pull.error is not None:
            return False
        return pull.wanted and not (self.is_far and self.averaged.get(pull.rank) == self.step)


class Pair:
    """One worker's side of pair averaging, in one view. `DistributedOptimizer.step` calls `mix` and `publish`."""

    def __init__(self, weights: Sequence[Tensor], rank: int, host: str, choose: Choose, step: int = 0) -> None:
        """Publishes the weights (fp32 or bf16, on one device) and serves them from now on; `peers` is to be set.

        host: the address of this machine that the others reach. step: steps made so far. Raises OSError where it cannot
        listen there.
        """
        self.rank, self._choose = rank, choose
        self.peers: dict[int, Peer] = {}  # the other workers, by rank
        self.elsewhere = set[int]()  # those of `peers` that are on other hosts
        self.counts = Counter[str]()  # near_averages and far_averages made, of one host and of two; failed_pulls
        self._device = devices.of(weights[0].device if weights else torch.device("cpu"))
        self._snapshots = Snapshots(weights, step, self._device)
        self._server = SnapshotServer(self._snapshots, host)
        self.address = self._server.peer  # what the others need to pull from this worker
        self._numel = sum(weight.numel() for weight in weights)
        self.inboxes = [Inbox(self._numel, self._device)]  # and a far one, once it is needed
        self._stream = self._device.new_stream()  # of the copies to a GPU
        self._left_out: dict[int, float] = {}  # ranks that have not answered: until when they are not asked
        self._is_told = False

    def begin_step(self, step: int, every: Sequence[int] = (0,)) -> None:
        """Chooses workers and starts to pull their newest snapshots, unless a pull is still under way. Does not wait.

        every: least steps from one pull to the next: from any worker; or two numbers, for those of this host, and those
        of others. One that has not answered is left out for a while; if all are, none is asked. Raises PairError where
        a worker answered with another model.
        """
        now = time.monotonic()
        for inbox in self.inboxes:
            ended = inbox.pull
            if ended is not None and ended.ended.is_set() and not inbox.is_full:
                inbox.pull = None
                if ended.error is not None:
                    self._failed(inbox, ended.rank, ended.error, now)
        all_ranks = [rank for rank in sorted(self.peers) if self._left_out.get(rank, now) <= now]
        for kind, steps in enumerate(every):
            ranks = [rank for rank in all_ranks if len(every) == 1 or (rank in self.elsewhere) == kind]
            if ranks and kind == len(self.inboxes):
                self.inboxes.append(Inbox(self._numel, self._device, is_far=True))
            if ranks and (inbox := self.inboxes[kind]).pull is None and inbox.due <= step:
                rank, inbox.due = self._choose(step, ranks), step + steps
                inbox.pull = Pull(rank, partial(self._fetch, inbox, self.peers[rank]))

    def _fetch(self, inbox: Inbox, peer: Peer) -> None:
        """Has the newest snapshot of `peer` on the device, less the own one if it is far; no step waits for it."""
        inbox.copied.synchronize()
        with self._snapshots.newest() if inbox.is_far else contextlib.nullcontext() as own:
            inbox.step = pull(peer, inbox.arrived)
            if own is not None:
                inbox.arrived.sub_(own.flat)
        self._device.make_current()
        with self._device.on(self._stream):
            inbox.weights = inbox.arrived.to(self._device.name, non_blocking=True)
            inbox.copied.record()

    def _failed(self, inbox: Inbox, rank: int, error: Exception, now: float) -> None:
        """Leaves the worker out for a while. Warns, once, where nobody answers: training goes on, without averaging."""
        if not isinstance(error, OSError):
            raise error
        self._left_out[rank] = now + _LEFT_OUT_S
        inbox.failures += 1
        self.counts["failed_pulls"] += 1
        if not self._is_told and inbox.failures >= _TOLD_AFTER * len(self.peers):
            self._is_told = True
            peer = self.peers[rank]
            _LOG.warning(
                "comm.sync=pair: rank %d averages with nobody%s: none of these workers answers (rank %d at %s:%d: %s). "
                "It trains without them until one does. Is there a firewall between them?",
                *(self.rank, " of another host" * inbox.is_far, rank, peer.host, peer.port, error),
            )

    def mix(self, weights: Sequence[Tensor]) -> bool:
        """Before the update: averages what has arrived into the weights; returns whether there was anything."""
        return any([self._average(inbox, weights) for inbox in self.inboxes])  # a list: all of them

    def _average(self, inbox: Inbox, weights: Sequence[Tensor]) -> bool:
        if inbox.pull is None or not inbox.is_full:
            return False
        self.counts["far_averages" if inbox.pull.rank in self.elsewhere else "near_averages"] += 1
        inbox.averaged[inbox.pull.rank] = inbox.step
        inbox.pull, inbox.failures = None, 0
        inbox.copied.wait()
        flat, inbox.weights = inbox.weights, inbox.arrived  # its memory on a GPU is free after this
        self._device.keep([flat], self._device.current_stream())
        others = views(flat, weights)
        if inbox.is_far:  # they are what the other one was ahead
            torch._foreach_add_(others, list(weights))
        torch._foreach_add_(others, list(weights))  # in fp32, also for bf16 weights
        torch._foreach_mul_(others, 0.5)
        torch._foreach_copy_(list(weights), others)
        return True

    def publish(self, weights: Sequence[Tensor], step: int) -> None:
        """After the update: offers the weights as they are after `step` steps."""
        self._snapshots.publish(weights, step)

    def restart(self, weights: Sequence[Tensor], step: int) -> None:
        """All workers have the same model again: offers it, and drops a snapshot that is pulled or has arrived."""
        for inbox in self.inboxes:
            if inbox.pull is not None:
                inbox.pull.wanted = False
        self._snapshots.publish(weights, step)

    def close(self) -> None:
        """Serves nothing any more. Waits for nothing."""
        self._server.close()

    def meet(self, group: Group) -> None:
        """Every rank's address becomes known to all. Every rank calls it, before its first step. Raises CommError."""
        mine = self.address
        text = json.dumps([mine.host, mine.port, mine.token.hex()]).encode()
        message = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for rank, each in enumerate(group.all_gather(message.to(group.device), "addresses for pair averaging")):
            if rank != self.rank:
                if group.hosts[rank] != group.hosts[self.rank]:
                    self.elsewhere.add(rank)
                host, port, token = json.loads(bytes(each.tolist()).rstrip(b"\0"))
                self.peers[rank] = Peer(host, port, bytes.fromhex(token))


def random_peer(seed: int, rank: int) -> Choose:
    """Chooses uniformly, by random numbers that are keyed by (seed, rank, step)."""
    return lambda step, ranks: random.Random(f"{seed} {rank} {step}").choice(ranks)


# -- snapshots, and how they travel -----------------------------------------------------------------------------------


class PairError(RuntimeError):
    """A worker offers a snapshot of another model."""


class Snapshot:
    """A copy of a model's weights in the host's memory, as they were after `step` steps."""

    step = -1
    readers = 0  # how many read it now; `Snapshots` counts them under its lock

    def __init__(self, weights: Sequence[Tensor], device: devices.Device) -> None:
        self.flat = device.pinned((sum(weight.numel() for weight in weights),), torch.float32)  # in logical order
        self.copied = device.event()


class Snapshots:
    """The newest snapshot of one worker, and the buffers that it lies in by turns. Thread-safe.

    A buffer that a reader still reads is not written: where a transfer outlasts a publication a further one is made,
    and kept. So no reader gets parts of two snapshots, and the writer never waits. Needs twice the weights' bytes in
    fp32 on the host, and as much again for each such transfer.
    """

    _newest: Snapshot

    def __init__(self, weights: Sequence[Tensor], step: int, device: devices.Device) -> None:
        """weights: of the model, fp32 or bf16, on `device`. They are published, as those after `step` steps."""
        self._device, self._lock = device, threading.Lock()
        self._stream = device.new_stream()  # of the copies from a GPU
        self.buffers: list[Snapshot] = []
        self.publish(weights, step)

    def publish(self, weights: Sequence[Tensor], step: int) -> None:
        """Offers these weights, those of before with other values, from now on. For one thread; it does not wait."""
        with self._lock:
            free = next((each for each in self.buffers if each is not self._newest and not each.readers), None)
        if free is None:
            free = Snapshot(weights, self._device)
            self.buffers.append(free)
        # No reader can come to it: only the newest one is given out.
        if self._device.asynchronous:
            flat = flatten(weights)  # so the step's stream has one kernel, not a copy of each weight to the host
            self._stream.wait_stream(self._device.current_stream())
            self._device.keep([flat], self._stream)
            with self._device.on(self._stream):
                free.flat.copy_(flat, non_blocking=True)
                free.copied.record()
        else:
            torch._foreach_copy_(views(free.flat, weights), list(weights))
        free.step = step
        with self._lock:
            self._newest = free

    @contextlib.contextmanager
    def newest(self) -> Iterator[Snapshot]:
        """Context: the newest snapshot, complete, which is not written meanwhile."""
        with self._lock:
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
