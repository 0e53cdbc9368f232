"""Processes for the parts of gpu.sh that need several workers: where they run, how they start, how they are waited for.

Workers have a GPU each where there are as many; else they share the first one. NCCL refuses that unless told otherwise:
up to 2.29 each rank must claim another host, from 2.30 on there is a switch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import write

import kfuse as kf
from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Supervisor

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


def place(device: str, rank: int, count: int) -> torch.device:
    """In a worker, before anything touches CUDA: one GPU each of `count` workers, or the first for all of them.

    Returns the device that kfuse will choose. rank: the worker's number on this machine.
    """
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for reproducible sums, before the GPU is used
    if torch.cuda.device_count() >= count:
        os.environ["LOCAL_RANK"] = str(rank)
        return torch.device("cuda", rank)
    os.environ["LOCAL_RANK"] = "0"
    if nccl() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"kfuse-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return torch.device("cuda", 0)


def start(device: str, rank: int, **options: Any) -> kf.Session:
    """The session of one of two workers, on its device. options: of kf.init."""
    expected = place(device, rank, 2)
    session = kf.init(**options)
    if session.group.device != expected:
        raise RuntimeError(f"kfuse has chosen {session.group.device}, not {expected}")
    return session


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Recorder:
    """Keeps what the workers of an elastic job report."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.summary: dict[str, Any] = {}

    def keep(self, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Events, printed lines and the summary, as they come."""
        for kind, data in records:
            if kind == "event":
                self.events.append(data)
            elif kind == "line":
                self.lines.append(data["text"])
            elif kind == "summary":
                self.summary = data


class _Launcher(LocalLauncher):
    """Workers get their GPU from `place`. A supervisor that counts GPUs would refuse two workers on one."""

    gpus = 0


def supervise(script: str, arguments: Sequence[str], settings: Any, limit_s: float, folder: str) -> Recorder:
    """Runs an elastic job whose workers run `script ARGUMENTS` to its end.

    Raises RuntimeError, with the last lines of the workers' output, if it fails or takes longer than `limit_s`.
    """
    recorder = Recorder()

    async def run() -> None:
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        launcher = _Launcher(command, parent_end_signal=signal.SIGKILL)
        supervisor = Supervisor(launcher, {"run_dir": folder}, recorder, settings, script=True)
        await asyncio.wait_for(supervisor.run(), limit_s)

    try:
        asyncio.run(run())
    except (RuntimeError, TimeoutError) as error:
        why = str(error) or f"not over after {limit_s:.0f} s"
        raise RuntimeError("\n".join([*recorder.lines[-20:], why])) from error
    return recorder


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted with its context."""
    return tempfile.TemporaryDirectory(prefix="kfuse-gpu-", ignore_cleanup_errors=True)
