"""The rules by which flat buffers are updated: AdamW's and SGD's, one kernel call for each piece of a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.kernels import AdamOptions, SGDOptions, adamw, sgd
from kfuse.optim.layout import BucketState, Part, Piece
from kfuse.optim.updates import Update

if TYPE_CHECKING:
    from kfuse.optim.flat_updates import FlatUpdates

Options = Mapping[str, Any]
"""A parameter group."""


class Rule:
    """An optimizer's arithmetic. It is told tensors, options and scalars."""

    moment_names: tuple[str, ...]
    """Names of the state tensors shaped like the parameter, as torch's optimizer of the same kind names them."""
    counts_updates: bool = False
    """`state` has each parameter's number of updates, as "step"."""

    def keeps_state(self, options: Options) -> bool:
        """Whether an update with these options makes state, or needs the state that is there."""
        return True

    def skips_first(self, options: Options, found_inf: Tensor | None) -> bool:
        """Whether a first update is skipped, and so remains to be made.

        A CUDA device is not asked, since that would wait for it: a state of zeros gives the first update too.
        """
        return found_inf is not None and not devices.of(found_inf.device).asynchronous and bool(found_inf.item())

    def lay_out(self, bucket: Bucket, parts: Sequence[Part]) -> None:
        """The bucket's state, or this worker's parts of it, has been laid out."""

    def update(self, updates: FlatUpdates, given: Update) -> None:
        """Updates this worker's parts of all buckets, and shares its shards. Raises CommError."""

        def update(bucket: Bucket, state: BucketState) -> None:
            options = updates.options_of(state)
            for pieces in updates.pieces(bucket, state, given):
                for piece in pieces:
                    self.apply(piece, bucket, options, given)

        updates.run(update)

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        """Updates a piece's parameters and moments in place."""
        raise NotImplementedError


class AdamWRule(Rule):
    """torch.optim.AdamW's."""

    moment_names = ("exp_avg", "exp_avg_sq")
    counts_updates = True

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        m, v = piece.moments.values()
        adamw(
            piece.param,
            piece.grad,
            m,
            v,
            adam_options(options, given),
            step=piece.step,
            grad_scale=given.scale,
            found_inf=piece.skip,
            master=piece.master,
        )


class SGDRule(Rule):
    """torch.optim.SGD's."""

    moment_names = ("momentum_buffer",)

    def keeps_state(self, options: Options) -> bool:
        """As torch's: without momentum no buffer is made, and one that is there is left alone."""
        return bool(options["momentum"] != 0)

    def skips_first(self, options: Options, found_inf: Tensor | None) -> bool:
        """With dampening a buffer of zeros does not give the first update: then a CUDA device is asked too."""
        if found_inf is not None and options["dampening"] != 0:
            return bool(found_inf.item())
        return super().skips_first(options, found_inf)

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        sgd_options = SGDOptions(float(options["lr"]) * given.lr_factor, *(options[name] for name in names))
        buffer = piece.moments["momentum_buffer"] if sgd_options.momentum != 0 else None
        sgd(
            piece.param,
            piece.grad,
            buffer,
            sgd_options,
            first_step=piece.first,
            grad_scale=given.scale,
            found_inf=piece.skip,
            master=piece.master,
        )


def adam_options(options: Options, given: Update) -> AdamOptions:
    """A parameter group's, its learning rate multiplied with `lr_factor`."""
    beta1, beta2 = map(float, options["betas"])
    lr = float(options["lr"]) * given.lr_factor
    return AdamOptions(lr, beta1, beta2, options["eps"], options["weight_decay"], maximize=options["maximize"])


def fisher(updates: FlatUpdates) -> Tensor | None:
    """From `exp_avg_sq`, corrected for its bias as in Adam's update: v / (1 - beta2^updates).

    v is a running mean of the squares of the gradient of the mean loss, so that of the empirical Fisher information of
    a batch. Where noise dominates the gradient, it falls as the batch size grows. Two reads of the moments.
    """
    traces, largest = [], []
    for bucket, state in updates.flat.pairs():
        if not state.own.moments or not state.has_moments:
            continue
        views = bucket.view(state.own.moments["exp_avg_sq"])
        filled = [k for k, view in enumerate(views) if view.numel()]
        steps = state.steps.double()[filled]  # in fp32 1 - beta2^updates has four digits at first
        beta2 = float(updates.options_of(state)["betas"][1])
        scale = torch.where(steps > 0, 1 / (1 - beta2**steps), 0.0)
        # The moments are not negative: these norms are their sums and their largest ones.
        traces.append((torch.stack(torch._foreach_norm([views[k] for k in filled], 1)) * scale).sum())
        largest.append((torch.stack(torch._foreach_norm([views[k] for k in filled], math.inf)) * scale).max())
    return torch.stack([torch.stack(traces).sum(), torch.stack(largest).max()]).float() if traces else None
