"""The models of real workers follow the published updates: SMA (CROSSBOW), local SGD, its outer momentum (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from distributed import on_workers, run_workers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import kfuse as kf
from kfuse.comm import measurement as t
from kfuse.train import step as train_step

DIM, START = 40, 30.0
WORKERS = 3


class Point(nn.Module):
    """A model whose loss is a quadratic: half the squared distance from the sample, summed over the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIM,), START))

    def loss(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1).mean() / 2


ADAMW: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda p: kf.FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adamw": (lambda p: kf.FusedAdamW(p, **ADAMW), lambda p: torch.optim.AdamW(p, **ADAMW)),
    "wrapped": (lambda p: kf.Optimizer(torch.optim.AdamW(p, **ADAMW)), lambda p: torch.optim.AdamW(p, **ADAMW)),
}


class Watching(kf.BasePolicy):
    """Notes what a worker has before each step and after it, and asks for a mode after given steps."""

    def __init__(self, model: Point, opt: Any, modes: dict[int, str]) -> None:
        self._model, self._opt, self._modes = model, opt, modes
        self.given, self.models, self.updates, self.figures, self.known = [], [], [], [], set()

    def before_step(self) -> None:
        self.given.append(np.full(DIM, np.nan, np.float32))  # where it has no micro-batch
        self.models.append(self._model.w.detach().numpy().copy())
        self.updates.append(float(self._opt.state.get(self._model.w, {}).get("step", 0.0)))

    def after_step(self) -> None:
        stats = self._opt.stats
        self.figures.append((stats.loss, stats.samples, stats.micro_batches, stats.skipped))

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.known |= {signals.noise_scale is not None, signals.grad_norm is not None}
        return kf.Decision(sync=self._modes.get(signals.step))


def trained(
    options: dict[str, Any], optimizer: str, samples: int, modes: dict[int, str], arguments: dict[str, Any]
) -> tuple[Any, ...]:
    """What this worker had: `Watching`'s notes, and the result."""
    train_step.shares = lambda relative: None  # type: ignore[assignment]  # also where the machine is busy
    kf.init(**options)
    model = Point()
    opt = OPTIMIZERS[optimizer][0](model.parameters())
    policy = Watching(model, opt, modes)
    data = TensorDataset(torch.randn(samples, DIM, generator=torch.Generator().manual_seed(0)))

    def loss(model: Any, batch: Any) -> Tensor:
        if model.training:
            policy.given[-1] = batch[0][0].numpy().copy()
        return model.loss(*batch)  # type: ignore[no-any-return]

    kf.fit(model, data, opt, policy, step_fn=loss, micro_batch=1, seed=3, heldout=data, **arguments)
    final = model.w.detach().numpy().copy()
    return np.array(policy.given), np.array(policy.models), policy.updates, policy.figures, final, policy.known


class Run(NamedTuple):
    """A training of three workers, one sample of each micro-batch. Modes have these values where none are given."""

    sync: str
    optimizer: str
    samples: int
    batch_size: int = 3
    epochs: int = 1
    eval_every: int = 10**6
    outer: tuple[float, float] | None = None
    sma: tuple[float, float] = (1 / WORKERS, 0.9)
    modes: tuple[tuple[int, str], ...] = ()

    def train(self) -> list[Any]:
        options: dict[str, Any] = {
            "comm_sync": self.sync,
            "comm_sma_alpha": self.sma[0],
            "comm_sma_momentum": self.sma[1],
        }
        if self.outer is not None:
            options |= {"comm_outer_lr": self.outer[0], "comm_outer_momentum": self.outer[1]}
        arguments = {"batch_size": self.batch_size, "epochs": self.epochs, "heldout_every": self.eval_every}
        results = run_workers(WORKERS, trained, options, self.optimizer, self.samples, dict(self.modes), arguments)
        return list(zip(*results, strict=True))


def published(run: Run, given: np.ndarray[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The algorithms of CROSSBOW (1), DiLoCo (1) and local SGD in float64, by torch's optimizers.

    given: [workers, steps, dim], NaN where a worker has no micro-batch. Returns the models and numbers of updates
    before each step, each step's mean loss, and the result.
    """
    x = torch.from_numpy(given).double().transpose(0, 1)
    models = [nn.Parameter(torch.full((DIM,), START, dtype=torch.float64)) for _ in given]
    inners = [OPTIMIZERS[run.optimizer][1]([w]) for w in models]
    common = nn.Parameter(models[0].detach().clone())
    lr, momentum = run.outer or (1.0, 0.0)
    outer = torch.optim.SGD([common], lr=lr, momentum=momentum, nesterov=momentum > 0)
    alpha, of_centre = run.sma
    centre = former = models[0].detach().clone()
    mode, began, seen, updates, losses = run.sync, 0, [], [], []
    for step, samples in enumerate(x):
        w = torch.stack([each.detach() for each in models])
        states = [inner.state[each] for inner, each in zip(inners, models, strict=True)]
        seen.append(w)
        updates.append([float(state.get("step", 0)) for state in states])
        gradients, busy = w - samples, ~samples[:, 0].isnan()
        losses.append(gradients[busy].square().sum(1).mean() / 2)
        for j in busy.nonzero().flatten().tolist():
            models[j].grad = gradients.mean(0) if mode == "ssgd" else gradients[j]
            inners[j].step()
        ends = (step + 1) % (len(x) // run.epochs) == 0
        meets = ends or (step + 1) % run.eval_every == 0
        if mode == "sma":
            corrections = alpha * (w - centre)
            for each, correction in zip(models, corrections, strict=True):
                each.data -= correction
            centre, former = centre + corrections.sum(0) + of_centre * (centre - former), centre
        elif mode != "ssgd" and ((is_complete := step + 1 - began >= int(mode[6:])) or meets):
            mean = torch.stack([each.detach() for each in models]).mean(0)
            if run.outer is None:
                average(states)
            elif is_complete:
                common.grad = common.detach() - mean
                outer.step()
                mean = common.detach()
            began = step + 1 if is_complete or run.outer is None else began
            for each in models:
                each.data.copy_(mean)
        for at, other in run.modes:
            if step + 1 == at + 4:  # it is in force from then on
                if not other.startswith("local"):
                    centre = former = torch.stack([each.detach() for each in models]).mean(0)
                    for each in models:
                        each.data.copy_(centre)
                mode = other
    result = centre if mode == "sma" else models[0].detach()
    return torch.stack(seen, 1), np.array(updates).T, losses, result


def average(states: list[Any]) -> None:
    """The mean of the workers' optimizer states. One that has made no update counts with zeros."""
    for name in {name for state in states for name in state}:
        mean = sum(state[name] for state in states if name in state) / len(states)
        for state in states:
            state[name] = mean.clone()


RUNS = {
    "sma": Run("sma", "sgd", 120, sma=(0.1, 0.5)),
    "outer steps, evaluated within rounds": Run("local:4", "wrapped", 66, eval_every=3, outer=(0.7, 0.9)),
    # In an epoch's last step a worker has no micro-batch; or in all steps: then it has no state as others' is averaged.
    "local, idle in some steps": Run("local:3", "wrapped", 13, epochs=2),
    "sma, one idle": Run("sma", "adamw", 16, batch_size=2, epochs=2),
    # The mode is in force from step 12 on, after the fourth round, and from step 13, within the fifth.
    "a round ends as ssgd begins": Run("local:3", "sgd", 72, outer=(0.7, 0.5), modes=((8, "ssgd"),)),
    "sma begins within a round": Run("local:3", "sgd", 72, outer=(0.7, 0.5), modes=((9, "sma"),)),
    "shorter rounds": Run("local:3", "sgd", 72, outer=(0.7, 0.5), modes=((9, "local:2"),)),
}


@pytest.mark.parametrize("name", RUNS)
def test_models_follow_the_published_updates(name: str) -> None:
    run = RUNS[name]
    given, models, updates, figures, final, known = run.train()
    given = np.stack(given)
    idle = np.isnan(given[:, :, 0])
    assert idle.any() == ("idle" in name)
    seen, counts, losses, result = published(run, given)
    np.testing.assert_allclose(models, seen, rtol=1e-4, atol=1e-4)
    if run.optimizer != "sgd":
        np.testing.assert_allclose(updates, counts, rtol=1e-6)
    for each, own in zip(final, figures, strict=True):
        np.testing.assert_allclose(each, result, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(each, final[0])
        assert own == figures[0], "a step's record is that of all workers"
    np.testing.assert_allclose([loss for loss, *_ in figures[0]], losses, rtol=1e-4)
    assert [rest for _, *rest in figures[0]] == [[count, count, False] for count in (~idle).sum(0)]
    assert run.modes or set.union(*known) == {False}, "the gradient's norm and the noise scale are unknown"


@on_workers(2)
def test_buffers_are_averaged_with_the_models() -> None:
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


def test_local_steps_on_a_gpu_do_not_count_as_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """There the warning goes by the statistics of the step before, and a local step's gradient norm is unknown."""
    opt = kf.FusedSGD(nn.Linear(1, 1).parameters())
    record = torch.zeros(t.TAIL_SLOTS + 3, dtype=torch.float64)
    record[[t.SAMPLES, t.MICRO_BATCHES]] = 2.0
    for step, (local, norm) in enumerate([(True, torch.nan), (True, torch.nan), (False, torch.inf), (False, 1.0)]):
        record[t.TAIL_SLOTS] = norm
        opt.statistics.push(step, "samples", record.clone(), local)
        opt._warn_of_nonfinite(step, torch.tensor(True))
    [said] = [each.getMessage() for each in caplog.records if each.name == "kfuse"]
    assert said.startswith("step 2: a gradient is not finite")
