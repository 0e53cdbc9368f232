"""Every transport between two workers, beside one worker alone: NCCL on GPUs, gloo on a CPU.

    python benchmarks/gpu_ranks.py --device cuda --json transports.json

Losses, statistics and parameters of two workers must be those of one; with reproducible sums, bit by bit.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_workers import last_line, report, start
from report import parser_of
from torch import nn
from workers import leave, messages_of, set_torchrun_variables

import kfuse as kf
from kfuse import session
from kfuse.comm.settings import TRANSPORT_NAMES, CommOptions
from kfuse.comm.step import StepPlan

STEPS, MICRO_BATCHES, SAMPLES = 8, 8, 16
LIMIT_S, TIMEOUT_S = 25.0, 10.0
"""How long the workers may take to start, or for a case; and what they wait for each other's messages."""
_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> int:
    """Runs all cases. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    cases = [CommOptions(name) for name in TRANSPORT_NAMES if name != "symmetric"]
    if options.device == "cuda" and torch.cuda.device_count() > 1:  # it needs a GPU each
        cases += [CommOptions("symmetric"), CommOptions("symmetric", reproducible=True)]
    cases += [CommOptions("allreduce", dtype="bf16"), CommOptions(dtype="bf16"), CommOptions(state="sharded")]
    # Deterministic algorithms stay on: the last ones.
    cases += [CommOptions(reproducible=True), CommOptions(reproducible=True, state="sharded")]
    named = {name_of(case): replace(case, bucket_mb=0.25) for case in cases}
    patience = 1 if options.device == "cuda" else 3
    results = _run(options.device, named, patience)
    return report(options.device, results, options.json, "transports give what one worker gives")


def name_of(case: CommOptions) -> str:
    other = [value for value in (case.dtype, case.state) if value not in ("fp32", "replicated")]
    return ", ".join([case.schedule, *["reproducible"] * case.reproducible, *other])


def _run(device: str, cases: dict[str, CommOptions], patience: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One pair of workers for all cases. A case that fails or hangs ends them; the next ones get a new pair."""
    left = dict(cases)
    while left:
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in left}
        try:
            for name, answer in messages_of(2, train, device, left, TIMEOUT_S * patience, limit_s=LIMIT_S * patience):
                answers[name].append(answer)
                if len(answers[name]) == 2:
                    alone, both = answer["alone"], [each["together"] for each in answers[name]]
                    yield name, {"verdict": _compare(alone, *both, left.pop(name)), "alone": alone, "two": both[0]}
        except Exception as error:  # of a worker, or a time that is over
            name = next(iter(left))
            del left[name]
            yield name, {"verdict": f"failed: {last_line(error)}"}


def _compare(alone: dict[str, Any], first: dict[str, Any], second: dict[str, Any], case: CommOptions) -> str:
    if first != second:
        return "the two workers disagree"
    if case.reproducible:
        return "ok" if first == alone else "other bits than one worker's"
    steps, other = np.array(alone["steps"]), np.array(first["steps"])
    worst = float((np.abs(steps - other) / np.maximum(np.abs(steps), np.abs(other))).max())
    allowed = 1e-3 if case.dtype == "fp32" else 5e-2
    return "ok" if worst <= allowed else f"losses or statistics differ from one worker's by {worst:.1e}"


def train(rank: int, device: str, cases: dict[str, CommOptions], timeout_s: float, port: int, answers: Any) -> None:
    """One rank: each case alone, and with the other rank, which is answered at the same time."""
    set_torchrun_variables(rank, 2, port)
    for name, case in cases.items():
        found = {who: _train(_session(device, rank, case, timeout_s, who == "alone")) for who in ("alone", "together")}
        answers.put((name, found))
    leave(answers)


def _session(device: str, rank: int, case: CommOptions, timeout_s: float, alone: bool) -> kf.Session:
    """Another session of this process. alone: of this worker only."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    kept = {name: os.environ.pop(name) for name in _GROUP} if alone else {}
    session.reset()
    try:
        return start(device, rank, **case.named(), comm_timeout_s=timeout_s)
    finally:
        os.environ.update(kept)


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
