"""Whether loading keeps up: a folder of JPEG files whose decoding takes as long as the training step.

    python benchmarks/loading.py --json benchmarks/results/loading.json

Needs Pillow (the extra `vision`) and two cores. The files are made in a temporary folder, of such a size that one
thread decodes a micro-batch in the time of its forward and backward. Four variants take turns, in a process:

decode: one loader process fetches all micro-batches, and nobody trains.
step: training on as many micro-batches that are in memory already.
none: training with data from the files, fetched in the step's own thread.
one: the same with one loader process.

The figure of merit is `one` over the longer of `decode` and `step`: 1 is as good as it gets. Both cores must be free:
where other processes take them, the sum of the work is what counts. The CPU seconds show what loader processes add.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import parser_of, warn_if_busy, write
from PIL import Image
from torch import Tensor, nn

import kfuse as kf
from kfuse.data import EpochSampler, MapData
from kfuse.data.feeder import Feeder
from kfuse.data.fetching import Loading, TaskPlan

SIZE, CLASSES, FILES = 48, 4, 32
MICRO_BATCH, BATCH = 8, 16


class Folder(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images of a folder, again and again: decoded by Pillow in the thread that asks, resized, mirrored at random."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.files, self.samples = sorted(folder.glob("*.jpg")), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.files[i % len(self.files)]) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIZE, SIZE)), dtype=np.float32) / 255
        x = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        return x.flip(2) if torch.rand(()) < 0.5 else x, i % CLASSES


def make_files(folder: Path, side: int) -> None:
    """FILES images of side x side pixels, noise over a gradient: it must not compress to nothing."""
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 128, side, dtype=np.float32)
    for i in range(FILES):
        pixels = slope[:, None, None] + slope[None, :, None] / 2 + rng.normal(0, 20, (side, side, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:03}.jpg", quality=90)


def net() -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def train(data: Any, workers: int) -> float:
    """Seconds of a training on all samples, once."""
    model = net()
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    kf.fit(model, data, opt, batch_size=BATCH, batch_micro=MICRO_BATCH, data_workers=workers)
    return time.perf_counter() - started


def decode(data: Folder) -> float:
    """Seconds in which one loader process fetches all samples, once."""
    plan = TaskPlan(len(data), 1, BATCH, MICRO_BATCH, 1, 0, None, False, 0, 0)
    feeder = Feeder(MapData(data), EpochSampler(len(data), 0), Loading(1), torch.device("cpu"))
    started = time.perf_counter()
    with feeder.running():
        feeder.expect(plan)
        for task in plan.tasks():
            feeder.fetch(task)
    return time.perf_counter() - started


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of this process and of the loader processes that ended in it."""
    before = os.times()
    wall = run()
    after = os.times()
    return wall, sum(after[:4]) - sum(before[:4])


def in_memory(samples: int) -> tuple[Tensor, Tensor]:
    """As many samples of the same shape."""
    return torch.rand(samples, 3, SIZE, SIZE), torch.arange(samples) % CLASSES


def balanced_folder(root: Path) -> int:
    """Makes files whose decoding takes as long as the step; returns the images' side in pixels."""
    side, samples = 512, 12 * MICRO_BATCH
    for attempt in range(4):
        folder = root / str(attempt)
        folder.mkdir()
        make_files(folder, side)
        data, memory = Folder(folder, samples), in_memory(samples)
        train(memory, 0)  # warm
        rounds = [(train(memory, 0), train(data, 0)) for _ in range(5)]
        step = statistics.median(step for step, _ in rounds)
        decoding = statistics.median(both - step for step, both in rounds)
        print(f"side {side}: step {step:.3f} s, decoding {decoding:.3f} s", flush=True)
        if 0.93 < decoding / step < 1.07 or attempt == 3:
            break
        side = max(32, round(side * math.sqrt(step / decoding)))
    folder.rename(root / "files")
    return side


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=80, help="of each training")
    args = parser.parse_args()
    warn_if_busy()
    torch.set_num_threads(1)
    samples = args.micro_batches * MICRO_BATCH
    with tempfile.TemporaryDirectory() as folder:
        side = balanced_folder(Path(folder))
        data, memory = Folder(Path(folder, "files"), samples), in_memory(samples)
        variants: dict[str, Callable[[], float]] = {
            "decode": lambda: decode(data),
            "step": lambda: train(memory, 0),
            "none": lambda: train(data, 0),
            "one": lambda: train(data, 1),
        }
        measured = [{name: timed(run) for name, run in variants.items()} for _ in range(args.rounds)]
    rounds = [{name: wall for name, (wall, _) in each.items()} for each in measured]
    medians = {name: statistics.median(times[name] for times in rounds) for name in variants}
    cpu = {name: statistics.median(each[name][1] for each in measured) for name in variants}
    longer = max(medians["decode"], medians["step"])
    results = {
        "seconds": medians,
        "CPU seconds, of all processes": cpu,
        "none over the longer": medians["none"] / longer,
        "one over the longer": medians["one"] / longer,
        "one over the longer, median of rounds": statistics.median(
            times["one"] / max(times["decode"], times["step"]) for times in rounds
        ),
    }
    print(json.dumps(results, indent=1))
    settings = {"rounds": args.rounds, "micro_batches": args.micro_batches, "samples_a_micro_batch": MICRO_BATCH}
    settings |= {"image_side": side, "threads": 1}
    write(args.json, ["torch", "pillow"], settings=settings, results=results, rounds=rounds)


if __name__ == "__main__":
    main()
