"""A checkpoint is exact and verified, and it is complete or absent, whenever its writer is killed."""

from __future__ import annotations

import errno
import math
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from distributed import call
from torch import Tensor, nn
from warm import CONTEXT

from kfuse.checkpoint import HostCopy, Snapshots, manager
from kfuse.checkpoint.format import FORMAT, Checkpointer, CheckpointError, load, load_newest, load_plain
from kfuse.checkpoint.format import _encode as encode

PATIENCE_S = 120.0
FILES = ("manifest.json", "model.pt", "optimizer.pt", "state.pt")
# A NaN with a payload, the smallest subnormal, a negative zero: values that only an exact copy keeps.
ODD_FLOATS = [*struct.unpack("<3d", struct.pack("<3Q", 0x7FF8_0000_0BAD_CAFE, 1, 1 << 63)), math.inf, 0.1]


def exact(value: Any) -> Any:
    """`value` with floats and tensors as their bits: what == then means is that nothing at all was lost."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if type(value) is float:
        return float, struct.pack("<d", value)
    if type(value) in (list, tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    return type(value), value


def state_of(step: int) -> dict[str, Any]:
    """A training state whose every part tells its step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(3, 64, 33, generator=generator)
    return {
        "model": {"weight": weights[0], "bias": weights[1, 0].bfloat16(), "count": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": weights[2], "step": torch.tensor(float(step))}}, "param_groups": []},
        "progress": {"step": step, "loss": ODD_FLOATS[step % len(ODD_FLOATS)], "accuracy": None},
        "contexts": {step: {"samples": 1 << 40, "sizes": (1, [2.5, True])}},
    }


class Writing(Checkpointer):
    """Keeps its events, and can wait."""

    def __init__(self, directory: Path, keep: int = 9) -> None:
        self.events: list[dict[str, Any]] = []
        super().__init__(directory, keep, self.events.append)

    def put(self, *steps: int, **more: Any) -> list[dict[str, Any]]:
        """Saves these steps, one after the other. more: further parts of the state."""
        for step in steps:
            assert self.save(step, state_of(step) | more)
            self.wait()
        return self.events


def saved(directory: Path, **state: Any) -> dict[str, Any]:
    """What is read back of a checkpoint with these parts in its state."""
    Writing(directory, 1).put(1, **{"model": {}, "optimizer": {}, **state})
    return load(directory / "step-00000001")


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    nan_bits = torch.tensor([0x7FC0_1234, 0x0000_0001], dtype=torch.int32).view(torch.float32)
    odd: dict[Any, Any] = {"nan": nan_bits, "empty": torch.empty(0, 3), "half": torch.ones((), dtype=torch.float16)}
    odd |= {None: "\ud7ff\0", True: -(2**64), (1, "a"): [(), {}, [[None]]], "": ODD_FLOATS}
    odd["milestones"] = Counter([3, 9, 9])  # as MultiStepLR has them
    (event,) = Writing(tmp_path / "checkpoints").put(7, odd=odd)
    found = load_newest(tmp_path / "checkpoints", print)
    assert found is not None and found[1] == tmp_path / "checkpoints" / "step-00000007"
    assert names(found[1]) == sorted(FILES)
    assert exact(found[0]) == exact(state_of(7) | {"odd": odd})
    assert (event["kind"], event["step"], event["path"]) == ("checkpoint", 7, str(found[1]))
    assert event["bytes"] == sum((found[1] / name).stat().st_size for name in FILES)
    assert event["wall_s"] > 0 and event["snapshot_s"] > 0
    module = nn.BatchNorm1d(2).state_dict()  # has its version numbers beside its tensors; subclasses become plain
    loaded = saved(tmp_path, model=module, x=[np.float64(0.1), signal.SIGTERM, np.str_("a")])
    assert type(loaded["model"]) is OrderedDict and vars(loaded["model"]) == vars(module)
    assert exact(loaded["x"]) == exact([0.1, 15, "a"])


def test_views_of_flat_buffers_are_written_dense_and_alone(tmp_path: Path) -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    views = {"a": flat[5:11].view(2, 3), "columns": flat[64:164].view(10, 10)[:, 2:4], "spread": flat[:1].expand(4)}
    channels_last = flat[:48].view(1, 3, 4, 4).to(memory_format=torch.channels_last)
    saved(tmp_path, model={**views, "image": channels_last})
    model = torch.load(tmp_path / "step-00000001" / "model.pt", weights_only=True)  # readable without kfuse
    for name, view in views.items():
        assert torch.equal(model[name], view)
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in model.values())
    assert model["image"].stride() == channels_last.stride()
    assert (tmp_path / "step-00000001" / "model.pt").stat().st_size < 10_000


def test_what_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    for value, named in (
        (np.zeros(2), r"state\['policy'\]\['seen'\]\[0\] is a ndarray; .*tuples"),
        (torch.zeros(2).to_sparse(), "layout torch.sparse_coo: .*dense"),
    ):
        with pytest.raises(TypeError, match=named):
            saved(tmp_path, policy={"seen": [value]})
    assert names(tmp_path) == []


def test_training_goes_on_while_its_past_is_written_in_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, fsync = threading.Event(), os.fsync

    def wait_then_sync(descriptor: int) -> None:
        assert gate.wait(PATIENCE_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_then_sync)
    state = state_of(5)
    writing = Writing(tmp_path)
    assert writing.save(5, state)
    state["model"]["weight"].zero_()
    state["optimizer"]["state"][0]["exp_avg"].add_(1)
    state["contexts"][5]["sizes"][1].append(3)
    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "take", lambda *_: pytest.fail("a second copy was made"))
        assert not writing.save(6, state_of(6))
    assert not writing.wait(0.0)
    assert writing.events == [] and load_newest(tmp_path, print) is None
    gate.set()
    assert writing.wait(PATIENCE_S)
    assert exact(load(tmp_path / "step-00000005")) == exact(state_of(5))
    assert [event["step"] for event in writing.put(7)] == [5, 7]


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill cannot show, as the system's cache outlives the process: a power failure would."""
    log: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(descriptor: int) -> None:
        log.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def log_rename(source: Path, target: Path) -> None:
        log.append(f"to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    directory = tmp_path / "checkpoints"
    Writing(directory).put(1)
    path = directory / "step-00000001"
    written = {file.stat().st_ino for file in [tmp_path, path, *path.iterdir()]}
    assert set(log[:-2]) == written and len(written) == 2 + len(FILES)
    assert log[-2:] == ["to step-00000001", directory.stat().st_ino]


def test_going_back_replaces_what_came_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed from 10: 20 is written again, 30 is of another run. But not before a first write that succeeds."""
    Writing(tmp_path, keep=3).put(8, 9, 10, 20, 30)
    flipped = tmp_path / "step-00000020" / "model.pt"
    flipped.write_bytes(flipped.read_bytes()[:-1])
    writing = Writing(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("kfuse.checkpoint.format._write_files", lambda *_: os.listdir(tmp_path / "no disk"))
        writing.put(15)
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    assert [event["kind"] for event in writing.put(20)] == ["checkpoint_failed", "checkpoint"]
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert exact(load(tmp_path / "step-00000020")) == exact(state_of(20))


def test_leftovers_of_the_dead_are_removed_and_the_living_left_alone(tmp_path: Path) -> None:
    living = subprocess.Popen(["sleep", "600"])
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
    try:
        removed = [f".step-00000001.{host}.{dead.pid}", f".step-00000001.old.{host}.{dead.pid}"]
        removed += [f".step-00000002.{host}.{os.getpid()}"]  # from before a restart that had the same pid
        left = [f".step-00000001.{host}.{living.pid}", f".step-00000001.x{host}.{dead.pid}", ".step-notes", "notes"]
        for name in removed + left:
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.pt").write_bytes(b"half")
        Writing(tmp_path).put(2)
    finally:
        living.kill()
        living.wait()
    assert names(tmp_path) == sorted([*left, "step-00000002"])


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    Writing(tmp_path).put(3)
    return tmp_path / "step-00000003"


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_and_truncated_or_missing_files_are_named(damaged: Path, name: str) -> None:
    def assert_refused(said: str = name) -> None:
        with pytest.raises(CheckpointError, match=said) as caught:
            load(damaged)
        assert "\n" not in str(caught.value)

    content = (damaged / name).read_bytes()
    rng = random.Random(name)
    positions = range(len(content)) if name == "manifest.json" else rng.sample(range(len(content)), 100)
    with (damaged / name).open("r+b", buffering=0) as file:
        for position in positions:
            os.pwrite(file.fileno(), bytes([content[position] ^ 1 << rng.randrange(8)]), position)
            assert_refused()
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert exact(load(damaged)) == exact(state_of(3))
    for other in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0"):
        (damaged / name).write_bytes(other)
        assert_refused()
    (damaged / name).unlink()
    assert_refused(f"{name}: No such file")


def test_what_is_no_manifest_is_passed_over_and_named(damaged: Path) -> None:
    wrong: list[dict[str, Any]] = [{}, {"files": []}, {"files": {"model.pt": 3}}, {"files": {"model.pt": {}}}]
    for content in (b"3", b"\0", b"[" * 100_000, *(encode({"format": FORMAT} | rest) for rest in wrong)):
        (damaged / "manifest.json").write_bytes(content)
        events: list[dict[str, Any]] = []
        assert load_newest(damaged.parent, events.append) is None
        assert re.search(r"(manifest\.json|model\.pt): damaged", events[0]["why"])
    (damaged / "manifest.json").write_bytes(encode({"format": 1}))
    with pytest.raises(CheckpointError, match=rf"format version 1 is unknown; this kfuse reads {FORMAT}"):
        load(damaged)


def test_a_file_that_claims_to_be_larger_than_it_is_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2_000_000)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "model.pt", "w", 8) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(ValueError, match=r"claims 80\d{5} bytes of content in a file of \d{4}"):
        load_plain(tmp_path / "model.pt")
    assert load_plain(tmp_path / "plain.pt")["w"].shape == (2_000_000,)


def test_files_can_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    monkeypatch.setattr(Snapshots, "take", lambda self, value, where: HostCopy(value, ()))
    with pytest.raises(CheckpointError, match=r"model\.pt: damaged, or written by another torch"):
        saved(tmp_path, model={"w": Evil()})
    assert names(tmp_path) == ["step-00000001"]


def test_bad_ones_are_reported_and_skipped(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "never", print) is None
    Writing(tmp_path).put(1, 2, 3, 4)
    (tmp_path / "step-00000004" / "state.pt").unlink()
    model = tmp_path / "step-00000003" / "model.pt"
    model.write_bytes(model.read_bytes()[::-1])
    events: list[dict[str, Any]] = []
    found = load_newest(tmp_path, events.append)
    assert found is not None
    assert found[1].name == "step-00000002" and exact(found[0]) == exact(state_of(2))
    assert [event["kind"] for event in events] == ["checkpoint_rejected"] * 2
    assert "step-00000004/state.pt" in events[0]["why"] and "step-00000003/model.pt" in events[1]["why"]


def test_training_does_not_begin_anew_over_checkpoints_of_which_none_is_good(tmp_path: Path) -> None:
    Writing(tmp_path).put(1, 2)
    for folder in tmp_path.iterdir():
        (folder / "state.pt").unlink()
    session = Mock(group=Mock(rank=0), comm=Mock(sharded=False), replica=None, part=(0, 1))
    with pytest.raises(CheckpointError, match=r"no checkpoint in it is good: move them away to begin anew"):
        manager.Checkpoints(tmp_path, session, resume="auto", report=lambda *_: None).load()


def test_a_last_one_that_the_one_before_leaves_no_time_for_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, events = threading.Event(), list[dict[str, Any]]()
    monkeypatch.setattr(os, "fsync", lambda _: gate.wait(PATIENCE_S))
    monkeypatch.setattr(manager, "_LAST_TIMEOUT_S", 0.1)
    session = Mock(group=Mock(rank=0), comm=Mock(sharded=False), replica=None, part=(0, 1))
    run = manager.Checkpoints(tmp_path, session, every_steps=1, report=lambda _, event: events.append(event))
    run.save_when_due(1, 0, lambda: state_of(1))
    run.save_last(2, lambda: state_of(2))
    assert [(event["kind"], event["step"]) for event in events] == [("checkpoint_failed", 2)]
    gate.set()
    run.close()
    assert [(event["kind"], event["step"]) for event in events[1:]] == [("checkpoint", 1)]


@pytest.mark.parametrize("part", ["model", "policy"])
def test_full_disk_is_an_event(tmp_path: Path, part: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        writing = Writing(tmp_path, keep=1)
        writing.put(1)
        failed = writing.put(2, **{part: {"large": torch.zeros(1 << 18)}})[1]
        assert (failed["kind"], failed["step"]) == ("checkpoint_failed", 2)
        assert failed["why"] == f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"
        assert names(tmp_path) == ["step-00000001"]
        assert exact(load(tmp_path / "step-00000001")) == exact(state_of(1))
        writing.put(3)  # training has gone on, and there is room again
        assert names(tmp_path) == ["step-00000003"]
        assert exact(load(tmp_path / "step-00000003")) == exact(state_of(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def killed_writer(directory: Path, step: int, die_at: int) -> tuple[int | None, list[int]]:
    """A process saves this step, and dies before that operation on the file system: its exit code, what it wrote."""
    wrote, theirs = CONTEXT.Pipe(False)
    process = CONTEXT.Process(target=call, args=(__file__, _write.__name__, theirs, directory, step, die_at))
    process.start()
    theirs.close()
    process.join(PATIENCE_S)
    try:
        return process.exitcode, [wrote.recv()]
    except EOFError:
        return process.exitcode, []


def _write(wrote: Any, directory: Path, step: int, die_at: int) -> None:
    torch.set_num_threads(1)
    operations = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}:
            operations += 1
            if operations == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    writing = Writing(directory, keep=1)
    sys.addaudithook(count)
    [event] = writing.put(step)
    assert event["kind"] == "checkpoint", event
    wrote.send(step)


def check_after_death(directory: Path, newest: int) -> int:
    """All checkpoints are good, and the newest is not before step `newest`; returns its step."""
    events: list[dict[str, Any]] = []
    found = load_newest(directory, events.append)
    assert found is not None and events == []
    state, path = found
    step: int = state["progress"]["step"]
    assert step >= newest and path.name.startswith(f"step-{step:08d}")
    assert exact(state) == exact(state_of(step))
    hidden = [name for name in names(directory) if name.startswith(".")]
    for name in set(names(directory)) - set(hidden):
        load(directory / name)
    assert len(hidden) <= 1, "leftovers of earlier writers stay"
    return step


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.full)], ids=["next step", "same step"])
def test_killed_before_each_operation(tmp_path: Path, again: bool) -> None:
    """With `keep` at 1 there is no second one to fall back to."""
    Writing(tmp_path).put(1)
    newest, exit_code, deaths = 1, -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        deaths += 1
        exit_code, wrote = killed_writer(tmp_path, newest if again else newest + 1, deaths)
        newest = check_after_death(tmp_path, max([newest, *wrote]))
    assert exit_code == os.EX_OK and names(tmp_path) == [f"step-{newest:08d}"]
    assert deaths > 20
