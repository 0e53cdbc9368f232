"""A noise scale in trainings by Hugging Face's Trainer, Accelerate and Lightning: same parameters, right statistics."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from distributed import run_workers
from trainings import OWN, SEQUENCES, TRAININGS, Case, Seen, gradients

CASES = [Case(1, clip=0.1, bf16=True), Case(4)]  # 90 sequences: with 4 the last window is a short one
BY_TOKENS = ("trainer", "tokens")


def trained(framework: str, cases: list[Case], monitored: bool) -> list[Seen]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {"LOCAL_RANK": os.environ["RANK"], **os.environ}
    seen = []
    for case in cases:
        for name in names:  # Lightning takes them away at a training's end
            os.environ.pop(name, None)
        if given["WORLD_SIZE"] != "1" or case.launched:
            os.environ.update({name: given[name] for name in names})
        seen.append((TRAININGS | OWN)[framework](case, monitored))
    return seen


def variants(framework: str, workers: int) -> list[Case]:
    """Cases that have the parameters and figures of a plain one."""
    if framework not in ("trainer", "accelerate"):
        return []
    found = [Case(fsdp=True) if workers > 1 else Case(launched=True)]
    return found if framework == "accelerate" else [Case(evaluated=True), Case(compiled=True), *found]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning"])
def test_parameters_have_the_same_bits(framework: str, workers: int) -> None:
    cases = [*CASES, *(replace(each, clip=0.1) for each in variants(framework, workers) if not each.compiled)]
    if framework == "trainer" and workers == 1:
        cases.append(Case(interrupted=True))
    with_monitor, without = (run_workers(workers, trained, framework, cases, monitored) for monitored in (True, False))
    for case, ours, theirs in zip(cases, with_monitor[0], without[0], strict=True):
        assert all(map(torch.equal, ours.parameters, theirs.parameters)), case
        assert len({stats.step for stats in ours.stats}) == ours.stats[-1].step + 1 > 8, case
        assert ours.stats[0].micro_batches == workers * case.accumulate, case


def truth(framework: str) -> tuple[float, float]:
    """S and |G|^2 of micro-batches of two sequences, drawn without replacement, in float64.

    The unit of Trainer, and of weights by tokens, is the token: S is what makes E|gbar - G|^2 = S / tokens for the mean
    over a step's tokens. Of the others it is the sample: a micro-batch's gradient is the mean over its tokens, and
    S / 2 its variance.
    """
    found = list(gradients())
    sums, tokens = torch.stack([each for each, _ in found]), torch.tensor([float(count) for _, count in found]).double()
    spread = float(tokens.std() / tokens.mean())
    assert 0.7 < spread < 1.3, spread
    if framework in BY_TOKENS:
        mean = sums.sum(0) / tokens.sum()
        variance = float((sums - tokens[:, None] * mean).square().sum()) / (SEQUENCES - 1) / float(tokens.mean())
        return variance, float(mean.square().sum()) - variance / float(tokens.sum())
    pairs = torch.tensor(list(itertools.combinations(range(SEQUENCES), 2)))
    means = (sums[pairs[:, 0]] + sums[pairs[:, 1]]) / (tokens[pairs[:, 0]] + tokens[pairs[:, 1]])[:, None]
    mean, count = means.mean(0), SEQUENCES / 2
    variance = 2 * float((means - mean).square().sum(1).mean()) * count / (count - 1)
    return variance, float(mean.square().sum()) - variance / SEQUENCES


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("framework", TRAININGS)
def test_s_and_g2_are_those_of_the_samples_gradients(framework: str, workers: int) -> None:
    case = Case(accumulate=2, epochs=12, lr=0.0)
    cases = [case, *(replace(variant, epochs=1, lr=0.0) for variant in variants(framework, workers))]
    seen, *others = run_workers(workers, trained, framework, cases, True)[0]
    values = np.array([(each.grad_variance, each.grad_sq) for each in seen.stats if each.micro_batches > 1], np.float64)
    for other in others:
        found = [(each.grad_variance, each.grad_sq) for each in other.stats if each.micro_batches > 1]
        assert len(found) > 10
        np.testing.assert_allclose(found, values[: len(found)], rtol=1e-4, atol=1e-5)
    errors = values.std(0, ddof=1) / math.sqrt(len(values))
    assert np.all(np.abs(values.mean(0) - truth(framework)) < 5 * errors), (values.mean(0), truth(framework), errors)
    assert errors[0] < 0.05 * values[:, 0].mean(), errors
    samples = {round(stats.samples) for stats in seen.stats}
    assert max(samples) == 4 * workers if framework not in BY_TOKENS else len(samples) > 10, samples
