"""`kfuse doctor` finds what is wrong with a machine, says what to do, hangs nowhere and leaves no process behind."""

from __future__ import annotations

import contextlib
import re
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
from kfuse.comm.options import CommOptions
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


def run(folder: Path, *words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """`kfuse doctor` in `folder`, on a pipe: its status, and {name: (status, what was found and the remedy)}."""
    command = [sys.executable, "-m", "kfuse", "doctor", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.stderr == "" and "\x1b" not in done.stdout, done.stdout + done.stderr
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in done.stdout.splitlines():
        if line.startswith(" " * 20):
            found[name] = (found[name][0], f"{found[name][1]}\n{line.strip()}")
            continue
        match = re.fullmatch(r"(ok|warn|fail) +(\S.{13})(.+)", line)
        assert match, line
        name = match[2].strip()
        found[name] = (match[1], match[3])
    return done.returncode, found


@pytest.fixture
def bad_transports(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(BAD_TRANSPORTS)
    return tmp_path


# -- the whole report ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_this_machine_is_well_and_the_overrides_choose_what_is_tried(tmp_path: Path) -> None:
    status, found = run(tmp_path, "comm.schedule=tree", "comm.dtype=bf16")
    names = "machine, versions, GPUs, shared memory, transport, reduction, schedule, kernels"
    assert [*found] == names.split(", ")
    assert status == 0 and "fail" not in {status for status, _ in found.values()}
    assert found["transport"][1] == "tree, gradients in bf16"
    assert found["reduction"][0] == found["kernels"][0] == "ok"
    for part in ("2 processes", "tree in bf16", "allreduce", "all_to_all in fp32 (reproducible)", "float64"):
        assert part in found["reduction"][1]
    assert re.search(r"one bucket in fp32: auto would take \w+: allreduce [\d.]+ ms", found["schedule"][1])
    assert list(tmp_path.iterdir()) == [], "it writes nothing"


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


@pytest.fixture
def no_kernels(bad_transports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test runs beside the bad transports, and without the process for the kernels."""
    monkeypatch.chdir(bad_transports)
    monkeypatch.setattr(machine, "version", lambda package: None)


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("AddsWrong", r"bad.AddsWrong in fp32: a mean gradient differs from the sum in float64 by 1\.\de-03"),
        ("Dies", "rank 1: ended while reducing by bad.Dies in fp32 .SIGKILL"),
    ],
)
def test_a_wrong_reduction_fails(transport: str, said: str) -> None:
    line = next(doctor._self_test(CommOptions(schedule=f"bad.{transport}").named(), 0))
    assert line.status == "fail" and re.search(said, line.found) and line.remedy, line


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
def test_a_hanging_self_test_says_what_it_waited_for(bad_transports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up as soon as both ranks hang."""
    monkeypatch.setattr(subprocess.Popen, "wait", lambda process, timeout: both_hang(bad_transports))
    line = next(doctor._self_test(CommOptions(schedule="bad.Hangs").named(), 0))
    assert line.status == "fail"
    assert "rank 0: no answer within 40 s; it was reducing by bad.Hangs" in line.found
    assert_ended(bad_transports)


def both_hang(folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not all((folder / f"rank{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_its_processes_die_with_it(bad_transports: Path) -> None:
    command = [sys.executable, "-m", "kfuse", "doctor", "comm.schedule=bad.Hangs"]
    process = subprocess.Popen(command, cwd=bad_transports, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both_hang(bad_transports)
    process.kill()
    assert process.communicate(timeout=120)[1] == ""
    assert_ended(bad_transports)


def assert_ended(folder: Path) -> None:
    """The processes of `Hangs` have ended, or do so at once."""
    deadline = time.monotonic() + 60
    for rank in range(2):
        status = Path("/proc", (folder / f"rank{rank}").read_text(), "stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "a process of the self-test lives on"
            time.sleep(0.05)


def test_what_triton_needs_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert machine.compiler().found.startswith(f"no {tmp_path}/Python.h")
    (tmp_path / "Python.h").write_text("")
    assert machine.compiler().status == "ok"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.compiler().status == "fail" and machine.compiler().remedy


# -- GPUs: lines for answers of machines that are not here -----------------------------------------------------------

H100 = {"name": "NVIDIA H100", "capability": "9.0", "memory_gib": 79.2, "free_gib": 78.5}


def answer(*gpus: dict[str, Any], peers: list[list[int]], problem: str | None = None) -> dict[str, Any]:
    return {"gpus": list(gpus), "peers": peers, "nccl": "2.28.9", "nccl_problem": problem}


def test_lines_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    old = H100 | {"capability": "7.5"}
    for devices, triton, expected in (
        (
            answer(H100, H100, peers=[[0, 1]]),
            "3.6.0",
            {"GPUs": "ok", "links": "ok", "NCCL": "ok"},
        ),
        (answer(H100, H100, peers=[]), "3.6.0", {"GPUs": "ok", "links": "warn", "NCCL": "ok"}),
        (answer(old, peers=[]), "3.6.0", {"GPUs": "warn", "NCCL": "ok"}),
        (answer(H100, peers=[], problem="ncclSystemError"), "3.6.0", {"GPUs": "ok", "NCCL": "fail"}),
        (answer(H100, peers=[]), None, {"GPUs": "fail", "NCCL": "ok"}),
        (None, "3.6.0", {"GPUs": "fail"}),
    ):
        monkeypatch.setattr(machine, "version", lambda package, triton=triton: triton)
        found = list(machine.gpu_lines(devices, "no answer within 40 s"))
        assert {line.name: line.status for line in found} == expected
        assert all(bool(line.remedy) == (line.status != "ok") for line in found)


def test_the_driver_is_asked_as_torch_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch.cuda's functions replaced by a machine of two GPUs, and NCCL by gloo."""
    cuda, current, begin = torch.cuda, [], dist.init_process_group
    for owner, name, value in (
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: 2),
        (cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA H100", major=9, minor=0)),
        (cuda, "mem_get_info", lambda index: (78 * 2**30, 79 * 2**30)),
        (cuda, "can_device_access_peer", lambda i, j: True),
        (cuda, "set_device", current.append),
        (cuda, "synchronize", lambda device: None),
        (cuda.nccl, "version", lambda: (2, 28, 9)),
        (dist, "is_nccl_available", lambda: True),
        (torch, "ones", lambda count, device: torch.zeros(count) + 1),
    ):
        monkeypatch.setattr(owner, name, value)

    def over_gloo(backend: str, device_id: torch.device, **more: Any) -> None:
        assert (backend, device_id, current) == ("nccl", torch.device("cuda", 0), [torch.device("cuda", 0)])
        begin("gloo", **more)

    monkeypatch.setattr(dist, "init_process_group", over_gloo)
    gpu = {"name": "NVIDIA H100", "capability": "9.0", "memory_gib": 79.0, "free_gib": 78.0}
    assert self_test.devices() == {"gpus": [gpu, gpu], "peers": [[0, 1]], "nccl": "2.28.9", "nccl_problem": None}
    assert not dist.is_initialized()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert self_test.devices()["nccl_problem"] == "this build of torch has no ProcessGroupNCCL"


def test_with_one_gpu_ranks_do_without_it_and_ranks_whose_bits_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"schedule": "all_to_all", "reason": "allreduce 3 ms, all_to_all 2 ms", "probe_s": 0.1}
    reduction = {"backend": "gloo", "digests": {"all_to_all": "0"}, "wrong": {}, "choice": choice}
    answers = {"devices": answer(H100, peers=[]), "reduction": reduction, "kernels": {"pack": None}}
    started: list[tuple[str, Any, dict[str, str]]] = []

    @contextlib.contextmanager
    def scripted(what: str, arguments: Any, **environment: str) -> Iterator[Any]:
        started.append((what, arguments, environment))
        yield lambda: (answers[what], None)

    monkeypatch.setattr(doctor, "started", scripted)
    monkeypatch.setattr(processes, "started", scripted)
    found = {line.name: line for line in doctor.lines(config_of())}
    assert found["reduction"].status == found["kernels"].status == "ok"
    assert "NCCL between two processes is not tried" in found["reduction"].found
    assert "auto would take all_to_all: allreduce 3 ms, all_to_all 2 ms" in found["schedule"].found
    [kernels] = [each for each in started if each[0] == "kernels"]
    assert kernels[1:] == ({"device": "cuda:0"}, {})
    assert [each[2]["CUDA_VISIBLE_DEVICES"] for each in started if each[0] == "reduction"] == ["", ""]
    other = reduction | {"digests": {"all_to_all": "1"}}
    line = doctor._reduction([(reduction, None), (other, None)], 0)
    assert doctor.main(config_of()) == 0
    answers["kernels"] = {"pack": "result 0 is off by 1.0e-01"}
    assert doctor.main(config_of()) == 1
    assert line.status == "fail" and "all_to_all: the ranks have different bits" in line.found


def test_wrong_arguments_end_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["batch.size=0"], "batch.size=0: must be a whole number, "),
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
