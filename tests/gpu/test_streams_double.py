"""The recorder beside the double of ProcessGroupNCCL, between real processes: right sums, in order."""

from __future__ import annotations

from typing import Any

import nccl_double
import pytest
import torch
import torch.nn.functional as F
from distributed import run_workers
from gpu.recorder import Recorder
from gpu.steps import TINY_BUCKETS, Net
from nccl_double import installed
from test_nccl_group import connect, others_stay

import kfuse as kf
from kfuse import session
from kfuse.comm.options import CommOptions
from kfuse.membership import Session

pytestmark = pytest.mark.full


def train(schedule: str, reproducible: bool) -> tuple[list[str], list[float], list[float]]:
    """What is wrong, and the parameters after some steps: of this worker, and of torch with all workers' samples."""
    nets = [Net(batch_norm=False, all_used=False) for _ in range(2)]
    data = [(torch.randn(8, 6), torch.randn(8, 4)) for _ in range(4)]
    with installed():
        group = connect()
        x, y = (torch.stack(parts).chunk(group.size, dim=1)[group.rank] for parts in zip(*data, strict=True))
        with Recorder() as recorder:
            nccl_double.OBSERVER = recorder
            recorder.device.make_current()
            options = CommOptions(schedule=schedule, reproducible=reproducible, bucket_mb=TINY_BUCKETS)
            session._current = Session(group, options)
            opt = kf.FusedSGD(nets[0].parameters(), lr=0.1, momentum=0.9)
            for k in range(len(data)):
                F.mse_loss(nets[0](x[k]), y[k]).backward()
                opt.step()
                opt.zero_grad()
                recorder.end_step()
            nccl_double.OBSERVER = None
    plain = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in data:
        plain.zero_grad()
        F.mse_loss(nets[1](inputs), targets).backward()
        plain.step()
    others_stay()
    flat = [torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist() for net in nets]
    return recorder.errors, flat[0], flat[1]


@pytest.mark.parametrize(("schedule", "reproducible"), [("auto", True), ("tree", False)])
def test_sums_of_real_processes_are_right_and_in_order(schedule: str, reproducible: bool) -> None:
    results: list[Any] = run_workers(2, train, schedule, reproducible)
    for errors, ours, theirs in results:
        assert errors == []
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
        assert ours == results[0][1]
