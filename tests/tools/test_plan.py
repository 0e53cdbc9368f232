"""The allocation of workers is optimal, keeps its bounds, and knows only what was measured."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfuse.tools.plan.jobs import (
    LEAST_GAIN,
    Job,
    LinearStepTime,
    Option,
    allocate,
    fit,
    forecast,
    plan,
    service,
    share,
)

STEP = LinearStepTime(fixed=0.02, sample=0.001, worker=0.002)
JOB = Job("job", 1e6, 64, (64, 1024), 16, (1, 8), (300.0, 400.0, 600.0), STEP, {}, (1.0, 1.0))


@st.composite
def jobs(draw: st.DrawFn, most: int = 12) -> Job:
    """Any job, whose noise scale may be unknown."""
    base, micro = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    fewest = draw(st.integers(1, 4))
    noise = draw(st.none() | st.floats(1, 1e5))
    step_time = LinearStepTime(draw(st.floats(0, 1)), draw(st.floats(1e-5, 0.1)), draw(st.floats(0, 0.1)))
    return Job(
        name="job",
        samples_left=draw(st.floats(1, 1e9)),
        base_batch=base,
        batch=(draw(st.integers(1, base)), draw(st.integers(base, 2000))),
        micro=micro,
        workers=(fewest, draw(st.integers(fewest, most))),
        noise_scale=None if noise is None else (noise / 2, noise, 3 * noise),
        step_time=step_time,
        measured={},
        spread=(0.9, 1.2),
    )


def goodput(job: Job, workers: int, batch: int) -> float:
    assert job.step_time is not None
    part, most = 1.0, math.ceil(math.ceil(batch / job.micro) / workers) * job.micro
    if job.noise_scale is not None:
        part = (job.noise_scale[1] + job.base_batch) / (job.noise_scale[1] + batch)
    return batch / job.step_time(workers, min(most, batch)) * part


# --- a job's options ---


def test_goodput_by_hand() -> None:
    """t(128, 2) = 0.02 + 0.001 * 64 + 0.002 = 0.086 s; efficiency (400 + 64) / (400 + 128) = 0.8788."""
    job = replace(JOB, batch=(128, 128), base_batch=128, spread=(0.8, 1.25))
    (option,) = job.options([2])
    assert option.goodput == pytest.approx(128 / 0.086)  # at the base batch a sample is a sample
    assert (option.low, option.high) == pytest.approx((128 / 0.086 / 1.25, 128 / 0.086 / 0.8))
    job = replace(JOB, base_batch=64, batch=(64, 128), noise_scale=(300.0, 400.0, 600.0), micro=64)
    option = job._option(2, 128)
    assert option.goodput == pytest.approx(128 / 0.086 * 464 / 528)
    assert (option.low, option.high) == pytest.approx((128 / 0.086 * 364 / 428, 128 / 0.086 * 664 / 728))


@given(job=jobs(), workers=st.integers(1, 12))
def test_the_batch_size_of_an_option_is_the_best_of_all(job: Job, workers: int) -> None:
    """Against every whole multiple of the micro-batch; and the bounds are kept."""
    multiples = range(job.micro, job.batch[1] + 1, job.micro) if job.noise_scale else ()
    allowed = [b for b in (*multiples, job.base_batch) if max(job.batch[0], workers * job.micro) <= b <= job.batch[1]]
    found = job.options([workers])
    if not allowed or not job.workers[0] <= workers <= job.workers[1]:
        assert not found
        return
    (option,) = found
    every = job.options(range(1, 13))
    assert all(a.workers < b.workers and a.goodput < b.goodput for a, b in itertools.pairwise(every))
    assert option.workers == workers and option.batch in allowed
    assert option.goodput == pytest.approx(max(goodput(job, workers, batch) for batch in allowed), rel=1e-12)
    assert option.goodput == goodput(job, workers, option.batch)
    assert option.low <= option.goodput <= option.high


def test_without_a_model_only_what_was_measured_is_an_option() -> None:
    measured = {(2, 64): 0.1, (4, 64): 0.06, (4, 128): 0.07, (6, 256): 0.1}
    job = replace(JOB, step_time=None, measured=measured)
    assert [(o.workers, o.batch) for o in job.options(range(1, 9))] == [(2, 64), (4, 128), (6, 256)]
    job = replace(job, noise_scale=None)
    assert [(o.workers, o.batch) for o in job.options(range(1, 9))] == [(2, 64), (4, 64)]


def test_the_model_is_found_from_its_own_times_and_needs_three_settings() -> None:
    """Without negative constants."""
    settings = [(1, 32), (1, 64), (2, 64), (4, 512), (7, 512)]
    found = fit({(n, batch): STEP(n, share(n, batch, 8)) for n, batch in settings}, 8)
    assert found is not None and vars(found) == pytest.approx(vars(STEP))
    assert fit({(1, 64): 0.1, (2, 64): 0.06}, 1) is None
    assert fit({(1, 32): 0.1, (1, 64): 0.16, (1, 128): 0.3}, 1) is None  # nothing is known of a second worker
    # Faster than linear: the unconstrained fit has a negative constant.
    found = fit({(1, 64): 1.0, (2, 64): 0.45, (4, 64): 0.2}, 1)
    assert found is not None and min(found.fixed, found.sample, found.worker) >= 0 and found.sample > 0


# --- the allocation ---


def gain(option: Option | None, options: list[Option]) -> float:
    """What a job adds to the sum that the planner maximises: effective workers, less the least gain of each."""
    if option is None:
        return 0.0
    return option.goodput / (options[0].goodput / options[0].workers) - LEAST_GAIN * option.workers


def test_the_allocation_is_that_of_brute_force() -> None:
    """One worker more never makes it worse."""
    for seed in range(100):
        rng = random.Random(seed)
        jobs = [drawn(rng) for _ in range(rng.randint(1, 3))]
        workers, reached = rng.randint(2, 8), list[float]()
        for count in (workers, workers + 1):
            given = plan(jobs, [1.0] * len(jobs), count)
            assert sum(option.workers for option in given if option) <= count
            reached.append(sum(map(gain, given, jobs)))
        choices = itertools.product(*([None, *options] for options in jobs))
        allowed = [each for each in choices if sum(option.workers for option in each if option) <= workers]
        best = max(sum(map(gain, each, jobs)) for each in allowed)
        assert reached[0] == pytest.approx(best, abs=1e-5), f"seed {seed}"  # values are rounded to a millionth
        assert reached[1] >= reached[0] - 1e-5


def drawn(rng: random.Random) -> list[Option]:
    """A job's options: from some number of workers on, each with more goodput than the one before."""
    fewest, goodput = rng.randint(1, 2), 0.0
    options = []
    for n in range(fewest, rng.randint(fewest, 5) + 1):
        goodput += rng.uniform(0.1, 2.0)
        options.append(Option(n, 64, goodput, goodput, goodput))
    return options


def test_of_equal_sums_the_fewest_workers_are_taken_and_given_to_the_first_jobs() -> None:
    assert allocate([[(1, 5), (2, 5)], [(1, 5)]], 1) == [1, 0]
    assert allocate([[(1, 5), (2, 5)], [(1, -1)]], 4) == [1, 0]


def linear(most: int, each: float = 1.0, fewest: int = 1) -> list[Option]:
    """A job whose goodput is `each` a worker."""
    return [Option(n, 64, n * each, n * each, n * each) for n in range(fewest, most + 1)]


def test_the_shortest_expected_service_goes_first() -> None:
    """Four jobs of one worker on two: service 100 / 1, 90 / 3 = 30, 40 / 1 and 10 / 0.2 = 50 worker-seconds."""
    options = [linear(1), linear(1, 3.0), linear(1), linear(1, 0.2)]
    left = [100.0, 90.0, 40.0, 10.0]
    assert [service(each, samples) for each, samples in zip(options, left, strict=True)] == [100, 30, 40, 50]
    assert [option is not None for option in plan(options, left, 2)] == [False, True, True, False]
    # Twice the workers that the first job needs at least count twice.
    assert service(linear(4, fewest=2), 100.0) == 100.0


def test_the_forecast_by_hand() -> None:
    """Three jobs of one worker on two: the second and third go first; the first starts at 10 s, when one is free."""
    ends, worker_seconds = forecast([linear(1), linear(1), linear(1)], [40.0, 10.0, 20.0], 2)
    assert ends == [50.0, 10.0, 20.0] and worker_seconds == 70.0
    # Equal jobs end at once: nothing is left of the second, but for rounding.
    for samples in (30.0, 0.3, 1e6 / 3):
        for speed in (1.0, 0.7, 1 / 3):
            ends, worker_seconds = forecast([linear(1, speed)] * 3, [samples] * 3, 3)
            assert ends == [samples / speed] * 3 and worker_seconds == pytest.approx(3 * samples / speed)
    # Two workers that scale as one: the second job's worker goes to the first one at 10 s, so 10 s of 30 are left.
    ends, worker_seconds = forecast([linear(2), linear(1)], [30.0, 10.0], 2)
    assert ends == [20.0, 10.0] and worker_seconds == 40.0
