"""The display prints throttled lines where there is no terminal, and a live part that fits where there is one."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from kfuse.observe.recorder import LINE_EVERY_S, Display


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(progress: bool = True) -> tuple[Display, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Display(progress, Console(file=out, highlight=False, width=80), clock), out, clock


def metrics(step: int, **more: Any) -> dict[str, Any]:
    known = {"step": step, "epoch": 0, "samples": 32 * (step + 1), "loss": 0.5, "lr": 0.001}
    return known | {"batch_size": 32, "workers": 2, "noise_scale": None} | more


def test_plain_lines_come_at_most_every_two_seconds() -> None:
    display, out, clock = plain()
    display.start(None, None, "a run")
    for step in range(10_000):
        clock.now = step * 0.001
        display.metrics(metrics(step))
    printed = out.getvalue().splitlines()[1:]
    steps = [int(line.split()[1]) for line in printed]
    assert steps == [int(k * LINE_EVERY_S * 1000) for k in range(5)]


def test_plain_line_says_what_is_known_and_nothing_else() -> None:
    display, out, clock = plain()
    interval = {"noise_scale_low": 251.0, "noise_scale_high": 393.0}
    low, alone = {"noise_scale_low": 251.0}, {"micro_batches": 1}
    for number, more in enumerate([{"loss": None}, {"noise_scale": 312.4, **interval}, low, alone]):
        clock.now = 2.0 * number
        display.metrics(metrics(100 * number, **more))
    first, second, third, fourth = out.getvalue().splitlines()
    assert first == "step 0  epoch 0  batch 32  lr 0.001  workers 2"
    assert "  noise scale 312 (251 to 393)  " in second
    assert second.endswith("  1,600 samples/s")  # 100 steps of 32 in 2 s
    assert "  noise scale above 251  " in third
    assert "  noise scale unknown: one micro-batch a step  " in fourth


def test_events_are_one_line_each_and_never_held_back() -> None:
    display, out, _ = plain()
    display.metrics(metrics(0))
    workers = [{"rank": rank, "pid": 10 + rank, "host": "a"} for rank in range(2)]
    view = {"step": 7, "kind": "view", "generation": 2, "workers": workers, "reason": "x " * 60, "pause_s": 0.02}
    display.event({"time": 1.0, **view})
    display.event({"step": 8, "kind": "decision", "batch_size": [32, 64], "lr": [0.001, 0.0014]})
    display.event({"step": None, "kind": "failure", "why": "worker 1 was killed", "lost": None})
    assert out.getvalue().splitlines()[1:] == [
        f"step 7  2 workers train: {'x ' * 60} (0.02 s without a step)",
        "step 8  batch size 32 -> 64, learning rate 0.001 -> 0.0014",
        "the job has failed: worker 1 was killed",
    ]


@pytest.mark.parametrize("width", [40, 120])
def test_live_part_fits_the_terminal_and_breaks_no_figure(width: int) -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, color_system=None, highlight=False)
    display = Display(True, console, clock)
    display.start(total_samples=64_000, total_steps=1000, title="a [run]")
    try:
        figures = {"noise_scale": 312.4, "noise_scale_low": 251.0, "noise_scale_high": 393.0}
        for step in (0, 100, 200, 250):
            clock.now = step / 250
            display.metrics(metrics(step, **figures))
        with console.capture() as captured:
            console.print(display._render())
    finally:
        display.stop()
    shown = captured.get().splitlines()
    assert max(map(len, shown)) <= width
    # 250 of 1000 steps in one second is further than 8032 of 64000 samples, and leaves 3 s.
    assert re.search(r"^a \[run\] +\S+ +25% 0:00:0[34]", shown[0])
    for field in ("step 250", "loss 0.5", "noise scale 312 (251 to 393)", "batch 32", "lr 0.001", "workers 2"):
        assert any(field in line for line in shown), field


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_begins_anew_shows_figures_of_now_and_gives_the_terminal_back(terminal: bool) -> None:
    """As after a restart from a checkpoint: one live part, and no rate over the time in between."""
    out, clock = io.StringIO(), Clock()
    display = Display(True, Console(file=out, force_terminal=terminal, width=100, highlight=False), clock)
    for start in (0, 40):
        display.start(None, None, "a run")
        for step in (start, start + 50):
            display.metrics(metrics(step))
            clock.now += 1.0
    rate = display._rate()
    display.event({"step": 0, "kind": "view", "reason": "grown"})
    display.finish({"steps": 1})
    assert "step 0  view: reason grown" in out.getvalue()
    hidden, shown = (out.getvalue().count(code) for code in ("\x1b[?25l", "\x1b[?25h"))  # the terminal's cursor
    assert hidden == shown == int(terminal)
    assert rate == pytest.approx(32 * 50)
