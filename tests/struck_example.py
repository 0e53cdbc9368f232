"""python struck_example.py FOLDER EXAMPLE NAME=NUMBER ...: runs an example as a worker of an elastic job, some of whose
workers are killed in a backward. FOLDER keeps marks of that, and what the example's `main` has trained.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chaos import Chaos
from distributed import load

import kfuse as kf
from kfuse.policies import ComposePolicy
from kfuse.train.trainer import newest

KILLS = {6: 1, 14: 0}  # by step, the rank; the lost worker is replaced before the next one is


def main(folder: Path, example: str, *settings: str) -> None:
    kf.init(comm_reproducible=True, comm_timeout_s=60)
    gates = [{"step": step, "workers": 2} for step in KILLS]
    policy = Chaos(str(folder / "events"), gates=gates, adaptive=False)
    kf.DataLoader = partial(_beside, kf.DataLoader, policy)  # type: ignore[misc, assignment]
    backward = torch.Tensor.backward

    def struck(loss: torch.Tensor, *given: Any, **more: Any) -> None:
        training = newest()
        step = -1 if training is None else training.progress.step
        mark = folder / f"mark-{step}"
        if KILLS.get(step) == kf.rank() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        backward(loss, *given, **more)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = struck  # type: ignore[method-assign, assignment]
    run(example, *settings)


def _beside(loader: Any, chaos: Chaos, *given: Any, policy: Any = None, **more: Any) -> Any:
    """A loader with both policies, the example's own and the one that asks for workers."""
    return loader(*given, policy=chaos if policy is None else ComposePolicy(chaos, policy), **more)


def run(example: str, *settings: str) -> Any:
    """Returns what the example's `main` returns, with these numbers in place of its own."""
    module = load(example)
    for setting in settings:
        name, _, number = setting.partition("=")
        setattr(module, name, int(number))
    return module.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
