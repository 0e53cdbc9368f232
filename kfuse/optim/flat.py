"""Optimizers that keep parameters and state in flat buffers, one per bucket, and update each by one kernel call."""

from __future__ import annotations

import logging
from abc import abstractmethod
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

_NEVER_LOADED = {"amsgrad": True, "differentiable": True}
_OTHER_ARITHMETIC = _NEVER_LOADED | {"decoupled_weight_decay": False}  # which AdamW sets to True as it loads


@dataclass
class Flat:
    """A bucket's parameters and optimizer state."""

    param: Tensor
    moments: dict[str, Tensor]
    """State tensors shaped like the parameter, by torch's names; empty until an update needs them."""
    steps: Tensor
    """fp32 [parameters]: updates each one has had."""
    known: list[bool]
    """Whether the parameter has state (torch makes it at the first update)."""
    together: bool
    """All of the bucket's parameters have had the same updates, so that one call can do them all."""


class Piece(NamedTuple):
    """What one call updates: a bucket, or one parameter of it. All tensors are flat fp32 of one length."""

    table: PackTable
    """How the piece is cut into parameters."""
    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    step: Tensor
    """0-dim fp32, the number of this update, from 1."""
    first: bool
    """It is the first update of these parameters."""


class FlatOptimizer(DistributedOptimizer):
    """Keeps torch's per-parameter `state` as views of flat buffers, so that state_dict is torch's own.

    A subclass sets `_moment_names` and implements `_update_piece`.
    """

    _moment_names: tuple[str, ...]
    """Names of the state tensors shaped like the parameter, as torch's optimizer of the same kind names them."""
    _warned_of_shared_memory = False

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
        param = _gather(bucket, [p.data for p in params])
        for p, view in zip(params, bucket.view(param), strict=True):
            p.data = _with_own_storage(view)
        states: list[dict[str, Any]] = [self.state.get(p, {}) for p in params]
        steps = torch.tensor([float(state.get("step", 0.0)) for state in states], device=bucket.device)
        known = [self._has_moments(state) for state in states]
        moments = {}
        for name in self._moment_names if any(known) else ():
            moments[name] = _gather(bucket, [state.get(name) for state in states])
        together = len(set(known)) == 1 and len(set(steps.tolist())) == 1
        flat = Flat(param, moments, steps, known, together)
        for k, p in enumerate(params):
            if known[k]:
                self._publish(p, flat, bucket, k)
        return flat

    def _params_of(self, bucket: Bucket) -> list[Parameter]:
        return [self.engine.params[i] for i in bucket.layout.params]

    def _publish(self, p: Parameter, flat: Flat, bucket: Bucket, k: int) -> None:
        """Makes the flat state visible as torch's `state[p]`."""
        self.state[p].update({name: bucket.view(moment)[k] for name, moment in flat.moments.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class, or torch's optimizer of the same kind, saved.

        Raises ValueError where it does not fit the parameters; then nothing is loaded.
        """
        self._refuse_options(state_dict["param_groups"], _NEVER_LOADED)
        self._check_shapes(state_dict)
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
            missing = [k for k, p in enumerate(mine) if not flat.known[k] and self._has_moments(states.get(id(p), {}))]
            if missing:
                self._first_update(mine, flat, bucket, missing)

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
            for place, state in zip(bucket.view(moment), states, strict=True):
                value = state.get(name)
                if value is None:
                    place.zero_()
                elif value.data_ptr() != place.data_ptr():
                    place.copy_(value)
        for place, state in zip(flat.steps, states, strict=True):
            step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).reshape(())
            if step.data_ptr() != place.data_ptr():
                place.copy_(step)
        flat.together = len(set(flat.known)) == 1 and len(set(flat.steps.tolist())) == 1
        for k, p in enumerate(params):
            if flat.known[k]:
                self._publish(p, flat, bucket, k)

    def _has_moments(self, state: dict[str, Any]) -> bool:
        return any(state.get(name) is not None for name in self._moment_names)

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (p, label) in zip(saved, self._named_parameters(), strict=False):  # torch's own checks the numbers
            for name in self._moment_names:
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
                flat.steps.add_(1.0 if found_inf is None else 1.0 - found_inf)
                whole = Piece(bucket.table, flat.param, bucket.mean, flat.moments, flat.steps[0], first)
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
                flat.steps[k].add_(1.0 if skip is None else 1.0 - skip)
                moments = {name: bucket.view(moment)[k].view(-1) for name, moment in flat.moments.items()}
                param, grad = bucket.view(flat.param)[k].view(-1), bucket.views[k].view(-1)
                table = _one_tensor(param.numel(), param.device)
                alone = Piece(table, param, grad, moments, flat.steps[k], first)
                self._update_piece(alone, group, scale, skip)

    def _skip_of(self, index: int, reduced: Reduced, found_inf: Tensor | None) -> Tensor | None:
        """`found_inf` for one parameter: not 0 either where it is in doubt, and no worker gave it a gradient."""
        if index not in self._in_doubt:
            return found_inf
        assert reduced.used is not None
        unused = (reduced.used[index] == 0).to(torch.float32)
        return unused if found_inf is None else torch.maximum(unused, found_inf)

    def _first_update(self, params: list[Parameter], flat: Flat, bucket: Bucket, which: range | list[int]) -> None:
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
                if p.data_ptr() != start + 4 * offset and p.numel():
                    place = bucket.view(flat.param)[bucket.layout.params.index(index)]
                    _check_replaced(self.engine.names[index], place, p)
                    moved.append((p, place))
                    if p.device.type == "cpu" and p.is_shared():  # type: ignore[no-untyped-call]
                        self._warn_of_shared_memory(self.engine.names[index])
        if moved:
            self._check_layout()
            values = [p.data.clone() for p, _ in moved]  # they may lie in each other's places
            for (p, place), value in zip(moved, values, strict=True):
                place.copy_(value)
                p.data = _with_own_storage(place)

    def _warn_of_shared_memory(self, name: str) -> None:
        """Warns once."""
        if not self._warned_of_shared_memory:
            self._warned_of_shared_memory = True
            logging.getLogger("kfuse").warning(
                "%s was moved to shared memory after %s was made, which moves it back: other processes do not see its "
                "updates. kf.Optimizer leaves parameters where they are.",
                name,
                type(self).__name__,
            )

    @abstractmethod
    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates a piece's parameters and moments in place. group: the settings of its parameter group.

        scale, found_inf: as for `_update`. All tensors of the piece are flat fp32 of one length.
        """


@cache
def _one_tensor(numel: int, device: torch.device) -> PackTable:
    """The table of a piece that is a single parameter."""
    return PackTable.build([numel], [0], device)


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage begins and ends with it (and keeps the whole buffer alive).

    What writes a tensor writes its storage: torch.save of one layer would write the whole buffer.
    """
    return from_dlpack(view) if view.numel() else view


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


def _gather(bucket: Bucket, tensors: list[Any]) -> Tensor:
    """A flat buffer in the bucket's layout with these values (None: zeros)."""
    flat = torch.zeros(bucket.body, device=bucket.device)
    for view, tensor in zip(bucket.view(flat), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor)
    return flat
