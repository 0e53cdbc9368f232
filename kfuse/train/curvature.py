"""The loss's curvature along the optimizer's direction, by central differences of gradients, without double backward.

H is the Hessian of the loss, G its gradient, Sigma the covariance of one sample's gradient, and P what the optimizer
multiplies a gradient with: 1 / (sqrt(v) + eps) of Adam and its kin, else 1. A step goes along P G. Measured are

    slope = G'PG        curvature = (PG)'H(PG)        spread = tr(P H P Sigma)

slope / curvature is the best learning rate of a step with the whole gradient; spread / curvature is the batch size at
which the best rate is half of it: a noise scale, for P = 1 B_noise of McCandlish et al. 2018, equations 2.5 to 2.8.

Two of the step's micro-batches, i and j, give an unbiased estimate of each by three more gradients. With u = P g_i, and
g the mean gradient of all micro-batches but these two:

    h = (grad L_j(w + e u) - grad L_j(w - e u)) / 2e            H_j u, up to O(e^2)
    slope u'g        curvature (P g)'h        spread b_i (u'h - (P g)'h)

The mean of the two gradients is g_j, which g leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.membership import Session
from kfuse.train.again import refuse_without_seek, undisturbed
from kfuse.train.arguments import TrainArguments
from kfuse.train.loss import forward
from kfuse.train.progress import Progress
from kfuse.train.step import Step

Tensors = list[Tensor]

_MOVE = 1e-3
"""|e u| over the norm of the parameters. Smaller ones lose more by rounding, larger ones by the third derivative."""
_KEPT = 0.9
"""Weight of the past in the running means, a measurement."""


@dataclass(eq=False)
class Curvature:
    """The measurements of one training, on this worker."""

    given: TrainArguments
    session: Session
    progress: Progress
    every: int
    _found: tuple[int, list[float]] | None = None  # the newest measured step, and its means

    def __post_init__(self) -> None:
        """Raises ValueError where kfuse cannot run a micro-batch again."""
        refuse_without_seek(f"statistics.curvature_every={self.every}", self.given.data)

    def measure(self, step: Step) -> None:
        """After this worker's last backward of the step, before its update: measures, where the step is due.

        Every worker calls it, and all get the same bits, however many they are. It changes nothing else. Needs three
        whole micro-batches, and with second moments an earlier update. Raises CommError.
        """
        if step.number % self.every:
            return
        self.given.opt.synchronize()  # a worker without a micro-batch takes part in the reduction only here
        scales, group, sizes = self._scales(), self.session.group, step.samples.sizes
        whole = [j for j, size in enumerate(sizes) if size == sizes[0]]
        if len(sizes) < 3 or len(whole) < 2 or scales is None:
            return
        pairs = list(zip(whole[::2], whole[1::2], strict=False))
        found = torch.zeros(len(pairs), 3, dtype=torch.float64)
        for k, (i, j) in enumerate(pairs):
            if j in step.mine:
                found[k] = torch.tensor(self._of_pair(step, i, j, scales), dtype=torch.float64)
        if group.size > 1:
            found = found.to(group.device)
            group.all_reduce(found, "curvature").wait()  # to each number all but one worker add zeros
        self._found = step.number, found.mean(0).tolist()

    def take(self, step: int) -> None:
        """The update of this step is made: what it has measured joins the running means."""
        if self._found is None or self._found[0] != step or not all(map(math.isfinite, self._found[1])):
            return
        pairs = zip(self.progress.curvature, (1.0, *self._found[1]), strict=True)
        self.progress.curvature = tuple(_KEPT * before + (1 - _KEPT) * new for before, new in pairs)

    def _of_pair(self, step: Step, i: int, j: int, scales: Tensors) -> tuple[float, float, float]:
        """Slope, curvature and spread by micro-batches i and j of the step."""
        model, objective, engine = self.given.model, self.given.objective, self.given.opt.engine
        params, sizes, device = engine.params, step.samples.sizes, engine.group.device
        rest = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in params]
        with torch.no_grad(), undisturbed(model, params, device) as put_back:

            def gradient_of(number: int) -> Tensors:
                put_back()
                with torch.enable_grad():
                    loss = forward(objective, model, step.batch_again(number), "fp32", device).loss
                    found = torch.autograd.grad(loss, params, allow_unused=True)
                return [torch.zeros_like(p) if it is None else it for p, it in zip(params, found, strict=True)]

            g_i = gradient_of(i)
            u = [g * scale for g, scale in zip(g_i, scales, strict=True)]
            h, g_j = hessian_times(u, list(params), lambda: gradient_of(j))
        total = sum(sizes)
        for mean, one, other in zip(rest, g_i, g_j, strict=True):
            mean.sub_(one + other, alpha=sizes[i] / total).mul_(total / (total - 2 * sizes[i]))
        curvature = dot([mean * scale for mean, scale in zip(rest, scales, strict=True)], h)
        return dot(u, rest), curvature, sizes[i] * (dot(u, h) - curvature)

    def _scales(self) -> Tensors | None:
        """Returns P's diagonal for each parameter; None before the first update of an optimizer that has moments."""
        opt, found = self.given.opt, dict[int, Tensor]()
        for group in opt.param_groups:
            for p in group["params"]:
                state = opt.state.get(p, {})
                if "betas" not in group:
                    found[id(p)] = torch.ones((), device=p.device)
                elif "exp_avg_sq" in state:
                    left = 1 - group["betas"][1] ** float(state["step"])
                    root = (state["exp_avg_sq"].double() / left).sqrt_() + group["eps"]
                    found[id(p)] = root.reciprocal_().to(p.dtype)
        params = opt.engine.params
        if not any(id(p) in found for p in params):
            return None
        return [found.get(id(p), torch.zeros((), device=p.device)) for p in params]  # 0: it has had no gradient


@torch.no_grad()
def hessian_times(direction: Tensors, params: Tensors, gradient: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
    """H u, and the gradient here. gradient: at the parameters' present values; they are put back bit by bit."""
    before = [p.detach().clone() for p in params]
    length = norm(direction)
    size = _MOVE * max(norm(before), 1.0) / length if length else 1.0
    gradients: list[list[Tensor]] = []
    for sign in (1, -1):
        torch._foreach_add_(params, direction, alpha=sign * size)
        try:
            gradients.append(gradient())
        finally:
            torch._foreach_copy_(params, before)
    pairs = list(zip(*gradients, strict=True))
    return [(above - below) / (2 * size) for above, below in pairs], [(above + below) / 2 for above, below in pairs]


def dot(a: Tensors, b: Tensors) -> float:
    """In float64."""
    return math.fsum(float(x.double().flatten() @ y.double().flatten()) for x, y in zip(a, b, strict=True))


def norm(of: Tensors) -> float:
    return math.sqrt(dot(of, of))
