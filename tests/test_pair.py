"""Pair averaging (`kfuse.comm.sync.pair`): the snapshots, who is served, the published update and its rate."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import devices
from kfuse.comm.sync import pair as pair_module
from kfuse.comm.sync import snapshots as snapshots_module
from kfuse.comm.sync.pair import Pair, random_peer
from kfuse.comm.sync.snapshots import PairError, Peer, Snapshots, SnapshotServer, pull
from kfuse.comm.sync.weights import views
from kfuse.elastic.meetings import Meetings
from kfuse.observe.run_dir import RunDirectory
from kfuse.train.pair import PairAveraging

CPU = devices.of(torch.device("cpu"))
LOCAL = "127.0.0.1"


def filled(step: int, numel: int = 5) -> list[Tensor]:
    """Weights that all have the step's number as their value."""
    return [torch.full((numel,), float(step)), torch.full((2, 3), float(step))]


# -- the snapshots ----------------------------------------------------------------------------------------------------


@given(events=st.lists(st.sampled_from(["publish", "open", "close"]), max_size=60))
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_one_publication_whatever_the_order(events: list[str]) -> None:
    snapshots, published = Snapshots(filled(0), 0, CPU), 0
    readers: list[tuple[contextlib.ExitStack, Any, int]] = []
    for event in events:
        if event == "publish":
            published += 1
            snapshots.publish(filled(published), published)
        elif event == "open":
            stack = contextlib.ExitStack()
            readers.append((stack, stack.enter_context(snapshots.newest()), published))
        elif readers:
            readers.pop(len(readers) // 2)[0].close()
        for _, found, step in readers:
            assert found.step == step and set(found.flat.tolist()) == {float(step)}
    assert len(snapshots.buffers) <= 2 + events.count("open")
    for stack, *_ in readers:
        stack.close()


def test_no_pull_is_torn_by_a_thread_that_publishes_all_the_time() -> None:
    """As large as several reads of a socket, so that a pull lasts longer than a publication."""
    numel, step = 2**19, 0
    snapshots = Snapshots([torch.zeros(numel)], 0, CPU)
    server = SnapshotServer(snapshots, LOCAL)
    over, seen, failures = threading.Event(), set[int](), list[BaseException]()

    def pulls() -> None:
        into = torch.empty(numel)
        try:
            while not over.is_set():
                found = pull(server.peer, into)
                assert torch.equal(into, torch.full((numel,), float(found)))
                seen.add(found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pulls) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not failures and (len(seen) <= 20 or step <= 40) and time.monotonic() < deadline:
        step += 1
        snapshots.publish([torch.full((numel,), float(step))], step)
    over.set()
    for thread in threads:
        thread.join()
    server.close()
    assert not failures and len(seen) > 20 and step > 40
    assert len(snapshots.buffers) <= 5


# -- who is served ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    made = SnapshotServer(Snapshots(filled(7), 7, CPU), LOCAL)
    yield made
    made.close()


def test_who_knows_the_token_is_served_and_a_stranger_gets_no_byte(server: SnapshotServer) -> None:
    for sent in (b"", bytes(16), b"\x80\x04" + bytes(500)):
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
    monkeypatch.setattr(snapshots_module, "SILENCE_S", 0.2)
    server = SnapshotServer(Snapshots(filled(7), 7, CPU), LOCAL)
    strangers = [socket.create_connection((LOCAL, server.peer.port)) for _ in range(80)]
    deadline = time.monotonic() + 60
    while True:
        try:
            assert pull(server.peer, torch.empty(11)) == 7
            break
        except OSError:
            assert time.monotonic() < deadline
    for stranger in strangers:
        stranger.close()
    server.close()


def test_another_model_is_an_error(server: SnapshotServer) -> None:
    with pytest.raises(PairError, match=r"offers 44 bytes, and this worker's weights have 48: all must have the same"):
        pull(server.peer, torch.empty(12))
    pair = Pair([torch.zeros(12)], 0, LOCAL, lambda step, ranks: ranks[0])
    pair.peers = {1: server.peer}
    pair.begin_step(0)
    arrive(pair)
    with pytest.raises(PairError):
        pair.begin_step(0)
    pair.close()


def test_what_is_silent_or_gone_or_speaks_otherwise_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a stopped process accepts, and says nothing."""
    monkeypatch.setattr(snapshots_module, "SILENCE_S", 0.1)
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

        monkeypatch.setattr(snapshots_module, "SILENCE_S", 60.0)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another program answers"):
            pull(peer, torch.empty(3))
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        pull(peer, torch.empty(3))


# -- when snapshots are averaged in -----------------------------------------------------------------------------------


def two() -> tuple[Pair, Pair]:
    """Worker 0 with zeros, worker 1 with ones; each pulls from the other."""
    ours = [Pair(filled(rank), rank, LOCAL, lambda step, ranks: ranks[0]) for rank in range(2)]
    for mine, other in (ours, ours[::-1]):
        mine.peers = {other.rank: other.address}
    return ours[0], ours[1]


def arrive(pair: Pair) -> None:
    """Waits for the pull under way, which a step never does."""
    assert pair.pull is not None and pair.pull.ended.wait(60.0)


def test_what_has_arrived_is_averaged_in_once_and_nothing_of_before_a_meeting() -> None:
    first, second = two()
    weights = filled(0)
    first.begin_step(0)
    arrive(first)
    assert first.mix(weights)
    assert all(set(weight.flatten().tolist()) == {0.5} for weight in weights)
    assert not first.mix(weights)
    assert (first.mixed, first.alone) == (1, 1)
    first.begin_step(1)
    arrive(first)
    first.restart(filled(4), 1)
    weights = filled(4)
    assert not first.mix(weights) and torch.equal(weights[0], filled(4)[0])
    first.begin_step(2)
    arrive(first)
    assert first.mix(weights)
    first.close()
    second.close()


def test_nothing_has_arrived_before_the_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose others do not answer keeps its own weights, and does not wait."""
    monkeypatch.setattr(snapshots_module, "SILENCE_S", 60.0)
    with socket.create_server((LOCAL, 0)) as listener:
        pair = Pair(filled(3), 0, LOCAL, lambda step, ranks: ranks[0])
        pair.peers = {1: Peer(LOCAL, listener.getsockname()[1], bytes(16))}
        weights = filled(3)
        began = time.monotonic()
        for step in range(100):
            pair.begin_step(step)
            assert not pair.mix(weights)
            pair.publish(weights, step)
        assert time.monotonic() - began < snapshots_module.SILENCE_S / 2
        assert all(torch.equal(*both) for both in zip(weights, filled(3), strict=True))
        pair.close()


def nobody() -> Peer:
    with socket.create_server((LOCAL, 0)) as closed:
        return Peer(LOCAL, closed.getsockname()[1], bytes(16))


def test_who_does_not_answer_is_left_out_for_a_while(server: SnapshotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was lost is not asked at each step, while another one answers."""
    monkeypatch.setattr(pair_module, "_LEFT_OUT_S", 60.0)
    asked: list[list[int]] = []

    def choose(step: int, ranks: Any) -> int:
        asked.append(list(ranks))
        return 1 if 1 in asked[-1] else 2

    pair = Pair(filled(0), 0, LOCAL, choose)
    pair.peers = {1: nobody(), 2: server.peer}
    for step in range(4):
        pair.begin_step(step)
        arrive(pair)
        pair.mix(filled(0))
    assert asked == [[1, 2], [2], [2], [2]]
    assert (pair.mixed, pair.alone) == (3, 1)
    pair.close()


def test_a_worker_that_nobody_answers_says_so_once(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains alone. One whose others answer now and then does not say so."""
    monkeypatch.setattr(pair_module, "_LEFT_OUT_S", 0.0)
    gone = nobody()

    def trains(answers: set[int], steps: int) -> list[str]:
        pair = Pair(filled(0), 0, LOCAL, lambda step, ranks: 1 + step % 2)
        caplog.clear()
        for step in range(steps):
            pair.peers = {rank: server.peer if step in answers else gone for rank in (1, 2)}
            pair.begin_step(step)
            arrive(pair)
            pair.mix(filled(0))
        pair.close()
        return [record.getMessage() for record in caplog.records]

    (told,) = trains(set(), 30)
    assert told.startswith("comm.sync=pair: rank 0 averages with nobody: none of the other workers answers (rank ")
    assert trains({4, 9, 14, 19, 24, 29}, 30) == []


def test_peers_are_chosen_uniformly_and_by_the_seed() -> None:
    choose = random_peer(3, 1)
    draws = [choose(step, (0, 2, 3)) for step in range(3000)]
    assert draws == [random_peer(3, 1)(step, (0, 2, 3)) for step in range(3000)]
    assert draws != [random_peer(4, 1)(step, (0, 2, 3)) for step in range(3000)]
    counts = np.array([draws.count(rank) for rank in (0, 2, 3)])
    assert abs(counts - 1000).max() < 4 * np.sqrt(3000 * (1 / 3) * (2 / 3))


# -- the update: real workers in one process, so that the test sets the order of events ------------------------------

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adamw": (lambda p: kf.FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "wrapped": (
        lambda p: kf.Optimizer(torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
}


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


class Real:
    """Worker `rank` as it is in training."""

    def __init__(self, rank: int, model: Quadratic, make: Callable[[Any], Any]) -> None:
        self.model, self.opt, self.next = model, make(model.parameters()), 0
        self.pair = Pair(self.opt.updates.weights(), rank, LOCAL, lambda step, ranks: self.next)
        self.opt.average_with(self.pair)

    def pull(self, rank: int) -> None:
        """The snapshot that `rank` has published last arrives now."""
        self.next = rank
        self.pair.begin_step(0)
        arrive(self.pair)

    def step(self) -> None:
        self.model().backward()
        self.opt.step()
        self.opt.zero_grad()


class Published:
    """The published recursion, in float64: x <- (x + y) / 2, then the optimizer's update by the old x's gradient."""

    def __init__(self, model: Quadratic, make: Callable[[Any], Any]) -> None:
        self.model, self.opt = model, make(model.parameters())
        self.snapshot, self.arrived = model.values(), None

    def step(self) -> None:
        self.opt.zero_grad()
        self.model().backward()
        if self.arrived is not None:
            with torch.no_grad():
                self.model.first.copy_((self.model.first + self.arrived[:3]) / 2)
                self.model.rest.copy_((self.model.rest + self.arrived[3:]) / 2)
            self.arrived = None
        self.opt.step()
        self.snapshot = self.model.values()


@contextlib.contextmanager
def workers(name: str, h: Tensor, b: Tensor, starts: Tensor) -> Iterator[list[Real]]:
    real = [Real(rank, Quadratic(h, b, start), OPTIMIZERS[name][0]) for rank, start in enumerate(starts)]
    for one in real:
        one.pair.peers = {rank: other.pair.address for rank, other in enumerate(real) if other is not one}
    yield real
    for one in real:
        one.pair.close()


def test_masters_of_16_bit_parameters_are_averaged() -> None:
    """In fp32, and the parameters are their rounded values. (A learning rate of 0 leaves them alone otherwise.)"""
    net = nn.Linear(5, 3).to(torch.bfloat16)
    opt = kf.FusedSGD(net.parameters(), lr=0.0)
    pair = Pair(opt.updates.weights(), 0, LOCAL, lambda step, ranks: ranks[0])
    other = Pair([torch.rand_like(weight) for weight in opt.updates.weights()], 1, LOCAL, lambda step, ranks: 0)
    opt.average_with(pair)
    pair.peers = {1: other.address}
    mine = [weight.clone() for weight in opt.updates.weights()]
    pair.begin_step(0)
    arrive(pair)
    net(torch.ones(4, 5, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    theirs = torch.empty(sum(weight.numel() for weight in mine))
    pull(other.address, theirs)
    for weight, p, one, two in zip(opt.updates.weights(), net.parameters(), mine, views(theirs, mine), strict=True):
        torch.testing.assert_close(weight, (one + two) / 2)
        assert weight.dtype == torch.float32 and torch.equal(p, weight.to(torch.bfloat16))
    pair.close()
    other.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_order_of_events_gives_the_published_update(name: str) -> None:
    """A pull may come long before the step that uses it, so snapshots are old; a step may come without any pull."""
    count, generator, order = 4, torch.Generator().manual_seed(1), random.Random(7)
    h, b = torch.linspace(0.3, 2.0, 7), torch.randn(7, generator=generator)
    starts = torch.randn(count, 7, generator=generator)
    published = [Published(Quadratic(h.double(), b.double(), x.double()), OPTIMIZERS[name][1]) for x in starts]
    pulls = old = 0
    with workers(name, h, b, starts) as real:
        for _ in range(200):
            i = order.randrange(count)
            if order.random() < 0.5 and published[i].arrived is None:
                j = order.choice([rank for rank in range(count) if rank != i])
                real[i].pull(j)
                published[i].arrived = published[j].snapshot
                pulls += 1
                continue
            snapshots = [each.snapshot for each in published]
            old += published[i].arrived is not None and not any(published[i].arrived is each for each in snapshots)
            real[i].step()
            published[i].step()
            found = real[i].model.values().double()
            torch.testing.assert_close(found, published[i].model.values(), rtol=2e-5, atol=2e-6)
    assert pulls > 50 and old > 10


# -- records and meetings ---------------------------------------------------------------------------------------------


def test_a_ledger_line_is_kept_once_in_each_workers_order(tmp_path: Path) -> None:
    """A slow worker's lines come after later ones of others; those that a new leader sends again are dropped."""
    lines = [
        {"step": step, "micro_batch": 2 * worker, "worker": worker, "indices": [step]}
        for step, worker in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 0), (0, 1), (1, 1))
    ]
    last = {"step": 3, "micro_batch": 0, "indices": [3]}

    def kept(rewind: int | None, *sent: dict[str, Any]) -> list[dict[str, Any]]:
        directory = RunDirectory(tmp_path, tensorboard=False, ledger=True)
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


def test_nobody_stands_still_for_a_call_before_all_have_opened_the_view() -> None:
    """After a loss a step is ended in the next view: one worker knows of a further view already, another does not."""
    group, stood = SimpleNamespace(size=2, rank=1), list[int]()
    method: Any = object.__new__(PairAveraging)
    method._session = SimpleNamespace(group=group, proposed_generation=lambda: 3, stop_reason=lambda: None)
    method._progress = SimpleNamespace(drifted=1, step=5, announced=0)
    method._decisions = SimpleNamespace(take_requested=lambda: None)
    method._session.control_client = SimpleNamespace(announced=lambda after: {})
    method._until, method._meet = 0, stood.append
    for opened, common in ((None, False), (None, True), (group, False)):
        method._group = opened
        method.after_step(1, common, False)
    assert stood == [6, 6], "at an epoch's end, which all come to; and once the view is open"


class Told:
    """A worker as `Meetings` sees it: what it was sent."""

    def __init__(self, number: int) -> None:
        self.number, self.sent = number, list[tuple[str, dict[str, Any]]]()

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


def meetings(count: int) -> tuple[Meetings, list[Any]]:
    workers: list[Any] = [Told(number) for number in range(count)]
    processes: Any = SimpleNamespace(workers=dict(enumerate(workers)), alive=lambda: workers, members=lambda: workers)
    job: Any = SimpleNamespace(view=SimpleNamespace(generation=3), stopping=None)
    return Meetings(job, processes), workers


def stand(where: Meetings, worker: Any, generation: int, step: int, members: list[int], applied: int) -> None:
    where.stand(worker, {"generation": generation, "step": step, "members": members, "applied": applied})


def test_those_that_stand_learn_that_others_move() -> None:
    where, workers = meetings(2)
    where.moved(workers[1], 3)
    stand(where, workers[0], 3, 9, [0, 1], 0)
    where.moved(workers[1], 3)
    where.moved(workers[1], None)
    assert workers[0].sent == []
    where.moved(workers[1], 4)
    assert workers[0].sent == [("moving", {})]


def test_a_worker_that_connects_later_gets_what_others_have_still_to_apply() -> None:
    where, workers = meetings(2)
    for announcement in ({"batch_size": 48}, {"lr_scale": 0.5}):
        where.announce(announcement)
    stand(where, workers[0], 3, 9, [0, 1], 1)
    stand(where, workers[1], 3, 9, [0, 1], 2)
    newcomer: Any = Told(2)
    where.connected(newcomer)
    assert newcomer.sent == [("announce", {"number": 2, "announcement": {"lr_scale": 0.5}})]
    workers.clear()  # all that were to apply it are lost
    another: Any = Told(3)
    where.connected(another)
    assert another.sent == []
