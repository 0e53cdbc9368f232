"""Optimizers that keep parameters and state in flat buffers, one per bucket, and update each by one kernel call.

With `comm.state=sharded` a worker keeps state for its shard of each bucket, and updates that; the engine then gives all
workers the parameters.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.group import CommError
from kfuse.comm.plan import Reduced
from kfuse.optim.interrupted import InterruptedUpdates
from kfuse.optim.layout import (
    MASTER,
    Flat,
    Held,
    Piece,
    check_replaced,
    fill,
    fill_part,
    number,
    piece_of,
    refuse_overlaps,
    with_own_storage,
)
from kfuse.optim.parameters import loading_as

_NEVER_LOADED = {"amsgrad": True, "differentiable": True}
_OTHER_ARITHMETIC = _NEVER_LOADED | {"decoupled_weight_decay": False}  # which AdamW sets to True as it loads


_SHARED_MEMORY = (
    "%s was moved to shared memory after %s was made, which moves it back: other processes do not see its updates. "
    "kf.Optimizer leaves parameters where they are."
)
_OTHER_LAYOUT = (
    "%s has another memory layout than when %s was made, which puts the former one back: call "
    "model.to(memory_format=...) before making the optimizer"
)


class FlatOptimizer(InterruptedUpdates):
    """Keeps torch's per-parameter `state` as views of flat buffers, so that state_dict is torch's own.

    A 16-bit parameter's moments are fp32, and `state` has its fp32 weights too, as "master". torch's optimizers leave
    that entry alone, and round the moments to the parameter's dtype as they load them.

    A subclass sets `_moment_names` and implements `_update_piece`.
    """

    _moment_names: tuple[str, ...]
    """Names of the state tensors shaped like the parameter, as torch's optimizer of the same kind names them."""
    shards_state = True
    _weight_names = (MASTER,)
    _warned: tuple[str, ...] = ()
    _counts_differ: bool = False
    """Workers may have made different updates: once their numbers are averaged they are compared with each other."""

    def _check_layout(self) -> None:
        """Raises ValueError if two parameters share memory: in flat buffers each has its own place."""
        self._refuse_options(self.param_groups, _OTHER_ARITHMETIC)
        refuse_overlaps(self._named_parameters())

    def _refuse_options(self, groups: list[dict[str, Any]], options: dict[str, bool]) -> None:
        """Raises ValueError for an option of torch's whose arithmetic the kernels do not have.

        Which implementation to take (foreach, fused, capturable) is no such option: all give the same update.
        """
        for index, group in enumerate(groups):
            for name, value in options.items():
                if name in group and bool(group[name]) == value:
                    raise ValueError(
                        f"parameter group {index} has {name}={group[name]!r}, which {type(self).__name__} does not "
                        "offer: kf.Optimizer wraps any torch optimizer"
                    )

    def _layout_changed(self) -> None:
        """Lays parameters and state out for the engine's buckets; values are kept."""
        pairs = [self._flatten(bucket) for bucket in self.engine.gradient_buckets]
        self._flats, self._mirrors = [own for own, _ in pairs], [mirror for _, mirror in pairs]

    def _flatten(self, bucket: Bucket) -> tuple[Flat, Flat]:
        params = self._params_of(bucket)
        param = torch.zeros(bucket.body, dtype=bucket.layout.dtype, device=bucket.device)
        views = bucket.view(param)
        bucket.parameters = param
        fill(views, [p.data for p in params])
        for p, view in zip(params, views, strict=True):
            p.data = with_own_storage(view)
        own, mirror = (
            Flat(param, place, None, torch.zeros(len(params), device=bucket.device))
            for place in (bucket.shard, bucket.mirrored)
        )
        if mirror.width:  # first: with its own shard it takes what was loaded out of `state`
            self._take_state(bucket, mirror, last=False)
        self._take_state(bucket, own)
        self._laid_out(bucket, own, mirror)
        return own, mirror

    def _laid_out(self, bucket: Bucket, *flats: Flat) -> None:
        """The bucket's state, or this worker's shard of it, has been laid out."""

    def _params_of(self, bucket: Bucket) -> list[Parameter]:
        return [self.engine.params[i] for i in bucket.layout.params]

    def _publish(self, bucket: Bucket, flat: Flat, which: Collection[int]) -> None:
        """Makes the flat state of these parameters visible as torch's `state`. Of shards there is none to be seen."""
        params = self._params_of(bucket)
        for name, moment in flat.moments.items() if not bucket.sharded else ():
            views = bucket.view(moment)
            for k in which:
                self.state[params[k]][name] = views[k]

    def _publish_masters(self, bucket: Bucket, flat: Flat, which: Collection[int]) -> None:
        """Makes the masters of these parameters visible in `state`: from the first update on, as torch makes state."""
        if flat.master is None or all(flat.mastered[k] for k in which):
            return
        for k in which:
            flat.mastered[k] = True
        if not bucket.sharded:
            params, views = self._params_of(bucket), bucket.view(flat.master)
            for k in which:
                self.state[params[k]][MASTER] = views[k]

    def state_dict(self) -> dict[str, Any]:
        """As torch's, whole, and kfuse's statistics under the key "kfuse", which torch's optimizers leave alone.

        With sharded state every worker must call it at the same point, and gets all of it, in the host's memory.
        Raises CommError, which names the ranks that did not call it within the timeout.
        """
        if not self._sharded:
            return super().state_dict()
        self.engine.group.meet("opt.state_dict() or kf.state_dict(), with comm.state=sharded")
        return self._with_shards(None)

    def gathered_state(self, rank: int) -> dict[str, Any]:
        return self._with_shards(rank) if self._sharded else super().gathered_state(rank)

    def _with_shards(self, rank: int | None) -> dict[str, Any]:
        """torch's state_dict with the shards of all workers, on this rank, or on all (None)."""
        self._show(rank)
        try:
            state = super().state_dict()
            return state | {"state": {key: dict(of) for key, of in state["state"].items()}}
        finally:
            self._hide()

    def _show(self, rank: int | None) -> None:
        """Gathers the whole tensors, on this rank or on all, and makes them visible in `state`, as if replicated."""
        from kfuse.optim.sharding import gather  # when used: `import kfuse` is quick

        wholes = gather(self.engine, self._flats, rank)
        for bucket, flat, tensors in zip(self.engine.gradient_buckets, self._flats, wholes, strict=True):
            params = self._params_of(bucket)
            for name, whole in tensors.items():
                shown = flat.mastered if name == MASTER else flat.known
                for p, view, is_shown in zip(params, bucket.view(whole), shown, strict=True):
                    if is_shown:
                        self.state[p][name] = view

    def _hide(self) -> None:
        for p in self.engine.params:
            for name in (*self._moment_names, MASTER):
                self.state.get(p, {}).pop(name, None)

    def _numbers(self) -> dict[str, float]:
        numbers, names = super()._numbers(), self.engine.names
        if self._sharded:
            for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
                for index, known in zip(bucket.layout.params, flat.known, strict=True):
                    numbers[f"whether {names[index]} has optimizer state"] = float(known)
        return numbers

    def _update_counts(self) -> list[tuple[Sequence[int], Tensor]]:
        if not self._sharded:
            return []
        pairs = zip(self.engine.gradient_buckets, self._flats, strict=True)
        return [(bucket.layout.params, flat.steps) for bucket, flat in pairs]

    def _make_state(self, lacking: Sequence[int]) -> None:
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            which = [k for k, index in enumerate(bucket.layout.params) if index in lacking]
            if which:
                self._first_update(bucket, flat, which)
        self._counts_differ = True

    def average_models(self, weights: bool = True, states: bool = True) -> None:
        """As the base class's. Numbers of updates are averaged too: those of workers that made fewer are fractions."""
        super().average_models(weights, states)
        if states and self._counts_differ:
            for flat in self._flats:
                flat.compare_updates()
            self._counts_differ = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class, or torch's optimizer of the same kind, saved. With sharded state: this worker's part.

        Raises ValueError where it does not fit the parameters; then nothing is loaded.
        """
        self._load(state_dict, whole=False)

    def load_gathered_state(self, state: dict[str, Any]) -> None:
        self._load(state, whole=True)

    def _load(self, state_dict: dict[str, Any], whole: bool) -> None:
        """whole: keeps all of the state, not this worker's shard alone."""
        self._refuse_options(state_dict["param_groups"], _NEVER_LOADED)
        self._check_shapes(state_dict)
        self._load_by_torch(state_dict)
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            if bucket.sharded:
                self._empty(flat, slice(0, bucket.body) if whole else bucket.shard)
                self._empty(self._mirrors[bucket.index], slice(0, 0))
                self._laid_out(bucket, flat)
            self._take_state(bucket, flat)

    def _load_by_torch(self, state_dict: dict[str, Any]) -> None:
        dtypes = dict.fromkeys((*self._moment_names, MASTER), torch.float32)
        with loading_as(self, dtypes, moved=not self._sharded):
            super().load_state_dict(state_dict)

    def _empty(self, flat: Flat, place: slice) -> None:
        """Drops the state tensors; those that come are of `place`."""
        flat.place, flat.extents, flat.moments, flat.master, flat.others = place, {}, {}, None, []

    # -- shards -----------------------------------------------------------------------------------------------------

    @property
    def _sharded(self) -> bool:
        return self.engine.options.sharded

    def common_state(self) -> dict[str, Any]:
        if not self._sharded:
            return super().common_state()
        names = ("known", "mastered", "steps")
        return {**super().state_dict(), "shards": [{name: vars(flat)[name] for name in names} for flat in self._flats]}

    def load_common_state(self, state: dict[str, Any], keeps_shards: bool) -> None:
        if not self._sharded:
            super().load_common_state(state, keeps_shards)
            return
        self._load_by_torch({key: value for key, value in state.items() if key != "shards"})
        for bucket, flat, flags in zip(self.engine.gradient_buckets, self._flats, state["shards"], strict=True):
            if not keeps_shards:
                self._empty(flat, slice(0, 0))
                self._empty(self._mirrors[bucket.index], slice(0, 0))
            flat.known, flat.mastered = list(flags["known"]), list(flags["mastered"])
            flat.steps.copy_(flags["steps"])
            flat.compare_updates()
            self._publish(bucket, flat, [k for k, known in enumerate(flat.known) if known])

    def regroup(self, has_state: bool) -> None:
        if not self._sharded:
            return
        from kfuse.optim import sharding

        buckets, names = self.engine.gradient_buckets, [self._names_of(flat) for flat in self._flats]
        shards = [self._shards_of(bucket) for bucket in buckets]
        moved = sharding.regroup(self.engine, shards, names, has_state)
        for bucket, own, mirror, held in zip(buckets, self._flats, self._mirrors, moved, strict=True):
            mirror.steps, mirror.together = own.steps.clone(), own.together
            mirror.known, mirror.mastered = list(own.known), list(own.mastered)
            for flat, place in ((own, bucket.shard), (mirror, bucket.mirrored)):
                self._empty(flat, place)
                tensors = {name: t for part in held if part.place == place for name, t in part.tensors.items()}
                flat.master = tensors.pop(MASTER, None)
                flat.moments = tensors or (self._new_moments(bucket, flat) if any(flat.known) else {})
                if flat.master is None and flat.param.dtype != torch.float32:
                    flat.master = flat.param[place].float()
            self._laid_out(bucket, own, mirror)

    def collect_parameters(self, rank: int, has_state: bool) -> None:
        from kfuse.optim import sharding

        buckets = self.engine.gradient_buckets
        sharding.collect(self.engine, [self._shards_of(b) if has_state else [] for b in buckets], rank)

    def held(self) -> list[Held]:
        """Of each bucket, this worker's shard of the state: the tensors that updates change."""
        return [Held(flat.place, flat.tensors()) for flat in self._flats]

    def take_shards(self, shards: Sequence[Sequence[Held]]) -> None:
        """After `load_common_state`: parts of each bucket's state, any workers'. They come to their owners by
        `regroup`.
        """
        for bucket, flat, parts in zip(self.engine.gradient_buckets, self._flats, shards, strict=True):
            flat.others = [
                Held(part.place, {name: tensor.to(bucket.device) for name, tensor in part.tensors.items()})
                for part in parts
            ]

    def _names_of(self, flat: Flat) -> tuple[str, ...]:
        """Of the tensors that the bucket's state has, the same on every worker. Masters are made from parameters before
        they are state.
        """
        moments = self._moment_names if any(flat.known) else ()
        return (*moments, MASTER) if flat.param.dtype != torch.float32 and any(flat.mastered) else moments

    def _hand_over(self, new_ranks: Sequence[int | None], size: int) -> None:
        if self._sharded and None in new_ranks:
            from kfuse.optim import sharding

            shards = [self._shards_of(bucket) for bucket in self.engine.gradient_buckets]
            sharding.hand_over(self.engine, shards, [self._names_of(flat) for flat in self._flats], new_ranks, size)

    def _build_engine(self) -> None:
        """Where buckets are laid out anew, as after freezing a layer, shards are gathered before, from all workers."""
        flats = getattr(self, "_flats", [])
        gathers = bool(flats) and self._sharded and any(any(flat.known) or any(flat.mastered) for flat in flats)
        if gathers:
            self.engine.group.meet("opt.rebuild() or opt.add_param_group(), with comm.state=sharded")
            self._show(None)
        try:
            super()._build_engine()
        except Exception:
            if gathers:
                self._hide()
            raise

    def make_room(self, state_dict: dict[str, Any]) -> None:
        """Makes the flat state tensors that `state_dict` has and this optimizer has not, zeros. Shards come apart."""
        if self._sharded:
            return
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        states = {id(p): state_dict["state"].get(key, {}) for p, key in zip(params, saved, strict=False)}
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            theirs = [states.get(id(p), {}) for p in self._params_of(bucket)]
            missing = [k for k, state in enumerate(theirs) if not flat.known[k] and self._has_moments(state)]
            if missing:
                self._first_update(bucket, flat, missing)
            self._publish_masters(bucket, flat, [k for k, state in enumerate(theirs) if MASTER in state])

    def _take_state(self, bucket: Bucket, flat: Flat, *, last: bool = True) -> None:
        """Moves what torch has loaded into `state` to its place in the flat buffers. What lies there is not copied.

        last: no other part of it is to be taken. With sharded state `state` then has the numbers of updates only.
        """
        params = self._params_of(bucket)
        states: list[dict[str, Any]] = [self.state.get(p, {}) for p in params]
        flat.known = [self._has_moments(state) for state in states]
        if not any(flat.known):
            flat.moments = {}
        elif not flat.moments:
            flat.moments = self._new_moments(bucket, flat)
        for name, moment in flat.moments.items():
            self._fill(bucket, flat, moment, [state.get(name) for state in states])
        mastered = [state.get(MASTER) is not None for state in states]
        if flat.param.dtype != torch.float32:  # another optimizer, torch's above all, has saved no master
            if flat.master is None:
                flat.master = torch.zeros(flat.width, device=bucket.device)
            values = [state.get(MASTER, p.data) for state, p in zip(states, params, strict=True)]
            self._fill(bucket, flat, flat.master, values)
        fill(flat.steps, [number(state.get("step", 0.0)) for state in states])
        flat.compare_updates()
        flat.mastered = [flat.known[k] or mastered[k] for k in range(len(params))]
        if not last:
            return
        for state in states:
            for name in (MASTER, *(self._moment_names if bucket.sharded else ())):
                state.pop(name, None)
        flat.mastered = [False] * len(params)
        self._publish(bucket, flat, [k for k, known in enumerate(flat.known) if known])
        self._publish_masters(bucket, flat, [k for k in range(len(params)) if flat.known[k] or mastered[k]])

    def _new_moments(self, bucket: Bucket, flat: Flat) -> dict[str, Tensor]:
        return {name: torch.zeros(flat.width, device=bucket.device) for name in self._moment_names}

    def _fill(self, bucket: Bucket, flat: Flat, tensor: Tensor, values: Sequence[Tensor | None]) -> None:
        """Copies the parameters' values to a moment, or to the masters; of a shard the part that lies in it."""
        if bucket.sharded:
            fill_part(bucket, flat, tensor, values)
        else:
            fill(bucket.view(tensor), values)

    def _has_moments(self, state: dict[str, Any]) -> bool:
        return any(state.get(name) is not None for name in self._moment_names)

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (p, label) in zip(saved, self._named_parameters(), strict=False):  # torch's own checks the numbers
            for name in (*self._moment_names, MASTER):
                value = state_dict["state"].get(key, {}).get(name)
                if value is not None and value.shape != p.shape:
                    raise ValueError(
                        f"{label} of shape {tuple(p.shape)}: the saved {name} has shape {tuple(value.shape)}"
                    )

    @property
    def _skips_on_device(self) -> bool:
        return True

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        """Whether an update with this group's settings makes state, or needs the state that is there."""
        return True

    def _skips_first(self, group: dict[str, Any], found_inf: Tensor | None) -> bool:
        """Whether a first update is skipped, and so remains to be made.

        A CUDA device is not asked, since that would wait for it: a state of zeros gives the first update too.
        """
        return found_inf is not None and not devices.of(found_inf.device).asynchronous and bool(found_inf.item())

    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._check_state()
        self._run_update(lambda bucket: self._update_bucket(bucket, reduced, scale, found_inf))

    def _run_update(self, update: Callable[[Bucket], None]) -> None:
        """Updates this worker's part of each bucket, and shares it. Raises CommError."""
        try:
            for bucket in self.engine.updates():
                update(bucket)
        except CommError:
            self._renew_parameters()
            raise

    def _check_state(self) -> None:
        """Before an update: options and parameters may have been changed by the user."""
        self._refuse_options(self.param_groups, _OTHER_ARITHMETIC)
        resumes = self.engine.kept is not None and self.engine.kept.resumed
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            if flat.place != bucket.shard and not resumes:  # made before this group was formed
                if any(flat.known) or any(flat.mastered):
                    raise RuntimeError(
                        "comm.state=sharded: the group has changed, and the optimizer's state was not moved"
                    )
                self._empty(flat, bucket.shard)
                self._take_state(bucket, flat)
                self._laid_out(bucket, flat)
        self._keep_flat()

    def _update_bucket(self, bucket: Bucket, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        for flat in self._shards_of(bucket):
            for piece, skip in self._pieces(bucket, flat, reduced, found_inf):
                self._update_piece(piece, bucket, scale, skip)

    def _settings_of(self, bucket: Bucket) -> dict[str, Any]:
        """Its parameter group."""
        return self.param_groups[self._group_of[bucket.layout.params[0]]]

    def _shards_of(self, bucket: Bucket) -> list[Flat]:
        """What this worker keeps of a bucket's state: its own part, and what it mirrors."""
        own, mirror = self._flats[bucket.index], self._mirrors[bucket.index]
        return [own, mirror] if mirror.width else [own]

    def _pieces(
        self, bucket: Bucket, flat: Flat, reduced: Reduced, found_inf: Tensor | None
    ) -> list[tuple[Piece, Tensor | None]]:
        """What is to be updated of a bucket: pieces, each with its `found_inf`. Makes the state that is needed.

        Updates are counted on each worker, also those of parameters that are not its own.
        """
        params = self._params_of(bucket)
        bucket.take_visible()
        keeps = self._keeps_state(self._settings_of(bucket))
        used = [p.grad is not None for p in params]
        certain = self._in_doubt.isdisjoint(bucket.layout.params)
        every = range(len(params))
        pieces: list[tuple[Piece | None, Tensor | None]] = []
        if all(used) and certain and (flat.together or not keeps):
            first = keeps and not flat.known[0]
            if self._prepare(bucket, flat, every, first, found_inf):
                flat.steps.add_(1.0 if found_inf is None else 1.0 - found_inf)
                pieces.append((piece_of(bucket, flat, every, first), found_inf))
        else:
            # Some parameters had no gradient on any worker, now or before: torch leaves those alone, so must we.
            flat.together = flat.together and not keeps
            for k in (k for k in every if used[k]):
                skip = self._skip_of(bucket.layout.params[k], reduced, found_inf)
                first = keeps and not flat.known[k]
                if self._prepare(bucket, flat, [k], first, skip):
                    flat.steps[k].add_(1.0 if skip is None else 1.0 - skip)
                    pieces.append((piece_of(bucket, flat, range(k, k + 1), first), skip))
        return [(piece, skip) for piece, skip in pieces if piece is not None]

    def _prepare(
        self, bucket: Bucket, flat: Flat, which: Collection[int], first: bool, found_inf: Tensor | None
    ) -> bool:
        """Makes the state that the update of these parameters needs. False: the update is left out. first: it is their
        first one.
        """
        if first and self._skips_first(self._settings_of(bucket), found_inf):
            return False
        if first:
            self._first_update(bucket, flat, which)
        self._publish_masters(bucket, flat, which)
        return True

    def _skip_of(self, index: int, reduced: Reduced, found_inf: Tensor | None) -> Tensor | None:
        """`found_inf` for one parameter: not 0 either where it is in doubt, and no worker gave it a gradient."""
        if index not in self._in_doubt:
            return found_inf
        assert reduced.used is not None
        unused = (reduced.used[index] == 0).to(torch.float32)
        return unused if found_inf is None else torch.maximum(unused, found_inf)

    def _first_update(self, bucket: Bucket, flat: Flat, which: Collection[int]) -> None:
        flat.moments = flat.moments or self._new_moments(bucket, flat)
        if flat is self._flats[bucket.index]:
            self._publish(bucket, flat, which)
        for k in which:
            flat.known[k] = True

    def _keep_flat(self) -> None:
        """Copies parameters whose `.data` was replaced since the last step back into the flat buffers.

        Raises RuntimeError where it has another shape, type or device now, ValueError where two share their memory.
        """
        moved: list[tuple[Parameter, Tensor]] = []
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            start = flat.param.data_ptr()
            for index, offset in zip(bucket.layout.params, bucket.layout.offsets, strict=True):
                p = self.engine.params[index]
                if p.data_ptr() != start + flat.param.element_size() * offset and p.numel():
                    place = bucket.view(flat.param)[bucket.layout.params.index(index)]
                    check_replaced(self.engine.names[index], place, p)
                    moved.append((p, place))
                    if p.stride() != place.stride():
                        self._warn_once(_OTHER_LAYOUT, self.engine.names[index])
                    if p.device.type == "cpu" and p.is_shared():  # type: ignore[no-untyped-call]
                        self._warn_once(_SHARED_MEMORY, self.engine.names[index])
        if moved:
            self._check_layout()
            values = [p.data.clone() for p, _ in moved]  # they may lie in each other's places
            for (p, place), value in zip(moved, values, strict=True):
                place.copy_(value)
                p.data = with_own_storage(place)

    def _renew_parameters(self) -> None:
        """Messages under way may still write to the parameters' memory, at any time: takes another one."""
        for bucket, flat, mirror in zip(self.engine.gradient_buckets, self._flats, self._mirrors, strict=True):
            flat.param = mirror.param = bucket.parameters = flat.param.clone()
            for p, view in zip(self._params_of(bucket), bucket.view(flat.param), strict=True):
                p.data = with_own_storage(view)

    def weights(self) -> list[Tensor]:
        """The masters in place of 16-bit parameters, with the changes that were made to the parameters since."""
        self._keep_flat()
        masters: dict[int, Tensor] = {}
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            if flat.master is not None:
                same = flat.master.to(flat.param.dtype) == flat.param  # the host does not look: it would wait for a GPU
                torch.where(same, flat.master, flat.param, out=flat.master)
                masters.update(zip(bucket.layout.params, bucket.view(flat.master), strict=True))
        return [masters.get(index, p.detach()) for index, p in enumerate(self.engine.params)]

    def weights_changed(self) -> None:
        for flat in self._flats:
            if flat.master is not None:
                flat.param.copy_(flat.master)

    def _warn_once(self, message: str, name: str) -> None:
        if message not in self._warned:
            self._warned = (*self._warned, message)
            logging.getLogger("kfuse").warning(message, name, type(self).__name__)

    @abstractmethod
    def _update_piece(self, piece: Piece, bucket: Bucket, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates a piece's parameters and moments in place, with the settings of the bucket's parameter group.

        scale, found_inf: as for `_update`.
        """
