"""What kfuse adds to a step of a model so small that nothing else takes long: one worker, one thread, on the CPU.

    python benchmarks/fixed_cost.py --json benchmarks/results/fixed_cost.json

Cases, each beside torch's fused AdamW in a loop written by hand. Both take turns in blocks of steps, in a process. CPU
time of a step, which says more than wall time where other processes run.

bare: `loss.backward(); opt.step(); opt.zero_grad()` on an MLP 64-64-32-10, batch 32.
tensors: the same on 150 parameters of 64 elements, which a single sum uses.
fit: kf.fit on scikit-learn's digits with the command line's MLP (one hidden layer of 128), batch 64 in 4 micro-batches.
    The loop by hand takes micro-batches of the same size; it draws no random numbers and measures nothing.
gpu: what a GPU's path takes of the host, on a GPT of 148 tensors in 16 buckets, 2 micro-batches a step. Launches go
    through Triton to a driver that runs nothing (tests/gpu/host_stub.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from report import median_interval, parser_of, told, warn_if_busy, write
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.data import load_digits
from kfuse.models import MLP

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from gpu.host_stub import BUCKET_MB, gpt_steps, no_gpu

Block = Callable[[int], float]
"""Makes so many steps; returns the milliseconds each one took."""

_WARM = 20  # steps of a block of kf.fit that are not timed: it sets up what a run needs


def bare(make_optimizer: Callable[..., torch.optim.Optimizer]) -> Block:
    """Blocks of the bare loop on an MLP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    return _loop(lambda: F.cross_entropy(model(x), y), make_optimizer(model.parameters(), lr=1e-3))


def tensors(make_optimizer: Callable[..., torch.optim.Optimizer]) -> Block:
    """Blocks of the bare loop on many small parameters."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64)) for _ in range(150)]
    return _loop(lambda: torch.cat(parameters).square().mean(), make_optimizer(parameters, lr=1e-3))


def _loop(loss: Callable[[], Tensor], opt: torch.optim.Optimizer) -> Block:
    def steps(count: int) -> None:
        for _ in range(count):
            loss().backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()

    return timed(steps)


def timed(steps: Callable[[int], None]) -> Block:
    """Blocks of what makes so many steps."""

    def block(count: int) -> float:
        started = time.process_time()
        steps(count)
        return (time.process_time() - started) / count * 1e3

    return block


def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """The model of `kfuse model=mlp data=digits`, and the samples it trains on."""
    split: Any = load_digits()
    torch.manual_seed(0)
    x, y = split.train.fetch(torch.arange(len(split.train)).numpy())
    return MLP(**split.spec), x, y


def fit_by_torch() -> Block:
    """Blocks of a loop by hand over the same micro-batches as kf.fit's."""
    model, x, y = digits()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def steps(count: int) -> None:
        for step in range(count):
            at = 64 * step % (len(x) - 64)
            for j in range(at, at + 64, 16):
                (F.cross_entropy(model(x[j : j + 16]), y[j : j + 16]) / 4).backward()
            opt.step()
            opt.zero_grad()

    return timed(steps)


def fit_by_kfuse() -> Block:
    model, x, y = digits()
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3)

    class Times(kf.BasePolicy):
        """The CPU time after each step."""

        def __init__(self) -> None:
            self.after: list[float] = []

        def after_step(self) -> None:
            self.after.append(time.process_time())

    def block(steps: int) -> float:
        times = Times()
        kf.fit(model, (x, y), opt, times, steps=steps + _WARM, batch_size=64, micro_batch=16)
        return (times.after[-1] - times.after[_WARM - 1]) / steps * 1e3

    return block


def compare(torch_block: Block, kfuse_block: Block, rounds: int, steps: int) -> dict[str, Any]:
    """Medians over rounds in milliseconds, and the median of the ratios within rounds with its 95 % interval."""
    for block in (torch_block, kfuse_block):
        block(steps)
    pairs = np.array([(torch_block(steps), kfuse_block(steps)) for _ in range(rounds)])
    torch_ms, kfuse_ms = np.median(pairs, axis=0)
    return {"torch_ms": torch_ms, "kfuse_ms": kfuse_ms, "ratio": median_interval(pairs[:, 1] / pairs[:, 0])}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100, help="of a block")
    args = parser.parse_args()
    warn_if_busy()
    torch.set_num_threads(1)
    results = {
        "bare": compare(bare(_fused), bare(kf.FusedAdamW), args.rounds, args.steps),
        "tensors": compare(tensors(_fused), tensors(kf.FusedAdamW), args.rounds, args.steps),
        "fit": compare(fit_by_torch(), fit_by_kfuse(), args.rounds, args.steps),
    }
    with no_gpu():
        session.reset()
        kf.init(comm_bucket_mb=BUCKET_MB)
        theirs, ours = timed(gpt_steps(_fused)), timed(gpt_steps(kf.FusedAdamW))
        results["gpu"] = compare(theirs, ours, args.rounds, max(1, args.steps // 10))
    for name, found in results.items():
        times = f"torch {found['torch_ms']:.3f}, kfuse {found['kfuse_ms']:.3f}"
        print(f"{name}: CPU ms a step: {times}, ratio {told(found['ratio'])}")
    settings = {"rounds": args.rounds, "steps": args.steps, "threads": 1}
    write(args.json, ["torch"], settings=settings, results=results)


def _fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


if __name__ == "__main__":
    main()
