"""Gradients that no backward of the loss produced are reduced too: set by hand, or of a second point as in SAM."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import on_workers, run_workers
from problems import OPTIMIZERS, Net, relative, samples
from torch import Tensor, nn

import kfuse as kf


def used(net: Net) -> list[nn.Parameter]:
    return [p for layer in (net.first, net.middle, net.last) for p in layer.parameters()]


def set_gradients(loss: Tensor, params: list[nn.Parameter]) -> None:
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = grad


def by_hand(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    set_gradients(F.mse_loss(net(x, False), y), used(net))


def in_a_context(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """Two micro-batches a worker, of unequal sizes."""
    for part, last in ((slice(0, 3), False), (slice(3, 8), True)):
        with opt.micro_batch(samples=part.stop - part.start, last=last):
            by_hand(net, opt, x[part], y[part])


def half_and_half(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """One layer's gradient set by hand, then a backward through the rest."""
    set_gradients(F.mse_loss(net(x, False), y), [*net.first.parameters()])
    hidden = torch.tanh(net.first(x)).detach()
    F.mse_loss(net.last(torch.tanh(net.middle(hidden))), y).backward()


def sharpness_aware(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    F.mse_loss(net(x, False), y).backward()
    norm = torch.stack([p.grad.norm() for p in used(net) if p.grad is not None]).norm()
    olds = [p.detach().clone() for p in used(net)]
    with torch.no_grad():
        for p in used(net):
            assert p.grad is not None
            p.add_(p.grad * (0.05 / norm))
    opt.zero_grad()
    F.mse_loss(net(x, False), y).backward()
    for p, old in zip(used(net), olds, strict=True):
        p.data = old


def zeroed(net: Net, opt: Any, x: Tensor, y: Tensor) -> None:
    """A layer that was used once stays in use with zero gradients: its momentum and weight decay go on."""
    opt.zero_grad(set_to_none=False)
    loss = F.mse_loss(net(x, False), y)
    if torch.equal(net.never.weight, Net().never.weight):
        loss = loss + net.never(torch.ones(3)).square().mean()
    loss.backward()


LOOPS = [
    (zeroed, zeroed),
    (by_hand, by_hand),
    (in_a_context, by_hand),
    (half_and_half, by_hand),
    (sharpness_aware,) * 2,
]
"""How each fills the gradients, and the same for one torch optimizer."""


@on_workers(2)
def test_gradients_set_by_hand_are_reduced_and_applied() -> None:
    """The largest relative difference to one torch optimizer over all workers' samples."""
    group = kf.init().group
    for optimizer, (fused, plain) in OPTIMIZERS.items():
        for fill, fill_alone in LOOPS:
            ours, theirs = Net(), Net()
            opt, reference = fused(ours.parameters()), plain(theirs.parameters())
            for step in range(5):
                x, y = samples(8 * group.size, seed=step)
                fill(ours, opt, x.split(8)[group.rank], y.split(8)[group.rank])
                fill_alone(theirs, reference, x, y)
                for each in (opt, reference):
                    each.step()
                    if fill is not zeroed:
                        each.zero_grad()
            assert relative(ours.parameters(), theirs.parameters()) <= 1e-5, f"{optimizer}, {fill.__name__}"
            assert relative(theirs.first.parameters(), Net().first.parameters()) > 1e-3
            assert opt.stats is not None
            assert opt.stats.micro_batches == group.size * (2 if fill is in_a_context else 1)


@pytest.mark.parametrize("how", ["loader", "context", "bare"])
@on_workers(2)
def test_gradients_set_by_hand_after_the_reduction_are_refused(how: str) -> None:
    """Each worker's own gradients, set when nothing can reduce them any more; zeros in place of None are no such."""
    session = kf.init()
    net = Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    x, y = samples(16, seed=session.group.rank)
    if how == "loader":
        for step in kf.DataLoader(net, (x, y), opt, batch_size=16, epochs=1):
            grads = [torch.autograd.grad(F.mse_loss(net(a, False), b), used(net)) for a, b in step]
            for p, each in zip(used(net), grads[0], strict=True):
                p.grad = each
            with pytest.raises(RuntimeError, match=r"the gradient of parameter . was set by hand .* after the step's"):
                opt.step()
            break
        return
    with opt.micro_batch(samples=16) if how == "context" else contextlib.nullcontext():
        F.mse_loss(net(x, False), y).backward()
    assert net.never.bias.grad is None
    net.never.bias.grad = torch.zeros(3)
    opt.step()
    opt.zero_grad()
    with opt.micro_batch(samples=16) if how == "context" else contextlib.nullcontext():
        F.mse_loss(net(x, False), y).backward()
    net.never.bias.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 8 was set by hand"):
        opt.step()


def test_a_gradient_set_in_a_micro_batch_after_its_backward_is_refused() -> None:
    net = Net()
    opt = kf.FusedSGD(net.parameters(), lr=0.1)
    x, y = samples(8, seed=0)
    with pytest.raises(RuntimeError, match=r"parameter 0 was set by hand in a micro-batch after its backward"):  # noqa: SIM117
        with opt.micro_batch(samples=8):
            F.mse_loss(net(x), y).backward()
            net.first.weight.grad = torch.zeros(40, 5)


@pytest.mark.parametrize("contexts", [False, True])
def test_hooks_that_are_registered_later_see_the_gradient(contexts: bool) -> None:
    """One halves a gradient, one drops it, and one is removed again: beside torch's own optimizer."""

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def drop(p: Tensor) -> None:
        p.grad = None

    nets = Net(), Net()
    opts = kf.FusedSGD(nets[0].parameters(), lr=0.1), torch.optim.SGD(nets[1].parameters(), lr=0.1)
    for net in nets:
        net.first.weight.register_post_accumulate_grad_hook(halve)
        net.middle.weight.register_post_accumulate_grad_hook(drop)
    removed = [net.last.weight.register_post_accumulate_grad_hook(drop) for net in nets]
    for step in range(3):
        x, y = samples(8, seed=step)
        for net, opt in zip(nets, opts, strict=True):
            with opt.micro_batch(samples=8) if contexts and opt is opts[0] else contextlib.nullcontext():
                F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
        if step == 0:
            for handle in removed:
                handle.remove()
    assert relative(nets[0].parameters(), nets[1].parameters()) < 1e-6
    assert torch.equal(nets[0].middle.weight, Net().middle.weight)


def test_gradients_that_share_their_memory_are_each_packed_as_they_are() -> None:
    """Autograd gives both views the sum's own gradient; each parameter group has a bucket of its own."""
    first, second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    opt = kf.FusedSGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    slope, kept = torch.arange(6.0), torch.ones(2, 3)
    for j in range(2):
        with opt.micro_batch(samples=4, last=j == 1):
            ((first.view(-1) + second.view(-1)) * slope).sum().backward()
    opt.step()
    opt.zero_grad()
    assert torch.equal(first.view(-1), -slope)
    assert torch.equal(second.view(-1), -slope)
    with opt.micro_batch(samples=4):
        first.grad = kept
    opt.step()
    assert torch.equal(kept, torch.ones(2, 3))
    assert torch.equal(first.view(-1), -slope - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_data_of_a_gradient_that_was_replaced_is_refused(dtype: torch.dtype) -> None:
    """`p.grad.data = tensor`: other memory, or the same with other strides. The next step's gradients are right."""
    p = nn.Parameter(torch.ones(3, 3, dtype=dtype))
    opt = kf.FusedSGD([p], lr=0.5)
    for replaced in (lambda grad: torch.ones(3, 3, dtype=dtype), lambda grad: grad.data.t()):
        p.square().sum().backward()
        assert p.grad is not None and torch.equal(p.grad, torch.full_like(p, 2.0))
        p.grad.data = replaced(p.grad)
        with pytest.raises(RuntimeError, match=r"^p\.grad\.data = \.\.\. after backward: set p\.grad = "):
            opt.step()
        assert torch.equal(p, torch.ones_like(p))
        opt.zero_grad()
    p.square().sum().backward()
    assert p.grad is not None
    p.grad.data = p.grad.data  # as nn.Module.to does
    opt.step()
    assert torch.equal(p, torch.zeros_like(p))


def test_a_parameter_of_another_shape_is_refused() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    opt = kf.FusedSGD([p], lr=0.1)
    p.square().sum().backward()
    opt.zero_grad()
    p.data = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"^parameter 0 was torch.float32 \[2, 3\] and is torch.float32 \[1\] now"):
        p.square().sum().backward()


def scaled_by_hand() -> str:
    kf.init()
    net = Net()
    opt = kf.FusedSGD(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for p in used(net):
        p.grad = torch.ones_like(p)
    scaler.scale(torch.zeros(()))
    try:
        scaler.step(opt)
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_set_by_hand_under_a_grad_scaler_are_refused_on_several_workers() -> None:
    for message in run_workers(2, scaled_by_hand):
        assert "must come from backward" in message
    assert scaled_by_hand() == "", "one worker has nobody to disagree with"
