"""Jobs with thousands of injected faults: they end with the bits of undisturbed runs, and no resource grows.

    sudo python benchmarks/soak.py --events 10000 --json benchmarks/results/soak.json     # hours; goes on where it was

Twelve runs, each one training with a seed of its own: kf.fit and a loop over a kf.DataLoader (with a loader process),
with replicated and with sharded state, workers on agents of `kfuse-run --join`, and pair averaging. Events, at random
moments, over 1 to 4 workers: SIGKILL, SIGSTOP, os._exit, an exception at whatever line the worker is; notice (SIGTERM)
to a worker, an agent, the supervisor; growth and shrinkage; the loss of an agent, of a loader process and of the
supervisor (SIGKILL), which is started again as the same command would be; a full disk, and a cut link between two
agents' hosts (in a file system and in network namespaces of the run's own, which need root; else they are left out).

Then the same number of steps on one worker, undisturbed: parameters, every step's metrics and the ledger must be the
same, and no worker but those struck may have been lost. With pair averaging nothing is compared: the samples that are
missing and those that were used twice are counted.

Reported by kind of event: for how long no worker began a step (median, p95, maximum). After each event the supervisor's
and the oldest worker's file descriptors, threads and memory are read, and the files in shared memory. In the last two
thirds of a run both stay, and from 100 events later on (a quarter of the run, if that is less) they are judged. (A cut
link may leave the oldest worker out. Then the next one is watched too, and the one with more events is judged.) Flat
means: over 200 events it rises by no more than 4 descriptors, threads or files, or 2 % of the mean memory, or by no
more than can be told from no trend (95 %). The trend is that among events of one kind with the same number of members;
its error allows for the dependence of events within blocks of 20. Over fewer than 100 events that is not judged.

A message of gloo that a lost worker had half sent may stay under way, and its group with it, until gloo's own timeout:
20 times comm.timeout_s, and 30 s. With the 10 s here that is short beside a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from report import parser_of, progress_bar, table, write
from rich.progress import Progress, TaskID

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import hosts  # noqa: E402
from elastic_job import Job, assert_exact, assert_same_steps  # noqa: E402
from soak_job import MARKS, Plan, samples_of  # noqa: E402

SHARDED = {"comm_state": "sharded"}
RUNS = (
    ("fit", {}),
    ("fit, sharded", {"comm": SHARDED}),
    ("loop", {"loop": True}),
    ("loop, sharded", {"loop": True, "comm": SHARDED}),
    ("agents, sharded", {"agents": True, "comm": SHARDED}),
    ("pair", {"comm": {"comm_sync": "pair"}}),
)
ROUNDS = 2
_HOSTS = 6  # of the agents
_AGENTS_SHARE = 0.25  # of a run's events where each new worker is a new agent, which takes seconds
TRAIN = {"batch_size": 32, "micro_batch": 4, "batch_max": 64, "epochs": 10**6, "train_save_model": False}
SLACK = {"fds": 4.0, "threads": 4.0, "shared": 4.0}
_WARM_UP = 100  # events of a supervisor and a worker: before that caches fill
_BLOCK = 20  # events whose resources depend on each other
_JUDGED_FROM = 100  # of its samples: a trend over fewer is what one worker more or less holds
_SILENT_S = 400.0  # without a new sample, after which a job counts as stuck


def plans(events: int, seed: int, disk: bool, network: bool) -> list[Plan]:
    names = [(f"{name}, {turn + 1}", more) for turn in range(ROUNDS) for name, more in RUNS]
    shares = np.array([_AGENTS_SHARE if "agents" in more else 1.0 for _, more in names])
    counts = np.diff(np.round(np.concatenate([[0], np.cumsum(shares)]) / shares.sum() * events)).astype(int)
    found = []
    for index, ((name, more), count) in enumerate(zip(names, counts, strict=True)):
        given: Any = {**more, "comm": {"comm_bucket_mb": 0.02, "comm_timeout_s": 10, **more.get("comm", {})}}
        if given["comm"].get("comm_sync") is None:
            given["comm"]["comm_reproducible"] = True
        if network and "agents" in more:
            given |= {"network": True, "comm": {**given["comm"], "comm_timeout_s": 5}}  # after which a cut is found
        found.append(Plan(name, int(count), seed + index, disk=disk, **given))
    return found


@contextlib.contextmanager
def file_system(folder: Path, own: bool) -> Iterator[None]:
    """The folder, as a file system of its own where asked for. After an error what is in it stays. Raises
    CalledProcessError.
    """
    folder.mkdir(parents=True)
    if own:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1g", "kfuse-soak", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    except AssertionError:
        shutil.copytree(folder, folder.with_suffix(".failed"))
        raise
    finally:
        if own:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        try:
            with file_system(Path(name) / "disk", own=True):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def start(plan: Plan, directory: Path, steps: int | None = None) -> subprocess.Popen[bytes]:
    """A supervisor. steps: of an undisturbed run on one worker."""
    train: dict[str, Any] = {**TRAIN, "num_workers": int(plan.loop)}
    policy: dict[str, Any] = {}
    if steps is not None:
        train |= {"steps": steps, "num_workers": 0}
    else:
        train |= {"checkpoint_dir": str(directory / "disk" / "checkpoints"), "checkpoint_resume": "auto"}
        train |= {"checkpoint_every_steps": 50, "checkpoint_keep": 2}
        policy = {key: str(directory / key) for key in ("requests", "marks")} | {"pace_s": plan.pace_s}
        (directory / "requests").write_text(json.dumps({"workers": 3}))
    (directory / "plan.json").write_text(json.dumps(asdict(plan)))
    worker = {"comm": plan.comm, "train": train, "policy": policy, "loop": plan.loop}
    (directory / "worker.json").write_text(json.dumps(worker))
    path = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    with (directory / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(HERE / "soak_job.py"), str(directory)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def strike(plan: Plan, directory: Path, bar: Progress, task: TaskID) -> None:
    """All events of a run, under as many supervisors as it takes. Raises AssertionError."""
    expected = {"supervisor lost": -signal.SIGKILL, "supervisor's notice": 143}
    while len(samples := samples_of(directory)) < plan.events:
        process, seen, since = start(plan, directory), len(samples), time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if (now := len(samples_of(directory))) > seen:
                    bar.update(task, advance=now - seen)
                    seen, since = now, time.monotonic()
                if time.monotonic() > since + _SILENT_S:
                    raise AssertionError(f"{plan.name}: no event for {_SILENT_S:.0f} s\n{told(directory)}")
        finally:
            process.kill()
        new = samples_of(directory)[len(samples) :]
        last = new[-1]["kind"] if new else "none"
        if not new or process.returncode != expected.get(last, 0):
            raise AssertionError(f"{plan.name}: ended with {process.returncode} after: {last}\n{told(directory)}")
        job = Job(directory / "disk" / "run")
        end = time.monotonic() + 60
        while left := [*filter(is_worker, job.pids)]:  # they write a last checkpoint
            assert time.monotonic() < end, f"{plan.name}: processes {left} did not end with their supervisor"
            time.sleep(0.02)


def is_worker(pid: int) -> bool:
    """Whether a worker of a soak has this number: that of one that ended long ago may be another process's by now."""
    with contextlib.suppress(OSError):
        return b"soak_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()  # one that has ended (a zombie) has none
    return False


def told(directory: Path) -> str:
    logs = [path.read_text()[-4000:] for path in (directory / "output", directory / "agents.log") if path.exists()]
    return "\n".join([Job(directory / "disk" / "run").told(), *logs])


def measure(plan: Plan, folder: Path, bar: Progress) -> dict[str, Any]:
    """One run's figures. Raises AssertionError where the job did not end as an undisturbed one."""
    directory, alone = folder / "soak", folder / "alone"
    task = bar.add_task(plan.name, total=plan.events)
    started = time.perf_counter()
    network: Any = hosts.network(_HOSTS) if plan.network else contextlib.nullcontext()
    with file_system(directory / "disk", plan.disk), network as found_hosts:
        every = [] if found_hosts is None else [found_hosts[0], *found_hosts[1]]
        (directory / "hosts.json").write_text(json.dumps([asdict(host) for host in every]))
        strike(plan, directory, bar, task)
        wall_s, job = time.perf_counter() - started, Job(directory / "disk" / "run")
        found: dict[str, Any] = {"plan": asdict(plan), "wall_s": wall_s, **figures(plan, directory, job)}
        if not plan.exact:
            return found | {"samples": uses(job)}
        (alone / "disk").mkdir(parents=True)
        bar.update(task, description=f"{plan.name}: undisturbed")
        undisturbed = start(plan, alone, job.summary["steps"])
        assert undisturbed.wait() == 0, told(alone)
        assert_exact(job)
        assert_same_steps(job, Job(alone / "disk" / "run"))
        return found | {"params_sha256": job.summary["params_sha256"]}


def figures(plan: Plan, directory: Path, job: Job) -> dict[str, Any]:
    """Of all events; gaps by kind, resources, and losses that nothing had caused."""
    samples = samples_of(directory)
    marks = np.sort(np.fromfile(directory / "marks", dtype=MARKS)["time"])
    gaps: dict[str, list[float]] = {}
    for sample, after in zip(samples, [*samples[1:], None], strict=True):
        ended = sample["ended"] or (after["began"] if after else sample["began"])
        first, last = np.searchsorted(marks, [sample["began"], ended])
        after_it = np.diff([sample["began"], *marks[first : last + 1]])  # before it may be the gap of a restart
        gaps.setdefault(sample["kind"], []).append(float(after_it.max(initial=0.0)))
    failures, evicted = job.of_kind("failure"), [cut["evicted"] for cut in job.of_kind("cut")]
    strikes = {"kill", "exception", "exit", "stop", "agent lost"}
    return {
        "events": Counter(sample["kind"] for sample in samples),
        "steps": job.summary["steps"],
        "supervisors": 1 + samples[-1]["incarnation"],
        "gaps_s": gaps,
        "resources": resources(plan, samples),
        "lost": len(failures),
        "struck": sum(sample["kind"] in strikes for sample in samples) + sum(map(len, evicted)),
        "hows": Counter(failure["how"] for failure in failures),
    }


def resources(plan: Plan, samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each resource its trend, what it may be, and whether it is flat."""
    late, warm_up = samples[plan.undisturbed_from :], min(_WARM_UP, plan.events // 4)
    watched = late[warm_up:]
    since = {sample["witness_pid"]: sample["event"] for sample in reversed(late)}  # of each oldest worker its first
    warm = [sample for sample in late if sample["event"] >= since[sample["witness_pid"]] + warm_up]
    [(pid, _)] = Counter(sample["witness_pid"] for sample in warm).most_common(1)
    of_one = [sample for sample in warm if sample["witness_pid"] == pid]
    series = {"shared files": (watched, [float(s["shared"]) for s in watched])}
    for who, its in (("supervisor", watched), ("witness", of_one)):
        for name in ("fds", "threads", "rss_mib"):
            series[f"{who} {name}"] = its, [float(s[who][name]) for s in its]
    found = {}
    for name, (its, values) in series.items():
        if len(its) < _JUDGED_FROM:
            continue
        seen = trend(its, values)
        allowed = next((most for kind, most in SLACK.items() if kind in name), 0.02 * seen["mean"])
        flat = seen["growth"] <= allowed or seen["growth"] - 1.96 * seen["error"] <= 0
        found[name] = {**seen, "allowed": allowed, "flat": flat}
    return found


def trend(samples: list[dict[str, Any]], values: list[float]) -> dict[str, float]:
    """mean: of the values. growth: of their trend over 200 events, with its standard error.

    Events of one kind with the same number of members are compared: these decide how many groups of workers there are.
    What one event leaves is there at the next ones too, so the error is that of sums over blocks of events.
    """
    number, target = (np.array(each, dtype=float) for each in ([s["event"] for s in samples], values))
    mean, alike = target.mean(), np.array([f"{s['kind']} {s['members']}" for s in samples])
    for case in np.unique(alike):
        for each in (number, target):
            each[alike == case] -= each[alike == case].mean()
    spread = number @ number
    slope = number @ target / spread
    shares = number * (target - slope * number)
    sums = np.array([shares[first : first + _BLOCK].sum() for first in range(0, len(shares), _BLOCK)])
    return {"mean": float(mean), "growth": float(200 * slope), "error": float(200 * np.sqrt(sums @ sums) / spread)}


def uses(job: Job) -> dict[str, int]:
    """With pair averaging: of the complete epochs' samples how many are in no line of the ledger, and in several."""
    epoch_of = {record["step"]: record["epoch"] for record in job.metrics}
    complete, used = job.summary["epochs"], Counter[tuple[int, int]]()
    for entry in job.ledger:
        epoch = entry.get("epoch", epoch_of.get(entry["step"]))
        if epoch is not None and epoch < complete:
            used.update((epoch, index) for index in entry["indices"])
    size = 1 + max((index for _, index in used), default=-1)
    return {"asked": size * complete, "missing": size * complete - len(used), "twice": sum(used.values()) - len(used)}


def show(runs: dict[str, dict[str, Any]]) -> bool:
    """Prints both tables. Whether all is as it should be."""
    events = Counter[str]()
    gaps: dict[str, list[float]] = {}
    for run in runs.values():
        events.update(run["events"])
        for kind, each in run["gaps_s"].items():
            gaps.setdefault(kind, []).extend(each)
    rows = [
        (kind, f"{count:,}", *(f"{figure:.2f}" for figure in np.quantile(gaps[kind], [0.5, 0.95, 1])))
        for kind, count in events.most_common()
    ]
    title = f"{events.total():,} events in {len(runs)} runs: for how long no worker began a step, s"
    table(title, ("event", "times", "median", "p95", "largest"), rows)
    rows, good, notes = [], True, list[str]()
    for name, run in runs.items():
        rises = [f"{what} {each['growth']:+.1f}" for what, each in run["resources"].items() if not each["flat"]]
        quiet = "nothing" if run["resources"] else "not judged: too few events"
        good &= not rises and run["lost"] <= run["struck"]
        counts = f"{sum(run['events'].values()):,}", f"{run['steps']:,}", f"{run['lost']} / {run['struck']}"
        rows.append((name, *counts, str(run["supervisors"]), ", ".join(rises) or quiet))
        if run["lost"] > run["struck"]:
            notes.append(f"{name}: more were lost than struck: {run['hows']}")
        if samples := run.get("samples"):
            counted = f"{samples['missing']:,} missing, {samples['twice']:,} twice"
            notes.append(f"{name}: of {samples['asked']:,} samples {counted}")
    heads = ("run", "events", "steps", "lost / struck", "supervisors", "what rises")
    table("\nthe bits and the ledger of undisturbed runs, and what is held", heads, rows)
    print(*notes, sep="\n")
    return good


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--events", type=int, default=240, help="of all runs together, at least 120 (default 240)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="only runs whose names begin so")
    args = parser.parse_args()
    if args.events < 120:
        parser.error(f"--events {args.events}: allowed is 120 or more")
    disk, no_network = may_mount(), hosts.why_not()
    if not disk:
        print("no file system of the run's own may be mounted here: the disk is never full")
    if no_network:
        print(f"{no_network}: no link is cut")
    every = plans(args.events, args.seed, disk, not no_network)
    chosen = [plan for plan in every if plan.name.startswith(tuple(args.runs or [""]))]
    if not chosen:
        parser.error(f"--runs {' '.join(args.runs)}: allowed are {', '.join(name for name, _ in RUNS)}")
    runs: dict[str, dict[str, Any]] = {}
    if args.json is not None and args.json.exists():
        runs = json.loads(args.json.read_text()).get("runs", {})
    with progress_bar() as bar:
        for plan in chosen:
            if runs.get(plan.name, {}).get("plan") == json.loads(json.dumps(asdict(plan))):
                continue
            folder = Path(tempfile.mkdtemp(prefix="kfuse-soak-"))  # stays where the run fails
            try:
                runs[plan.name] = measure(plan, folder, bar)
            except AssertionError as error:
                raise AssertionError(f"{folder} has the run") from error
            shutil.rmtree(folder)
            write(args.json, ("torch", "numpy"), runs=runs)
    return 0 if show(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
