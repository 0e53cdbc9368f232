"""Loader processes change no bit of what is fetched, through changed plans and lost processes, and none is left."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import is_alive, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fetching import Noise
from torch import Tensor

from kfuse.data import Dataset, EpochSampler, MapData
from kfuse.data.feeder import Feeder
from kfuse.data.fetching import Fetcher, LoaderError, Loading, Task, TaskPlan

SEED, LENGTH = 3, 40


def feeder(data: Any = None, workers: int = 1, prefetch: int = 2, **more: Any) -> Feeder:
    data = data if isinstance(data, Dataset) else MapData(data or Noise())
    loading = Loading(workers, prefetch, init=more.pop("init", None))
    return Feeder(data, EpochSampler(len(data), SEED), loading, **more)


def plan(epoch: int, cursor: int, batch: int = 8, micro: int = 4, workers: int = 1, rank: int = 0) -> TaskPlan:
    return TaskPlan(LENGTH, None, batch, micro, workers, rank, None, False, 1, epoch, cursor)


def tasks_of_step(plan: TaskPlan) -> list[Task]:
    """This worker's tasks in the one step at the plan's position."""
    end = plan.epoch, min(plan.cursor + plan.batch_size, plan.samples)
    return list(itertools.takewhile(lambda task: (task.epoch, task.cursor) < end, plan.tasks()))


def assert_equal(batch: Any, task: Task) -> None:
    x, y = Fetcher(MapData(Noise()), EpochSampler(LENGTH, SEED)).fetch(task)
    assert torch.equal(batch[0], x) and torch.equal(batch[1], y)


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


# Steps in a row, each with a batch size, a micro-batch, workers, and this worker's rank among them.
step_plans = st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3)).map(
    lambda each: (*each[:3], each[3] % each[2])
)


@settings(max_examples=15)
@given(
    st.sampled_from([1, 3]),
    st.integers(1, 3),
    st.lists(st.tuples(step_plans, st.integers(1, 4)), min_size=1, max_size=5),
    st.booleans(),
)
def test_any_plan_fetches_the_same_batches(
    workers: int, prefetch: int, phases: list[tuple[tuple[int, int, int, int], int]], repeats: bool
) -> None:
    """Through changes of batch size and workers, across epochs, and with steps that are repeated."""
    epoch = cursor = 0
    used: set[int] = set()
    with (fed := feeder(workers=workers, prefetch=prefetch)).running():
        for (batch, micro, others, rank), steps in phases:
            for _ in range(steps):
                now = plan(epoch, cursor, batch, micro, others, rank)
                for tasks in [tasks_of_step(now)[:1]] * repeats + [tasks_of_step(now)]:  # the first ends early
                    fed.expect(now)
                    for task in tasks:
                        assert_equal(fed.fetch(task), task)
                used |= children()
                cursor += min(batch, LENGTH - cursor)
                if cursor == LENGTH:
                    epoch, cursor = epoch + 1, 0
    assert len(used) <= workers, "the same processes to the end"


def test_many_requests_and_large_replies_do_not_wait_for_each_other() -> None:
    """The replies do not fit into a pipe. What cannot be pickled is fetched, too."""

    class Words(Noise):
        lock, function = threading.Lock(), lambda x: x

        def __getitem__(self, i: int) -> Any:
            return "word " * 50_000

    with (fed := feeder(Words(), prefetch=32)).running():
        for cursor in (0, 8, 16):
            for batch in (8, 9, 16, 8):  # each another plan, whose other tasks are not needed
                fed.expect(plan(0, cursor, batch=batch, micro=2))
            for at in range(cursor, cursor + 8, 2):
                assert list(fed.fetch(Task(0, at, 2))) == ["word " * 50_000] * 2


def test_the_data_set_sees_a_loader_process_as_torchs() -> None:
    class Informed(Noise):
        def __getitem__(self, i: int) -> tuple[int, int, int, int]:
            info = torch.utils.data.get_worker_info()
            return info.id, info.num_workers, torch.get_num_threads(), int(isinstance(info.dataset, Informed))

    with (fed := feeder(Informed(), workers=2, prefetch=1)).running():
        fed.expect(plan(0, 0))
        got = [[part.tolist()[0] for part in fed.fetch(Task(0, cursor, 4))] for cursor in (0, 4)]
    assert got == [[0, 2, 1, 1], [1, 2, 1, 1]]


class Broken(Noise):
    """Sample 7 cannot be had."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i == 7:
            self.open(i)
        return super().__getitem__(i)

    def open(self, i: int) -> None:
        raise KeyError(f"sample {i} is damaged")


def test_an_exception_in_the_data_set_is_raised_at_the_step_that_needs_it() -> None:
    needed = EpochSampler(LENGTH, SEED).indices(0, 0, LENGTH).tolist().index(7) // 4 * 4
    with (fed := feeder(Broken(), workers=2, prefetch=8)).running():
        for cursor in range(0, needed, 4):
            fed.expect(plan(0, cursor, batch=4))
            fed.fetch(Task(0, cursor, 4))
        fed.expect(plan(0, needed, batch=4))
        with pytest.raises(KeyError, match="sample 7 is damaged") as caught:
            fed.fetch(Task(0, needed, 4))
    [note] = caught.value.__notes__
    assert "in loader process" in note and "in open" in note and note.endswith("KeyError: 'sample 7 is damaged'")


class Raising(Noise):
    def __getitem__(self, i: int) -> Any:
        raise type("Local", (Exception,), {})("it has no module")


class Derived(Noise, Dataset):
    def fetch(self, indices: Any, generator: Any = None) -> Any:
        return torch.zeros(len(indices), requires_grad=True) * 2


class Leaving(Noise):
    def __getitem__(self, i: int) -> Any:
        os._exit(5)


def no_file(number: int) -> None:
    raise OSError(f"no file for loader {number}")


@pytest.mark.parametrize(
    ("data", "init", "kind", "said"),
    [
        (Raising(), None, RuntimeError, "Local: it has no module"),  # an exception that cannot be sent
        (Derived(), None, RuntimeError, "requires_grad"),  # a batch that cannot be sent
        (Noise(), no_file, OSError, "no file for loader 0"),
        (Leaving(), None, LoaderError, r"\d \(pid \d+\) ended with exit status 5.*the second one lost"),
    ],
)
def test_what_fails_in_a_loader_process_is_said(data: Any, init: Any, kind: type[Exception], said: str) -> None:
    with (fed := feeder(data, init=init)).running():
        fed.expect(plan(0, 0))
        with pytest.raises(kind, match=said):
            fed.fetch(Task(0, 0, 4))


def test_killed_loader_processes_are_restarted_as_long_as_batches_come(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[tuple[int, str]] = []
    killed = []
    with (fed := feeder(on_loss=lambda pid, how: lost.append((pid, how)))).running():
        for cursor in (0, 8, 16):
            fed.expect(plan(0, cursor))
            killed.append(children().pop())
            os.kill(killed[-1], signal.SIGKILL)
            for task in tasks_of_step(plan(0, cursor)):
                assert_equal(fed.fetch(task), task)
    assert [pid for pid, _ in lost] == killed and all("SIGKILL" in how for _, how in lost)
    assert f"(pid {killed[0]}) was ended by SIGKILL" in caplog.text


def test_tensors_are_handed_over_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In TMPDIR, where a socket's may have too long a path, and would stay behind."""
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with (fed := feeder()).running():
        fed.expect(plan(0, 0))
        for task in tasks_of_step(plan(0, 0)):
            assert_equal(fed.fetch(task), task)
    assert list(place.iterdir()) == []


def test_a_busy_loader_process_keeps_no_training_from_ending() -> None:
    class Stuck(Noise):
        def __getitem__(self, i: int) -> Any:
            signal.pause()

    with (fed := feeder(Stuck(), workers=2)).running():
        fed.expect(plan(0, 0))
    assert children() == set()


SCRIPT = """
import os, signal, sys, torch
import kfuse as kf

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background

class Data(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, i): return torch.zeros(2), 0

def init(loader):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.write(1, f"{{os.getpid()}}\\n".encode())

model = torch.nn.Linear(2, 2)
opt = kf.FusedSGD(model.parameters(), lr=0.1)
how = dict(batch_size=8, micro_batch=2, epochs=100, num_workers=2, worker_init_fn=init)
for number, step in enumerate(kf.DataLoader(model, Data(), opt, **how)):
    for x, y in step:
        torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if number == 3:
        {act}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("act", "sent", "status", "said"),
    [
        ("pass", signal.SIGKILL, -signal.SIGKILL, ""),
        ("pass", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        ("step.trainer = (step, sys.exc_info()); raise SystemExit(6)", None, 6, ""),
    ],
)
def test_nothing_is_left_of_a_script_however_it_ends(
    act: str, sent: signal.Signals | None, status: int, said: str
) -> None:
    """After a SIGKILL at once, by the kernel, whatever they are doing: they have the worker's connections open."""
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", SCRIPT.format(act=act)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, process_group=0, **pipes)
    loaders = [int(process.stdout.readline()) for _ in range(2)]
    if sent == signal.SIGKILL:
        for pid in loaders:
            os.kill(pid, signal.SIGSTOP)  # as one that is stuck
        process.kill()
    elif sent is not None:
        os.killpg(process.pid, sent)  # as a terminal does, and a cluster's scheduler
    _, errors = process.communicate()
    assert process.returncode == status, errors
    wait_until("the loader processes' end", lambda: not any(is_alive(pid) for pid in loaders))
    assert said in errors and (said or not errors) and "loader" not in errors.replace("num_workers", "")
