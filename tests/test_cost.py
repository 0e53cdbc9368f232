"""The cost model: what it counts, what its fit recovers, what its choice may not do; the probe on real workers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_workers
from elastic_job import chaos, run_job, words
from hypothesis import given
from hypothesis import strategies as st

import kfuse as kf
from kfuse.cli.app import main
from kfuse.comm import transports
from kfuse.comm.cost import PROBED, Costs, Job, Traffic, choose, exchange, fit, price, traffic, traffic_of_tree
from kfuse.comm.group import CommError, Group
from kfuse.comm.options import PROPERTIES, TRANSPORT_NAMES, CommOptions
from kfuse.comm.probe import BUCKETS_MB, BUDGET_S, SMALL, Plan, choose_program
from kfuse.comm.schedule import Op, Program, mirror
from kfuse.comm.topology import chunks
from kfuse.comm.transports.tree import parents
from kfuse.session import current, reset
from kfuse.tools.doctor import command as doctor

SECONDS = st.floats(1e-7, 1e-2)
RATES = st.floats(1e-12, 1e-7)  # seconds a byte
PROGRAMS = {
    "allreduce": transports.program("allreduce", sharded=False),
    "all_to_all": transports.program("all_to_all", sharded=False),
    "all_to_all, sharded": transports.program("all_to_all", sharded=True),
    "tree": transports.program("tree", sharded=False),
}


@st.composite
def fitted(draw: st.DrawFn) -> Costs:
    alpha, beta = ({kind: draw(values) for kind in PROBED} for values in (SECONDS, RATES))
    return Costs(alpha, beta, draw(RATES))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    workers = draw(st.integers(2, 64))
    buckets = draw(st.lists(st.integers(1, 10**7), min_size=1, max_size=6))
    tree = parents(draw(st.sampled_from(("binary", "star"))), [""] * workers)
    return Job(tuple(buckets), workers, tuple(tree), draw(st.sampled_from((2, 4))), draw(st.floats(0, 1)))


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 7])
def test_a_ring_and_an_exchange_with_a_share_send_the_same_bytes(workers: int) -> None:
    """Patarasuk and Yuan's bound, 2 (n - 1) / n of the buffer."""
    whole = traffic("all_reduce", 1200.0, workers)
    parts = [traffic(name, 1200.0, workers) for name in ("all_to_all", "share")]
    assert whole == Traffic(2 * (workers - 1), pytest.approx(2400 * (workers - 1) / workers))
    assert sum(part.bytes for part in parts) == pytest.approx(whole.bytes)


def test_a_trees_root_is_its_busiest_worker() -> None:
    """Seven workers: in a heap two messages come to each parent, in two levels; in a star six to the root.

    With two hosts one message goes to each first worker, and back; half of the buffer twice between the two.
    """
    assert traffic_of_tree(100.0, parents("binary", [""] * 7)) == Traffic(4, 800.0)
    assert traffic_of_tree(100.0, parents("star", [""] * 7)) == Traffic(2, 1200.0)
    assert traffic_of_tree(100.0, parents("host", ["a", "a", "b", "b"])) == Traffic(4, 300.0)


def test_a_program_whose_messages_are_unknown_has_no_price() -> None:
    with pytest.raises(ValueError, match=r"comm\.schedule='my\.Transport'"):
        price(transports.program("my.Transport", sharded=False), Job((10,), 2), Costs({}, {}, 0.0))


def test_every_exchange_of_kfuse_has_a_price() -> None:
    for name in TRANSPORT_NAMES:
        kind, sent = exchange(name, 1200.0, 3, parents("binary", [""] * 3))
        assert kind in PROBED and sent.bytes >= 800.0
        if PROPERTIES[name].to_shards:  # a share follows, of as many bytes
            assert sent == traffic("share", 1200.0, 3)


def test_a_mirror_costs_its_message_and_a_second_update() -> None:
    """The next worker gets a shard in fp32, 4/n bytes a parameter, and repeats the update, 28/n."""
    plain = PROGRAMS["all_to_all, sharded"]
    job, costs = Job((1000, 3000), 4, wire_bytes=2), Costs(dict.fromkeys(PROBED, 1.0), dict.fromkeys(PROBED, 1.0), 1.0)
    without, mirrored = price(plain, job, costs), price(mirror(plain), job, costs)
    line = next(line for line in mirrored.lines if line.op.kind == "mirror")
    assert (line.messages, line.wire_bytes, line.seconds) == (2 * 3, 4000, 2 * 3 + 4000)
    assert mirrored.wire_bytes == without.wire_bytes + 4000
    memory = [sum(line.memory_bytes for line in found.lines) for found in (without, mirrored)]
    assert memory[1] - memory[0] == 28 * 4000 / 4
    alone = replace(job, workers=1)
    assert price(mirror(plain), alone, costs).lines[-1] == price(plain, alone, costs).lines[-1]
    assert price(mirror(plain), alone, costs).seconds == price(plain, alone, costs).seconds


def test_an_operation_that_the_model_does_not_know_has_no_price() -> None:
    program = Program((*PROGRAMS["allreduce"].ops, Op("sort")))
    with pytest.raises(ValueError, match="sort: no operation whose cost is known"):
        price(program, Job((10,), 2), Costs(dict.fromkeys(PROBED, 0.0), dict.fromkeys(PROBED, 0.0), 0.0))


def test_memory_work_is_that_of_the_kernels() -> None:
    """Bytes a parameter of fp32: pack 8, measure 4, AdamW 28; a shard of the sum is read from n rows and written."""
    costs = Costs(dict.fromkeys(PROBED, 0.0), dict.fromkeys(PROBED, 0.0), 1.0)
    memory = {name: price(program, Job((1000,), 4), costs).seconds / 1000 for name, program in PROGRAMS.items()}
    assert memory["allreduce"] == pytest.approx(8 + 4 + 28)
    assert memory["all_to_all"] == pytest.approx(8 + 5 + 4 + 28)
    assert memory["all_to_all, sharded"] == pytest.approx(8 + 5 + 7)  # the reduce measures


def test_one_worker_sends_nothing() -> None:
    costs = Costs(dict.fromkeys(PROBED, 1.0), dict.fromkeys(PROBED, 1.0), 0.0)
    for name, program in PROGRAMS.items():
        found = price(program, Job((1000, 10), 1, (0,)), costs)
        assert found.wire_bytes == 0 and found.exposed_s == 0, name


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_backward_hides_all_messages_but_the_last_buckets() -> None:
    """Four equal buckets of one second of messages each, ready after each fourth of 40 s of backward."""
    costs = Costs(dict.fromkeys(PROBED, 0.0), {"all_reduce": 1.0, "all_to_all": 0.0, "share": 0.0}, 0.0)
    job = Job((1, 1, 1, 1), 2, wire_bytes=1, backward_s=40.0)
    assert price(PROGRAMS["allreduce"], job, costs).seconds == pytest.approx(1.0)
    assert price(PROGRAMS["allreduce"], replace(job, backward_s=0.0), costs).seconds == pytest.approx(4.0)
    assert price(PROGRAMS["allreduce"], replace(job, backward_s=2.0), costs).exposed_s == pytest.approx(2.5)


def test_sums_are_added_up_beside_the_messages_of_other_buckets() -> None:
    """Two buckets: 1 s of exchange, 6 s of reduce, 1 s of share each. The second exchange is under the first sum."""
    costs = Costs(dict.fromkeys(PROBED, 0.0), {"all_reduce": 0.0, "all_to_all": 2.0, "share": 2.0}, 0.0)
    job = Job((1, 1), 2, wire_bytes=1)
    assert price(PROGRAMS["all_to_all"], job, costs).seconds == pytest.approx(4.0)
    found = price(PROGRAMS["all_to_all"], job, replace(costs, gamma=1.0))
    by_kind = {line.op.kind: line.seconds for line in found.lines}
    assert by_kind["reduce"] == pytest.approx(2 * 6.0)
    # Packs of 8 s; each exchange under the next pack, or 1 s after it; then what is left of the chain of bucket 2.
    assert found.seconds == pytest.approx(2 * 8 + 1 + 6 + 1 + by_kind["measure"] + by_kind["update"])


@given(jobs(), fitted())
def test_nothing_takes_longer_than_its_operations_one_by_one(job: Job, costs: Costs) -> None:
    for program in PROGRAMS.values():
        found = price(program, job, costs)
        alone = sum(line.seconds for line in found.lines)
        assert found.seconds <= alone * (1 + 1e-9) + 1e-12
        assert found.exposed_s <= found.seconds or found.exposed_s == 0


# -- properties -------------------------------------------------------------------------------------------------------


@given(jobs(), fitted(), st.integers(0, 5), st.integers(1, 10**6))
def test_more_bytes_never_take_less_time(job: Job, costs: Costs, which: int, more: int) -> None:
    """Of one bucket. Of several a stream takes the first that is ready, and an operation that takes longer may change
    which one that is, to a better order (Graham 1969, "Bounds on Multiprocessing Timing Anomalies"). A tree's bucket
    that goes in more chunks may be faster, too: they travel one behind the other.
    """
    one = job.buckets[which % len(job.buckets)]
    without = replace(job, backward_s=0.0)
    in_chunks = [chunks(job.wire_bytes * elements) for elements in (one, one + more)]
    for name, program in PROGRAMS.items():
        if name == "tree" and in_chunks[0] != in_chunks[1]:
            continue
        small, large = (price(program, replace(without, buckets=(b,)), costs) for b in (one, one + more))
        assert large.seconds >= small.seconds * (1 - 1e-9)
        assert large.wire_bytes >= small.wire_bytes


@given(st.integers(2, 64), st.integers(1, 10**7), st.integers(1, 5), fitted(), st.lists(st.floats(1, 100), min_size=5))
def test_a_slower_link_never_makes_a_program_with_more_bytes_the_choice(
    workers: int, elements: int, buckets: int, costs: Costs, factors: list[float]
) -> None:
    """Every byte takes longer by the same factor; buckets are of one size, and nothing hides their messages."""
    job = Job((elements,) * buckets, workers, tuple(parents("binary", [""] * workers)))
    beta = dict.fromkeys(PROBED, max(costs.beta.values()))
    sent = []
    for factor in sorted(factors):
        slower = replace(costs, beta={kind: factor * each for kind, each in beta.items()})
        prices = {name: price(program, job, slower) for name, program in PROGRAMS.items()}
        chosen = min(prices, key=lambda name: (prices[name].seconds, name != "allreduce"))
        sent.append(prices[chosen].wire_bytes)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(sent))


@given(SECONDS, RATES, st.lists(st.integers(1, 10**8), min_size=2, max_size=4, unique=True), st.integers(2, 32))
def test_the_fit_is_exact_on_messages_that_follow_the_model(
    alpha: float, beta: float, sizes: list[int], workers: int
) -> None:
    samples = [traffic("all_reduce", 4.0 * size, workers) for size in sizes]
    seconds = [alpha * sent.messages + beta * sent.bytes for sent in samples]
    for sent, true in zip(samples, seconds, strict=True):
        found = fit(list(zip(samples, seconds, strict=True)))
        assert found[0] * sent.messages + found[1] * sent.bytes == pytest.approx(true, rel=1e-6)


def test_a_fit_over_several_sizes_and_worker_counts_finds_the_constants() -> None:
    samples = [traffic("all_to_all", size, workers) for size in (4096.0, 1e6, 3e7) for workers in (2, 3)]
    assert fit([(sent, 2e-5 * sent.messages + 3e-10 * sent.bytes) for sent in samples]) == pytest.approx((2e-5, 3e-10))


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
    now, first, sizes = 0.0, 0.0, []
    plan = Plan(max(SMALL, largest), BUDGET_S, lambda: now)
    while True:
        size, rounds = plan.next()
        if not rounds:
            break
        sizes.append(size)
        for _ in range(rounds):
            plan.note(size, dict.fromkeys(PROBED, alpha + beta * 4 * size))
            now += len(PROBED) * (alpha + beta * 4 * size)
        first = first or now
    assert now <= max(first, BUDGET_S) * (1 + 1e-9)
    assert max(sizes) <= max(SMALL, largest)
    assert set(plan.shortest()) <= {min(sizes), max(sizes)}
    if 30 * first < BUDGET_S and alpha > 40 * beta * max(SMALL, largest):  # then there is time for the largest
        assert max(sizes) == max(SMALL, largest)


def chosen(schedule: str) -> tuple[object, ...]:
    """What a worker's optimizers run by, their choices, and whether the second one measured again."""
    kf.init(comm_schedule=schedule, comm_bucket_mb=0.01)
    first = kf.FusedSGD([torch.nn.Parameter(torch.zeros(5000))], lr=0.1)
    costs = current().group.costs
    second = kf.FusedSGD([torch.nn.Parameter(torch.zeros(300))], lr=0.1)
    assert current().group.costs is costs
    names = first.engine.transport_name, second.engine.transport_name
    return *names, first.engine.choice, second.engine.choice, costs


@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_make_the_same_choice_by_one_measurement(workers: int) -> None:
    found = run_workers(workers, chosen, "auto")
    assert all(each == found[0] for each in found)
    first, second, choice, other, costs = found[0]
    assert (first, second) == (choice.schedule, other.schedule)
    assert choice.schedule in choice.predicted_s and choice.workers == workers
    assert costs.gamma > 0 and all(costs.alpha[kind] + costs.beta[kind] > 0 for kind in PROBED)


def left_alone() -> str:
    """Rank 1 is lost before it measures: what rank 0's optimizer says."""
    session = kf.init()
    session.group.timeout_s = 3.0  # to connect may take longer
    if session.group.rank == 1:
        return ""
    with pytest.raises(CommError) as raised:
        kf.FusedSGD([torch.nn.Parameter(torch.zeros(5000))], lr=0.1)
    return str(raised.value)


@pytest.mark.full
def test_a_worker_that_is_lost_while_messages_are_measured_is_named() -> None:
    said, _ = run_workers(2, left_alone)
    assert said.startswith("probe") and "rank 1" in said


def test_a_schedule_that_is_named_is_not_measured() -> None:
    assert run_workers(2, chosen, "all_to_all") == [("all_to_all", "all_to_all", None, None, None)] * 2


def test_reproducible_sums_and_a_single_worker_leave_nothing_to_measure() -> None:
    def measured(options: CommOptions, size: int) -> object:
        reset()
        kf.init(**options.named())
        opt = kf.FusedSGD([torch.nn.Parameter(torch.zeros(10))], lr=0.1)
        group = Group()
        group.size, group.hosts = size, ["here"] * size
        opt.engine.set_group(group)  # one that sends nothing: to measure it would end in an error
        return opt.engine.choice

    assert measured(CommOptions(), 1) is None
    assert measured(CommOptions(reproducible=True), 2) is None
    assert measured(CommOptions(dtype="bf16"), 2) is None


def test_the_choice_is_what_the_constants_say() -> None:
    slow_ring = Costs({"all_reduce": 1e-3, "all_to_all": 1e-5, "share": 1e-5}, dict.fromkeys(PROBED, 1e-9), 0.0)
    auto, one = CommOptions(), {25.0: [1000]}
    assert choose_program(slow_ring, 2, auto, one).schedule == "all_to_all"
    assert choose_program(slow_ring, 2, CommOptions("allreduce", bucket_mb=None), one).schedule == "allreduce"
    equal = replace(slow_ring, alpha=dict.fromkeys(PROBED, 1e-5))
    choice = choose_program(equal, 2, auto, one)
    assert (choice.schedule, choice.bucket_mb) == ("allreduce", 25.0)
    assert choose_program(equal, 2, CommOptions(dtype="bf16", bucket_mb=None), one).schedule == "all_to_all"
    assert choice.predicted_s["allreduce"] == pytest.approx(2e-5 + 4e-6)
    unknown = choose_program(replace(slow_ring, largest_bytes=10.0), 2, auto, one)
    assert unknown.schedule == "allreduce" and "could be measured" in unknown.reason


def test_slow_links_want_small_buckets_unless_each_message_takes_long() -> None:
    """100 MB of gradients, backward as long as the messages: what is left to wait for is the last bucket."""
    million = 10**6
    buckets = {25.0: [5 * million] * 5, 4.0: [million] * 25}
    options = CommOptions("allreduce", bucket_mb=None)
    zero = dict.fromkeys(PROBED, 0.0)
    assert choose_program(Costs(zero, dict.fromkeys(PROBED, 1e-9), 0.0), 2, options, buckets).bucket_mb == 4.0
    assert choose_program(Costs(dict.fromkeys(PROBED, 1e-2), zero, 0.0), 2, options, buckets).bucket_mb == 25.0


def trained(bucket_mb: float | None, cost: float) -> tuple[float, list[float]]:
    """Two steps with constants by which small buckets are best, then two with none: the buckets' size, parameters."""
    torch.manual_seed(0)
    kf.init(comm_schedule="allreduce", comm_bucket_mb=bucket_mb, comm_check_every=1)
    group = current().group
    free = Costs(dict.fromkeys(PROBED, 0.0), dict.fromkeys(PROBED, cost), 0.0)
    group.costs = free if bucket_mb is None else None
    model = torch.nn.Sequential(*[torch.nn.Linear(1100, 1100) for _ in range(3)])
    opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    size = opt.engine.bucket_mb
    for step in range(4):
        x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(10 * step + group.rank))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 1 and bucket_mb is None:
            group.costs = replace(free, beta=dict.fromkeys(PROBED, 0.0))
            opt._set_group(group)  # as in a new view
            assert opt.engine.bucket_mb == 25.0
    return size, [float(p.double().sum()) for p in model.parameters()]


def test_buckets_are_laid_out_again_between_steps() -> None:
    """Parameters and moments are those of a run whose buckets stay as they are."""
    chosen, default = run_workers(2, trained, None, 1e-9), run_workers(2, trained, 25.0, 0.0)
    assert {size for size, _ in chosen} == {4.0} and {size for size, _ in default} == {25.0}
    assert [values for _, values in chosen] == [values for _, values in default]


@pytest.mark.full
def test_each_view_of_several_workers_is_measured_and_told(tmp_path: Path) -> None:
    """One worker, two, three; one is lost and replaced. A joiner comes to the same messages as those who are there."""
    gates = [{"step": 10, "workers": 2}, {"step": 20, "workers": 3}, {"step": 40, "workers": 3}]
    phases = [{"step": 2, "workers": 2}, {"step": 12, "workers": 3}]
    events = [{"step": 30, "moment": "mid_reduction", "rank": 1, "how": "kill"}]
    policy = chaos(tmp_path, events=events, gates=gates, phases=phases)
    settings = words(
        "comm.bucket_mb=null lr.base=0.003 workers.max=4 model=mlp data=digits model.hidden=[24] batch.size=16",
        "batch.micro=4 batch.max=64 train.epochs=null train.steps=60",
    )
    job = run_job(tmp_path / "run", [*settings, *policy])
    assert job.error is None, job.told()
    assert job.metrics[-1]["step"] == 59
    told = [(event["step"], event["workers"]) for event in job.of_kind("schedule")]
    views = [(view["step"], len(view["workers"])) for view in job.views if len(view["workers"]) > 1]
    assert told == views and {workers for _, workers in told} == {2, 3}
    for event in job.of_kind("schedule"):
        assert event["schedule"] in event["predicted_s"] and event["bucket_mb"] in BUCKETS_MB
        assert event["probe_s"] > 0 and event["reason"]


# -- kfuse schedule ---------------------------------------------------------------------------------------------------


MIRRORED = ["reduce+measure shard", "mirror shard messages 2 0.013", "update shard", "share parameter"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["comm.schedule=auto", "workers.count=2"], ["allreduce ", "all_to_all ", "tree "]),
        (
            ["comm.schedule=tree", "comm.tree=star", "workers.count=7", "workers.max=7"],
            ["tree, 7 workers", "computed from the messages of 2"],
        ),
        (
            ["comm.state=sharded", "workers.count=3", "workers.max=3"],
            [*MIRRORED, "The last bucket has no gradients", "exchange allreduce all"],
        ),
    ],
)
def test_a_program_is_shown_with_its_price(words: list[str], said: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kfuse", "schedule", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(" +", " ", done.stdout)
    assert all(text in shown for text in said), done.stdout
    assert ("mirror" in shown) == ("comm.state=sharded" in words)
    assert ("The last bucket" in shown) == ("comm.state=sharded" in words) and "GPU" not in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("comm.schedule=kfuse.comm.transports.library.AllReduce", "transport are not known"),
        ("comm.sync=local:5", "comm.sync=local:5: no gradients are sent"),
    ],
)
def test_what_has_no_price_is_told(
    setting: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kfuse", "schedule", setting])
    assert main() == 1
    assert said in capsys.readouterr().out


def test_a_machine_that_hosts_no_store_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the loopback interface is down\nand more lines")

    monkeypatch.setattr("kfuse.tools.doctor.processes.TCPStore", refuse)
    monkeypatch.setattr(sys, "argv", ["kfuse", "schedule"])
    assert main() == 1
    assert capsys.readouterr().out == "measuring messages: no store at 127.0.0.1: the loopback interface is down\n"
    [line] = [each for each in doctor._self_test({}, 0)]
    assert (line.status, line.found) == ("fail", "no store at 127.0.0.1: the loopback interface is down")
