"""The loss's curvature along the optimizer's direction, by central differences of gradients, without double backward.

H is the Hessian of the loss, G its gradient, Sigma the covariance of one sample's gradient, and P what the optimizer
multiplies a gradient with: 1 / (sqrt(v) + eps) of Adam and its kin, else 1, times the group's learning rate over the
reported one. Without momentum a step goes along P G. Measured are

    slope = G'PG     curvature = (PG)'H(PG)     spread = tr(P H P Sigma)     length = |PG|^2

slope / curvature is the best learning rate of a step with the whole gradient; spread / curvature is the batch size at
which the best rate is half of it: a noise scale, for P = 1 B_noise of McCandlish et al. 2018, equations 2.5 to 2.8.

Two of the step's micro-batches, i and j, give an unbiased estimate of each by three more gradients. With u = P g_i, and
g the mean gradient of all micro-batches but these two:

    h = (grad L_j(w + e u) - grad L_j(w - e u)) / 2e            H_j u, up to O(e^2)
    slope u'g     curvature (P g)'h     spread b_i (u'h - (P g)'h)     length u'P g

The mean of the two gradients is g_j, which g leaves out. Running means are of these over |u|^2, since P G may become a
thousand times shorter within some steps: over that of the measurement before, of which the estimates are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kfuse.membership import Session
from kfuse.train.again import undisturbed
from kfuse.train.arguments import TrainArguments
from kfuse.train.loss import forward
from kfuse.train.progress import Progress
from kfuse.train.step import Step

Tensors = list[Tensor]

_MOVE = 1e-3
"""|e u| over the norm of the parameters. Smaller ones lose more by rounding, larger ones by the third derivative."""
_KEPT = 0.9
"""What a measurement leaves of the running means before it: they are over about ten."""


@dataclass(eq=False)
class Curvature:
    """The measurements of one training, on this worker."""

    given: TrainArguments
    session: Session
    progress: Progress
    every: int
    # The newest measured step, and the means over its pairs: slope, curvature, spread, length, |u|^2.
    _found: tuple[int, list[float]] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for parameters of 16 bits."""
        for dtype in {p.dtype for p in self.given.opt.engine.params} & {torch.bfloat16, torch.float16}:
            raise ValueError(
                f"statistics_curvature_every={self.every}: must be None with parameters of {dtype}, which cannot be "
                "moved by so little"
            )

    def measure(self, step: Step) -> None:
        """After this worker's last backward of the step, before its update: measures, where the step is due.

        Every worker calls it, and all get the same bits, however many they are. It changes nothing else. Needs three
        micro-batches, two of them as large as the first, and with second moments an earlier update. Raises CommError.
        """
        if step.number % self.every:
            return
        self.given.opt.synchronize()  # a worker without a micro-batch takes part in the reduction only here
        scales, group, sizes = self._scales(), self.session.group, step.samples.sizes
        whole = [j for j, size in enumerate(sizes) if size == sizes[0]]
        if len(sizes) < 3 or len(whole) < 2 or scales is None:
            return
        pairs = list(zip(whole[::2], whole[1::2], strict=False))
        found = torch.zeros(len(pairs), 5, dtype=torch.float64)
        for k, (i, j) in enumerate(pairs):
            if j in step.mine:
                found[k] = torch.tensor(self._of_pair(step, i, j, scales), dtype=torch.float64)
        if group.size > 1:
            found = found.to(group.device)
            group.all_reduce(found, "curvature").wait()  # to each number all but one worker add zeros
        self._found = step.number, found.mean(0).tolist()

    def take(self, step: int) -> None:
        """The update of this step is made: what it has measured joins the running means. Until then a worker may be
        lost, and the step be made again. One number that is not finite would stay in the means: then none joins them.
        """
        if self._found is None or self._found[0] != step or not all(map(math.isfinite, self._found[1])):
            return
        *found, length = self._found[1]
        *means, before = self.progress.curvature
        scale = before or length or 1.0
        means = [_KEPT * mean + (1 - _KEPT) * new / scale for mean, new in zip(means, found, strict=True)]
        self.progress.curvature = (*means, length)

    def _of_pair(self, step: Step, i: int, j: int, scales: Tensors) -> tuple[float, ...]:
        """Slope, curvature, spread, length and |u|^2 by micro-batches i and j of the step."""
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

            part = sizes[i] / sum(sizes)  # of i's gradient in the mean, and of j's
            u = gradient_of(i)
            for k, scale in enumerate(scales):  # not in place: gradients may be views of repeated elements
                rest[k].sub_(u[k], alpha=part)
                u[k] = u[k] * scale
            h, g_j = hessian_times(u, list(params), lambda: gradient_of(j))
        for mean, g in zip(rest, g_j, strict=True):
            mean.sub_(g, alpha=part).div_(1 - 2 * part)
        slope = dot(u, rest)
        for mean, scale in zip(rest, scales, strict=True):
            mean.mul_(scale)
        curvature = dot(rest, h)
        return slope, curvature, sizes[i] * (dot(u, h) - curvature), dot(u, rest), dot(u, u)

    def _scales(self) -> Tensors | None:
        """Returns P's diagonal for each parameter; None before the first update of an optimizer that has moments."""
        opt, found = self.given.opt, dict[int, Tensor]()
        for group, rate in zip(opt.param_groups, opt.base_rates(), strict=True):
            share = rate / opt.base_lr if opt.base_lr else 1.0
            for p in group["params"]:
                state = opt.state.get(p, {})
                if "betas" not in group:
                    found[id(p)] = torch.full((), share, device=p.device)
                elif "exp_avg_sq" in state:
                    moments = state.get("max_exp_avg_sq", state["exp_avg_sq"])  # amsgrad's
                    left = 1 - group["betas"][1] ** float(state["step"])
                    root = (moments.double() / left).sqrt_() + group["eps"]
                    found[id(p)] = (share / root).to(p.dtype)
        params = opt.engine.params
        if not any(id(p) in found for p in params):
            return None
        return [found.get(id(p), torch.zeros((), device=p.device)) for p in params]  # 0: it has had no gradient


@torch.no_grad()
def hessian_times(direction: Tensors, params: Tensors, gradient: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
    """Returns H u, u being the direction, and the gradient here; of each parameter a tensor of its shape.

    gradient: computes it at the parameters' present values. These are put back bit by bit.
    """
    before = [p.detach().clone() for p in params]
    length = norm(direction)
    size = _MOVE * max(norm(before), 1.0) / length if length else 1.0
    gradients: list[Tensors] = []
    for sign in (1, -1):
        torch._foreach_add_(params, direction, alpha=sign * size)
        try:
            gradients.append(gradient())
        finally:
            torch._foreach_copy_(params, before)
    product, mean = gradients
    for k, (above, below) in enumerate(zip(product, mean, strict=True)):
        product[k], mean[k] = (above - below) / (2 * size), (above + below) / 2
    return product, mean


def dot(a: Tensors, b: Tensors) -> float:
    """The inner product over all parameters, in float64."""
    return math.fsum(float(x.double().flatten() @ y.double().flatten()) for x, y in zip(a, b, strict=True))


def norm(of: Tensors) -> float:
    return math.sqrt(dot(of, of))
