"""What the systems of elastic.py have in common: the problem, the log that workers write, and the base of an adapter.

A system is one file in this folder, with one or several adapters in its `SYSTEMS`; torchrun.py is one to copy.
Adapters import what they measure inside their functions, so that every file can be read where a system is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

WORKER = str(Path(__file__).parents[1] / "elastic_worker.py")
WORKERS, BATCH, LR, SNAPSHOT_EVERY = 2, 64, 1e-3, 20
SAMPLES = 28 * BATCH  # whole batches, so that no sampler pads or drops anything of its own accord
EPOCH_STEPS = SAMPLES // BATCH


@dataclass(frozen=True)
class Task:
    """What a worker is to do."""

    directory: Path
    epochs: int

    @property
    def steps(self) -> int:
        return self.epochs * EPOCH_STEPS

    @property
    def final(self) -> Path:
        """The final model. It is there once the job is done."""
        return self.directory / "final.pt"

    def save_final(self, model: nn.Module) -> None:
        save(model.state_dict(), self.final)


def save(state: object, path: Path) -> None:
    """Whole or not at all; several processes may do it at once."""
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(state, part)
    os.replace(part, path)


class Log:
    """A line for each step that a worker begins, and one for each that it completes; elastic.py reads `LOG`.

    A worker killed between the update and its line has said before what it contributed to that update.
    """

    def __init__(self, task: Task) -> None:
        self._file = os.open(task.directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self, step: int, epoch: int, samples: Sequence[int]) -> None:
        """Before the gradients are shared. step: from 1. samples: of the epoch, all of this worker's in this step."""
        self._write(step, 0, 0, epoch, samples)

    def done(self, step: int, workers: int, rank: int) -> None:
        """After the update. workers: how many contributed to it."""
        self._write(step, workers, rank, 0, ())

    def _write(self, step: int, workers: int, rank: int, epoch: int, samples: Sequence[int]) -> None:
        line = [time.time_ns(), os.getpid(), step, workers, rank, epoch, list(samples)]
        os.write(self._file, f"{json.dumps(line)}\n".encode())  # appended whole, also beside other writers


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A convolutional network, and images of 8 by 8 with the labels that a random linear map gives them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    y = (x.flatten(1) @ torch.randn(64, 10, generator=generator)).argmax(1)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(48 * 64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, x, y


def batches(sampler: Iterable[int], size: int, done: int) -> Iterator[list[int]]:
    """What is left of a sampler's epoch after so many batches."""
    left = iter(sampler)
    while part := list(islice(left, size)):
        if done > 0:
            done -= 1
        else:
            yield part


def ddp_steps(
    task: Task, ddp: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, rank: int, size: int, step: int
) -> Iterator[int]:
    """Trains a DistributedDataParallel model on from `step` to the end. Yields the number of steps after each one."""
    log, sampler = Log(task), DistributedSampler(x, size, rank, seed=0)
    while step < task.steps:
        epoch = step // EPOCH_STEPS
        sampler.set_epoch(epoch)
        for part in batches(sampler, BATCH // size, step % EPOCH_STEPS):
            log.begin(step + 1, epoch, part)
            opt.zero_grad()
            F.cross_entropy(ddp(x[part]), y[part]).backward()
            opt.step()
            step += 1
            log.done(step, size, rank)
            yield step


def state_of(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "opt": opt.state_dict(), "step": step}


def restore(state: dict[str, Any], model: nn.Module, opt: torch.optim.Optimizer) -> int:
    """Loads what `state_of` has returned; returns the step."""
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    return int(state["step"])


class System(ABC):
    """A system under way with a job of its own: started as it is made."""

    package: ClassVar[str]
    """What must be installed, as it is imported."""
    resizes: ClassVar[bool] = False
    """Whether `resize` is there."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        self.processes: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._output = (task.directory / "output").open("ab")
        self.worker = [WORKER, name, str(task.directory), str(task.epochs)]
        """The command line of a worker, after `python`: it calls `work`."""
        self.start()

    def run(self, *arguments: str) -> None:
        """Starts a Python process; all that are running belong to the job."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self.env,
            start_new_session=True,
        )
        self.processes.append(process)

    @abstractmethod
    def start(self) -> None: ...

    @classmethod
    @abstractmethod
    def work(cls, task: Task) -> None:
        """The worker (or what starts it): trains for `task.steps`, with a `Log`, and calls `task.save_final`."""

    def tend(self) -> str | None:
        """Called often: restarts what nobody else does. What the job said last, if it has ended early."""
        if all(process.poll() is None for process in self.processes):
            return None
        return "\n".join([f"{self.name} ended:", *(self.task.directory / "output").read_text().splitlines()[-10:]])

    def resize(self, workers: int) -> None:
        raise NotImplementedError

    def growths(self) -> list[dict[str, float]]:
        """After the end: where the seconds of each planned growth went, if the system says so."""
        return []

    def stop(self) -> None:
        """Each system ends its own workers when asked to; those left after that are killed."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        ours = str(self.task.directory).encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if ours in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


def systems() -> dict[str, type[System]]:
    """All adapters in this folder, installed or not, in the order of their files' names."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return {
        name: kind for file in names for name, kind in importlib.import_module(f"{__name__}.{file}").SYSTEMS.items()
    }


def is_installed(kind: type[System]) -> bool:
    return importlib.util.find_spec(kind.package) is not None
