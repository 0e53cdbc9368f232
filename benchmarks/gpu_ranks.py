"""Every transport between two workers, beside one worker alone: NCCL on GPUs, gloo on a CPU.

    python benchmarks/gpu_ranks.py --device cuda --json transports.json

Losses, statistics and parameters of two workers must be those of one; with reproducible sums, bit by bit.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_workers import Ranks, new_session, report
from machine import parser_of
from torch import nn

import kfuse as kf
from kfuse.comm.settings import TRANSPORT_NAMES, CommOptions
from kfuse.comm.step import StepPlan

STEPS, MICRO_BATCHES, SAMPLES = 8, 8, 16
START_S, CASE_S = 30.0, 10.0
"""How long the workers may take to start, and for each case."""
Case = tuple[str, bool, str]  # schedule, reproducible, dtype of the messages


def main() -> int:
    """Runs all cases. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    cases: list[Case] = [(name, False, "fp32") for name in TRANSPORT_NAMES if name != "symmetric"]
    if options.device == "cuda" and torch.cuda.device_count() > 1:  # it needs a GPU each
        cases += [("symmetric", False, "fp32"), ("symmetric", True, "fp32")]
    cases += [("allreduce", False, "bf16"), ("auto", True, "fp32")]  # deterministic algorithms stay on: the last one
    patience = 1 if options.device == "cuda" else 3
    results = _run(options.device, cases, patience)
    return report(options.device, results, options.json, "transports give what one worker gives")


def _name(case: Case) -> str:
    schedule, reproducible, dtype = case
    return f"{schedule}{', reproducible' * reproducible}{f', {dtype}' * (dtype != 'fp32')}"


def _run(device: str, cases: list[Case], patience: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One pair of workers for all cases. A case that fails or hangs ends them; the next ones get a new pair."""
    left = list(cases)
    while left:
        with Ranks(2, device, train, left, CASE_S * patience) as ranks:
            limit_s = patience * (START_S + CASE_S)
            while left:
                case = left.pop(0)
                try:
                    answers = ranks.next(limit_s)
                except RuntimeError as error:
                    yield _name(case), {"verdict": f"failed: {error}"}
                    break
                limit_s = patience * CASE_S
                alone, first, second = answers[0]["alone"], answers[0]["together"], answers[1]["together"]
                verdict = _compare(alone, first, second, case)
                yield _name(case), {"verdict": verdict, "alone": alone, "two": first}


def _compare(alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any], case: Case) -> str:
    if first != second:
        return "the two workers disagree"
    _, reproducible, dtype = case
    if reproducible:
        return "ok" if first == alone else "other bits than one worker's"
    worst = max(
        abs(a - b) / max(abs(a), abs(b))
        for one, two in zip(alone["steps"], first["steps"], strict=True)
        for a, b in zip(one, two, strict=True)
    )
    allowed = 1e-3 if dtype == "fp32" else 5e-2
    return "ok" if worst <= allowed else f"losses or statistics differ from one worker's by {worst:.1e}"


def train(device: torch.device, cases: list[Case], timeout_s: float, answer: Callable[[Any], None]) -> None:
    """One rank: each case with the other rank, and alone."""
    for schedule, reproducible, dtype in cases:
        options = CommOptions(schedule=schedule, reproducible=reproducible, dtype=dtype, bucket_mb=0.25)
        found = {}
        for name in ("alone", "together"):
            session = new_session(options, timeout_s, alone=name == "alone")
            if session.group.device != device:
                raise RuntimeError(f"kfuse has chosen {session.group.device}, not {device}")
            found[name] = _train(session)
        answer(found)


def _train(session: kf.Session) -> dict[str, Any]:
    """Loss, |gbar|, S and G2 of each step, and a digest of the final parameters."""
    group = session.group
    model = problem(group.device)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    share = MICRO_BATCHES // group.size
    mine = range(group.rank * share, (group.rank + 1) * share)
    ranges = tuple(range(r * share, (r + 1) * share) for r in range(group.size))
    steps = []
    for step in range(STEPS):
        opt.begin(StepPlan(MICRO_BATCHES * SAMPLES, ranges))
        for j in mine:
            x, y = (t.to(group.device) for t in samples(SAMPLES, seed=step * MICRO_BATCHES + j))
            with opt.micro_batch(samples=SAMPLES, last=j == mine[-1]) as micro_batch:
                loss = F.cross_entropy(model(x), y)
                micro_batch.loss = loss.detach()
                loss.backward()
        opt.step()
        opt.zero_grad()
        stats = opt.stats
        assert stats is not None
        steps.append([stats.loss, stats.grad_norm, stats.grad_variance, stats.mean_grad_sq])
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {"steps": steps, "parameters": digest.hexdigest()}


def problem(device: torch.device) -> nn.Module:
    """A small network; the same parameters each time."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(32, 700), nn.Tanh(), nn.Linear(700, 300), nn.Tanh(), nn.Linear(300, 10))
    return model.to(device)


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[count, 32] and the classes, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 32, generator=generator)
    return x, (x[:, :10] + x[:, 10:20]).argmax(1)


if __name__ == "__main__":
    sys.exit(main())
