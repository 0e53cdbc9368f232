"""Each combination of settings trains as plain torch does, or a rule refuses it.

Quick tests: each two values of the supported combinations together. `pytest -m long tests/test_support.py`: all of them
train on 1 to 4 workers (some 5 minutes).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from distributed import run_workers
from elastic_job import During, Job, assert_exact, override, run_job, until, words
from plain_lamb import PlainLAMB
from support import ADAMW, AXES, BATCH, CASES, CLIP_NORM, LAMB, MICRO, SAMPLES, SEED, SGD, STEPS, Case, Refused
from test_redundancy_jobs import Strikes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kfuse as kf
from kfuse.data.fetching import permutation
from kfuse.elastic.supervisor import Supervisor
from kfuse.settings import rules
from kfuse.train.evaluation import params_sha256

COUNTS = (1, 2, 3, 4)
SUPPORTED = support.supported()


def values(case: Case) -> list[tuple[str, str]]:
    """Each axis and value of the combination."""
    return list(zip(Case._fields, case, strict=True))


def pairs(case: Case) -> list[Any]:
    """Each two values of the combination, with their axes."""
    return list(itertools.combinations(values(case), 2))


def covering(cases: Iterable[Case], parts: Callable[[Case], Iterable[Any]] = pairs) -> list[Case]:
    """As few of the cases as a greedy search finds, in which each part occurs that occurs in any of them.

    parts: of a combination; by default each two values.
    """
    left = {case: set(parts(case)) for case in cases}
    wanted, chosen = set().union(*left.values()), list[Case]()
    while wanted:
        best = max(left, key=lambda case: len(left[case] & wanted))
        chosen.append(best)
        wanted -= left.pop(best)
    return chosen


# -- what is refused --------------------------------------------------------------------------------------------------


def test_every_value_is_supported_somewhere() -> None:
    for axis, known in AXES.items():
        assert {getattr(case, axis) for case in SUPPORTED} == set(known), axis


def refused_by_one_rule() -> list[Case]:
    """Returns, of each rule that refuses some of the combinations, one that nothing else refuses."""
    found: dict[int, Case] = {}
    for case in CASES:
        broken = list(rules.broken(support.facts(case)))
        if len(broken) == 1:
            found.setdefault(id(broken[0]), case)
    return list(found.values())


def test_scripts_and_the_command_line_refuse_what_the_rules_do_and_nothing_else() -> None:
    refused = refused_by_one_rule()
    assert len(refused) >= 8
    cases = [*refused, *covering(SUPPORTED)]
    assert {case for case, said in support.ask_script(cases).items() if said} == set(refused)
    at_shell = [case for case in cases if case.clip != "GradScaler"]
    assert {case for case in at_shell if support.ask_command_line(case)} == set(refused) & set(at_shell)


# -- what torch makes of each combination ----------------------------------------------------------------------------


class Reference:
    """The same training as `support.train`, on a worker of torch's default process group.

    With ssgd fp32 parameters are trained by DistributedDataParallel. bf16 parameters have fp32 masters, where kfuse
    has them; LAMB is the paper's, in float64.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.rank, self.size = case, dist.get_rank(), dist.get_world_size()
        self.model = support.net(case)
        self.params = list(self.model.parameters())
        self.sixteen_bit = case.precision == "bf16 parameters"
        together = case.sync == "ssgd" and not self.sixteen_bit
        self.wrapped = DistributedDataParallel(self.model) if together else self.model
        self.weights = self.params
        if case.optimizer == "lamb":
            self.weights = [nn.Parameter(p.detach().double()) for p in self.params]
        elif self.sixteen_bit and case.optimizer != "torch":
            self.weights = [nn.Parameter(p.detach().float()) for p in self.params]
        makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": partial(torch.optim.SGD, **SGD),  # type: ignore[arg-type]
            "lamb": partial(PlainLAMB, **LAMB),
        }
        self.opt = makes.get(case.optimizer, partial(torch.optim.AdamW, **ADAMW))(self.weights)  # type: ignore[arg-type]
        self.start = self._flat()
        """The common model of the round, or the central model."""
        self.velocity = torch.zeros_like(self.start)

    def train(self) -> list[Tensor]:
        """The parameters after all steps."""
        order = torch.from_numpy(permutation(SAMPLES, SEED))
        for step in range(STEPS):
            before = self._flat()
            gradients = self._gradients(order[step * BATCH :][:BATCH])
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient.to(weight.dtype)
            if self.case.clip == "clip_norm":
                nn.utils.clip_grad_norm_(self.weights, CLIP_NORM)
            self.opt.step()
            self.opt.zero_grad()
            if self.case.sync.startswith("local"):
                self._average(step)
            elif self.case.sync == "sma" and self.size > 1:
                self._move_centre(before, step)
            with torch.no_grad():
                for p, weight in zip(self.params, self.weights, strict=True):
                    if p is not weight:
                        p.copy_(weight)
            self.model.zero_grad()
        return [p.detach() for p in self.params]

    def _gradients(self, chosen: Tensor) -> list[Tensor]:
        """fp32: with ssgd the mean over all workers, else over this one's micro-batches."""
        parts = BATCH // MICRO
        mine = range(parts * self.rank // self.size, parts * (self.rank + 1) // self.size)
        total = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        for j in mine:
            x, y = (t[chosen[j * MICRO :][:MICRO]] for t in support.data())
            if isinstance(self.wrapped, DistributedDataParallel):
                with self.wrapped.no_sync() if j != mine[-1] else contextlib.nullcontext():
                    support.loss_of(self.case, self.wrapped, x, y).backward()
                continue
            support.loss_of(self.case, self.model, x, y).backward()
            for each, p in zip(total, self.params, strict=True):
                assert p.grad is not None
                each += p.grad.float()
            self.model.zero_grad()
        if isinstance(self.wrapped, DistributedDataParallel):
            return [p.grad / len(mine) for p in self.params if p.grad is not None]
        if self.case.sync == "ssgd":
            for each in total:
                dist.all_reduce(each)
            return [each / parts for each in total]
        return [each / len(mine) for each in total]

    def _average(self, step: int) -> None:
        """Local SGD: every second step, and at the end; the outer step (DiLoCo, algorithm 1) every second step."""
        outer, round_ends = "outer" in self.case.sync, step % 2 == 1
        if not (round_ends or step == STEPS - 1):
            return
        mean = self._mean(self._flat())
        if not outer:
            for state in self.opt.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.copy_(self._mean(value))
        elif round_ends:
            gradient = self.start - mean
            self.velocity = 0.5 * self.velocity + gradient
            mean = self.start = self.start - 0.7 * (gradient + 0.5 * self.velocity)
        self._write(mean)

    def _move_centre(self, before: Tensor, step: int) -> None:
        """CROSSBOW's update, alpha = 1 / workers and momentum 0.9. The central model is the result."""
        correction = (before - self.start) / self.size
        self.velocity = 0.9 * self.velocity + self._mean(correction) * self.size
        self.start = self.start + self.velocity
        self._write(self.start if step == STEPS - 1 else self._flat() - correction)

    def _mean(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def _flat(self) -> Tensor:
        return torch.cat([weight.detach().double().reshape(-1) for weight in self.weights])

    @torch.no_grad()
    def _write(self, flat: Tensor) -> None:
        for weight, part in zip(self.weights, flat.split([w.numel() for w in self.weights]), strict=True):
            weight.copy_(part.view(weight.shape))


def tolerance(case: Case) -> float:
    """Of `distance`: what rounding may do."""
    if case.precision == "bf16 parameters" and case.optimizer == "torch":
        return 0.2  # no fp32 masters: each step, average and moment is rounded to bf16
    return {"fp32": 5e-5, "autocast bf16": 5e-3, "bf16 parameters": 0.01, "bf16 messages": 0.03}[case.precision]


@torch.no_grad()
def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """How far parameters are from others, as a part of what training did to these: of the tensor where it is most."""
    each = zip(ours, theirs, start, strict=True)
    return max(float((a.double() - b.double()).norm() / (b.double() - c.double()).norm()) for a, b, c in each)


def trained(cases: Sequence[Case]) -> list[tuple[str, float] | str]:
    """For a worker: trains with one combination after the other. Returns of each the hash of the parameters' bits, and
    their `distance` from the reference; a text: why it failed.
    """
    gc.freeze()  # each first step looks for a DistributedDataParallel among all objects but the frozen ones
    group = kf.init().group
    alone: dict[str, Any] = dict(store=dist.HashStore(), rank=0, world_size=1) if group.size == 1 else {}
    dist.init_process_group("gloo", **alone)
    references: dict[Case, list[Tensor]] = {}
    found: list[tuple[str, float] | str] = []
    for case in cases:
        try:
            model = support.train(case, group)
        except Refused as refused:
            found.append(str(refused))
            continue
        precision = "fp32" if case.precision == "bf16 messages" else case.precision
        clip = "clip_norm" if case.clip == "clip_norm" else "none"
        plain = Case(sync=case.sync, precision=precision, clip=clip, optimizer=case.optimizer)
        if plain not in references:
            references[plain] = Reference(plain).train()
        start = list(support.net(case).parameters())
        found.append((params_sha256(model), distance(list(model.parameters()), references[plain], start)))
    return found


# -- a fixed number of workers ----------------------------------------------------------------------------------------


def assert_trained(cases: list[Case], counts: tuple[int, ...]) -> None:
    """Trains with each combination on so many workers: with the same bits where these are promised. All failures are
    listed.
    """
    bits: dict[tuple[str, ...], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    failed = []
    for count in counts:
        for case, *results in zip(cases, *run_workers(count, trained, cases, timeout_s=500), strict=True):
            name = f"{count} workers, {', '.join(case)}"
            done = [result for result in results if not isinstance(result, str)]
            if len(done) < count:
                failed.append(f"{name}: {results}")
                continue
            digests, errors = zip(*done, strict=True)
            if len(set(digests)) > 1:
                failed.append(f"{name}: the workers end with different models")
            error = max(errors)
            if not error <= tolerance(case):  # a NaN is no small number either
                failed.append(f"{name}: {error} from torch's parameters")
            if case.reproducible == "yes":
                bits[case.precision, case.clip, case.optimizer][digests[0]].append(name)
    failed += [f"not the same bits: {dict(found)}" for found in bits.values() if len(found) > 1]
    assert not failed, "\n".join(failed)


FIXED = [case for case in SUPPORTED if case.workers == "fixed"]


@pytest.mark.full
def test_each_two_values_train() -> None:
    chosen = covering(FIXED)
    assert_trained(chosen, (2,))
    assert_trained([case for case in chosen if case.reproducible == "yes"], (1, 3))


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("sync", [sync for sync in AXES["sync"] if sync != "pair"])
def test_all_combinations_train(sync: str) -> None:
    assert_trained([case for case in FIXED if case.sync == sync], COUNTS)


# -- workers that are lost --------------------------------------------------------------------------------------------

JOB = words(
    "model=mlp data=digits model.hidden=[160,96] batch.size=48 batch.micro=4 train.epochs=10000 policy=none",
    "train.heldout_every=100000 workers.count=2 workers.max=2 comm.bucket_mb=0.06 checkpoint.every_steps=2",
    "lr.base=0.003 elastic.max_failures=20",
)


def elastic() -> list[Case]:
    """With sharded state each value of `workers` with each of every other axis; with replicated state each value."""
    cases = [case for case in SUPPORTED if case.workers != "fixed"]
    sharded = [case for case in cases if case.state == "sharded"]
    return [
        *covering(sharded, lambda case: [pair for pair in pairs(case) if ("workers", case.workers) in pair]),
        *covering([case for case in cases if case.state == "replicated"], values),
    ]


def after_a_checkpoint(strikes: Strikes) -> During:
    async def during(supervisor: Supervisor, job: Job) -> None:
        await until("a checkpoint", lambda: job.of_kind("checkpoint"))
        await strikes(supervisor, job)

    return during


@pytest.mark.full
@pytest.mark.jobs
def test_elastic_combinations_lose_a_worker_and_go_on(tmp_path: Path) -> None:
    failed = []
    for number, case in enumerate(elastic()):
        strikes = Strikes([signal.SIGKILL], number, 2)
        settings = [override(key, value) for key, value in support.overrides(case).items()]
        job = run_job(
            tmp_path / f"run{number}", [*JOB, f"optimizer={case.optimizer}", *settings], after_a_checkpoint(strikes)
        )
        lost = {failure["pid"] for failure in job.of_kind("failure")}
        try:
            assert job.error is None
            assert set(strikes.struck) == lost, "no other worker is lost"
            assert math.isfinite(job.summary["loss"])
            if case.sync != "pair":
                assert_exact(job)
            goes_back = case.state == "sharded" and case.workers != "elastic, mirror"
            assert goes_back == bool(job.of_kind("went_back"))
        except AssertionError as error:
            failed.append(f"{case}: {error}\n{job.told()}")
    assert not failed, "\n\n".join(failed)
