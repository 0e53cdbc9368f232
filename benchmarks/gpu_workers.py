"""Processes for the parts of gpu.sh that need several workers: where they run, how they start, how they are waited for.

Workers have a GPU each where there are as many; else they share the first one. NCCL refuses that unless told otherwise:
up to 2.29 each rank must claim another host, from 2.30 on there is a switch.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from report import write

import kfuse as kf
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.launchers.local import LocalProcess
from kfuse.elastic.protocol import ENV_WORKER

ABSENT = 3
"""Exit status of a part that cannot run here. Its last line says why."""


def report(device: str, results: Iterable[tuple[str, dict[str, Any]]], path: Path | None, what: str) -> int:
    """Prints each named result as it comes, and writes them to `path`. Exit status 1 where a verdict is not "ok".

    what: for the last line, what those that are "ok" do.
    """
    done: dict[str, dict[str, Any]] = {}
    version = ".".join(map(str, nccl())) or "none"
    for name, result in results:
        done[name] = result
        print(f"{name:<40} {result['verdict']}", flush=True)
        write(path, ("torch", "triton"), device=device, nccl=version, results=done)  # kept if a later one is cut off
    good = sum(result["verdict"] == "ok" for result in done.values())
    print(f"{good} of {len(done)} {what}")
    return int(good < len(done))


def nccl() -> tuple[int, ...]:
    """NCCL's version; empty where torch sees no GPU."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]


def placement(device: str, number: int, count: int) -> dict[str, str]:
    """The environment of a worker: one GPU each of `count` workers, or the first for all of them.

    number: of the worker, unlike the others'; where there are enough GPUs, its rank on this machine.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    found = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for reproducible sums, before the GPU is used
    if torch.cuda.device_count() >= count:
        return found
    found["LOCAL_RANK"] = "0"
    if nccl() >= (2, 30):
        return {**found, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return {**found, "NCCL_HOSTID": f"kfuse-{number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def place(device: str, rank: int, count: int) -> torch.device:
    """In a worker, before anything touches CUDA: see `placement`. Returns the device that kfuse will choose."""
    torch.set_num_threads(1)
    os.environ.update({"LOCAL_RANK": str(rank), **placement(device, rank, count)})
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def start(device: str, rank: int, **options: Any) -> kf.Session:
    """The session of one of two workers, on its device. options: of kf.init."""
    expected = place(device, rank, 2)
    session = kf.init(**options)
    if session.group.device != expected:
        raise RuntimeError(f"kfuse has chosen {session.group.device}, not {expected}")
    return session


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class PlacedLauncher(LocalLauncher):
    """Workers get their GPU from `placement`. A supervisor that counts GPUs would refuse two workers on one."""

    gpus = 0

    def __init__(self, device: str, command: list[str] | None = None) -> None:
        super().__init__(command, parent_end_signal=signal.SIGKILL)
        self._device = device

    async def start(self, env: Mapping[str, str]) -> LocalProcess:
        """See LocalLauncher."""
        return await super().start({**env, **placement(self._device, int(env[ENV_WORKER]), 2)})


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted with its context."""
    return tempfile.TemporaryDirectory(prefix="kfuse-gpu-", ignore_cleanup_errors=True)
