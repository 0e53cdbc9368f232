"""Optimizers whose parameters and state lie in flat buffers, one a bucket, updated by one kernel call each."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm.buckets import Bucket
from kfuse.comm.step import Reduced
from kfuse.kernels import PackTable
from kfuse.optim.base import DistributedOptimizer


@dataclass
class _Flat:
    """A bucket's parameters and optimizer state."""

    param: Tensor
    moments: dict[str, Tensor]
    """State tensors shaped like the parameter, by torch's names."""
    steps: Tensor
    """fp32 [parameters]: updates each one has had."""
    known: list[bool]
    """Whether the parameter has state (torch makes it at the first update)."""
    together: bool
    """All of the bucket's parameters have had the same updates, so that one call can do them all."""


@dataclass(frozen=True)
class Piece:
    """What one call updates: a bucket, or one parameter of it. All tensors are flat fp32 of one length."""

    table: PackTable
    """Where the parameters lie."""
    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    step: Tensor
    """0-dim fp32, the number of this update, counted already."""
    first: bool


class FlatOptimizer(DistributedOptimizer):
    """Keeps torch's per-parameter `state` as views of flat buffers, so that state_dict is torch's own."""

    _moment_names: tuple[str, ...]

    def _layout_changed(self) -> None:
        """Lays parameters and state out for the engine's buckets; values are kept."""
        self._flats = [self._flatten(bucket) for bucket in self.engine.of_params]

    def _flatten(self, bucket: Bucket) -> _Flat:
        params = self._params_of(bucket)
        param = _gather(bucket, [p.data for p in params])
        for p, view in zip(params, bucket.view(param), strict=True):
            p.data = view
        states: list[dict[str, Any]] = [self.state.get(p, {}) for p in params]
        moments = {}
        for name in self._moment_names:
            values = [state.get(name) for state in states]
            moments[name] = _gather(bucket, values)
        steps = torch.tensor([float(state.get("step", 0.0)) for state in states], device=bucket.device)
        known = [any(state.get(name) is not None for name in self._moment_names) for state in states]
        together = len(set(known)) == 1 and len(set(steps.tolist())) == 1
        flat = _Flat(param, moments, steps, known, together)
        for k, p in enumerate(params):
            if known[k]:
                self._publish(p, flat, bucket, k)
        return flat

    def _params_of(self, bucket: Bucket) -> list[Parameter]:
        return [self.engine.params[i] for i in bucket.layout.params]

    def _publish(self, p: Parameter, flat: _Flat, bucket: Bucket, k: int) -> None:
        """Makes the flat state visible as torch's `state[p]`."""
        self.state[p] = {name: bucket.view(moment)[k] for name, moment in flat.moments.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what this class, or torch's optimizer of the same kind, saved."""
        super().load_state_dict(state_dict)
        self._layout_changed()

    def _update(self, reduced: Reduced, scale: Tensor | None, found_inf: Tensor | None) -> None:
        for bucket, flat in zip(self.engine.of_params, self._flats, strict=True):
            params = self._params_of(bucket)
            self._keep_flat(bucket, flat, params)
            group = self.param_groups[self._group_of[bucket.layout.params[0]]]
            used = [p.grad is not None for p in params]
            advance = 1.0 if found_inf is None else 1.0 - found_inf
            if all(used) and flat.together:
                first = not flat.known[0]
                if first and _skips(found_inf):
                    continue  # it stays the first update
                if first:
                    self._first_update(params, flat, bucket, range(len(params)))
                flat.steps.add_(advance)
                grad = bucket.slots[0][: bucket.body]
                whole = Piece(bucket.table, flat.param, grad, flat.moments, flat.steps[0], first)
                self._update_piece(whole, group, scale, found_inf)
                continue
            # Some parameters had no gradient on any worker, now or before: torch leaves those alone, so must we.
            flat.together = False
            for k in (k for k, has_gradient in enumerate(used) if has_gradient):
                first = not flat.known[k]
                if first and _skips(found_inf):
                    continue
                if first:
                    self._first_update(params, flat, bucket, [k])
                flat.steps[k].add_(advance)
                moments = {name: bucket.view(moment)[k].view(-1) for name, moment in flat.moments.items()}
                param, grad = bucket.view(flat.param)[k].view(-1), bucket.views[k].view(-1)
                table = _one_tensor(param.numel(), param.device)
                alone = Piece(table, param, grad, moments, flat.steps[k], first)
                self._update_piece(alone, group, scale, found_inf)

    def _first_update(self, params: list[Parameter], flat: _Flat, bucket: Bucket, which: range | list[int]) -> None:
        for k in which:
            self._publish(params[k], flat, bucket, k)
            flat.known[k] = True

    def _keep_flat(self, bucket: Bucket, flat: _Flat, params: list[Parameter]) -> None:
        """Takes back parameters whose `.data` was replaced since the last step."""
        start = flat.param.data_ptr()
        for p, offset in zip(params, bucket.layout.offsets, strict=True):
            if p.data_ptr() != start + 4 * offset and p.numel():
                view = flat.param[offset : offset + p.numel()].view(p.shape)
                view.copy_(p.data)
                p.data = view

    @abstractmethod
    def _update_piece(
        self, piece: Piece, group: dict[str, Any], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates it in place, by its group's settings."""


@cache
def _one_tensor(numel: int, device: torch.device) -> PackTable:
    """The table of a piece that is a single parameter."""
    return PackTable.build([numel], [0], device)


def _skips(found_inf: Tensor | None) -> bool:
    """Waits for the device: asked before a first update only."""
    return found_inf is not None and bool(found_inf.item())


def _gather(bucket: Bucket, tensors: list[Any]) -> Tensor:
    """A flat buffer in the bucket's layout with these values (None: zeros)."""
    flat = torch.zeros(bucket.body, device=bucket.device)
    for view, tensor in zip(bucket.view(flat), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor)
    return flat
