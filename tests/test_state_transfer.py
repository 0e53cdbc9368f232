"""State goes from one worker to others in place, and half of it never counts as a state, whoever is lost meanwhile."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import WorkersFailed, on_workers, run_workers
from elastic_job import changes, chaos, events, run_job, words
from hypothesis import given
from hypothesis import strategies as st
from problems import update
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import chunks
from kfuse.comm.chunks import cut
from kfuse.comm.group import Group
from kfuse.session import current
from kfuse.train.state import TrainingState

# -- chunks --------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 5000), max_size=30), limit=st.integers(64, 2048))
def test_chunks_hold_each_byte_once_and_are_bounded(sizes: list[int], limit: int) -> None:
    pieces = cut(sizes, limit)
    held: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for chunk in pieces:
        assert 0 < chunk.size <= limit and chunk.start >= end and chunk.start % 64 == 0
        end = chunk.start + chunk.size
        after = 0
        for part in chunk.parts:
            assert part.at >= after and part.at % 64 == 0
            after = part.at + part.end - part.start
            held.setdefault(part.tensor, []).append((part.start, part.end))
    for tensor, size in enumerate(sizes):
        parts = sorted(held.get(tensor, []))
        assert [start for start, _ in parts] == [0, *(end for _, end in parts)][: len(parts)]
        assert (parts[-1][1] if parts else 0) == size
    assert cut(sizes, limit) == pieces


# -- what arrives --------------------------------------------------------------------------------------------------


class Holder:
    """A part of the state with tensors in plain structures, as a torch scheduler may have."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def odd_state() -> dict[str, Any]:
    weight = torch.arange(12.0).view(3, 4)
    nested = OrderedDict(tied=weight, again=weight, image=torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    nested._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return {
        "plain": [None, True, 3, np.float64(0.1), "x", (1, {"y": 2.5})],
        "nested": nested,
        "repeats": torch.tensor([7.0]).expand(3),
        "gaps": torch.arange(8)[::2],
        "empty": torch.empty(0, 2),
        "transposed": torch.randn(3, 4).t(),
        "bools": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "half": torch.randn(70).bfloat16(),
        "subclass": torch.randn(5).as_subclass(Marked),
    }


class Marked(Tensor):
    """A tensor's class of the user's own."""


@on_workers(3)
def test_every_kind_of_value_arrives() -> None:
    kf.init()
    group = current().group
    torch.manual_seed(7)
    receives = group.rank == 2
    with patch.object(chunks, "CHUNK_BYTES", 256):
        got = chunks.share(group, 1, odd_state, (lambda structure: {}) if receives else None)
    if not receives:
        assert got is None
        return
    torch.manual_seed(7)
    want = odd_state()
    assert list(got) == list(want) and got["plain"] == want["plain"]
    assert type(got["nested"]) is OrderedDict and got["nested"]._metadata == {"": {"version": 2}}
    for name in want.keys() - {"plain", "nested", "sparse"}:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    for name, value in want["nested"].items():
        assert torch.equal(got["nested"][name], value) and got["nested"][name].stride() == value.stride()
    assert got["nested"]["tied"].data_ptr() == got["nested"]["again"].data_ptr(), "sent once"


def test_what_cannot_be_sent_is_named_before_anything_is_sent() -> None:
    with pytest.raises(
        TypeError, match=r"the training state\['queue'\] is a deque; what a state can hold: tensors, None"
    ):
        chunks._take_apart({"weight": torch.zeros(4), "queue": deque([1])})


def test_tensors_land_on_the_receivers_device_and_those_of_the_host_on_the_host() -> None:
    """The meta device stands for the receiver's GPU."""
    gpu = torch.device("meta")
    structure, descriptions, tensors = chunks._take_apart({"moment": torch.zeros(4), "count": torch.zeros(3)})
    assert len(tensors) == 2
    own = {"moment": torch.zeros(4, device="meta"), "count": torch.zeros(3)}
    placed, listed = chunks._put_in_place(structure, own, descriptions, [gpu, torch.device("cpu")])
    assert placed["moment"].device.type == "meta" and placed["count"].data_ptr() == own["count"].data_ptr()
    assert [t.device.type for t in listed] == ["meta", "cpu"]
    other = {"moment": torch.zeros(4)}
    placed, _ = chunks._put_in_place(structure, other, descriptions, [gpu, torch.device("cpu")])
    assert placed["moment"].device.type == "meta" and placed["count"].device.type == "cpu"


# -- what it costs -------------------------------------------------------------------------------------------------


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


LIMIT = 2**18
LAYERS, WIDTH = 4, 512


def trained(seed: int, fused: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.BatchNorm1d(WIDTH))
    opt: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, kf.FusedAdamW(net.parameters(), lr=0.1) if fused else kf.Optimizer(opt)


@pytest.mark.parametrize("fused", [True, False])
@on_workers(3)
def test_state_travels_once_and_in_place(fused: bool) -> None:
    """Rank 0 has made steps, rank 1 none, rank 2 has all of it already. Bytes, not times."""
    kf.init()
    group = current().group
    net, opt = trained(3, fused)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(group.rank))
    for _ in range(3):
        F.mse_loss(net(x), x).backward()
        update(opt)
    new = trained(11, fused)  # every rank makes an optimizer, though rank 1 alone needs it
    if group.rank == 1:
        net, opt = new
    state = TrainingState({"model": net, "optimizer": opt, "rest": Holder({"epoch": group.rank})})
    before = _tensors(state.capture())
    sent: list[Tensor] = []
    broadcast = type(group).broadcast

    def count(self: Group, tensor: Tensor, what: str, root: int = 0) -> Any:
        sent.append(tensor.detach())
        return broadcast(self, tensor, what, root)

    room = state.room_for if group.rank == 1 else None
    with patch.object(chunks, "CHUNK_BYTES", LIMIT), patch.object(type(group), "broadcast", count):
        received = chunks.share(group, 0, state.capture, room)
        if received is not None:
            state.restore(received)
    own = [p for p in net.parameters() if p.nbytes >= LIMIT]
    ranges = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in own]
    now = _tensors([net.state_dict(), opt.state_dict()["state"]])
    assert 1 <= sum(t.nbytes for t in sent) / sum(t.nbytes for t in now) <= 1.03, "the state, once, and its description"
    assert max(t.nbytes for t in sent[2:]) <= LIMIT
    in_place = sum(t.nbytes for t in sent if any(start <= t.data_ptr() < end for start, end in ranges))
    large = sum(p.nbytes for p in own)
    assert large > LAYERS * LIMIT and in_place == (0 if group.rank == 2 else large)
    assert state.capture()["rest"]["epoch"] == (0, 0, 2)[group.rank]
    stayed = [t.data_ptr() for t in before] == [t.data_ptr() for t in _tensors(state.capture())]
    assert stayed or group.rank == 1
    source, receiver, _ = kf.allgather(torch.tensor([t.double().sum().item() for t in now], dtype=torch.float64))
    assert torch.equal(source, receiver)


# -- losses in the middle ------------------------------------------------------------------------------------------


def lost_in_the_middle(directory: str, message: int) -> None:
    """Rank 0 is killed before broadcast number `message`; the others tell in files what they have then."""
    kf.init()
    group = current().group
    group.timeout_s = 5.0  # to connect may take longer
    net = nn.Linear(40, 40)
    nn.init.constant_(net.weight, group.rank)
    state = TrainingState({"model": net})
    broadcast, made, began = type(group).broadcast, [0], []

    def count(self: Group, tensor: Tensor, what: str, root: int = 0) -> Any:
        if group.rank == 0 and made[0] == message:
            os.kill(os.getpid(), signal.SIGKILL)
        made[0] += 1
        return broadcast(self, tensor, what, root)

    def room(structure: Any) -> Any:
        began.append(made[0])
        return state.room_for(structure)

    with patch.object(chunks, "CHUNK_BYTES", 1024), patch.object(type(group), "broadcast", count):
        try:
            chunks.share(group, 0, state.capture, room if group.rank == 1 else None)
        except kf.CommError:
            values = net.weight.unique().tolist()
            Path(directory, str(group.rank)).write_text(f"{values} {bool(began)}")


@pytest.mark.parametrize("message", [1, 2, 8])
def test_only_a_receiver_that_was_told_has_a_torn_state(message: int, tmp_path: Path) -> None:
    """Broadcasts 0 and 1 carry the description. A rank that does not receive keeps every byte."""
    with pytest.raises(WorkersFailed, match=r"rank 0, exit code -9"):
        run_workers(3, lost_in_the_middle, str(tmp_path), message)
    assert (tmp_path / "2").read_text() == "[2.0] False"
    torn = {1: "[1.0] False", 2: "[1.0] True"}
    assert (tmp_path / "1").read_text() == torn.get(message, "[0.0, 1.0] True")


@pytest.mark.full
def test_half_of_a_newcomers_state_is_none(tmp_path: Path) -> None:
    """The only worker that has trained is killed as it sends: what has arrived begins no training."""
    training = words("model=mlp data=digits model.hidden=[24] batch.size=16 batch.micro=4 train.epochs=1")
    more = words("workers.max=4 elastic.replace=false")  # or the error depends on when a third worker has started
    killed, joins = events("21 sending 0 in message 12"), {"phases": changes("12:2"), "gates": changes("40:2")}
    job = run_job(tmp_path / "run", [*training, *more, *chaos(tmp_path, events=killed, chunk_bytes=1024, **joins)])
    assert job.error == "no worker is left: the last one ended with exit status 1"
    assert any(line.startswith("RuntimeError: the training state is lost: the only worker") for line in job.lines)
