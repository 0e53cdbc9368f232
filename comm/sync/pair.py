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
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.devices import Device
from kfuse.comm.group import Group
from kfuse.comm.sync.pair_snapshots import Snapshots
from kfuse.comm.sync.pair_wire import TOKEN_BYTES, Peer, SnapshotServer, pull
from kfuse.comm.sync.weights import views

_LOG = logging.getLogger("kfuse")

_LEFT_OUT_S = 2.0  # how long a worker that has not answered is not asked again
_TOLD_AFTER = 3  # pulls from each of the others that have failed, and none that has not in between
_MOST_NAMED = 4
_ADDRESS_BYTES = 256

Choose = Callable[[int, Sequence[int]], int]
"""choose(step, ranks): which of these workers to pull from in this step."""


class Pair:
    """One worker's side of pair averaging, in one view. `DistributedOptimizer.step` calls `mix` and `publish`."""

    rank: int
    """This worker's."""
    peers: dict[int, Peer]
    """The other workers, by rank."""
    mixed: int
    """Steps so far in which another worker's snapshot was averaged in."""
    alone: int
    """Steps so far in which none had arrived."""
    snapshots: Snapshots
    """This worker's."""
    puller: Puller
    """Fetches snapshots. Tests wait for it, to set the order of events; a step never does."""

    def __init__(self, weights: Sequence[Tensor], rank: int, host: str, choose: Choose, step: int = 0) -> None:
        """Publishes the weights (fp32 or bf16, on one device) and serves them from now on; `peers` is to be set.

        host: the address of this machine that the others reach. step: steps made so far. Raises OSError where it cannot
        listen there.
        """
        self.rank, self.peers, self._choose = rank, {}, choose
        self.mixed = self.alone = 0
        self._device = devices.of(weights[0].device if weights else torch.device("cpu"))
        self.snapshots = Snapshots(weights, step, self._device)
        self._server = SnapshotServer(self.snapshots, host)
        self.puller = Puller(sum(weight.numel() for weight in weights), self._device)
        self._left_out: dict[int, float] = {}  # ranks that have not answered: until when they are not asked
        self._failures = Counter[int]()  # by rank: pulls that have failed since a snapshot last arrived
        self._is_told = False

    @property
    def address(self) -> Peer:
        """What the others need to pull from this worker."""
        return self._server.peer

    def begin_step(self, step: int) -> None:
        """Chooses a worker and starts to pull its newest snapshot, unless a pull is still under way. Does not wait.

        One that has not answered is left out for a while; if all are, none is asked. Raises PairError where a worker
        answered with another model.
        """
        failed = self.puller.take_failed()
        if failed is not None:
            rank, why = failed
            self._left_out[rank] = time.monotonic() + _LEFT_OUT_S
            self._failures[rank] += 1
            self._tell_if_alone(why)
        now = time.monotonic()
        ranks = [rank for rank in sorted(self.peers) if self._left_out.get(rank, now) <= now]
        if ranks and self.puller.idle:
            rank = self._choose(step, ranks)
            self.puller.begin(rank, self.peers[rank])

    def _tell_if_alone(self, why: Exception) -> None:
        """Warns, once, where nobody answers: training goes on, and without averaging it has another result."""
        if self._is_told or min(self._failures[rank] for rank in self.peers) < _TOLD_AFTER:
            return
        self._is_told = True
        named = [f"rank {rank} at {peer.host}:{peer.port}" for rank, peer in sorted(self.peers.items())]
        _LOG.warning(
            "comm.sync=pair: rank %d averages with nobody: none of the other workers answers (%s%s; the last error: "
            "%s). It trains alone until one does. Is there a firewall between them?",
            self.rank,
            ", ".join(named[:_MOST_NAMED]),
            ", ..." * (len(named) > _MOST_NAMED),
            why,
        )

    def mix(self, weights: Sequence[Tensor]) -> bool:
        """Before the update: averages the snapshot that has arrived into the weights, half and half. Does not wait.

        Returns whether there was one.
        """
        arrived = self.puller.take()
        if arrived is None:
            self.alone += 1
            return False
        self._failures.clear()
        others = views(arrived.to(self._device.name, non_blocking=True), weights)
        self.puller.used()
        torch._foreach_add_(others, list(weights))  # in fp32, also for bf16 weights
        torch._foreach_mul_(others, 0.5)
        torch._foreach_copy_(list(weights), others)
        self.mixed += 1
        return True

    def publish(self, weights: Sequence[Tensor], step: int) -> None:
        """After the update: offers the weights as they are after `step` steps."""
        self.snapshots.publish(weights, step)

    def restart(self, weights: Sequence[Tensor], step: int) -> None:
        """All workers have the same model again: offers it, and drops a snapshot that is pulled or has arrived."""
        self.puller.drop()
        self.snapshots.publish(weights, step)

    def close(self) -> None:
        """Serves and pulls nothing any more. Waits for nothing."""
        self._server.close()
        self.puller.close()

    # -- finding the others ---------------------------------------------------------------------------------------

    def meet(self, group: Group) -> None:
        """Every rank's address becomes known to all. Every rank calls it, before its first step. Raises CommError."""
        mine = self.address
        text = json.dumps([mine.host, mine.port, mine.token.hex()]).encode()
        message = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = group.all_gather(message.to(group.device), "addresses for pair averaging")
        self.peers = {rank: _peer(bytes(each.tolist())) for rank, each in enumerate(found) if rank != self.rank}


class Puller:
    """Fetches one snapshot at a time in a thread of its own. Each method returns at once."""

    def __init__(self, numel: int, device: Device) -> None:
        """numel: of all weights."""
        self._flat = device.pinned((numel,), torch.float32)
        self._used = device.event()  # a GPU copies from the buffer until then
        self._used.record()
        self._changed = threading.Condition()
        self._asked: tuple[int, Peer] | None = None
        self._under_way = self._arrived = self._unwanted = self._closed = False
        self._failed: tuple[int, Exception] | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="kfuse-pair-pull", daemon=True).start()

    @property
    def idle(self) -> bool:
        """No pull is under way, and nothing that has arrived is still to be taken."""
        with self._changed:
            return not (self._under_way or self._arrived)

    def begin(self, rank: int, peer: Peer) -> None:
        """Starts a pull from this worker. Only where `idle`."""
        with self._changed:
            assert not (self._under_way or self._arrived)
            self._asked, self._under_way, self._unwanted = (rank, peer), True, False
            self._changed.notify_all()

    def await_end(self, timeout_s: float) -> bool:
        """Waits until no pull is under way; for tests, which set the order of events. False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def take(self) -> Tensor | None:
        """What has arrived: fp32 [numel] on the host, to be read before `used` is called. None: nothing."""
        with self._changed:
            arrived, self._arrived = self._arrived, False
        return self._flat if arrived else None

    def used(self) -> None:
        """What was taken has been read, on a GPU by the work that is enqueued so far."""
        self._used.record()

    def take_failed(self) -> tuple[int, Exception] | None:
        """The rank that the last pull failed with, and why; None if it did not.

        Raises PairError where it offered another model, and what else the thread raised.
        """
        with self._changed:
            failed, self._failed, error, self._error = self._failed, None, self._error, None
        if error is not None:
            raise error
        return failed

    def drop(self) -> None:
        """Nothing of what was asked for so far is wanted any more."""
        with self._changed:
            self._arrived, self._unwanted = False, self._under_way

    def close(self) -> None:
        """The thread ends, after the pull under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked is not None or self._closed)
                if self._closed:
                    return
                assert self._asked is not None
                (rank, peer), self._asked = self._asked, None
            error: Exception | None = None
            try:
                self._used.synchronize()
                pull(peer, self._flat)
            except Exception as raised:
                error = raised
            with self._changed:
                self._under_way = False
                self._arrived = error is None and not self._unwanted
                self._failed = None if error is None else (rank, error)
                self._error = None if isinstance(error, OSError) else error
                self._changed.notify_all()


def random_peer(seed: int, rank: int) -> Choose:
    """Chooses uniformly, by random numbers that are keyed by (seed, rank, step)."""
    return lambda step, ranks: random.Random(f"{seed} {rank} {step}").choice(ranks)


def _peer(message: bytes) -> Peer:
    host, port, token = json.loads(message.rstrip(b"\0"))
    assert len(token) == 2 * TOKEN_BYTES
    return Peer(str(host), int(port), bytes.fromhex(token))
