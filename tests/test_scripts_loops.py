"""Trainings one after another, by turns, interrupted and run again, as in a notebook; and what a loop's body may do."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import backward, update
from torch import Tensor, nn

import kfuse as kf
from kfuse.data import EpochSampler
from kfuse.train.state import Trainable

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WORKERS = pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
KINDS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: kf.FusedAdamW(params, lr=0.01),
    "momentum": lambda params: kf.FusedSGD(params, lr=0.1, momentum=0.9),
    "wrapped": lambda params: kf.Optimizer(torch.optim.RMSprop(params, lr=0.01)),
}


def dataset(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def made(kind: str, seed: int) -> tuple[nn.Module, Any]:
    model = network(seed)
    return model, KINDS[kind](model.parameters())


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(values(found), values(expected), rtol=1e-5, atol=1e-6)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A worker that was slow gets fewer micro-batches, so that sums are rounded otherwise."""
    if SIZE == 1:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def loader(model: nn.Module, opt: Any, **settings: Any) -> kf.DataLoader:
    return kf.DataLoader(model, dataset(), opt, **settings)


# -- several trainings in a process ---------------------------------------------------------------------------------


def train(how: str, model: nn.Module, opt: Any, policy: kf.BasePolicy | None = None, epochs: int = 1) -> None:
    settings = {"batch_size": 8, "micro_batch": 2, "epochs": epochs}
    if how == "fit":
        kf.fit(model, dataset(), opt, policy or kf.BasePolicy(), **settings)
        return
    for step in loader(model, opt, policy=policy, **settings):
        backward(model, step)
        update(opt)


class Asks(kf.BasePolicy):
    """Asks for something at the end of each epoch, so also when no step is left to announce it."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask

    def after_epoch(self) -> None:
        self.ask()


class Grows(kf.BasePolicy):
    def decide(self, signals: kf.Signals) -> kf.Decision:
        return kf.Decision(batch_size=16, lr_scale=0.5)


@pytest.mark.full
@WORKERS
@on_workers()
def test_nothing_leaks_from_one_training_into_the_next(workers: int) -> None:
    verbs: list[Callable[[], None]] = [
        lambda: kf.set_batch_size(16),
        lambda: kf.set_lr(1e-5),
        lambda: kf.set_sync("local:2"),
        lambda: kf.set_topology("tree"),
    ]
    for kind, how in zip(KINDS, ("fit", "loader", "fit"), strict=True):
        model, opt = made(kind, 0)
        train(how, model, opt, epochs=2)
        expected, norm = values(model), opt.stats.grad_norm
        alive = []
        for policy in [*map(Asks, verbs), Grows()]:
            alive.append(made(kind, 5))
            train("loader" if how == "fit" else "fit", *alive[-1], policy=policy, epochs=2)
            model, opt = made(kind, RANK)  # all start from rank 0's
            assert opt.stats is None and opt.param_groups[0]["lr"] in (0.01, 0.1)
            train(how, model, opt, epochs=2)
            assert opt.stats.step == 11, "12 steps of 8 samples"
            assert_near(values(model), expected)
            assert opt.stats.grad_norm == pytest.approx(norm, rel=1e-4) and opt.lr_factor == 1.0


@WORKERS
@pytest.mark.parametrize("how", ["loader", "bare"])
@on_workers()
def test_two_models_are_trained_by_turns(how: str, workers: int) -> None:
    """Two loaders, a step of each by turns; or bare loops by turns, of models without dropout."""

    def steps(model: nn.Module, opt: Any) -> Iterator[Any]:
        of_loader = loader(model, opt, batch_size=8, micro_batch=2)
        for step in of_loader if how == "loader" else [[dataset()]] * 6:
            yield backward(model, step)
            update(opt)

    def models() -> list[tuple[nn.Module, Any]]:
        nets = [(network if how == "loader" else plain)(seed) for seed in range(2)]
        return [(net, KINDS[kind](net.parameters())) for net, kind in zip(nets, ("adamw", "momentum"), strict=True)]

    alone, both = models(), models()
    for each in alone:
        assert len(list(steps(*each))) == 6
    assert len(list(zip(*itertools.starmap(steps, both), strict=True))) == 6
    for (model, opt), (expected, _) in zip(both, alone, strict=True):
        assert_near(values(model), values(expected))
        assert opt.stats.step == 5


def test_clip_norm_holds_for_one_training() -> None:
    model = network(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1, clip_norm=3.0)
    kf.fit(model, dataset(), opt, clip_norm=1e-9)
    torch.testing.assert_close(model[0].weight, network(0)[0].weight)  # type: ignore[union-attr]
    assert opt.clip_norm == 3.0
    for step in loader(model, opt, steps=1):
        opt.set_clip_norm(2.0)  # the user's own, which stays
        backward(model, step)
        update(opt)
    assert opt.clip_norm == 2.0


def test_a_frozen_batch_norm_stays_frozen_in_fit() -> None:
    """Through evaluations too. A model that is in eval mode as a whole is put into training mode."""
    model: Any = network(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    model[1].eval()
    kf.fit(model, dataset(), opt, heldout=dataset(), epochs=2)
    assert model.training and not model[1].training and model[1].num_batches_tracked == 0
    model.eval()
    kf.fit(model, dataset(), opt)
    assert model.training and model[1].num_batches_tracked > 0


# -- cells that are run again ---------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Ctrl-C in a notebook, but for pytest."""


def interrupt(how: str, model: nn.Module, opt: Any) -> None:
    """Trains until something ends it in the middle of the third step."""
    if how.startswith("fit"):
        calls = []

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 2 * 4 // SIZE + 1:
                raise KeyboardInterrupt if how == "fit, Ctrl-C" else Interrupted
            return F.cross_entropy(output, target)

        kf.fit(model, dataset(), opt, batch_size=8, micro_batch=2, loss_fn=loss_fn)
    for count, step in enumerate(loader(model, opt, batch_size=8, micro_batch=2)):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
            if how == "in a micro-batch" and count == 2:
                raise KeyboardInterrupt
        if how == "before opt.step" and count == 2:
            raise KeyboardInterrupt
        opt.step()
        if how == "after opt.step" and count == 2:
            raise Interrupted
        opt.zero_grad()
        if how == "break" and count == 2:
            break


@WORKERS
@on_workers()
def test_a_cell_that_was_interrupted_can_be_run_again(workers: int) -> None:
    model, opt = made("adamw", 0)
    train("loader", model, opt)
    expected = values(model)
    ways = ("fit, Ctrl-C", "fit, error", "in a micro-batch", "before opt.step", "after opt.step", "break")
    kept = itertools.cycle(("nothing", "model and optimizer", "model"))
    for again, how in itertools.product(("fit", "loader"), ways):
        keeps = next(kept) if how != ways[-1] else "model and optimizer"
        model, opt = made("adamw", 0)
        start, state = values(model), copy.deepcopy(opt.state_dict())
        with contextlib.suppress(KeyboardInterrupt, Interrupted):
            interrupt(how, model, opt)
        if keeps == "nothing":
            model = network(0)
        model.load_state_dict(start)
        if keeps == "model and optimizer":
            opt.load_state_dict(state)
        else:
            opt = KINDS["adamw"](model.parameters())
        torch.manual_seed(3)
        drawn = torch.rand(2)
        torch.manual_seed(3)
        train(again, model, opt)
        assert torch.equal(torch.rand(2), drawn)
        assert_near(values(model), expected)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ("a second epoch", "For several epochs pass epochs= and iterate once"),
        ("no step", r"must call opt\.step"),
        ("a part of the micro-batches", "step 0: the loop over its 4 micro-batches ended early"),
    ],
)
def test_a_body_that_goes_wrong_is_an_error(seen: str, said: str) -> None:
    """`for epoch in ...: for step in loader:` would else train one epoch only, and say nothing. The backward of
    `next(iter(step))` comes after its micro-batch: alone it would count as the whole step.
    """
    model = plain(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    steps = loader(model, opt, batch_size=16)
    with pytest.raises(RuntimeError, match=said):
        for _ in range(2):
            for step in steps:
                backward(model, [next(iter(step))] if seen == "a part of the micro-batches" else step)
                opt.zero_grad() if seen == "no step" else update(opt)


def test_init_again_is_the_same_session_or_a_refusal() -> None:
    session = kf.init(comm_check_every=5, comm_timeout_s=7.0)
    kf.FusedAdamW(plain(0).parameters())
    assert kf.init() is kf.init(comm_check_every=5) is kf.init(comm_timeout_s=7.0) is session
    for other in ({"comm_reproducible": True}, {"comm_timeout_s": 8.0}):
        with pytest.raises(RuntimeError, match=r"has a session already.*before the first optimizer is made; for other"):
            kf.init(**other)  # type: ignore[arg-type]


# -- freezing -------------------------------------------------------------------------------------------------------


def unfreezing() -> dict[str, list[float]]:
    """A layer is unfrozen between epochs, in the loop's body. The second of two workers has no micro-batch."""
    kf.init(comm_reproducible=True)
    model = network(0)
    model[0].requires_grad_(False)  # type: ignore[operator]
    opt = kf.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    for count, step in enumerate(loader(model, opt, batch_size=8, micro_batch=8, epochs=2)):
        if count == 6:
            model[0].requires_grad_(True)  # type: ignore[operator]
            opt.rebuild()
        backward(model, step)
        update(opt)
    return {name: value.flatten().tolist() for name, value in values(model).items()}


def test_a_layer_is_unfrozen_in_the_loops_body_with_the_same_bits_for_any_number_of_workers() -> None:
    alone = unfreezing()
    frozen = values(network(0))["0.weight"].flatten().tolist()
    assert alone["0.weight"] != frozen
    assert run_workers(2, unfreezing) == [alone, alone]


def test_a_worker_that_joins_takes_over_which_parameters_are_trained() -> None:
    models = [plain(0), plain(1)]
    models[1][0].requires_grad_(False)  # type: ignore[operator]
    opts = [kf.FusedAdamW(model.parameters(), lr=0.01) for model in models]
    old, new = (Trainable(opt) for opt in opts)
    new.load_state_dict(old.state_dict())
    assert all(p.requires_grad for p in models[1].parameters())
    models[1].load_state_dict(models[0].state_dict())
    for model, opt in zip(models, opts, strict=True):
        backward(model, [dataset()])
        update(opt)
    assert_same(*models)
    with pytest.raises(ValueError, match="another program's state: its optimizer has 4 parameters, not 2"):
        Trainable(kf.FusedAdamW(nn.Linear(2, 2).parameters())).load_state_dict(old.state_dict())


# -- two gradients in a step ------------------------------------------------------------------------------------------


def sharpness_aware(code: str) -> None:
    data, theirs = dataset(192), plain(1)
    model = copy.deepcopy(theirs)
    opt, names = kf.FusedSGD(model.parameters(), lr=0.5), {"loss_fn": F.cross_entropy, "torch": torch, "kf": kf}
    exec(code, names | {"model": model, "data": data, "opt": opt})
    params = list(theirs.parameters())
    for step in range(3):
        chosen = EpochSampler(192, 0).indices(0, 64 * step, 64)
        sums = [torch.zeros_like(p) for p in params]
        for x, y in ([part[chosen[j : j + 16]] for part in data] for j in range(0, 64, 16)):
            moved = copy.deepcopy(theirs)
            first = torch.autograd.grad(F.cross_entropy(theirs(x), y), params)
            norm = torch.cat([g.flatten() for g in first]).norm()
            for p, g in zip(moved.parameters(), first, strict=True):
                p.data += 0.05 / norm * g
            second = torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters()))
            torch._foreach_add_(sums, second, alpha=1 / 4)
        for p, g in zip(params, sums, strict=True):
            p.data -= 0.5 * g
    assert_same(model, theirs)
    assert opt.stats is not None and (opt.stats.samples, opt.stats.micro_batches) == (64, 4)


@WORKERS
def test_sharpness_aware_minimisation_as_documented(workers: int) -> None:
    page = (Path(__file__).parent.parent / "docs" / "train.md").read_text()
    code = page.split("## Two gradients in a step")[1].split("```python\n")[1].split("```")[0]
    run_workers(workers, sharpness_aware, code)
