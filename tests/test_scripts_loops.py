"""Scripts with unusual training loops give with kfuse what they give with plain torch, on one worker and on two.

Each worker builds other initial parameters, as unseeded scripts do; the twin in plain torch (on two workers:
DistributedDataParallel) starts from rank 0's, and gets the same data on each rank.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_workers
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import kfuse as kf
from kfuse.comm.gradients import GradientHooks
from kfuse.train.state import Trainable

Step = list[tuple[Tensor, Tensor]]  # one worker's micro-batches of a step

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
KINDS = ("adamw", "momentum", "wrapped")


def dataset(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def optimizer(kind: str, model: nn.Module, ours: bool = True) -> Any:
    params = model.parameters()
    if kind == "adamw":
        return kf.FusedAdamW(params, lr=0.01) if ours else torch.optim.AdamW(params, lr=0.01)
    if kind == "momentum":
        cls = kf.FusedSGD if ours else torch.optim.SGD
        return cls(params, lr=0.1, momentum=0.9)
    inner = torch.optim.RMSprop(params, lr=0.01)
    return kf.Optimizer(inner) if ours else inner


def twin_of(kind: str, start: dict[str, Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(0)
    model.load_state_dict(start)
    if SIZE > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    return model, optimizer(kind, model, ours=False)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(values(found), values(expected), rtol=1e-5, atol=1e-6)


def assert_plausible(stats: kf.StepStats | None, steps: int, norm: float | None = None) -> None:
    """norm: of plain torch's last gradient; without it the norm may be unknown."""
    assert stats is not None and stats.step == steps - 1
    if norm is None:
        assert stats.grad_norm is None or 0 < stats.grad_norm < 10
    else:
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    assert stats.loss is None or 0 < stats.loss < 10
    assert stats.grad_variance is None or 0 < stats.grad_variance < 500


def batches(count: int, micro_batches: int) -> list[Step]:
    """This worker's; 2 samples in a micro-batch."""
    x, y = dataset()
    parts = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 48, 2)]
    per_step = micro_batches * SIZE
    firsts = [(step * per_step + RANK * micro_batches) % 24 for step in range(count)]
    return [[parts[(first + j) % 24] for j in range(micro_batches)] for first in firsts]


def micro_batch(model: nn.Module, opt: Any, step: Step, j: int, style: str) -> Any:
    """The context of micro-batch j, and what its mean loss is divided by."""
    last = j == len(step) - 1
    if style == "micro_batch":
        return opt.micro_batch(samples=len(step[j][0]), last=last), 1
    if style == "twin":
        return (contextlib.nullcontext() if last or SIZE == 1 else model.no_sync()), len(step)
    return contextlib.nullcontext(), 1


# -- mixed precision ------------------------------------------------------------------------------------------------


class Amp:
    """A step of a script with autocast and GradScaler. On the last rank the loss of step 2 overflows."""

    def __init__(self, model: nn.Module, opt: Any, clip: bool) -> None:
        self.model, self.opt, self.clip = model, opt, clip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.seen: list[float] = []
        self.count = 0

    def micro_batch(self, x: Tensor, y: Tensor, parts: int = 1) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        if self.count == 2 and RANK == SIZE - 1:
            loss = loss * torch.inf
        self.scaler.scale(loss / parts).backward()
        self.seen.append(loss.item())

    def update(self) -> None:
        if self.clip:
            self.scaler.unscale_(self.opt)
            self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1).item())
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        self.seen.append(self.scaler.get_scale())
        self.count += 1


def amp(kind: str, style: str, clip: bool) -> None:
    model = plain(RANK)
    opt = optimizer(kind, model)
    start = values(model)
    script = Amp(model, opt, clip)
    steps: list[Step] = []
    if style == "loader":
        for step in kf.DataLoader(dataset(), model, opt, batch_size=8, batch_micro=2):
            steps.append([])
            for x, y in step:
                steps[-1].append((x, y))
                script.micro_batch(x, y)
            script.update()
    else:
        steps = batches(6, 1 if style == "bare" else 2)
        for step in steps:
            for j, (x, y) in enumerate(step):
                with micro_batch(model, opt, step, j, style)[0]:
                    script.micro_batch(x, y)
            script.update()
    twin, twins = twin_of(kind, start)
    reference = Amp(twin, twins, clip)
    for step in steps:
        for j, (x, y) in enumerate(step):
            context, parts = micro_batch(twin, twins, step, j, "twin")
            with context:
                reference.micro_batch(x, y, parts)
        reference.update()
    assert_same(model, twin)
    assert script.seen == pytest.approx(reference.seen, rel=1e-5, nan_ok=True)
    assert 512.0 in script.seen
    assert_plausible(opt.stats, 6)


def amp_scripts() -> None:
    for kind in KINDS:
        for style in ("bare", "micro_batch", "loader"):
            amp(kind, style, clip=kind != "momentum")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_grad_scaler_skips_and_scales_as_with_plain_torch(workers: int) -> None:
    run_workers(workers, amp_scripts)


# -- learning rates -------------------------------------------------------------------------------------------------


def nothing() -> None:
    pass


def norm_of(model: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)) ** 0.5


def train_steps(
    model: nn.Module, opt: Any, steps: list[Step], style: str, after: Callable[[], None] = nothing
) -> list[float]:
    """Returns the micro-batches' losses and, last, the last gradient's norm."""
    losses = []
    for step in steps:
        for j, (x, y) in enumerate(step):
            context, parts = micro_batch(model, opt, step, j, style)
            with context:
                loss = F.cross_entropy(model(x), y)
                (loss / parts).backward()
            losses.append(loss.item())
        norm = norm_of(model)
        opt.step()
        opt.zero_grad()
        after()
    return [*losses, norm]


def find_rate(model: nn.Module, opt: Any, style: str, through_file: bool) -> list[float]:
    """Trains, raises the rate step by step, goes back to where it was, and trains on with another rate."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    steps = batches(14, 2)

    def raise_rate() -> None:
        for group in opt.param_groups:
            group["lr"] *= 3

    losses = train_steps(model, opt, steps[:2], style)
    saved = {"model": inner.state_dict(), "optimizer": opt.state_dict()}
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
    else:
        saved = copy.deepcopy(saved)
    for group in opt.param_groups:
        group["lr"] = 1e-4
    losses += train_steps(model, opt, steps[2:10], style, raise_rate)
    if through_file:
        saved = torch.load(file, weights_only=True)
    inner.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    losses.append(opt.param_groups[0]["lr"])
    for group in opt.param_groups:
        group["lr"] = 0.02
    return losses + train_steps(model, opt, steps[10:], style)


def rate_finders() -> None:
    for kind in KINDS:
        for through_file in (False, True):
            model = plain(RANK)
            opt = optimizer(kind, model)
            twin, twins = twin_of(kind, values(model))
            found = find_rate(model, opt, "micro_batch", through_file)
            assert found == pytest.approx(find_rate(twin, twins, "twin", through_file), rel=1e-5, abs=1e-6)
            assert_same(model, twin)
            torch.testing.assert_close(
                dict(opt.state_dict()["state"]), dict(twins.state_dict()["state"]), rtol=1e-5, atol=1e-6
            )
            assert_plausible(opt.stats, 14, found[-1])


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_rate_finder_goes_back_to_the_saved_state(workers: int) -> None:
    run_workers(workers, rate_finders)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=12),  # changes the momentum too
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, 6),
    "warm-up from 0": lambda opt: schedulers.SequentialLR(
        opt, [schedulers.LambdaLR(opt, lambda step: step / 4), schedulers.CosineAnnealingLR(opt, 8)], [4]
    ),
    "plateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=1),
}


def scheduled(kind: str, name: str, style: str) -> None:
    model = plain(RANK)
    opt = optimizer(kind, model)
    start = values(model)
    scheduler = SCHEDULERS[name](opt)
    steps: list[Step] = []
    targets: list[Tensor] = []
    inputs: list[Tensor] = []

    def advance(its: Any, count: int) -> None:
        its.step(1.0 + count / 10) if name == "plateau" else its.step()

    if style == "bare":
        steps = batches(10, 1)
        counts = iter(range(10))
        train_steps(model, opt, steps, style, lambda: advance(scheduler, next(counts)))
    elif style == "fit":

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            targets.append(target)
            return F.cross_entropy(output, target)

        hook = model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        kf.fit(
            model,
            dataset(),
            opt,
            batch_size=8,
            batch_micro=2,
            train_epochs=2,
            train_steps=10,
            loss_fn=loss_fn,
            scheduler=scheduler,
        )
        hook.remove()
        each = len(inputs) // 10
        pairs = list(zip(inputs, targets, strict=True))
        steps = [pairs[i : i + each] for i in range(0, len(pairs), each)]
    else:
        given = {"scheduler": scheduler} if style == "loader" else {}
        for step in kf.DataLoader(
            dataset(), model, opt, batch_size=8, batch_micro=2, train_epochs=2, train_steps=10, **given
        ):
            steps.append([])
            for x, y in step:
                steps[-1].append((x, y))
                F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if not given:
                advance(scheduler, len(steps) - 1)
    twin, twins = twin_of(kind, start)
    reference = SCHEDULERS[name](twins)
    counts = iter(range(10))
    *_, norm = train_steps(twin, twins, steps, "twin", lambda: advance(reference, next(counts)))
    assert len(steps) == 10
    assert_same(model, twin)
    assert opt.param_groups[0]["lr"] == twins.param_groups[0]["lr"]
    assert_plausible(opt.stats, 10, norm)


def scheduler_scripts() -> None:
    kinds = ("momentum", "adamw", "wrapped", "momentum")
    for kind, name in zip(kinds, SCHEDULERS, strict=True):
        for style in ("bare", "loader body", "loader", "fit"):
            if name != "plateau" or style in ("bare", "loader body"):
                scheduled(kind, name, style)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_torch_schedulers_give_the_same_rates(workers: int) -> None:
    run_workers(workers, scheduler_scripts)


# -- several trainings in a process ---------------------------------------------------------------------------------


def train(how: str, model: nn.Module, opt: Any, policy: kf.BasePolicy | None = None, epochs: int = 1) -> list[int]:
    """Returns each step's samples over all workers, as far as they were read."""
    sizes: list[int] = []

    class Counting(type(policy) if policy else kf.BasePolicy):  # type: ignore[misc]
        def decide(self, signals: kf.Signals) -> kf.Decision | None:
            sizes.append(signals.batch_size)
            return policy.decide(signals) if policy else None

        def after_epoch(self) -> None:
            if policy:
                policy.after_epoch()

    if how == "fit":
        kf.fit(model, dataset(), opt, kf.Hook(Counting()), batch_size=8, batch_micro=2, train_epochs=epochs)
        return sizes
    for step in kf.DataLoader(
        dataset(), model, opt, batch_size=8, batch_micro=2, train_epochs=epochs, policy=Counting()
    ):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    return sizes


class Asks(kf.BasePolicy):
    """Asks for something at the end of each epoch, so also when no step is left to announce it."""

    def __init__(self, ask: Callable[[], None] = lambda: None) -> None:
        self.ask = ask

    def after_epoch(self) -> None:
        self.ask()


class Grows(kf.BasePolicy):
    def decide(self, signals: kf.Signals) -> kf.Decision:
        return kf.Decision(batch_size=16, lr_scale=0.5)


def folds() -> None:
    verbs: list[Callable[[], None]] = [
        lambda: kf.set_batch_size(16),
        lambda: kf.set_lr(1e-5),
        lambda: kf.set_sync("local:2"),
        lambda: kf.set_topology("tree"),
    ]
    for kind, how in zip(KINDS, ("fit", "loader", "fit"), strict=True):
        model = network(0)
        opt = optimizer(kind, model)
        sizes = train(how, model, opt, epochs=2)
        expected, norm = values(model), opt.stats.grad_norm
        alive = []
        for policy in [*map(Asks, verbs), Grows()]:
            earlier = network(5)
            alive.append((earlier, optimizer(kind, earlier)))
            train("loader" if how == "fit" else "fit", *alive[-1], policy=policy, epochs=2)
            model = network(RANK)  # all start from rank 0's
            opt = optimizer(kind, model)
            assert opt.stats is None and opt.param_groups[0]["lr"] in (0.01, 0.1)
            assert train(how, model, opt, epochs=2) == sizes == [8] * 12
            assert_near(values(model), expected)
            assert opt.stats.grad_norm == pytest.approx(norm, rel=1e-4) and opt.lr_factor == 1.0


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A worker that was slow gets fewer micro-batches, so that sums are rounded otherwise."""
    if SIZE == 1:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_nothing_leaks_from_one_training_into_the_next(workers: int) -> None:
    run_workers(workers, folds)


def turns() -> None:
    """Two loaders, a step of each by turns; and bare loops by turns, against plain torch."""
    expected, models = [], []
    for seed, kind in ((1, "adamw"), (2, "momentum")):
        model = network(seed)
        train("loader", model, optimizer(kind, model))
        expected.append(values(model))
        model = network(seed)
        models.append((model, optimizer(kind, model)))
    loaders = [kf.DataLoader(dataset(), model, opt, batch_size=8, batch_micro=2) for model, opt in models]
    for both in zip(*loaders, strict=True):
        for step, (model, opt) in zip(both, models, strict=True):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    for (model, _), values_alone in zip(models, expected, strict=True):
        assert_near(values(model), values_alone)

    ours = [(model := plain(seed + RANK), optimizer("adamw", model)) for seed in (1, 2)]
    twins = [twin_of("adamw", values(model)) for model, _ in ours]
    for step in batches(6, 1):
        for (model, opt), (twin, twins_opt) in zip(ours, twins, strict=True):
            train_steps(model, opt, [step], "bare")
            train_steps(twin, twins_opt, [step], "twin")
    for (model, opt), (twin, _) in zip(ours, twins, strict=True):
        assert_same(model, twin)
        assert_plausible(opt.stats, 6)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_two_models_are_trained_by_turns(workers: int) -> None:
    run_workers(workers, turns)


@pytest.mark.parametrize("how", ["fit", "loader"])
def test_clip_norm_holds_for_one_training(how: str) -> None:
    model = network(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1, clip_norm=3.0)
    if how == "fit":
        kf.fit(model, dataset(), opt, train_clip_norm=1e-9)
    else:
        for step in kf.DataLoader(dataset(), model, opt, train_clip_norm=1e-9):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
    torch.testing.assert_close(model[0].weight, network(0)[0].weight)  # type: ignore[union-attr]
    assert opt.clip_norm == 3.0
    for step in kf.DataLoader(dataset(), model, opt, train_steps=1):
        opt.set_clip_norm(2.0)  # the user's own, which stays
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    assert opt.clip_norm == 2.0
    with pytest.raises(ValueError, match=r"train_clip_norm=-1\.0: "):
        kf.DataLoader(dataset(), model, opt, train_clip_norm=-1.0)


def test_a_frozen_batch_norm_stays_frozen_in_fit() -> None:
    """Through evaluations too. A model that is in eval mode as a whole is put into training mode."""
    model = network(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    model[1].eval()  # type: ignore[operator]
    kf.fit(model, dataset(), opt, heldout=dataset(), train_epochs=2)
    assert model.training and not model[1].training  # type: ignore[union-attr]
    assert model[1].num_batches_tracked == 0  # type: ignore[union-attr]
    model.eval()
    kf.fit(model, dataset(), opt)
    assert model.training and model[1].num_batches_tracked > 0  # type: ignore[union-attr, operator]


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

        kf.fit(model, dataset(), opt, batch_size=8, batch_micro=2, loss_fn=loss_fn)
    for count, step in enumerate(kf.DataLoader(dataset(), model, opt, batch_size=8, batch_micro=2)):
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


def cells() -> None:
    model = network(0)
    train("loader", model, optimizer("adamw", model))
    expected = values(model)
    ways = ("fit, Ctrl-C", "fit, error", "in a micro-batch", "before opt.step", "after opt.step", "break")
    for again in ("fit", "loader"):
        for how in ways:
            for keeps in ("nothing", "model", "model and optimizer"):
                model = network(0)
                opt = optimizer("adamw", model)
                start, state = values(model), copy.deepcopy(opt.state_dict())
                with contextlib.suppress(KeyboardInterrupt, Interrupted):
                    interrupt(how, model, opt)
                if keeps == "nothing":
                    model = network(0)
                model.load_state_dict(start)
                if keeps == "model and optimizer":
                    opt.load_state_dict(state)
                else:
                    opt = optimizer("adamw", model)
                torch.manual_seed(3)
                drawn = torch.rand(2)
                torch.manual_seed(3)
                train(again, model, opt)
                assert torch.equal(torch.rand(2), drawn)
                assert_near(values(model), expected)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_cell_that_was_interrupted_can_be_run_again(workers: int) -> None:
    run_workers(workers, cells)


def test_ctrl_c_as_a_training_begins_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model, twin = plain(0), plain(0)
    opt, own = (kf.FusedSGD(each.parameters(), lr=0.1, clip_norm=2.0) for each in (model, twin))
    hook, calls = GradientHooks._hook, itertools.count()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GradientHooks, "_hook", lambda *at: hook(*at) if next(calls) < 2 else interrupted())
        kf.fit(model, dataset(), opt, train_clip_norm=0.5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(opt.statistics, "begin_run", interrupted)
        kf.fit(model, dataset(), opt, train_clip_norm=0.5)
    assert opt.clip_norm == 2.0
    kf.fit(model, dataset(), opt)
    kf.fit(twin, dataset(), own)
    assert_same(model, twin)


def test_a_step_that_was_lost_as_its_body_left_the_loop_is_not_the_next_trainings() -> None:
    model = plain(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    opt.reducer.loop_handles_lost_workers = True
    assert opt.reducer.leave_to_loop(kf.CommError("a worker was lost"))
    opt.reducer.loop_handles_lost_workers = False
    summary = kf.fit(model, dataset(), opt, train_steps=3)
    assert summary is not None and summary["steps"] == 3


def test_an_interrupted_bare_loop_says_what_to_do_or_begins_with_zero_grad() -> None:
    model = plain(0)
    opt = kf.FusedAdamW(model.parameters())
    x, y = dataset()
    F.cross_entropy(model(x), y).backward()  # here it was interrupted
    with pytest.raises(RuntimeError, match=r"another backward before opt.step\(\).*opt.zero_grad\(\)"):
        F.cross_entropy(model(x), y).backward()
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    F.cross_entropy(model(x), y).backward()  # as of a GAN's generator through its discriminator
    with pytest.raises(RuntimeError, match=r"gradients are still there: call opt.zero_grad\(\)"):
        opt.step()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_drops_the_micro_batches_of_a_step_that_was_left(kind: str) -> None:
    x, y = dataset()
    models = [plain(0), plain(0)]
    for model, left in zip(models, (False, True), strict=True):
        opt = optimizer(kind, model)
        if left:
            with opt.micro_batch(samples=4, last=False):
                F.cross_entropy(model(x[:4]), y[:4]).backward()  # after it the cell was interrupted
        opt.zero_grad()
        for j in (1, 2):
            with opt.micro_batch(samples=8, last=j == 2):
                F.cross_entropy(model(x[8 * j :][:8]), y[8 * j :][:8]).backward()
        opt.step()
        assert opt.stats.samples == 16 and opt.stats.micro_batches == 2
    assert_same(*models)


def test_a_loader_is_gone_through_once() -> None:
    """The pattern `for epoch in ...: for step in loader:` would else train one epoch only, and say nothing."""
    model = plain(0)
    opt = kf.FusedAdamW(model.parameters())
    loader = kf.DataLoader(dataset(), model, opt)
    with pytest.raises(RuntimeError, match="For several epochs pass train_epochs= and iterate once"):
        for _ in range(2):
            for step in loader:
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()


def test_a_body_without_a_step_is_an_error_and_one_that_leaves_before_it_has_made_none() -> None:
    """The gradients are reduced by then, so that the engine has counted a step."""
    model = plain(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for step in kf.DataLoader(dataset(), model, opt, scheduler=scheduler):
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        break
    assert scheduler.last_epoch == 0 and opt.engine.reduced is None
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"must call opt\.step"):
        for step in kf.DataLoader(dataset(), model, opt, scheduler=scheduler):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            model.zero_grad()


def test_a_body_that_leaves_out_micro_batches_is_an_error() -> None:
    """The backward of `next(iter(step))` comes after its micro-batch: alone it would count as the whole step."""
    model = plain(0)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="step 0: the loop over its 4 micro-batches ended early"):
        for step in kf.DataLoader(dataset(), model, opt, batch_size=16):
            x, y = next(iter(step))
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()


def test_a_micro_batch_without_a_backward_counts_as_zero_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, reference = plain(0), plain(0)
    opt, plain_opt = kf.FusedSGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in kf.DataLoader(dataset(), model, opt, batch_size=16, batch_micro=4):
        for j, (x, y) in enumerate(step):
            if j == 2:
                continue
            F.cross_entropy(model(x), y).backward()
            (F.cross_entropy(reference(x), y) / 4).backward()
        for optimizer_ in (opt, plain_opt):
            optimizer_.step()
            optimizer_.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert caplog.text.count("a micro-batch ended without a backward") == 1


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
    for count, step in enumerate(kf.DataLoader(dataset(), model, opt, batch_size=8, batch_micro=8, train_epochs=2)):
        if count == 6:
            model[0].requires_grad_(True)  # type: ignore[operator]
            opt.rebuild()
        for x, y in step:
            F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
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
        train_steps(model, opt, [[dataset()]], "bare")
    assert_same(*models)
    with pytest.raises(ValueError, match="another program's state: its optimizer has 4 parameters, not 2"):
        Trainable(kf.FusedAdamW(nn.Linear(2, 2).parameters())).load_state_dict(old.state_dict())


def test_rebuilding_within_a_step_is_refused() -> None:
    model = plain(0)
    opt = kf.FusedAdamW(model.parameters())
    x, y = dataset()
    with opt.micro_batch(samples=4, last=False):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"not between backward and opt\.step\(\)"):
        opt.rebuild()
