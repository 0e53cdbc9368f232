"""The fused optimizers: AdamW, LAMB and SGD over all workers' gradients, on flat buffers.

Each reduces, measures, clips and updates in one go. Parameters are fp32 or bf16. For bf16 ones the optimizer keeps fp32
master weights and fp32 moments: it updates the masters, and writes their rounded values to the parameters in the same
kernel. Where a parameter was changed by other means (`model.load_state_dict`, clipped weights), its new value is taken.
clip_norm: limit of the mean gradient's global norm. skip_nonfinite: leaves a step out where a gradient is not finite,
with no host synchronisation, and rank 0 warns. (On CUDA a gradient whose square overflows fp32, above 1e19, counts as
not finite.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from kfuse.comm.buckets import Bucket
from kfuse.comm.plan import KeptStep, Reduced
from kfuse.kernels import CHUNK, AdamOptions, PackTable, SGDOptions, adamw, lamb, lamb_trust, sgd
from kfuse.optim.flat import FlatOptimizer
from kfuse.optim.layout import Extent, Flat, Piece


class AdamMoments(FlatOptimizer):
    """State as torch's Adam: `exp_avg`, `exp_avg_sq`, and each parameter's number of updates."""

    tells_fisher = True
    _moment_names = ("exp_avg", "exp_avg_sq")

    def _publish(self, bucket: Bucket, flat: Flat, which: Collection[int]) -> None:
        super()._publish(bucket, flat, which)
        params = self._params_of(bucket)
        for k in which:
            self.state[params[k]]["step"] = flat.steps[k]

    def fisher(self) -> Tensor | None:
        """From `exp_avg_sq`, corrected for its bias as in Adam's update: v / (1 - beta2^updates).

        v is a running mean of the squares of the gradient of the mean loss, so that of the empirical Fisher information
        of a batch. Where noise dominates the gradient, it falls as the batch size grows. Two reads of the moments.
        """
        traces, largest = [], []
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            if not flat.moments or not any(flat.known):
                continue
            views = bucket.view(flat.moments["exp_avg_sq"])
            filled = [k for k, view in enumerate(views) if view.numel()]
            steps = flat.steps.double()[filled]  # in fp32 1 - beta2^updates has four digits at first
            beta2 = float(self._settings_of(bucket)["betas"][1])
            scale = torch.where(steps > 0, 1 / (1 - beta2**steps), 0.0)
            # The moments are not negative: these norms are their sums and their largest ones.
            traces.append((torch.stack(torch._foreach_norm([views[k] for k in filled], 1)) * scale).sum())
            largest.append((torch.stack(torch._foreach_norm([views[k] for k in filled], math.inf)) * scale).max())
        return torch.stack([torch.stack(traces).sum(), torch.stack(largest).max()]).float() if traces else None

    def _options(self, group: dict[str, Any]) -> AdamOptions:
        """A parameter group's, its learning rate multiplied with `lr_factor`."""
        beta1, beta2 = map(float, group["betas"])
        lr = float(group["lr"]) * self.lr_factor
        return AdamOptions(lr, beta1, beta2, group["eps"], group["weight_decay"], maximize=group["maximize"])


class FusedAdamW(AdamMoments, torch.optim.AdamW):
    """torch.optim.AdamW (Loshchilov & Hutter 2019), data-parallel, with its arithmetic and its state_dict.

    Parameters are fp32, or bf16, which get fp32 master weights. `clip_norm` clips the global norm of the mean gradient;
    `skip_nonfinite` leaves a step out where a gradient is not finite, with no host synchronisation, and rank 0 warns.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._attach(clip_norm, skip_nonfinite)

    def _update_piece(self, piece: Piece, bucket: Bucket, scale: Tensor | None, found_inf: Tensor | None) -> None:
        m, v = piece.moments.values()
        adamw(
            piece.param,
            piece.grad,
            m,
            v,
            self._options(self._settings_of(bucket)),
            step=piece.step,
            grad_scale=scale,
            found_inf=found_inf,
            master=piece.master,
        )


class FusedLAMB(AdamMoments, torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2), data-parallel.

    Each parameter tensor moves by lr * |p| / |u| * u, where u is Adam's bias-corrected update plus weight_decay * p;
    where p or u is zero, by lr * u. Norms are the master weights' where parameters are bf16. `clip_norm` and
    `skip_nonfinite` are as for FusedAdamW.
    """

    _moved: _Moved | None = None
    """With sharded state: the first half of the update under way, or of the last one that failed after it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        """Raises ValueError for a negative lr, eps or weight_decay, or a beta outside [0, 1)."""
        self.check_arguments(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._attach(clip_norm, skip_nonfinite)

    @staticmethod
    def check_arguments(
        lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 1e-2, **_: object
    ) -> None:
        """Raises ValueError as the constructor does, which calls it; it needs no parameters and no workers."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}={value!r}: must be 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r}: each must be in [0, 1)")

    def _laid_out(self, bucket: Bucket, *flats: Flat) -> None:
        """Builds the tables of all pieces that an update may have, since on a GPU the host waits for each."""
        every = range(len(bucket.shapes))
        parts = (every, *(range(k, k + 1) for k in every))
        extents = [flat.extent(bucket, which) for flat in flats for which in parts]
        tables: dict[tuple[int, int, tuple[int, ...]], PackTable] = getattr(self, "_tables", {})
        tables = {key: table for key, table in tables.items() if key[0] != bucket.index}
        self._tables = tables | {
            _key(bucket, extent): PackTable.build(extent.numels, extent.offsets, bucket.device, extent.place.start)
            for extent in extents
            if extent is not None
        }
        numels = [shape.numel() for shape in bucket.shapes]
        self._tables[bucket.index, 0, ()] = PackTable.build(numels, bucket.layout.offsets, bucket.device, 0)

    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """A tensor's norms are those of all its shards: with sharded state one message more brings the sums.

        Moments change before that message, parameters after it. If a worker is lost meanwhile, moments are updated
        already and are not updated again; only the sums are sent again: see `resume_update`.
        """
        if not self.engine.options.sharded:
            super()._update(reduced, scale, found_inf)
            return
        self._check_state()
        buckets, kept = self.engine.gradient_buckets, self.engine.kept
        tables = [self._tables[bucket.index, 0, ()] for bucket in buckets]
        assert kept is not None, "it has been reduced, with sharded state"
        if self._moved is None or self._moved.of is not kept:
            self._moved = self._move_moments(tables, reduced, scale, found_inf, kept)
        moved = self._moved
        sums = moved.sums + moved.mirrored if self.owner_is_lost else moved.sums.clone()
        self.engine.share_sums(sums, "LAMB's norms")
        partials = _of_buckets(sums, tables)

        def apply(bucket: Bucket) -> None:
            table = tables[bucket.index]
            trust = torch.empty(len(table.numels), device=bucket.device)
            lamb_trust(partials[bucket.index], table, trust)
            for piece, skip in moved.pieces[bucket.index]:
                tensors = piece.extent.tensors
                self._lamb(piece, bucket, scale, skip, trust=trust[tensors[0] : tensors[-1] + 1])

        self._run_update(apply)
        self._moved = None

    def _move_moments(
        self,
        tables: Sequence[PackTable],
        reduced: Reduced,
        scale: Tensor | None,
        found_inf: Tensor | None,
        kept: KeptStep,
    ) -> _Moved:
        """The first half of an update. tables: of whole buckets."""
        sums, mirrored = torch.zeros(2, 2 * sum(table.num_chunks for table in tables), device=self.engine.device)
        pieces: list[list[tuple[Piece, Tensor | None]]] = []
        for bucket, *partials in zip(
            self.engine.gradient_buckets, _of_buckets(sums, tables), _of_buckets(mirrored, tables), strict=True
        ):
            first_chunks = _first_chunks(bucket)
            pieces.append([])
            for flat, of_bucket in zip(self._shards_of(bucket), partials, strict=False):
                for piece, skip in self._pieces(bucket, flat, reduced, found_inf):
                    pieces[-1].append((piece, skip))
                    norms = torch.zeros(2, self._tables[_key(bucket, piece.extent)].num_chunks, device=bucket.device)
                    self._lamb(piece, bucket, scale, skip, partials=norms)
                    k, begins = piece.extent.tensors[0], piece.extent.place.start + piece.extent.offsets[0]
                    at = first_chunks[k] + begins // CHUNK - bucket.layout.offsets[k] // CHUNK
                    of_bucket[:, at : at + norms.shape[1]] = norms
        return _Moved(kept, pieces, sums, mirrored)

    def _update_piece(self, piece: Piece, bucket: Bucket, scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._lamb(piece, bucket, scale, found_inf)

    def _lamb(
        self,
        piece: Piece,
        bucket: Bucket,
        scale: Tensor | None,
        found_inf: Tensor | None,
        partials: Tensor | None = None,
        trust: Tensor | None = None,
    ) -> None:
        """`kfuse.kernels.lamb` of a piece."""
        m, v = piece.moments.values()
        lamb(
            piece.param,
            piece.grad,
            m,
            v,
            self._tables[_key(bucket, piece.extent)],
            self._options(self._settings_of(bucket)),
            step=piece.step,
            grad_scale=scale,
            found_inf=found_inf,
            master=piece.master,
            partials=partials,
            trust=trust,
        )


@dataclass(frozen=True)
class _Moved:
    """The first half of an update of LAMB's."""

    of: KeptStep
    """The step. Another one is another object, also where a step is made again from a checkpoint."""
    pieces: list[list[tuple[Piece, Tensor | None]]]
    """Of each bucket: pieces, each with its `found_inf`."""
    sums: Tensor
    """fp32: the chunks' norms of this worker's shards, bucket by bucket; elsewhere 0."""
    mirrored: Tensor
    """The same of the shards that it mirrors."""


def _key(bucket: Bucket, extent: Extent) -> tuple[int, int, tuple[int, ...]]:
    return bucket.index, extent.place.start, extent.tensors


def _of_buckets(sums: Tensor, tables: Sequence[PackTable]) -> list[Tensor]:
    """Views of each bucket's part: [2, chunks]."""
    return [each.view(2, -1) for each in sums.split_with_sizes([2 * table.num_chunks for table in tables])]


def _first_chunks(bucket: Bucket) -> list[int]:
    """Of each of the bucket's parameters the number of its first chunk, where chunks end at the bucket's blocks."""
    chunks = [
        -(-(offset + shape.numel()) // CHUNK) - offset // CHUNK if shape.numel() else 0
        for offset, shape in zip(bucket.layout.offsets, bucket.shapes, strict=True)
    ]
    return [0, *accumulate(chunks)]


class FusedSGD(FlatOptimizer, torch.optim.SGD):
    """torch.optim.SGD, data-parallel, with its arithmetic and its state_dict.

    Parameters, `clip_norm` and `skip_nonfinite` are as for FusedAdamW.
    """

    _moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        torch.optim.SGD.__init__(
            self, params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True
        )
        self._attach(clip_norm, skip_nonfinite)

    def _with_statistics(self, state: dict[str, Any]) -> dict[str, Any]:
        """And with `fused` None for groups of 16-bit parameters: torch's SGD takes that setting over as it loads, and
        its fused kernel leaves them as they are on the CPU (see `refuse_torchs_fused_sgd`).
        """
        state = super()._with_statistics(state)
        for saved, group in zip(state["param_groups"], self.param_groups, strict=True):
            if any(p.dtype != torch.float32 for p in group["params"]):
                saved["fused"] = None
        return state

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        """As torch's: without momentum no buffer is made, and one that is there is left alone."""
        return bool(group["momentum"] != 0)

    def _skips_first(self, group: dict[str, Any], found_inf: Tensor | None) -> bool:
        """With dampening a buffer of zeros does not give the first update: then a CUDA device is asked too."""
        if found_inf is not None and group["dampening"] != 0:
            return bool(found_inf.item())
        return super()._skips_first(group, found_inf)

    def _update_piece(self, piece: Piece, bucket: Bucket, scale: Tensor | None, found_inf: Tensor | None) -> None:
        group = self._settings_of(bucket)
        options = SGDOptions(
            float(group["lr"]) * self.lr_factor,
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        )
        buffer = piece.moments["momentum_buffer"] if options.momentum != 0 else None
        sgd(
            piece.param,
            piece.grad,
            buffer,
            options,
            first_step=piece.first,
            grad_scale=scale,
            found_inf=found_inf,
            master=piece.master,
        )
