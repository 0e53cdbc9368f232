"""Optimizers that keep parameters and state in flat buffers, one per bucket, and update each by one kernel call."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack

from kfuse.comm import devices
from kfuse.comm.buckets import Bucket
from kfuse.comm.plan import Reduced
from kfuse.kernels import PackTable
from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.parameters import loading_as_fp32

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

_MASTER = "master"
"""The name in `state` of a 16-bit parameter's fp32 weights."""


@dataclass
class Flat:
    """A bucket's parameters and optimizer state. Tensors are flat, in the bucket's layout."""

    param: Tensor
    """In the parameters' dtype: their own memory."""
    master: Tensor | None
    """The weights that are updated where `param` is 16-bit: fp32, of which `param` holds the rounded values."""
    moments: dict[str, Tensor]
    """State tensors shaped like the parameter, by torch's names; empty until an update needs them."""
    steps: Tensor
    """fp32 [parameters]: updates each one has had."""
    known: list[bool]
    """Whether the parameter has state (torch makes it at the first update)."""
    together: bool
    """All of the bucket's parameters have had the same updates, so that one call can do them all."""


class Piece(NamedTuple):
    """What one call updates: a bucket, or one parameter of it.

    All tensors are flat and of one length, and fp32, but for 16-bit parameters, which have a master.
    """

    table: PackTable
    """How the piece is cut into parameters."""
    param: Tensor
    master: Tensor | None
    grad: Tensor
    moments: dict[str, Tensor]
    step: Tensor
    """0-dim fp32, the number of this update, from 1."""
    first: bool
    """It is the first update of these parameters."""


class FlatOptimizer(DistributedOptimizer):
    """Keeps torch's per-parameter `state` as views of flat buffers, so that state_dict is torch's own.

    A 16-bit parameter's moments are fp32, and `state` has its fp32 weights too, as "master". torch's optimizers leave
    that entry alone, and round the moments to the parameter's dtype as they load them.

    A subclass sets `_moment_names` and implements `_update_piece`.
    """

    _moment_names: tuple[str, ...]
    """Names of the state tensors shaped like the parameter, as torch's optimizer of the same kind names them."""
    _weight_names = (_MASTER,)
    _warned: tuple[str, ...] = ()

    def _check_layout(self) -> None:
        """Raises ValueError if two parameters share memory: in flat buffers each has its own place."""
        self._refuse_options(self.param_groups, _OTHER_ARITHMETIC)
        _refuse_overlaps(self._named_parameters())

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
        self._flats = [self._flatten(bucket) for bucket in self.engine.gradient_buckets]

    def _flatten(self, bucket: Bucket) -> Flat:
        params = self._params_of(bucket)
        if devices.of(bucket.device).asynchronous:
            for p in params:  # later the host would wait until the table is on the device
                _one_tensor(p.numel(), p.device)
        param = torch.zeros(bucket.body, dtype=bucket.layout.dtype, device=bucket.device)
        views = bucket.view(param)
        _fill(views, [p.data for p in params])
        for p, view in zip(params, views, strict=True):
            p.data = _with_own_storage(view)
        master = None if param.dtype == torch.float32 else torch.zeros(bucket.body, device=bucket.device)
        flat = Flat(param, master, {}, torch.zeros(len(params), device=bucket.device), [], True)
        self._take_state(bucket, flat)
        return flat

    def _params_of(self, bucket: Bucket) -> list[Parameter]:
        return [self.engine.params[i] for i in bucket.layout.params]

    def _publish(self, params: list[Parameter], flat: Flat, bucket: Bucket, which: Collection[int]) -> None:
        """Makes the flat state of these parameters visible as torch's `state`."""
        for name, moment in flat.moments.items():
            views = bucket.view(moment)
            for k in which:
                self.state[params[k]][name] = views[k]

    def _publish_masters(self, params: list[Parameter], flat: Flat, bucket: Bucket, which: Collection[int]) -> None:
        """Makes the masters of these parameters visible in `state`: from the first update on, as torch makes state."""
        if flat.master is not None and any(_MASTER not in self.state.get(params[k], {}) for k in which):
            views = bucket.view(flat.master)
            for k in which:
                self.state[params[k]][_MASTER] = views[k]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class, or torch's optimizer of the same kind, saved.

        Raises ValueError where it does not fit the parameters; then nothing is loaded.
        """
        self._refuse_options(state_dict["param_groups"], _NEVER_LOADED)
        self._check_shapes(state_dict)
        with loading_as_fp32(self, {*self._moment_names, _MASTER}):
            super().load_state_dict(state_dict)
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            self._take_state(bucket, flat)

    def make_room(self, state_dict: dict[str, Any]) -> None:
        """Makes the flat state tensors that `state_dict` has and this optimizer has not, zeros."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        states = {id(p): state_dict["state"].get(key, {}) for p, key in zip(params, saved, strict=False)}
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            mine = self._params_of(bucket)
            theirs = [states.get(id(p), {}) for p in mine]
            missing = [k for k, state in enumerate(theirs) if not flat.known[k] and self._has_moments(state)]
            if missing:
                self._first_update(mine, flat, bucket, missing)
            self._publish_masters(mine, flat, bucket, [k for k, state in enumerate(theirs) if _MASTER in state])

    def _take_state(self, bucket: Bucket, flat: Flat) -> None:
        """Moves what torch has loaded into `state` to its place in the flat buffers. What lies there is not copied."""
        params = self._params_of(bucket)
        states: list[dict[str, Any]] = [self.state.get(p, {}) for p in params]
        flat.known = [self._has_moments(state) for state in states]
        if not any(flat.known):
            flat.moments = {}
        elif not flat.moments:
            flat.moments = {name: torch.zeros(bucket.body, device=bucket.device) for name in self._moment_names}
        for name, moment in flat.moments.items():
            _fill(bucket.view(moment), [state.get(name) for state in states])
        if flat.master is not None:  # another optimizer, torch's above all, has saved no master
            _fill(
                bucket.view(flat.master), [state.get(_MASTER, p.data) for state, p in zip(states, params, strict=True)]
            )
        _fill(flat.steps, [_number(state.get("step", 0.0)) for state in states])
        flat.together = len(set(flat.known)) == 1 and len(set(flat.steps.tolist())) == 1
        had_master = [state.pop(_MASTER, None) is not None for state in states]
        self._publish(params, flat, bucket, [k for k, known in enumerate(flat.known) if known])
        self._publish_masters(params, flat, bucket, [k for k in range(len(params)) if flat.known[k] or had_master[k]])

    def _has_moments(self, state: dict[str, Any]) -> bool:
        return any(state.get(name) is not None for name in self._moment_names)

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (p, label) in zip(saved, self._named_parameters(), strict=False):  # torch's own checks the numbers
            for name in (*self._moment_names, _MASTER):
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
        self._refuse_options(self.param_groups, _OTHER_ARITHMETIC)
        self._keep_flat()
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            bucket.take_visible()
            params = self._params_of(bucket)
            group = self.param_groups[self._group_of[bucket.layout.params[0]]]
            keeps = self._keeps_state(group)
            used = [p.grad is not None for p in params]
            certain = self._in_doubt.isdisjoint(bucket.layout.params)
            if all(used) and certain and (flat.together or not keeps):
                first = keeps and not flat.known[0]
                if self._prepare(params, flat, bucket, range(len(params)), group, first, found_inf):
                    flat.steps.add_(1.0 if found_inf is None else 1.0 - found_inf)
                    grad, step = bucket.mean, flat.steps[0]
                    whole = Piece(bucket.table, flat.param, flat.master, grad, flat.moments, step, first)
                    self._update_piece(whole, group, scale, found_inf)
                continue
            # Some parameters had no gradient on any worker, now or before: torch leaves those alone, so must we.
            flat.together = flat.together and not keeps
            for k in (k for k, has_gradient in enumerate(used) if has_gradient):
                skip = self._skip_of(bucket.layout.params[k], reduced, found_inf)
                first = keeps and not flat.known[k]
                if self._prepare(params, flat, bucket, [k], group, first, skip):
                    flat.steps[k].add_(1.0 if skip is None else 1.0 - skip)
                    self._update_piece(_alone(bucket, flat, k, first), group, scale, skip)

    def _prepare(
        self,
        params: list[Parameter],
        flat: Flat,
        bucket: Bucket,
        which: Collection[int],
        group: dict[str, Any],
        first: bool,
        found_inf: Tensor | None,
    ) -> bool:
        """Makes the state that the update of these parameters needs. False: the update is left out. first: it is their
        first one.
        """
        if first and self._skips_first(group, found_inf):
            return False
        if first:
            self._first_update(params, flat, bucket, which)
        self._publish_masters(params, flat, bucket, which)
        return True

    def _skip_of(self, index: int, reduced: Reduced, found_inf: Tensor | None) -> Tensor | None:
        """`found_inf` for one parameter: not 0 either where it is in doubt, and no worker gave it a gradient."""
        if index not in self._in_doubt:
            return found_inf
        assert reduced.used is not None
        unused = (reduced.used[index] == 0).to(torch.float32)
        return unused if found_inf is None else torch.maximum(unused, found_inf)

    def _first_update(self, params: list[Parameter], flat: Flat, bucket: Bucket, which: Collection[int]) -> None:
        if not flat.moments:
            flat.moments = {name: torch.zeros(bucket.body, device=bucket.device) for name in self._moment_names}
        self._publish(params, flat, bucket, which)
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
                    _check_replaced(self.engine.names[index], place, p)
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
                p.data = _with_own_storage(place)

    def _weights(self) -> list[Tensor]:
        """The masters in place of 16-bit parameters, with the changes that were made to the parameters since."""
        self._keep_flat()
        masters: dict[int, Tensor] = {}
        for bucket, flat in zip(self.engine.gradient_buckets, self._flats, strict=True):
            if flat.master is not None:
                same = flat.master.to(flat.param.dtype) == flat.param  # the host does not look: it would wait for a GPU
                torch.where(same, flat.master, flat.param, out=flat.master)
                masters.update(zip(bucket.layout.params, bucket.view(flat.master), strict=True))
        return [masters.get(index, p) for index, p in enumerate(self.engine.params)]

    def _weights_averaged(self) -> None:
        for flat in self._flats:
            if flat.master is not None:
                flat.param.copy_(flat.master)

    def _warn_once(self, message: str, name: str) -> None:
        if message not in self._warned:
            self._warned = (*self._warned, message)
            logging.getLogger("kfuse").warning(message, name, type(self).__name__)

    @abstractmethod
    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates a piece's parameters and moments in place. group: the settings of its parameter group.

        scale, found_inf: as for `_update`.
        """


def _alone(bucket: Bucket, flat: Flat, k: int, first: bool) -> Piece:
    """The bucket's k-th parameter as a piece. first: it is its first update."""
    moments = {name: bucket.place(moment, k) for name, moment in flat.moments.items()}
    master = None if flat.master is None else bucket.place(flat.master, k)
    param, grad = bucket.place(flat.param, k), bucket.place(bucket.mean, k)
    return Piece(_one_tensor(param.numel(), param.device), param, master, grad, moments, flat.steps[k], first)


@cache
def _one_tensor(numel: int, device: torch.device) -> PackTable:
    """The table of a piece that is a single parameter."""
    return PackTable.build([numel], [0], device)


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage begins and ends with it (and keeps the whole buffer alive).

    What writes a tensor writes its storage: torch.save of one layer would write the whole buffer.
    """
    if not view.numel():
        return view
    own = from_dlpack(view)  # which may set the stride of a dimension of one element to 1
    return own if own.stride() == view.stride() else own.as_strided(view.shape, view.stride())


def _check_replaced(name: str, place: Tensor, p: Parameter) -> None:
    was, now = (f"{tuple(t.shape)}, {t.dtype} on {t.device}" for t in (place, p))
    if was != now:
        raise RuntimeError(f"{name} was {was} and is {now} now: change the model first, then make its optimizer")


def _refuse_overlaps(named: list[tuple[Parameter, str]]) -> None:
    """Raises ValueError where two parameters lie in the same memory, as after `a.data = b.data`."""
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), i) for i, (p, _) in enumerate(named))
    ranges = [(start, end, i) for start, end, i in ranges if end > start]
    for (_, end, one), (start, _, other) in pairwise(ranges):
        if start < end:
            (p, first), (q, second) = (named[i] for i in sorted((one, other)))
            raise ValueError(
                f"{first} of shape {tuple(p.shape)} and {second} of shape {tuple(q.shape)} share their memory through "
                ".data: to tie weights, give both modules the same Parameter (b.weight = a.weight)"
            )


def _fill(places: Iterable[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copies each value to its place; None: zeros. One that lies there already is not copied."""
    for place, value in zip(places, values, strict=True):
        if value is None:
            place.zero_()
        elif value.data_ptr() != place.data_ptr():
            place.copy_(value)


def _number(value: Any) -> Tensor:
    """A number, or a tensor of one, as a 0-dim fp32 tensor; one that is so is returned itself."""
    return torch.as_tensor(value, dtype=torch.float32).reshape(())
