"""The gradient noise scale in the dual norms of sign descent and of Muon: estimates, and what they are compared with.

    python benchmarks/geometry_norms.py

An optimizer that moves by lmo(g) (sign(g): sign descent, close to Adam; U V' of each matrix: Muon) has a dual norm with
|g|_* = <g, lmo(g)>: the l1 norm; the sum of the matrices' nuclear norms. With g_n the mean gradient of n samples,

    Q(n) = E |g_n|_*^2 ~ a + c / n,    c = (Q(b) - Q(B)) / (1 / b - 1 / B),    a = Q(B) - c / B

for contributions of b samples and their mean of B. For Gaussian noise (Stein's lemma) a step gains E <G, lmo(g_n)> =
a / sqrt(a + c / n) where the norm varies little: c / a is the noise scale of steps near n. In the Euclidean norm c is S
and a is G2. Naganuma et al. (arXiv 2602.03001) derive noise scales from the dual norms: here (E |noise|_* / |G|_*)^2,
for signs with standard deviations, (sum_i sigma_i / |G|_1)^2. `plug-in` is that with |gbar|_1 for |G|_1.

Columns: c / a; the noise scale that the true gains at b = 4 and B = 32 have; the dual norms' with the true G; the
plug-in; predicted over true gain at b and at B; the largest difference of c and a from other draws' (of Euclidean ones
also from the exact values), in standard errors. The exit status is 1 if that is above 5.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from machine import parser_of, write
from noise_quality import SampleGradients
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from kfuse.data import load_digits
from kfuse.data.builtin import load_text
from kfuse.models import GPT

Norm = Callable[[Tensor], Tensor]
"""Of flat gradients [..., P]: [...]."""
Place = tuple[int, torch.Size, float]
"""Of a matrix in the flat gradient: its offset, its shape, and its weight in the norm."""


def matrices(model: nn.Module) -> list[Place]:
    """Those that Muon updates, with torch.optim.Muon's factors as weights; the rest is AdamW's."""
    found, start = [], 0
    for name, p in model.named_parameters():
        if name.startswith("blocks") and p.ndim == 2:
            found.append((start, p.shape, math.sqrt(max(1, p.shape[0] / p.shape[1]))))
        start += p.numel()
    return found


def l1(g: Tensor) -> Tensor:
    return g.abs().sum(-1)


def l2(g: Tensor) -> Tensor:
    return g.norm(dim=-1)


def nuclear(g: Tensor, places: Sequence[Place]) -> Tensor:
    """Sum over the matrices of weight * nuclear norm, of flat gradients [..., P]: [...], float64."""
    found = []
    for start, shape, weight in places:
        x = g[..., start : start + shape.numel()].unflatten(-1, shape).double()
        gram = x @ x.mT if shape[0] < shape[1] else x.mT @ x
        found.append(weight * torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum(-1))
    return torch.stack(found).sum(0)


def moments(norm: Norm, parts: Tensor, size: int) -> tuple[float, float]:
    """(c, a) from contributions [M, P] of so many samples each."""
    each, whole, samples = float(norm(parts).square().mean()), float(norm(parts.mean(0)).square()), size * len(parts)
    c = (each - whole) / (1 / size - 1 / samples)
    return c, whole - c / samples


def plug_in(parts: Tensor, size: int) -> tuple[float, float]:
    return float((size * parts.var(0)).sqrt().sum()) ** 2, float(l1(parts.mean(0))) ** 2


def singular(g: Tensor, places: Sequence[Place]) -> tuple[Tensor, Tensor]:
    """`nuclear` of one gradient, and Muon's direction, by singular values."""
    norm, direction = torch.zeros((), dtype=g.dtype), torch.zeros_like(g)
    for start, shape, weight in places:
        u, s, v = torch.linalg.svd(g[start : start + shape.numel()].view(shape), full_matrices=False)
        norm += weight * s.sum()
        direction[start : start + shape.numel()] = weight * ((u * (s > 1e-10 * s[0])) @ v).flatten()
    return norm, direction


def check(
    name: str, draw: Callable[[int], Tensor], mean: Tensor, sigma: Tensor, places: Sequence[Place], draws: int
) -> list[list[str]]:
    """Rows of the table: estimates from 8 contributions of 4 samples, and what other draws yield by definition.

    draw: gradients of so many samples, float64 [k, P], each of this mean and standard deviation [P].
    """
    size, samples, rows = 4, 32, []
    kinds: dict[str, tuple[Norm, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
        "Euclidean": (l2, lambda g: (g.norm(), g / g.norm())),
        "sign": (l1, lambda g: (g.abs().sum(), g.sign())),
        "spectral": (partial(nuclear, places=places), partial(singular, places=places)),
    }
    for kind, (norm, dual) in kinds.items():
        found, plugged = np.zeros((draws, 2, 2)), np.zeros((draws, 2))
        gain, spread = np.zeros(2), 0.0
        for one in range(draws):
            parts = draw(samples).unflatten(0, (8, size)).mean(1)
            plugged[one] = plug_in(parts, size)
            (small, of_small), (large, of_large) = (dual(draw(n).mean(0)) for n in (size, samples))
            c = float(small**2 - large**2) / (1 / size - 1 / samples)
            found[one] = moments(norm, parts, size), (c, float(large**2) - c / samples)
            gain += float(mean @ of_small) / draws, float(mean @ of_large) / draws
            spread += float(dual(draw(samples).mean(0) - mean)[0]) * math.sqrt(samples) / draws
        (ours, theirs), (error, other) = found.mean(0), np.sqrt(found.var(0) / draws)
        off = np.abs(ours - theirs) / np.hypot(error, other)
        if kind == "Euclidean":
            spread = float(sigma.norm())
            off = np.maximum(off, np.abs(ours - [spread**2, float(mean.square().sum())]) / error)
        if kind == "sign":
            spread = float(sigma.sum())
        r = (gain[0] / gain[1]) ** 2  # 1 / gain^2 is linear in 1 / n
        true = (1 - r) / (r / size - 1 / samples) if r > size / samples else math.inf
        scales = [ours[0] / ours[1], true, (spread / float(norm(mean))) ** 2]
        scales += [np.divide(*plugged.mean(0))] if kind == "sign" else []
        words = [f"{scale:.1f}" for scale in scales] + [""] * (kind != "sign")
        fit = [ours[1] / math.sqrt(ours[1] + ours[0] / n) / g for n, g in zip((size, samples), gain, strict=True)]
        rows.append([name, kind, *words, *(f"{f:.3f}" for f in fit), f"{off.max():.1f}"])
    return rows


def checks(draws: int) -> list[list[str]]:
    torch.manual_seed(0)

    def population(each: Tensor) -> tuple[Callable[[int], Tensor], Tensor, Tensor]:
        return lambda k: each[torch.randint(len(each), (k,))], each.mean(0), each.std(0, correction=0)

    square: list[Place] = [(0, torch.Size((10, 64)), 1.0)]
    sigma = (3 * torch.rand(640, dtype=torch.float64)).exp()
    mean = 0.3 * sigma * torch.randn(640, dtype=torch.float64)
    rows = check("normal", lambda k: torch.normal(mean.expand(k, -1), sigma.expand(k, -1)), mean, sigma, square, draws)
    sets = [part.fetch(np.arange(len(part))) for part in (load_digits().train, load_digits().heldout)]
    x, y = torch.cat([x for x, _ in sets]).flatten(1).double(), torch.cat([y for _, y in sets])
    softmax = (0.1 - F.one_hot(y, 10).double())[:, :, None] * x[:, None]  # gradients at weights of zero
    rows += check("digits", *population(softmax.flatten(1)), square, draws)
    model, text = GPT(256, 32, 2, 2, 16, dropout=0.0), load_text(block_size=32).train
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(200):
        x, y = text.fetch(torch.randint(len(text), (16,)).numpy())
        opt.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        opt.step()
    x, y = text.fetch(np.linspace(0, len(text) - 1, 1024).astype(np.int64))
    each = torch.cat([SampleGradients(model)(x[k], y[k]) for k in torch.arange(1024).split(64)]).double()
    return rows + check("GPT", *population(each), matrices(model), draws // 4)


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = checks(args.draws)
    headings = ["gradients", "norm", "c / a", "by gains", "dual norms", "plug-in", "gain at 4", "gain at 32", "errors"]
    show("Noise scales, predicted over true gains, and errors", headings, rows)
    write(args.json, ["torch", "numpy"], draws=args.draws, headings=headings, rows=rows)
    return int(any(float(row[-1]) > 5 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
