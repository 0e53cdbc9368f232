"""What kfuse costs beside torch, in one table: runs the other benchmarks one after the other, in half an hour.

    python benchmarks/costs.py --json benchmarks/results/costs.json

Every ratio is that of CPU time, kfuse's to the peer's, paired within rounds: median and 95 % bootstrap interval; wall
time is beside it where the benchmark takes it. The bound is the median that is aimed at. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import parser_of, warn_if_busy, write
from rich.progress import Progress

HERE = Path(__file__).parent
RUNS = {
    "fixed_cost": ["fixed_cost.py", "--rounds", "30"],
    "job_cost": ["job_cost.py"],
    "step": ["step.py", "--rounds", "24", "--steps", "3", "--variants", "allreduce,allreduce-no-stats,reproducible"],
    "hooks": ["step.py", "--hooks", "--rounds", "24", "--steps", "3", "--variants", "ddp-kf-hook"],
    "comm": ["comm.py", "--rounds", "12", "--megabytes", "1,16,64", "--variants", "zero,allreduce,sharded"],
}
"""The script and arguments of each benchmark."""


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    warn_if_busy()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kfuse-costs-") as folder, Progress() as progress:
        task = progress.add_task("", total=len(RUNS))
        for name, (script, *options) in RUNS.items():
            progress.update(task, description=script)
            path = Path(folder) / f"{name}.json"
            command = [sys.executable, str(HERE / script), *options, "--json", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[name] = json.loads(path.read_text())
            progress.advance(task)
    rows = list(lines(found))
    print(f"{'what':<62} {'ratio':>7} {'95 %':>15} {'bound':>6}  wall")
    for what, ratio, bound, wall in rows:
        interval = "" if "low" not in ratio else f"{ratio['low']:.3f}-{ratio['high']:.3f}"
        beside = "" if wall is None else f"{wall['median']:.3f}"
        print(f"{what:<62} {ratio['median']:>7.3f} {interval:>15} {bound:>6g}  {beside}")
    write(arguments.json, ["torch"], rows=rows, runs=RUNS, figures=found)


def lines(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], float, dict[str, float] | None]]:
    """The table's rows: what is measured, its CPU ratio (or seconds), the bound, the ratio of wall times."""
    fixed, job, step = found["fixed_cost"]["results"], found["job_cost"], found["step"]
    yield "bare loop, MLP of 6 parameters / torch's fused AdamW", fixed["bare"]["ratio"], 1.35, None
    yield "bare loop, 150 tensors of 64 elements / the same", fixed["tensors"]["ratio"], 1.10, None
    yield "kf.fit, 4 micro-batches / torch's loop", fixed["fit"]["ratio"], 2.1, None
    for case, of_jobs in job["ratios"].items():
        for name, each in of_jobs.items():
            yield f"job of 2 workers, {name}, {case} / DDP, torchrun", each["cpu"], 1.08, each["wall"]
    yield "its supervisor, us a step", {"median": job["ratios"]["mlp"]["kfuse"]["parent_us"]}, 40, None
    for name in ("allreduce", "reproducible"):
        variant = step["variants"][name]
        yield f"GPT of 4.8 M, {name} / DDP + fused AdamW", variant["cpu_to_ddp"], 1.02, variant["to_ddp"]
    pair = step["pairs"]["allreduce / allreduce-no-stats"]
    yield "the same, statistics on / off", pair["cpu"], 1.015, pair["step"]
    hook = found["hooks"]["variants"]["ddp-kf-hook"]
    yield "kf.ddp_hook / plain DDP, the same GPT", hook["cpu_to_ddp"], 1.02, hook["to_ddp"]
    for size in found["comm"]["sizes"]:
        megabytes = size["megabytes"]
        if megabytes == 1:
            pair = size["pairs"]["sharded / zero"]
            yield "sharded / ZeroRedundancyOptimizer, 1 MB", pair["cpu"], 1.15, pair["step"]
        else:
            bound, variant = {16: 1.09, 64: 1.06}[megabytes], size["variants"]["allreduce"]
            yield f"{megabytes:g} MB of gradients / DDP", variant["cpu_to_ddp"], bound, variant["to_ddp"]


if __name__ == "__main__":
    main()
