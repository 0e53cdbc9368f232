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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    import torch

    parts = [f"kfuse {__version__}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    parts.append(f"triton {version('triton') or 'not installed'}")
    found = ", ".join(parts)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Line("versions", "fail", found, f"Install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later.")
    return Line("versions", "ok", found)


def version(package: str) -> str | None:
    """Returns the installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_lines(devices: Mapping[str, Any], problem: str | None) -> Iterator[Line]:
    """Yields the lines of GPUs, the links between them, and NCCL.

    devices: what `self_test.devices` returned. problem: one line, where it returned nothing.
    """
    import torch

    if problem is not None:
        remedy = "Run nvidia-smi: if it fails or hangs too, the driver must be loaded anew (or the machine restarted)."
        yield Line("GPUs", "fail", problem, remedy)
        return
    gpus = devices["gpus"]
    if not gpus:
        yield _no_gpu(torch.version.cuda or torch.version.hip)
        return
    kinds = [f"{gpu['name']} (compute capability {gpu['capability']}, {gpu['memory_gib']:g} GiB)" for gpu in gpus]
    counted = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    found = ", ".join(counted) + "; free GiB: " + ", ".join(f"{gpu['free_gib']:g}" for gpu in gpus)
    used = [index for index, gpu in enumerate(gpus) if gpu["free_gib"] < 0.5 * gpu["memory_gib"]]
    if version("triton") is None and torch.version.hip is None:
        yield Line("GPUs", "fail", found + "; Triton is not installed", "pip install triton: the kernels need it.")
    elif min(float(gpu["capability"]) for gpu in gpus) < 8.0 and torch.version.hip is None:
        remedy = "The kernels are compiled and tested for compute capability 8.0 and later; bf16 is slow before that."
        yield Line("GPUs", "warn", found, remedy)
    elif used:
        numbers = ", ".join(map(str, used))
        yield Line("GPUs", "warn", found, f"Another process has most of the memory of GPU {numbers}: see nvidia-smi.")
    else:
        yield Line("GPUs", "ok", found)
    if len(gpus) > 1:
        yield _links(len(gpus), [(i, j) for i, j in devices["peers"]])
    if devices["nccl_problem"] is not None:
        remedy = "Run again with NCCL_DEBUG=INFO; in a container give it --shm-size=8g or --ipc=host."
        yield Line("NCCL", "fail", devices["nccl_problem"], remedy)
    else:
        yield Line("NCCL", "ok", f"NCCL {devices['nccl']}, a group starts on GPU 0")


def _no_gpu(built_for: str | None) -> Line:
    found = "no GPU: the CPU path, gloo"
    if not Path("/dev/nvidia0").exists() and not Path("/dev/kfd").exists():
        return Line("GPUs", "ok", found)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and built_for is not None:
        return Line("GPUs", "ok", f"{found} (CUDA_VISIBLE_DEVICES={hidden!r} hides this machine's GPUs)")
    if built_for is None:
        remedy = "Install torch's build for GPUs: https://pytorch.org/get-started/locally"
        return Line("GPUs", "warn", f"{found}; this machine has a GPU, and this torch is built for CPUs only", remedy)
    remedy = f"Its driver must support CUDA {built_for}: compare with the version that nvidia-smi shows."
    return Line("GPUs", "fail", "this machine has a GPU, and torch cannot use it", remedy)


def _links(count: int, peers: Sequence[tuple[int, int]]) -> Line:
    """Returns how GPUs are connected, as nvidia-smi names it: NV4 (4 NVLinks), PIX, PHB, SYS, ..."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    kinds = _topology() if "CUDA_VISIBLE_DEVICES" not in os.environ else {}  # it changes torch's numbers
    names = sorted({kinds[pair] for pair in pairs if pair in kinds})
    found = f"between {len(pairs)} pairs: {', '.join(names) if names else 'not told by nvidia-smi'}; "
    found += f"{len(peers)} with peer access"
    if len(peers) < len(pairs):
        missing = ", ".join(f"{i}-{j}" for i, j in pairs if (i, j) not in peers)
        remedy = f"Messages between GPUs {missing} go through host memory; in a virtual machine see ACS and IOMMU."
        return Line("links", "warn", found, remedy)
    return Line("links", "ok", found)


def _topology() -> dict[tuple[int, int], str]:
    """Returns what `nvidia-smi topo -m` names each pair of GPUs' connection; empty where it tells nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        command = ["nvidia-smi", "topo", "-m"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split() for line in text.splitlines()]
    gpus = {row[0]: row[1:] for row in rows if len(row) > 1 and row[0][:3] == "GPU" and row[0][3:].isdigit()}
    # The header names GPUs too: its second word is GPU1, where a row has a kind of connection.
    gpus = {name: kinds for name, kinds in gpus.items() if not kinds[0].startswith("GPU")}
    return {
        (int(name[3:]), j): kind
        for name, kinds in gpus.items()
        for j, kind in enumerate(kinds[: len(gpus)])
        if int(name[3:]) < j
    }


# -- what Triton needs ------------------------------------------------------------------------------------------------


def compiler(needed: bool = True) -> Line:
    """Compiles a file with Python.h as Triton does (triton/runtime/build.py: $CC, else gcc, else clang).

    Triton compiles its launchers in C. needed: there is a GPU.
    """
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
        problem, remedy = _compile(cc, include), "Name another C compiler in $CC."
    if not problem:
        return Line("compiler", "ok", f"{cc} compiles with {include / 'Python.h'}")
    if needed:
        return Line("compiler", "fail", f"{problem}: Triton compiles no kernel without", remedy)
    return Line("compiler", "ok", f"{problem}; only machines with a GPU need it", remedy)


def _compile(cc: str, include: Path) -> str:
    """Returns what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "doctor.c")
        source.write_text(_C_PROGRAM)
        command = [cc, str(source), "-O3", "-shared", "-fPIC", f"-I{include}", "-o", str(Path(folder, "doctor.so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{cc}: {error}"
    if done.returncode == 0:
        return ""
    first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
    return f"{cc} cannot compile a file with Python.h: {first}"


def triton_cache(needed: bool) -> Line:
    """Checks where Triton keeps compiled kernels (triton/knobs.py: TRITON_CACHE_DIR, else TRITON_HOME/.triton/cache).

    needed: there is a GPU.
    """
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))
    path = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free / 2**30
    except OSError as error:
        status, found = ("fail", "") if needed else ("ok", "; only machines with a GPU need it")
        remedy = "Set TRITON_CACHE_DIR to a folder that can be written."
        return Line("Triton cache", status, f"{path} cannot be written: {error.strerror}{found}", remedy)
    if needed and free < LEAST_CACHE_GIB:
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
