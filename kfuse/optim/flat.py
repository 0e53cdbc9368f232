"""Optimizers that keep parameters and state in flat buffers, one per bucket, and update each by one kernel call."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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
from kfuse.kernels import PackTable, take_changed
from kfuse.optim.base import DistributedOptimizer

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
    _skips_on_device = True
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
        param = _gather(bucket, [p.data for p in params], bucket.layout.dtype)
        for p, view in zip(params, bucket.view(param), strict=True):
            p.data = _with_own_storage(view)
        states: list[dict[str, Any]] = [self.state.get(p, {}) for p in params]
        master = None
        if param.dtype != torch.float32:  # another optimizer, torch's above all, has saved no master
            weights = [state.get(_MASTER, p.data) for state, p in zip(states, params, strict=True)]
            master = _gather(bucket, weights)
        steps = torch.tensor([float(state.get("step", 0.0)) for state in states], device=bucket.device)
        known = [any(state.get(name) is not None for name in self._moment_names) for state in states]
        moments = {}
        for name in self._moment_names if any(known) else ():
            moments[name] = _gather(bucket, [state.get(name) for state in states])
        together = len(set(known)) == 1 and len(set(steps.tolist())) == 1
        flat = Flat(param, master, moments, steps, known, together)
        for k, p in enumerate(params):
            has_master = _MASTER in states[k]
            states[k].pop(_MASTER, None)
            if known[k]:
                self._publish(p, flat, bucket, k)
            if known[k] or has_master:
                self._publish_masters(params, flat, bucket, [k])
        return flat

    def _params_of(self, bucket: Bucket) -> list[Parameter]:
        return [self.engine.params[i] for i in bucket.layout.params]

    def _publish(self, p: Parameter, flat: Flat, bucket: Bucket, k: int) -> None:
        """Makes the flat state visible as torch's `state[p]`."""
        self.state[p].update({name: bucket.view(moment)[k] for name, moment in flat.moments.items()})

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
        with self._state_kept_fp32():
            super().load_state_dict(state_dict)
        self._layout_changed()

    @contextmanager
    def _state_kept_fp32(self) -> Iterator[None]:
        """Context in which load_state_dict leaves moments and masters as they are.

        torch rounds a state tensor to its parameter's dtype. It leaves objects alone that it does not know, and it asks
        the hook that was registered last, which sees what other hooks made of the state.
        """
        kept = {*self._moment_names, _MASTER}

        def hide(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            states = {
                key: {name: _Kept(value) if name in kept and value is not None else value for name, value in of.items()}
                for key, of in state_dict["state"].items()
            }
            return state_dict | {"state": states}

        def show(_: Any) -> None:
            for p, state in self.state.items():
                for name, value in state.items():
                    if isinstance(value, _Kept):
                        state[name] = value.tensor.to(p.device, torch.float32)

        before = self.register_load_state_dict_pre_hook(hide)
        after = self.register_load_state_dict_post_hook(show, prepend=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (p, label) in zip(saved, self._named_parameters(), strict=False):  # torch's own checks the numbers
            for name in (*self._moment_names, _MASTER):
                value = state_dict["state"].get(key, {}).get(name)
                if value is not None and value.shape != p.shape:
                    raise ValueError(
                        f"{label} of shape {tuple(p.shape)}: the saved {name} has shape {tuple(value.shape)}"
                    )

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
                if first and self._skips_first(group, found_inf):
                    continue
                if first:
                    self._first_update(params, flat, bucket, range(len(params)))
                self._publish_masters(params, flat, bucket, range(len(params)))
                flat.steps.add_(1.0 if found_inf is None else 1.0 - found_inf)
                whole = Piece(bucket.table, flat.param, flat.master, bucket.mean, flat.moments, flat.steps[0], first)
                self._update_piece(whole, group, scale, found_inf)
                continue
            # Some parameters had no gradient on any worker, now or before: torch leaves those alone, so must we.
            flat.together = flat.together and not keeps
            for k in (k for k, has_gradient in enumerate(used) if has_gradient):
                skip = self._skip_of(bucket.layout.params[k], reduced, found_inf)
                first = keeps and not flat.known[k]
                if first and self._skips_first(group, skip):
                    continue
                if first:
                    self._first_update(params, flat, bucket, [k])
                self._publish_masters(params, flat, bucket, [k])
                flat.steps[k].add_(1.0 if skip is None else 1.0 - skip)
                moments = {name: bucket.place(moment, k) for name, moment in flat.moments.items()}
                master = None if flat.master is None else bucket.place(flat.master, k)
                param, grad = bucket.place(flat.param, k), bucket.place(bucket.mean, k)
                table = _one_tensor(param.numel(), param.device)
                alone = Piece(table, param, master, grad, moments, flat.steps[k], first)
                self._update_piece(alone, group, scale, skip)

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
        for k in which:
            self._publish(params[k], flat, bucket, k)
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
                take_changed(flat.param, flat.master)
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


@cache
def _one_tensor(numel: int, device: torch.device) -> PackTable:
    """The table of a piece that is a single parameter."""
    return PackTable.build([numel], [0], device)


@dataclass(frozen=True)
class _Kept:
    """A state tensor that torch's load_state_dict does not see."""

    tensor: Tensor


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


def _gather(bucket: Bucket, tensors: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat buffer in the bucket's layout with these values (None: zeros)."""
    flat = torch.zeros(bucket.body, dtype=dtype, device=bucket.device)
    for view, tensor in zip(bucket.view(flat), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor)
    return flat
