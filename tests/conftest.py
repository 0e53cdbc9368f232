"""What every test starts with: no session of kfuse, and one thread for torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kfuse.session import reset


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    """No session outlives its test.

    With one thread a test takes the same time beside busy processes: several would wait for the one without a core.
    """
    torch.set_num_threads(1)
    reset()
    yield
    reset()
