"""One pair of workers with a slow cable: the measured tree beside the default, over links of network namespaces.

    sudo python benchmarks/topology.py --json benchmarks/results/topology.json
    sudo python benchmarks/topology.py --slow none --hosts 2 --json benchmarks/results/topology_hosts.json

Needs Linux, root, and the commands ip and tc. Each worker is a process in a network namespace of its own, with one link
to all others (links.py); with `--hosts`, as many namespaces share the workers, in the order of their ranks.

`--slow` lists settings: the pair whose messages take a cable of their own, `--factor` times slower, or none. gloo's
all-reduce is a ring 0-1-2-3-0: it uses the ways 0-1, 1-2, 2-3 and 3-0, and neither 0-2 nor 1-3. A step is a backward,
which gives the gradients at once, the reduction, and an SGD update; its time is that of the slowest worker. Variants
take turns, in an order shuffled anew each round. Ratios are medians of ratios within rounds, with 95 % bootstrap
intervals.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from links import Place, allowed, join, links
from machine import parser_of, warn_if_busy, write
from step_report import median_interval
from workers import leave, outcome_of

import kfuse as kf
from kfuse.session import current

VARIANTS: dict[str, tuple[str | None, str | None]] = {  # transport and tree; None: as configured
    "default": (None, None),
    "all_to_all": ("all_to_all", None),
    "tree=latency": ("tree", "latency"),
    "tree=binary": ("tree", "binary"),
    "tree=star": ("tree", "star"),
    "tree=host": ("tree", "host"),
}
DEFAULT = "default"
WARM_UP = 2  # rounds


# -- a worker ---------------------------------------------------------------------------------------------------------


def work(rank: int, places: list[Place], megabytes: float, rounds: int, messages: Any) -> None:
    """Measures all variants. Rank 0 sends seconds by round and variant, and the links.

    places: of each rank's worker. Workers of one place are told that they have one host.
    """
    store = join(places, rank, 29400)  # any port is free: the namespace is this run's own
    kf.init(comm_tree="latency", comm_bucket_mb=megabytes + 1, comm_timeout_s=120)
    group = current().group
    group.hosts = [place.address for place in places]  # this machine's name would be the same for all
    param = torch.nn.Parameter(torch.zeros(int(megabytes * 2**20 / 4)))
    optimizer = kf.FusedSGD([param], lr=0.1)
    order, measured, default = random.Random(0), [], optimizer.engine.transport_name
    for _ in range(WARM_UP + rounds):
        names = list(VARIANTS)
        order.shuffle(names)
        seconds = {}
        for name in names:
            optimizer.engine.use_transport(*VARIANTS[name])
            group.barrier()
            started = time.perf_counter()
            (param.sum() * (group.rank + 1)).backward()
            optimizer.step()
            mine = time.perf_counter() - started
            seconds[name] = float(kf.allreduce(mine, "max"))
            _check(param.grad, group.size)
            optimizer.zero_grad()
        measured.append(seconds)
    started = time.perf_counter()
    kf.peer_latencies()
    measuring = time.perf_counter() - started
    ways = group.links
    assert ways is not None
    if rank == 0:
        found = {
            "rounds": measured[WARM_UP:],
            "latency_ms": [[round(1e3 * each, 3) for each in row] for row in ways.latencies],
            "mbit_per_s": [[each and round(8e-6 * each, 1) for each in row] for row in ways.throughputs],
            "default": default,
            "parents": ways.tree(int(megabytes * 2**20)),
            "measuring_s": round(measuring, 3),
        }
        messages.put(("outcome", found))
    group.barrier("the end")
    del store
    leave(messages)


def _check(grad: torch.Tensor | None, size: int) -> None:
    mean = (size + 1) / 2
    if grad is None or not bool((grad == mean).all()):
        raise RuntimeError(f"the mean gradient is not {mean}")


# -- all settings -----------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """By setting: the times and links that rank 0 reports, and the ratios."""
    out, count = {}, arguments.workers
    hosts = arguments.hosts or count
    for name, pair in arguments.slow.items():
        slow = {} if pair is None else {pair: f"{arguments.mbit / arguments.factor:g}mbit"}
        messages: Any = mp.get_context("spawn").Queue()
        with links(hosts, f"{arguments.mbit:g}mbit", slow) as own:
            places = [own[rank * hosts // count] for rank in range(count)]
            given = (places, arguments.megabytes, arguments.rounds, messages)
            found = outcome_of(mp.spawn(work, given, nprocs=count, join=False), messages)
        times = {name: np.array([each[name] for each in found["rounds"]]) for name in VARIANTS}
        out[name] = {
            **{key: value for key, value in found.items() if key != "rounds"},
            "step_ms": {name: round(1e3 * float(np.median(seconds)), 1) for name, seconds in times.items()},
            "default_to": {name: median_interval(times[DEFAULT] / times[name]) for name in VARIANTS},
            "step_ms_by_round": {name: np.round(1e3 * seconds, 1).tolist() for name, seconds in times.items()},
        }
        _print(name, out[name])
    return out


def settings(text: str, hosts: int) -> dict[str, tuple[int, int] | None]:
    """Of `--slow`: the slow pair of each, or None. Raises ValueError."""
    pairs = {f"{a}-{b}": (a, b) for a, b in itertools.combinations(range(hosts), 2)}
    found: dict[str, tuple[int, int] | None] = {}
    for word in text.split(","):
        if word != "none" and word not in pairs:
            raise ValueError(f"--slow {word}: must be one of none, {', '.join(pairs)}")
        found[word] = pairs.get(word)
    return found


def _print(slow: str, found: dict[str, Any]) -> None:
    steps = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found["step_ms"].items())
    print(f"slow link {slow}: {steps}; the default is {found['default']}")
    for name, ratio in found["default_to"].items():
        print(f"  default / {name} {ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
    print(f"  parents {found['parents']}, links measured in {found['measuring_s']} s:", found["mbit_per_s"], flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--slow", default="none,0-1,0-2", help="settings: the slow link, or none")
    parser.add_argument("--factor", type=float, default=10.0, help="how many times slower it is")
    parser.add_argument("--mbit", type=float, default=200.0, help="Mbit/s of the other links, in each direction")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=None, help="namespaces, if fewer than workers")
    parser.add_argument("--megabytes", type=float, default=2.0, help="MiB of fp32 gradients, in one bucket")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not allowed():
        parser.error("needs root and the commands ip and tc: it makes network namespaces")
    try:
        arguments.slow = settings(arguments.slow, arguments.hosts or arguments.workers)
    except ValueError as error:
        parser.error(str(error))
    warn_if_busy()
    names = ("workers", "hosts", "mbit", "factor", "megabytes", "rounds")
    found = measure(arguments)
    chosen = {name: getattr(arguments, name) for name in names}
    write(arguments.json, ("torch", "numpy"), benchmark="topology", settings=chosen, slow_link=found)


if __name__ == "__main__":
    main()
