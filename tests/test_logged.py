"""Figures of the user's own, `kf.log`: in metrics.jsonl, the sinks and the summary, each step once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_job import read_lines, script_job

import kfuse as kf

LOOP = """
import os, signal, sys, torch, kfuse as kf
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
net = torch.nn.Linear(4, 1)
opt = kf.FusedSGD(net.parameters(), lr=0.1)

class Limits(kf.BasePolicy):
    def decide(self, signals):
        kf.log(most=signals.bounds.workers_max)

given = dict(batch_size=16, micro_batch=4, epochs=5, checkpoint_dir=sys.argv[1])
for step in kf.DataLoader(net, (x, y), opt, Limits(), **given):
    for a, b in step:
        F.mse_loss(net(a), b).backward()
    opt.step()
    opt.zero_grad()
    kf.log(number=step.number)
    if step.number == 9 and kf.rank() == 0 and kf.size() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if step.ends_epoch:
        kf.log(heldout_loss=1.0 / (1 + step.epoch), heldout_accuracy=step.epoch / 10)
    if step.number == 23:
        break
"""


@pytest.mark.jobs
def test_each_step_is_recorded_once_through_the_loss_of_rank_0(tmp_path: Path) -> None:
    job = script_job(tmp_path, LOOP, 2, str(tmp_path / "checkpoints"))
    assert job.error is None and len(job.of_kind("failure")) == 1
    assert [line["step"] for line in job.metrics] == [line["figures"]["number"] for line in job.metrics] == [*range(24)]
    assert {line["figures"].get("most") for line in job.metrics[1:]} == {2}, "a script's policy knows the job's limits"
    evaluations = [(each["step"], each["loss"], each["accuracy"]) for each in job.of_kind("evaluation")]
    assert evaluations == [(6 * epoch + 5, 1 / (1 + epoch), epoch / 10) for epoch in range(4)]


class Validate(kf.BasePolicy):
    def after_step(self) -> None:
        kf.log(twice=2.0 * kf.size())

    def after_epoch(self) -> None:
        kf.log(heldout_accuracy=torch.tensor(0.75))


def test_a_policy_logs_in_kf_fit_and_a_sink_has_it(tmp_path: Path) -> None:
    x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
    net = torch.nn.Linear(4, 2)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    more: dict[str, Any] = {"run_dir": tmp_path / "run", "observe_sinks": ["csv"]}
    summary = kf.fit(net, (x, y), opt, Validate(), batch_size=8, epochs=2, train_target_accuracy=0.7, **more)
    assert summary is not None and summary["heldout_accuracy"] == 0.75
    assert (summary["exit_reason"], summary["steps"]) == ("target_accuracy", 4)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["figures"]["twice"] for line in lines] == [2.0] * 4
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert [float(row["figures/twice"]) for row in csv.DictReader(file) if row["figures/twice"]] == [2.0] * 4


def test_outside_of_training_and_for_what_is_no_number_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"kf\.log works in training"):
        kf.log(loss=1.0)
    net = torch.nn.Linear(2, 1)
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    for step in kf.DataLoader(net, (torch.ones(4, 2), torch.ones(4, 1)), opt, batch_size=4, steps=1):
        for x, y in step:
            F.mse_loss(net(x), y).backward()
        with pytest.raises((TypeError, ValueError)):
            kf.log(loss="small")  # type: ignore[arg-type]
        opt.step()
        opt.zero_grad()
