"""Muon's update of flat buffers. Each matrix is orthogonalised by one worker, its owner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kfuse.comm.buckets import Bucket
from kfuse.kernels import take_changed
from kfuse.kernels.orthogonal import orthogonalise
from kfuse.optim.layout import Piece
from kfuse.optim.rules import AdamWRule, Flat, Options, Rule, known_to_skip
from kfuse.optim.updates import Update

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan's and torch's
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of the Newton-Schulz iteration
_BUFFER = "momentum_buffer"


class MuonRule(Rule):
    """torch.optim.Muon's, and AdamW's for groups with `use_muon=False`.

    With replicated state a matrix's owner orthogonalises the direction of its update, and shares this factor before any
    worker updates anything: so a lost worker leaves no update in part, as with every rule. With sharded state the owner
    has the matrix's momentum alone, makes the update, and shares the parameters.
    """

    moment_names = (_BUFFER,)
    all_moment_names = (_BUFFER, *AdamWRule.moment_names)

    def __init__(self) -> None:
        self._adamw = AdamWRule()
        self._shared: dict[int, Tensor] = {}  # by bucket, [body]: factors of all matrices, in the update under way

    def of(self, options: Options) -> Rule:
        return self if options["use_muon"] else self._adamw

    def owner_costs(self, params: Sequence[Tensor], options: Options) -> list[int] | None:
        """Multiplications of the Newton-Schulz iteration."""
        costs = []
        for p in params:
            short, long = sorted(p.shape[-2:])
            matrices = p.numel() // max(1, short * long)
            costs.append(int(options["ns_steps"]) * matrices * (2 * short * short * long + short**3))
        return costs

    def update(self, updates: Flat, given: Update) -> None:
        engine, alone = updates.engine, updates.sharded or given.step.is_local
        try:
            if engine.group.size > 1 and not alone and not known_to_skip(given.skip):
                engine.executor.share_factors(self._own_factors(updates, given))
            super().update(updates, given)
        finally:
            self._shared = {}

    def _own_factors(self, updates: Flat, given: Update) -> Iterator[tuple[Bucket, Tensor]]:
        """Of each bucket, the last first, [body]: the factors of the matrices that this worker owns; else undefined."""
        rank = updates.engine.group.rank
        for bucket, state in reversed(list(updates.pairs())):
            if state.rule is not self:
                continue
            if bucket.rounded is not None:
                take_changed(bucket.rounded, bucket.mean)
            options = updates.options_of(state)
            dtype = TYPES[options["arithmetic"]]
            flat = self._shared[bucket.index] = torch.empty(bucket.body, dtype=dtype, device=bucket.device)
            buffer = state.own.tensors.get(_BUFFER)
            buffer = torch.zeros_like(bucket.mean) if buffer is None else buffer
            own, params = bucket.owned[rank], bucket.tensors
            begins = enumerate(bucket.layout.offsets)
            mine = [k for k, at in begins if own.start <= at < own.stop and params[k].grad is not None]
            gradients, buffers, factors = (
                _matrices(bucket, [(k, bucket.place(each, k)) for k in mine]) for each in (bucket.mean, buffer, flat)
            )
            _orthogonalise(gradients, buffers, factors, options, given.factor)
            yield bucket, flat

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        if known_to_skip(piece.skip):
            return
        extent, weights = piece.extent, piece.param if piece.master is None else piece.master
        if piece.master is not None:  # parameters that were changed since the last update replace their masters
            take_changed(piece.param, piece.master)
        if piece.visible is not None:
            take_changed(piece.visible, piece.grad)
        begins = zip(extent.tensors, extent.offsets, extent.numels, strict=True)
        places = [(k, slice(at, at + numel)) for k, at, numel in begins]
        params, gradients, buffers = (
            _matrices(bucket, [(k, each[place]) for k, place in places])
            for each in (weights, piece.grad, piece.moments[_BUFFER])
        )
        if (shared := self._shared.get(bucket.index)) is not None:
            factors = _matrices(bucket, [(k, bucket.place(shared, k)) for k, _ in places])
        else:
            factors = [torch.empty_like(gradient, dtype=TYPES[options["arithmetic"]]) for gradient in gradients]
            _orthogonalise(gradients, buffers, factors, options, given.factor)
        before = None if piece.skip is None else (weights.clone(), piece.moments[_BUFFER].clone())
        lr = float(options["lr"]) * given.lr_factor
        for param, gradient, buffer, factor in zip(params, gradients, buffers, factors, strict=True):
            buffer.lerp_(_scaled(gradient, given.factor), 1 - options["momentum"])
            param.mul_(1 - lr * options["weight_decay"])
            param.add_(factor, alpha=-_adjusted(lr, options["adjust_lr_fn"], *param.shape))
        if before is not None:  # only the device knows whether the update is left out
            assert piece.skip is not None
            for tensor, value in zip((weights, piece.moments[_BUFFER]), before, strict=True):
                torch.where(piece.skip != 0, value, tensor, out=tensor)
        if piece.master is not None:
            piece.param.copy_(piece.master)


def _matrices(bucket: Bucket, elements: Iterable[tuple[int, Tensor]]) -> list[Tensor]:
    """The matrices of parameters, [m, n], with the parameters' strides. elements: each one's number in the bucket, and
    its part of a flat buffer.
    """
    shaped = [bucket.shaped(each, k) for k, each in elements if each.numel()]
    return [matrix for each in shaped for matrix in ([each] if each.dim() == 2 else each.unbind(0))]


def _orthogonalise(
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    factors: Sequence[Tensor],
    options: Options,
    scale: Tensor | None,
) -> None:
    """Writes each matrix's factor: that of its momentum after this step, or of Nesterov's.

    buffers: of the momenta, which stay as they are.
    """
    momentum, by_shape = float(options["momentum"]), dict[torch.Size, list[tuple[Tensor, Tensor]]]()
    for gradient, buffer, factor in zip(gradients, buffers, factors, strict=True):
        gradient = _scaled(gradient, scale)
        direction = buffer.lerp(gradient, 1 - momentum)
        direction = gradient.lerp(direction, momentum) if options["nesterov"] else direction
        by_shape.setdefault(factor.shape, []).append((direction, factor))
    for pairs in by_shape.values():
        directions, outs = zip(*pairs, strict=True)
        a, b, c = options["ns_coefficients"]
        orthogonalise(directions, outs, (a, b, c), options["ns_steps"], options["eps"])


def _scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    return gradient if scale is None else gradient * scale


def _adjusted(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """A matrix's learning rate, as torch.optim.Muon's `adjust_lr_fn` has it."""
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))
