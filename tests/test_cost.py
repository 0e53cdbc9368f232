"""What messages cost: the fit and the choice; the probe on real workers; `kfuse schedule`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import run_workers
from elastic_job import chaos, run_job, words
from hypothesis import given
from hypothesis import strategies as st

import kfuse as kf
from kfuse.cli.app import main
from kfuse.comm.cost import BUDGET_S, SCHEDULES, SMALL, Rounds, choose, fit, known, orders
from kfuse.comm.group import Costs
from kfuse.comm.settings import CommOptions
from kfuse.session import current

SECONDS = st.floats(1e-7, 1e-2)
RATES = st.floats(1e-12, 1e-7)  # seconds a byte


# -- the fit and the choice -------------------------------------------------------------------------------------------


@given(SECONDS, RATES, st.lists(st.integers(1, 10**8), min_size=2, max_size=4, unique=True), st.integers(2, 32))
def test_the_fit_is_exact_on_messages_that_follow_the_model(
    alpha: float, beta: float, sizes: list[int], workers: int
) -> None:
    """2 (n - 1) messages, and 2 (n - 1) / n of the bytes (Patarasuk and Yuan's bound)."""
    times = {size: 2 * (workers - 1) * (alpha + beta * 4 * size / workers) for size in sizes}
    found = Costs(*(dict.fromkeys(SCHEDULES, each) for each in fit(times, workers)))
    for size, seconds in times.items():
        assert choose(found, workers, [size]).predicted_s["all_to_all"] == pytest.approx(seconds, rel=1e-6)


@given(st.dictionaries(st.integers(1, 10**9), st.floats(1e-6, 10), min_size=1, max_size=3), st.integers(2, 64))
def test_no_measurement_gives_a_negative_constant(times: dict[int, float], workers: int) -> None:
    alpha, beta = fit(times, workers)
    assert alpha >= 0 and beta >= 0 and alpha + beta > 0


@pytest.mark.parametrize(
    ("default", "other", "taken"), [(1.0, 0.95, 0), (1.0, 0.85, 1), (3e-3, 1.9e-3, 1), (3e-3, 2.1e-3, 0), (1.0, 1.0, 0)]
)
def test_a_choice_must_save_a_tenth_and_a_millisecond(default: float, other: float, taken: int) -> None:
    seconds = dict(zip(SCHEDULES, (default / 2, other / 2), strict=True))  # of each of two workers' messages
    costs = Costs(seconds, dict.fromkeys(SCHEDULES, 0.0))
    assert choose(costs, 2, [1000]).schedule == SCHEDULES[taken]
    unknown = choose(replace(costs, largest_bytes=10.0), 2, [1000])
    assert unknown.schedule == SCHEDULES[0] and "could be measured" in unknown.reason


# -- the probe --------------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 0.2), st.floats(1e-11, 1e-5), st.integers(1, 10**8))
def test_a_probe_keeps_to_its_time_on_any_link(alpha: float, beta: float, largest: int) -> None:
    """By a clock that messages advance. The first small messages are sent in any case."""
    clock, first, sizes = SimpleNamespace(now=0.0), 0.0, []
    rounds: Rounds = {}
    for size, count in orders(max(SMALL, largest), rounds, BUDGET_S, lambda: clock.now):
        sizes.append(size)
        rounds.setdefault(size, []).extend([dict.fromkeys(SCHEDULES, alpha + beta * 4 * size)] * count)
        clock.now += count * len(SCHEDULES) * (alpha + beta * 4 * size)
        first = first or clock.now
    assert clock.now <= max(first, BUDGET_S) * (1 + 1e-9)
    assert max(sizes) <= max(SMALL, largest)
    if 30 * first < BUDGET_S and alpha > 40 * beta * max(SMALL, largest):  # then there is time for the largest
        assert max(sizes) == max(SMALL, largest)


def chosen() -> tuple[object, ...]:
    """What a worker's optimizers run by, their choices, and what was measured."""
    kf.init(comm_schedule="auto", comm_bucket_mb=0.01)
    first = kf.FusedSGD([torch.nn.Parameter(torch.zeros(5000))], lr=0.1)
    costs = current().group.costs
    second = kf.FusedSGD([torch.nn.Parameter(torch.zeros(300))], lr=0.1)
    assert current().group.costs is costs, "it is not measured again"
    names = first.engine.transport_name, second.engine.transport_name
    return *names, first.engine.choice, second.engine.choice, costs


@pytest.mark.full
def test_all_workers_make_the_same_choice_by_one_measurement() -> None:
    found = run_workers(3, chosen)
    assert all(each == found[0] for each in found)
    first, second, choice, other, costs = found[0]
    assert (first, second) == (choice.schedule, other.schedule)
    assert choice.schedule in choice.predicted_s and choice.workers == 3
    assert all(costs.alpha[kind] + costs.beta[kind] > 0 for kind in SCHEDULES)


@pytest.mark.full
def test_what_was_measured_is_known_after_a_time_with_one_worker(tmp_path: Path) -> None:
    phases = [{"step": step, "workers": count} for step, count in ((5, 2), (25, 1), (45, 2))]
    gates = [{"step": step, "workers": count} for step, count in ((20, 2), (40, 1), (60, 2))]
    settings = words("workers.max=2 model=mlp data=digits model.hidden=[24] train.steps=70")
    job = run_job(tmp_path / "run", [*settings, *chaos(tmp_path, phases=phases, gates=gates)])
    assert job.error is None, job.told()
    first, again = [choice["probe_s"] for choice in job.of_kind("schedule")]
    assert first == again


@pytest.mark.parametrize(
    ("hosts", "is_known"), [("ba", True), ("aab", True), ("a", False), ("aa", False), ("abc", False)]
)
def test_what_was_measured_holds_on_the_same_machines_only(hosts: str, is_known: bool) -> None:
    ones = dict.fromkeys(SCHEDULES, 1.0)
    measured = Costs(ones, ones, 1.0, hosts=["a", "b"])
    waits = SimpleNamespace(wait=lambda: None)
    group = SimpleNamespace(hosts=list(hosts), rank=0, device="cpu", broadcast=lambda tensor, what: waits)
    found = known(group, SimpleNamespace(costs=measured))  # type: ignore[arg-type]
    assert found == (measured if is_known else None)


def test_nothing_is_measured_where_nothing_is_left_to_choose() -> None:
    assert CommOptions().leaves_choice
    for given_ in ({"reproducible": True}, {"dtype": "bf16"}, {"state": "sharded"}, {"sync": "pair"}):
        assert not CommOptions(**given_).leaves_choice  # type: ignore[arg-type]
    assert not CommOptions("all_to_all").leaves_choice
    kf.init()
    assert kf.FusedSGD([torch.nn.Parameter(torch.zeros(10))], lr=0.1).engine.choice is None, "one worker"


# -- kfuse schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        pytest.param(
            "comm.state=sharded workers.count=7 workers.max=7",
            0,
            "mirror shard messages 0.006",
        ),
        ("comm.schedule=kfuse.comm.transports.AllReduce", 1, "transport, are not known"),
        ("comm.sync=local:5", 1, "comm.sync=local:5: no gradients are sent"),
    ],
)
def test_a_program_is_shown_with_its_price_if_it_has_one(
    settings: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kfuse", "schedule", *settings.split()])
    assert main() == status
    assert said in re.sub(" +", " ", capsys.readouterr().out)
