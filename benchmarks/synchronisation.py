"""What the modes of `comm.sync` cost in loss and save in bytes: a GPT trained on text, at equal samples.

    python benchmarks/synchronisation.py --json benchmarks/results/synchronisation.json

Two workers on one machine, a thread each. Every run has the same steps, batch, learning rates and schedule (allreduce:
what `auto` takes would depend on the machine's load) and, for a seed, the same initial model and order of samples. What
is compared is the held-out loss after the last step, of the model that the mode evaluates, beside that of synchronous
SGD with the same seed. Bytes are those of the tensors that a worker has handed to collectives for training, without the
evaluation and the broadcast before the first step: with two workers an all-reduce sends as many.

`pair` is not among the modes: it needs a supervisor, and its workers send over connections of their own, not by
collectives. Its bytes do not depend on what is measured here (docs/synchronisation.md).
"""

from __future__ import annotations

from collections import Counter
from statistics import mean
from typing import Any

import numpy as np
import torch
from machine import parser_of, write
from rich.console import Console
from rich.table import Table
from workers import messages_of, set_torchrun_variables

import kfuse as kf
from kfuse.comm.gloo import GlooGroup
from kfuse.comm.settings import CommOptions
from kfuse.data.builtin import load_text
from kfuse.models import GPT

REFERENCE, LONGEST = "ssgd", 8
"""What every other mode is compared with, and the steps of the longest round."""
WORKERS, BLOCK, BATCH, MICRO_BATCH, HELDOUT = 2, 64, 32, 8, 2048
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "local:8": {"sync": "local:8"},
    "local:8, outer 0.7, 0.9": {"sync": "local:8", "outer_lr": 0.7, "outer_momentum": 0.9},
    "local:8, outer 0.7, 0.5": {"sync": "local:8", "outer_lr": 0.7, "outer_momentum": 0.5},
    "sma": {"sync": "sma"},
}
_OF_TRAINING = ("step ", "average of the workers' models", "differences from the central model")


def count_bytes() -> Counter[str]:
    """From now on, the bytes and the number of this worker's messages."""
    seen: Counter[str] = Counter()
    for name in ("all_reduce", "all_to_all", "share"):
        setattr(GlooGroup, name, _counted(getattr(GlooGroup, name), seen))
    return seen


def _counted(method: Any, seen: Counter[str]) -> Any:
    def send(group: GlooGroup, *arguments: Any, **named: Any) -> Any:
        what = next(each for each in reversed(arguments) if isinstance(each, str) and each not in ("sum", "max"))
        if what.startswith(_OF_TRAINING):
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            seen["bytes"] += tensors[-1].nbytes  # of all_to_all, what is sent
            seen["messages"] += 1
        return method(group, *arguments, **named)

    return send


def work(rank: int, name: str, seed: int, steps: int, lr: float, port: int, results: Any) -> None:
    """One worker of one run; rank 0 puts the figures into `results`."""
    set_torchrun_variables(rank, WORKERS, port)
    torch.set_num_threads(1)
    kf.init(**CommOptions("allreduce", **VARIANTS[name]).named())
    torch.manual_seed(seed)
    split = load_text(block_size=BLOCK)
    model = GPT(split.spec["vocab_size"], BLOCK)
    opt = kf.FusedAdamW(model.parameters(), lr=lr)
    assert split.heldout is not None
    heldout = split.heldout.fetch(np.linspace(0, len(split.heldout) - 1, HELDOUT).astype(np.int64))
    sent = count_bytes()
    summary = kf.fit(
        model,
        split.train,
        opt,
        train_steps=steps,
        batch_size=BATCH,
        batch_micro=MICRO_BATCH,
        seed=seed,
        lr_warmup_steps=steps // 10,
        lr_decay="cosine",
        train_clip_norm=1.0,
        heldout=heldout,
        train_eval_every=steps,
    )
    assert summary is not None
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        figures = {"loss": summary["eval_loss"], "wall_s": summary["wall_s"], "parameters": parameters}
        results.put(("outcome", figures | dict(sent)))


def run(name: str, seed: int, steps: int, lr: float) -> dict[str, Any]:
    """The figures of one training."""
    ((_, figures),) = messages_of(WORKERS, work, name, seed, steps, lr)
    return dict(figures)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=304, help=f"a multiple of {LONGEST}")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if args.steps < LONGEST or args.steps % LONGEST:
        parser.error(f"--steps {args.steps}: must be a multiple of {LONGEST}, so that the last round is whole")
    names = [REFERENCE, *(name for name in args.variants if name != REFERENCE)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    settings = {"workers": WORKERS, "batch": BATCH, "steps": args.steps, "lr": args.lr, "runs": runs}
    for seed in range(args.seeds):
        for name in names:  # by turns
            runs[name].append(run(name, seed, args.steps, args.lr))
            if runs[name][-1]["bytes"] != runs[name][0]["bytes"]:
                raise RuntimeError(f"{name}: seed {seed} sent other bytes than seed 0: {runs[name]}")
        write(args.json, ["torch", "numpy"], **settings)  # after each seed: a run takes a minute or more
    table = Table(title=f"{WORKERS} workers, {args.steps} steps of {BATCH} sequences, {args.seeds} seeds")
    for heading in ("comm.sync", "held-out loss", "beside ssgd", "bytes a step", "beside ssgd", "messages a step"):
        table.add_column(heading, justify="right")
    first = runs[REFERENCE]
    for name, found in runs.items():
        losses = [each["loss"] for each in found]
        ratios = [each["loss"] / reference["loss"] for each, reference in zip(found, first, strict=True)]
        ratio = found[0]["bytes"] / first[0]["bytes"]
        table.add_row(
            name,
            f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            f"{mean(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})",
            f"{found[0]['bytes'] / args.steps:,.0f}",
            f"{ratio:.3f}",
            f"{found[0]['messages'] / args.steps:.2f}",
        )
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
