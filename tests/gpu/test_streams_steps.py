"""Whole steps on a recorded device: all uses of memory are in order, and the host waits no oftener than it must."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from gpu.steps import OPTIMIZERS, SMALL_BUCKETS, TINY_BUCKETS, Job, job

import kfuse as kf
from kfuse.comm.topology import Links
from kfuse.comm.transports.all_to_all import AllToAll

SCHEDULES = ("allreduce", "all_to_all", "reduce_scatter", "tree")
WIDE = 2100  # a width with which every rank has a shard of sharded state
FUSED = ("adamw", "lamb", "sgd")


class Case(NamedTuple):
    """Settings of a job, and what it runs."""

    transport: str
    """A schedule, or "reproducible"."""
    state: str
    optimizer: str
    elastic: bool
    buckets: float
    dtype: str
    layer: str | None
    """The layer that runs on a stream of its own."""
    batch_norm: bool
    loop: str


AXES: tuple[tuple[Any, ...], ...] = (
    (*SCHEDULES, "reproducible"),
    ("replicated", "sharded"),
    tuple(OPTIMIZERS),
    (False, True),
    (TINY_BUCKETS, SMALL_BUCKETS, 25.0),
    ("fp32", "bf16"),
    (None, "middle", "sometimes"),
    (False, True),
    ("bare", "micro-batches", "planned", "scaled", "read"),
)


def is_supported(case: Case) -> bool:
    if case.state == "sharded" and (case.transport in ("allreduce", "tree") or case.optimizer not in FUSED):
        return False
    if case.transport == "reproducible" and case.dtype == "bf16":
        return False
    return not (case.elastic and case.loop == "scaled")


def covering() -> list[Case]:
    """As few cases as a greedy search finds, in which each two values occur together that can."""
    left = {case: set(itertools.combinations(enumerate(case), 2)) for case in map(Case._make, _sample())}
    wanted, chosen = set().union(*left.values()), list[Case]()
    while wanted:
        best = max(left, key=lambda case: len(left[case] & wanted))
        chosen.append(best)
        wanted -= left.pop(best)
    return chosen


def _sample() -> list[tuple[Any, ...]]:
    """Every 13th supported combination: all of them would take the search too long."""
    return [case for case in itertools.product(*AXES) if is_supported(Case._make(case))][::13]


def run(it: Job, loop: str) -> None:
    """Some steps of a kind."""
    scaler = torch.amp.GradScaler("cpu") if loop == "scaled" else None  # type: ignore[attr-defined]
    for _ in range(2):
        if loop == "bare":
            it.bare_step()
        elif loop == "micro-batches":
            it.step()
            it.step(several_backwards=True)
        elif loop == "scaled":
            it.opt.set_clip_norm(0.1)
            it.scaled_step(scaler)
        elif loop == "read":
            it.step()
            assert it.opt.stats is not None
        else:
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)])
            it.planned_step([range(0, 0), range(0, 2), range(2, 4)])
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)], by_weight=True)


@pytest.mark.parametrize("case", covering(), ids=lambda case: "-".join(map(str, case)))
def test_every_use_of_memory_is_in_order(case: Case) -> None:
    options: dict[str, Any] = {"schedule": case.transport}
    if case.transport == "reproducible":
        options = {"reproducible": True}
    width = WIDE if case.state == "sharded" else 40 if case.buckets == SMALL_BUCKETS else 10
    options |= {"state": case.state, "bucket_mb": case.buckets, "dtype": case.dtype, "batch_norm": case.batch_norm}
    with job(
        OPTIMIZERS[case.optimizer], 3, case.elastic, lag=2, width=width, all_used=case.layer is not None, **options
    ) as it:
        if case.layer is not None:
            it.forwards_on_two_streams(case.layer)
        run(it, case.loop)
        if not case.elastic and case.optimizer != "wrapped adamw" and case.loop != "read":
            assert it.recorder.host_waits == []


@pytest.mark.parametrize("ranges", [[0, 2], [11, 5]], ids=str)
def test_reproducible_sums_of_several_slots(ranges: list[int]) -> None:
    with job(size=2, reproducible=True, lag=2) as it:
        for _ in range(3):
            it.planned_step([range(ranges[0]), range(ranges[0], sum(ranges))])
        assert it.recorder.host_waits == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_local_sgd(schedule: str) -> None:
    with job(schedule=schedule, elastic=True) as it:
        for by_weight in (False, True):
            it.planned_step([range(0, 2), range(2, 4)], by_weight=by_weight, local=True)
            it.opt.updates.average_models()


@pytest.mark.parametrize("tree", ["latency", (3, 0, 0, 3)], ids=str)
def test_steps_along_a_tree(tree: str | tuple[int, ...]) -> None:
    slow, ranks = {0, 1}, range(4)
    links = Links(
        tuple(tuple(0.0 if a == b else 1e-4 for b in ranks) for a in ranks),
        tuple(tuple(None if a == b else 1e7 if {a, b} == slow else 1e9 for b in ranks) for a in ranks),
    )
    with job(size=4, schedule="tree", bucket_mb=SMALL_BUCKETS, all_used=True) as it:
        it.group.take_links(links)
        it.opt.engine.use_transport(None, tree)
        it.bare_step()
        it.forwards_on_two_streams("sometimes")
        it.step()


def test_accumulated_backwards_and_gradients_set_by_hand() -> None:
    with job() as it:
        it.opt.accumulate(2)
        for _ in range(2):
            for _ in range(2):
                (it.loss() / 2).backward()
            it.end_step()
        it.opt.accumulate(1)
        for p in it.model.parameters():
            p.grad = torch.ones_like(p)
        it.end_step()


def test_two_optimizers_of_one_backward() -> None:
    with job(lambda params: None, elastic=True) as it:
        first = kf.FusedAdamW(it.model.first.parameters())
        second = kf.FusedSGD([*it.model.middle.parameters(), *it.model.last.parameters()], lr=0.1)
        for _ in range(3):
            it.loss().backward()
            for opt in (first, second):
                opt.step()
                opt.zero_grad()


def test_two_receive_buffers_do_for_any_number_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of messages that NCCL needs a bucket's rows are added up before the exchange of the next but one."""
    taken: list[int] = []
    take = AllToAll._take

    def take_and_tell(transport: AllToAll, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = take(transport, numel, dtype)
        taken.extend([buffer.data_ptr()] if numel else [])
        return buffer

    monkeypatch.setattr(AllToAll, "_take", take_and_tell)
    with job(reproducible=True, bucket_mb=128 * 4 / 2**20) as it:
        for _ in range(3):  # the first steps find out how large they must be
            taken.clear()
            it.planned_step([range(0, 2), range(2, 4)])
    assert len(taken) > 3 and len(set(taken)) == 2


# -- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "state"),
    [*((schedule, "replicated") for schedule in SCHEDULES), ("all_to_all", "sharded")],
)
@pytest.mark.parametrize("where", ["in the last backward", "before the update"])
def test_an_aborted_step(where: str, schedule: str, state: str) -> None:
    """Buffers that messages may still write to are not used again before the communicator has been aborted."""
    with job(schedule=schedule, state=state, width=WIDE if state == "sharded" else 10) as it:
        it.step()
        fail_in_a_step(it, where)
        it.step()


def fail_in_a_step(it: Job, where: str) -> None:
    """A step that ends in an error, after which the group is another one."""
    weight = it.model.first.weight
    handle = weight.register_hook(lambda grad: 1 / 0) if where == "in the last backward" else None
    it.opt.engine.on_last_micro_batch = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError), it.opt.micro_batch(samples=8):
        it.loss().backward()
    if handle is not None:
        handle.remove()
    it.opt.engine.on_last_micro_batch = it.opt.synchronize
    it.opt.engine.abort()
    torch.zeros(100, device=torch.device("cpu"))  # what has been dropped is given away
    it.next_group()
