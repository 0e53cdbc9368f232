"""What `kfuse plan CLUSTER_LOG.csv gpus=FILE` finds on drawn logs. All its figures are synthetic: no log was recorded.

    python benchmarks/cluster_log.py --json benchmarks/results/cluster_log.json
    python benchmarks/cluster_log.py --write FOLDER        # one log, in the format of the Helios traces

A log is of 30 days and 8 virtual clusters of 4 to 32 nodes of 8 GPUs (log-uniform); of one a quarter of the nodes goes
on the 16th day. Each has 25 users (Zipf, exponent 1) with 1 + Poisson(4) templates: GPUs (1 to 32, half of the virtual
cluster at most), CPUs, and a median duration (log-normal, median 400 s, sigma 2.2: heavy-tailed, as section 3.2 of Hu
et al., SC 2021, has it). Jobs come in bursts of one template (geometric, 3 on average), by day more than by night and
at weekends, until they fill a part of the GPUs, uniform within `load`. A job's duration is log-normal about its
template's median, sigma uniform within `sigma`; a part `once` of the jobs has a template of its own; 30 % fail or are
cancelled after a uniform part of it. 5 days at most. Start times are those of submission: of them only whether there is
one is read.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from report import parser_of, table, write

from kfuse.tools.plan.logs import compare, read

FIRST = 3  # seed: the forecast was chosen with those before
START, DAYS, HOST = datetime(2020, 6, 1, tzinfo=UTC), 30, 8
SIZES, SHARES = (1, 2, 4, 8, 16, 32), (0.55, 0.14, 0.12, 0.13, 0.04, 0.02)
COLUMNS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue"
Template = tuple[int, int, float, float]  # GPUs, CPUs, median in seconds, sigma


@dataclass(frozen=True)
class Kind:
    """load, sigma: least and most. clusters: how many virtual ones."""

    load: tuple[float, float] = (0.4, 0.9)
    sigma: tuple[float, float] = (0.5, 1.0)
    once: float = 0.2
    clusters: int = 8
    days: int = DAYS


KINDS = {
    "as above": Kind(),
    "half of the jobs once": Kind(once=0.5),
    "load 0.3 to 0.6": Kind(load=(0.3, 0.6)),
    "load 0.7 to 0.95": Kind(load=(0.7, 0.95)),
}


def draw(folder: Path, kind: Kind, seed: int) -> tuple[Path, Path]:
    """Writes a log and its numbers of GPUs. Returns their paths."""
    rng, hours = np.random.default_rng(seed), np.arange(kind.days * 24)
    rate = (1 + 0.7 * np.cos((hours % 24 - 15) / 12 * math.pi)) * np.where(hours // 24 % 7 < 5, 1, 0.6)
    arrivals, nodes, rows = np.append(0, np.cumsum(rate)) / rate.sum(), [], []
    users = 1 / np.arange(1, 26) / np.sum(1 / np.arange(1, 26))
    for vc in range(kind.clusters):
        nodes.append(int(4 * 8 ** rng.uniform()))

        def template(most: int = nodes[-1] * HOST // 2) -> Template:
            gpus = min(int(rng.choice(SIZES, p=SHARES)), most)
            median = 400 * math.exp(2.2 * rng.standard_normal())
            return gpus, gpus * int(rng.choice([2, 4, 6, 8])), median, rng.uniform(*kind.sigma)

        own = [[template() for _ in range(1 + rng.poisson(4))] for _ in users]
        left = rng.uniform(*kind.load) * nodes[-1] * HOST * kind.days * 86400
        while left > 0:
            user, once = int(rng.choice(len(users), p=users)), rng.uniform() < 3 * kind.once / (1 + 2 * kind.once)
            when = 3600 * np.interp(rng.uniform(), arrivals, [*hours, len(hours)])
            gpus, cpus, median, sigma = template() if once else own[user][rng.integers(len(own[user]))]
            for _ in range(1 if once else rng.geometric(1 / 3)):
                state = rng.choice(["COMPLETED", "FAILED", "CANCELLED"], p=[0.7, 0.12, 0.18])
                part = 1.0 if state == "COMPLETED" else rng.uniform()
                seconds = max(1, round(min(median * rng.lognormal(0, sigma) * part, 5 * 86400)))
                times = [f"{START + timedelta(seconds=round(at)):%F %T}" for at in (when, when, when + seconds)]
                rows.append([f"u{vc}-{user}", f"vc{vc}", gpus, cpus, -(-gpus // HOST), state, *times, seconds, 0])
                if rng.uniform() < 0.02:  # cancelled in the queue, and on CPUs
                    rows.append([*rows[-1][:5], "CANCELLED", times[0], "", "", 0, 0])
                    rows.append([*rows[-1][:2], 0, 8, 1, "COMPLETED", *times, seconds, 0])
                left, when = left - gpus * seconds, when + rng.exponential(300)
    log, gpus_file = folder / "cluster_log.csv", folder / "cluster_gpu_number.csv"
    with log.open("w", newline="") as file:
        file.write(COLUMNS + "\n")
        csv.writer(file).writerows([k, *row] for k, row in enumerate(sorted(rows, key=lambda row: row[6])))
    with gpus_file.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["date", *(f"vc{vc}" for vc in range(kind.clusters)), "total"])
        for day in range(kind.days + 1):  # the last bursts pass midnight
            has = [n * HOST for n in (nodes[0] - (day >= 15) * (nodes[0] // 4), *nodes[1:])]
            out.writerow([f"{START + timedelta(days=day):%F}", *has, sum(has)])
    return log, gpus_file


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of: %(default)s")
    parser.add_argument("--write", type=Path, help="write one log into this folder, and nothing else")
    args, found = parser.parse_args(), dict[str, dict[str, str]]()
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        print(*draw(args.write, KINDS["as above"], seed=0))
        return
    for name in args.kinds.split(","):
        each = []
        for seed in range(FIRST, FIRST + args.seeds):
            with TemporaryDirectory() as folder:
                log, gpus = draw(Path(folder), KINDS[name], seed)
                each.append(compare(read(str(log), str(gpus))))
        found[name] = {key: " ".join(f"{figures[key]:.4g}" for figures in each) for key in each[0]}
        rows = [(key, *values.split()) for key, values in found[name].items()]
        table(f"synthetic: {name}", ("seed", *map(str, range(FIRST, FIRST + args.seeds))), rows)
    write(args.json, ["numpy"], synthetic=True, found_by_seed=found)


if __name__ == "__main__":
    main()
