"""Each combination of settings trains as plain torch does, or a rule refuses it.

Quick tests: each two values of the supported combinations together. `full`: each three on 1 to 4 workers, and what all
combinations are asked. `pytest -m long tests/test_support.py`: all of them train on 1 to 4 workers (some 5 minutes).
"""

from __future__ import annotations

import itertools
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import support
import torch.nn as nn
from distributed import run_workers
from elastic_job import During, Job, assert_exact, override, run_job, until, words
from support import AXES, CASES, Case
from support_reference import Trained, distance, tolerance, trained
from test_redundancy_jobs import Strikes

import kfuse as kf
from kfuse.elastic.supervisor import Supervisor
from kfuse.settings import rules

COUNTS = (1, 2, 3, 4)
SUPPORTED = support.supported()


def values(case: Case) -> list[tuple[str, str]]:
    """Each axis and value of the combination."""
    return list(zip(Case._fields, case, strict=True))


def pairs(case: Case) -> list[Any]:
    """Each two values of the combination, with their axes."""
    return list(itertools.combinations(values(case), 2))


def triples(case: Case) -> list[Any]:
    """Each three."""
    return list(itertools.combinations(values(case), 3))


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
            wrong = [result for result in results if not isinstance(result, Trained)]
            if wrong:
                failed.append(f"{name}: {wrong[0]}")
                continue
            done = [result for result in results if isinstance(result, Trained)]
            if len({result.digest for result in done}) > 1:
                failed.append(f"{name}: the workers end with different models")
            error = max(result.error for result in done)
            if not error <= tolerance(case):  # a NaN is no small number either
                failed.append(f"{name}: {error} from torch's parameters")
            if case.reproducible == "yes":
                bits[case.precision, case.clip, case.optimizer][done[0].digest].append(name)
    failed += [f"not the same bits: {dict(found)}" for found in bits.values() if len(found) > 1]
    assert not failed, "\n".join(failed)


FIXED = [case for case in SUPPORTED if case.workers == "fixed"]


def test_each_two_values_train() -> None:
    chosen = covering(FIXED)
    assert_trained(chosen, (2,))
    assert_trained([case for case in chosen if case.reproducible == "yes"], (1, 3))


@pytest.mark.long
def test_each_three_values_train() -> None:
    assert_trained(covering(FIXED, triples), COUNTS)


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("sync", [sync for sync in AXES["sync"] if sync != "pair"])
def test_all_combinations_train(sync: str) -> None:
    assert_trained([case for case in FIXED if case.sync == sync], COUNTS)


@pytest.mark.parametrize("optimizer", AXES["optimizer"])
def test_differences_would_be_seen(optimizer: str) -> None:
    """Clipping changes the parameters by far more than rounding does."""
    cases = [Case(optimizer=optimizer, clip=clip) for clip in ("none", "clip_norm")]
    plain, clipped, start = (list(model.parameters()) for model in (*map(alone, cases), support.net(cases[0])))
    assert distance(clipped, plain, start) > 100 * tolerance(cases[0])


def alone(case: Case) -> nn.Module:
    return support.train(case, kf.init().group)


# -- workers that are lost --------------------------------------------------------------------------------------------

JOB = words(
    "model=mlp data=digits model.hidden=[160,96] batch.size=48 batch.micro=4 train.epochs=10000 policy=none",
    "train.eval_every=100000 workers.count=2 workers.max=2 comm.bucket_mb=0.06 checkpoint.every_steps=2 lr.base=0.003",
    "elastic.snapshot_every=5 elastic.max_failures=20",
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
