"""After a loss workers go on from their own sums of the step: the bits, the tail, and what is run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from elastic_job import compose
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.comm.plan import CommOptions, StepPlan
from kfuse.comm.tail import Announcement, Tail, digest
from kfuse.comm.transports.all_to_all import AllToAll
from kfuse.config.check import ConfigError
from kfuse.config.instantiate import show
from kfuse.train.step import StepSamples

WORKERS, MICRO_BATCHES, SAMPLES = 3, 11, 4
FIRST = (range(4), range(4, 8), range(8, 11))
REDO = ((5,), (4, 6, 7), ())
"""Rank 1 has lost its sums, and gets most of its micro-batches again; rank 2 has nothing to do."""
KEPT = (tuple(FIRST[0]), (), tuple(FIRST[2]))


class Net(nn.Module):
    """With BatchNorm, whose running statistics are averaged, and a layer that some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(20, 50, bias=False), nn.BatchNorm1d(50), nn.Linear(50, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = self.last(torch.tanh(self.norm(self.first(x))))
        return self.sometimes(x) if extra else x


def run(net: Net, opt: Any, step: int, mine: tuple[int, ...]) -> None:
    for j in mine:
        generator = torch.Generator().manual_seed(100 * step + j)
        x = torch.randn(SAMPLES, 20, generator=generator)
        with opt.micro_batch(samples=SAMPLES, last=j == mine[-1]) as micro_batch:
            loss = F.mse_loss(net(x, j % 3 == 0), x[:, :3])
            micro_batch.loss = loss.detach()
            loss.backward()


def steps_with_losses(options: dict[str, Any], losses: int) -> dict[str, Any]:
    """Three steps, of which the second is lost so many times after the last backward of each worker."""
    session = kf.init(kf.CommOptions(bucket_mb=0.002, **options))
    rank, net = session.group.rank, Net()
    opt = kf.FusedAdamW(net.parameters(), lr=0.01, clip_norm=0.5)
    opt.sync_buffers(net)
    engine, found = opt.engine, []
    for step in range(3):
        ranges: tuple[Any, ...] = FIRST if session.group.size == WORKERS else (range(MICRO_BATCHES),)
        kept: tuple[tuple[int, ...], ...] = ()
        for attempt in range(losses + 1 if step == 1 else 1):
            said = Announcement(
                batch_size=step + 1, lr_scale=attempt + 0.5, parents=(0, 0, attempt)[: session.group.size]
            )
            opt.begin(StepPlan(SAMPLES * MICRO_BATCHES, ranges, announcement=said, kept=kept))
            if step == 1 and attempt < losses:
                lose(opt, net, step, ranges[rank])
                ranges, kept = REDO, KEPT
                if attempt == 1:  # lost again: now rank 0 keeps more than before, and rank 2 has lost all
                    ranges, kept = ((), (8,), (4, 6, 7, 9, 10)), ((*FIRST[0], 5), (), ())
                if not kept[rank]:
                    engine.kept_sums = None
                else:
                    assert engine.kept_sums is not None and engine.kept_sums.micro_batches == kept[rank]
                continue
            run(net, opt, step, tuple(ranges[rank]))
        opt.step()
        stats = opt.stats
        assert stats is not None and stats.control == said
        found.append([stats.loss, stats.grad_sq, stats.grad_variance, stats.grad_norm, stats.samples])
        assert stats.samples == SAMPLES * MICRO_BATCHES and stats.micro_batches == MICRO_BATCHES
        opt.zero_grad()
    values = [tensor.detach().double().numpy().ravel() for tensor in net.state_dict().values()]
    return {"state": np.concatenate(values), "stats": np.array(found, np.float64)}


def lose(opt: Any, net: Net, step: int, mine: tuple[int, ...]) -> None:
    """The step fails once this worker waits for its reduction. Its first messages come to their end all the same."""
    engine, wait = opt.engine, opt.engine._reduction.wait
    engine._reduction._polls = False  # else some ranks would start later messages, and others would not

    def fail(local: bool) -> None:
        engine._reduction._start(local)
        raise CommError("struck by the test")

    engine._reduction.wait = fail
    with pytest.raises(CommError):
        run(net, opt, step, tuple(mine))
        opt.synchronize()
    engine._reduction.wait = wait
    engine.abort()
    engine.set_group(engine.group)
    kf.barrier()


class AddsInPlace(AllToAll):
    """A transport of one's own, in canonical order. What it was given to send is no longer there afterwards."""

    def launch(self, key: int, slots: Sequence[Tensor], what: str) -> None:
        super().launch(key, [slot.clone() for slot in slots], what)
        self._sums = {**getattr(self, "_sums", {}), key: slots[0]}
        for slot in slots:
            slot.fill_(torch.nan)

    def wait(self, key: int) -> None:
        super().wait(key)
        flat = self._sums[key]
        self.reduce(key, flat)
        self._group.share(flat, "the sum", self._unit).wait_on_stream()


SETTINGS: dict[str, dict[str, Any]] = {
    "reproducible": {"reproducible": True},
    "a transport of one's own": {"reproducible": True, "schedule": "test_keep_sums.AddsInPlace"},
    "allreduce": {"schedule": "allreduce"},
    "all_to_all": {"schedule": "all_to_all"},
    "tree": {"schedule": "tree"},
    "bf16 messages": {"schedule": "all_to_all", "dtype": "bf16"},
    "bf16 sums": {"schedule": "allreduce", "dtype": "bf16"},
}


@pytest.mark.parametrize("losses", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_that_goes_on_is_the_step(name: str, losses: int) -> None:
    options = SETTINGS[name]
    lost = run_workers(WORKERS, steps_with_losses, {**options, "keep_sums": True}, losses)
    undisturbed = run_workers(WORKERS, steps_with_losses, options, 0)
    for ours, theirs in zip(lost, undisturbed, strict=True):
        assert np.array_equal(ours["state"], lost[0]["state"]), "all workers have the same model"
        if options.get("reproducible"):
            assert np.array_equal(ours["state"], theirs["state"])
            assert np.array_equal(ours["stats"], theirs["stats"])
        else:
            rough = options.get("dtype") == "bf16"
            assert np.allclose(ours["state"], theirs["state"], rtol=1e-3, atol=3e-2 if rough else 2e-4)
            assert np.allclose(ours["stats"], theirs["stats"], rtol=3e-2 if rough else 1e-4)


def without_losses(keep: bool) -> np.ndarray:
    found = steps_with_losses({"reproducible": True, "keep_sums": keep}, 0)
    return np.concatenate([found["state"], found["stats"].ravel()])


@pytest.mark.parametrize("workers", [1, 3])
def test_the_option_changes_no_bit_of_a_run_without_losses(workers: int) -> None:
    kept, plain = (run_workers(workers, without_losses, keep) for keep in (True, False))
    assert np.array_equal(kept, plain)


def test_a_plan_that_counts_on_sums_that_are_not_there_is_refused() -> None:
    model = nn.Linear(2, 2)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"counts on sums of micro-batches \(0, 1\), and none are kept here"):
        opt.begin(StepPlan(8, ((2,),), kept=((0, 1),)))


# -- who runs what ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 6), st.data())
def test_each_micro_batch_is_kept_or_run_once(total: int, workers: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(-1, workers - 1), min_size=total, max_size=total))
    kept = tuple(tuple(j for j in range(total) if owners[j] == rank) for rank in range(workers))
    samples = StepSamples(0, 0, np.arange(3 * total), 3, workers).going_on(kept)
    run = [tuple(samples.range_of(rank)) for rank in range(workers)]
    if kept[0] or -1 in owners:
        assert samples.kept == kept
        assert sorted(j for each in (*run, *kept) for j in each) == list(range(total))
        assert max(map(len, run)) - min(map(len, run)) <= 1
    else:
        assert not samples.kept and sorted(j for each in run for j in each) == list(range(total))
    assert kept[0] or run[0], "the leader's announcement travels with a sum"
    assert samples.plan(Announcement()).micro_batches == total
    first = samples.task_plan(0, 3 * total, 3 * total, 2).tasks()
    assert [next(first) for _ in run[0]] == [samples.task(j) for j in run[0]]


# -- the tail --------------------------------------------------------------------------------------------------------


def test_a_tail_goes_on_in_another_group() -> None:
    before, after = Tail(5, rank=2, ranks=4, figures=2), Tail(5, rank=0, ranks=3, figures=2)
    old, new = torch.zeros(before.numel), torch.full((after.numel,), 7.0)
    said, square = Announcement(64, 0.3, parents=(0, 0, 1, 1)), torch.tensor(2.0, dtype=torch.float64)
    for j in range(3):
        own: dict[str, Any] = (
            {"announcement": said, "seconds": 0.5, "vote": 1.0, "digest": digest([old])} if j == 0 else {}
        )
        figures = [1.0 + j, 2.0]
        before.write(old, j > 0, samples=4, sum_squares=square, loss=0.25, missed={j}, figures=figures, **own)
    now, of_now = Announcement(32, 0.7, generation=9), digest([torch.ones(3)])
    after.go_on(new, before, old, True, announcement=now, seconds=0.25, vote=1.0, digest=of_now)
    fresh = torch.zeros(after.numel)
    for j in range(3):
        own = {"announcement": now, "seconds": 0.25, "vote": 1.0, "digest": of_now} if j == 0 else {}
        figures = [1.0 + j, 2.0]
        after.write(fresh, j > 0, samples=4, sum_squares=square, loss=0.25, missed={j}, figures=figures, **own)
    assert torch.equal(new, fresh)
    after.go_on(new, before, old, False)
    after.write(fresh, False, samples=4, sum_squares=square, loss=0.25)
    assert new[5 + 4 :].eq(torch.tensor([0.0] * (after.numel - 9 - 2) + [24.0, 24.0])).all(), "nobody's word is told"


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"state": "sharded"}, "comm.state=sharded"),
        ({"reproducible": True, "slots_on_host": True}, "comm.slots_on_host=true"),
        ({"sync": "local:4"}, "comm.sync=local:4"),
        ({"sync": "pair"}, "comm.sync=pair"),
        ({"schedule": "symmetric"}, "comm.schedule=symmetric"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^elastic.keep_sums=true: must be false with {message}$"):
        CommOptions(**options, keep_sums=True)
    given = [f"comm.{name}={show(value)}" for name, value in options.items()]
    with pytest.raises(ConfigError, match=f"^elastic.keep_sums=true: must be false with {message}$"):
        compose(["elastic.keep_sums=true", *given])


def test_it_is_refused_where_no_step_is_made_again() -> None:
    kf.init(kf.CommOptions(keep_sums=True))
    net = nn.Linear(4, 1)
    data = (torch.randn(8, 4), torch.randn(8, 1))
    with pytest.raises(ValueError, match=r"^elastic\.keep_sums=true: must be false without a supervisor \(torchrun"):
        kf.fit(net, data, kf.FusedSGD(net.parameters(), lr=0.1), batch_size=4)
