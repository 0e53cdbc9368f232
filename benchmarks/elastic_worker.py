"""What a system of elastic.py runs as its worker: python benchmarks/elastic_worker.py SYSTEM DIRECTORY EPOCHS"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from elastic_systems import Task, systems


def main() -> None:
    name, directory, epochs = sys.argv[1:]
    torch.set_num_threads(1)
    systems()[name].work(Task(Path(directory), int(epochs)))


if __name__ == "__main__":
    main()
