"""How many CPU threads a worker of `kfuse` takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kfuse.train.build import set_threads


@pytest.mark.parametrize(
    ("environment", "threads", "reproducible", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, None, False, 3),
        ({"OMP_NUM_THREADS": "3"}, 2, False, 2),
        ({"OMP_NUM_THREADS": "3"}, None, True, 1),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, None, False, 4),  # torchrun's own default
        ({}, None, False, 2),
    ],
)
def test_the_users_number_of_threads_is_taken(
    environment: dict[str, str], threads: int | None, reproducible: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config: dict[str, Any] = {"workers": {"max": 4, "threads": threads}, "comm": {"reproducible": reproducible}}
    set_threads(config)
    assert torch.get_num_threads() == expected
