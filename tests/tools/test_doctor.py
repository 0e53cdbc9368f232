"""`kfuse doctor` finds what is wrong with a machine, says what to do, hangs nowhere and leaves no process behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import is_alive, wait_until

from kfuse.comm.settings import CommOptions
from kfuse.tools.doctor import command as doctor

BAD_TRANSPORTS = """
import os, signal, time

from kfuse.comm.transports import AllReduce

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


@pytest.mark.full
def test_this_machine_is_well_and_the_overrides_choose_what_is_tried(tmp_path: Path) -> None:
    status, found = run(tmp_path, "comm.schedule=tree")
    names = "machine, versions, GPUs, shared memory, transport, reduction, kernels"
    assert [*found] == names.split(", ")
    assert status == 0 and "fail" not in {status for status, _ in found.values()}
    assert found["transport"][1] == "tree, gradients in fp32"
    assert found["reduction"][0] == found["kernels"][0] == "ok"
    for part in ("2 processes", "tree in fp32", "allreduce", "all_to_all in fp32 (reproducible)", "as by one worker"):
        assert part in found["reduction"][1]
    assert list(tmp_path.iterdir()) == [], "it writes nothing"


@pytest.fixture
def no_kernels(bad_transports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test runs beside the bad transports, and without the process for the kernels."""
    monkeypatch.chdir(bad_transports)
    monkeypatch.setattr(doctor, "versions", dict)


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("AddsWrong", r"bad.AddsWrong in fp32: the loss after ten steps differs from that of one worker by \d\.\de-04"),
        ("Dies", "rank 1: ended while training digits by bad.Dies in fp32 .SIGKILL"),
    ],
)
def test_a_wrong_reduction_fails(transport: str, said: str) -> None:
    line = next(doctor._self_test(CommOptions(schedule=f"bad.{transport}"), 0))
    assert line.status == "fail" and re.search(said, line.found) and line.remedy, line


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
def test_a_hanging_self_test_says_what_it_waited_for_and_its_processes_die(
    bad_transports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up as soon as both ranks hang."""
    monkeypatch.setattr(subprocess.Popen, "wait", lambda process, timeout: wait_for("rank0", "rank1"))
    line = next(doctor._self_test(CommOptions(schedule="bad.Hangs"), 0))
    assert line.status == "fail"
    assert "rank 0: no answer within 40 s; it was training digits by bad.Hangs" in line.found
    assert_ended("rank0", "rank1")


def wait_for(*files: str) -> None:
    wait_until("both to hang", lambda: all(Path(file).exists() and Path(file).read_text() for file in files))


def assert_ended(*files: str) -> None:
    pids = [int(Path(file).read_text()) for file in files]
    wait_until("the self-test's processes to end", lambda: not any(map(is_alive, pids)))


@pytest.mark.full
@pytest.mark.usefixtures("no_kernels")
def test_its_processes_die_with_it() -> None:
    command = [sys.executable, "-m", "kfuse", "doctor", "comm.schedule=bad.Hangs"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for("rank0", "rank1")
    process.kill()
    assert process.communicate(timeout=120)[1] == ""
    assert_ended("rank0", "rank1")


H100 = {"name": "NVIDIA H100", "capability": "9.0", "memory_gib": 79.2, "free_gib": 78.5}


def answer(*gpus: dict[str, Any], problem: str | None = None) -> dict[str, Any]:
    return {"gpus": list(gpus), "nccl": "2.28.9", "nccl_problem": problem}


def test_lines_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    old = H100 | {"capability": "7.5"}
    for devices, triton, expected in (
        (answer(H100, H100), "3.6.0", {"GPUs": "ok", "NCCL": "ok"}),
        (answer(old), "3.6.0", {"GPUs": "warn", "NCCL": "ok"}),
        (answer(H100, problem="ncclSystemError"), "3.6.0", {"GPUs": "ok", "NCCL": "fail"}),
        (answer(H100), None, {"GPUs": "fail", "NCCL": "ok"}),
        (None, "3.6.0", {"GPUs": "fail"}),
    ):
        monkeypatch.setattr(doctor, "versions", lambda found=triton: {"triton": found} if found else {})
        found = list(doctor.gpu_lines(devices, "no answer within 40 s"))
        assert {line.name: line.status for line in found} == expected
        assert all(bool(line.remedy) == (line.status != "ok") for line in found)


@pytest.mark.parametrize(
    ("second", "alone", "said"),
    [
        ("0", "0", "the same bits on both"),
        ("1", "0", "all_to_all: the ranks have different bits"),
        ("0", "1", "all_to_all: other bits than one worker alone"),
    ],
)
def test_ranks_whose_bits_differ_fail(second: str, alone: str, said: str) -> None:
    one, other = (
        {"backend": "gloo", "trained": {"all_to_all": (bits, 2.0, 0.0)}, "alone": (alone, 2.0)}
        for bits in ("0", second)
    )
    line = doctor._reduction([(one, None), (other, None)], 0)
    failed = second + alone != "00"
    assert line.status == ("fail" if failed else "ok") and said in line.found and bool(line.remedy) == failed


def test_a_kernel_with_another_result_fails() -> None:
    for found, status in ((None, "ok"), ("result 0 is off by 1.0e-01", "fail")):
        assert doctor._kernels({"pack": found}, None, 1).status == status
