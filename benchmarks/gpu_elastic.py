"""Growth, and workers killed in backward, while a group forms and while sums are shared: the same parameters each time.

    python benchmarks/gpu_elastic.py --device cuda --json elastic.json

Every job trains the same 200 steps with reproducible sums. What must happen is read off the supervisor's events.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from gpu_ranks import problem, samples
from gpu_workers import last_line, report, scratch, start, supervise
from machine import parser_of

import kfuse as kf
from kfuse.comm.group import Group
from kfuse.settings.tree import JobSettings, resolved

GROW_AT, KILL_AT = 5, 20
INIT_KILL_S = {"cpu": 0.0, "cuda": 0.05}
"""A worker that is to die while its group forms dies so long after it began: NCCL takes some tenths of a second."""


@dataclass(frozen=True)
class Job:
    """One elastic job, and what its events must show."""

    what: str
    most: int
    """Workers."""
    happened: Callable[[list[str]], bool]
    at_first: int = 1


JOBS = {
    "one worker": Job("plain", 1, lambda kinds: kinds == ["view"]),
    "growth from 1 to 2": Job("grow", 2, lambda kinds: kinds.count("view") == 2),
    "SIGKILL in backward": Job("backward", 2, lambda kinds: "failure" in kinds, at_first=2),
    "SIGKILL while sums are shared": Job("share", 2, lambda kinds: "failure" in kinds, at_first=2),
    "SIGKILL while a group forms": Job("init", 2, lambda kinds: "failure" in kinds),
}


def main() -> int:
    """Runs all jobs. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--work", nargs=2, metavar=("WHAT", "FILE"), help="what the jobs' workers are started with")
    options = parser.parse_args()
    if options.work:
        work(options.device, *options.work)
        return 0
    jobs = _run(options.device, 25.0 if options.device == "cuda" else 90.0)
    return report(options.device, jobs, options.json, "jobs end with one worker's parameters")


def _run(device: str, limit_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    expected: str | None = None
    for name, job in JOBS.items():
        started = time.monotonic()
        workers = {"workers_count": job.at_first, "workers_max": job.most, "elastic_replace": False}
        settings = resolved("a job", JobSettings, workers)
        with scratch() as folder:
            arguments = ["--device", device, "--work", job.what, str(Path(folder, "killed"))]
            try:
                recorder = supervise(Path(__file__).name, arguments, settings, limit_s, folder)
            except RuntimeError as error:
                print(error)
                yield name, {"verdict": f"failed: {last_line(error)}"}
                continue
        kinds = [event["kind"] for event in recorder.events]
        digest = recorder.summary.get("params_sha256")
        expected = expected or digest
        verdict = "ok"
        if not job.happened(kinds):
            verdict = f"what should have happened did not: {kinds}"
        elif digest is None or digest != expected:
            verdict = "other parameters than one worker's"
        seconds = round(time.monotonic() - started, 1)
        pauses = [event.get("pause_s") for event in recorder.events if event["kind"] == "view"]
        found = {"seconds": seconds, "pause_s": pauses, "params_sha256": digest, "events": recorder.events}
        yield name, {"verdict": verdict, **found}


def work(device: str, what: str, killed: str) -> None:
    """A worker's training script: 200 steps, in which it grows, or dies, or neither."""
    if what == "init" and int(os.environ["KFUSE_WORKER"]) > 0:
        _die_while_a_group_forms(INIT_KILL_S[device])
    session = start(device, int(os.environ["LOCAL_RANK"]), comm_reproducible=True, comm_timeout_s=10)
    model = problem(session.group.device)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    loader = kf.DataLoader(samples(960, seed=1), model, opt, batch_size=48, batch_micro=8, train_epochs=10)
    for index, step in enumerate(loader):
        if what in ("grow", "init") and index >= GROW_AT and kf.size() == 1 and not Path(killed).exists():
            if index == GROW_AT:
                kf.resize(2)
            time.sleep(0.1)  # leaves the new worker time to start before the run is over
        dies = index == KILL_AT and kf.rank() == 1 and not Path(killed).exists()
        if what == "share" and dies:
            _die_in_share(type(session.group), killed)
        for x, y in step:
            step.loss = F.cross_entropy(model(x), y)
            if what == "backward" and dies:
                _die(killed)
            step.loss.backward()
        opt.step()
        opt.zero_grad()


def _die(killed: str) -> None:
    Path(killed).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_share(kind: type[Group], killed: str) -> None:
    """From now on the second message that shares sums kills this process, with the first one under way."""
    original, calls = kind.share, [0]

    def share(group: Group, *arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            _die(killed)
        return original(group, *arguments, **more)

    kind.share = share  # type: ignore[method-assign]


def _die_while_a_group_forms(after_s: float) -> None:
    """Kills this process so long after it has begun to connect to the others, which are connecting then too."""
    original, killed = Group.__init__, sys.argv[-1]

    def begin(group: Group, rank: int = 0, size: int = 1, *arguments: Any, **more: Any) -> None:
        if size > 1 and after_s == 0.0:
            _die(killed)
        elif size > 1:
            threading.Timer(after_s, _die, (killed,)).start()
        original(group, rank, size, *arguments, **more)

    Group.__init__ = begin  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    sys.exit(main())
