"""A model that raises SystemExit: an error of a job of the command line, and a script's own business."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import run_job, words
from torch import Tensor, nn

import kfuse as kf

JOB = words(
    "model._target_=test_exits.Net data=digits policy=none batch.size=32 batch.micro=8 train.steps=12",
    "train.epochs=null train.heldout_every=1 workers.max=2",
)


class Net(nn.Module):
    """Raises in its fourth forward, in training or in evaluation. how: "interrupt", or an exit status."""

    def __init__(self, input_shape: Sequence[int], num_classes: int, how: Any = 0, trains: bool = True) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(8 * 8, num_classes), 3
        self.how, self.trains = how, trains

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.trains:
            self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt if self.how == "interrupt" else SystemExit(self.how)
        scores: Tensor = self.layer(x.flatten(1))
        return scores


@pytest.mark.full
@pytest.mark.jobs
@pytest.mark.parametrize(("how", "trains", "workers"), [(0, True, 2), (3, False, 1)])
def test_it_ends_the_job_as_an_error(how: int, trains: bool, workers: int, tmp_path: Path) -> None:
    model = [f"+model.how={how}", f"+model.trains={trains}"]
    job = run_job(tmp_path / "run", [*JOB, *model, f"workers.count={workers}"])
    assert job.error is not None and "ended with exit status 1" in job.error
    assert any(line.endswith(f"RuntimeError: training has raised SystemExit: {how}") for line in job.lines)
    assert any("test_exits.py" in line for line in job.lines), "the traceback is shown"


@pytest.mark.parametrize(("how", "error"), [(5, SystemExit), ("interrupt", KeyboardInterrupt)])
def test_in_a_script_it_stays_what_it_is(how: Any, error: type[BaseException]) -> None:
    net = Net((8, 8), 10, how)
    data, opt = (torch.randn(64, 8, 8), torch.arange(64) % 10), kf.FusedSGD(net.parameters(), lr=0.1)
    with pytest.raises(error) as ended:
        kf.fit(net, data, opt, batch_size=16, micro_batch=4, observe_progress=False)
    assert getattr(ended.value, "code", 5) == 5
