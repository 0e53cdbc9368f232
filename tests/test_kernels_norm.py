"""`kf.nn`'s layers and their kernels agree with float64, and example by example with torch.func.

`test_kernels_interpreter.py` runs this file a second time with the Triton code in its interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES, INTERPRETED
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import kfuse as kf
from kfuse.kernels import normalisation
from kfuse.kernels.normalisation import norm_backward, norm_forward

TOKENS = 70  # more than one program sums up
if INTERPRETED:  # slow: the same loops over smaller pieces
    from kfuse.kernels import triton_normalisation

    TOKENS, triton_normalisation.ROWS, triton_normalisation.PARTS = 11, 4, 2

pytestmark = pytest.mark.parametrize("device", DEVICES)

LAYERS: dict[str, tuple[Any, Any]] = {
    "layer": (kf.nn.LayerNorm, nn.LayerNorm),
    "rms": (kf.nn.RMSNorm, nn.RMSNorm),
    "layer without bias": (lambda *a, **k: kf.nn.LayerNorm(*a, bias=False, **k), None),
}


def random(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def made(kind: str, shape: tuple[int, ...], device: str) -> Any:
    """A layer whose parameters are not the identity's."""
    layer = LAYERS[kind][0](shape).to(device)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*shape, seed=50 + seed, device=device))
    return layer


def oracle(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """torch's own in float64: the output, then gradients of the input and of each parameter."""
    x64 = x.double().detach().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in layer.parameters()]
    if isinstance(layer, nn.LayerNorm):
        y = F.layer_norm(x64, layer.normalized_shape, *parameters, eps=layer.eps)
    else:
        y = F.rms_norm(x64, layer.normalized_shape, *parameters, eps=torch.finfo(torch.float32).eps)
    y.backward(dy.double())
    return [y.detach(), *(t.grad for t in (x64, *parameters) if t.grad is not None)]


def per_example(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    """Squared norms by vmap over grad, in float64."""
    twin = nn.LayerNorm if isinstance(layer, nn.LayerNorm) else nn.RMSNorm
    options = {"bias": layer.bias is not None} if twin is nn.LayerNorm else {}
    plain = twin(layer.normalized_shape, eps=layer.eps or torch.finfo(torch.float32).eps, **options).to(x.device)
    plain.double()
    parameters = {name: p.detach().double() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, dy: Tensor) -> Tensor:
        return (functional_call(plain, parameters, (x[None],))[0] * dy).sum()

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x.double(), dy.double())
    return torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0)


def check(kind: str, shape: tuple[int, ...], width: tuple[int, ...], device: str) -> None:
    layer = made(kind, width, device)
    x = (2.0 * random(*shape, *width, seed=1, device=device) + 0.5).requires_grad_()
    dy = random(*shape, *width, seed=2, device=device)
    y = layer(x)
    y.backward(dy)
    actual = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    for ours, exact in zip(actual, oracle(layer, x, dy), strict=True):
        # Of a short row's input gradient most terms cancel: what is left is as exact as they were, and they are near 1.
        torch.testing.assert_close(ours.double(), exact, rtol=0.0, atol=5e-6 * max(1.0, float(exact.abs().max())))
    squares = per_example(layer, x, dy)
    torch.testing.assert_close(layer.per_example_sq_norm.double(), squares, rtol=1e-5, atol=1e-12)
    total = sum(p.grad.double().square().sum() for p in layer.parameters())
    torch.testing.assert_close(layer.sq_norm.double(), total, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_and_per_example_norms(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, width in (((2, TOKENS), (48,)), ((4,), (33,)), ((2, 3, 2), (5,)), ((2, 2), (3, 8)), ((1, 3), (130,))):
        check(kind, shape, width, device)
    monkeypatch.setattr(normalisation, "LONG_EXAMPLE", 1)  # one by one, as long ones on the CPU
    check(kind, (3, 7), (12,), device)


def test_the_same_bits_on_repeat_and_strided_input(device: str) -> None:
    layer = made("layer", (40,), device)
    x, dy = (random(2, TOKENS, 40, seed=s, device=device) for s in (1, 2))
    found = []
    for given_x in (x, x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        layer.zero_grad()
        layer(given_x).backward(dy)
        found.append([layer.per_example_sq_norm.clone(), *(p.grad.clone() for p in layer.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_sixteen_bits(device: str, kind: str) -> None:
    layer = made(kind, (64,), device)
    x, dy = (random(2, 5, 64, seed=s, device=device).bfloat16() for s in (1, 2))
    x.requires_grad_()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    layer.eps = layer.eps or torch.finfo(torch.bfloat16).eps  # what RMSNorm takes for this dtype
    expected = per_example(layer, x.detach(), dy)
    torch.testing.assert_close(layer.per_example_sq_norm.double(), expected, rtol=1e-5, atol=0.0)


def test_empty_and_errors(device: str) -> None:
    layer = made("layer", (8,), device)
    empty = torch.zeros(0, 3, 8, device=device, requires_grad=True)
    layer(empty).sum().backward()
    assert layer.per_example_sq_norm.shape == (0,) and not layer.weight.grad.any()
    with pytest.raises(ValueError, match=r"LayerNorm: the input must be \[examples, ..., 8\], got \[8\]"):
        layer(torch.zeros(8, device=device))
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match="norm: weight must be contiguous"):
        norm_forward(x, weight[:7], None, eps=1e-5, centred=True)
    with pytest.raises(ValueError, match="norm: x must be contiguous"):
        norm_backward(x[None].mT, x[None].mT, weight, None, weight[:2], with_bias=False)
