"""Whole steps, snapshots and transfers of state on a recorded device: every use of memory has its order."""

from __future__ import annotations

import contextlib
import itertools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu.steps import OPTIMIZERS, SMALL_BUCKETS, TINY_BUCKETS, Job, job
from test_support import covering

import kfuse as kf
from kfuse.checkpoint import Snapshots, snapshot
from kfuse.comm import chunks
from kfuse.comm.audit import AuditedGradient
from kfuse.comm.group import Links
from kfuse.comm.step import StepPlan
from kfuse.train.state import TrainingState

WIDE = 2100  # a width with which every rank has a shard of sharded state
FUSED = ("adamw", "lamb", "sgd", "muon")

AXES: dict[str, tuple[Any, ...]] = {
    "transport": ("allreduce", "all_to_all", "reduce_scatter", "tree", "reproducible"),
    "state": ("replicated", "sharded"),
    "optimizer": tuple(OPTIMIZERS),
    "elastic": (False, True),
    "buckets": (TINY_BUCKETS, SMALL_BUCKETS, 25.0),
    "dtype": ("fp32", "bf16", "int8"),  # of messages
    "parameters": (torch.float32, torch.bfloat16),
    "layer": (None, "middle", "sometimes"),  # runs on a stream of its own
    "batch_norm": (False, True),
    "loop": ("bare", "micro-batches", "planned", "scaled", "read", "local"),
}
Case = namedtuple("Case", AXES)  # type: ignore[misc]


def is_supported(case: Case) -> bool:
    if case.state == "sharded" and (case.transport in ("allreduce", "tree") or case.optimizer not in FUSED):
        return False
    if case.transport == "reproducible" and case.dtype != "fp32":
        return False
    if case.transport in ("allreduce", "tree") and case.dtype == "int8":
        return False
    if case.loop == "local" and (case.state == "sharded" or case.transport == "reproducible"):
        return False
    return not ((case.elastic or case.state == "sharded") and case.loop == "scaled")


def run(it: Job, loop: str) -> None:
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
        elif loop == "local":
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)], by_weight=True, local=True)
            it.opt.updates.average_models()
        else:
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)])
            it.planned_step([range(0, 0), range(0, 2), range(2, 4)])
            it.planned_step([range(0, 3), range(3, 5), range(5, 6)], by_weight=True)


SUPPORTED = [case for case in map(Case._make, itertools.product(*AXES.values())) if is_supported(case)]


# Each two values together, of every 31st combination: all of them would take too long.
CASES = covering(SUPPORTED[::31], lambda case: itertools.combinations(enumerate(case), 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_use_of_memory_is_in_order(case: Case) -> None:
    options: dict[str, Any] = {"schedule": case.transport}
    if case.transport == "reproducible":
        options = {"reproducible": True}
    width = WIDE if case.state == "sharded" else 40 if case.buckets == SMALL_BUCKETS else 10
    options |= {"state": case.state, "bucket_mb": case.buckets, "dtype": case.dtype, "parameters": case.parameters}
    options |= {"width": width, "all_used": case.layer is not None, "batch_norm": case.batch_norm}
    with job(OPTIMIZERS[case.optimizer], 3, case.elastic, lag=2, **options) as it:
        if case.layer is not None:
            it.forwards_on_two_streams(case.layer)
        run(it, case.loop)
        if not case.elastic and case.optimizer != "wrapped adamw" and case.loop not in ("read", "local"):
            assert it.recorder.host_waits == []


def test_reproducible_sums_of_several_slots_on_a_rank_that_may_have_none() -> None:
    with job(size=2, reproducible=True, lag=2) as it:
        for first, second in ((11, 5), (0, 2)) * 2:
            it.planned_step([range(first), range(first, first + second)])
        assert it.recorder.host_waits == []


def test_digests_of_an_audit_are_taken_without_a_wait() -> None:
    """This worker has the micro-batch that is audited, or is one that checks it."""
    ranges = (range(0, 3), range(3, 5))
    with job(lag=2, reproducible=True, all_used=True, batch_norm=True) as it:
        it.forwards_on_two_streams()
        params = list(it.model.parameters())
        for audited in (0, 4, 1):
            engine = it.opt.engine
            digests = engine.audited = AuditedGradient(engine.gradient_buckets, engine.device)
            it.run(StepPlan(40, ranges, audited=audited))
            assert audited not in ranges[0] or digests.digest().shape == ()
            kept = [p.grad for p in params]
            for p in params:
                p.grad = None
            assert digests.again(it.loss().backward).shape == ()
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad
            it.end_step()
        assert it.recorder.host_waits == []


def test_steps_along_a_tree_of_measured_links() -> None:
    slow, ranks = {0, 1}, range(4)
    links = Links(
        tuple(tuple(0.0 if a == b else 1e-4 for b in ranks) for a in ranks),
        tuple(tuple(None if a == b else 1e7 if {a, b} == slow else 1e9 for b in ranks) for a in ranks),
    )
    with job(size=4, schedule="tree", bucket_mb=SMALL_BUCKETS, all_used=True) as it:
        it.group.take_links(links)
        it.opt.engine.use_transport(None, "latency")
        it.bare_step()
        it.forwards_on_two_streams("sometimes")
        it.step()


@pytest.mark.parametrize("layer", ["first", "middle", "last"])
def test_a_second_stream_after_a_bucket_has_one_hook(layer: str) -> None:
    with job(all_used=True, bucket_mb=25.0) as it:
        it.step()
        assert all(hooks.last is not None for hooks in it.opt.engine.hooks)
        it.forwards_on_two_streams(layer)
        it.step()
        it.bare_step()


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


BACKWARD, UPDATE = "in the last backward", "before the update"


@pytest.mark.parametrize(
    ("schedule", "where"),
    [("allreduce", BACKWARD), ("all_to_all", UPDATE), ("reduce_scatter", UPDATE), ("tree", BACKWARD)],
)
def test_an_aborted_step(schedule: str, where: str) -> None:
    """Buffers that messages may still write to are not used again before the communicator has been aborted."""
    sharded = {"state": "sharded", "width": WIDE} if schedule == "reduce_scatter" else {}
    with job(schedule=schedule, **sharded) as it:
        it.step()
        fail_in_a_step(it, where)
        it.step()


def fail_in_a_step(it: Job, where: str) -> None:
    """A step that ends in an error, after which the group is another one."""
    weight = it.model.first.weight
    handle = weight.register_hook(lambda grad: 1 / 0) if where == BACKWARD else None
    fails = patch.object(it.opt.engine, "finish", lambda: 1 / 0)
    with fails, pytest.raises(ZeroDivisionError), it.opt.micro_batch(samples=8):
        it.loss().backward()
    if handle is not None:
        handle.remove()
    it.opt.engine.abort()
    torch.zeros(100, device=torch.device("cpu"))  # what has been dropped is given away
    it.next_group()


# -- snapshots and transfers of state ----------------------------------------------------------------------------------


def state(it: Job) -> TrainingState:
    return TrainingState({"model": it.model, "optimizer": it.opt})


def snapshots(it: Job) -> None:
    """Two, each between two steps; the second takes the first one's memory, once that has been read."""
    taker = Snapshots()
    for _ in range(2):
        taken = taker.take(state(it).capture(), "state")
        it.step()
        for _, arrived in taken.on_the_way:
            arrived.synchronize()
        assert taken.value["optimizer"]["state"]


def sends(it: Job) -> None:
    chunks.share(it.group, 0, state(it).capture, None)


def receives(it: Job) -> None:
    """From rank 1. The double of the process group sends no bytes: the structure is this rank's own."""
    own = state(it)
    with as_sent(own):
        received = chunks.share(it.group, 1, own.capture, own.room_for)
    own.restore(received)


def stands_by(it: Job) -> None:
    with as_sent(state(it)):
        assert chunks.share(it.group, 1, dict, None) is None


@contextlib.contextmanager
def as_sent(own: TrainingState) -> Iterator[None]:
    structure, descriptions, tensors = chunks._take_apart(own.capture())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_share_bytes", lambda *_: (b"", [each.nbytes for each in descriptions]))
        patch.setattr(chunks, "decode", lambda *_: (structure, descriptions, [False] * len(tensors)))
        yield


@pytest.mark.parametrize("elastic", [False, True])
def test_steps_before_and_after_are_ordered(elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small chunks this small model has large tensors, and several chunks of small ones."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    with job(size=3, elastic=elastic, batch_norm=True) as it:
        it.step()
        for act in (snapshots, sends, receives, stands_by):
            act(it)
            it.step()


def test_a_checkpoint_makes_the_host_wait_for_nothing() -> None:
    with job(batch_norm=True) as it:
        it.step()
        taker, own = Snapshots(), state(it).capture()
        assert it.recorder.waits_of(lambda: taker.take(own, "state")) == []
        assert it.recorder.waits_of(lambda: snapshot(own, "state")) != [], "kf.state_dict is complete"
