"""The cost model: what it counts, what its fit recovers, what its choice may not do; the probe on real workers."""

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
from kfuse.comm import transports
from kfuse.comm.cost import (
    BUDGET_S,
    PROBED,
    SMALL,
    Costs,
    Job,
    Rounds,
    Traffic,
    choose,
    choose_program,
    fit,
    known,
    orders,
    price,
    traffic,
)
from kfuse.comm.schedule import mirror
from kfuse.comm.settings import CommOptions
from kfuse.session import current

SECONDS = st.floats(1e-7, 1e-2)
RATES = st.floats(1e-12, 1e-7)  # seconds a byte
PROGRAMS = {
    "allreduce": transports.program("allreduce", sharded=False),
    "all_to_all": transports.program("all_to_all", sharded=False),
    "all_to_all, sharded": transports.program("all_to_all", sharded=True),
}
ZERO, ONE = dict.fromkeys(PROBED, 0.0), dict.fromkeys(PROBED, 1.0)


@st.composite
def fitted(draw: st.DrawFn) -> Costs:
    alpha, beta = ({kind: draw(values) for kind in PROBED} for values in (SECONDS, RATES))
    return Costs(alpha, beta, draw(RATES))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    workers = draw(st.integers(2, 64))
    buckets = draw(st.lists(st.integers(1, 10**7), min_size=1, max_size=6))
    return Job(tuple(buckets), workers, draw(st.sampled_from((2, 4))))


# -- what is counted --------------------------------------------------------------------------------------------------


def test_what_messages_ask_for() -> None:
    """A ring, and an exchange with a share: Patarasuk and Yuan's bound, 2 (n - 1) / n of the buffer."""
    for workers in (2, 7):
        whole = traffic("all_reduce", 1200.0, workers)
        assert whole == Traffic(2 * (workers - 1), pytest.approx(2400 * (workers - 1) / workers))
        parts = [traffic(name, 1200.0, workers) for name in ("all_to_all", "share")]
        assert sum(part.bytes for part in parts) == pytest.approx(whole.bytes)
    for program in PROGRAMS.values():
        assert price(program, Job((300,), 3), Costs(ZERO, ONE, 0.0)).wire_bytes >= 1600.0


def test_a_mirror_costs_its_message_and_a_second_update() -> None:
    """The next worker gets a shard in fp32, 4/n bytes a parameter, and repeats the update, 28/n."""
    plain = PROGRAMS["all_to_all, sharded"]
    job, costs = Job((1000, 3000), 4, wire_bytes=2), Costs(ONE, ONE, 1.0)
    without, mirrored = price(plain, job, costs), price(mirror(plain), job, costs)
    line = next(line for line in mirrored.lines if line.op.kind == "mirror")
    assert (line.messages, line.wire_bytes, line.seconds) == (2 * 3, 4000, 2 * 3 + 4000)
    assert mirrored.wire_bytes == without.wire_bytes + 4000
    memory = [sum(line.memory_bytes for line in found.lines) for found in (without, mirrored)]
    assert memory[1] - memory[0] == 28 * 4000 / 4


def test_memory_work_is_that_of_the_kernels() -> None:
    """Bytes a parameter of fp32: pack 8, measure 4, AdamW 28; a shard of the sum is read from n rows and written."""
    memory = {
        name: price(program, Job((1000,), 4), Costs(ZERO, ZERO, 1.0)).seconds / 1000
        for name, program in PROGRAMS.items()
    }
    assert memory["allreduce"] == pytest.approx(8 + 4 + 28)
    assert memory["all_to_all"] == pytest.approx(8 + 5 + 4 + 28)
    assert memory["all_to_all, sharded"] == pytest.approx(8 + 5 + 7)  # the reduce measures
    for program in (*PROGRAMS.values(), mirror(PROGRAMS["all_to_all, sharded"])):  # one worker sends nothing
        assert price(program, Job((1000, 10), 1), Costs(ONE, ONE, 0.0)).seconds == 0


def test_sums_are_added_up_beside_the_messages_of_other_buckets() -> None:
    """Two buckets: 1 s of exchange, 6 s of reduce, 1 s of share each. The second exchange is under the first sum."""
    costs = Costs(ZERO, {"all_reduce": 0.0, "all_to_all": 2.0, "share": 2.0}, 0.0)
    job = Job((1, 1), 2, wire_bytes=1)
    assert price(PROGRAMS["all_to_all"], job, costs).seconds == pytest.approx(4.0)
    found = price(PROGRAMS["all_to_all"], job, replace(costs, gamma=1.0))
    by_kind = {line.op.kind: line.seconds for line in found.lines}
    assert by_kind["reduce"] == pytest.approx(2 * 6.0)
    # Packs of 8 s; each exchange under the next pack, or 1 s after it; then what is left of the chain of bucket 2.
    assert found.seconds == pytest.approx(2 * 8 + 1 + 6 + 1 + by_kind["measure"] + by_kind["update"])


# -- properties -------------------------------------------------------------------------------------------------------


@given(jobs(), fitted(), st.integers(0, 5), st.integers(1, 10**6))
def test_more_bytes_never_take_less_time_nor_a_program_more_than_its_operations(
    job: Job, costs: Costs, which: int, more: int
) -> None:
    """Of one bucket. Of several a stream takes the first that is ready, and an operation that takes longer may change
    which one that is, to a better order (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
    """
    one = job.buckets[which % len(job.buckets)]
    for program in PROGRAMS.values():
        whole = price(program, job, costs)
        assert whole.seconds <= sum(line.seconds for line in whole.lines) * (1 + 1e-9) + 1e-12
        small, large = (price(program, replace(job, buckets=(b,)), costs) for b in (one, one + more))
        assert large.seconds >= small.seconds * (1 - 1e-9)
        assert large.wire_bytes >= small.wire_bytes


@given(SECONDS, RATES, st.lists(st.integers(1, 10**8), min_size=2, max_size=4, unique=True), st.integers(2, 32))
def test_the_fit_is_exact_on_messages_that_follow_the_model(
    alpha: float, beta: float, sizes: list[int], workers: int
) -> None:
    samples = [traffic("all_reduce", 4.0 * size, workers) for size in sizes]
    seconds = [alpha * sent.messages + beta * sent.bytes for sent in samples]
    for sent, true in zip(samples, seconds, strict=True):
        found = fit(list(zip(samples, seconds, strict=True)))
        assert found[0] * sent.messages + found[1] * sent.bytes == pytest.approx(true, rel=1e-6)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=5))
def test_no_measurement_gives_a_negative_constant(rows: list[tuple[float, float, float]]) -> None:
    alpha, beta = fit([(Traffic(messages, sent), seconds) for messages, sent, seconds in rows])
    assert alpha >= 0 and beta >= 0 and alpha + beta > 0


def test_a_choice_must_save_more_than_the_margin() -> None:
    assert choose({"a": 1.0, "b": 0.95}, "a") == "a"
    assert choose({"a": 1.0, "b": 0.85}, "a") == "b"
    assert choose({"a": 3e-3, "b": 1.9e-3}, "a") == "b"
    assert choose({"a": 3e-3, "b": 2.1e-3}, "a") == "a"  # less than a millisecond
    assert choose({"b": 1.0, "a": 1.0}, "a") == "a"


# -- the probe --------------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 0.2), st.floats(1e-11, 1e-5), st.integers(1, 10**8))
def test_a_probe_keeps_to_its_time_on_any_link(alpha: float, beta: float, largest: int) -> None:
    """By a clock that messages advance. The first small messages are sent in any case."""
    clock, first, sizes = SimpleNamespace(now=0.0), 0.0, []
    rounds: Rounds = {}
    for size, count in orders(max(SMALL, largest), BUDGET_S, rounds, lambda: clock.now):
        sizes.append(size)
        rounds.setdefault(size, []).extend([dict.fromkeys(PROBED, alpha + beta * 4 * size)] * count)
        clock.now += count * len(PROBED) * (alpha + beta * 4 * size)
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
    assert costs.gamma > 0 and all(costs.alpha[kind] + costs.beta[kind] > 0 for kind in PROBED)


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
    measured = Costs(ONE, ONE, 1.0, hosts=["a", "b"])
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


def test_the_choice_is_what_the_constants_say() -> None:
    slow_ring = Costs({"all_reduce": 1e-3, "all_to_all": 1e-5, "share": 1e-5}, dict.fromkeys(PROBED, 1e-9), 0.0)
    assert choose_program(slow_ring, 2, [1000]).schedule == "all_to_all"
    choice = choose_program(replace(slow_ring, alpha=dict.fromkeys(PROBED, 1e-5)), 2, [1000])
    assert choice.schedule == "allreduce"
    assert choice.predicted_s["allreduce"] == pytest.approx(2e-5 + 4e-6)
    unknown = choose_program(replace(slow_ring, largest_bytes=10.0), 2, [1000])
    assert unknown.schedule == "allreduce" and "could be measured" in unknown.reason


# -- kfuse schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        pytest.param(
            "comm.state=sharded workers.count=7 workers.max=7",
            0,
            "mirror shard messages 6 0.006",
            marks=pytest.mark.full,
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
