"""Requests from a loop's body take effect, whenever they are made, and outlive changes of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from elastic_job import read_lines, run_job, words
from problems import Seen, all_equal, network, problem, update
from torch import nn

import kfuse as kf


def ask_at(moment: str) -> list[tuple[int, float, int | None]]:
    """Asks for everything in step 3, at this moment of the body; what was in force in each step."""
    net, policy = network(), Seen()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    number = 0

    def ask(now: str) -> None:
        if now == moment and number == 3:
            kf.set_batch_size(24)
            kf.set_lr(0.02)
            kf.set_topology("tree")
            kf.set_tree("star")

    topologies = []
    for step in kf.DataLoader(net, problem(256), opt, batch_size=16, micro_batch=4, policy=policy, lr_scaling="none"):
        ask("before")
        for index, (x, y) in enumerate(step):
            F.cross_entropy(net(x), y).backward()
            if index == 0:
                ask("micro_batch")
        ask("after_backward")
        update(opt)
        topologies.append((opt.engine.topology, opt.engine.tree))
        ask("after_step")
        number += 1
    assert topologies[-1] == ("tree", "star")
    return [(s.batch_size, round(s.lr, 9), s.workers) for s in policy.signals]


@pytest.mark.parametrize("moment", ["before", "micro_batch", "after_backward", "after_step"])
def test_a_request_at_any_moment_of_a_step_takes_effect(moment: str) -> None:
    results = run_workers(2, ask_at, moment)
    for seen in results:
        batches, rates = [batch for batch, *_ in seen], [rate for _, rate, _ in seen]
        assert sorted(set(batches)) == [16, 24] and 4 <= batches.index(24) <= 7
        assert sorted(set(rates)) == [0.02, 0.1]
        assert seen == results[0]


@on_workers(2)
def test_a_group_that_is_added_inside_the_loop_is_trained_from_rank_0s_values() -> None:
    """A group is added in the loop, with a rate of its own; on each worker with other values."""
    torch.manual_seed(kf.rank())
    net, extra = nn.Linear(4, 3), nn.Linear(4, 3)
    before = extra.weight.detach().clone()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    for number, step in enumerate(kf.DataLoader(net, problem(256), opt, batch_size=16, micro_batch=4)):
        for x, y in step:
            F.cross_entropy(net(x) + (extra(x) if number > 4 else 0), y).backward()
        update(opt)
        if number == 4:
            opt.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    assert not torch.equal(before, extra.weight)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.5]
    assert all_equal([*net.parameters(), *extra.parameters()])


JOB = words("model=mlp model.hidden=[8] data=digits")


def test_after_epoch_is_called_again_where_its_collective_fails(tmp_path: Path) -> None:
    settings = words(
        "batch.size=128 batch.micro=32 train.epochs=3 workers.count=2 elastic.replace=false",
        f"policy._target_=failing.EpochCollective +policy.directory={tmp_path}",
    )
    job = run_job(tmp_path / "run", JOB + settings)
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "failure"]
    assert [record["epoch"] for record in read_lines(tmp_path / "completed.jsonl")] == [0, 1, 2]


def test_workers_that_are_asked_for_before_the_first_step_stay(tmp_path: Path) -> None:
    """The first view's size is not what was asked for last."""
    settings = words("batch.size=32 batch.micro=16 train.steps=100 workers.max=2")
    job = run_job(tmp_path / "run", [*JOB, *settings, "policy._target_=failing.TwoWorkers"])
    assert job.error is None, job.told()
    assert [view["reason"] for view in job.views] == ["start", "grow"]


class Initial(Seen):
    def initial(self) -> kf.Decision | None:
        return self.decisions[-1]


def test_a_policys_initial_decision_is_in_force_from_the_first_step() -> None:
    net = network()
    policy = Initial({-1: kf.Decision(batch_size=10**6, lr_scale=0.5)})  # clipped to max_batch_size
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    kf.fit(net, problem(256), opt, policy, batch_size=16, batch_max=32, lr_scaling="none")
    assert {(s.batch_size, s.lr) for s in policy.signals} == {(32, 0.05)}


def test_an_initial_decision_keeps_what_reproducible_runs_need(caplog: Any) -> None:
    kf.init(comm_reproducible=True)
    net, policy = network(), Initial({-1: kf.Decision(sync="local:4", batch_size=24)})
    kf.fit(net, problem(256), kf.FusedSGD(net.parameters(), lr=0.1), policy, batch_size=16)
    assert {s.batch_size for s in policy.signals} == {24}
    assert all(s.grad_norm is not None for s in policy.signals)  # gradients were reduced in every step
