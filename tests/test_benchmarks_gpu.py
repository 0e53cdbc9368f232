"""The checks and measurements for machines with GPUs: a failing part leaves the others, and wrong results are seen.

No GPU has run them; what a CPU can run of them is run here.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = (
    "gpu_parts",
    "gpu_check",
    "gpu_large",
    "gpu_ddp",
    "gpu_elastic",
    "gpu_ranks",
    "gpu_state",
    "gpu_workers",
    "step_gpu",
    "kernels",
)
NOT_THERE = ("hydra", "omegaconf", "rich", "tensorboard", "sklearn", "matplotlib", "ray", "safetensors", "pytest")
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a benchmark; its folder's modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


# -- gpu_parts.py: the parts -----------------------------------------------------------------------------------------


def test_on_one_gpu_the_limits_are_below_nine_minutes(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kfuse.tools.doctor.machine import COMMAND_S

    gpu = script("gpu_parts")
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    parts = gpu.parts("cuda", 1, tmp_path, None)
    assert [part.name for part in parts if part.absent] == ["communication beside DDP"]
    assert sum(part.limit_s for part in parts if not part.absent) + COMMAND_S < 9 * 60
    assert not any(part.absent for part in gpu.parts("cuda", 2, tmp_path, None))
    [sanitizer] = [part for part in parts if "sanitizer" in part.name]
    assert sanitizer.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert sanitizer.command[0] == "/usr/bin/compute-sanitizer" and "--small" in sanitizer.command


def test_what_cannot_run_is_absent_with_a_reason(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = script("gpu_parts")
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    absent = {part.name: part.absent for part in gpu.parts("cpu", 0, tmp_path, None) if part.absent}
    assert absent == {"buffers of over 2^31 elements": "needs a GPU", "kernels under compute-sanitizer": "needs a GPU"}
    [sanitizer] = [part for part in gpu.parts("cuda", 2, tmp_path, None) if part.absent]
    assert "no compute-sanitizer" in sanitizer.absent
    assert {part.absent for part in gpu.parts("cuda", 2, tmp_path, "no C compiler")} == {"no C compiler"}


def test_a_missing_compiler_is_said_with_its_remedy(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = script("gpu_parts")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert gpu.no_compiler("cpu") is None, "nothing is compiled there"
    assert gpu.no_compiler("cuda") == "no C compiler"
    assert "all parts are absent" in (said := capsys.readouterr().out) and "apt install gcc" in said


def test_a_missing_package_is_said_before_anything_runs(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = script("gpu_parts")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "triton" else object())
    assert gpu.missing_packages("cpu") == []
    assert gpu.missing_packages("cuda") == [f"no triton in {sys.executable}: pip install triton"]
    monkeypatch.setattr(gpu, "OLDEST_PYTHON", (99, 0))
    assert "too old" in gpu.missing_packages("cpu")[0]


def test_a_failing_part_leaves_the_others(script: Callable[[str], Any], tmp_path: Path) -> None:
    gpu = script("gpu_parts")
    pid = tmp_path / "child"
    hang = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open({str(pid)!r}, "w").write(str(child.pid))
print("waiting", flush=True)
time.sleep(1000)
"""
    write = "import json, sys; json.dump([1], open(sys.argv[1], 'w')); print('all well')"
    scripts = {
        "well": (write, 20.0),
        "raises": ("print('before'); raise SystemExit('it broke')", 20.0),
        "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 20.0),
        "hangs": (hang, 3.0),
        "does not fit": ("print('needs 80 GiB'); raise SystemExit(3)", 20.0),
    }
    found = {}
    for name, (text, limit_s) in scripts.items():
        command = [sys.executable, "-c", text, str(tmp_path / f"{name}.json")]
        found[name] = gpu.run(gpu.Part(name, command, limit_s))
    found["elsewhere"] = gpu.run(gpu.Part("elsewhere", [], 20.0, absent="needs a GPU"))
    assert {name: (outcome.status, outcome.note) for name, outcome in found.items()} == {
        "well": ("ok", "all well"),
        "raises": ("failed", "it broke"),
        "crashes": ("failed", "no output"),
        "hangs": ("timed out", "waiting"),
        "does not fit": ("absent", "needs 80 GiB"),
        "elsewhere": ("absent", "needs a GPU"),
    }
    assert found["well"].result == [1] and found["hangs"].result is None
    status = Path("/proc", pid.read_text(), "stat")
    deadline = time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "a process of the part that hung lives on"
        time.sleep(0.02)


@pytest.mark.full
def test_scripts_need_torch_and_numpy_only() -> None:
    lines = [f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})"]
    lines += [f"for name in {NOT_THERE}: sys.modules[name] = None"]
    lines += [f"import {name}" for name in (*SCRIPTS, "kfuse.tools.doctor.machine")]
    command = [sys.executable, "-P", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- which GPU a worker has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "version"), [(2, (2, 28, 9)), (8, (2, 30, 1)), (1, (2, 28, 9)), (1, (2, 30, 1))])
def test_workers_have_a_gpu_each_where_there_are_enough(
    gpus: int, version: tuple[int, ...], script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = script("gpu_workers")
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(workers.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(workers.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(workers, "nccl", lambda: version)
    assert workers.place("cuda", 1, 2) == torch.device("cuda", 1 if gpus > 1 else 0)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    if gpus > 1:
        assert os.environ == {"LOCAL_RANK": "1"}, "NVLink, and NCCL as it comes"
    elif version >= (2, 30):
        assert os.environ == {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        assert os.environ["LOCAL_RANK"] == "0" and os.environ["NCCL_HOSTID"] == "kfuse-1"
    monkeypatch.setattr(os, "environ", {})
    assert workers.place("cpu", 1, 2) == CPU and os.environ == {"CUDA_VISIBLE_DEVICES": ""}


# -- the checks see what is wrong ------------------------------------------------------------------------------------


def spoilt(kernel: Callable[..., Any], buffer: int, element: int, smallest: Any) -> Callable[..., Any]:
    """The kernel, which also changes an element of one of its buffers (the number of an argument).

    smallest: buffers of fewer elements, or blocks, are left alone, if it is a number.
    """
    least = smallest if isinstance(smallest, int) else 0

    def run(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        if max(each.numel() for each in args if isinstance(each, torch.Tensor)) >= least:
            args[buffer].view(-1)[element] += 0.5
        return out

    return run


MUTATIONS = {  # check, arguments, the kernel that is spoilt, which of its buffers
    "lamb": ("check_lamb", ([1, 700, 37],), "lamb", 0),
    "pull": ("check_pull", (5000, 3), "pull", 2),
    "measures": ("check_measures", (5000, torch.float32, 4), "reduce", None),
    "norm": ("check_norm", ("layer", 48, torch.float32), None, None),
    "large block_sumsq": ("large_block_sumsq", (50_037,), "block_sumsq", 1),
    "large pack": ("large_pack", (50_037,), "pack", 1),
    "large reduce": ("large_reduce", (50_037,), "reduce", 2),
    "large adamw": ("large_adamw", (50_037,), "adamw", 0),
    "large norm": ("large_norm", (50_037,), None, None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_seen(name: str, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("gpu_large" if name.startswith("large") else "gpu_check")
    function, arguments, kernel, buffer = MUTATIONS[name]
    torch.manual_seed(0)
    assert getattr(check, function)(CPU, *arguments) is None
    if name == "measures":  # one block's sum
        original = check.reduce

        def measured(*args: Any, measures: Any) -> None:
            original(*args, measures=measures)
            measures.variance[0] *= 1.001

        monkeypatch.setattr(check, "reduce", measured)
    elif name == "norm":
        forward = check.kf.nn.LayerNorm.forward
        monkeypatch.setattr(check.kf.nn.LayerNorm, "forward", lambda self, x: forward(self, x) * 1.0001)
    elif name == "large norm":
        original = check.norm_forward

        def last_row(x: Any, *args: Any, **kwargs: Any) -> Any:
            y, mean, rstd = original(x, *args, **kwargs)
            y[-1] += len(x)
            return y, mean, rstd

        monkeypatch.setattr(check, "norm_forward", last_row)
    else:
        assert kernel is not None and buffer is not None
        # The last element; of large_pack's buffer the tensor behind would hide it. Not in small buffers: they are what
        # the windows of large ones are compared with.
        element = 50_000 if name == "large pack" else -1
        monkeypatch.setattr(check, kernel, spoilt(getattr(check, kernel), buffer, element, smallest=arguments[0]))
    torch.manual_seed(0)
    assert getattr(check, function)(CPU, *arguments) is not None


def test_windows_lie_around_element_2_to_the_31(script: Callable[[str], Any]) -> None:
    check = script("gpu_large")
    first, middle, last = check.windows(check.LARGE)
    assert first.start == 0 and last.stop == check.LARGE
    assert middle.start < 2**31 < middle.stop == last.start
    assert {part.start % check.BLOCK for part in (first, middle, last)} == {0}


def test_buffers_that_do_not_fit_are_absent(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check = script("gpu_large")
    monkeypatch.setattr(check, "_free_bytes", lambda device: 10 * 2**30)
    monkeypatch.setattr(check, "result_of", lambda run: "ok")
    found = check.run_large(CPU, check.LARGE)
    assert found["block_sumsq"] == "ok"
    assert found["adamw"] == "absent: needs 16 GiB, 10 are free"


def test_transports_are_compared(script: Callable[[str], Any]) -> None:
    ranks = script("gpu_ranks")
    one = {"steps": [[1.0, 2.0]], "parameters": "a"}
    near = {"steps": [[1.0001, 2.0]], "parameters": "b"}
    far = {"steps": [[1.1, 2.0]], "parameters": "b"}
    plain, same = ("allreduce", False, "fp32"), ("auto", True, "fp32")
    assert ranks._compare(one, near, near, plain) == "ok"
    assert "differ" in ranks._compare(one, far, far, plain)
    assert "disagree" in ranks._compare(one, one, near, plain)
    assert "other bits" in ranks._compare(one, near, near, same)
    assert ranks._compare(one, one, one, same) == "ok"


# -- the parts, from end to end --------------------------------------------------------------------------------------


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--device", "cpu", *arguments]
    # Where PYTHONSAFEPATH is set Python does not look for modules beside the script.
    paths = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize(
    ("name", "arguments", "last"),
    [
        ("gpu_check", ["--small"], "40 of 40 checks passed"),
        ("gpu_large", ["--elements", "70037"], "5 of 5 checks passed"),
        ("step_gpu", ["--rounds", "3"], "times torch's without any"),
        ("gpu_ranks", [], "6 of 6 transports give what one worker gives"),
        ("gpu_ddp", ["--rounds", "3"], "2 workers: kfuse / ddp"),
        ("gpu_elastic", [], "5 of 5 jobs end with one worker's parameters"),
        ("gpu_state", ["--parameters", "2e6"], "2 M parameters: regroup"),
    ],
)
def test_a_part_runs_on_a_cpu(name: str, arguments: list[str], last: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = run(name, *arguments, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert last in done.stdout.splitlines()[-1]
    assert json.loads(path.read_text())


HANGS = """
import time
from kfuse.comm.transports.allreduce import AllReduce

class Hangs(AllReduce):
    def wait(self, key):
        time.sleep(1000 if self._group.rank == 0 and self._group.size == 2 else 0)
        super().wait(key)
"""


@pytest.mark.full
def test_a_transport_that_hangs_leaves_the_others(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases after it get new workers."""
    ranks = script("gpu_ranks")
    monkeypatch.setattr(ranks, "CASE_S", 8.0)
    (tmp_path / "hanging.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["allreduce", "hanging.Hangs", "tree", "nothing.Here", "all_to_all"]
    cases = [(name, False, "fp32") for name in names]
    found = {name: result["verdict"] for name, result in ranks._run("cpu", cases, 1)}
    assert found["allreduce"] == found["tree"] == found["all_to_all"] == "ok"
    assert re.fullmatch("failed: .*(no answer of rank 0|waited .* s for rank 0).*", found["hanging.Hangs"])
    assert "no module named 'nothing'" in found["nothing.Here"].lower()
