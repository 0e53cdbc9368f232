"""Machines that are taken away with 5 s of notice: nothing is repeated, and the others wait as at a planned shrink.

    python benchmarks/notices.py --json benchmarks/results/notices.json

Three jobs of three workers with sharded state, one after the other. Notice is given to workers (SIGTERM), to agents
of `kfuse-run --join` that have a worker each (SIGTERM), and to the nodes of a Ray cluster on this machine (drained).
Each third notice is for two at once. New workers take the places, on new agents and nodes. Before each notice the job
shrinks by as many workers as planned, by the policy's decision, and grows again; or after it, by chance.

Each job must end with the bits, the metrics and the ledger of an undisturbed run on one worker, without a lost worker.
Compared is the gap at a shrink and at a notice: the longest time between two steps' beginnings on a worker that stays,
from the decision or notice until two steps after the view without the others; and until two steps after their processes
have ended. That takes a processor, and after a notice another worker's start does, which a shrink has not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from report import parser_of, progress_bar, table, warn_if_busy, write

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from driven import Driver, Recorder, run_beside  # noqa: E402
from elastic_job import Job, assert_exact, assert_same_steps, compose, override, parent, words  # noqa: E402
from joining import Agents  # noqa: E402
from soak_job import GRACE_S, MARKS  # noqa: E402
from warm import WarmLauncher  # noqa: E402

from kfuse.elastic import job as control  # noqa: E402
from kfuse.elastic.launchers import RayLauncher  # noqa: E402
from kfuse.elastic.processes import State, Worker  # noqa: E402
from kfuse.elastic.supervisor import Supervisor  # noqa: E402
from kfuse.settings.tree import flat  # noqa: E402

WORKERS, PREEMPTED = 3, 2  # the second: the reason's number in Ray's protocol
TRAINING = words(
    "comm=reproducible comm.state=sharded comm.bucket_mb=0.02 lr.base=0.003 train.clip_norm=0.5 model=mlp",
    "model.hidden=[64] model.dropout=0.1 data._target_=soak_worker.blobs policy._target_=soak_worker.Obedient",
    f"batch.size=32 batch.micro=4 batch.max=64 train.heldout_every=50 workers.max={WORKERS} observe.ledger=true",
    f"workers.threads=1 elastic.grace_s={GRACE_S} train.epochs=1000000",
)
Take = Callable[[list[Worker]], Awaitable[None]]
Replace = Callable[[int], Awaitable[None]]


@dataclass
class Places:
    """Where workers run, and how notice is given there. Everything that it starts ends with `closing`."""

    launcher: Any
    take: Take  # notice to where these workers run
    replace: Replace = field(default=lambda count: asyncio.sleep(0))  # so many places that can be had instead
    closing: ExitStack = field(default_factory=ExitStack)


def workers(directory: Path) -> Places:
    async def take(chosen: list[Worker]) -> None:
        for worker in chosen:
            os.kill(worker.pid or 0, signal.SIGTERM)

    return Places(WarmLauncher(directory.with_suffix(".log")), take)


def agents(directory: Path) -> Places:
    its, closing = Agents(directory.parent, None, GRACE_S), ExitStack()
    closing.callback(its.end)

    async def take(chosen: list[Worker]) -> None:
        for worker in chosen:
            os.kill(parent(worker.pid or 0), signal.SIGTERM)

    return Places(its.launcher, take, its.start, closing)


def nodes(directory: Path) -> Places:
    import ray
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    closing = ExitStack()
    closing.callback(cluster.shutdown)
    ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
    closing.callback(ray.shutdown)
    client, launcher = GcsClient(cluster.address), RayLauncher()
    drained: list[Any] = []

    async def replace(count: int) -> None:
        for node in drained:
            cluster.remove_node(node)
        drained.clear()
        for _ in range(count):
            cluster.add_node(num_cpus=1)  # here: Ray is not to be called from several threads

    async def take(chosen: list[Worker]) -> None:
        for worker in chosen:
            name = launcher._nodes[worker.process]  # type: ignore[index]
            drained.extend(node for node in cluster.list_all_nodes() if node.node_id == name)
            assert client.drain_node(name, PREEMPTED, "benchmark", 0)[0]

    return Places(launcher, take, replace, closing)


PLACES = {"workers": workers, "agents": agents, "nodes": nodes}


@dataclass
class Change:
    """Workers that leave, and those that stay."""

    kind: str
    leaving: int
    began: float  # as it was asked for, on the machine's monotonic clock
    until: list[float]  # two steps after the view without the workers, and two after their processes have ended
    staying: list[int]  # their processes

    def gaps_s(self, marks: np.ndarray) -> list[float]:
        """The longest time between two steps' beginnings, on any worker that stays: for each of `until`."""
        found = np.zeros((len(self.staying), len(self.until)))
        for row, pid in zip(found, self.staying, strict=True):
            times = np.sort(marks["time"][marks["pid"] == pid])
            first = max(0, np.searchsorted(times, self.began) - 1)
            row[:] = [np.diff(times[first:end]).max() for end in np.searchsorted(times, self.until)]
        return [float(each) for each in found.max(0)]


class Notices(Driver):
    """Planned shrinks and notices in turn."""

    def __init__(
        self,
        supervisor: Supervisor,
        recorder: Recorder,
        requests: Path,
        places: Places,
        count: int,
        chance: random.Random,
        done: Callable[[int], None],
    ) -> None:
        """count: of notices. done: called after some."""
        super().__init__(supervisor, recorder, requests)
        self._places, self._count, self._chance, self._done = places, count, chance, done
        self.changes: list[Change] = []

    async def run(self) -> None:
        await self._places.replace(WORKERS)
        await self._whole()
        given = turn = 0
        while given < self._count:
            turn += 1
            leaving = min(2 if turn % 3 == 0 else 1, self._count - given)
            for kind in self._chance.sample(["shrink", "notice"], 2):  # in random order: the second takes longer
                await self._change(kind, leaving)
                if kind == "shrink":
                    self.ask_for(WORKERS)
                else:
                    await self._places.replace(leaving)
                await self._whole()
            given += leaving
            self._done(leaving)
        self.supervisor.stop("interrupted")

    async def _whole(self) -> None:
        await self.recorder.until(f"{WORKERS} members", lambda: self.settled(WORKERS))
        await self.steps(6)

    async def _change(self, kind: str, leaving: int) -> None:
        await asyncio.sleep(self._chance.uniform(0, 0.1))
        members, began = self.members(), time.monotonic()
        chosen = self._chance.sample(members, leaving)
        if kind == "notice":
            await self._places.take(chosen)
        else:
            self.ask_for(WORKERS - leaving)
        until, told = list[float](), f"{leaving} workers to leave at a {kind}"
        await self.recorder.until(told, lambda: self.settled(WORKERS - leaving))
        await self.steps(2)
        until.append(time.monotonic())
        chosen = [worker for worker in members if self.supervisor.processes.rank_of(worker) is None]
        await self.recorder.until(told, lambda: all(worker.state is State.ENDED for worker in chosen))
        await self.steps(2)
        until.append(time.monotonic())
        staying = [worker.pid or 0 for worker in members if worker not in chosen]
        self.changes.append(Change(kind, leaving, began, until, staying))


async def run(directory: Path, overrides: list[str], places: Places, **given: Any) -> list[Change]:
    """One job. given: arguments of `Notices`; none: nothing happens to it. Raises JobFailed, AssertionError."""
    config, recorder = compose([*TRAINING, *overrides]), Recorder(directory)
    supervisor = Supervisor(places.launcher, {**config, "run_dir": str(directory)}, recorder, control.Job(flat(config)))
    notices = Notices(supervisor, recorder, places=places, **given) if given else None
    try:
        await run_beside(supervisor, None if notices is None else notices.run())
    finally:
        recorder.directory.close()
    return [] if notices is None else notices.changes


def measure(kind: str, count: int, seed: int, done: Callable[[int], None]) -> dict[str, Any]:
    """One job's figures. Raises AssertionError where it did not end as an undisturbed one."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        requests, written = directory / "requests", directory / "marks"
        requests.write_text(json.dumps({"workers": WORKERS}))
        policy = [override(f"+policy.{key}", value) for key, value in [("requests", str(requests)), ("pace_s", 0.03)]]
        policy.append(override("+policy.marks", str(written)))
        places, settings = PLACES[kind](directory / "places"), [*policy, f"workers.count={WORKERS}"]
        given = {"requests": requests, "count": count, "chance": random.Random(seed), "done": done}
        with places.closing:
            changes = asyncio.run(run(directory / "job", settings, places, **given))
        job = Job(directory / "job")
        alone = workers(directory / "alone_places")
        asyncio.run(run(directory / "alone", [f"train.steps={job.summary['steps']}", "workers.count=1"], alone))
        assert_exact(job)
        assert_same_steps(job, Job(directory / "alone"))
        marks = np.fromfile(written, dtype=MARKS)
        reasons = Counter(view["reason"] for view in job.views)
        assert not job.of_kind("failure") and not {"failure", "restart"} & set(reasons), job.told()
        assert len(job.of_kind("notice")) == count
        return {
            "notices": count,
            "steps": job.summary["steps"],
            "views": reasons,
            "gaps_s": [[change.kind, change.leaving, *change.gaps_s(marks)] for change in changes],
        }


def ratio(gaps: list[list[Any]], until: int, chance: np.random.Generator) -> list[float]:
    """The median gap at a notice over that at a shrink, and its 95 % bounds by bootstrap."""
    by_kind = [np.array([gap[until] for which, _, *gap in gaps if which == kind]) for kind in ("notice", "shrink")]
    drawn = [np.median(chance.choice(each, (4000, len(each))), axis=1) for each in by_kind]
    medians = [float(np.median(each)) for each in by_kind]
    return [medians[0] / medians[1], *map(float, np.quantile(drawn[0] / drawn[1], [0.025, 0.975]))]


def show(jobs: dict[str, dict[str, Any]]) -> None:
    rows = []
    for kind, job in jobs.items():
        for until, what in enumerate(["view", "end"]):
            at = {w: [gap[until] * 1e3 for name, _, *gap in job["gaps_s"] if name == w] for w in ("shrink", "notice")}
            figures = (f"{np.median(gaps):.0f}" for gaps in at.values())
            largest = " / ".join(f"{max(gaps):.0f}" for gaps in at.values())
            middle, low, high = job["ratios"][until]
            rows.append((kind, str(job["notices"]), what, *figures, largest, f"{middle:.2f} ({low:.2f}-{high:.2f})"))
    heads = ("notice to", "times", "gap to", "shrink, ms", "notice, ms", "largest", "ratio (95 %)")
    table("the bits, metrics and ledger of undisturbed runs; no micro-batch repeated", heads, rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--notices", type=int, default=100, help="in all, at least 12 (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.notices < 12:
        parser.error(f"--notices {args.notices}: allowed is 12 or more")
    warn_if_busy()
    jobs: dict[str, dict[str, Any]] = {}
    path = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}), progress_bar() as bar:
        task = bar.add_task("notices", total=args.notices)
        for index, kind in enumerate(PLACES):
            count = args.notices // 3 + (index < args.notices % 3)
            bar.update(task, description=f"notices to {kind}")
            jobs[kind] = measure(kind, count, args.seed + index, lambda given: bar.update(task, advance=given))
            chance = np.random.default_rng(args.seed)
            jobs[kind]["ratios"] = [ratio(jobs[kind]["gaps_s"], until, chance) for until in range(2)]
    show(jobs)
    write(args.json, ("torch", "numpy", "ray"), grace_s=GRACE_S, workers=WORKERS, jobs=jobs)


if __name__ == "__main__":
    main()
