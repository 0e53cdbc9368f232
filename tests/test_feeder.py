"""Loader processes change no bit of what is fetched, through changed plans and lost processes, and none is left."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_job import is_alive, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fetching import Noise
from torch import Tensor

import kfuse as kf
from kfuse.data import EpochSampler, MapData
from kfuse.data.feeder import Feeder
from kfuse.data.fetching import Fetcher, LoaderError, Loading, Task, TaskPlan
from kfuse.data.loader_process import _silent_without_parent

SEED, LENGTH = 3, 40
CPU = torch.device("cpu")


def feeder(data: Any = None, workers: int = 1, prefetch: int = 2, **more: Any) -> Feeder:
    data = MapData(Noise() if data is None else data)
    loading = Loading(workers, prefetch, init=more.pop("init", None))
    return Feeder(data, EpochSampler(len(data), SEED), loading, CPU, **more)


def plan(epoch: int, cursor: int, batch: int = 8, micro: int = 4, workers: int = 1, rank: int = 0) -> TaskPlan:
    return TaskPlan(LENGTH, None, batch, micro, workers, rank, None, False, epoch, cursor)


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


# -- what is fetched ----------------------------------------------------------------------------------------------


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
    with (fed := feeder(workers=workers, prefetch=prefetch)).running():
        for (batch, micro, others, rank), steps in phases:
            for _ in range(steps):
                now = plan(epoch, cursor, batch, micro, others, rank)
                for tasks in [tasks_of_step(now)[:1]] * repeats + [tasks_of_step(now)]:  # the first ends early
                    fed.expect(now)
                    for task in tasks:
                        assert_equal(fed.fetch(task), task)
                cursor += min(batch, LENGTH - cursor)
                if cursor == LENGTH:
                    epoch, cursor = epoch + 1, 0


def test_results_that_fit_a_changed_plan_are_not_fetched_again(tmp_path: Path) -> None:
    class Counting(Noise):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            with open(tmp_path / "fetched", "a") as log:
                log.write(f"{i}\n")
            return super().__getitem__(i)

    with (fed := feeder(Counting(), workers=1, prefetch=4)).running():
        fed.expect(plan(0, 0))
        for cursor in (0, 4):
            fed.fetch(Task(0, cursor, 4))
        wait_until("four more to be fetched", lambda: len((tmp_path / "fetched").read_text().split()) >= 24)
        for cursor in range(8, LENGTH, 4):  # the same micro-batches, in larger steps
            if cursor in (8, 24):
                fed.expect(plan(0, cursor, batch=16))
            fed.fetch(Task(0, cursor, 4))
        epoch = (tmp_path / "fetched").read_text().split()[:LENGTH]
    assert sorted(map(int, epoch)) == list(range(LENGTH))


def noise_seen(workers: int) -> tuple[dict[int, list[float]], list[float]]:
    """What a training's forwards got, and the parameters that it ended with."""
    seen: dict[int, list[float]] = {}

    def step_fn(model: torch.nn.Module, batch: Any) -> Tensor:
        for i, noise in batch[0].tolist():
            seen.setdefault(int(i), []).append(noise)
        return torch.nn.functional.dropout(model(batch[0].float()), 0.5).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    opt = kf.FusedSGD(model.parameters(), lr=1e-4)
    sizes: dict[str, Any] = {"batch_size": 8, "batch_micro": 3, "train_epochs": 2}
    kf.fit(model, Noise(), opt, seed=SEED, step_fn=step_fn, data_workers=workers, **sizes)
    return seen, [value for p in model.parameters() for value in p.flatten().tolist()]


def test_training_has_the_same_bits_with_any_number_of_loader_processes() -> None:
    alone = noise_seen(0)
    assert noise_seen(1) == noise_seen(3) == alone


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


# -- what fails ---------------------------------------------------------------------------------------------------


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


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Raising(Noise):
    def __getitem__(self, i: int) -> Any:
        raise Unpicklable(1, 2)


class Derived(Noise):
    def fetch(self, indices: np.ndarray, generator: Any = None) -> Any:
        return torch.zeros(len(indices)), torch.zeros(len(indices), requires_grad=True) * 2


class Leaving(Noise):
    def __getitem__(self, i: int) -> Any:
        os._exit(5)


def no_file(number: int) -> None:
    raise OSError(f"no file for loader {number}")


@pytest.mark.parametrize(
    ("data", "init", "kind", "said"),
    [
        (MapData(Raising()), None, RuntimeError, "Unpicklable: 1 and 2"),  # an exception that cannot be sent
        (Derived(), None, RuntimeError, "requires_grad"),  # a batch that cannot be sent
        (MapData(Noise()), no_file, OSError, "no file for loader 0"),
        (MapData(Leaving()), None, LoaderError, r"\d \(pid \d+\) ended with exit status 5.*the second one lost"),
    ],
)
def test_what_fails_in_a_loader_process_is_said(data: Any, init: Any, kind: type[Exception], said: str) -> None:
    with (fed := Feeder(data, EpochSampler(LENGTH, SEED), Loading(1, init=init), CPU)).running():
        fed.expect(plan(0, 0))
        with pytest.raises(kind, match=said):
            fed.fetch(Task(0, 0, 4))


def test_short_shared_memory_names_the_remedy() -> None:
    class Large(Noise):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.zeros(100_000), i

    def init(number: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # of a file in /dev/shm too

    with (fed := feeder(Large(), init=init)).running():
        fed.expect(plan(0, 0))
        with pytest.raises(RuntimeError) as caught:
            fed.fetch(Task(0, 0, 4))
    [note] = caught.value.__notes__
    assert "shared memory is short (/dev/shm): give it more (docker run --shm-size=8g), or lower data.prefetch" in note


def test_a_second_loss_ends_the_worker_only_where_no_batch_was_used_since() -> None:
    with (fed := feeder(workers=1)).running():
        for cursor in (0, 8, 16):
            fed.expect(plan(0, cursor))
            os.kill(children().pop(), signal.SIGKILL)
            for task in tasks_of_step(plan(0, cursor)):
                assert_equal(fed.fetch(task), task)


def test_a_loader_process_that_is_killed_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[tuple[int, str]] = []
    with (fed := feeder(workers=2, on_loss=lambda pid, how: lost.append((pid, how)))).running():
        first = sorted(children())
        for cursor in range(0, LENGTH, 8):
            fed.expect(plan(0, cursor))
            if cursor == 16:
                os.kill(first[0], signal.SIGKILL)
            for task in tasks_of_step(plan(0, cursor)):
                assert_equal(fed.fetch(task), task)
    [(pid, how)] = lost
    assert pid == first[0] and "SIGKILL" in how and f"(pid {pid}) was ended by SIGKILL" in caplog.text


# -- none is left -------------------------------------------------------------------------------------------------


def own_loop(until: Callable[[int], None]) -> None:
    model = torch.nn.Linear(2, 1)
    opt = kf.FusedSGD(model.parameters(), lr=1e-4)
    for number, step in enumerate(kf.DataLoader(Noise(), model, opt, batch_size=8, train_epochs=3, data_workers=2)):
        for x, _ in step:
            model(x.float()).mean().backward()
        opt.step()
        opt.zero_grad()
        until(number)


def test_loader_processes_live_as_long_as_the_loop() -> None:
    seen: set[int] = set()

    def stop(number: int) -> None:
        seen.update(children())
        if number == 7:  # in the second epoch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        own_loop(stop)
    del caught  # its traceback holds the loop
    assert len(seen) == 2  # the same ones over epochs
    assert not any(is_alive(pid) for pid in seen)


def test_a_busy_loader_process_keeps_no_training_from_ending() -> None:
    class Stuck(Noise):
        def __getitem__(self, i: int) -> Any:
            signal.pause()

    with (fed := feeder(Stuck(), workers=2)).running():
        fed.expect(plan(0, 0))
    assert children() == set()


SCRIPT = """
import multiprocessing, os, signal, sys, time, torch
import kfuse as kf

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background

class Data(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, i): return (torch.zeros(2), 0) if number >= 0 else time.sleep(100_000)

def init(loader):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.write(1, f"{{os.getpid()}}\\n".encode())

number, model = {number}, torch.nn.Linear(2, 2)
opt = kf.FusedSGD(model.parameters(), lr=0.1)
how = dict(batch_size=8, train_epochs=100, data_workers=2, worker_init_fn=init)
for number, step in enumerate(kf.DataLoader(Data(), model, opt, **how)):
    for x, y in step:
        torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if number == 3:
        {act}
"""


def started(act: str = "pass", number: int = 0) -> tuple[Any, list[int]]:
    """The script's process, and its loader processes'. number: if negative, these never come to an end."""
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", SCRIPT.format(act=act, number=number)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, process_group=0, **pipes)
    return process, [int(process.stdout.readline()) for _ in range(2)]


@pytest.mark.full
def test_loader_processes_are_killed_with_their_training_worker() -> None:
    """At once, by the kernel, whatever they are doing: they have the training worker's connections open."""
    process, loaders = started(number=-1)
    assert all(map(is_alive, loaders))
    process.kill()
    wait_until("the loader processes' end", lambda: not any(map(is_alive, loaders)))
    process.communicate()


def test_a_loader_process_tells_no_news_of_a_script_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that ends as it receives a tensor closes the connection, at any of its messages."""
    for error in (ConnectionResetError(), BrokenPipeError(), EOFError(), ValueError("a defect")):
        _silent_without_parent(type(error), error, None)
    assert capsys.readouterr().err == "ValueError: a defect\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("act", "sent", "status", "said"),
    [
        ("pass", signal.SIGKILL, -signal.SIGKILL, ""),
        ("pass", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        ("sys.exit(4)", None, 4, ""),
        ("step.trainer = (step, sys.exc_info()); raise SystemExit(6)", None, 6, ""),
    ],
)
def test_nothing_is_left_of_a_script_however_it_ends(
    act: str, sent: signal.Signals | None, status: int, said: str
) -> None:
    process, loaders = started(act)
    if sent == signal.SIGKILL:
        os.kill(process.pid, sent)
    elif sent is not None:
        os.killpg(process.pid, sent)  # as a terminal does, and a cluster's scheduler
    _, errors = process.communicate()
    assert process.returncode == status, errors
    wait_until("the loader processes' end", lambda: not any(is_alive(pid) for pid in loaders))
    assert said in errors and (said or not errors) and "loader" not in errors.replace("num_workers", "")
