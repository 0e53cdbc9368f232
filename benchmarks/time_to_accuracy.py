"""Does an adaptive policy reach the same quality sooner? Against a fixed small batch, and against DDP at its best.

    python benchmarks/time_to_accuracy.py --json benchmarks/results/time_to_accuracy.json \\
        --plot benchmarks/results/time_to_accuracy.png              # five seeds: 25 minutes on a quiet machine

Three problems (tta_problems.py): digits by a convolutional network and text by a GPT, both with AdamW, and the noisy
quadratic model with SGD. Two worker processes of one thread each (gloo); they run everything, one run after another.

1. A sweep, with a seed of its own: DDP at 1, 2, 4 and 8 times the small batch, each at every rate of the problem, and
   at rates beyond these where a size's best one is the first or last. The small batch's rate is the one with the best
   quality at TARGET_AT. That quality is the sweep's target, and `ddp-best` is the batch size and rate that reaches it
   first, in seconds.
2. For each seed, all systems (tta_systems.py) in an order that is shuffled anew, so that the pairs share the machine's
   state. For a seed all have the same initial model and order of samples.

       ddp-small    DDP, the small batch, its tuned rate
       ddp-best     DDP, the best batch size and rate of the sweep
       fixed        kfuse, the small batch, the same rate: the base of the first ratios
       cosine       the same with a cosine decay over the run, which seesaw replaces
       linear       kfuse, 8 times the batch from the start, lr.scaling=linear
       adascale     the same with lr.scaling=adascale
       gns, goodput, seesaw     kfuse's policies from the small batch on, up to 8 times of it

   The policies are not tuned: they have the small batch's rate, their own defaults, and lr.scaling as documented (sqrt
   for AdamW; for SGD adascale, and linear with seesaw; adascale for goodput). All runs use the same number of samples;
   the rate rises over the first 5 % of them, and is then constant but for the batch size, except for cosine and seesaw.
   kfuse's micro-batches grow with the batch (max_micro_batch): no pass has more samples than DDP's largest.

Quality is measured on held-out data at 20 equal intervals of samples, the same for all, at the first step that reaches
each. The clock stands meanwhile; it starts with the first step and so counts neither the start of processes nor the
loading of data. A measurement counts as the median of it and its two neighbours.

The target is the median over the seeds of the quality that `fixed` has at TARGET_AT = 60 % of its samples. This rule
was set before the recorded runs, and looks at no other system. So larger batches may take up to 1.67 times the samples.
Steps, samples and seconds to the target are those at which the line through the measurements first comes to it.
Worker-seconds are seconds times workers; there are two workers in every run. Ratios are formed within a seed; reported
are their median and the 95 % bootstrap interval of the median. A run that never comes to the target is infinitely slow.

On the quadratic model the loss of each run is compared with its exact distribution (`tta_problems.Recursion`) under the
batch sizes and rates that the run had; this ends with an error where they disagree.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import parser_of, warn_if_busy
from rich.progress import Progress
from tta_problems import LARGEST, PROBLEMS, Problem
from tta_report import at_samples, disagreement, reached, report, target_of
from tta_systems import KFUSE, Job, run
from workers import leave, messages_from, set_torchrun_variables

WORKERS = 2
TARGET_AT = 0.6
"""Part of the samples of a run after which its quality is the target."""
TUNING_SEED = 1000  # none of those compared
_MOST_BEYOND = 4
"""Times that the sweep tries rates beyond those that it has."""
SYSTEMS = ("ddp-small", "ddp-best", *KFUSE)


def work(rank: int, port: int, jobs: Any, messages: Any) -> None:
    """One worker: runs the jobs of its queue until there comes None. Rank 0 sends the records."""
    torch.set_num_threads(1)
    set_torchrun_variables(rank, WORKERS, port)
    dist.init_process_group("gloo")
    problems: dict[tuple[str, float], Problem] = {}
    while (job := jobs[rank].get()) is not None:
        problem = problems.setdefault((job.problem, job.part), PROBLEMS[job.problem](job.part))
        record = run(job, problem)
        if rank == 0:
            messages.put(("record", record))
    dist.barrier()
    leave(messages)


@contextmanager
def workers() -> Iterator[Any]:
    """Context: a function that has the workers run a job, and returns its record."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    context = mp.get_context("spawn")
    jobs, messages = [context.Queue() for _ in range(WORKERS)], context.Queue()
    processes = mp.spawn(work, (store.port, jobs, messages), nprocs=WORKERS, join=False)
    records = messages_from(processes, messages)

    def send(job: Job | None) -> None:
        for queue in jobs:
            queue.put(job)

    def train(job: Job) -> dict[str, Any]:
        send(job)
        record: dict[str, Any] = next(records)[1]
        return record

    try:
        yield train
        send(None)
        list(records)
    finally:
        records.close()  # type: ignore[attr-defined]  # no worker is left alive


def sweep(name: str, part: float, train: Any, advance: Any) -> dict[str, Any]:
    """DDP at each batch size and rate, and beyond: `rates_beyond`. Returns what `choose` picks.

    A run before them, with the largest batch, warms up the processes and is not recorded.
    """
    setting = PROBLEMS[name].setting

    def tried(size: int, lr: float) -> dict[str, Any]:
        record: dict[str, Any] = train(Job(name, "ddp", size, lr, TUNING_SEED, part))
        return record

    train(Job(name, "ddp-small", LARGEST * setting.batch_size, setting.rates[0], TUNING_SEED, part))
    records = []
    for size in (setting.batch_size * 2**k for k in range(LARGEST.bit_length())):
        for lr in setting.rates:
            records.append(tried(size, lr))
            advance()
    for _ in range(_MOST_BEYOND):
        records += [tried(size, lr) for size, lr in rates_beyond(records, setting.batch_size)]
    return choose(records, setting.batch_size)


def rates_beyond(records: list[dict[str, Any]], small: int) -> list[tuple[int, float]]:
    """Batch sizes and rates that remain to be tried: where a size's best rate is the lowest one half of it, where it is
    the highest one twice of it.

    The best rate is that of the best quality for the small batch, as `choose` has it, and else the quickest one; where
    none comes to the target that of the best quality.
    """
    found, chosen = list[tuple[int, float]](), choose(records, small)
    for size in sorted({each["batch_size"] for each in records}):
        runs = [each for each in records if each["batch_size"] == size]
        rates = [each["lr"] for each in runs]
        best = chosen["lr"] if size == small else min(runs, key=lambda each: _order(each, chosen["sweep_target"]))["lr"]
        if best == min(rates):
            found.append((size, best / 2))
        if best == max(rates):
            found.append((size, best * 2))
    return found


def _order(record: dict[str, Any], target: float) -> tuple[float, float]:
    """What records are compared by: seconds to the target, then the quality. The lowest is the best."""
    found = reached(record["curve"], target)
    return float("inf") if found is None else found["seconds"], at_samples(record["curve"], TARGET_AT)


def choose(records: list[dict[str, Any]], small: int) -> dict[str, Any]:
    """From a sweep: the small batch's rate, and the batch size and rate that reaches its target first."""
    tuned = min(
        (each for each in records if each["batch_size"] == small), key=lambda each: at_samples(each["curve"], TARGET_AT)
    )
    target = at_samples(tuned["curve"], TARGET_AT)
    best = min(records, key=lambda each: _order(each, target))
    rows = [
        {
            **{of: each[of] for of in ("batch_size", "lr")},
            "quality": at_samples(each["curve"], TARGET_AT),
            "reached": reached(each["curve"], target),
        }
        for each in records
    ]
    chosen = {"lr": tuned["lr"], "sweep_target": target, "best_batch_size": best["batch_size"], "best_lr": best["lr"]}
    return {**chosen, "sweep": rows}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="fixed and ddp-best always"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", type=float, default=1.0, help="of each run's samples; for a quick look")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.seeds < 1 or not 0 < args.part <= 1:
        parser.error(f"--seeds {args.seeds} --part {args.part}: at least one seed, and a part above 0, at most 1")
    warn_if_busy()
    systems = [name for name in SYSTEMS if name in {"fixed", "ddp-best", *args.systems}]
    tuned, runs = {}, []
    swept = sum(len(PROBLEMS[name].setting.rates) * LARGEST.bit_length() for name in args.problems)
    with Progress(transient=True) as bar, workers() as train:
        task = bar.add_task("sweep", total=swept + args.seeds * len(systems) * len(args.problems))
        for name in args.problems:
            bar.update(task, description=f"{name}: sweep")
            tuned[name] = sweep(name, args.part, train, lambda: bar.advance(task))
        for seed in range(args.seeds):
            for name in args.problems:
                bar.update(task, description=f"{name}: seed {seed}")
                for system in random.Random(f"{seed} {name}").sample(systems, len(systems)):
                    chosen, small = tuned[name], PROBLEMS[name].setting.batch_size
                    best = system == "ddp-best"
                    size, lr = (chosen["best_batch_size"], chosen["best_lr"]) if best else (small, chosen["lr"])
                    runs.append(train(Job(name, system, size, lr, seed, args.part)))
                    bar.advance(task)
    for name in args.problems:
        tuned[name]["target"] = target_of(runs, name, TARGET_AT)
    report(tuned, runs, args.json, args.plot)
    if message := disagreement(runs):
        print(f"ERROR: {message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
