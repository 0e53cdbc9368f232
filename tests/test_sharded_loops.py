"""comm.state=sharded in kf.fit: kf.state_dict, taken on some workers and loaded on others, and the same bits."""

from __future__ import annotations

from typing import Any

import sharded as s
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch.utils.data import TensorDataset

import kfuse as kf


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(96, 30, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :5]))


class Plain(s.Net):
    """All layers in each step."""

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        return super().forward(x, extra)


def make() -> tuple[Plain, Any]:
    torch.manual_seed(3)
    model = Plain()
    return model, s.optimizer("adamw", model, clip_norm=0.5)


def fitted(state: str, resumed: Any = None) -> dict[str, Any]:
    """A kf.fit of 12 steps; what kf.state_dict gave after the sixth."""
    s.init(state, reproducible=True)
    model, opt = make()
    found: dict[str, Any] = {}

    class Policy(kf.BasePolicy):
        steps = 0 if resumed is None else 6

        def after_step(self) -> None:
            self.steps += 1
            if self.steps == 6:
                found["state"] = kf.state_dict()

    if resumed is not None:
        kf.load_state_dict(resumed)
    kf.fit(
        model, data(), opt, kf.Hook(Policy()), loss_fn=F.mse_loss, batch_size=16, batch_micro=4, train_epochs=2, seed=1,
        observe_progress=False,
    )  # fmt: skip
    return {**found, "params": s.values(model), "opt": s.tensors(opt.state_dict())}


def test_kf_state_dict_is_whole_on_every_worker() -> None:
    whole = run_workers(1, fitted, "replicated")[0]
    saved = run_workers(2, fitted, "sharded")
    for found in saved:
        assert s.same(found["params"], whole["params"]) and s.same(found["opt"], whole["opt"])
        assert s.same(s.tensors(found["state"]["optimizer"]), s.tensors(whole["state"]["optimizer"]))
    for found in run_workers(3, fitted, "sharded", saved[1]["state"]):
        assert s.same(found["params"], whole["params"]) and s.same(found["opt"], whole["opt"])
