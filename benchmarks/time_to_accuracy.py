"""Is an adaptive policy as quick as the best fixed batch, without the sweep that finds it?

    python benchmarks/time_to_accuracy.py --json FILE        # on two cores: an hour and a half; text alone half an hour
    python benchmarks/time_to_accuracy.py --link 200mbit --problems text --json FILE

Three problems (tta_problems.py): digits by a convolutional network and text by a GPT, both with AdamW, and the noisy
quadratic model with SGD. Quality is measured on held-out data at 20 equal intervals of a problem's samples; a
measurement counts as the median of it and its two neighbours. The target is the median over the seeds of the quality
that the small batch has after 60 % of these samples. A run may take twice
these samples to it (in the sweep and on a link the small batch takes them once).

**Computed cost** (the default): a step costs r samples, and its own: steps x r + samples, for r = 16, 64 and 256. One
process a run, as many at a time as there are cores: no time is measured. goodput gets (r + B) / 1000 as its step times.

1. A sweep, with a seed of its own: 1, 2, 4 and 8 times the small batch, each at every rate of the problem, and at rates
   beyond these where a size's best one is the first or last. The small batch's rate is the one with the best quality
   after 60 %.
2. For each seed, with the same initial model and order of samples: the small batch; for each r the three batch sizes
   and rates of least cost in the sweep, of which `best` has the least cost over all seeds: a plain loop, no policy;
   policies from the small batch on, at its rate, up to 8 times of it, with their defaults and lr.scaling as documented;
   `oracle`, the batch sqrt(r x the true noise scale), measured on 2,048 samples every 20 steps; and `ramp`, what
   `kfuse ramp` makes of the batch sizes that goodput (r = 64) chose for the next seed, in a plain loop.
3. Text, within a cosine decay, at equal samples: policies, beside the best of fixed batches and rates; seesaw in place
   of the decay; and within wsd.

**Real seconds** (`--link`): two workers of one thread, in network namespaces joined by links of this rate; DDP with the
small batch, and with the three settings of least seconds by the sweep's steps and step times measured on this link, of
which `best` takes the least seconds over all seeds; and policies.
Runs of a seed come in an order that is shuffled anew. The clock stands while quality is measured.

Ratios are formed within a seed; reported are their median and the 95 % bootstrap interval of the median. A run that
never comes to the target is infinitely slow.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from links import join, links
from report import parser_of, warn_if_busy
from rich.console import Console
from rich.progress import Progress
from tta_problems import LARGEST, PROBLEMS
from tta_report import FIXED_COSTS, at_samples, cost, final, reached, report
from tta_systems import Job, run
from workers import free_port, messages_from

from kfuse.tools.ramp import ramp_of

TARGET_AT = 0.6
"""Part of a problem's samples after which the small batch's quality is the target."""
TUNING_SEED = 1000  # none of those compared
CANDIDATES = 3
"""Settings of the sweep that are compared over all seeds, to find the best: one run of each does not tell."""
WITHIN_DECAY = ("goodput", "gns", "gns, factor 0.25", "gns, factor 0.15", "critical_batch")
_MOST_BEYOND = 2
"""Times that the sweep tries rates beyond those that it has."""
Run = dict[str, Any]
Train = Callable[[Sequence[Job]], list[Run]]


def in_this_process(job: Job) -> Run:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    return run(job, _problem(job.problem, job.part))


_problem = lru_cache(lambda name, part: PROBLEMS[name](part))


@contextmanager
def processes() -> Iterator[Train]:
    """Context: a function that makes runs, as many at a time as there are cores."""
    with ProcessPoolExecutor(os.cpu_count(), mp.get_context("spawn")) as pool:
        yield lambda jobs: list(pool.map(in_this_process, jobs))


def work(rank: int, places: Any, port: int, jobs: Any, messages: Any) -> None:
    """One of several workers: runs the jobs of its queue. Rank 0 sends the records."""
    store = join(places, rank, port)  # noqa: F841  # it is needed as long as the workers are there
    os.environ["GLOO_SOCKET_IFNAME"] = places[rank].interface
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    while True:  # until it is killed
        job = jobs[rank].get()
        record = run(job, _problem(job.problem, job.part))
        if rank == 0:
            messages.put(("record", record))


@contextmanager
def linked(link: str) -> Iterator[Train]:
    """Context: a function that makes runs of two workers on such a link, one after the other."""
    context = mp.get_context("spawn")
    jobs, messages = [context.Queue() for _ in range(2)], context.Queue()
    with links(2, link) as places:
        both = mp.spawn(work, (places, free_port(), jobs, messages), nprocs=2, join=False)
        records = messages_from(both, messages)

        def train(asked: Sequence[Job]) -> list[Run]:
            found = []
            for job in asked:
                for queue in jobs:
                    queue.put(job)
                found.append(next(records)[1])
            return found

        try:
            yield train
        finally:
            records.close()  # type: ignore[attr-defined]  # no worker is left alive


# -- the sweep -------------------------------------------------------------------------------------------------------


def sweep(name: str, part: float, train: Train) -> Run:
    """Each batch size and rate, and rates beyond. Returns the small batch's rate, its target, and all runs."""
    setting = PROBLEMS[name].setting
    small, rates = setting.batch_size, setting.rates
    base = Job(name, "fixed", small, rates[0], TUNING_SEED, part)
    records = train([replace(base, lr=lr) for lr in rates])
    for _ in range(_MOST_BEYOND):
        records += train([replace(base, lr=lr) for _, lr in rates_beyond(records, _quality)])
    tuned = min(records, key=_quality)
    target = _quality(tuned)
    larger = [
        replace(base, batch_size=small * 2**k, lr=lr, times=2, target=target)
        for k in range(1, LARGEST.bit_length())
        for lr in rates
    ]
    records += train(larger)
    for _ in range(_MOST_BEYOND):
        others = [each for each in records if each["batch_size"] > small]
        beyond = rates_beyond(others, lambda each: cost(each, target, FIXED_COSTS[1]))
        records += train([replace(larger[0], batch_size=size, lr=lr) for size, lr in beyond])
    return {"lr": tuned["lr"], "sweep_target": target, "sweep": records}


def cheapest(tuned: Run, r: float) -> list[tuple[int, float]]:
    """The batch sizes and rates of the sweep that cost least."""
    runs = sorted(tuned["sweep"], key=lambda each: cost(each, tuned["sweep_target"], r))
    return [(each["batch_size"], each["lr"]) for each in runs[:CANDIDATES]]


def rates_beyond(records: Sequence[Run], by: Callable[[Run], float]) -> list[tuple[int, float]]:
    """Batch sizes and rates to try besides: where a size's best rate is the lowest, half of it; the highest, twice."""
    found = []
    for size in sorted({each["batch_size"] for each in records}):
        runs = [each for each in records if each["batch_size"] == size]
        rates, best = [each["lr"] for each in runs], min(runs, key=by)["lr"]
        found += [(size, best / 2)] * (best == min(rates)) + [(size, best * 2)] * (best == max(rates))
    return found


def _quality(record: Run) -> float:
    return at_samples(record["curve"], TARGET_AT / record["times"])


# -- the comparisons -------------------------------------------------------------------------------------------------


def computed(name: str, part: float, seeds: int, train: Train, advance: Callable[[str], None]) -> Run:
    """The sweep and the runs of all seeds by computed cost, and those within a decay."""
    advance(f"{name}: sweep")
    tuned = sweep(name, part, train)
    setting, lr = PROBLEMS[name].setting, tuned["lr"]
    truth_until = 0 if name == "quadratic" else 600
    small = [
        Job(name, "small", setting.batch_size, lr, seed, part, times=2, truth_until=truth_until)
        for seed in range(seeds)
    ]
    advance(f"{name}: small batch")
    runs = train(small)
    target = tuned["target"] = median(map(_quality, runs))
    jobs = []
    others = [replace(job, target=target, truth_until=0) for job in small]
    for job in others:
        for size, rate in sorted({each for r in FIXED_COSTS for each in cheapest(tuned, r)}):
            jobs.append(replace(job, system="fixed", batch_size=size, lr=rate))
        jobs.append(replace(job, system="gns"))
        jobs += [replace(job, system="goodput", r=r) for r in FIXED_COSTS]
        if name != "quadratic":
            jobs += [replace(job, system="oracle", r=r) for r in FIXED_COSTS]
    advance(f"{name}: policies")
    runs += train(jobs)
    ramps = {each["seed"]: ramp(each) for each in runs if each["system"] == "goodput" and each["r"] == 64}
    advance(f"{name}: ramps, decays")
    if name != "quadratic":
        runs += train([replace(job, system="ramp", ramp=ramps[(job.seed + 1) % seeds]) for job in others])
    if name == "text":
        tuned["decay"] = within_decay(name, part, seeds, tuned, train)
    return {"tuned": tuned, "runs": runs}


def ramp(record: Run) -> tuple[tuple[int, int], ...]:
    """What `kfuse ramp` makes of a run."""
    changes, steps, samples = dict(record["batch_sizes"]), [], 0
    size = changes[0]
    for step in range(record["curve"][-1][1]):
        size = changes.get(step, size)
        samples += size
        steps.append((samples, size))
    return tuple(ramp_of(steps))


def within_decay(name: str, part: float, seeds: int, tuned: Run, train: Train) -> list[Run]:
    """Runs at equal samples: the best fixed batch and rate within a cosine decay, found by a sweep, and policies.

    The policies start from the small batch, at the rate of the best fixed one.
    """
    setting, lr = PROBLEMS[name].setting, tuned["lr"]
    base = Job(name, "fixed", setting.batch_size, lr, TUNING_SEED, part, decay="cosine")
    swept = train(
        [replace(base, batch_size=setting.batch_size * 2**k, lr=lr * 2**power) for k in range(3) for power in (0, 1, 2)]
    )
    for _ in range(_MOST_BEYOND):
        beyond = rates_beyond(swept, lambda each: final(each["curve"]))
        swept += train([replace(base, batch_size=size, lr=rate) for size, rate in beyond])
    best = min(swept, key=lambda each: final(each["curve"]))
    jobs = []
    for seed in range(seeds):
        job = replace(base, seed=seed, lr=best["lr"])
        for decay in ("cosine", "wsd"):
            jobs.append(replace(job, batch_size=best["batch_size"], decay=decay))
            jobs += [replace(job, system=system, r=64, decay=decay) for system in WITHIN_DECAY]
        jobs.append(replace(job, system="seesaw", decay="none"))
    return train(jobs)


def on_a_link(name: str, part: float, seeds: int, train: Train, advance: Callable[[str], None]) -> Run:
    """The sweep by one process, and then seconds on the link."""
    advance(f"{name}: sweep")
    with processes() as alone:
        tuned = sweep(name, part, alone)
    small, lr = PROBLEMS[name].setting.batch_size, tuned["lr"]
    base = Job(name, "small", small, lr, 0, part)
    advance(f"{name}: step times")
    sizes = sorted({each["batch_size"] for each in tuned["sweep"]})
    short = [replace(base, system="fixed", batch_size=size, part=part / 10) for size in sizes]
    tuned["step_s"] = {each["batch_size"]: step_seconds(each) for each in train(short)}
    quickest = sorted(tuned["sweep"], key=lambda each: _seconds(each, tuned))[:CANDIDATES]
    starts = train([replace(base, seed=seed) for seed in range(seeds)])
    target = tuned["target"] = median(map(_quality, starts))
    runs = []
    for seed in range(seeds):
        advance(f"{name}: seed {seed}")
        job = replace(base, seed=seed, times=2, target=target)
        others = [replace(job, system="fixed", batch_size=each["batch_size"], lr=each["lr"]) for each in quickest]
        others += [replace(job, system=system) for system in ("goodput", "gns")]
        runs += train(random.Random(f"{seed} {name}").sample(others, len(others)))
    return {"tuned": tuned, "runs": starts + runs}


def step_seconds(record: Run) -> float:
    """The median step's seconds, from one evaluation to the next."""
    rows = record["curve"]
    return median((b[2] - a[2]) / (b[1] - a[1]) for a, b in pairwise(rows) if b[1] > a[1])


def _seconds(record: Run, tuned: Run) -> float:
    return reached(record["curve"], tuned["sweep_target"])["steps"] * float(tuned["step_s"][record["batch_size"]])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", type=float, default=1.0, help="of each run's samples; for a quick look")
    parser.add_argument("--link", help="measure seconds on such a link, as 100mbit")
    args = parser.parse_args()
    if args.seeds < 1 or not 0 < args.part <= 1:
        parser.error(f"--seeds {args.seeds} --part {args.part}: at least one seed, and a part above 0, at most 1")
    found: dict[str, Run] = {}
    trainer = linked(args.link) if args.link else processes()
    with Progress(transient=True, console=Console(stderr=True)) as bar, trainer as train:
        task = bar.add_task("", total=None)

        def advance(what: str) -> None:
            bar.update(task, description=what)

        for name in args.problems:
            given = (name, args.part, args.seeds)
            if args.link:
                warn_if_busy()
                found[name] = on_a_link(*given, train, advance)
            else:
                found[name] = computed(*given, train, advance)
    report(found, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
