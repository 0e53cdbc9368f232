"""The systems of time_to_accuracy.py: how each trains a problem, by the interface that its users call.

Those of kfuse run by `kf.fit`. DDP is a loop as its users write it: DistributedDataParallel, gradients as bucket views,
torch's fused optimizer, each worker's share of the batch in one forward. All have the same initial model, the same
order of samples and a linear warm-up. Then the learning rate changes with the batch size only: a decay would tie the
time to the target to the length of the run. Only seesaw and `cosine`, whose decay seesaw replaces, lower it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from step_variants import new_session
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tta_problems import LARGEST, Problem, deviations

import kfuse as kf
from kfuse import policies
from kfuse.comm.settings import CommOptions
from kfuse.data import EpochSampler
from kfuse.train.learning_rate import LRSchedule

EVALUATIONS = 20
"""In a run, at equal intervals of samples."""
WARM_UP = 0.05
"""Part of the samples over which the learning rate rises."""
FIXED = ("ddp-small", "ddp-best", "fixed", "cosine", "linear")
"""The systems whose batch size never changes and whose learning rate does not depend on the gradients."""


@dataclass(frozen=True)
class Job:
    """One run. Of DDP `batch_size` is its fixed batch size; kfuse's systems start from the problem's."""

    problem: str
    system: str
    batch_size: int
    lr: float
    seed: int
    part: float = 1.0


class Course:
    """What a run did: each step's settings, and the quality at equal intervals of samples.

    The time of evaluations does not count.

    An evaluation is due at the first step with which the run has used k / EVALUATIONS of its samples. Every worker
    evaluates by itself, at the same time; none goes on before all have ended.
    """

    def __init__(self, problem: Problem, model: nn.Module, barrier: Callable[[], object]) -> None:
        self._problem, self._model, self._barrier = problem, model, barrier
        self.steps: dict[int, tuple[int, int, float]] = {}
        """By step: samples used until then, batch size, learning rate."""
        self.finished = 0
        """Steps made."""
        self.evaluations: list[tuple[int, float, float]] = []
        """Steps made, seconds of training, quality."""
        self._due, self._spent, self._resumed = 0, 0.0, 0.0
        self._seconds = 0.0
        """Of training, up to the end of the newest step."""

    def start(self) -> None:
        """Evaluates the untrained model; then the clock starts."""
        self.evaluate()

    def end_step(self) -> None:
        """A step has ended."""
        self.finished += 1
        self._seconds = self._spent + time.perf_counter() - self._resumed

    def evaluate_when_due(self, samples: int) -> None:
        """samples: those of the steps made."""
        if samples * EVALUATIONS >= self._due * self._problem.samples:
            self.evaluate()
            self._due = math.floor(samples * EVALUATIONS / self._problem.samples) + 1

    def evaluate(self) -> None:
        """Its time does not count."""
        self._spent = self._spent + time.perf_counter() - self._resumed if self.finished else 0.0
        self._model.eval()
        with torch.no_grad():
            quality = self._problem.measure(self._model)
        self._model.train()
        self.evaluations.append((self.finished, self._seconds, quality))
        self._due = max(self._due, 1)
        self._barrier()
        self._resumed = time.perf_counter()

    def record(self) -> dict[str, Any]:
        """As JSON: `curve` has rows of samples, steps, seconds and quality, None where that is no number."""
        used = {0: 0} | {step + 1: samples for step, (samples, _, _) in self.steps.items()}
        curve = [
            (used[steps], steps, round(seconds, 4), float(f"{quality:.6g}") if math.isfinite(quality) else None)
            for steps, seconds, quality in self.evaluations
        ]
        sizes = [self.steps[step][1] for step in sorted(self.steps)]
        changes = [(step, size) for step, size in enumerate(sizes) if step == 0 or size != sizes[step - 1]]
        return {"curve": curve, "batch_sizes": changes}


class Timed(kf.BasePolicy):
    """Calls a policy, and records the steps and evaluations of the run in a `Course`."""

    def __init__(self, policy: kf.BasePolicy, course: Course) -> None:
        self._policy, self._course = policy, course
        self.lr_settings = policy.lr_settings

    def before_step(self) -> None:
        if self._course.finished == 0:
            self._course.start()

    def after_step(self) -> None:
        self._course.end_step()

    def initial(self) -> kf.Decision | None:
        return self._policy.initial()

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        """Called when a step's statistics are there: after the next step, or at the end."""
        course = self._course
        course.steps[signals.step] = (signals.samples, signals.batch_size, signals.lr)
        since = course.finished - signals.step - 1
        decision = self._policy.decide(signals)
        # The steps since then are as large as this one, except by a change; `record` has their true samples.
        course.evaluate_when_due(signals.samples + since * signals.batch_size)
        return decision

    def state_dict(self) -> dict[str, Any]:
        return self._policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state)


def warm_up_steps(problem: Problem) -> int:
    """Steps of the small batch over which the learning rate rises."""
    return round(WARM_UP * problem.samples / problem.setting.batch_size)


def largest(problem: Problem) -> kf.BasePolicy:
    """The largest batch size, from the first step on."""
    return policies.SchedulePolicy([{"step": 0, "batch_size": LARGEST * problem.setting.batch_size}])


def by_optimizer(problem: Problem, of_sgd: str) -> str:
    """The scaling that docs/learning_rate.md names for the problem's optimizer."""
    return "sqrt" if problem.setting.optimizer == "adamw" else of_sgd


KFUSE: dict[str, Callable[[Problem], tuple[kf.BasePolicy, str, str]]] = {
    "fixed": lambda problem: (kf.NoPolicy(), "none", "none"),
    "cosine": lambda problem: (kf.NoPolicy(), "none", "cosine"),
    "linear": lambda problem: (largest(problem), "linear", "none"),
    "gns": lambda problem: (policies.GNSPolicy(), by_optimizer(problem, "adascale"), "none"),
    "adascale": lambda problem: (largest(problem), "adascale", "none"),
    "goodput": lambda problem: (policies.GoodputPolicy(), "adascale", "none"),
    "seesaw": lambda problem: (policies.SeesawPolicy(), by_optimizer(problem, "linear"), "none"),
}
"""The policy with its defaults, lr.scaling and lr.decay."""


def run(job: Job, problem: Problem) -> dict[str, Any]:
    """Trains on this worker; its record. All workers call it together."""
    course = (train_ddp if job.system.startswith("ddp") else train_kfuse)(job, problem)
    made = [course.steps[step] for step in sorted(course.steps)]
    if len(made) != course.finished:
        raise RuntimeError(f"{job}: {course.finished} steps were made, and {len(made)} are known")
    record = {**vars(job), "workers": dist.get_world_size(), **course.record()}
    if job.problem == "quadratic":
        losses = [(steps, quality) for steps, _, quality in course.evaluations]
        record["deviations"] = deviations([(size, lr) for _, size, lr in made], losses)
    return record


def train_kfuse(job: Job, problem: Problem) -> Course:
    """By kf.fit."""
    new_session(CommOptions("allreduce"))  # what `auto` takes would depend on the machine's load
    policy, scaling, decay = KFUSE[job.system](problem)
    setting, model = problem.setting, problem.model(job.seed)
    made = kf.FusedAdamW if setting.optimizer == "adamw" else kf.FusedSGD
    course = Course(problem, model, kf.barrier)
    kf.fit(
        model,
        problem.data(job.seed),
        made(model.parameters(), lr=job.lr),
        kf.Hook(Timed(policy, course)),
        train_epochs=1,
        batch_size=setting.batch_size,
        batch_micro=setting.micro_batch,
        batch_micro_max=LARGEST * setting.micro_batch,  # no more in one pass than DDP has
        batch_max=LARGEST * setting.batch_size,
        seed=job.seed,
        lr_scaling=scaling,
        lr_warmup_steps=warm_up_steps(problem),
        lr_decay=decay,
        loss_fn=problem.loss,
        observe_progress=False,
    )
    return course


def train_ddp(job: Job, problem: Problem) -> Course:
    """By DistributedDataParallel."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    data, model = problem.data(job.seed), problem.model(job.seed)
    # Buffers are not broadcast in each forward: that is faster, and rank 0's are those of the model that is measured.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    made: Any = torch.optim.AdamW if problem.setting.optimizer == "adamw" else torch.optim.SGD
    opt = made(ddp.parameters(), lr=job.lr, fused=True)
    count, samples = job.batch_size, problem.samples
    warm_up = warm_up_steps(problem) * problem.setting.batch_size / count
    schedule = LRSchedule(warmup_steps=warm_up, base_batch_size=count, samples=samples)
    order = EpochSampler(samples, job.seed).indices(0, 0, samples)
    course = Course(problem, model, dist.barrier)
    course.start()
    for step in range(samples // count):
        x, y = data.fetch(order[step * count : (step + 1) * count][rank * count // workers :][: count // workers])
        lr = job.lr * schedule.shape(step, schedule.done(step, step * count))
        opt.param_groups[0]["lr"] = lr
        problem.loss(ddp(x), y).backward()
        opt.step()
        opt.zero_grad()
        course.end_step()
        course.steps[step] = ((step + 1) * count, count, lr)
        course.evaluate_when_due((step + 1) * count)
    return course
