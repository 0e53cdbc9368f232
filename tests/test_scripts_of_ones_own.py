"""Truncated back-propagation, REINFORCE, averages of weights: as in plain torch, with lost workers too."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import struck_example
import torch
import torch.nn.functional as F
from distributed import load, on_workers, run_workers
from elastic_job import run_script, script_job
from limits import limits
from problems import relative, update
from torch import nn

import kfuse as kf
from kfuse.data import EpochSampler, load_digits
from kfuse.train.evaluation import params_sha256
from kfuse.train.step import random_key, seed_forward

EXAMPLES = Path(__file__).parent.parent / "examples"
BPTT, REINFORCE, AVERAGE = (str(EXAMPLES / f"{name}.py") for name in ("truncated_bptt", "reinforce", "weight_average"))
SETTINGS = {BPTT: ("WINDOW=64",), REINFORCE: (f"EPISODES={24 * 64}",), AVERAGE: ("EPOCHS=2",)}


def plain_bptt(module: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, windows = module.Model(), module.Windows(module.TEXT)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(module.EPOCHS):
        state = torch.zeros(1, module.STREAMS, 64)
        for window in range(len(windows) // module.STREAMS):
            x, y, *_ = windows.fetch(window * module.STREAMS + np.arange(module.STREAMS))
            output, state = model.rnn(model.embedding(x), state.detach())
            F.cross_entropy(model.out(output).flatten(0, 1), y.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update(opt)
    return model, state.detach()[0]


def plain_reinforce(module: Any) -> tuple[nn.Module, torch.Tensor]:
    """With the random numbers of kfuse's micro-batches."""
    torch.manual_seed(0)
    walker = module.Walker()
    opt = torch.optim.AdamW(walker.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(module.EPISODES // module.BATCH):
        baseline, parts = walker.baseline.clone(), []
        for j in range(4):
            seed_forward(torch.device("cpu"), random_key(0, step, j))
            walker.baseline.copy_(baseline)
            (walker.loss(module.BATCH // 4) / 4).backward()
            parts.append(walker.baseline.clone())
        walker.baseline.copy_(torch.stack(parts).mean())
        update(opt)
    return walker, walker.baseline


TWINS: dict[str, Callable[[Any], tuple[nn.Module, torch.Tensor]]] = {BPTT: plain_bptt, REINFORCE: plain_reinforce}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("example", [BPTT, pytest.param(REINFORCE, marks=pytest.mark.full)])
@on_workers()
def test_it_trains_as_in_plain_torch(example: str, workers: int) -> None:
    """The relative difference of the parameters, and of what goes on from step to step."""
    ours = struck_example.run(example, *SETTINGS[example])
    module = load(example)
    for name, number in (setting.split("=") for setting in SETTINGS[example]):
        setattr(module, name, int(number))
    theirs, goes_on = TWINS[example](module)
    own = ours.carried.state if example == BPTT else ours.baseline
    assert bool(own.any())
    assert relative(ours.parameters(), theirs.parameters()) < 1e-4 and relative([own], [goes_on]) < 1e-4


def undisturbed(example: str) -> str:
    kf.init(comm_reproducible=True)
    return params_sha256(struck_example.run(example, *SETTINGS[example]))


@pytest.mark.full
@pytest.mark.parametrize("example", [BPTT, REINFORCE, AVERAGE])
def test_workers_are_lost_and_join_with_the_same_bits(example: str, tmp_path: Path) -> None:
    """One of the lost workers had the state of half of the streams. The weights and their average are compared."""
    script = (struck_example.__file__, str(tmp_path), example, *SETTINGS[example])
    job = run_script(tmp_path / "run", limits(2, 1, 2, script=True), *script)
    assert job.error is None, job.told()
    assert len(list(tmp_path.glob("events/event-*"))) == 2
    assert {"grow", "failure"} <= {view["reason"] for view in job.views}
    [alone] = run_workers(1, undisturbed, example)
    assert alone == job.summary["params_sha256"]
    assert len(job.of_kind("evaluation")) == (2 if example == AVERAGE else 0)


PREPARED = """
import os, signal, sys, torch, kfuse as kf
kf.init(comm_reproducible=True)
torch.manual_seed(0)
x = torch.randn(512, 4)
y = (x.sum(1) > 0).long()
data, heldout = (x[:448], y[:448]), (x[448:], y[448:])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
calls = []
def strike(module, given):
    calls.append(given)
    if len(calls) == 50 and kf.size() == 2 and kf.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
model.register_forward_pre_hook(strike)
"""


@pytest.mark.jobs
def test_an_average_as_documented_has_the_same_bits_where_a_worker_is_lost(tmp_path: Path) -> None:
    """In kf.fit: of a job whose first worker is killed, and of one worker. The best evaluation is the average's."""
    code = (EXAMPLES.parent / "docs" / "train.md").read_text().split("### Moving average")[1].split("```")[1]
    ends = []
    for workers in (2, 1):
        folder = tmp_path / str(workers)
        folder.mkdir()
        job = script_job(folder, PREPARED + code.removeprefix("python"), workers)
        assert job.error is None and len(job.of_kind("failure")) == workers - 1
        ends.append((job.summary["params_sha256"], [each["loss"] for each in job.of_kind("evaluation")]))
    assert ends[0] == ends[1] and len(ends[0][1]) == 10
    names: dict[str, Any] = {}
    exec(PREPARED + code.removeprefix("python").partition("\nnet = ")[0], names)
    net = names["Averaged"](names["model"])
    net.load_state_dict(torch.load(job.directory / "best.pt", weights_only=True))
    x, y = names["heldout"]
    assert F.cross_entropy(net.average.eval()(x), y).item() in [pytest.approx(loss) for loss in ends[0][1]]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
@on_workers()
def test_the_average_of_the_weights_is_the_one_that_is_evaluated_and_resumed(workers: int, tmp_path: Path) -> None:
    """As in a plain loop."""
    kf.init(comm_reproducible=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ours = struck_example.run(AVERAGE, "EPOCHS=2")
    module, digits = load(AVERAGE), load_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    average = module.AveragedModel(model, multi_avg_fn=module.get_ema_multi_avg_fn(0.98))
    opt, expected = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01), []
    for epoch in range(2):
        for begin in range(0, len(digits.train), module.BATCH):
            x, y = digits.train.fetch(EpochSampler(len(digits.train), 0).indices(epoch, begin, module.BATCH))
            F.cross_entropy(model(x), y).backward()
            update(opt)
            average.update_parameters(model)
        x, y = digits.heldout.fetch(np.arange(len(digits.heldout)))
        expected.append(f"accuracy of the average: {(average(x).argmax(1) == y).float().mean():.4f}")
    assert relative(ours.parameters(), [*model.parameters(), *average.parameters()]) < 1e-4
    assert printed.getvalue().splitlines() == ([] if kf.rank() else expected)

    kf.DataLoader = partial(kf.DataLoader, checkpoint_dir=tmp_path)  # type: ignore[misc, assignment]
    for epochs in (1, 2):
        resumed = struck_example.run(AVERAGE, f"EPOCHS={epochs}")
    assert params_sha256(resumed) == params_sha256(ours), "resumed from a checkpoint"
    assert int(resumed[1].n_averaged) == int(ours[1].n_averaged)


# -- what a carried state needs ---------------------------------------------------------------------------------------


def test_what_a_carried_state_cannot_have_is_refused() -> None:
    module = load(BPTT)
    model, windows = module.Model(), module.Windows(module.TEXT)
    opt = kf.FusedAdamW(model.parameters(), lr=1e-3)
    shuffled = torch.utils.data.TensorDataset(torch.zeros(32, 4))
    for data, settings, message in (
        (windows, {"batch_size": 8}, "batch_size=8: must be equal to 16 .*each step has one sample of each stream"),
        (shuffled, {"batch_size": 16}, "16 streams: data must have an order of their own"),
        (windows, {"batch_size": 16, "weight_fn": len}, "weight_fn=True: must be False with streams=16"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            kf.DataLoader(model, data, opt, **settings)
        assert "\n" not in str(raised.value)
