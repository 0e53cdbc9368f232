"""The cost model against measurements: fitted with 2 and 3 workers, tested with 4, on loopback and on links of a rate.

    python benchmarks/scale.py --json benchmarks/results/scale.json

Needs root (links.py). On each link, workers send messages of two sizes (for the fit), and make whole steps of each
schedule, in an order shuffled anew each round. Gradients are set by hand, so that a step is pack, messages, reduce,
measure and update. alpha and beta are fitted to the messages of 2 and 3 workers; gamma is that of a step of a worker
alone, with as many others beside it, but for 4 workers: theirs are predicted with the gamma of 3. So nothing that was
measured with 4 workers is in the prediction of their steps. Those of 2 and 3 are computed too.

The curves beyond 4 workers are an EXTRAPOLATION, of links whose figures are published (`PUBLISHED`), and say what the
model says: one flat ring or exchange over all workers, and links that nothing else uses.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from links import Place, join, links
from machine import parser_of, warn_if_busy, write
from step_variants import new_session
from workers import leave, outcome_of

import kfuse as kf
from kfuse import session
from kfuse.comm import transports
from kfuse.comm.cost import PROBED, Costs, Job, fit, price, traffic
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions

LINKS: dict[str, tuple[str | None, int]] = {
    "loopback": (None, 2**22),
    "2 Gbit/s": ("2gbit", 2**22),
    "200 Mbit/s": ("200mbit", 2**20),
}
"""The rate, and the elements that a step reduces."""
BUCKETS, WORKERS, FITTED = 4, (2, 3, 4), (2, 3)
PROGRAMS = {
    "allreduce": ("allreduce", "replicated"),
    "all_to_all": ("all_to_all", "replicated"),
    "all_to_all, sharded": ("all_to_all", "sharded"),
}
ALONE = "alone"

PUBLISHED: dict[str, tuple[float, float, float]] = {
    "400 Gbit/s a GPU, H100": (9.6e-6, 50e9, 3.35e12),
    "50 Gbit/s a GPU, A100": (9.6e-6, 6.25e9, 1.555e12),
    "10 Gbit/s, CPUs (latency and memory assumed)": (50e-6, 1.25e9, 1e11),
}
"""Seconds a message, bytes a second on the wire, bytes a second of memory. Published figures: 9.6 us is NCCL's own
constant for a step of a ring over a network (NVIDIA/nccl, src/graph/tuning.cc at 01afd20, hwLat: NET, Ring, Simple).
DGX H100: one 400 Gbit/s ConnectX-7 a GPU, HBM3 of 3.35 TB/s (NVIDIA's data sheets of DGX H100 and H100 SXM).
p4d.24xlarge: 400 Gbit/s for 8 GPUs (AWS, "Amazon EC2 P4d instances deep dive", 2020), A100 40 GB of 1555 GB/s
(NVIDIA's data sheet). The last one is the rate of 10GBASE-T (IEEE 802.3an); its 50 us and 100 GB/s are assumptions."""
EXTRAPOLATED = 256 * 2**20  # elements: 1 GiB of fp32 gradients


def main() -> None:
    """Measures, fits, predicts, prints, and writes what is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warn_if_busy()
    measured = {
        link: {workers: _run(workers, rate, elements, arguments.rounds) for workers in WORKERS}
        for link, (rate, elements) in LINKS.items()
    }
    results = {link: _compare(found, LINKS[link][1]) for link, found in measured.items()}
    _print(results)
    curves = _extrapolate()
    extrapolated = {"extrapolation (not measured)": {"elements": EXTRAPOLATED, "seconds": curves}}
    write(arguments.json, ["torch"], benchmark="scale", links=results, **extrapolated)


# -- what is measured -------------------------------------------------------------------------------------------------


def _run(workers: int, rate: str | None, elements: int, rounds: int) -> dict[str, Any]:
    """Seconds of messages and of steps, of `workers` workers on links of this rate: medians over rounds."""
    messages: Any = mp.get_context("spawn").Queue()
    with links(workers, rate) as places:
        given = (places, elements, rounds, messages)
        found: dict[str, Any] = outcome_of(mp.spawn(_worker, given, nprocs=workers, join=False), messages)
    return found


def _worker(rank: int, places: list[Place], elements: int, rounds: int, messages: Any) -> None:
    store = join(places, rank, 29400)  # any port is free: the namespace is this run's own
    steps = {name: _Steps(elements, *how) for name, how in PROGRAMS.items()}
    group = session.current().group
    steps[ALONE] = _Steps(elements, "allreduce", "replicated", Group())
    sizes = (elements // BUCKETS // 4, elements // BUCKETS)
    acts: dict[tuple[str, int], Callable[[], None]] = {(name, 0): step for name, step in steps.items()}
    acts |= {(kind, size): partial(_send, group, kind, size) for kind in PROBED for size in sizes}
    times: dict[tuple[str, int], list[float]] = {each: [] for each in acts}
    order, turns = random.Random(0), list(acts)  # the same on all workers
    for _ in range(rounds + 1):
        order.shuffle(turns)
        for each in turns:
            group.barrier()
            times[each].append(_seconds(acts[each]))
    # A worker that comes late measures too little: each round's time is the slowest worker's.
    mine = torch.tensor(list(times.values()), dtype=torch.float64)
    slowest = torch.stack(group.all_gather(mine, "times")).amax(0)
    medians = dict(zip(times, slowest[:, 1:].median(dim=1).values.tolist(), strict=True))
    if rank == 0:
        sent = {kind: {size: medians[kind, size] for size in sizes} for kind in PROBED}
        messages.put(("outcome", {"messages": sent, "steps": {name: medians[name, 0] for name in steps}}))
    group.barrier()
    del store
    leave(messages)


class _Steps:
    """Steps of one schedule: gradients that are there already, and AdamW."""

    def __init__(self, elements: int, schedule: str, state: str, group: Group | None = None) -> None:
        options = CommOptions(schedule, state=state, bucket_mb=4 * elements / BUCKETS / 2**20)
        new_session(options)
        self.params = [torch.nn.Parameter(torch.zeros(elements // BUCKETS)) for _ in range(BUCKETS)]
        self.gradients = [torch.randn(elements // BUCKETS) for _ in self.params]
        self.optimizer = kf.FusedAdamW(self.params, lr=1e-3)
        if group is not None:
            self.optimizer.engine.set_group(group)

    def __call__(self) -> None:
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()


def _send(group: Group, kind: str, elements: int) -> None:
    flat, widths = torch.ones(elements), [shard.stop - shard.start for shard in group.shards(elements)]
    if kind == "all_to_all":
        mine = widths[group.rank]
        group.all_to_all(torch.ones(mine * group.size), [mine] * group.size, flat, widths, "message").wait()
    else:
        (group.all_reduce if kind == "all_reduce" else group.share)(flat, "message").wait()


def _seconds(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


# -- what the model says ----------------------------------------------------------------------------------------------


def _compare(found: Mapping[int, Mapping[str, Any]], elements: int) -> dict[str, Any]:
    """The fit to 2 and 3 workers, and every step measured beside the one predicted."""
    alpha, beta = {}, {}
    for kind in PROBED:
        samples = [
            (traffic(kind, 4 * size, workers), seconds)
            for workers in FITTED
            for size, seconds in found[workers]["messages"][kind].items()
        ]
        alpha[kind], beta[kind] = fit(samples)
    alone = Job((elements // BUCKETS,) * BUCKETS, 1)
    nothing = Costs(dict.fromkeys(PROBED, 0.0), dict.fromkeys(PROBED, 0.0), 1.0)
    memory = price(transports.program("allreduce", sharded=False), alone, nothing).seconds  # bytes
    rows = []
    for workers in WORKERS:
        gamma = found[min(workers, FITTED[-1])]["steps"][ALONE] / memory
        costs = Costs(alpha, beta, gamma)
        job = Job(alone.buckets, workers)
        for name, (schedule, state) in PROGRAMS.items():
            predicted = price(transports.program(schedule, state == "sharded"), job, costs).seconds
            seconds = found[workers]["steps"][name]
            rows.append({"workers": workers, "program": name, "measured_s": seconds, "predicted_s": predicted})
    fitted = {
        kind: {"alpha_s": alpha[kind], "beta_s": beta[kind], "gbit": 8e-9 / max(beta[kind], 1e-15)} for kind in PROBED
    }
    return {"elements": elements, "fitted": fitted, "steps": rows}


def _extrapolate() -> dict[str, dict[str, dict[int, float]]]:
    """By link and program: seconds a step at each number of workers. Not measured."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for link, (alpha, rate, memory) in PUBLISHED.items():
        costs = Costs(dict.fromkeys(PROBED, alpha), dict.fromkeys(PROBED, 1 / rate), 1 / memory)
        for name, (schedule, state) in PROGRAMS.items():
            program = transports.program(schedule, state == "sharded")
            curve = curves.setdefault(link, {}).setdefault(name, {})
            for workers in (2**k for k in range(1, 13)):
                buckets = (EXTRAPOLATED // 40,) * 40
                curve[workers] = price(program, Job(buckets, workers), costs).seconds
    return curves


def _print(results: Mapping[str, Any]) -> None:
    for link, result in results.items():
        said = ", ".join(
            f"{k} {1e6 * f['alpha_s']:.0f} us + {f['gbit']:.2f} Gbit/s" for k, f in result["fitted"].items()
        )
        print(f"{link}, {4 * result['elements'] / 2**20:g} MB in {BUCKETS} buckets: {said}")
        for row in result["steps"]:
            error = row["predicted_s"] / row["measured_s"] - 1
            known = "fitted with" if row["workers"] in FITTED else "predicted"
            times = f"measured {1e3 * row['measured_s']:8.2f} ms, model {1e3 * row['predicted_s']:8.2f} ms"
            print(f"  {row['workers']} workers ({known:11}) {row['program']:20} {times}, {100 * error:+.0f} %")


if __name__ == "__main__":
    main()
