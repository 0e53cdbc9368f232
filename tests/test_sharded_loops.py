"""comm.state=sharded in kf.fit and kf.DataLoader: kf.state_dict, checkpoints, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import sharded as s
import torch
import torch.nn.functional as F
from distributed import run_workers
from torch.utils.data import TensorDataset

import kfuse as kf
from kfuse.cli.app import main


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


def fitted(state: str, resumed: Any = None, folder: str | None = None, **options: Any) -> dict[str, Any]:
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
                for word, act in (
                    ("topology", lambda: kf.set_topology("allreduce")),
                    ("sync", lambda: kf.set_sync("sma")),
                ):
                    try:
                        act()
                    except ValueError as error:
                        found[word] = str(error)

    if resumed is not None:
        kf.load_state_dict(resumed)
    kf.fit(
        model, data(), opt, kf.Hook(Policy()), loss_fn=F.mse_loss, batch_size=16, batch_micro=4, train_epochs=2, seed=1,
        observe_progress=False,
        **({} if folder is None else {"checkpoint_dir": folder, "checkpoint_every_steps": 5}), **options,
    )  # fmt: skip
    return {**found, "params": s.values(model), "opt": s.tensors(opt.state_dict())}


def test_kf_state_dict_is_whole_on_every_worker() -> None:
    whole = run_workers(1, fitted, "replicated")[0]
    saved = run_workers(2, fitted, "sharded")
    for found in saved:
        assert s.same(found["params"], whole["params"]) and s.same(found["opt"], whole["opt"])
        assert s.same(s.tensors(found["state"]["optimizer"]), s.tensors(whole["state"]["optimizer"]))
        assert found["topology"].startswith("comm_schedule=allreduce: must be one of auto, all_to_all")
        assert found["sync"].startswith("comm_sync=sma: must be ssgd with comm_")
    for found in run_workers(3, fitted, "sharded", saved[1]["state"]):
        assert s.same(found["params"], whole["params"]) and s.same(found["opt"], whole["opt"])


@pytest.mark.full
def test_a_scripts_checkpoints(tmp_path: Path) -> None:
    """Of three workers in a directory that all share: one file each, which one worker resumes from."""
    run_workers(3, fitted, "sharded", None, str(tmp_path))
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert (names[0], names[-1]) == ("step-00000005", "step-00000012")  # one between, when the first is written
    state = torch.load(tmp_path / names[0] / "optimizer.pt", weights_only=True)
    model = Plain()
    plain = torch.optim.AdamW(s.groups(model))
    plain.load_state_dict(state)
    assert all(of["exp_avg"].shape == p.shape for p, of in plain.state.items()) and len(plain.state) == 7


def looped(state: str) -> list[torch.Tensor]:
    s.init(state, reproducible=True)
    model, opt = make()
    for step in kf.DataLoader(data(), model, opt, batch_size=16, batch_micro=4, train_epochs=1, seed=1):
        for x, y in step:
            F.mse_loss(model(x), y).backward()  # in the micro-batch's context
        opt.step()
        opt.zero_grad()
    return s.values(model)


def test_a_loop_over_kf_data_loader() -> None:
    whole = run_workers(1, looped, "replicated")[0]
    for found in run_workers(2, looped, "sharded"):
        assert s.same(found, whole)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            "comm.schedule=tree",
            "comm.schedule=tree: must be one of auto, all_to_all, reduce_scatter, symmetric with comm.state=sharded",
        ),
        ("comm.sync=local:4", "comm.sync=local:4: must be ssgd with comm.state=sharded"),
        ("optimizer=torch", "comm.state=sharded: must be replicated with optimizer=SGD"),
    ],
)
def test_the_command_line_refuses(
    settings: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["kfuse", *([] if "state" in settings else ["comm.state=sharded"]), *settings.split()]
    )
    assert main() == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
