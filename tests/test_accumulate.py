"""Gradient accumulation in a loop of one's own: `opt.accumulate`, `opt.micro_batch`, and several backwards in one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import assert_close, network, problem, update
from torch import Tensor, nn

import kfuse as kf
from kfuse.statistics.noise_scale import moments

ACC, BATCH, STEPS = 4, 4, 3


def share(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches."""
    x, y = problem(ACC * BATCH * STEPS * size)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))[rank::size]


def expected_moments(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[float | None, float | None]:
    """S and G2 of one step over these micro-batches, in units of micro-batches, in float64."""
    model = copy.deepcopy(model).double()
    grads = []
    for x, y in batches:
        parts = torch.autograd.grad(F.cross_entropy(model(x.double()), y), list(model.parameters()))
        grads.append(torch.cat([part.flatten() for part in parts]))
    mean = torch.stack(grads).mean(0)
    return moments(sum(float(g @ g) for g in grads), float(mean @ mean), len(grads), len(grads))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
@on_workers()
def test_accumulate_is_torchs_and_the_division_is_undone_in_the_statistics(workers: int) -> None:
    """kfuse's statistics and parameters, and those of one torch optimizer over all workers' batches."""
    ours, theirs = network(), network()
    opt, plain = kf.Optimizer(torch.optim.SGD(ours.parameters(), lr=0.5)), torch.optim.SGD(theirs.parameters(), lr=0.5)
    opt.accumulate(ACC)
    shares = [share(rank, kf.size()) for rank in range(kf.size())]
    for step in range(0, ACC * STEPS, ACC):
        for x, y in shares[kf.rank()][step : step + ACC]:
            (F.cross_entropy(ours(x), y) / ACC).backward()
        for x, y in [batch for each in shares for batch in each[step : step + ACC]]:
            (F.cross_entropy(theirs(x), y) / (ACC * kf.size())).backward()
        update(opt, plain)
        s = opt.stats
        assert (s.unit, s.micro_batches, s.samples) == ("micro-batches", workers * ACC, workers * ACC)
        if step == 0:
            first = [batch for each in shares for batch in each[:ACC]]
            assert (s.grad_variance, s.grad_sq) == pytest.approx(expected_moments(network(), first), rel=1e-3)
    assert_close(ours, theirs)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    model = network()
    x, y = problem(BATCH)

    def backward() -> None:
        F.cross_entropy(model(x), y).backward()

    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"opt\.accumulate\(.*\): must be a whole number, at least 1"):
            opt.accumulate(wrong)
    opt.accumulate(3)
    backward()
    backward()
    for act, message in (
        (opt.step, r"opt\.accumulate\(3\): opt\.step\(\) after 2 of 3 backwards"),
        (lambda: opt.accumulate(2), r"opt\.accumulate\(2\): call it between steps"),
        (opt.rebuild, "between steps"),
    ):
        with pytest.raises(RuntimeError, match=message):
            act()
    backward()
    with pytest.raises(RuntimeError, match=r"opt\.accumulate\(3\): another backward after the 3 of a step"):
        backward()
    for dropped in (2, 3):
        opt.zero_grad()  # drops all of it
        for _ in range(dropped):
            backward()
    update(opt)
    for begin in (lambda: opt.micro_batch(samples=4), lambda: kf.fit(model, (x, y), opt)):
        with pytest.raises(RuntimeError, match=r"opt\.accumulate\(3\) is for bare backwards"):
            begin()
    opt.accumulate(1)
    kf.fit(model, (x, y), opt)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(x), y), model(-x).square().mean()


def trained(apart: bool) -> tuple[list[Any], list[Tensor]]:
    """Two losses in kf.DataLoader: each with a backward of its own, or added up."""
    model = network()
    opt = kf.FusedSGD(model.parameters(), lr=0.5)
    figures = []
    loop = kf.DataLoader(model, problem(), opt, batch_size=32, micro_batch=6, epochs=2, several_backwards=apart)
    for step in loop:
        for x, y in step:
            first, second = losses(model, x, y)
            for loss in (first, second) if apart else (first + second,):
                loss.backward()
        opt.step()
        stats = opt.stats
        assert stats is not None
        figures.append((stats.grad_variance, stats.grad_sq))
        opt.zero_grad()
    return figures, [p.detach() for p in model.parameters()]


def test_several_backwards_are_the_sum_of_their_losses_on_one_worker_and_two() -> None:
    expected, params = trained(False)
    for figures, found in (trained(True), *run_workers(2, trained, True)):
        torch.testing.assert_close(found, params, rtol=1e-5, atol=1e-6)
        for pair, other in zip(figures, expected, strict=True):
            assert pair == pytest.approx(other, rel=1e-3)


def test_an_aborted_micro_batch_of_several_backwards_leaves_no_gradient() -> None:
    model, twin = network(), network()
    x, y = problem(8)
    opt, plain = kf.FusedSGD(model.parameters(), lr=0.5), torch.optim.SGD(twin.parameters(), lr=0.5)
    with pytest.raises(RuntimeError, match=r"received a second gradient: .*several_backwards=True"):  # noqa: SIM117
        with opt.micro_batch(samples=8):
            for loss in losses(model, x, y):
                loss.backward()
    with pytest.raises(KeyError):  # noqa: SIM117
        with opt.micro_batch(samples=8, several_backwards=True):
            losses(model, x, y)[0].backward()
            raise KeyError
    assert all(p.grad is None for p in model.parameters())
    for found in (model, twin):
        context = opt.micro_batch(samples=8, several_backwards=True) if found is model else torch.enable_grad()
        with context:  # type: ignore[attr-defined]
            for loss in losses(found, x, y):
                loss.backward()
    opt.step()
    plain.step()
    torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=1e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="the last step's gradients are still there"):  # noqa: SIM117
        with opt.micro_batch(samples=8, several_backwards=True):
            losses(model, x, y)[0].backward()
