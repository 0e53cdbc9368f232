"""What an audit costs (comm.audit_every): steps with one each, beside the same steps without.

    python benchmarks/audit.py --json benchmarks/results/audit.json
    python benchmarks/audit.py --workers 1 --micro-batches 8

Spawns the workers (gloo, one thread each), which train a GPT by kf.fit in reproducible mode. Training with an audit in
every step (N = 1) and without any take turns, in blocks of a few steps, so that a drifting machine drifts for both.
Reported are medians over rounds, each with its 95 % percentile-bootstrap interval: of wall time and of the CPU time of
all workers, what an audited step takes over one that is not (minus 1), beside the share of a micro-batch that is run
again: n / M of the wall time and 1 / M of the compute. With an audit every N steps the cost is the N-th part.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from machine import parser_of, warn_if_busy, write
from step_report import median_interval
from workers import messages_of, set_torchrun_variables

import kfuse as kf
from kfuse.models import GPT
from kfuse.session import current

VOCABULARY, BLOCK, SAMPLES = 256, 64, 2
WARM = 2  # steps of a block that are not timed: kf.fit sets up what a run needs


class Clock(kf.BasePolicy):
    """Wall and CPU time of this process after each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def after_step(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.wall.append(time.perf_counter())
        self.cpu.append(used.ru_utime + used.ru_stime)


def worker(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    """One worker: all rounds; rank 0 hands back [round][audited][wall, cpu], seconds a step."""
    torch.set_num_threads(1)
    set_torchrun_variables(rank, args.workers, port)
    session = kf.init(comm_reproducible=True, comm_check_every=None)
    torch.manual_seed(0)
    model = GPT(VOCABULARY, BLOCK, 6, 4, 256, dropout=0.1)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (64 * args.micro_batches, BLOCK + 1))
    data = (tokens[:, :-1], tokens[:, 1:])

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def block(every: int | None) -> list[float]:
        session.comm = replace(current().comm, audit_every=every)
        clock, batch = Clock(), SAMPLES * args.micro_batches
        arguments: dict[str, Any] = {"train_steps": WARM + args.steps, "batch_size": batch, "batch_micro": SAMPLES}
        kf.fit(model, data, opt, kf.Hook(clock), train_epochs=None, loss_fn=loss, observe_progress=False, **arguments)
        spent = [(times[-1] - times[WARM - 1]) / args.steps for times in (clock.wall, clock.cpu)]
        together = [each.tolist() for each in session.group.all_gather(torch.tensor(spent), "times")]
        return [max(wall for wall, _ in together), sum(cpu for _, cpu in together)]

    chance, rounds = random.Random(1), []
    block(1)
    for _ in range(args.rounds):
        order = [None, 1]
        chance.shuffle(order)
        times = {every: block(every) for every in order}
        rounds.append([times[None], times[1]])
    if rank == 0:
        results.put(("outcome", rounds))


def main() -> None:
    """Measures, prints three lines, and writes the figures where asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, over all workers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a block")
    args = parser.parse_args()
    warn_if_busy()
    ((_, outcome),) = messages_of(args.workers, worker, args)
    rounds = np.array(outcome)  # [round, audited, (wall, cpu)]
    plain, audited = rounds[:, 0], rounds[:, 1]
    expected = {"wall": args.workers / args.micro_batches, "cpu": 1 / args.micro_batches}
    figures = {}
    for index, name in enumerate(expected):
        over = median_interval(audited[:, index] / plain[:, index] - 1)
        medians = [round(1e3 * float(np.median(part[:, index])), 2) for part in (plain, audited)]
        figures[name] = {"plain_ms": medians[0], "audited_ms": medians[1], "over": over, "of_one_more": expected[name]}
        print(
            f"{name}: {medians[0]:.1f} ms a step, {medians[1]:.1f} ms with an audit in each: {over['median']:+.3f} "
            f"({over['low']:+.3f} to {over['high']:+.3f}); one micro-batch more is {expected[name]:+.3f}"
        )
    settings = {name: getattr(args, name) for name in ("workers", "micro_batches", "rounds", "steps")}
    settings |= {"samples": SAMPLES, "block": BLOCK, "threads": 1}
    write(args.json, ["torch"], settings=settings, figures=figures, seconds_a_step=rounds.round(5).tolist())


if __name__ == "__main__":
    main()
