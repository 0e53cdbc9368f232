"""Parameter groups: names and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        for p, name in zip(group["params"], names, strict=True):
            named.append((p, f"parameter {len(named)}" + (f" ({name})" if name else "")))
    return named


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
