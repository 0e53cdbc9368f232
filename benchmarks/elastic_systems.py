"""How each system of elastic.py is started, and who restarts what was killed, at the settings that suit it best."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

WORKER = str(Path(__file__).with_name("elastic_worker.py"))
WORKERS = 2


class System(ABC):
    """A job under way in a directory of its own."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = (directory / "output").open("ab")
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._start()

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._env,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    @abstractmethod
    def _start(self) -> None: ...

    def tend(self) -> str | None:
        """Called often: restarts what nobody else does. What the job said last, if it has ended."""
        if all(process.poll() is None for process in self._processes):
            return None
        return "\n".join([f"{self.name} ended:", *(self.directory / "output").read_text().splitlines()[-10:]])

    def stop(self) -> None:
        """Each system ends its own workers when asked to; those left after that are killed."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        ours = str(self.directory).encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if ours in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)


class Kfuse(System):
    def _start(self) -> None:
        bounds = [
            "--workers",
            str(WORKERS),
            "--max-workers",
            str(WORKERS),
            "--run-dir",
            str(self.directory / "run"),
        ]
        self._run(
            "-m", "kfuse.cli.kfuse_run", "--observe-progress=false", *bounds, WORKER, self.name, str(self.directory)
        )


class Torchrun(System):
    """The agent looks after its workers ten times a second: its shortest interval in common use.

    Its workers get a new store at each restart. By default torch 2.13 gives them the old one, where gloo finds the
    addresses of the dead: every other restart then failed again, or hung (pytorch issue 135712).
    """

    def _start(self) -> None:
        self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        agent += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
        self._run(*agent, WORKER, "torchrun", str(self.directory))


class Torchft(System):
    """A lighthouse with short timeouts, and a launcher that restarts a dead replica at once."""

    def _start(self) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # read as it is loaded; its replicas inherit it
        from torchft.coordination import LighthouseServer

        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=300
        )
        self._env |= {"TORCHFT_LIGHTHOUSE": self._lighthouse.address(), "RUST_LOG": os.environ["RUST_LOG"]}
        for _ in range(WORKERS):
            self._replica()

    def _replica(self) -> None:
        self._run(WORKER, "torchft", str(self.directory))

    def tend(self) -> str | None:
        dead = [process for process in self._processes if process.poll() is not None]
        self._processes = [process for process in self._processes if process not in dead]
        for _ in dead:
            self._replica()
        return None

    def stop(self) -> None:
        super().stop()
        self._lighthouse.shutdown()


SYSTEMS: dict[str, type[System]] = {
    "kfuse": Kfuse,
    "kfuse-reproducible": Kfuse,
    "torchrun": Torchrun,
    **({"torchft": Torchft} if importlib.util.find_spec("torchft") else {}),
}
