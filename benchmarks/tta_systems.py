"""The systems of time_to_accuracy.py: how each trains a problem, by the interface that its users call.

Policies run by `kf.fit`. All else is a loop as its users write it: DistributedDataParallel where there are several
workers, gradients as bucket views, torch's fused optimizer, each worker's share of the batch in one forward. All have
the same initial model, the same order of samples and a linear warm-up; the rate then stays, but for the batch size and
a decay that is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from replicas import new_session
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tta_problems import LARGEST, Problem

import kfuse as kf
from kfuse import policies
from kfuse.comm.settings import CommOptions
from kfuse.data import EpochSampler, TensorData
from kfuse.statistics.noise_scale import moments
from kfuse.train.learning_rate import LRSchedule

EVALUATIONS = 20
"""In the samples of a problem, at equal intervals."""
WARM_UP = 0.05
"""Part of these over which the learning rate rises."""
TRUTH_SAMPLES, TRUTH_EVERY = 2048, 20
"""What the true noise scale is taken from, and in which steps."""
POLICIES: dict[str, Callable[[], kf.BasePolicy]] = {
    "goodput": policies.GoodputPolicy,
    "gns": policies.GNSPolicy,
    "gns, factor 0.25": partial(policies.GNSPolicy, factor=0.25),
    "gns, factor 0.15": partial(policies.GNSPolicy, factor=0.15),
    "critical_batch": policies.CriticalBatchPolicy,
    "seesaw": policies.SeesawPolicy,
}
"""With their defaults, but for what the name says."""


@dataclass(frozen=True)
class Job:
    """One run.

    system: a policy's name; else `fixed` (one batch size), `small` (the problem's small one), `ramp` (those of `ramp`)
    or `oracle` (sqrt(r x the true noise scale)). Policies start from the problem's small batch.
    r: the fixed cost of a step in samples, which stands for measured times; None: these are taken.
    ramp: pairs (samples, batch size) from where on. truth_until: the true noise scale is measured too, every
    TRUTH_EVERY steps before this one; oracle needs it in any case.
    target: the run ends once its quality is there, or after `times` the problem's samples.
    """

    problem: str
    system: str
    batch_size: int
    lr: float
    seed: int
    part: float = 1.0
    times: int = 1
    decay: str = "none"
    r: float | None = None
    ramp: tuple[tuple[int, int], ...] = ()
    truth_until: int = 0
    target: float | None = None


class Reached(SystemExit):
    """The quality is there: the run ends. Of a policy's exceptions, kf.fit lets those that end a script through."""


class Course:
    """What a run did: each step's settings, and the quality at equal intervals of samples, whose time does not count.

    An evaluation is due at the first step with which the run has used k / EVALUATIONS of the problem's samples. The
    quality is that of rank 0's model; no worker goes on before all know it.
    """

    def __init__(
        self, job: Job, problem: Problem, model: nn.Module, data: TensorData, of_rank_0: Callable[[float], float]
    ) -> None:
        self._job, self._problem, self._model, self._data, self._of_rank_0 = job, problem, model, data, of_rank_0
        self._truths = 1 << 30 if job.system == "oracle" else job.truth_until
        self.steps: dict[int, tuple[int, int, float]] = {}
        """By step: samples used until then, batch size, learning rate."""
        self.finished = 0
        self.evaluations: list[tuple[int, float, float]] = []
        """Steps made, seconds of training, quality."""
        self.truth: list[tuple[int, float]] = []
        """Step, noise scale."""
        self._due, self._below, self._seconds, self._resumed = 1, 0, 0.0, 0.0

    def begin_step(self) -> None:
        """Evaluates before the first step, and measures the truth where that is due; the clock stands meanwhile."""
        if self.finished == 0:
            self._evaluate()
        if self.finished < self._truths and self.finished % TRUTH_EVERY == 0:
            noise = true_noise_scale(self._problem, self._model, self._data, self.finished)
            self.truth.append((self.finished, self._of_rank_0(noise)))
            self._resumed = time.perf_counter()

    def end_step(self) -> None:
        self.finished += 1
        now = time.perf_counter()
        self._seconds, self._resumed = self._seconds + now - self._resumed, now

    def known(self, step: int, samples: int, batch_size: int, lr: float) -> None:
        """The settings of a step that is made, and the samples with it. Raises Reached where the quality is there."""
        self.steps[step] = (samples, batch_size, lr)
        samples += (self.finished - step - 1) * batch_size  # the steps since are as large, but for a change
        if samples * EVALUATIONS >= self._due * self._problem.samples:
            self._evaluate()
            self._due = math.floor(samples * EVALUATIONS / self._problem.samples) + 1

    def _evaluate(self) -> None:
        self._model.eval()
        with torch.no_grad():
            quality = self._of_rank_0(self._problem.measure(self._model))
        self._model.train()
        self.evaluations.append((self.finished, self._seconds, quality))
        at_target = self._job.target is not None and self._problem.stops and quality <= self._job.target
        self._below = self._below + 1 if at_target else 0
        if self._below == 3:  # a measurement counts as the median of it and its two neighbours
            raise Reached
        self._resumed = time.perf_counter()

    def record(self) -> dict[str, Any]:
        """As JSON: `curve` has rows of samples, steps, seconds and quality, None where that is no number."""
        used = {0: 0} | {step + 1: samples for step, (samples, _, _) in self.steps.items()}
        made = [self.steps[step][1:] for step in sorted(self.steps)]
        expected = self._problem.expected(made)
        curve = [
            (used[steps], steps, round(seconds, 4), _rounded(quality if expected is None else expected[steps]))
            for steps, seconds, quality in self.evaluations
            if steps in used
        ]
        changes = [(step, size) for step, (size, _) in enumerate(made) if step == 0 or size != made[step - 1][0]]
        return {**vars(self._job), "curve": curve, "batch_sizes": changes, "truth": self.truth}


def _rounded(quality: float) -> float | None:
    return float(f"{quality:.6g}") if math.isfinite(quality) else None


class Followed(kf.BasePolicy):
    """A policy, whose run is followed by a `Course`, with computed step times where the job has them."""

    def __init__(self, policy: kf.BasePolicy, course: Course, r: float | None) -> None:
        self._policy, self._course, self._r = policy, course, r
        self.lr_settings = policy.lr_settings

    def before_step(self) -> None:
        self._course.begin_step()

    def after_step(self) -> None:
        self._course.end_step()

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        """Called when a step's statistics are there: after the next step, or at the end."""
        if self._r is not None and signals.previous_step_time_s is not None:
            signals = replace(signals, previous_step_time_s=(self._r + signals.batch_size) / 1000)
        decision = self._policy.decide(signals)
        self._course.known(signals.step, signals.samples, signals.batch_size, signals.lr)
        return decision


def true_noise_scale(problem: Problem, model: nn.Module, data: TensorData, step: int) -> float:
    """tr(Sigma) / |G|^2 from TRUTH_SAMPLES samples, unbiased, as the model in training computes its micro-batches."""
    model, size = copy.deepcopy(model), problem.setting.micro_batch
    rows = np.random.default_rng(step).choice(problem.samples, TRUTH_SAMPLES, replace=False)
    total, squares = 0.0 * torch.nn.utils.parameters_to_vector(model.parameters()).detach().double(), 0.0
    for chunk in rows.reshape(-1, size):
        x, y = data.fetch(chunk)
        found = torch.autograd.grad(problem.loss(model(x), y), list(model.parameters()))
        gradient = torch.cat([each.flatten() for each in found]).double()
        total += gradient
        squares += size * float(gradient @ gradient)
    count = TRUTH_SAMPLES // size
    variance, grad_sq = moments(squares, float((total / count).square().sum()), TRUTH_SAMPLES, count)
    return variance / grad_sq if variance is not None and grad_sq and grad_sq > 0 else math.inf


def run(job: Job, problem: Problem) -> dict[str, Any]:
    """Trains on this worker; its record. All workers call it together."""
    return (train_kfuse if job.system in POLICIES else train_plain)(job, problem).record()


def by_optimizer(problem: Problem) -> str:
    """The scaling that docs/train.md names for the problem's optimizer."""
    return "sqrt" if problem.setting.optimizer == "adamw" else "adascale"


def train_kfuse(job: Job, problem: Problem) -> Course:
    """By kf.fit."""
    new_session(CommOptions("allreduce"))  # what `auto` takes would depend on the machine's load
    setting, model, data = problem.setting, problem.model(job.seed), problem.data(job.seed)
    made = kf.FusedAdamW if setting.optimizer == "adamw" else kf.FusedSGD
    course = Course(job, problem, model, data, lambda value: float(kf.allreduce(value if kf.rank() == 0 else 0.0)))
    with contextlib.suppress(Reached):
        kf.fit(
            model,
            data,
            made(model.parameters(), lr=job.lr),
            Followed(POLICIES[job.system](), course, job.r),
            epochs=job.times,
            batch_size=setting.batch_size,
            micro_batch=setting.micro_batch,
            micro_batch_max=LARGEST * setting.micro_batch,  # no more in one pass than DDP has
            batch_max=LARGEST * setting.batch_size,
            seed=job.seed,
            lr_scaling=by_optimizer(problem),
            lr_warmup_steps=warm_up_steps(problem),
            lr_decay=job.decay,
            loss_fn=problem.loss,
            observe_progress=False,
        )
    return course


def of_rank_0(value: float) -> float:
    """Rank 0's value, on every rank, once all have come."""
    found = torch.tensor([value if dist.get_rank() == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(found)
    return found.item()


def warm_up_steps(problem: Problem) -> int:
    """Steps of the small batch over which the learning rate rises."""
    return round(WARM_UP * problem.samples / problem.setting.batch_size)


def train_plain(job: Job, problem: Problem) -> Course:
    """A plain loop; its batch size is the job's, the ramp's or the oracle's."""
    workers = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if workers > 1 else 0
    data, bare, base = problem.data(job.seed), problem.model(job.seed), problem.setting.batch_size
    model: nn.Module = bare
    if workers > 1:
        # Buffers are not broadcast in each forward: that is faster, and rank 0's model is the one that is measured.
        model = DistributedDataParallel(bare, gradient_as_bucket_view=True, forward_sync_buffers=False)
    made: Any = torch.optim.AdamW if problem.setting.optimizer == "adamw" else torch.optim.SGD
    opt = made(model.parameters(), lr=job.lr, fused=True)
    epoch, total = problem.samples, job.times * problem.samples
    shape = LRSchedule(warmup_steps=warm_up_steps(problem), decay=job.decay, base_batch_size=base, samples=total)
    sampler = EpochSampler(epoch, job.seed)
    course = Course(job, problem, bare, data, of_rank_0 if workers > 1 else float)
    samples, step, count = 0, 0, job.batch_size
    with contextlib.suppress(Reached):
        while samples < total:
            course.begin_step()
            if job.system == "oracle" and step % TRUTH_EVERY == 0:
                count = oracle(job, problem, course)
            count = next((size for begin, size in reversed(job.ramp) if begin <= samples), count)
            first = samples % epoch
            taken = min(count, epoch - first)
            begin = first + rank * taken // workers
            x, y = data.fetch(sampler.indices(samples // epoch, begin, taken // workers))
            gain = 1.0 if job.system in ("fixed", "small") else math.sqrt(count / base)  # AdamW's
            lr = job.lr * gain * shape.shape(samples / base, shape.done(0, samples))
            opt.param_groups[0]["lr"] = lr
            problem.loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            samples, step = samples + taken, step + 1
            course.end_step()
            course.known(step - 1, samples, count, lr)
    return course


def oracle(job: Job, problem: Problem, course: Course) -> int:
    """sqrt(r N) by the true noise scale N of this step, in the problem's bounds; it at most doubles."""
    least, (_, noise) = problem.setting.batch_size, course.truth[-1]
    now = course.steps[len(course.steps) - 1][1] if course.steps else least
    assert job.r is not None
    wanted = math.sqrt(job.r * noise) if math.isfinite(noise) else LARGEST * least
    return int(min(max(round(wanted / least), 1) * least, 2 * now, LARGEST * least))
