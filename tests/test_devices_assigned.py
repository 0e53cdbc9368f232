"""Each worker has a GPU of its own: assigned by the supervisor, free, there; what cannot have one is refused in words.

No GPU is used: the number of GPUs is pretended, and the workers of the jobs train on the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from elastic_job import Job, chaos, run_job, until, words
from warm import WarmLauncher, WarmProcess

import kfuse as kf
from kfuse import session
from kfuse.cli import kfuse_run
from kfuse.comm import devices
from kfuse.comm.devices import Device, DeviceError
from kfuse.elastic import processes as elastic_processes
from kfuse.elastic import protocol
from kfuse.elastic.job import Elasticity
from kfuse.elastic.job import Job as JobState
from kfuse.elastic.launchers import LocalLauncher, TorchrunLauncher
from kfuse.elastic.processes import Processes
from kfuse.elastic.supervisor import Supervisor
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


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """pretend(4): this process sees four GPUs."""
    Pretended.made_current.clear()
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def act(gpus: int) -> None:
        monkeypatch.setattr(devices, "count", lambda: gpus)
        monkeypatch.setattr(devices, "of", Pretended)

    return act


@pytest.mark.parametrize(
    ("gpus", "rank", "chosen"),
    [(4, "2", "cuda:2"), (4, None, "cuda:3"), (0, "7", "cpu")],
    ids=["given", "current in a plain process", "no GPU"],
)
def test_the_session_makes_its_device_the_current_one(
    gpus: int, rank: str | None, chosen: str, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(gpus)
    monkeypatch.setattr(devices, "current", lambda: 3)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    kf.init()
    assert Pretended.made_current == [chosen]


def test_a_gpu_that_is_not_there_or_not_named_is_refused(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `rank % gpus`, a GPU that another worker uses."""
    pretend(2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DeviceError, match=r"^LOCAL_RANK=2: must be below 2, the number of GPUs .*"):
        kf.init()
    assert session._current is None and Pretended.made_current == []
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv(protocol.ENV_CONTROL, "127.0.0.1:1")
    with pytest.raises(DeviceError, match=r"^LOCAL_RANK is not set: must be 0 to 1"):
        session._choose_device()


def test_the_count_follows_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own count, which does; 0 where CUDA cannot be used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices.count() == 3 and LocalLauncher().gpus == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.count() == 0


# -- too many workers ----------------------------------------------------------------------------------------------


def test_torchrun_with_more_workers_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for gpus in (0, 3, 8):
        monkeypatch.setattr(devices, "count", lambda gpus=gpus: gpus)
        assert TorchrunLauncher().workers == 3
    monkeypatch.setattr(devices, "count", lambda: 2)
    with pytest.raises(ValueError, match=r"^launcher=torchrun: --nproc-per-node is 3: must be at most 2"):
        TorchrunLauncher()


def test_the_command_lines_refuse_more_workers_than_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "count", lambda: 2)
    with pytest.raises(ConfigError, match=r"^workers\.count=3: must be at most job\.gpus=2 \("):
        run_job(tmp_path / "run", ["data=digits", "workers.count=3", "workers.max=3"])
    with pytest.raises(SystemExit, match="2"):
        kfuse_run.main(["--workers", "3", __file__])
    for command in (["--listen", "127.0.0.1:0", "--slots", "3", __file__], ["--join", "127.0.0.1:1", "--slots", "3"]):
        with pytest.raises(SystemExit, match="2"):
            kfuse_run.main(command)
    assert capsys.readouterr().err.count("3: must be at most 2, the GPUs here") == 3


# -- the supervisor's side: real jobs of CPU workers on pretended GPUs -----------------------------------------------

TRAINING = words(
    "comm=reproducible model=mlp data=digits model.hidden=[8] batch.size=16 batch.micro=4 batch.max=16 train.epochs=1",
    "train.eval_every=1000 workers.max=3",
)


class Inventory(WarmLauncher):
    """Starts real workers, and keeps which GPU each was given and which were in use then."""

    def __init__(self, log: Path, gpus: int, linger_s: float = 0.0) -> None:
        """linger_s: an ended worker still has its GPU for so long."""
        super().__init__(log)
        self.gpus, self.linger_s = gpus, linger_s
        self.given: list[int] = []
        self._in_use: list[tuple[int, Lingering]] = []

    async def start(self, env: Mapping[str, str]) -> WarmProcess:
        gpu = int(env["LOCAL_RANK"])
        in_use = [other for other, process in self._in_use if process.status is None or process.lingers]
        assert 0 <= gpu < self.gpus, f"GPU {gpu} of {self.gpus}"
        assert gpu not in in_use, f"GPU {gpu} is in use"
        started = await super().start(env)
        process = Lingering(started, self.linger_s)
        self.given.append(gpu)
        self._in_use.append((gpu, process))
        return process  # type: ignore[return-value]


class Lingering:
    """A process whose end is reported late, as of one that takes long to give its memory back."""

    running = True

    def __init__(self, process: WarmProcess, linger_s: float) -> None:
        self._process, self._linger_s = process, linger_s
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    async def wait(self) -> int:
        self.lingers = self._linger_s > 0
        status = await self._process.wait()
        await asyncio.sleep(self._linger_s)
        self.lingers = False
        return status


def run_on(gpus: int, tmp_path: Path, settings: list[str], linger_s: float = 0.0, during: Any = None) -> Any:
    launcher = Inventory(tmp_path / "run.log", gpus, linger_s)
    job = run_job(tmp_path / "run", [*TRAINING, *settings], during, launcher)
    return job, launcher.given


def test_a_lost_workers_gpu_is_its_successors(tmp_path: Path) -> None:
    events = [{"step": 20, "moment": "forward", "rank": 0, "how": "kill"}]
    gates = [{"step": 40, "workers": 2}]
    job, given = run_on(2, tmp_path, ["workers.count=2", "workers.max=2", *chaos(tmp_path, events=events, gates=gates)])
    assert job.error is None, job.told()
    assert given == [0, 1, 0]


def test_the_maximum_is_lowered_to_the_gpus_and_an_event_says_so(tmp_path: Path) -> None:
    phases, gates = [{"step": 5, "workers": 3}], [{"step": 40, "workers": 2}]
    job, given = run_on(2, tmp_path, ["workers.count=1", *chaos(tmp_path, phases=phases, gates=gates)])
    assert job.error is None, job.told()
    assert given == [0, 1] and max(len(view["workers"]) for view in job.views) == 2
    first, *_ = job.of_kind("clipped")
    assert first["note"] == "at most 3 workers clipped to 2: each needs a GPU of its own, and this machine shows 2"


def test_more_workers_than_gpus_at_first_are_refused_before_any_starts(tmp_path: Path) -> None:
    job, given = run_on(1, tmp_path, ["workers.count=2", *chaos(tmp_path)])
    assert job.error == "2 workers: must be at most 1, as each needs a GPU of its own, and this machine shows 1"
    assert given == [] and job.metrics == []


@pytest.mark.parametrize(("gpus", "given"), [(3, [0, 1, 2]), (2, [0, 1])])
def test_a_replacement_has_another_gpu_or_is_not_started(gpus: int, given: list[int], tmp_path: Path) -> None:
    """It boots beside the worker that it replaces."""

    async def replace(supervisor: Supervisor, job: Job) -> None:
        await until("steps", lambda: len(job.metrics) > 5)
        for _ in range(3):
            await supervisor.views.replace(1)
        if gpus == 3:
            await until("the replacement", lambda: len(job.views) == 2)
        (tmp_path / "done").touch()

    policy = chaos(tmp_path, until=str(tmp_path / "done"))
    job, found = run_on(gpus, tmp_path, ["workers.count=2", *policy], during=replace)
    assert job.error is None, job.told()
    assert found == given
    refused = [event["note"] for event in job.of_kind("clipped") if "replaced" in event["note"]]
    why = "worker 1 is not replaced: the new one starts beside it, and all 2 GPUs are in use"
    assert refused == ([] if gpus == 3 else [why])


@pytest.mark.full
def test_a_new_worker_waits_for_the_gpu_of_one_on_its_way_out(tmp_path: Path) -> None:
    phases = [{"step": 5, "workers": 1}, {"step": 15, "workers": 2}]
    gates = [{"step": 30, "workers": 2}]
    settings = ["workers.count=2", "workers.max=2", *chaos(tmp_path, phases=phases, gates=gates)]
    job, given = run_on(2, tmp_path, settings, linger_s=1.0)
    assert job.error is None, job.told()
    assert given == [0, 1, 1]
    assert [len(view["workers"]) for view in job.views] == [2, 1, 2]


class Stuck:
    """A process that does not end as it is killed: it hangs in a driver."""

    running = True

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def lines(self) -> AsyncIterator[str]:
        return
        yield

    async def wait(self) -> int:
        await self.over.wait()
        return -9

    def kill(self) -> None:
        pass


class OfStuck:
    """A launcher of a machine with two GPUs."""

    gpus = 2

    def __init__(self) -> None:
        self.given: list[str] = []
        self.processes: list[Stuck] = []

    async def start(self, env: Mapping[str, str]) -> Stuck:
        self.given.append(env["LOCAL_RANK"])
        self.processes.append(Stuck())
        return self.processes[-1]


@pytest.mark.parametrize("others", [True, False], ids=["others train", "all are stuck"])
def test_a_killed_worker_whose_process_hangs_keeps_its_gpu(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has ended; but the job does not wait for it where no other worker trains."""
    monkeypatch.setattr(elastic_processes, "_KILL_GRACE_S", 0.01)
    job: Any = JobState(Elasticity(2, 1, 2))

    async def act() -> None:
        launcher: Any = OfStuck()

        async def ended(*of: Any) -> None:
            await started()

        started = lambda: processes.start_up_to(2)  # noqa: E731
        processes = Processes(launcher, job, SimpleNamespace(line=lambda line: None), ended)  # type: ignore[arg-type]
        await started()
        job.view = SimpleNamespace(members=[SimpleNamespace(worker=number) for number in range(2)])
        for worker in processes.workers.values():
            worker.state = elastic_processes.State.MEMBER
        for worker in list(processes.workers.values())[: 1 if others else 2]:
            worker.kill()
        if others:
            await asyncio.sleep(0.3)
            assert launcher.given == ["0", "1"]
        else:
            await until("other workers on both GPUs", lambda: launcher.given == ["0", "1", "0", "1"])
        launcher.processes[0].over.set()
        await asyncio.sleep(0.05)
        if processes.awaits_gpu:
            await started()
        await until("a worker on the first GPU", lambda: launcher.given[:3] == ["0", "1", "0"])
        for process in launcher.processes:
            process.over.set()
        job.over.set()
        await processes.all_ended()

    asyncio.run(act())
