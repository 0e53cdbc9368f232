"""What the models' arguments may be."""

from __future__ import annotations


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1")


def check_dropout(dropout: float) -> None:
    """Raises ValueError for what is no probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
