"""What `kfuse doctor` finds on a machine: its size, versions, GPUs and their links, the compiler, limits.

Nothing here asks a driver: `gpu_lines` words what `self_test.devices` has found in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kfuse.version import __version__

COMMAND_S = 20.0
"""How long a compiler or nvidia-smi may take."""
OLDEST_TORCH = (2, 6)
LEAST_SHM_GIB, LEAST_MEMORY_GIB, LEAST_CACHE_GIB, LEAST_FILES = 1.0, 1.0, 1.0, 1024

_C_PROGRAM = "#include <Python.h>\nint kfuse_doctor(void) { return PY_MAJOR_VERSION; }\n"


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    name: str
    status: str
    """ok | warn | fail"""
    found: str
    remedy: str = ""
    """What to do, one line; empty where there is nothing to do."""


# -- the machine ------------------------------------------------------------------------------------------------------


def size() -> Line:
    """Returns the cores and memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES") / 2**30, page * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    with contextlib.suppress(OSError, ValueError):  # memory that only caches files is free too
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) / 2**20
    found = f"{cores} core{'s' * (cores > 1)}, {total:.1f} GiB of memory, {free:.1f} free, {platform.platform()}"
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text()) / 2**30
        used = int(Path("/sys/fs/cgroup/memory.current").read_text()) / 2**30
        free = min(free, limit - used)
        found += f"; this container's limit is {limit:.1f} GiB, {used:.1f} used"
    if free < LEAST_MEMORY_GIB:
        return Line("machine", "warn", found, "Free some memory: each worker needs about 0.5 GiB before its model.")
    return Line("machine", "ok", found)


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
    counted = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    found = ", ".join(counted) + "; free GiB: " + ", ".join(f"{gpu['free_gib']:g}" for gpu in gpus)
    used = [str(index) for index, gpu in enumerate(gpus) if gpu["free_gib"] < 0.5 * gpu["memory_gib"]]
    status, remedy = "ok", ""
    if version("triton") is None and torch.version.hip is None:
        status, remedy = "fail", "pip install triton: the kernels need it."
    elif min(float(gpu["capability"]) for gpu in gpus) < 8.0 and torch.version.hip is None:
        status = "warn"
        remedy = "The kernels are compiled and tested for compute capability 8.0 and later; bf16 is slow before that."
    elif used:
        status, remedy = "warn", f"Another process has most of the memory of GPU {', '.join(used)}: see nvidia-smi."
    yield Line("GPUs", status, found, remedy)
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
    if not Path("/dev/nvidia0").exists() and not Path("/dev/kfd").exists():
        return Line("GPUs", "ok", found)
    if built_for is None:
        remedy = "Install torch's build for GPUs: https://pytorch.org/get-started/locally"
        return Line("GPUs", "warn", f"{found}; this machine has a GPU, and this torch is built for CPUs only", remedy)
    if hidden is not None:
        return Line("GPUs", "ok", f"{found} (CUDA_VISIBLE_DEVICES={hidden!r} hides this machine's GPUs)")
    remedy = f"Its driver must support CUDA {built_for}: compare with the version that nvidia-smi shows."
    return Line("GPUs", "fail", "this machine has a GPU, and torch cannot use it", remedy)


# -- what Triton needs ------------------------------------------------------------------------------------------------


def compiler() -> Line:
    """Compiles a file with Python.h as Triton does for its launchers (triton/runtime/build.py: $CC, gcc or clang)."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme()
    include = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    if cc is None:
        problem, remedy = "no C compiler", "Install one: apt install gcc (or conda install gcc), or name one in $CC."
    elif not (include / "Python.h").exists():
        name = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        problem = f"no Python.h in {include}"
        remedy = f"Install Python's headers: apt install {name} (or use a Python of conda or uv, which have them)."
    else:
        problem, remedy = "", "Name another C compiler in $CC."
        command = [cc, "-x", "c", "-", "-O3", "-shared", "-fPIC", f"-I{include}", "-o"]
        try:
            with tempfile.TemporaryDirectory() as folder:
                command.append(f"{folder}/doctor.so")
                subprocess.run(command, input=_C_PROGRAM, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        except subprocess.CalledProcessError as error:
            first = next((line for line in error.stderr.splitlines() if "error" in line), f"status {error.returncode}")
            problem = f"{cc} cannot compile a file with Python.h: {first}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"{cc}: {error}"
    if problem:
        return Line("compiler", "fail", f"{problem}: Triton compiles no kernel without", remedy)
    return Line("compiler", "ok", f"{cc} compiles with {include / 'Python.h'}")


def triton_cache() -> Line:
    """Checks where Triton keeps compiled kernels (triton/knobs.py: TRITON_CACHE_DIR, or TRITON_HOME/.triton/cache)."""
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))
    path = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free / 2**30
    except OSError as error:
        remedy = "Set TRITON_CACHE_DIR to a folder that can be written."
        return Line("Triton cache", "fail", f"{path} cannot be written: {error.strerror}", remedy)
    if free < LEAST_CACHE_GIB:
        remedy = "Set TRITON_CACHE_DIR to a folder on another disk."
        return Line("Triton cache", "warn", f"{path}: {free:.1f} GiB free", remedy)
    return Line("Triton cache", "ok", f"{path} can be written, {free:.1f} GiB free")


# -- limits -----------------------------------------------------------------------------------------------------------


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


def open_files(workers: int) -> Line:
    """Checks the limit on open files: a worker is connected to each other one several times."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(LEAST_FILES, 64 * workers)
    found = f"{soft} (workers.max={workers})"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return Line("open files", "warn", f"at most {found}", f"ulimit -n {max(needed, min(hard, 65536))}")
    return Line("open files", "ok", f"at most {found}")
