"""The next worker has a worker's shards of the optimizer's state, bit by bit; and where a lost one's come from."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from distributed import run_workers
from sharded import batch, init, loss_of, net, optimizer, same, tensors, values
from torch import nn

import kfuse as kf
from kfuse.comm.group import CommError
from kfuse.membership import Session
from kfuse.optim.resume import begun_update, has_begun, resume_update
from kfuse.session import reset


def mirrored_run(kind: str, dtype: torch.dtype, steps: int) -> list[Any]:
    """Some steps; then each worker's shard of each bucket, what it mirrors, and the parameters."""
    with patch.object(Session, "mirrors", True):
        init()
        model = net(dtype)
        opt = optimizer(kind, model, clip_norm=0.5)
    for step in range(steps):
        loss_of(model, step, kf.rank()).backward()
        opt.step()
        opt.zero_grad()
    own, mirrored = [], []
    for bucket, state in opt.updates.pairs():
        for each, found in ((state.own, own), (state.mirror, mirrored)):
            if not each.width:
                continue
            values = {name: tensor.tolist() for name, tensor in each.tensors.items()}
            found.append((each.place.start, each.place.stop, values, state.steps.tolist(), state.entries))
        assert bucket.mirrored == state.mirror.place
    return [own, mirrored, [p.double().tolist() for p in model.parameters()]]


@pytest.mark.parametrize(("kind", "dtype"), [("adamw", torch.float32), ("lamb", torch.bfloat16)])
def test_the_next_worker_repeats_each_update(kind: str, dtype: torch.dtype) -> None:
    """Also of parameters that only some workers use in a step, or none."""
    results = run_workers(3, mirrored_run, kind, dtype, 5)
    for rank, (own, _, parameters) in enumerate(results):
        assert results[(rank + 1) % 3][1] == own
        assert parameters == results[0][2]
    assert any(values for _, _, values, _, _ in results[0][0])


def test_lamb_does_not_end_a_step_with_the_first_half_of_another() -> None:
    """This worker fails between both halves of step 1, which another one ends: it takes that one's state. In step 2 it
    fails before the update, and the other one has begun.
    """
    init()
    models = net(), net()
    other, this = (optimizer("lamb", model) for model in models)

    def fails(*_: Any, **what: str) -> None:
        raise CommError("another worker is lost")

    def backward(step: int, *of: nn.Module) -> None:
        for model in of:
            loss_of(model, step, 0).backward()

    try:
        backward(0, *models)
        other.step()
        this.step()
        places = (this.engine.executor, "share_sums"), (this.engine.measurement, "record")  # LAMB's norms; all sums
        for step, place in enumerate(places, 1):
            other.zero_grad()
            this.zero_grad()
            backward(step, models[0])
            other.step()
            with patch.object(*place, fails), pytest.raises(CommError):
                backward(step, models[1])
                this.step()
            this.engine.abort()
            this.zero_grad()
            if step == 1:
                assert has_begun(this, 1)
                models[1].load_state_dict(models[0].state_dict())
                this.load_state_dict(other.state_dict())
                this.engine.step = 2
        assert not has_begun(this, 2)
        resume_update(this, begun_update(other), 2, owner_is_lost=False)
        assert same(values(models[1]), values(models[0]))
        assert same(tensors(this.state_dict()), tensors(other.state_dict()))
    finally:
        reset()


@pytest.mark.parametrize("used", [False, True])
def test_a_worker_without_the_tail_takes_it_from_one_that_has_begun(used: bool) -> None:
    """The tail and the averaged buffers travel with the sums of squares: here that message did not arrive.

    used: the other worker has a gradient of `sometimes`, which this one has not: it is updated, by zeros, or stays.
    """
    init()
    norms = nn.BatchNorm1d(30), nn.BatchNorm1d(30)
    models = net(), net()
    other, this = (optimizer("adamw", model) for model in models)
    for opt, norm in zip((other, this), norms, strict=True):
        opt.engine.track_buffers({name: b for name, b in norm.named_buffers() if b.is_floating_point()})
    before = models[1].sometimes.weight.detach().clone()

    def fails(*_: Any) -> None:
        this.engine.buckets[-1].sum.fill_(torch.nan)
        raise CommError("another worker is lost")

    def step(opt: Any, model: Any, norm: nn.Module, number: int) -> None:
        with opt.micro_batch(samples=4):
            norm(batch(0, 0)[0])
            loss_of(model, number, 1).backward()
        opt.step()

    try:
        step(other, models[0], norms[0], 3 if used else 0)
        with patch.object(this.engine.measurement, "record", fails), pytest.raises(CommError):
            step(this, models[1], norms[1], 0)
        this.engine.abort()
        this.zero_grad()
        resume_update(this, begun_update(other), 0, owner_is_lost=False)
        assert torch.equal(models[1].sometimes.weight, before) != used
        assert torch.equal(norms[1].running_mean, norms[0].running_mean) and norms[0].running_mean.any()
    finally:
        reset()
