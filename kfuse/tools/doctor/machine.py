"""What `kfuse doctor` finds on a machine: its size, versions, GPUs and their links, the compiler, shared memory.

Nothing here asks a driver: `gpu_lines` words what `self_test.devices` has found in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kfuse.version import __version__

OLDEST_TORCH = (2, 6)
LEAST_SHM_GIB = 1.0


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    name: str
    status: str
    """ok | warn | fail"""
    found: str
    remedy: str = ""
    """What to do, one line; empty where there is nothing to do."""


def size() -> Line:
    """Returns the cores and memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES") / 2**30, page * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    with contextlib.suppress(OSError, ValueError):  # memory that only caches files is free too
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) / 2**20
    return Line("machine", "ok", f"{cores} cores, {total:.1f} GiB of memory, {free:.1f} free, {platform.platform()}")


def versions() -> Line:
    """Returns the versions of kfuse, Python, torch and Triton."""
    found = f"kfuse {__version__}, Python {platform.python_version()}, torch {torch.__version__}, triton "
    found += version("triton") or "not installed"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Line("versions", "fail", found, f"Install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later.")
    return Line("versions", "ok", found)


def version(package: str) -> str | None:
    """Returns the installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_lines(devices: Mapping[str, Any] | None, problem: str | None) -> Iterator[Line]:
    """Yields the lines of GPUs, the links between them, and NCCL.

    devices: what `self_test.devices` returned. problem: one line, where it returned nothing.
    """
    if devices is None:
        remedy = "Run nvidia-smi: if it fails or hangs too, the driver must be loaded anew (or the machine restarted)."
        yield Line("GPUs", "fail", str(problem), remedy)
        return
    gpus = devices["gpus"]
    if not gpus:
        yield _no_gpu(torch.version.cuda or torch.version.hip)
        return
    kinds = [f"{gpu['name']} (compute capability {gpu['capability']}, {gpu['memory_gib']:g} GiB)" for gpu in gpus]
    found = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    found += "; free GiB: " + ", ".join(f"{gpu['free_gib']:g}" for gpu in gpus)
    if version("triton") is None and torch.version.hip is None:
        yield Line("GPUs", "fail", found, "pip install triton: the kernels need it.")
    elif min(float(gpu["capability"]) for gpu in gpus) < 8.0 and torch.version.hip is None:
        yield Line("GPUs", "warn", found, "The kernels are compiled and tested for compute capability 8.0 and later.")
    else:
        yield Line("GPUs", "ok", found)
    pairs = [[i, j] for i in range(len(gpus)) for j in range(i + 1, len(gpus))]
    if pairs:
        missing = ", ".join(f"{i}-{j}" for i, j in pairs if [i, j] not in devices["peers"])
        remedy = f"Messages between GPUs {missing} go through host memory; in a virtual machine see ACS and IOMMU."
        found = f"{len(devices['peers'])} of {len(pairs)} pairs have peer access; nvidia-smi topo -m shows their links"
        yield Line("links", "warn" if missing else "ok", found, remedy if missing else "")
    if devices["nccl_problem"] is not None:
        remedy = "Run again with NCCL_DEBUG=INFO; in a container give it --shm-size=8g or --ipc=host."
        yield Line("NCCL", "fail", devices["nccl_problem"], remedy)
    else:
        yield Line("NCCL", "ok", f"NCCL {devices['nccl']}, a group starts on GPU 0")


def _no_gpu(built_for: str | None) -> Line:
    found, hidden = "no GPU: the CPU path, gloo", os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None or not (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()):
        return Line("GPUs", "ok", f"{found} (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else found)
    if built_for is None:
        remedy = "Install torch's build for GPUs: https://pytorch.org/get-started/locally"
        return Line("GPUs", "warn", f"{found}; this machine has a GPU, and this torch is built for CPUs only", remedy)
    remedy = f"Its driver must support CUDA {built_for}: compare with the version that nvidia-smi shows."
    return Line("GPUs", "fail", "this machine has a GPU, and torch cannot use it", remedy)


def compiler() -> Line:
    """Looks for what Triton compiles its launchers with: $CC, gcc or clang, and Python.h (triton/runtime/build.py)."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme()
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
    if cc is None:
        remedy = "Install one: apt install gcc (or conda install gcc), or name one in $CC."
        return Line("compiler", "fail", "no C compiler: Triton compiles no kernel without", remedy)
    if not header.exists():
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        remedy = f"Install Python's headers: apt install {name} (or use a Python of conda or uv, which have them)."
        return Line("compiler", "fail", f"no {header}: Triton compiles no kernel without", remedy)
    return Line("compiler", "ok", f"{cc}, with {header}")


def shared_memory(loaders: int) -> Line:
    """Checks /dev/shm, by which loader processes hand over samples, and gloo and NCCL messages on one machine."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Line("shared memory", "warn", f"/dev/shm: {error.strerror}", "Mount a tmpfs there.")
    free = usage.free / 2**30
    found = f"/dev/shm has {usage.total / 2**30:.1f} GiB, {free:.1f} free (data.workers={loaders})"
    if free < LEAST_SHM_GIB:
        return Line("shared memory", "warn", found, "In a container: --shm-size=8g, or --ipc=host.")
    return Line("shared memory", "ok", found)
