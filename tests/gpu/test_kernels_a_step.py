"""How many kernels a step of many tensors launches on a GPU beside the model's own, counted over the recorder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.order import patched
from gpu.steps import job
from torch import nn

import kfuse as kf
from kfuse.kernels.dispatch import Kernel


class Launches:
    """Counts operations of kfuse on the device: one for each call of one of its kernels, which is one launch."""

    def __init__(self) -> None:
        self.count, self._in_kernel, self._run = 0, False, Kernel.run

    def run(self, kernel: Any, given: Any) -> Any:
        if self._in_kernel:
            return self._run(kernel, given)
        self.count, self._in_kernel = self.count + 1, True
        try:
            return self._run(kernel, given)
        finally:
            self._in_kernel = False

    def enqueue(self, what: str) -> None:
        of_the_model = "(gpu/test_kernels_a_step.py" in what
        if not (self._in_kernel or of_the_model or what.startswith("a collective")):
            self.count += 1


@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_a_step_of_gpt_2s_148_tensors(skip_nonfinite: bool) -> None:
    """Three kernels a bucket (pack, squares of the mean, update), and 17 for the whole step."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(74)))
    with job(lambda params: None, size=8, lag=2, bucket_mb=9 * 64 * 4 / 2**20) as it:
        opt = kf.FusedAdamW(net.parameters(), skip_nonfinite=skip_nonfinite)
        x = torch.ones(8, 8, device=torch.device("cpu"))
        launches = Launches()
        plain = it.recorder.enqueue

        def enqueue(stream: Any, reads: Any, writes: Any, what: str) -> None:
            launches.enqueue(what)
            plain(stream, reads, writes, what)

        for _ in range(3):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        loss = net(x).square().mean()
        with (
            patched(it.recorder, "enqueue", enqueue),
            patched(Kernel, "run", lambda kernel, given: launches.run(kernel, given)),
        ):
            loss.backward()
            opt.step()
        assert len(opt.engine.gradient_buckets) == 17
    assert {float(opt.state[p]["step"]) for p in net.parameters()} == {4.0}
    assert 3 * 17 < launches.count <= 68
