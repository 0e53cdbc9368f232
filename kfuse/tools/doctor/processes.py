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
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kfuse.elastic import protocol
from kfuse.elastic.launchers.local import signal_at_parent_end

LIMIT_S = 40.0  # of each process of the self-test; on an idle machine all together take under 15 s
TIMEOUT_S = 20.0  # of one rank that waits for the others
_KILL_S = 5.0  # of a killed process

# Waits for a process, `LIMIT_S` after its start at most. Returns what it found and None, or None and one line that says
# what went wrong.
Result = Callable[[], tuple[Any, str | None]]


@contextlib.contextmanager
def started(what: str, arguments: Mapping[str, Any], **environment: str) -> Iterator[Result]:
    """Context: a process of `kfuse.tools.doctor.self_test`, which is ended with the context, or with this process."""
    # Where this command runs in a worker of a job, its processes are no workers of that job.
    inherited = {name: value for name, value in os.environ.items() if name != protocol.ENV_CONTROL}
    deadline = time.monotonic() + LIMIT_S
    # Files: a pipe that nobody reads would fill up.
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

        def result() -> tuple[Any, str | None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            said: dict[str, Any] = {"at": "starting Python, torch and kfuse"}
            output.seek(0)
            for line in output.read().splitlines():
                with contextlib.suppress(ValueError):  # cut off, or another library's
                    said |= json.loads(line)
            if process.returncode is None:
                return None, f"no answer within {LIMIT_S:.0f} s; it was {said['at']}"
            if "found" in said:
                return said["found"], None
            if "problem" in said:
                return None, f"{said['at']}: {said['problem']}"
            errors.seek(0)
            last = next((line for line in reversed(errors.read().splitlines()) if line.strip()), "").strip()[:200]
            code = process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return None, f"ended while {said['at']} ({how}){': ' * bool(last)}{last}"

        try:
            yield result
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver, where no signal ends it
                process.wait(_KILL_S)


@contextlib.contextmanager
def ranks(what: str, arguments: Mapping[str, Any], count: int, gpus: int) -> Iterator[list[Result]]:
    """Context: `count` processes that are the ranks of a job of fixed size, over NCCL where there are as many GPUs."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
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
