"""The models of real workers follow the published updates: SMA (CROSSBOW), local SGD with outer momentum (DiLoCo)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_workers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import kfuse as kf
from kfuse.train import load_balance

DIM, START = 2000, 30.0


class Point(nn.Module):
    """A model whose loss is a quadratic: half the squared distance from the sample, summed over the elements."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((dim,), START))

    def loss(self, x: Tensor) -> Tensor:
        return (self.w - x).square().sum(1).mean() / 2


class Unknown(kf.BasePolicy):
    """Sees whether figures of the mean gradient are given."""

    def __init__(self) -> None:
        self.known: list[bool] = []

    def decide(self, signals: kf.Signals) -> None:
        self.known += [signals.noise_scale is not None, signals.grad_norm is not None]


def samples(steps: int, dim: int = DIM) -> Tensor:
    return torch.randn(3 * steps, dim, generator=torch.Generator().manual_seed(0))


def trained(model: Any, opt: Any, data: Tensor, policy: kf.BasePolicy) -> tuple[Any, Any]:
    """What this worker was given in each step, and its model before each step."""
    given, before = [], []
    for step in kf.DataLoader(TensorDataset(data), model, opt, policy=policy, batch_size=3, batch_micro=1, seed=3):
        before.append(model.w.detach().numpy().copy())
        for (x,) in step:
            given.append(x[0].numpy().copy())
            model.loss(x).backward()
        opt.step()
        opt.zero_grad()
    return np.array(given), np.array(before)


def sma(steps: int, lr: float, alpha: float, momentum: float) -> tuple[Any, ...]:
    """What this worker was given in each step, its model before each step, and the result."""
    load_balance.shares = lambda relative: None  # type: ignore[assignment]  # also where the machine is busy
    kf.init(comm_sync="sma", comm_sma_alpha=alpha, comm_sma_momentum=momentum)
    model, policy = Point(), Unknown()
    opt = kf.FusedSGD(model.parameters(), lr=lr)
    given, before = trained(model, opt, samples(steps), policy)
    return given, before, model.w.detach().numpy().copy(), any(policy.known)


def published_sma(given: Any, lr: float, alpha: float, momentum: float) -> tuple[Any, Any]:
    """Algorithm 1 of CROSSBOW in float64. given: [workers, steps, dim]. Models before each step; the central one."""
    workers = len(given)
    models = np.full((workers, given.shape[2]), START)
    centre, former, seen = models[0], models[0], []
    for x in given.swapaxes(0, 1).astype(np.float64):
        seen.append(models)
        corrections = alpha * (models - centre)
        models = models - lr * (models - x) - corrections
        centre, former = centre + corrections.sum(0) + momentum * (centre - former), centre
    return np.array(seen).swapaxes(0, 1), centre


def test_sma_is_the_published_update() -> None:
    alpha, momentum = 0.1, 0.5
    results = run_workers(3, sma, 40, 0.2, alpha, momentum)
    given, before = (np.stack([result[k] for result in results]) for k in (0, 1))
    models, centre = published_sma(given, 0.2, alpha, momentum)
    np.testing.assert_allclose(before, models, rtol=1e-5, atol=2e-5)
    assert np.abs(before[0, -1] - before[1, -1]).max() > 0.05, "each worker has a model of its own"
    for result in results:
        np.testing.assert_allclose(result[2], centre, rtol=1e-5, atol=2e-5, err_msg="the result is the central model")
        np.testing.assert_array_equal(result[2], results[0][2])
        assert not result[3], "the gradient's norm and the noise scale are unknown"


# Local SGD with an outer step


EVERY, EVAL_EVERY = 4, 3


def diloco(steps: int) -> tuple[Any, ...]:
    load_balance.shares = lambda relative: None  # type: ignore[assignment]
    kf.init(comm_sync=f"local:{EVERY}", comm_outer_lr=0.7, comm_outer_momentum=0.9)
    model = Point(50)
    opt = kf.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.3))
    given = []

    def loss(model: Point, batch: tuple[Tensor]) -> Tensor:
        (x,) = batch
        given.extend(x.numpy().copy() if model.training else [])
        return model.loss(x)

    data = samples(steps, 50)
    arguments: dict[str, Any] = dict(batch_size=3, batch_micro=1, seed=5, train_eval_every=EVAL_EVERY)
    summary = kf.fit(model, TensorDataset(data), opt, step_fn=loss, heldout=TensorDataset(data[:6]), **arguments)
    assert summary is not None
    return np.array(given), model.w.detach().numpy().copy(), summary["params_sha256"]


def published_diloco(given: Any) -> np.ndarray[Any, Any]:
    """Algorithm 1 of DiLoCo in float64, by torch's optimizers. Evaluations average the models, as kfuse says."""
    common = nn.Parameter(torch.full((50,), START, dtype=torch.float64))
    outer = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    models = [nn.Parameter(common.detach().clone()) for _ in given]
    inners = [torch.optim.AdamW([w], lr=0.3) for w in models]
    steps = given.shape[1]
    for step in range(1, steps + 1):
        for w, inner, x in zip(models, inners, given[:, step - 1], strict=True):
            w.grad = w.detach() - torch.from_numpy(x).double()
            inner.step()
        mean = torch.stack([w.detach() for w in models]).mean(0)
        if step % EVERY == 0:
            common.grad = common.detach() - mean
            outer.step()
            mean = common.detach()
        if step % EVERY == 0 or step % EVAL_EVERY == 0 or step == steps:
            for w in models:
                w.data.copy_(mean)
    return models[0].detach().numpy()


def test_outer_steps_are_diloco_s() -> None:
    """The inner optimizers' states stay with the workers. An evaluation averages the models, and the round goes on."""
    results = run_workers(3, diloco, 22)
    given = np.stack([result[0] for result in results])
    for _, found, digest in results:
        np.testing.assert_allclose(found, published_diloco(given), rtol=1e-4, atol=1e-4)
        assert digest == results[0][2]


# A worker without a micro-batch


def idle_steps(sync: str, kind: str, samples: int, batch_size: int, epochs: int) -> tuple[Any, ...]:
    """Of this worker: its sample in each step (NaN: none), its model before it, its numbers of updates after it; each
    step's figures; the result.
    """
    load_balance.shares = lambda relative: None  # type: ignore[assignment]
    kf.init(comm_sync=sync)
    model = Point(40)
    params = list(model.parameters())
    settings: dict[str, Any] = dict(lr=0.3, weight_decay=0.1)
    opt: Any = kf.FusedAdamW(params, **settings)
    if kind == "wrapped":
        opt = kf.Optimizer(torch.optim.AdamW(params, **settings))
    x = torch.randn(samples, 40, generator=torch.Generator().manual_seed(0))
    given, before, updates, figures = [], [], [], []
    loader = kf.DataLoader(
        TensorDataset(x), model, opt, batch_size=batch_size, batch_micro=1, train_epochs=epochs, seed=3
    )
    for step in loader:
        before.append(model.w.detach().numpy().copy())
        given.append(np.full(40, np.nan, np.float32))
        for (sample,) in step:
            given[-1] = sample[0].numpy().copy()
            loss = model.loss(sample)
            step.loss = loss
            loss.backward()
        opt.step()
        opt.zero_grad()
        updates.append(float(opt.state.get(model.w, {}).get("step", 0.0)))
        stats = opt.stats
        assert stats is not None
        figures.append((stats.loss, stats.samples, stats.micro_batches, stats.grad_norm, stats.skipped))
    return np.array(given), np.array(before), updates, figures, model.w.detach().numpy().copy()


def published_idle_steps(given: Any, every: int, meets: list[int]) -> tuple[Any, Any, Any, Any]:
    """In float64. given: [workers, steps, dim]; meets: steps after which models meet, also within `every`. every: 0:
    sma. Before each step the models; after it the numbers of updates; each step's mean loss; the result.
    """
    workers, steps, dim = given.shape
    w, m, v, t = np.full((workers, dim), START), np.zeros((workers, dim)), np.zeros((workers, dim)), np.zeros(workers)
    centre, former, since = w[0].copy(), w[0].copy(), 0
    seen, updates, losses = [], [], []
    for step in range(steps):
        seen.append(w.copy())
        corrections = (w - centre) / workers
        busy = [j for j in range(workers) if not np.isnan(given[j, step, 0])]
        losses.append(np.mean([np.square(w[j] - given[j, step]).sum() / 2 for j in busy]))
        for j in busy:
            gradient = w[j] - given[j, step].astype(np.float64)
            t[j] += 1
            m[j], v[j] = 0.9 * m[j] + 0.1 * gradient, 0.999 * v[j] + 0.001 * gradient**2
            root = np.sqrt(v[j] / (1 - 0.999 ** t[j])) + 1e-8
            w[j] = w[j] * (1 - 0.3 * 0.1) - 0.3 * (m[j] / (1 - 0.9 ** t[j])) / root
        updates.append(t.copy())
        since += 1
        if not every:
            w -= corrections
            centre, former = centre + corrections.sum(0) + 0.9 * (centre - former), centre
        elif since == every or step in meets:
            for values in (w, m, v):
                values[:] = values.mean(0)
            t[:], since = t.mean(), 0
    return np.array(seen).swapaxes(0, 1), np.array(updates).T, losses, w[0] if every else centre


@pytest.mark.parametrize(
    ("kind", "sync", "samples", "batch_size"), [("wrapped", "local:3", 13, 3), ("fused", "sma", 16, 2)]
)
def test_a_worker_without_a_micro_batch_makes_no_update(sync: str, kind: str, samples: int, batch_size: int) -> None:
    """In an epoch's last step, and in all steps: then it has no state as the others' are averaged."""
    results = run_workers(3, idle_steps, sync, kind, samples, batch_size, 2)
    given, before, updates = (np.stack([result[k] for result in results]) for k in range(3))
    steps = given.shape[1]
    assert np.isnan(given).any() and not np.isnan(given).all(axis=(0, 2)).any()
    meets = [steps // 2 - 1, steps - 1]
    seen, counts, losses, final = published_idle_steps(given, 3 if sync == "local:3" else 0, meets)
    np.testing.assert_allclose(before, seen, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(updates, counts, rtol=1e-6)
    for *_, figures, found in results:
        np.testing.assert_allclose(found, final, rtol=1e-4, atol=1e-4)
        assert figures == results[0][3], "a step's record is that of all workers"
        np.testing.assert_allclose([loss for loss, *_ in figures], losses, rtol=1e-4)
        busy = (~np.isnan(given[:, :, 0])).sum(0)
        assert [rest for _, *rest in figures] == [[count, count, None, False] for count in busy]


# An outer round that ends as the mode changes


class Changes(kf.BasePolicy):
    """Asks for a mode after step `at`: it is in force from step `at` + 4 on."""

    def __init__(self, at: int, mode: str) -> None:
        self._at, self._mode = at, mode

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        return kf.Decision(sync=self._mode) if signals.step == self._at else None


def changing(at: int, mode: str, steps: int) -> tuple[Any, ...]:
    load_balance.shares = lambda relative: None  # type: ignore[assignment]
    kf.init(comm_sync="local:3", comm_outer_lr=0.7, comm_outer_momentum=0.5)
    model = Point(50)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    return trained(model, opt, samples(steps, 50), Changes(at, mode))


def published_change(given: Any, at: int, mode: str) -> Any:
    """Models before each step, in float64."""
    workers, steps, dim = given.shape
    w, seen, rounds = np.full((workers, dim), START), [], 3
    theta, velocity, began = w[0].copy(), np.zeros(dim), 0
    centre, former, now = w[0].copy(), w[0].copy(), "local"
    for step in range(steps):
        seen.append(w.copy())
        corrections = (w - centre) / workers
        gradient = w - given[:, step].astype(np.float64)
        w = w - 0.1 * (gradient.mean(0) if now == "ssgd" else gradient)
        if now == "sma":
            w = w - corrections
            centre, former = centre + corrections.sum(0) + 0.9 * (centre - former), centre
        complete = now == "local" and step + 1 - began >= rounds
        if complete:
            gain = theta - w.mean(0)
            velocity = 0.5 * velocity + gain
            theta, began = theta - 0.7 * (gain + 0.5 * velocity), step + 1
            w = np.tile(theta, (workers, 1))
        if step + 1 == at + 4 and mode.startswith("local"):
            rounds = int(mode[6:])
        elif step + 1 == at + 4:
            w = np.tile(w.mean(0), (workers, 1))
            now, centre, former = mode, w[0].copy(), w[0].copy()
    return np.array(seen).swapaxes(0, 1)


@pytest.mark.parametrize(("at", "mode"), [(8, "ssgd"), (9, "sma"), (9, "local:2")])
def test_a_round_that_ends_as_the_mode_changes_makes_its_outer_step(at: int, mode: str) -> None:
    """In force from step 12 on, after the fourth round, and within the fifth."""
    results = run_workers(3, changing, at, mode, 24)
    given, before = (np.stack([result[k] for result in results]) for k in (0, 1))
    np.testing.assert_allclose(before, published_change(given, at, mode), rtol=1e-4, atol=1e-4)
