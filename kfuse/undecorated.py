"""Calls methods of torch without the decorator that keeps torch's compiler away from them.

The decorator imports the compiler at its first call, which takes longer than importing torch. A worker would boot
later, or all others would wait for it while the training state is transferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method beneath the decorator; the method itself if it has none."""
    beneath: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return beneath
