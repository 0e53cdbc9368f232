"""Each worker has a GPU of its own: assigned by the supervisor, free, there; what cannot have one is refused in words.

No GPU is used: the number of GPUs is pretended, and the workers of the jobs train on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from elastic_job import run_job
from limits import limits
from supervised import Stage, play

import kfuse as kf
from kfuse import session
from kfuse.cli import kfuse_run
from kfuse.comm import devices
from kfuse.comm.devices import Device, DeviceError
from kfuse.elastic import protocol
from kfuse.elastic.launchers import TorchrunLauncher, local
from kfuse.settings.tree import ConfigError

# -- the worker's side: its session chooses the device --------------------------------------------------------------


class Pretended(Device):
    """A GPU by name; the tensors are on the CPU."""

    made_current: ClassVar[list[str]] = []

    def __init__(self, name: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._pretended = str(name)

    def make_current(self) -> None:
        self.made_current.append(self._pretended)


def test_the_session_makes_its_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that it was given; else, in a plain process, the current one. One that is not there is refused."""
    monkeypatch.setattr(devices, "current", lambda: 3)
    monkeypatch.setattr(devices, "of", Pretended)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for gpus, rank in ((4, ""), (4, "2"), (0, "7")):
        monkeypatch.setattr(devices, "count", lambda gpus=gpus: gpus)
        if rank:
            monkeypatch.setenv("LOCAL_RANK", rank)
        session.reset()
        kf.init()
    assert Pretended.made_current == ["cuda:3", "cuda:2", "cpu"]
    session.reset()
    monkeypatch.setattr(devices, "count", lambda: 2)
    with pytest.raises(DeviceError, match=r"^LOCAL_RANK=7: must be below 2, the number of GPUs .*"):
        kf.init()
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv(protocol.ENV_CONTROL, "127.0.0.1:1")
    with pytest.raises(DeviceError, match=r"^LOCAL_RANK is not set: must be 0 to 1"):
        session._choose_device()


# -- too many workers ----------------------------------------------------------------------------------------------


def test_the_command_lines_refuse_more_workers_than_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(local, "gpus", lambda: 2)
    with pytest.raises(ConfigError, match=r"^workers\.count=3: must be at most 2 \("):
        run_job(tmp_path / "run", ["data=digits", "workers.count=3", "workers.max=3"])
    with pytest.raises(SystemExit, match="2"):
        kfuse_run.main(["--workers", "3", __file__])
    for command in (["--listen", "127.0.0.1:0", "--slots", "3", __file__], ["--join", "127.0.0.1:1", "--slots", "3"]):
        with pytest.raises(SystemExit, match="2"):
            kfuse_run.main(command)
    assert capsys.readouterr().err.count("3: must be at most 2, the GPUs here") == 3


# -- the supervisor's side, with workers that are stood in for ------------------------------------------------------


def test_a_lost_workers_gpu_is_its_successors_and_no_more_workers_than_gpus_are_started() -> None:
    """The maximum is lowered, and an event says so."""

    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        await stage.lose(0)
        assert stage.given == ["0", "1", "0"]
        await stage.join(1)
        await stage.boot(2)
        await stage.join(1, 2)
        await stage.says(1, "resize", workers=3)
        assert stage.given == ["0", "1", "0"]
        await stage.end_well(1, 2)

    stage, error = play(limits(2, 1, 3), script, gpus=2)
    assert error is None and stage.events("clipped")[0]["note"].startswith("at most 3 workers clipped to 2")


@pytest.mark.parametrize(("gpus", "given"), [(3, ["0", "1", "2"]), (2, ["0", "1"])])
def test_a_replacement_has_another_gpu_or_is_not_started(gpus: int, given: list[str]) -> None:
    """It boots beside the worker that it replaces."""

    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        for _ in range(3):
            await stage.says(0, "replace", worker=1)
        assert stage.given == given
        await stage.end_well(0, 1)

    _, error = play(limits(2, 1, 2), script, gpus=gpus)
    assert error is None


def test_a_new_worker_waits_for_the_gpu_of_one_on_its_way_out() -> None:
    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        await stage.says(0, "resize", workers=1)
        await stage.join(0)
        await stage.says(1, "left")
        await stage.says(0, "resize", workers=2)
        await stage.settle(2)
        assert stage.given == ["0", "1"]
        stage.workers[1].end(0)
        await stage.settle(1)
        assert stage.given == ["0", "1", "1"]
        await stage.end_well(0)

    assert play(limits(2, 1, 2), script, gpus=2)[1] is None


@pytest.mark.parametrize("others", [True, False], ids=["others train", "all are stuck"])
def test_a_killed_worker_whose_process_hangs_keeps_its_gpu(others: bool) -> None:
    """Until it has ended; but the job does not wait for it where no other worker trains."""
    at_first, later = (["0", "1"], ["0", "1", "0"]) if others else (["0", "1", "0", "1"],) * 2

    async def script(stage: Stage) -> None:
        await stage.train(0, 1)
        for number in (0,) if others else (0, 1):
            stage.workers[number].hangs = True
            stage.supervisor.processes.workers[number].kill()
        await stage.settle(3)
        assert stage.given == at_first
        for worker in stage.workers[:2]:
            worker.hangs = False
        stage.workers[0].end(-9)
        await stage.settle(1)
        assert stage.given == later
        await stage.end_well(*((1, 2) if others else (2, 3)))

    assert play(limits(2, 1, 2, restart=True), script, gpus=2)[1] is None


def test_torchrun_gives_each_worker_a_gpu_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on several machines; comm.schedule=symmetric is refused where job.gpus is unknown."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for here, expected in ((0, 0), (8, 16)):
        monkeypatch.setattr(devices, "count", lambda here=here: here)
        assert TorchrunLauncher().gpus == expected
