"""`kfuse doctor [override...]`: whether this machine can run kfuse, and what a run with these overrides would use.

Each line is ok, warn or fail, what was found, and below it what to do about it. What could hang (a driver, a message
between processes) is tried in processes of its own, `kfuse.cli.self_test`, which have a time limit and end with this
one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import IO, Any

from kfuse.cli import machine
from kfuse.cli.machine import Line
from kfuse.elastic import protocol
from kfuse.elastic.launchers.local import signal_at_parent_end

USAGE = """\
kfuse doctor [override ...]

Checks this machine: devices, compiler, limits, which transport these overrides choose, and, with two processes, the
reduction and the kernels. Overrides are those of a run (kfuse --help). Exit status 0, or 1 where a line says `fail`."""

LIMIT_S = 40.0
"""How long each process of the self-test may take. On an idle machine all together take under 15 s."""
TIMEOUT_S = 20.0
"""How long one rank of the self-test waits for the other."""
EXTRAS = {"tensorboard": "tensorboard", "ray": "kfuse[ray]", "safetensors": "kfuse[safetensors]"}

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def examine(config: dict[str, Any]) -> int:
    """Prints the report for a checked configuration. Returns 0, or 1 where a line says `fail`."""
    from rich.console import Console

    console, failed = Console(), False
    for line in lines(config):
        console.print(line.status.ljust(6), style=_COLOURS[line.status], end="", highlight=False)
        console.print(f"{line.name:<14}{line.found}", markup=False, highlight=False, soft_wrap=True)
        if line.remedy:
            console.print(f"{'':<20}{line.remedy}", style="cyan", markup=False, highlight=False, soft_wrap=True)
        failed = failed or line.status == "fail"
    return int(failed)


def lines(config: dict[str, Any]) -> Iterator[Line]:
    """The report, line by line, as each is known. Raises ValueError for communication options that do not fit."""
    from kfuse.train.build import comm_options

    options = comm_options(config)
    yield machine.size()
    yield machine.versions()
    with _started("devices", {}) as process:
        devices, problem = process.result()
    devices = devices or {"gpus": [], "peers": [], "nccl": None, "nccl_problem": problem}
    count = len(devices["gpus"])
    yield from machine.gpu_lines(devices, problem)
    yield machine.compiler_line(count > 0)
    yield machine.triton_cache(count > 0)
    yield machine.shared_memory(config["data"]["workers"])
    yield machine.open_files(config["workers"]["max"])
    yield _transport(config["comm"])
    yield _extras(config)
    yield from _self_test(asdict(options), count)


def _transport(comm: Mapping[str, Any]) -> Line:
    from kfuse.comm import transports

    path, schedule, reproducible = comm["_target_"], comm["schedule"], comm["reproducible"]
    if path is not None:
        return Line("transport", "ok", f"{path}: comm._target_ names it")
    chosen = transports.choose(schedule, reproducible)
    if schedule != "auto":
        why = f"comm.schedule={schedule} asks for it"
    elif reproducible:
        why = "comm.reproducible=true adds all contributions in one order, so each must be at hand"
    else:
        why = "comm.schedule=auto takes it where the order of additions is free"
    return Line("transport", "ok", f"{chosen}, gradients in {comm['dtype']}: {why}")


def _extras(config: Mapping[str, Any]) -> Line:
    """Packages that only some settings need. A launcher that needs a missing one is refused before this."""
    found = {name: machine.version(name) for name in EXTRAS}
    text = ", ".join(f"{name} {number or 'not installed'}" for name, number in found.items())
    missing = [f"'{EXTRAS[name]}'" for name, number in found.items() if number is None]
    remedy = f"Only if you need them: pip install {' '.join(missing)}" if missing else ""
    if config["observe"]["tensorboard"] and found["tensorboard"] is None:
        return Line("extras", "fail", f"{text}; observe.tensorboard=true needs tensorboard", "pip install tensorboard")
    return Line("extras", "ok", text, remedy)


# -- the self-test ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(what: str, arguments: Mapping[str, Any], **environment: str) -> Iterator[_Process]:
    """Context: a process of `kfuse.cli.self_test`, which is ended with the context, or with this process."""
    # Where this command runs in a worker of a job, its processes are no workers of that job.
    inherited = {name: value for name, value in os.environ.items() if name != protocol.ENV_CONTROL}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfuse.cli.self_test", what, json.dumps(arguments)],
            # gloo and the store log many lines for each lost peer.
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=signal_at_parent_end(signal.SIGKILL),
        )
        try:
            yield _Process(process, output, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            process.wait()


class _Process:
    """A process of the self-test, and the files that its output goes to: a pipe that nobody reads would fill up."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[str], errors: IO[str]) -> None:
        self._process, self._output, self._errors = process, output, errors
        self._deadline = time.monotonic() + LIMIT_S

    def result(self) -> tuple[Any, str | None]:
        """What it found and None, or None and one line that says what went wrong. Takes `LIMIT_S` at most."""
        ended = True
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ended = False
        self._output.seek(0)
        said: dict[str, Any] = {}
        for line in self._output.read().splitlines():
            with contextlib.suppress(ValueError):  # cut off, or another library's
                said |= json.loads(line)
        at = said.get("at", "starting Python")
        if not ended:
            return None, f"no answer within {LIMIT_S:.0f} s; it was {at}"
        if "found" in said:
            return said["found"], None
        if "problem" in said:
            return None, f"{at}: {said['problem']}"
        self._errors.seek(0)
        last = next((line for line in reversed(self._errors.read().splitlines()) if line.strip()), "")
        return None, f"ended while {at} ({_status(self._process.returncode)}){': ' * bool(last)}{last.strip()[:200]}"


def _status(code: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit status {code}"


def _self_test(options: dict[str, Any], gpus: int) -> Iterator[Line]:
    """Two ranks that reduce, over NCCL where there are two GPUs, and at the same time a process for the kernels."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        wait = timedelta(seconds=TIMEOUT_S)
        store = TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
    except RuntimeError as error:
        remedy = "The loopback interface must be up: ip link set lo up."
        yield Line("reduction", "fail", f"no store at 127.0.0.1: {str(error).splitlines()[0]}", remedy)
        return
    environment = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        **({"CUDA_VISIBLE_DEVICES": ""} if gpus < 2 else {}),
    }
    arguments = {"options": options, "timeout_s": TIMEOUT_S}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(_started("reduction", arguments, RANK=str(r), LOCAL_RANK=str(r), **environment))
            for r in range(2)
        ]
        by_triton, kernels = gpus > 0 or machine.version("triton") is not None, None
        if by_triton:
            # Alone, also where this command runs as one of several ranks.
            environment = {"WORLD_SIZE": "1"} | ({} if gpus else {"TRITON_INTERPRET": "1"})
            where = {"device": "cuda:0" if gpus else "cpu", "options": options}
            kernels = stack.enter_context(_started("kernels", where, **environment))
        answers = [rank.result() for rank in ranks]
        on_device: tuple[Any, str | None] = kernels.result() if kernels is not None else (None, None)
        worker = on_device[0] if gpus else answers[0][0]  # with one GPU the ranks do without it
        yield determinism(options["reproducible"], worker and worker["flags"], gpus)
        yield _reduction(answers, gpus)
        if by_triton:
            yield _kernels(on_device[0], on_device[1], gpus)
        else:
            yield Line("kernels", "ok", "not tried: Triton is not installed, and only machines with a GPU need it")


def determinism(reproducible: bool, flags: Mapping[str, Any] | None, gpus: int) -> Line:
    """What torch's settings are in a worker. They decide whether the model's own operations have the same bits.

    flags: of a worker of the self-test; None: it did not get that far. gpus: on a CPU the threads alone matter.
    """
    from kfuse.determinism import WORKSPACES

    if not reproducible:
        return Line("determinism", "ok", "not asked for: comm.reproducible=false")
    if flags is None:
        return Line("determinism", "warn", "unknown: the self-test has failed", "See the lines below.")
    found = ", ".join(f"{name} {value}" for name, value in flags.items())
    lax = not (flags["deterministic algorithms"] and flags["cudnn.deterministic"]) or flags["cudnn.benchmark"]
    if gpus and (lax or flags["CUBLAS_WORKSPACE_CONFIG"] not in WORKSPACES):
        remedy = "export CUBLAS_WORKSPACE_CONFIG=:4096:8, and call torch.use_deterministic_algorithms(True)."
        return Line("determinism", "fail", found, remedy)
    return Line("determinism", "ok", found)


def _reduction(answers: Sequence[tuple[Any, str | None]], gpus: int) -> Line:
    wrong = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem is not None]
    if wrong:
        remedy = "Processes of this machine must reach each other: see the firewall's rules for 127.0.0.1"
        remedy += "; NCCL_DEBUG=INFO shows more." if gpus > 1 else "."
        return Line("reduction", "fail", "; ".join(wrong), remedy)
    found = [answer for answer, _ in answers]
    backend: str = found[0]["backend"]
    unsteady: list[str] = []
    for cases in zip(*(answer["cases"] for answer in found), strict=True):
        name = cases[0]["name"]
        wrong += [f"{name}: {case['wrong']}" for case in cases[:1] if case["wrong"] is not None]
        if cases[0]["digest"] != cases[1]["digest"]:
            wrong.append(f"{name}: the ranks have different bits")
        if not all(case["repeats"] for case in cases):
            (wrong if cases[0]["reproducible"] else unsteady).append(f"{name}: other bits the second time")
    if wrong:
        remedy = "The results are wrong: memory, GPU or link may be defective. Run again, and on another machine."
        return Line("reduction", "fail", f"2 processes over {backend}: {'; '.join(wrong)}", remedy)
    names = ", ".join(case["name"] for case in found[0]["cases"])
    text = f"2 processes over {backend}, {names}: sums as in float64"
    if unsteady:
        return Line("reduction", "warn", f"{text}; {'; '.join(unsteady)}", "comm.reproducible=true keeps the bits.")
    text += ", the same bits twice"
    if gpus == 1:
        text += " (one GPU: NCCL between two processes is not tried)"
    return Line("reduction", "ok", text)


def _kernels(found: Mapping[str, Any] | None, problem: str | None, gpus: int) -> Line:
    where = "on GPU 0" if gpus else "in Triton's interpreter"
    if found is None:
        remedy = "See the lines compiler and Triton cache." if gpus else "Triton does not work here: pip install triton"
        return Line("kernels", "fail", f"{where}: {problem}", remedy)
    wrong = [f"{name}: {why}" for name, why in found["wrong"].items() if why is not None]
    if wrong:
        remedy = "Compare the version of Triton with the one that this torch needs (pip check)."
        return Line("kernels", "fail", f"{where}: {'; '.join(wrong)}", remedy)
    return Line("kernels", "ok", f"{', '.join(found['wrong'])} {where}: as their PyTorch implementations")
