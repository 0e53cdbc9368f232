"""Parameter groups with their names and learning rates, and torch's load_state_dict without its rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from kfuse.comm import devices

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's `param_groups`."""


def named_parameters(groups: Groups) -> list[tuple[Parameter, str]]:
    """Returns all parameters, frozen ones too, with their names in messages."""
    named: list[tuple[Parameter, str]] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        labels = [_label(index, name) for index, name in enumerate(names, len(named))]
        named += zip(group["params"], labels, strict=True)
    return named


def refuse_duplicates(groups: Groups, added: Mapping[str, Any]) -> None:
    """Raises ValueError where a group to be added has a parameter again. It may be of (name, parameter) pairs."""
    pairs = [given if isinstance(given, tuple) else (None, given) for given in added["params"]]
    names = added.get("param_names") or [name for name, _ in pairs]
    seen = {id(p): name for p, name in named_parameters(groups)}
    for index, (name, (_, p)) in enumerate(zip(names, pairs, strict=True), len(seen)):
        label = _label(index, name)
        if id(p) in seen:
            raise ValueError(
                f"{label} of shape {tuple(p.shape)} is {seen[id(p)]} again: list each parameter once "
                "(model.parameters() does, also where modules share one)"
            )
        seen[id(p)] = label


def _label(index: int, name: str | None) -> str:
    return f"parameter {index}" if name is None else f"parameter {index} ({name})"


def learning_rates(groups: Groups) -> list[float]:
    """Returns each group's rate. 0.0 for one that an optimizer does not have, or keeps on a GPU, where reading it would
    wait.
    """
    rates = [group.get("lr", 0.0) for group in groups]
    unread = [isinstance(rate, Tensor) and devices.of(rate.device).asynchronous for rate in rates]
    return [0.0 if skip else float(rate) for skip, rate in zip(unread, rates, strict=True)]


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under torch's decorator `_disable_dynamo`, or `method` itself if it has no decorator.

    The decorator imports torch's compiler at its first call, which takes longer than importing torch: a worker would
    start later, or all others would wait for it while the training state is transferred.
    """
    wrapped: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return wrapped


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
