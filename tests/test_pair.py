"""Pair averaging (`kfuse.comm.sync.pair`): its update, the snapshots, and who is served."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.sync import pair as pair_module
from kfuse.comm.sync import pair_wire
from kfuse.comm.sync.pair import Pair, Puller, random_peer
from kfuse.comm.sync.pair_snapshots import Snapshots
from kfuse.comm.sync.pair_wire import PairError, Peer, SnapshotServer, pull
from kfuse.elastic.meetings import Meetings
from kfuse.observe.run_dir import RunDirectory

CPU = devices.of(torch.device("cpu"))
LOCAL = "127.0.0.1"


def filled(step: int, numel: int = 5) -> list[Tensor]:
    """Weights that all have the step's number as their value."""
    return [torch.full((numel,), float(step)), torch.full((2, 3), float(step))]


# -- the snapshots ----------------------------------------------------------------------------------------------------


@given(events=st.lists(st.sampled_from(["publish", "open", "close"]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_what_is_read_is_one_publication_whatever_the_order(events: list[str]) -> None:
    snapshots, published = Snapshots(filled(0), 0, CPU), 0
    readers: list[tuple[contextlib.ExitStack, object, int]] = []
    for event in events:
        if event == "publish":
            published += 1
            snapshots.publish(filled(published), published)
        elif event == "open":
            stack = contextlib.ExitStack()
            found = stack.enter_context(snapshots.newest())
            assert found.step == published
            readers.append((stack, found, published))
        elif readers:
            readers.pop(len(readers) // 2)[0].close()
        for _, found, step in readers:
            assert found.step == step and set(found.flat.tolist()) == {float(step)}  # type: ignore[attr-defined]
    assert snapshots.buffers <= 2 + events.count("open")
    for stack, *_ in readers:
        stack.close()


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

    failures: list[BaseException] = []

    def caught() -> None:
        try:
            pulls()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caught) for _ in range(3)]
    for thread in threads:
        thread.start()
    least, most = time.monotonic() + 1.5, time.monotonic() + 60  # on a busy machine until the threads had their turns
    while time.monotonic() < (most if len(seen) <= 10 or step <= 20 else least):
        step += 1
        snapshots.publish([torch.full((numel,), float(step))], step)
    over.set()
    for thread in threads:
        thread.join()
    server.close()
    assert not failures, failures
    assert len(seen) > 10 and step > 20
    assert snapshots.buffers <= 5


# -- who is served ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    made = SnapshotServer(Snapshots(filled(7), 7, CPU), LOCAL)
    yield made
    made.close()


def test_who_knows_the_token_is_served(server: SnapshotServer) -> None:
    into = torch.empty(11)
    assert pull(server.peer, into) == 7
    assert set(into.tolist()) == {7.0}


@pytest.mark.parametrize("sent", [b"", bytes(16), b"\x80\x04" + bytes(500)])
def test_a_stranger_gets_no_byte(server: SnapshotServer, sent: bytes) -> None:
    with socket.create_connection((LOCAL, server.peer.port), timeout=60) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = stranger.recv(1)
        assert answer == b""
    assert pull(server.peer, torch.empty(11)) == 7


def test_silent_strangers_do_not_keep_others_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a place until it has been silent for long enough."""
    monkeypatch.setattr(pair_wire, "SILENCE_S", 0.2)
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
    deadline = time.monotonic() + 60
    with pytest.raises(PairError):
        while time.monotonic() < deadline:
            pair.begin_step(0)
    pair.close()


def test_what_speaks_otherwise_is_an_error() -> None:
    with socket.create_server((LOCAL, 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(bytes(100))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError):
            pull(Peer(LOCAL, listener.getsockname()[1], bytes(16)), torch.empty(3))
        thread.join()


def test_a_silent_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts, as the kernel of a stopped process does, and says nothing; or there is none any more."""
    monkeypatch.setattr(pair_wire, "SILENCE_S", 0.1)
    with socket.create_server((LOCAL, 0)) as listener:
        peer = Peer(LOCAL, listener.getsockname()[1], bytes(16))
        with pytest.raises(TimeoutError):
            pull(peer, torch.empty(3))
    with pytest.raises(ConnectionRefusedError):
        pull(peer, torch.empty(3))


# -- the update -------------------------------------------------------------------------------------------------------


def two() -> tuple[Pair, Pair]:
    """Worker 0 with zeros, worker 1 with ones; each pulls from the other."""
    ours = [Pair(filled(rank), rank, LOCAL, lambda step, ranks: ranks[0]) for rank in range(2)]
    for mine, other in (ours, ours[::-1]):
        mine.peers = {other.rank: other.address}
    return ours[0], ours[1]


def arrive(pair: Pair) -> None:
    """Waits for the pull under way: the tests' seam, since a step never waits."""
    assert pair.puller.await_end(60.0)


def test_what_has_arrived_is_averaged_in_once() -> None:
    first, second = two()
    weights = filled(0)
    first.begin_step(0)
    arrive(first)
    assert first.mix(weights)
    assert all(set(weight.flatten().tolist()) == {0.5} for weight in weights)
    assert not first.mix(weights)
    assert (first.mixed, first.alone) == (1, 1)
    first.close()
    second.close()


def test_nothing_has_arrived_before_the_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose others do not answer keeps its own weights, and does not wait."""
    monkeypatch.setattr(pair_wire, "SILENCE_S", 60.0)
    with socket.create_server((LOCAL, 0)) as listener:
        pair = Pair(filled(3), 0, LOCAL, lambda step, ranks: ranks[0])
        pair.peers = {1: Peer(LOCAL, listener.getsockname()[1], bytes(16))}
        weights = filled(3)
        began = time.monotonic()
        for step in range(100):
            pair.begin_step(step)
            assert not pair.mix(weights)
            pair.publish(weights, step)
        assert time.monotonic() - began < pair_wire.SILENCE_S / 2
        assert all(torch.equal(*both) for both in zip(weights, filled(3), strict=True))
        pair.close()


def test_a_snapshot_of_before_a_meeting_is_not_averaged_in_after_it() -> None:
    first, second = two()
    first.begin_step(0)
    arrive(first)
    first.restart(filled(4), 1)
    weights = filled(4)
    assert not first.mix(weights)
    first.begin_step(1)
    arrive(first)
    assert first.mix(weights)
    first.close()
    second.close()


def test_16_bit_weights_are_averaged_in_fp32() -> None:
    first, second = two()
    second.publish([torch.full((5,), 1.0078125), torch.ones(2, 3)], 1)
    weights = [torch.full((5,), 1.0, dtype=torch.bfloat16), torch.ones(2, 3)]
    first.begin_step(0)
    arrive(first)
    first.mix(weights)
    expected = torch.tensor((1.0 + 1.0078125) / 2).to(torch.bfloat16)
    assert torch.equal(weights[0], expected.expand(5))
    first.close()
    second.close()


def test_who_does_not_answer_is_left_out_for_a_while(server: SnapshotServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was lost is not asked at each step, while another one answers."""
    monkeypatch.setattr(pair_module, "_LEFT_OUT_S", 60.0)
    asked: list[list[int]] = []

    def choose(step: int, ranks: object) -> int:
        asked.append(list(ranks))  # type: ignore[call-overload]
        return 1 if 1 in asked[-1] else 2

    pair = Pair(filled(0), 0, LOCAL, choose)
    with socket.create_server((LOCAL, 0)) as closed:
        port = closed.getsockname()[1]
    pair.peers = {1: Peer(LOCAL, port, bytes(16)), 2: server.peer}
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
    with socket.create_server((LOCAL, 0)) as closed:
        port = closed.getsockname()[1]
    gone = Peer(LOCAL, port, bytes(16))

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

    assert trains(set(), 6) == [], "the failure of step 5 is seen in step 6"
    (told,) = trains(set(), 30)
    assert told.startswith(
        f"comm.sync=pair: rank 0 averages with nobody: none of the other workers answers (rank 1 at {LOCAL}:{port}, "
        f"rank 2 at {LOCAL}:{port}; the last error: [Errno 111] Connection refused)."
    )
    assert trains({4, 9, 14, 19, 24, 29}, 30) == []


def test_peers_are_chosen_uniformly_and_by_the_seed() -> None:
    choose = random_peer(3, 1)
    draws = [choose(step, (0, 2, 3)) for step in range(3000)]
    assert draws == [random_peer(3, 1)(step, (0, 2, 3)) for step in range(3000)]
    assert draws != [random_peer(4, 1)(step, (0, 2, 3)) for step in range(3000)]
    counts = np.array([draws.count(rank) for rank in (0, 2, 3)])
    assert abs(counts - 1000).max() < 4 * np.sqrt(3000 * (1 / 3) * (2 / 3))


def test_the_pulling_thread_ends() -> None:
    puller = Puller(3, CPU)
    puller.close()
    deadline = time.monotonic() + 60
    while any(thread.name == "kfuse-pair-pull" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what is refused, and records -------------------------------------------------------------------------------------


def test_a_ledger_line_is_kept_once_in_each_workers_order(tmp_path: Path) -> None:
    """A slow worker's lines come after later ones of others; those that a new leader sends again are dropped."""
    lines = [
        {"step": step, "micro_batch": 2 * worker, "worker": worker, "indices": [step]}
        for step, worker in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 0), (0, 1), (1, 1))
    ]
    directory = RunDirectory(tmp_path, tensorboard=False, ledger=True)
    for line in lines:
        directory.ledger(line)
    directory.close()
    again = RunDirectory(tmp_path, tensorboard=False, ledger=True)
    again.rewind(3)
    for line in [*lines, {"step": 3, "micro_batch": 0, "indices": [3]}]:
        again.ledger(line)
    again.close()
    kept = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kept == [lines[k] for k in (0, 1, 2, 3, 6)] + [{"step": 3, "micro_batch": 0, "indices": [3]}]
    back = RunDirectory(tmp_path, tensorboard=False, ledger=True)
    back.rewind(1)
    back.ledger(lines[3])
    back.ledger(lines[6])
    back.close()
    kept = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kept == [lines[k] for k in (0, 3, 6)], "what a slow worker wrote after a dropped line stays, once"


# -- meetings ---------------------------------------------------------------------------------------------------------


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


def test_all_of_a_view_get_one_answer_once_all_stand() -> None:
    where, workers = meetings(3)
    members = [0, 1, 2]
    where.announce({"lr_scale": 0.5})
    stand(where, workers[2], 3, 7, members, 0)
    stand(where, workers[0], 3, 9, members, 0)
    stand(where, workers[1], 2, 9, members, 0)  # it is yet to come to this view
    assert all(len(worker.sent) == 1 for worker in workers)
    stand(where, workers[1], 3, 8, members, 0)
    answer = {"view": 3, "low": 7, "high": 9, "generation": 3, "stop": "", "announced": 1}
    announced = ("announce", {"number": 1, "announcement": {"lr_scale": 0.5}})
    assert all(worker.sent == [announced, ("met", answer)] for worker in workers)
    for worker in workers:
        stand(where, worker, 3, 9, members, 0)
    assert [worker.sent[-1][1]["low"] for worker in workers] == [9, 9, 9]


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
    where, (first, second) = meetings(2)
    where.announce({"batch_size": 48})
    where.announce({"lr_scale": 0.5})
    stand(where, first, 3, 9, [0, 1], 1)
    stand(where, second, 3, 9, [0, 1], 2)
    where.announce({"sync": 1.0})
    newcomer = Told(2)
    where.connected(newcomer)  # type: ignore[arg-type]
    kept = [({"lr_scale": 0.5}, 2), ({"sync": 1.0}, 3)]
    assert newcomer.sent == [("announce", {"number": k, "announcement": each}) for each, k in kept]


def test_after_the_loss_of_all_nothing_that_was_announced_counts() -> None:
    where, workers = meetings(1)
    where.announce({"batch_size": 48})
    workers.clear()
    newcomer = Told(2)
    where.connected(newcomer)  # type: ignore[arg-type]
    assert newcomer.sent == []
