"""Any torch optimizer, or several over different parameters, data-parallel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.optim.base import DistributedOptimizer
from kfuse.optim.updates import COMMON, SEVERAL, Update, Updates, named_parameters

_STATE_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("state_dict", "load_state_dict") for when in ("pre", "post")
)


class Optimizer(DistributedOptimizer):
    """Wraps a torch optimizer: gradients are reduced and measured by kfuse, the update is the optimizer's own.

    Shares `param_groups` and `state` with it, so learning-rate schedulers may be given either. Several optimizers, each
    with parameters of its own, are one here: statistics and clipping are over all parameters, and `param_groups` are
    those of all, in their order. Their `state_dict()` is `{"optimizers": [one of each]}`, with kfuse's statistics.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *others: torch.optim.Optimizer,
        clip_norm: float | None = None,
        skip_nonfinite: bool | None = None,
    ) -> None:
        """Raises TypeError for what is not a torch optimizer, is a kfuse one already, or needs a closure (LBFGS), and
        ValueError for several of which two have one parameter, or one has none.

        clip_norm: limit of the mean gradient's global norm. skip_nonfinite: leaves a step out where a gradient is not
        finite; rank 0 warns either way. None: where that costs no wait.

        On CUDA only torch's Adam and AdamW, all with fused=True, leave a step out, or a parameter that no worker gave a
        gradient, without the host. With any other optimizer the host waits for the device in each step with a
        GradScaler or with skip_nonfinite=True (so None is False there), and, with several workers, in each step in
        which this worker gives a parameter no gradient.

        bf16 parameters are updated as torch does it: in bf16, from gradients that were averaged in fp32 and rounded.
        There are no fp32 master weights, so an update smaller than the spacing of bf16 numbers is lost; FusedAdamW,
        FusedSGD and FusedLAMB keep masters. An optimizer that needs sparse gradients (SparseAdam) fails at its first
        step.
        """
        inners = (optimizer, *others)
        for each in inners:
            if not isinstance(each, torch.optim.Optimizer) or isinstance(each, DistributedOptimizer):
                raise TypeError(f"kf.Optimizer wraps a torch.optim.Optimizer, not {type(each).__name__}")
            closure = inspect.signature(each.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise TypeError(
                    f"{type(each).__name__}.step needs a closure, to compute several gradients in a step: kf.Optimizer "
                    "reduces one; take an optimizer whose step() needs none"
                )
        if others:
            _refuse_shared(inners)
            super().__init__(_groups(inners), {})
            self.state = _States(inners)  # type: ignore[assignment]
        else:
            super().__init__(optimizer.param_groups, optimizer.defaults)
            self.state = optimizer.state
            optimizer.param_groups = self.param_groups
            for hooks in _STATE_HOOKS:  # one set: the optimizer's own state_dict and load_state_dict call them
                vars(self)[hooks] = getattr(optimizer, hooks, {})
        self.inner, self.inners = optimizer, inners
        updates = TorchUpdates(self, inners)
        if skip_nonfinite is None:
            on_gpu = any(devices.of(p.device).asynchronous for group in self.param_groups for p in group["params"])
            skip_nonfinite = updates.skips_on_device or not on_gpu
        self._attach(updates, clip_norm, skip_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError also where there are several optimizers."""
        if len(self.inners) > 1:
            raise ValueError(
                f"add_param_group: {_named(self.inners)}: give the group to one of them before kf.Optimizer"
            )
        super().add_param_group(param_group)


class TorchUpdates(Updates):
    """Makes updates by torch optimizers' own `step`."""

    def __init__(self, opt: torch.optim.Optimizer, inners: Sequence[torch.optim.Optimizer]) -> None:
        """opt: shares groups and state with the one, or has those of all."""
        super().__init__(opt)
        self._inners, self._states = inners, _States(inners)
        for inner in inners:
            if hasattr(inner, "_optimizer_step_pre_hooks"):  # some optimizers around others leave torch's __init__ out
                inner.register_step_pre_hook(_refuse_own_step)

    def _take_state(self) -> None:
        """Follows a user who has replaced `opt.state`, to begin anew."""
        if len(self._inners) == 1 and self._inners[0].state is not self.opt.state:
            self._inners[0].state = self.opt.state

    def state_dict(self, only: int | None = None) -> dict[str, Any]:
        return self._own_state() if self.shards is None else self.shards.whole(self._own_state(), only)

    def common_state(self) -> dict[str, Any]:
        return self._own_state() if self.shards is None else self.shards.common(self._own_state())

    def _own_state(self) -> dict[str, Any]:
        self._take_state()
        states = [inner.state_dict() for inner in self._inners]
        return {SEVERAL: states} if len(states) > 1 else states[0]

    def load_state_dict(self, state: dict[str, Any], whole: bool = False) -> None:
        """Also shares the wrapped optimizers' groups and state again, since loading replaces them."""
        state = state if self.shards is None else self.shards.sharded(state)
        if len(self._inners) == 1:
            (inner,) = self._inners
            inner.load_state_dict(state)
            self.opt.param_groups, self.opt.state = inner.param_groups, inner.state
            return
        states = state.get(SEVERAL, ())
        sizes = [[len(group["params"]) for group in each["param_groups"]] for each in states]
        if sizes != [[len(group["params"]) for group in each.param_groups] for each in self._inners]:
            raise ValueError(f'the state must have "{SEVERAL}": a list of the state_dict of {_named(self._inners)}')
        for inner, of_inner in zip(self._inners, states, strict=True):
            inner.load_state_dict(of_inner)
        self.opt.param_groups = _groups(self._inners)

    @property
    def skips_on_device(self) -> bool:
        """Their fused kernels take `found_inf`, from the device, and their state begins with zeros."""
        known = all(type(inner) in (torch.optim.Adam, torch.optim.AdamW) for inner in self._inners)
        return known and all(group.get("fused") for group in _groups(self._inners))

    def _refuse_changed(self) -> None:
        """Raises RuntimeError if one of several has other groups by now: those would be updated without a reduction."""
        if len(self._inners) > 1 and list(map(id, _groups(self._inners))) != list(map(id, self.opt.param_groups)):
            raise RuntimeError(
                f"{_named(self._inners)}: one has other param_groups than when kf.Optimizer was made: load a state by "
                "its load_state_dict, and add groups before it is made"
            )

    def update(self, given: Update) -> None:
        self._refuse_changed()
        self._take_state()
        scale, found_inf = given.factor, given.skip
        on_device = self.skips_on_device and devices.of(self.engine.device).asynchronous
        if found_inf is not None and not on_device and found_inf.item():
            return
        if scale is not None:
            if on_device and found_inf is not None:  # by NaN or inf the buckets' padding would be NaN from then on
                scale = torch.where(found_inf != 0, 1.0, scale)
            for bucket in self.engine.gradient_buckets:
                bucket.visible.mul_(scale)
        in_doubt = {i: self._state_of(p) for i in given.step.in_doubt if (p := self.engine.params[i]).grad is not None}
        betas: AbstractContextManager[None] = nullcontext()
        if given.batch_factor != 1:
            from kfuse.optim.betas import betas_of_batch  # only where the batch has changed

            betas = betas_of_batch(self._inners, given.batch_factor)
        with self._prepared(given.lr_factor, found_inf if on_device else None), betas:
            try:
                self._step()
            except RuntimeError as error:
                if not given.step.had_graph:
                    raise
                raise RuntimeError(
                    f"{_named(self._inners)}.step() has failed after backward(create_graph=True): kfuse's gradients "
                    "are sums without a graph: an optimizer that differentiates them (AdaHessian) cannot be wrapped"
                ) from error
        for index, before in in_doubt.items():
            used = given.step.tail[index] > 0
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
            self._step()
        finally:
            for index, value in values.items():
                params[index].copy_(value)
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
        for inner in self._inners:
            if type(inner) in COMMON:
                of_each = (inner.state.get(params[index], {}) for index in lacking)
                for value in (value for state in of_each for value in state.values() if isinstance(value, Tensor)):
                    value.zero_()

    def _step(self) -> None:
        for inner in self._inners:
            inner.stepped_by_kfuse = True  # type: ignore[attr-defined]
            try:
                inner.step()
            finally:
                del inner.stepped_by_kfuse  # type: ignore[attr-defined]

    def _state_of(self, p: Tensor, copy: bool = True) -> dict[str, Tensor]:
        """A parameter, as "", and the tensors of its state, by name."""
        tensors = {k: v for k, v in self._states.get(p, {}).items() if isinstance(v, Tensor)} | {"": p.detach()}
        return {name: value.clone() if copy else value for name, value in tensors.items()}

    @contextmanager
    def _prepared(self, lr_factor: float, found_inf: Tensor | None) -> Iterator[None]:
        """Gradients, learning rates and `found_inf` as the inner step is to see them; afterwards they are as before.

        Each gradient has its parameter's strides, also where these have changed since the buckets were made: torch's
        fused updates on the CPU take the elements of both in the order of their memory, and check nothing.
        """
        gradients = [(p, p.grad) for p in self.engine.params if p.grad is not None and p.grad.stride() != p.stride()]
        rates = [(group, group["lr"]) for group in _groups(self._inners) if lr_factor != 1.0]
        try:
            for p, gradient in gradients:
                p.grad = torch.empty_like(p).copy_(gradient)
            for group, rate in rates:
                group["lr"] = rate * lr_factor
            if found_inf is not None:  # the fused kernel compares with 1
                for inner in self._inners:
                    inner.found_inf = (found_inf != 0).to(torch.float32)  # type: ignore[attr-defined]
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for group, rate in rates:
                group["lr"] = rate
            for inner in self._inners:
                vars(inner).pop("found_inf", None)


class _States(Mapping[Tensor, dict[str, Any]]):
    """What several optimizers have as `state`, which loading replaces, as one mapping."""

    def __init__(self, inners: Sequence[torch.optim.Optimizer]) -> None:
        self._inners = inners

    def __getitem__(self, p: Tensor) -> dict[str, Any]:
        for inner in self._inners:
            if p in inner.state:  # which would make an entry for any other
                found: dict[str, Any] = inner.state[p]
                return found
        raise KeyError(p)

    def __iter__(self) -> Iterator[Tensor]:
        return (p for inner in self._inners for p in inner.state)

    def __len__(self) -> int:
        return sum(len(inner.state) for inner in self._inners)


def _refuse_own_step(inner: torch.optim.Optimizer, *_: object) -> None:
    """A hook. Raises RuntimeError where a wrapped optimizer's `step` is called by the user: without clipping, kfuse's
    factor of the rate and statistics, or once more for each step.
    """
    if "stepped_by_kfuse" not in vars(inner):
        name = type(inner).__name__
        raise RuntimeError(f"{name}.step(): kf.Optimizer has this {name} and steps it: call kf.Optimizer's step alone")


def _groups(inners: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for inner in inners for group in inner.param_groups]


def _named(inners: Sequence[torch.optim.Optimizer]) -> str:
    return ", ".join(type(inner).__name__ for inner in inners)


def _refuse_shared(inners: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValueError where two optimizers have one parameter, or one has none."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for k, inner in enumerate(inners):
        if inner in inners[:k]:
            raise ValueError(f"kf.Optimizer({_named(inners)}): the same {type(inner).__name__} is given twice")
        named = named_parameters(inner.param_groups)
        if not named:
            raise ValueError(f"kf.Optimizer({_named(inners)}): {type(inner).__name__} has no parameters: leave it out")
        for p, name in named:
            other = owners.setdefault(id(p), inner)
            if other is not inner:
                raise ValueError(
                    f"kf.Optimizer({_named(inners)}): {name} of {type(inner).__name__}, of shape {tuple(p.shape)}, "
                    f"is a parameter of {type(other).__name__} too: each must have parameters of its own"
                )
