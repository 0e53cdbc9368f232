"""Parameters and their names in messages; torch's methods without its compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

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


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under torch's decorator `_disable_dynamo`, or `method` itself if it has no decorator.

    The decorator imports torch's compiler at its first call, which takes longer than importing torch: a worker would
    start later, or all others would wait for it while the training state is transferred.
    """
    wrapped: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return wrapped
