"""A sweep in processes that a launcher of Hydra's starts, as it does on Slurm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

USER_MODULE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self, fails: bool):
        super().__init__(64, 10)
        self.fails = fails

    def forward(self, x):
        assert not self.fails
        return super().forward(x.flatten(1))
"""


def test_the_status_is_that_of_the_job_that_failed(
    workplace: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    (workplace / "net.py").write_text(USER_MODULE)
    run = ["train.epochs=null", "train.steps=2", "policy=none", "model._target_=net.Net", "hydra.sweep.dir=sweep"]
    status, _, err = command("-m", "hydra/launcher=submitit_local", *run, "+model.fails=false,true")
    assert status == 1 and "kfuse: error: a job has failed" in err, err
    assert json.loads((workplace / "sweep" / "0" / "summary.json").read_text())["steps"] == 2
    assert not (workplace / "sweep" / "1" / "model.pt").exists()
