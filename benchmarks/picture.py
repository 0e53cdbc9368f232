"""Draws README's picture of a run with matplotlib: python benchmarks/picture.py RUN_DIR docs/report.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

NOISE, BATCH, WORKERS, KILLED = "#e69f00", "#0072b2", "#009e73", "#d55e00"


def main(directory: Path, picture: Path) -> None:
    steps, events = (
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    low = [step["noise_scale_low"] or float("nan") for step in steps]
    batch, workers = ([step[name] for step in steps] for name in ("batch_size", "workers"))
    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False})
    _, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained")
    above.set_title("The batch grows with the gradient noise scale. A killed worker is replaced.", fontsize=14)
    above.plot(low, color=NOISE, label="gradient noise scale, low end")
    above.step(range(len(steps)), batch, where="post", color=BATCH, linewidth=3, label="batch size")
    above.set(yscale="log", ylabel="samples", ylim=(min(batch) / 4, max(batch) * 1.5))
    above.set_yticks(sorted({*batch}), labels=map(str, sorted({*batch})))
    above.minorticks_off()
    above.legend(frameon=False, loc="lower right")
    below.step(range(len(steps)), workers, where="post", color=WORKERS, linewidth=3)
    below.set(ylabel="workers", xlabel="step", ylim=(0, max(workers) + 1), yticks=range(max(workers) + 1))
    for event in events:
        if event["kind"] == "failure":
            below.text(event["step"], max(workers) + 0.3, "killed", color=KILLED)
    plt.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
