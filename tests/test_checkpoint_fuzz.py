"""A job that is killed at random instants while it writes checkpoints always resumes with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_fuzz import fuzz

pytestmark = pytest.mark.full


def test_killed_at_random_instants(tmp_path: Path) -> None:
    """`benchmarks/soak.py --checkpoints 50` has more of them."""
    kills = 6
    outcome = fuzz(tmp_path, kills, seed=0)
    assert len(outcome.resumed) >= kills - 1  # the first kill may have come before the first checkpoint
    assert outcome.resumed == sorted(outcome.resumed) and outcome.resumed[-1] > 0
