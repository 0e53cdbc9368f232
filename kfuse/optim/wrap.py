"""Any torch optimizer, data-parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.updates import Update, Updates

# Their state tensors are all zeros before the first update.
_BEGIN_WITH_ZEROS = tuple(
    getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Adadelta")
)


class Optimizer(DistributedOptimizer):
    """Wraps a torch optimizer: gradients are reduced and measured by kfuse, the update is the optimizer's own.

    Shares `param_groups` and `state` with it, so learning-rate schedulers may be given either.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        skip_nonfinite: bool | None = None,
    ) -> None:
        """Raises TypeError for what is not a torch optimizer, or is a kfuse one already.

        clip_norm: limit of the mean gradient's global norm. skip_nonfinite: leaves a step out where a gradient is not
        finite; rank 0 warns either way. None: where that costs no wait.

        On CUDA only torch's Adam and AdamW with fused=True leave a step out, or a parameter that no worker gave a
        gradient, without the host. With any other optimizer the host waits for the device in each step with a
        GradScaler or with skip_nonfinite=True (so None is False there), and, with several workers, in each step in
        which this worker gives a parameter no gradient.

        bf16 parameters are updated as torch does it: in bf16, from gradients that were averaged in fp32 and rounded.
        There are no fp32 master weights, so an update smaller than the spacing of bf16 numbers is lost; FusedAdamW,
        FusedSGD and FusedLAMB keep masters. An optimizer that needs a closure (LBFGS), or sparse gradients
        (SparseAdam), fails at its first step.
        """
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"kf.Optimizer wraps a torch.optim.Optimizer, not {type(optimizer).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self.state = optimizer.state
        optimizer.param_groups = self.param_groups
        updates = TorchUpdates(self, optimizer)
        if skip_nonfinite is None:
            on_gpu = any(devices.of(p.device).asynchronous for group in self.param_groups for p in group["params"])
            skip_nonfinite = updates.skips_on_device or not on_gpu
        self._attach(updates, clip_norm, skip_nonfinite)


class TorchUpdates(Updates):
    """Makes updates by a torch optimizer's own `step`."""

    def __init__(self, opt: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
        """opt: shares groups and state with `inner`."""
        super().__init__(opt)
        self._inner = inner

    def state_dict(self, only: int | None = None) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any], whole: bool = False) -> None:
        """Also shares the wrapped optimizer's groups and state again, since loading replaces them."""
        self._inner.load_state_dict(state)
        self.opt.param_groups, self.opt.state = self._inner.param_groups, self._inner.state

    @property
    def skips_on_device(self) -> bool:
        """Its fused kernel takes `found_inf`, from the device, and its state begins with zeros."""
        known = type(self._inner) in (torch.optim.Adam, torch.optim.AdamW)
        return known and all(group.get("fused") for group in self._inner.param_groups)

    def update(self, given: Update) -> None:
        scale, found_inf = given.scaled.factor, given.scaled.skip
        on_device = self.skips_on_device and devices.of(self.engine.device).asynchronous
        if found_inf is not None and not on_device and found_inf.item():
            return
        if scale is not None:
            if on_device and found_inf is not None:  # by NaN or inf the buckets' padding would be NaN from then on
                scale = torch.where(found_inf != 0, 1.0, scale)
            for bucket in self.engine.gradient_buckets:
                bucket.visible.mul_(scale)
        in_doubt = {i: self._state_of(p) for i in given.in_doubt if (p := self.engine.params[i]).grad is not None}
        with self._prepared(given.lr_factor, found_inf if on_device else None):
            self._inner.step()
        for index, before in in_doubt.items():
            assert given.reduced.used is not None
            used = given.reduced.used[index] > 0
            for name, value in self._state_of(self.engine.params[index], copy=False).items():
                value.copy_(torch.where(used, value, before.get(name, 0.0)))

    def make_state(self, lacking: Sequence[int]) -> None:
        """By an update with a gradient of zero, which the parameters do not keep.

        The state of torch's common optimizers is set to zeros afterwards, which is theirs before the first update; that
        of any other stays as after this update.
        """
        if not lacking:
            return
        params = self.engine.params
        gradients, values = [p.grad for p in params], {index: params[index].detach().clone() for index in lacking}
        for index, p in enumerate(params):
            p.grad = torch.zeros_like(p) if index in values else None
        try:
            self._inner.step()
        finally:
            for index, value in values.items():
                params[index].copy_(value)
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
        if type(self._inner) in _BEGIN_WITH_ZEROS:
            for index in lacking:
                for state in self._states_of(params[index]):
                    state.zero_()

    def _state_of(self, p: Tensor, copy: bool = True) -> dict[str, Tensor]:
        """A parameter, as "", and the tensors of its state, by name."""
        tensors = {k: v for k, v in self._inner.state.get(p, {}).items() if isinstance(v, Tensor)} | {"": p.detach()}
        return {name: value.clone() if copy else value for name, value in tensors.items()}

    @contextmanager
    def _prepared(self, lr_factor: float, found_inf: Tensor | None) -> Iterator[None]:
        """Gradients, learning rates and `found_inf` as the inner step is to see them; afterwards they are as before.

        Each gradient has its parameter's strides, also where these have changed since the buckets were made: torch's
        fused updates on the CPU take the elements of both in the order of their memory, and check nothing.
        """
        gradients = [(p, p.grad) for p in self.engine.params if p.grad is not None and p.grad.stride() != p.stride()]
        rates = [(group, group["lr"]) for group in self._inner.param_groups if lr_factor != 1.0]
        try:
            for p, gradient in gradients:
                p.grad = torch.empty_like(p).copy_(gradient)
            for group, rate in rates:
                group["lr"] = rate * lr_factor
            if found_inf is not None:  # the fused kernel compares with 1
                self._inner.found_inf = (found_inf != 0).to(torch.float32)  # type: ignore[attr-defined]
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for group, rate in rates:
                group["lr"] = rate
            vars(self._inner).pop("found_inf", None)
