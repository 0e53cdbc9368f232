"""What a kfuse optimizer shows to torch: parameter groups with names and learning rates, and a state_dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices


class ParameterGroups(torch.optim.Optimizer):
    """Mix-in over a torch optimizer. A subclass multiplies each group's learning rate with `lr_factor` in an update."""

    lr_factor: float = 1.0
    """What kfuse multiplies each group's learning rate with in an update (batch-size scaling, a policy's lr_scale).

    group["lr"] belongs to the user, or to their scheduler: kfuse reads it and never changes it.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for a parameter that is given twice; then nothing is added."""
        if not isinstance(param_group.get("params"), Tensor | set):
            param_group["params"] = list(param_group["params"])
            self._refuse_duplicates(param_group)
        _without_compiler(torch.optim.Optimizer.add_param_group)(self, param_group)

    def _refuse_duplicates(self, param_group: dict[str, Any]) -> None:
        """In a group that is to be added, whose parameters may be (name, parameter) pairs."""
        params = param_group["params"]
        pairs = [given if isinstance(given, tuple) else (None, given) for given in params]
        names = param_group.get("param_names") or [name for name, _ in pairs]
        seen = {id(p): name for p, name in self._named_parameters()}
        for index, (name, (_, p)) in enumerate(zip(names, pairs, strict=True), len(seen)):
            label = _label(index, name)
            if id(p) in seen:
                raise ValueError(
                    f"{label} of shape {tuple(p.shape)} is {seen[id(p)]} again: list each parameter once "
                    "(model.parameters() does, also where modules share one)"
                )
            seen[id(p)] = label

    def _named_parameters(self) -> list[tuple[Parameter, str]]:
        """All parameters, frozen ones too, as messages name them: by state_dict's index, and torch's name if given."""
        named: list[tuple[Parameter, str]] = []
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            labels = [_label(index, name) for index, name in enumerate(names, len(named))]
            named += zip(group["params"], labels, strict=True)
        return named

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it works on its parameters by hooks: keep its "
            "state_dict(), make a new optimizer over the copied model's parameters, and load it there"
        )

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        state: dict[str, Any] = _without_compiler(torch.optim.Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        _without_compiler(torch.optim.Optimizer.load_state_dict)(self, state_dict)

    def learning_rates(self) -> list[float]:
        """Of each parameter group, the rate of the coming update: the group's own times `lr_factor`.

        0.0 for one that an optimizer does not have, or keeps on a GPU, where reading it would wait.
        """
        return [rate * self.lr_factor for rate in self.base_rates()]

    @property
    def base_lr(self) -> float:
        """The learning rate that is reported, without `lr_factor`: that of the first group whose rate is not zero."""
        return next((rate for rate in self.base_rates() if rate), 0.0)

    def base_rates(self) -> list[float]:
        """As `learning_rates`, without `lr_factor`."""
        rates = [group.get("lr", 0.0) for group in self.param_groups]
        unread = [isinstance(rate, Tensor) and devices.of(rate.device).asynchronous for rate in rates]
        return [0.0 if skip else float(rate) for skip, rate in zip(unread, rates, strict=True)]


def _without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch's decorator `_disable_dynamo`, or `method` itself if it has no decorator.

    The decorator imports torch's compiler at its first call, which takes longer than importing torch: a worker would
    start later, or all others would wait for it while the training state is transferred.
    """
    wrapped: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return wrapped


def _label(index: int, name: str | None) -> str:
    return f"parameter {index}" if name is None else f"parameter {index} ({name})"


@dataclass(frozen=True)
class _Kept:
    """A state tensor that torch's load_state_dict does not see."""

    tensor: Tensor


@contextmanager
def loading_as(opt: torch.optim.Optimizer, dtypes: Mapping[str, torch.dtype], moved: bool) -> Iterator[None]:
    """Context of `opt.load_state_dict`: state tensors of these names get these dtypes, whatever their parameter's is.

    moved: to their parameter's device; else they stay where they are.

    torch rounds a state tensor to its parameter's dtype, which would lose the fp32 state of a bf16 parameter. It leaves
    objects alone that it does not know. The hook that hides the tensors is registered last, so that it sees what the
    user's hooks made of the state; the one that shows them again is the first.
    """

    def hide(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: _Kept(value) if name in dtypes and value is not None else value for name, value in of.items()}
            for key, of in state_dict["state"].items()
        }
        return state_dict | {"state": states}

    def show(_: Any) -> None:
        for p, state in opt.state.items():
            for name, value in state.items():
                if isinstance(value, _Kept):
                    state[name] = value.tensor.to(p.device if moved else value.tensor.device, dtypes[name])

    before = opt.register_load_state_dict_pre_hook(hide)
    after = opt.register_load_state_dict_post_hook(show, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
