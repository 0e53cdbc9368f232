"""The policy that adapts nothing."""

from __future__ import annotations

from kfuse.policies.base import BasePolicy


class NoPolicy(BasePolicy):
    """Leaves batch size, learning rate and worker count as configured."""
