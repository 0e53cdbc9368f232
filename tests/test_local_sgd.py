"""Local SGD: models, buffers and numbers of updates are averaged; a local step has no gradient norm."""

from __future__ import annotations

import pytest
import torch
from distributed import run_workers
from torch import Tensor, nn

import kfuse as kf
from kfuse.comm import tail
from kfuse.comm.plan import StepPlan
from kfuse.optim.scaling import NonfiniteWarning
from kfuse.statistics.step_stats import Statistics


def buffers_and_models() -> list[bytes]:
    """Each worker has a model of its own; returns the bits after they were averaged."""
    rank = kf.init().group.rank
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    opt.sync_buffers(net)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.fill_(1 + 2 * rank)
    opt.updates.average_models()
    for name, value in net.state_dict().items():
        assert torch.equal(value, torch.full_like(value, 2)), name
    return [value.numpy().tobytes() for value in net.state_dict().values()]


def test_buffers_are_averaged_with_the_models() -> None:
    first, second = run_workers(2, buffers_and_models)
    assert first == second


def test_local_steps_on_a_gpu_do_not_count_as_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """There the warning goes by the statistics of the step before, and a local step's gradient norm is unknown."""
    statistics, warning, on_device = Statistics(), NonfiniteWarning(), torch.tensor(True)
    record = torch.zeros(tail.TAIL_SLOTS + 2 + tail.RANK_SLOTS, dtype=torch.float64)
    record[[tail.SAMPLES, tail.MICRO_BATCHES]] = 2.0
    for step, (local, norm) in enumerate([(True, torch.nan), (True, torch.nan), (False, torch.inf), (False, 1.0)]):
        record[tail.TAIL_SLOTS] = norm
        statistics.push(step, "samples", record.clone(), local)
        warning.after_step(step, on_device, statistics.arrived, skips=True, warns=True)
    [said] = [each.getMessage() for each in caplog.records if each.name == "kfuse"]
    assert said.startswith("step 2: a gradient is not finite")


class Two(nn.Module):
    """Two parameters; the second is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, both: bool) -> Tensor:
        return (self.first * torch.arange(1.0, 4.0)).sum() + (self.second.square().sum() if both else 0.0)


def numbers_of_updates() -> tuple[list[float], list[float], bytes]:
    """Rank 1 has no micro-batch in the second step, in which one parameter has no gradient. The third is the same on
    both. The numbers of updates after the average and after the third step; the parameters.
    """
    rank = kf.init().group.rank
    net = Two()
    opt = kf.FusedAdamW(net.parameters(), lr=0.1)
    counts = []
    for number, second in enumerate((range(1, 2), range(1, 1), range(1, 2))):
        mine = (range(0, 1), second)[rank]
        opt.begin(StepPlan(1 + len(second), (range(0, 1), second), local=len(mine)))
        for _ in mine:
            with opt.micro_batch(samples=1):
                net(both=number != 1).backward()
        opt.step()
        opt.zero_grad()
        if number == 1:
            opt.updates.agree_on_state()
            opt.updates.average_models()
        if number:
            counts.append([float(opt.state[p]["step"]) for p in net.parameters()])
    return counts[0], counts[1], b"".join(p.detach().numpy().tobytes() for p in net.parameters())


def test_numbers_of_updates_are_averaged_by_parameter() -> None:
    """With a mean number of each parameter's own, no worker may update them together any more."""
    results = run_workers(2, numbers_of_updates)
    assert results[0] == results[1]
    assert results[0][:2] == ([1.5, 1.0], [2.5, 2.0])
