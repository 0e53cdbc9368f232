"""The rules by which flat buffers are updated: AdamW's, SGD's and LAMB's, one kernel call for each piece of a bucket;
and a bucket's state, which a rule updates.

With sharded state LAMB's update has two halves, since a tensor's norms are those of all its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.devices import Place, quick
from kfuse.comm.engine import Engine
from kfuse.comm.step import Step
from kfuse.kernels import CHUNK, AdamOptions, AdamWArguments, PackTable, SGDOptions, adamw, lamb, lamb_trust, sgd
from kfuse.optim.layout import Entry, Extent, Part, Piece
from kfuse.optim.updates import Update

Options = Mapping[str, Any]  # a parameter group


def known_to_skip(skip: Tensor | None) -> bool:
    """Whether the host knows that the update is skipped. A CUDA device is not asked, since that would wait for it."""
    return skip is not None and not devices.of(skip.device).asynchronous and bool(skip.item())


class Flat(Protocol):
    """Parameters and state in flat buffers, as a rule sees them: see `FlatUpdates`."""

    engine: Engine
    sharded: bool

    def pairs(self) -> Iterator[tuple[Bucket, BucketState]]: ...

    def options_of(self, state: BucketState) -> dict[str, Any]: ...

    def pieces(self, bucket: Bucket, state: BucketState, given: Update) -> list[list[Piece]]: ...

    def run(self, update: Callable[[Bucket, BucketState], None]) -> None: ...


class Rule:
    """An optimizer's arithmetic. It is told tensors, options and scalars."""

    moment_names: tuple[str, ...]  # of the state tensors shaped like the parameter, as torch names them
    counts_updates: bool = False  # `state` has each parameter's number of updates, as "step"

    @property
    def all_moment_names(self) -> tuple[str, ...]:
        """Those of all groups' rules."""
        return self.moment_names

    def of(self, options: Options) -> Rule:
        """A parameter group's rule."""
        return self

    def owner_costs(self, params: Sequence[Tensor], options: Options) -> list[int] | None:
        """What each parameter's update costs, where it needs the whole gradient: one worker makes it, its owner.

        None: an update needs each element alone, or sums over a parameter that workers can share.
        """
        return None

    def keeps_state(self, options: Options) -> bool:
        """Whether an update with these options makes state, or needs the state that is there."""
        return True

    def skips_first(self, options: Options, found_inf: Tensor | None) -> bool:
        """Whether a first update is skipped, and so remains to be made.

        Where the host does not know, a state of zeros gives the first update too.
        """
        return known_to_skip(found_inf)

    def lay_out(self, bucket: Bucket, parts: Sequence[Part]) -> None:
        """The bucket's state, or this worker's parts of it, has been laid out."""

    def update(self, updates: Flat, given: Update) -> None:
        """Updates this worker's parts of all buckets, and shares its shards. Raises CommError."""

        def update(bucket: Bucket, state: BucketState) -> None:
            options = updates.options_of(state)
            for pieces in updates.pieces(bucket, state, given):
                for piece in pieces:
                    state.rule.apply(piece, bucket, options, given)

        updates.run(update)

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        """Updates a piece's parameters and moments in place."""
        raise NotImplementedError


@dataclass
class BucketState:
    """A bucket's parameters and optimizer state. Tensors are flat, in the bucket's layout."""

    param: Tensor  # [body], in the parameters' dtype: their own memory
    group: int  # the parameter group of all of its parameters
    rule: Rule  # that group's
    steps: Tensor  # fp32 [parameters]: updates each one has had (`Update.batch_factor`). Whole on each worker.
    entries: list[Entry]  # of each parameter
    own: Part
    mirror: Part  # what this worker repeats of the worker before it; empty where there is no mirror
    addresses: list[int] = field(default_factory=list)  # of the parameters, as long as they lie in `param`
    together: bool = True  # all of the bucket's parameters have had the same updates, so that one call can do them all
    quick_steps: Place = field(init=False)  # the same memory as `steps`
    others: list[Part] = field(default_factory=list)  # parts that this worker keeps for others while the group changes

    def __post_init__(self) -> None:
        self.quick_steps = quick(self.steps)

    def count_update(self, which: range, batch_factor: float, skip: Tensor | None) -> None:
        """Counts an update of these parameters as so many; skip: 1 where there is none."""
        if skip is None and not isinstance(self.quick_steps, Tensor):
            self.quick_steps[which.start : which.stop] += batch_factor
        else:
            made: float | Tensor = 1.0 if skip is None else 1.0 - skip
            self.steps[which.start : which.stop].add_(made, alpha=batch_factor)

    @property
    def parts(self) -> list[Part]:
        return [self.own, self.mirror] if self.mirror.width else [self.own]

    @property
    def has_moments(self) -> bool:
        return any(entry.known for entry in self.entries)

    @property
    def has_masters(self) -> bool:
        return self.param.dtype != torch.float32 and any(entry.mastered for entry in self.entries)

    def held(self) -> list[Part]:
        return [*self.parts, *self.others]

    def compare_updates(self) -> None:
        """After `entries` and `steps` were loaded: sets `together`. The host reads them."""
        self.together = len({entry.known for entry in self.entries}) == 1 and len(set(self.steps.tolist())) == 1


class AdamWRule(Rule):
    """torch.optim.AdamW's."""

    moment_names = ("exp_avg", "exp_avg_sq")
    counts_updates = True

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        adam = adam_options(options, given)
        if piece.arguments is None:
            m, v = piece.moments.values()
            kept = AdamWArguments(piece.param, piece.grad, m, v, adam, step=piece.step, **_scalars(piece, given))
            piece.arguments = kept
        kept = piece.arguments
        kept.options, kept.grad_scale, kept.found_inf = adam, given.factor, piece.skip
        adamw.run(kept)


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
        sgd(piece.param, piece.grad, buffer, sgd_options, first_step=piece.first, **_scalars(piece, given))


def _scalars(piece: Piece, given: Update) -> dict[str, Tensor | None]:
    return {"grad_scale": given.factor, "found_inf": piece.skip, "visible": piece.visible, "master": piece.master}


def adam_options(options: Options, given: Update) -> AdamOptions:
    """A parameter group's, with the update's factors."""
    beta1, beta2 = map(float, options["betas"])
    lr = float(options["lr"]) * given.lr_factor
    return AdamOptions(
        lr, beta1, beta2, options["eps"], options["weight_decay"], options["maximize"], given.batch_factor
    )


# -- LAMB -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moved:
    """The first half of an update."""

    of: Step  # the step. Another one is another object, also where a step is made again from a checkpoint.
    pieces: list[list[Piece]]  # of each bucket
    sums: Tensor  # fp32: the chunks' norms of this worker's shards, bucket by bucket; elsewhere 0
    mirrored: Tensor  # the same of the shards that it mirrors


class LambRule(Rule):
    """LAMB's (You et al. 2020, algorithm 2), with torch's names for Adam's moments."""

    moment_names = ("exp_avg", "exp_avg_sq")
    counts_updates = True

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, tuple[int, ...]], PackTable] = {}
        self._moved: _Moved | None = None  # with sharded state: of the update under way, or the last that failed

    def lay_out(self, bucket: Bucket, parts: Sequence[Part]) -> None:
        """Builds the tables of all pieces that an update may have, since on a GPU the host waits for each."""
        every = range(len(bucket.shapes))
        which = (every, *(range(k, k + 1) for k in every))
        self._tables = {key: table for key, table in self._tables.items() if key[0] != bucket.index}
        for extent in (part.extent(bucket, parameters) for part in parts for parameters in which):
            if extent is not None:
                table = PackTable.build(extent.numels, extent.offsets, bucket.device, extent.place.start)
                self._tables[_key(bucket, extent)] = table
        numels = [shape.numel() for shape in bucket.shapes]
        self._tables[bucket.index, 0, ()] = PackTable.build(numels, bucket.layout.offsets, bucket.device, 0)

    def update(self, updates: Flat, given: Update) -> None:
        """With sharded state one message more brings the sums of the norms.

        Moments change before that message, parameters after it. If a worker is lost meanwhile, moments are updated
        already and are not updated again; only the sums are sent again when the update is resumed.
        """
        if not updates.sharded:
            super().update(updates, given)
            return
        tables = [self._tables[bucket.index, 0, ()] for bucket, _ in updates.pairs()]
        if self._moved is None or self._moved.of is not given.step:
            self._moved = self._move_moments(updates, tables, given)
        moved = self._moved
        sums = moved.sums + moved.mirrored if given.owner_is_lost else moved.sums.clone()
        updates.engine.executor.share_sums(sums, what="LAMB's norms")
        partials = _of_buckets(sums, tables)

        def apply(bucket: Bucket, state: BucketState) -> None:
            table = tables[bucket.index]
            trust = torch.empty(len(table.numels), dtype=torch.float32, device=bucket.device)
            lamb_trust(partials[bucket.index], table, trust)
            for piece in moved.pieces[bucket.index]:
                first, last = piece.extent.tensors[0], piece.extent.tensors[-1]
                table_of_piece = self._tables[_key(bucket, piece.extent)]
                self._lamb(piece, table_of_piece, updates.options_of(state), given, trust=trust[first : last + 1])

        updates.run(apply)
        self._moved = None

    def _move_moments(self, updates: Flat, tables: Sequence[PackTable], given: Update) -> _Moved:
        """tables: of whole buckets."""
        chunks, device = sum(table.num_chunks for table in tables), updates.engine.device
        sums, mirrored = torch.zeros(2, 2 * chunks, dtype=torch.float32, device=device)
        every: list[list[Piece]] = []
        for (bucket, state), whole, *partials in zip(
            updates.pairs(), tables, _of_buckets(sums, tables), _of_buckets(mirrored, tables), strict=True
        ):
            first_chunks = [0, *accumulate(whole.chunk_counts)]
            every.append([])
            for pieces, of_bucket in zip(updates.pieces(bucket, state, given), partials, strict=False):
                for piece in pieces:
                    every[-1].append(piece)
                    table = self._tables[_key(bucket, piece.extent)]
                    norms = torch.zeros(2, table.num_chunks, dtype=torch.float32, device=bucket.device)
                    self._lamb(piece, table, updates.options_of(state), given, partials=norms)
                    k, begins = piece.extent.tensors[0], piece.extent.place.start + piece.extent.offsets[0]
                    at = first_chunks[k] + begins // CHUNK - bucket.layout.offsets[k] // CHUNK
                    of_bucket[:, at : at + norms.shape[1]] = norms
        return _Moved(given.step, every, sums, mirrored)

    def apply(self, piece: Piece, bucket: Bucket, options: Options, given: Update) -> None:
        self._lamb(piece, self._tables[_key(bucket, piece.extent)], options, given)

    def _lamb(self, piece: Piece, table: PackTable, options: Options, given: Update, **half: Tensor) -> None:
        """half: `partials` or `trust`, in one half of an update."""
        (m, v), adam = piece.moments.values(), adam_options(options, given)
        lamb(piece.param, piece.grad, m, v, table, adam, step=piece.step, **_scalars(piece, given), **half)


def _key(bucket: Bucket, extent: Extent) -> tuple[int, int, tuple[int, ...]]:
    return bucket.index, extent.place.start, extent.tensors


def _of_buckets(sums: Tensor, tables: Sequence[PackTable]) -> list[Tensor]:
    """Views of each bucket's part: [2, chunks]."""
    return [each.view(2, -1) for each in sums.split_with_sizes([2 * table.num_chunks for table in tables])]
