"""Starts the processes of `self_test`: each has a time limit, and ends with the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import IO, Any

from kfuse.elastic import protocol
from kfuse.elastic.launchers.local import signal_at_parent_end

LIMIT_S = 40.0
"""How long each process of the self-test may take. On an idle machine all together take under 15 s."""
TIMEOUT_S = 20.0
"""How long one rank of the self-test waits for the others."""
_KILL_S = 5.0
"""How long a killed process is waited for."""


@contextlib.contextmanager
def started(what: str, arguments: Mapping[str, Any], **environment: str) -> Iterator[Process]:
    """Context: a process of `kfuse.tools.doctor.self_test`, which is ended with the context, or with this process."""
    # Where this command runs in a worker of a job, its processes are no workers of that job.
    inherited = {name: value for name, value in os.environ.items() if name != protocol.ENV_CONTROL}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfuse.tools.doctor.self_test", what, json.dumps(arguments)],
            # gloo and the store log many lines for each lost peer.
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=signal_at_parent_end(signal.SIGKILL),
        )
        try:
            yield Process(process, output, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver, where no signal ends it
                process.wait(_KILL_S)


class Process:
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


class StoreError(RuntimeError):
    """This process cannot host the store of its ranks. The message is one line."""


@contextlib.contextmanager
def ranks(what: str, arguments: Mapping[str, Any], count: int, gpus: int) -> Iterator[list[Process]]:
    """Context: `count` processes that are the ranks of a job of fixed size, over NCCL where there are as many GPUs.

    Raises StoreError where this process cannot host their store.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    except RuntimeError as error:
        raise StoreError(f"no store at 127.0.0.1: {str(error).splitlines()[0]}") from error
    environment = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        **({"CUDA_VISIBLE_DEVICES": ""} if gpus < count else {}),
    }
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(started(what, arguments, RANK=str(r), LOCAL_RANK=str(r), **environment))
            for r in range(count)
        ]
