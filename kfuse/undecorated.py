"""torch's methods as they are beneath its decorator against compiling them.

That decorator imports torch's compiler at its first call, which takes longer than importing torch: a good part of a
worker's boot, or, at a state's transfer, a pause for all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method itself, if it is decorated."""
    beneath: Callable[..., Any] = getattr(method, "__wrapped__", method)
    return beneath
