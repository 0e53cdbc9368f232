"""Does a batch that grows within a decay cost quality at equal samples, and what besides the rate must follow it?

    python benchmarks/equal_samples.py --runs FILE --seeds 2 candidates    # what follows, and which growth: an hour
    python benchmarks/equal_samples.py --runs FILE --seeds 5 final         # those that can win: another one
    python benchmarks/equal_samples.py --runs FILE --seeds 2 muon

The GPT of time_to_accuracy.py on text, a run's samples each used once, within a cosine decay and within wsd. One
process a run, as many at a time as there are cores: no time is measured. Each finished run is a line of FILE
(benchmarks/results/equal_samples.jsonl has all of these stages'); those that are there are not made again. Tables are
of the loss over the fixed batch's, within a seed: the median and the range of the seeds, and the steps.

A plain loop: micro-batches of 8, the policy's own decisions from each step's S and G2, and an AdamW (or Muon beside
AdamW) whose settings follow the batch as a run's `follow` says, with k = batch / first batch:

    rate        rate * sqrt(k)      always
    beta1       beta1^k             the half-life in samples stays (Marek et al. 2025)
    beta2       beta2^k             likewise
    momentum    momentum^k          Muon's
    eps         eps / sqrt(k)       Malladi et al. 2022
    wd          weight decay * sqrt(k), so that rate * decay * steps stays for the same samples

Bias corrections are by running products of the betas.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from report import parser_of
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from tta_problems import Text

from kfuse import policies
from kfuse.data import EpochSampler
from kfuse.policies.signals import DECISION_LAG, BasePolicy, Bounds, Signals
from kfuse.statistics.noise_scale import moments
from kfuse.train.learning_rate import LRSchedule

MICRO, LARGEST, WARM_UP, HELD_OUT = 8, 8, 0.05, 8192
TUNING_SEED = 1000


@dataclass(frozen=True)
class Job:
    """One run. growth: `fixed`, a policy as `gns 0.25`, or `at F:K F:K`: K times the first batch from part F on."""

    optimizer: str
    decay: str
    batch: int
    lr: float
    seed: int
    growth: str = "fixed"
    follow: str = ""
    beta1: float = 0.9
    beta2: float = 0.999
    wd: float = 0.01
    part: float = 1.0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Follower:
    """AdamW, or Muon for the matrices in blocks, over one flat buffer; its settings follow the batch."""

    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        self.job = job
        params = list(model.parameters())
        self.weights = torch.cat([p.detach().flatten() for p in params])
        self.grad = torch.zeros_like(self.weights)
        at, self.matrices = 0, []
        for name, p in model.named_parameters():
            place = slice(at, at + p.numel())
            p.data, p.grad = self.weights[place].view_as(p), self.grad[place].view_as(p)
            if job.optimizer == "muon" and p.ndim == 2 and name.startswith("blocks"):
                self.matrices.append((place, p.shape))
            at += p.numel()
        self.m, self.v, self.heavy = (torch.zeros_like(self.weights) for _ in range(3))
        self.left1 = self.left2 = 1.0  # products of the betas: what the moments lack of one

    @torch.no_grad()
    def step(self, grad: Tensor, lr: float, k: float) -> None:
        """lr: with the gain. grad: the mean gradient."""
        follow, job = self.job.follow.split(), self.job
        beta1 = job.beta1**k if "beta1" in follow else job.beta1
        beta2 = job.beta2**k if "beta2" in follow else job.beta2
        momentum = 0.95**k if "momentum" in follow else 0.95
        eps = 1e-8 / math.sqrt(k) if "eps" in follow else 1e-8
        wd = job.wd * math.sqrt(k) if "wd" in follow else job.wd
        self.left1, self.left2 = self.left1 * beta1, self.left2 * beta2
        self.m.lerp_(grad, 1 - beta1)
        self.v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (self.m / (1 - self.left1)).div_((self.v / (1 - self.left2)).sqrt_().add_(eps))
        if self.matrices:
            self.heavy.lerp_(grad, 1 - momentum)
            for place, shape in self.matrices:
                nesterov = torch.lerp(grad[place], self.heavy[place], momentum).view(shape)
                made = _zeropower_via_newtonschulz(nesterov, (3.4445, -4.7750, 2.0315), 5, 1e-7)
                update[place] = made.flatten() * (0.2 * math.sqrt(max(shape)))
        self.weights.mul_(1 - lr * wd).add_(update, alpha=-lr)


_problem = lru_cache(Text)


@lru_cache
def held_out() -> tuple[Tensor, Tensor]:
    data = _problem(1.0)._split.heldout
    pair: tuple[Tensor, Tensor] = data.fetch(np.linspace(0, len(data) - 1, HELD_OUT).astype(np.int64))
    return pair


def sizes_of(job: Job) -> Callable[[int, float, tuple[float | None, float | None], int], int]:
    """A function of step, part that is over, S and G2 of the step, and the batch: the batch from DECISION_LAG on."""
    name, *rest = job.growth.split()
    most = LARGEST * job.batch
    if name == "fixed":
        return lambda step, done, seen, batch: batch
    if name == "at":
        pairs = [tuple(map(float, each.split(":"))) for each in rest]
        return lambda step, done, seen, batch: int(max([job.batch] + [job.batch * k for f, k in pairs if f <= done]))
    made: BasePolicy
    if name == "seesaw":
        made = policies.SeesawPolicy()
    else:
        made = (policies.GNSPolicy if name == "gns" else policies.CriticalBatchPolicy)(factor=float(rest[0]))
    bounds = Bounds(job.batch, most, 1, 1)

    def decide(step: int, done: float, seen: tuple[float | None, float | None], batch: int) -> int:
        signals = Signals(
            step=step, epoch=0, samples=0, lr=1.0, batch_size=batch, micro_batches=batch // MICRO, workers=1,
            micro_batch=MICRO, bounds=bounds, done=done, base_batch_size=job.batch, grad_variance=seen[0],
            grad_sq=seen[1], lr_scale=1.0,
        )  # fmt: skip
        decision = made.decide(signals)
        return batch if decision is None or decision.batch_size is None else decision.batch_size

    return decide


def run(job: Job) -> dict[str, Any]:
    """Trains; a record."""
    torch.set_num_threads(1)
    problem = _problem(job.part)
    model, data, total = problem.model(job.seed), problem.data(job.seed), problem.samples
    opt, sampler, sizes = Follower(job, model), EpochSampler(total, job.seed), sizes_of(job)
    scale = policies.SeesawPolicy().left if job.growth == "seesaw" else None
    shape = LRSchedule(
        warmup_steps=round(WARM_UP * total / job.batch), decay="none" if scale else job.decay,
        base_batch_size=job.batch, samples=total,
    )  # fmt: skip
    batch, coming, samples, step = job.batch, dict[int, int](), 0, 0
    changes, losses, mean = [(0, batch)], [], torch.zeros_like(opt.grad)
    while samples < total:
        if (new := coming.pop(step, batch)) != batch:
            batch = new
            changes.append((step, batch))
        taken = min(batch, total - samples)
        x, y = data.fetch(sampler.indices(0, samples, taken))
        mean.zero_()
        squares = loss = 0.0
        count = math.ceil(taken / MICRO)
        for xs, ys in zip(x.split(MICRO), y.split(MICRO), strict=True):
            opt.grad.zero_()
            found = problem.loss(model(xs), ys)
            found.backward()
            squares += len(xs) * float(opt.grad @ opt.grad)
            mean.add_(opt.grad, alpha=len(xs) / taken)
            loss += found.item() * len(xs) / taken
        k = batch / job.batch
        done = samples / total
        lr = job.lr * math.sqrt(k) * shape.shape(samples / job.batch, shape.done(0, samples))
        opt.step(mean, lr * (scale(done) if scale else 1.0), k)
        wanted = sizes(step, done, moments(squares, float(mean @ mean), taken, count), batch)
        if wanted != batch:
            coming[step + DECISION_LAG] = wanted
        losses.append(loss)
        samples, step = samples + taken, step + 1
        if not math.isfinite(loss):
            break
    model.eval()
    with torch.no_grad():
        pairs = zip(*(each.split(512) for each in held_out()), strict=True)
        final = float(np.mean([problem.loss(model(a), b).item() for a, b in pairs]))
    tail = losses[-max(1, len(losses) // 50) :]
    return asdict(job) | {"steps": step, "loss": final, "train": float(np.mean(tail)), "changes": changes}


def make(jobs: Sequence[Job], path: Path) -> dict[str, dict[str, Any]]:
    """All records of the file by their jobs' keys, once those of these jobs are there."""
    found: dict[str, dict[str, Any]] = {}
    names = list(asdict(Job("", "", 0, 0, 0)))
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[Job(**{name: record[name] for name in names}).key] = record
    todo = list({job.key: job for job in jobs if job.key not in found}.values())
    if todo:
        with (
            ProcessPoolExecutor(os.cpu_count(), mp.get_context("spawn")) as pool,
            path.open("a") as file,
            Progress(transient=True, console=Console(stderr=True)) as bar,
        ):
            task = bar.add_task("runs", total=len(todo))
            for made in as_completed({pool.submit(run, job): job for job in todo}):
                record = made.result()
                file.write(json.dumps(record) + "\n")
                file.flush()
                found[Job(**{name: record[name] for name in names}).key] = record
                bar.advance(task)
    return found


def sweep(args: Any, optimizer: str, decay: str, rates: Sequence[float]) -> Job:
    """The best fixed batch and rate by the tuning seed; rates go on while the best one is at an end."""
    batches = (16, 32)
    jobs = [Job(optimizer, decay, batch, lr, TUNING_SEED, part=args.part) for batch in batches for lr in rates]
    while True:
        found, beyond = make(jobs, args.runs), []
        for batch in batches:
            mine = [job for job in jobs if job.batch == batch]
            best = min(mine, key=lambda job: found[job.key]["loss"])
            ends = {min(job.lr for job in mine): 0.5, max(job.lr for job in mine): 2.0}
            if best.lr in ends:
                beyond.append(replace(best, lr=best.lr * ends[best.lr]))
        if not beyond:
            break
        jobs += beyond
    for job in sorted(jobs, key=lambda job: (job.batch, job.lr)):
        print(f"{optimizer}, {decay}: batch {job.batch}, rate {job.lr}: {found[job.key]['loss']:.4f}")
    return min(jobs, key=lambda job: found[job.key]["loss"])


def compare(base: Job, candidates: Sequence[Job], seeds: int, path: Path) -> None:
    """Prints loss and steps of each candidate over the base's, within a seed."""
    jobs = [replace(job, seed=seed) for job in (base, *candidates) for seed in range(seeds)]
    found = make(jobs, path)
    rows = []
    for job in candidates:
        pairs = [(found[replace(job, seed=s).key], found[replace(base, seed=s).key]) for s in range(seeds)]
        loss = [a["loss"] / b["loss"] for a, b in pairs]
        steps = median(a["steps"] / b["steps"] for a, b in pairs)
        what = {name: value for name, value in asdict(job).items() if value != asdict(base)[name]}
        rows.append((median(loss), f"{median(loss):.4f} ({min(loss):.4f}-{max(loss):.4f}) in {steps:.3f}  {what}"))
    spread = [found[replace(base, seed=s).key]["loss"] for s in range(seeds)]
    print(base, "losses", [round(each, 4) for each in spread])
    for _, row in sorted(rows):
        print("  ", row)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    args = parser.parse_args()
    for stage in args.stages:
        STAGES[stage](args)
    return 0


DECAYS = ("cosine", "wsd")
RATES = (0.002, 0.0028, 0.004, 0.0057)
BETAS = "beta1 beta2"
FOLLOWS = ("", "beta2", "beta1", "eps", "wd", BETAS, "beta1 beta2 wd", "beta1 beta2 eps wd")
GROWTHS = (
    "gns 0.15", "gns 0.25", "gns 0.5", "gns 1", "critical 0.25", "seesaw", "at 0.45:4", "at 0.54:8", "at 0.5:4 0.75:8",
    "at 0.3:2 0.5:4 0.75:8",
)  # fmt: skip
FINAL = ("gns 0.15", "gns 0.25", "gns 0.5", "seesaw", "critical 0.25", "at 0.3:2 0.5:4 0.75:8")
TUNED = {"cosine": 0.004, "wsd": 0.0028}  # rates with betas 0.8 and 0.998, by the stage `betas`
RATES_OF_MUON = (0.002, 0.004, 0.008)


def stage_candidates(args: Any) -> None:
    """Each growth with all that may follow, and what follows one by one."""
    for decay in DECAYS:
        base = sweep(args, "adamw", decay, RATES)
        jobs = [replace(base, growth="gns 0.5", follow=follow) for follow in FOLLOWS]
        jobs += [replace(base, growth=growth, follow=FOLLOWS[-1]) for growth in GROWTHS]
        jobs += [replace(base, growth=growth) for growth in GROWTHS[4:8]]
        compare(base, list(dict.fromkeys(jobs)), args.seeds, args.runs)


def stage_betas(args: Any) -> None:
    """Rates and betas of the fixed batch."""
    for decay in DECAYS:
        best = sweep(args, "adamw", decay, RATES)
        betas = ((0.9, 0.998), (0.9, 0.995), (0.8, 0.999), (0.8, 0.998), (0.8, 0.995), (0.7, 0.998), (0.7, 0.995))
        rates = [rate for rate in RATES if rate >= best.lr][:3]
        jobs = [replace(best, lr=lr, beta1=beta1, beta2=beta2) for beta1, beta2 in betas for lr in rates]
        found = make(jobs, args.runs)
        for job in jobs:
            print(decay, job.beta1, job.beta2, job.lr, round(found[job.key]["loss"], 4))


def stage_final(args: Any) -> None:
    """Those that can win, beside the fixed batch that takes half of the steps; also where the fixed batch has betas of
    its own.
    """
    for decay in DECAYS:
        best = sweep(args, "adamw", decay, RATES)
        tuned = replace(best, lr=TUNED[decay], beta1=0.8, beta2=0.998)
        for base in (best, tuned):
            jobs = [replace(base, growth=growth, follow=follow) for growth in FINAL[:3] for follow in ("", BETAS)]
            if base is best:
                jobs += [replace(base, growth=growth, follow=BETAS) for growth in FINAL[3:]]
            larger = replace(base, batch=32, lr=0.0028)
            jobs += [larger, replace(larger, beta1=base.beta1**2, beta2=base.beta2**2)]
            compare(base, jobs, args.seeds, args.runs)


def stage_muon(args: Any) -> None:
    for decay in DECAYS:
        base = sweep(args, "muon", decay, RATES_OF_MUON)
        follows = "", "beta2", BETAS, "beta1 momentum", "beta1 beta2 momentum"
        jobs = [replace(base, growth=growth, follow=follow) for growth in FINAL[1:3] for follow in follows]
        compare(base, jobs, args.seeds, args.runs)


STAGES: dict[str, Callable[[Any], None]] = {
    "candidates": stage_candidates, "betas": stage_betas, "final": stage_final,
    "muon": stage_muon,
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
