"""`kfuse doctor` finds what is wrong with a machine, says what to do, hangs nowhere and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kfuse.cli.app import main
from kfuse.tools.doctor import command as doctor
from kfuse.tools.doctor import machine, processes, self_test

BAD_TRANSPORTS = """
import os, signal, time

from kfuse.comm.transports.library import AllReduce

class Hangs(AllReduce):
    def wait(self, key):
        open(f"rank{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(1000)

class Dies(AllReduce):
    def wait(self, key):
        if self._group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().wait(key)

class AddsWrong(AllReduce):
    def launch(self, key, slots, what):
        slots[0].mul_(1.001)
        super().launch(key, slots, what)
"""


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`kfuse doctor` in `folder`, on a pipe."""
    command = [sys.executable, "-m", "kfuse", "doctor", *words]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150)


def lines(text: str) -> dict[str, tuple[str, str]]:
    """{name: (status, what was found and the remedy)}; every line has the report's form."""
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(" " * 20):
            found[name] = (found[name][0], f"{found[name][1]}\n{line.strip()}")
            continue
        match = re.fullmatch(r"(ok|warn|fail) +(\S.{13})(.+)", line)
        assert match, line
        name = match[2].strip()
        found[name] = (match[1], match[3])
    return found


@pytest.fixture
def bad_transports(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(BAD_TRANSPORTS)
    return tmp_path


# -- the whole report ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_this_machine_is_well(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "\x1b" not in done.stdout, "plain text on a pipe"
    found = lines(done.stdout)
    names = "machine, versions, GPUs, shared memory, open files, transport, extras, determinism"
    assert [*found] == [*names.split(", "), "reduction", "schedule", "kernels"]
    assert "fail" not in {status for status, _ in found.values()}
    assert found["reduction"][0] == found["kernels"][0] == "ok"
    for part in ("2 processes", "allreduce", "all_to_all (reproducible)", "float64", "the same bits twice"):
        assert part in found["reduction"][1]
    assert re.search(r"a bucket of 25 MB in fp32: auto would take \w+: allreduce [\d.]+ ms", found["schedule"][1])
    assert list(tmp_path.iterdir()) == [], "it writes nothing"


@pytest.mark.full
def test_the_overrides_choose_what_is_tried(tmp_path: Path) -> None:
    found = lines(run(tmp_path, "comm.schedule=tree", "comm.dtype=bf16").stdout)
    assert found["transport"][1] == "tree, gradients in bf16"
    assert found["reduction"][0] == "ok" and "tree in bf16" in found["reduction"][1]
    found = lines(run(tmp_path, "comm.reproducible=true").stdout)
    assert found["transport"][1] == "all_to_all, gradients in fp32"
    assert "threads 1" in found["determinism"][1]
    refused = run(tmp_path, "comm.schedule=symmetric")
    assert refused.returncode == 2 and "comm.schedule=symmetric: must be" in refused.stderr


def test_in_a_worker_of_a_job_its_processes_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would connect to the job's supervisor."""
    given: list[dict[str, str]] = []

    def refuse(command: list[str], env: dict[str, str], **more: Any) -> None:
        given.append(env)
        raise OSError("none is started")

    monkeypatch.setenv("KFUSE_CONTROL", "127.0.0.1:1")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="none is started"), processes.started("devices", {}, RANK="0"):
        pass
    assert "KFUSE_CONTROL" not in given[0] and given[0]["RANK"] == "0" and "PATH" in given[0]


def test_a_process_that_does_not_end_when_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a driver."""
    limits: list[float | None] = []

    class Hangs(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            limits.append(timeout)
            ended = super().wait()
            if timeout is None:
                return ended
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Hangs)
    with processes.started("devices", {}):
        pass
    assert limits == [5.0]


# -- what is wrong is found ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("AddsWrong", r"bad.AddsWrong: a mean gradient differs from the sum in float64 by 1\.\de-03"),
        ("Dies", "rank 1: ended while reducing by bad.Dies .SIGKILL"),
    ],
)
def test_a_wrong_reduction_fails(transport: str, said: str, bad_transports: Path) -> None:
    done = run(bad_transports, f"comm.schedule=bad.{transport}")
    status, found = lines(done.stdout)["reduction"]
    assert (done.returncode, status, done.stderr) == (1, "fail", "")
    assert re.search(said, found), found
    assert len(found.splitlines()) == 2, "a remedy"


@pytest.mark.full
def test_a_hanging_self_test_says_what_it_waited_for(bad_transports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bad_transports)
    monkeypatch.setattr(processes, "LIMIT_S", 20.0)
    config = config_of("comm.schedule=bad.Hangs")
    [line] = [line for line in doctor.lines(config) if line.name == "reduction"]
    assert line.status == "fail"
    assert "rank 0: no answer within 20 s; it was reducing by bad.Hangs" in line.found
    assert_ended(bad_transports)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_its_processes_die_with_it(number: signal.Signals, bad_transports: Path) -> None:
    command = [sys.executable, "-m", "kfuse", "doctor", "comm.schedule=bad.Hangs"]
    process = subprocess.Popen(command, cwd=bad_transports, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not all((bad_transports / f"rank{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert errors == ""
    assert_ended(bad_transports)


def assert_ended(folder: Path) -> None:
    """The processes of `Hangs` have ended, or do so at once."""
    deadline = time.monotonic() + 60
    for rank in range(2):
        status = Path("/proc", (folder / f"rank{rank}").read_text(), "stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "a process of the self-test lives on"
            time.sleep(0.05)


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (200, 4096))
    line = machine.open_files(2)
    assert (line.status, line.found, line.remedy) == ("warn", "at most 200 (workers.max=2)", "ulimit -n 4096")


def test_a_cache_that_is_no_folder_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache" / "deeper"))
    line = machine.triton_cache()
    assert line.status == "fail" and "TRITON_CACHE_DIR" in line.remedy
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "deeper"))
    assert machine.triton_cache().status in ("ok", "warn")


def test_the_compiler_is_tried_as_triton_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.compiler().found.startswith("no C compiler")
    assert "apt install gcc" in machine.compiler().remedy
    fails = tmp_path / "gcc"
    fails.write_text("#!/bin/sh\necho 'gcc: error: broken' >&2\nexit 1\n")
    fails.chmod(fails.stat().st_mode | stat.S_IXUSR)
    assert machine.compiler().status == "fail" and "gcc: error: broken" in machine.compiler().found
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    found = machine.compiler()
    assert found.found.startswith(f"no Python.h in {tmp_path}")
    assert f"python{sys.version_info.major}.{sys.version_info.minor}-dev" in found.remedy


# -- GPUs: lines for answers of machines that are not here -----------------------------------------------------------

H100 = {"name": "NVIDIA H100", "capability": "9.0", "memory_gib": 79.2, "free_gib": 78.5}


def answer(*gpus: dict[str, Any], peers: list[list[int]], problem: str | None = None) -> dict[str, Any]:
    return {"gpus": list(gpus), "peers": peers, "nccl": "2.28.9", "nccl_problem": problem}


def of_gpus(devices: dict[str, Any] | None, problem: str | None = None) -> dict[str, machine.Line]:
    return {line.name: line for line in machine.gpu_lines(devices, problem)}


def test_gpus_and_links_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda package: "3.6.0")
    found = of_gpus(answer(H100, H100, H100, peers=[[0, 1], [0, 2], [1, 2]]))
    assert found["GPUs"].found.startswith("3 x NVIDIA H100 (compute capability 9.0, 79.2 GiB); free GiB: 78.5, 78.5")
    assert {line.status for line in found.values()} == {"ok"} and "3 of 3 pairs" in found["links"].found
    found = of_gpus(answer(H100, H100, H100, peers=[[0, 1]]))
    assert found["links"].status == "warn" and "0-2, 1-2" in found["links"].remedy


def test_what_a_gpu_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda package: "3.6.0")
    assert of_gpus(None, "no answer within 40 s; it was asking the driver for GPUs")["GPUs"].status == "fail"
    assert of_gpus(answer(H100 | {"free_gib": 3.0}, peers=[]))["GPUs"].status == "warn"
    assert of_gpus(answer(H100 | {"capability": "7.5"}, peers=[]))["GPUs"].status == "warn"
    nccl = of_gpus(answer(H100, peers=[], problem="ncclSystemError"))["NCCL"]
    assert (nccl.status, nccl.found) == ("fail", "ncclSystemError") and "NCCL_DEBUG=INFO" in nccl.remedy
    monkeypatch.setattr(machine, "version", lambda package: None)
    assert of_gpus(answer(H100, peers=[]))["GPUs"].status == "fail", "Triton is needed"


def test_the_driver_is_asked_as_torch_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda's functions replaced by a machine of two GPUs, and NCCL by gloo."""
    cuda, current, begin = torch.cuda, [], dist.init_process_group
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(cuda, "mem_get_info", lambda index: (78 * 2**30, 79 * 2**30))
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda i, j: True)
    monkeypatch.setattr(cuda, "set_device", current.append)
    monkeypatch.setattr(cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda count, device: torch.zeros(count) + 1)

    def over_gloo(backend: str, device_id: torch.device, **more: Any) -> None:
        assert (backend, device_id, current) == ("nccl", torch.device("cuda", 0), [torch.device("cuda", 0)])
        begin("gloo", **more)

    monkeypatch.setattr(dist, "init_process_group", over_gloo)
    gpu = {"name": "NVIDIA H100", "capability": "9.0", "memory_gib": 79.0, "free_gib": 78.0}
    assert self_test.devices() == {"gpus": [gpu, gpu], "peers": [[0, 1]], "nccl": "2.28.9", "nccl_problem": None}
    assert not dist.is_initialized()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert self_test.devices()["nccl_problem"] == "this build of torch has no ProcessGroupNCCL"


def test_determinism_is_read_off_torch() -> None:
    good = {
        "threads": 1,
        "deterministic algorithms": True,
        "cudnn.deterministic": True,
        "cudnn.benchmark": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert doctor.determinism(True, good, 2).status == "ok"
    for name, value in {
        "deterministic algorithms": False,
        "cudnn.deterministic": False,
        "cudnn.benchmark": True,
        "CUBLAS_WORKSPACE_CONFIG": None,
    }.items():
        line = doctor.determinism(True, good | {name: value}, 2)
        assert line.status == "fail" and line.remedy, name
        assert doctor.determinism(True, good | {name: value}, 0).status == "ok", "on a CPU the threads alone matter"
    assert doctor.determinism(False, good, 2).status == "ok"


@pytest.mark.parametrize(("on_gpu", "status"), [(True, "ok"), (False, "fail")])
def test_with_one_gpu_its_worker_tells_the_settings(on_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of the reduction do without the GPU then, and so without settings for it."""
    strict = {"threads": 1, "deterministic algorithms": True, "cudnn.deterministic": True, "cudnn.benchmark": False}
    strict |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    lax = strict | {"deterministic algorithms": False}
    case = {"name": "all_to_all", "reproducible": True, "digest": "0", "wrong": None, "repeats": True}
    choice = {"schedule": "all_to_all", "reason": "allreduce 3 ms, all_to_all 2 ms", "probe_s": 0.1}
    answers = {
        "devices": answer(H100, peers=[]),
        "reduction": {"backend": "gloo", "flags": lax, "cases": [case], "choice": choice},
        "kernels": {"wrong": {"pack": None}, "flags": strict if on_gpu else lax},
    }
    started: list[tuple[str, Any, dict[str, str]]] = []

    @contextlib.contextmanager
    def scripted(what: str, arguments: Any, **environment: str) -> Iterator[SimpleNamespace]:
        started.append((what, arguments, environment))
        yield lambda: (answers[what], None)

    monkeypatch.setattr(doctor, "started", scripted)
    monkeypatch.setattr(processes, "started", scripted)
    found = {line.name: line for line in doctor.lines(config_of("comm.reproducible=true"))}
    assert found["determinism"].status == status
    assert found["reduction"].status == found["kernels"].status == "ok"
    assert "NCCL between two processes is not tried" in found["reduction"].found
    assert "auto would take all_to_all: allreduce 3 ms, all_to_all 2 ms" in found["schedule"].found
    [kernels] = [each for each in started if each[0] == "kernels"]
    assert kernels[1]["device"] == "cuda:0" and "CUDA_VISIBLE_DEVICES" not in kernels[2]
    assert [each[2]["CUDA_VISIBLE_DEVICES"] for each in started if each[0] == "reduction"] == ["", ""]


# -- the command line ------------------------------------------------------------------------------------------------


def test_wrong_arguments_end_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["batch.size=0"], "batch.size=0: must be a whole number, "),
        (["comm.reproducible=true", "comm.dtype=bf16"], "comm.dtype=bf16: must be fp32"),
        (["-m"], "kfuse doctor takes overrides only, not --multirun"),
        (["--fast"], "--fast: no such flag"),
    ):
        monkeypatch.setattr(sys, "argv", ["kfuse", "doctor", *words])
        assert main() == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"kfuse: error: {said}") and printed.err.count("\n") == 1 and not printed.out


def config_of(*overrides: str) -> dict[str, Any]:
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        config: Any = OmegaConf.to_container(hydra.compose("config", list(overrides)), resolve=True)
    return config
