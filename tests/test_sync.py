"""How the workers keep together: the modes, how they are written, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import kfuse as kf
from kfuse.comm.sync import EVERY_MAX, MODES, Sync
from kfuse.comm.tail import ANNOUNCEMENT, TAIL_SLOTS, Announcement


@pytest.mark.parametrize("text", ["pair", "ssgd", "local:1", "local:8", f"local:{EVERY_MAX}"])
def test_a_mode_is_read_and_written_alike(text: str) -> None:
    assert str(Sync.parse(text)) == text


def test_what_the_leader_announces_arrives_exactly() -> None:
    """The code travels as fp32."""
    codes = set()
    for mode in MODES:
        for every in (1, 2, 8, 4095, 4097, EVERY_MAX - 1, EVERY_MAX):
            sync = Sync(mode, every)
            codes.add(sync.code)
            slots = np.array(Announcement(sync=sync.code).slots(), np.float32)
            assert len(slots) == TAIL_SLOTS - ANNOUNCEMENT
            arrived = Announcement.from_slots([0.0] * ANNOUNCEMENT + slots.tolist())
            assert Sync.from_code(arrived.sync) == sync
    assert len(codes) == 7 * len(MODES) and min(codes) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("often", "comm.sync=often: must be one of ssgd, local:N, sma, pair"),
        ("", "comm.sync=: must be one of ssgd, local:N, sma, pair"),
        ("local", "comm.sync=local: must be one of ssgd, local:N, sma, pair"),
        ("local:", "comm.sync=local:: must be one of ssgd, local:N, sma, pair"),
        ("local:x", "comm.sync=local:x: must be one of ssgd, local:N, sma, pair"),
        ("local:-1", "comm.sync=local:-1: must be one of ssgd, local:N, sma, pair"),
        ("ssgd:2", "comm.sync=ssgd:2: must be one of ssgd, local:N, sma, pair"),
        (" ssgd", "comm.sync= ssgd: must be one of ssgd, local:N, sma, pair"),
        (None, "comm.sync=None: must be one of ssgd, local:N, sma, pair"),
        (math.nan, "comm.sync=nan: must be one of ssgd, local:N, sma, pair"),
        (8, "comm.sync=8: must be one of ssgd, local:N, sma, pair; local:8 averages every 8 steps"),
        ("8", "comm.sync=8: must be one of ssgd, local:N, sma, pair; local:8 averages every 8 steps"),
        ("local:0", f"comm.sync=local:0: N must be 1 to {EVERY_MAX}"),
        (f"local:{EVERY_MAX + 1}", f"comm.sync=local:{EVERY_MAX + 1}: N must be 1 to {EVERY_MAX}"),
    ],
)
def test_what_is_no_mode_is_refused(text: Any, message: str) -> None:
    for refused in (lambda: Sync.parse(text), lambda: kf.CommOptions(sync=text)):
        with pytest.raises(ValueError) as caught:
            refused()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"outer_lr": 0.0}, "comm.outer_lr=0.0: must be above 0"),
        ({"outer_lr": math.inf}, "comm.outer_lr=inf: must be above 0"),
        ({"outer_momentum": 1.0}, "comm.outer_momentum=1.0: must be at least 0 and below 1"),
        ({"outer_momentum": -0.1}, "comm.outer_momentum=-0.1: must be at least 0 and below 1"),
        ({"sma_alpha": 0.0}, "comm.sma_alpha=0.0: must be above 0 and at most 1, or None for 1 / workers"),
        ({"sma_alpha": 1.5}, "comm.sma_alpha=1.5: must be above 0 and at most 1, or None for 1 / workers"),
        ({"sma_momentum": math.nan}, "comm.sma_momentum=nan: must be at least 0 and below 1"),
    ],
)
def test_settings_of_the_modes_have_bounds(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        kf.CommOptions(**setting)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_sharded_state_needs_every_steps_gradients() -> None:
    with pytest.raises(ValueError, match=r"comm\.sync=sma: must be ssgd with comm\.state=sharded"):
        kf.CommOptions(state="sharded", sync="sma")


def test_reproducible_sums_need_every_steps_gradients() -> None:
    with pytest.raises(ValueError, match=r"comm\.sync=local:2: must be ssgd with comm\.reproducible=true"):
        kf.CommOptions(reproducible=True, sync="local:2")
