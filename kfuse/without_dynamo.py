"""Calls torch's optimizer methods without their decorator `torch._disable_dynamo`.

The decorator keeps torch's compiler (Dynamo) away from a method, and imports the compiler at its first call. The import
takes longer than importing torch: a worker would start later, or all others would wait for it while the training state
is transferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that the decorator wraps; `method` itself if it has no decorator."""
    wrapped: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return wrapped
