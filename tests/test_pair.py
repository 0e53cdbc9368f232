"""Pair averaging (`kfuse.comm.sync.pair`): the snapshots, who is served, the published update and its rate."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from elastic_job import wait_until
from problems import OPTIMIZERS
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import kfuse as kf
from kfuse.comm import devices
from kfuse.comm.group import CommError
from kfuse.comm.sync import pair as pair_module
from kfuse.comm.sync.pair import Pair, PairError, Peer, Snapshots, SnapshotServer, pull, random_peer
from kfuse.observe.run_dir import RunDirectory
from kfuse.train.pair import Meeting

CPU = devices.of(torch.device("cpu"))
LOCAL = "127.0.0.1"


def filled(step: int, numel: int = 5) -> list[Tensor]:
    """Weights that all have the step's number as their value."""
    return [torch.full((numel,), float(step)), torch.full((2, 3), float(step))]


# -- the snapshots ----------------------------------------------------------------------------------------------------


def test_no_pull_is_torn_by_a_thread_that_publishes_all_the_time() -> None:
    """As large as several reads of a socket, so that a pull lasts longer than a publication."""
    numel, step = 2**19, 0
    snapshots = Snapshots([torch.zeros(numel)], 0, CPU)
    server = SnapshotServer(snapshots, LOCAL)
    over, seen = threading.Event(), set[int]()

    def pulls() -> None:
        into = torch.empty(numel)
        while not over.is_set():
            found = pull(server.peer, into)
            assert torch.equal(into, torch.full((numel,), float(found)))
            seen.add(found)

    with ThreadPoolExecutor(3) as threads:
        pulling = [threads.submit(pulls) for _ in range(3)]
        deadline = time.monotonic() + 60
        while (len(seen) <= 20 or step <= 40) and time.monotonic() < deadline:
            step += 1
            snapshots.publish([torch.full((numel,), float(step))], step)
        over.set()
        for each in pulling:
            each.result()
    server.close()
    assert len(seen) > 20 and step > 40
    assert len(snapshots.buffers) <= 5


# -- who is served ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    made = SnapshotServer(Snapshots(filled(7), 7, CPU), LOCAL)
    yield made
    made.close()


@pytest.fixture
def new_pair() -> Iterator[Callable[..., Pair]]:
    """Makes the side of a worker, which pulls from the first of its peers; closes all afterwards."""
    made = list[Pair]()

    def new(weights: list[Tensor], peers: dict[int, Peer], rank: int = 0, choose: Any = None) -> Pair:
        made.append(Pair(weights, rank, LOCAL, choose or (lambda step, ranks: ranks[0])))
        made[-1].peers = peers
        return made[-1]

    yield new
    for pair in made:
        pair.close()


def pulled(pair: Pair, step: int = 0) -> None:
    """Begins a step, and waits for the pull, which a step never does."""
    pair.begin_step(step)
    assert pair.inboxes[0].pull is not None and pair.inboxes[0].pull.ended.wait(60.0)


def test_who_knows_the_token_is_served_and_a_stranger_gets_no_byte(server: SnapshotServer) -> None:
    for sent in (b"", bytes(16), bytes(500)):
        with socket.create_connection((LOCAL, server.peer.port), timeout=60) as stranger:
            stranger.sendall(sent)
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = stranger.recv(1)
            assert answer == b""
    into = torch.empty(11)
    assert pull(server.peer, into) == 7
    assert set(into.tolist()) == {7.0}


def test_silent_strangers_do_not_keep_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a place until it has been silent for long enough."""
    monkeypatch.setattr(pair_module, "SILENCE_S", 0.2)
    server = SnapshotServer(Snapshots(filled(7), 7, CPU), LOCAL)
    strangers = [socket.create_connection((LOCAL, server.peer.port)) for _ in range(80)]

    def served() -> bool:
        with contextlib.suppress(OSError):
            return pull(server.peer, torch.empty(11)) == 7
        return False

    wait_until("a pull", served)
    for stranger in strangers:
        stranger.close()
    server.close()


def test_another_model_is_an_error(server: SnapshotServer, new_pair: Any) -> None:
    with pytest.raises(PairError, match=r"offers 44 bytes, and this worker's weights have 48: all must have the same"):
        pull(server.peer, torch.empty(12))
    pair = new_pair([torch.zeros(12)], {1: server.peer})
    pulled(pair)
    with pytest.raises(PairError):
        pair.begin_step(0)


def test_what_is_silent_or_gone_or_speaks_otherwise_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a stopped process accepts, and says nothing."""
    monkeypatch.setattr(pair_module, "SILENCE_S", 0.1)
    with socket.create_server((LOCAL, 0)) as listener:
        peer = Peer(LOCAL, listener.getsockname()[1], bytes(16))
        with pytest.raises(TimeoutError):
            pull(peer, torch.empty(3))

        def answer() -> None:
            for _ in range(2):  # the first connection is that of the pull before
                connection, _ = listener.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(bytes(100))

        monkeypatch.setattr(pair_module, "SILENCE_S", 60.0)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another program answers"):
            pull(peer, torch.empty(3))
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        pull(peer, torch.empty(3))


# -- when snapshots are averaged in -----------------------------------------------------------------------------------


def test_what_has_arrived_is_averaged_in_once_and_nothing_of_before_a_meeting(new_pair: Any) -> None:
    second = new_pair(filled(1), {}, rank=1)
    first, weights = new_pair(filled(0), {1: second.address}), filled(0)
    pulled(first)
    assert first.mix(weights)
    assert all(set(weight.flatten().tolist()) == {0.5} for weight in weights)
    assert not first.mix(weights)
    pulled(first, 1)
    first.restart(filled(4), 1)
    weights = filled(4)
    assert not first.mix(weights) and torch.equal(weights[0], filled(4)[0])
    pulled(first, 2)
    assert first.mix(weights)


def nobody() -> Peer:
    with socket.create_server((LOCAL, 0)) as closed:
        return Peer(LOCAL, closed.getsockname()[1], bytes(16))


def test_who_does_not_answer_is_left_out_for_a_while(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, new_pair: Any
) -> None:
    """A worker that was lost is not asked at each step, while another one answers."""
    monkeypatch.setattr(pair_module, "_LEFT_OUT_S", 60.0)
    asked: list[list[int]] = []

    def choose(step: int, ranks: Any) -> int:
        asked.append(list(ranks))
        return 1 if 1 in asked[-1] else 2

    pair = new_pair(filled(0), {1: nobody(), 2: server.peer}, choose=choose)
    mixed = []
    for step in range(4):
        pulled(pair, step)
        mixed.append(pair.mix(filled(0)))
    assert asked == [[1, 2], [2], [2], [2]]
    assert mixed == [False, True, True, True]


def test_peers_are_chosen_uniformly_and_by_the_seed() -> None:
    choose = random_peer(3, 1)
    draws = [choose(step, (0, 2, 3)) for step in range(3000)]
    assert draws == [random_peer(3, 1)(step, (0, 2, 3)) for step in range(3000)]
    assert draws != [random_peer(4, 1)(step, (0, 2, 3)) for step in range(3000)]
    counts = np.array([draws.count(rank) for rank in (0, 2, 3)])
    assert abs(counts - 1000).max() < 4 * np.sqrt(3000 * (1 / 3) * (2 / 3))


# -- near and far workers ---------------------------------------------------------------------------------------------


def test_near_and_far_workers_are_pulled_from_at_steps_of_their_own(server: SnapshotServer, new_pair: Any) -> None:
    """Every 2 and every 3 steps. Alone on its host a worker has far ones only, and on one host near ones only.

    The far workers stand: their one snapshot is averaged in once, of each that is asked.
    """
    peers = {rank: server.peer for rank in (1, 2, 3)}

    def asked(elsewhere: set[int]) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}

        def choose(step: int, ranks: Any) -> int:
            found.setdefault(step, []).append(list(ranks))
            return int(ranks[-1])

        pair, weights = new_pair(filled(0), peers, choose=choose), filled(0)
        pair.elsewhere = elsewhere
        for step in range(7):
            pair.begin_step(step, (2, 3))
            assert all(inbox.pull is None or inbox.pull.ended.wait(60.0) for inbox in pair.inboxes)
            pair.mix(weights)
        far = sum(len(set(ranks) & elsewhere) > 0 for each in found.values() for ranks in each)
        assert pair.counts == Counter(far_averages=min(far, 1), near_averages=sum(map(len, found.values())) - far)
        return found

    near, far = [1], [2, 3]
    assert asked({2, 3}) == {0: [near, far], 2: [near], 3: [far], 4: [near], 6: [near, far]}
    assert asked({1, 2, 3}) == {step: [[1, 2, 3]] for step in (0, 3, 6)}
    assert asked(set()) == {step: [[1, 2, 3]] for step in (0, 2, 4, 6)}


def test_a_long_far_pull_hinders_no_near_one_and_takes_back_no_step(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, new_pair: Any
) -> None:
    """It is averaged in by what the other worker (7) was ahead of this one's model as it began (1)."""
    begun, arrives, fetch = threading.Event(), threading.Event(), pull

    def slowly(peer: Peer, into: Tensor) -> int:
        if peer.host != LOCAL:
            begun.set()
            assert arrives.wait(60.0)
        return fetch(server.peer, into)

    monkeypatch.setattr(pair_module, "pull", slowly)
    pair = new_pair(filled(1), {1: server.peer, 2: Peer("elsewhere", 1, b"")})
    pair.elsewhere = {2}
    for step in range(3):
        weights = filled(3 * step + 1)
        pair.begin_step(step, (1, 1))
        assert begun.wait(60.0) and pair.inboxes[0].pull is not None and pair.inboxes[0].pull.ended.wait(60.0)
        assert pair.mix(weights)
        assert set(weights[0].tolist()) == {(3 * step + 8) / 2}
        pair.publish(filled(3 * step + 4), step + 1)
    arrives.set()
    far, weights = pair.inboxes[1].pull, filled(10)
    assert far.ended.wait(60.0) and pair.mix(weights)
    assert set(weights[0].tolist()) == {10 + (7 - 1) / 2}
    assert pair.counts == Counter(near_averages=3, far_averages=1)


# -- the update: real workers in one process, so that the test sets the order of events ------------------------------


class Quadratic(nn.Module):
    """1/2 sum h x^2 - b x, in two parameters."""

    def __init__(self, h: Tensor, b: Tensor, start: Tensor) -> None:
        super().__init__()
        self.h, self.b = h, b
        self.first, self.rest = nn.Parameter(start[:3].clone()), nn.Parameter(start[3:].clone())

    def forward(self) -> Tensor:
        x = torch.cat([self.first, self.rest])
        return (0.5 * self.h * x * x - self.b * x).sum()

    def values(self) -> Tensor:
        return torch.cat([self.first, self.rest]).detach().clone()


class Published:
    """The published recursion, in float64: x <- (x + y) / 2, then the optimizer's update by the old x's gradient."""

    def __init__(self, model: Quadratic, make: Callable[[Any], Any]) -> None:
        self.model, self.opt = model, make(model.parameters())
        self.snapshot, self.arrived = model.values(), None

    def step(self) -> None:
        self.opt.zero_grad()
        self.model().backward()
        if self.arrived is not None:
            for p, arrived in zip(self.model.parameters(), self.arrived.split((3, 4)), strict=True):
                p.data = (p.data + arrived) / 2
            self.arrived = None
        self.opt.step()
        self.snapshot = self.model.values()


def test_masters_of_16_bit_parameters_are_averaged(new_pair: Any) -> None:
    """In fp32, and the parameters are their rounded values. (A learning rate of 0 leaves them alone otherwise.)"""
    net = nn.Linear(5, 3).to(torch.bfloat16)
    opt = kf.FusedSGD(net.parameters(), lr=0.0)
    mine, theirs = ([change(weight) for weight in opt.updates.weights()] for change in (torch.clone, torch.rand_like))
    pair = new_pair(opt.updates.weights(), {1: new_pair(theirs, {}, rank=1).address})
    opt.pair = pair
    pulled(pair)
    net(torch.ones(4, 5, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    for weight, p, one, two in zip(opt.updates.weights(), net.parameters(), mine, theirs, strict=True):
        torch.testing.assert_close(weight, (one + two) / 2)
        assert weight.dtype == torch.float32 and torch.equal(p, weight.to(torch.bfloat16))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_order_of_events_gives_the_published_update(name: str, new_pair: Any) -> None:
    """A pull may come long before the step that uses it, so snapshots are old; a step may come without any pull."""
    count, generator, order = 4, torch.Generator().manual_seed(1), random.Random(7)
    h, b = torch.linspace(0.3, 2.0, 7), torch.randn(7, generator=generator)
    starts = torch.randn(count, 7, generator=generator)
    published = [Published(Quadratic(h.double(), b.double(), x.double()), OPTIMIZERS[name][1]) for x in starts]
    models = [Quadratic(h, b, start) for start in starts]
    opts = [OPTIMIZERS[name][0](model.parameters()) for model in models]
    pairs = [new_pair(opt.updates.weights(), {}, rank) for rank, opt in enumerate(opts)]
    for opt, pair in zip(opts, pairs, strict=True):
        opt.pair = pair
    pulls = old = 0
    for _ in range(200):
        i = order.randrange(count)
        if order.random() < 0.5 and published[i].arrived is None:
            j = order.choice([rank for rank in range(count) if rank != i])
            pairs[i].peers = {j: pairs[j].address}
            pulled(pairs[i])
            published[i].arrived = published[j].snapshot
            pulls += 1
            continue
        snapshots = [each.snapshot for each in published]
        old += published[i].arrived is not None and not any(published[i].arrived is each for each in snapshots)
        models[i]().backward()
        opts[i].step()
        opts[i].zero_grad()
        published[i].step()
        torch.testing.assert_close(models[i].values().double(), published[i].model.values(), rtol=2e-5, atol=2e-6)
    assert pulls > 50 and old > 10


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_ledger_line_is_kept_once_in_each_workers_order(tmp_path: Path) -> None:
    """A slow worker's lines come after later ones of others; those that a new leader sends again are dropped."""
    lines = [
        {"step": step, "micro_batch": 2 * worker, "worker": worker, "indices": [step]}
        for step, worker in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 0), (0, 1), (1, 1))
    ]
    last = {"step": 3, "micro_batch": 0, "indices": [3]}

    def kept(rewind: int | None, *sent: dict[str, Any]) -> list[dict[str, Any]]:
        directory = RunDirectory(tmp_path, sinks=(), ledger=True)
        if rewind is not None:
            directory.rewind(rewind)
        for line in sent:
            directory.ledger(line)
        directory.close()
        return [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]

    kept(None, *lines)
    assert kept(3, *lines, last) == [*(lines[k] for k in (0, 1, 2, 3, 6)), last]
    again = kept(1, lines[3], lines[6])
    assert again == [lines[k] for k in (0, 3, 6)], "what a slow worker wrote after a dropped line stays, once"


# -- meetings ---------------------------------------------------------------------------------------------------------


def test_those_that_stand_wait_while_another_one_moves_and_no_longer() -> None:
    """The others' words come by rank, and a second round follows the first."""
    store: Any = HashStore()
    meetings = [
        Meeting(Mock(group=Mock(size=2, rank=rank, store=store, timeout_s=1.0), link=Mock(silence_s=0.0, stop=None)))
        for rank in range(2)
    ]
    with ThreadPoolExecutor(1) as other:
        stands = other.submit(meetings[0].round, 5, {"step": 9})
        for _ in range(20):
            time.sleep(0.1)
            meetings[1].moved()
        assert meetings[1].round(5, {"step": 7}) == stands.result() == [{"step": 9}, {"step": 7}]
        stands = other.submit(meetings[0].round, 5, {"step": 9})
        with pytest.raises(CommError, match=r"after step 9: .* made no step for 1 s"):
            stands.result()
