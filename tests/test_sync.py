"""How the workers keep together: the modes, how they are written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kfuse.comm.sync import EVERY_MAX, Sync


@pytest.mark.parametrize("text", ["ssgd", f"local:{EVERY_MAX}"])
def test_a_mode_is_read_and_written_alike(text: str) -> None:
    assert str(Sync.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("often", "comm.sync=often: must be one of ssgd, local:N, sma, pair"),
        ("local:x", "comm.sync=local:x: must be one of ssgd, local:N, sma, pair"),
        ("ssgd:2", "comm.sync=ssgd:2: must be one of ssgd, local:N, sma, pair"),
        ("8", "comm.sync=8: must be one of ssgd, local:N, sma, pair; local:8 averages every 8 steps"),
        ("local:0", f"comm.sync=local:0: N must be 1 to {EVERY_MAX}"),
        (f"local:{EVERY_MAX + 1}", f"comm.sync=local:{EVERY_MAX + 1}: N must be 1 to {EVERY_MAX}"),
    ],
)
def test_what_is_no_mode_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sync.parse(text)
    assert str(caught.value) == message
