"""Draws a run directory: loss, batch size beside the noise scale, learning rate and workers, over the samples used.

python benchmarks/run_plot.py RUN_DIR docs/run.png        # needs matplotlib
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def main(run_dir: str, picture: str) -> None:
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]

    def column(name: str) -> list[float]:
        return [float("nan") if line[name] is None else line[name] for line in lines]

    x = [value / 1000 for value in column("samples")]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3), layout="constrained")
    axes[0].plot(x, column("loss"), color="tab:blue", linewidth=0.8)
    axes[0].set(title="loss", yscale="log")
    axes[1].fill_between(x, column("noise_scale_low"), column("noise_scale_high"), color="0.85", label="interval")
    axes[1].plot(x, column("noise_scale_low"), color="0.5", linewidth=1, label="noise scale, low end")
    axes[1].step(x, column("batch_size"), color="tab:blue", label="batch size")
    axes[1].set(title="batch size and noise scale, samples", yscale="log", ylim=(10, 10_000))
    axes[1].legend(fontsize=8)
    rate = column("lr")
    axes[2].step(x, [value / rate[0] for value in rate], color="tab:orange", label="learning rate / first")
    axes[2].step(x, column("workers"), color="tab:blue", label="workers")
    axes[2].set(title="learning rate and workers", ylim=(0, None))
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.set_xlabel("thousand samples used")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
