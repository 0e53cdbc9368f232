"""Steps of every kind that autograd can make, whose results are known: for gpu_check.py, and for gpu_ranks.py.

Gradients and parameters are multiples of 1/16 that fp32, and gradients that bf16 holds exactly, in whatever order they
are added. Each of two workers has another gradient, whose mean is that of one worker alone.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import kfuse as kf

KINDS = ("one backward", "another order", "a parameter unused", "a second stream", "a second backward", "a graph twice")
KINDS += ("two optimizers",)
NUMELS, STEPS, LR = (5000, 70_000, 33, 4096, 20_000, 1), 6, 0.125
BUCKET_MB = 0.1
"""Of the session that `check` runs in: two buckets with several parameters, and one that a parameter fills."""


def check(kind: str, device: torch.device) -> str | None:
    """What is wrong with the parameters and statistics of a few steps of this kind, in the session that is there."""
    params = [nn.Parameter(torch.full((numel,), float(k), device=device)) for k, numel in enumerate(NUMELS)]
    backwards = 2 if kind in ("a second backward", "a graph twice") else 1
    parts = [params[::2], params[1::2]] if kind == "two optimizers" else [params]
    opts = [kf.FusedSGD(part, lr=LR) for part in parts]
    aside = torch.cuda.Stream() if kind == "a second stream" and device.type == "cuda" else None  # type: ignore[no-untyped-call]
    share = (0.0, 0.0) if kf.size() == 1 else (0.5, -0.5)
    expected = list(map(float, range(len(params))))
    for opt in opts:
        opt.accumulate(backwards)
    for step in range(STEPS):
        order = [(k + (step // 2 if kind == "another order" else 0)) % len(params) for k in range(len(params))]
        if kind == "a parameter unused" and step in (2, 3):
            order.remove(2)
        for number in range(backwards):
            if number == 0 or kind == "a second backward":
                loss = _loss(params, order, step, aside) * (1 + share[kf.rank()]) / backwards
            loss.backward(retain_graph=number + 1 < backwards)  # type: ignore[no-untyped-call]
        for opt in opts:
            opt.step()
            opt.zero_grad()
        for k in order:
            expected[k] -= LR * (1 + k + step)
    for k, (param, value) in enumerate(zip(params, expected, strict=True)):
        if not bool((param == value).all()):
            return f"{kind}: parameter {k} is {param.min().item()} to {param.max().item()}, and should be {value}"
    stats, norm = opts[0].stats, math.sqrt(sum(NUMELS[k] * (k + STEPS) ** 2 for k in range(0, len(NUMELS), len(parts))))
    assert stats is not None
    found, right = [stats.grad_norm], [norm]
    if kf.size() == 2 and backwards == 1:
        found, right = [*found, stats.grad_variance], [norm, norm**2 / 2]
    wrong = [(a, b) for a, b in zip(found, right, strict=True) if a is None or abs(a - b) > 1e-5 * b]
    return f"{kind}: |gbar| and S, and what they should be: {wrong}" if wrong else None


def _loss(params: list[nn.Parameter], order: list[int], step: int, aside: torch.cuda.Stream | None) -> Tensor:
    """The k-th parameter's gradient is 1 + k + step. aside: the stream of every other one's part."""
    here, terms = torch.cuda.current_stream() if aside else None, []
    if aside is not None:
        aside.wait_stream(here)
    for k in order:
        with torch.cuda.stream(aside) if aside and k % 2 else nullcontext():
            terms.append((params[k] * (1.0 + k + step)).sum())
    if here is not None:
        here.wait_stream(aside)
    return torch.stack(terms).sum()
