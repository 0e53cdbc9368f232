"""What `kfuse replay` prints and draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfuse.observe.whole_file import write_whole
from kfuse.tools.replay.recorded import TradeOff
from kfuse.tools.replay.request import ReplayRequest
from kfuse.tools.replay.run import Change, ReplayResult
from kfuse.tools.replay.simulated import Gain

_MOST_ROWS = 60
"""Rows of the table: of more decisions the first and the last ones are shown."""
_WIDTH = 110
"""Characters of the tables: a narrower terminal wraps them."""


def console() -> Console:
    """Returns where to print: as wide as the tables need at least."""
    return Console(width=max(Console().width, _WIDTH))


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_report(console: Console, request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None) -> None:
    """Prints the decisions, and steps, samples and time of the recorded run and of the replay."""
    kind = "the run's own policy, on the recorded steps" if request.is_own else "another policy, on steps of its own"
    say(console, f"{type(request.policy).__name__} on {request.run_dir}: {kind}")
    for note in request.notes:
        say(console, note)
    if result.changes:
        console.print(_changes(result.changes, request.gain))
    else:
        say(console, "It decides nothing.")
    console.print(_totals(request, result, trade_off))
    if trade_off is None:
        say(console, "The noise scale was never known: steps and samples of another policy cannot be predicted.")
    else:
        say(
            console,
            f"Smin {trade_off.least_steps:.0f} steps, Emin {trade_off.least_samples:.0f} samples, critical batch size "
            f"{trade_off.critical_batch:.0f}: (steps / Smin - 1) (samples / Emin - 1) = 1 for a fixed batch size",
        )
    if result.cut_off:
        say(console, f"Cut off after {result.steps} steps: the recorded run's end would take many more.")
    elif not request.is_own and result.seconds is None:
        say(console, "Time: unknown, as the run did not have all these batch sizes and numbers of workers.")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _changes(changes: Sequence[Change], gain: Gain) -> Table:
    """Returns a line for each decision: when it applies, what it changes, and what the policy saw."""
    table = _table("step", "samples", "batch size", "workers", "lr factor", "noise scale then")
    table.add_column("also")
    left_out = len(changes) - _MOST_ROWS
    shown = changes if left_out <= 0 else [*changes[: _MOST_ROWS // 2], *changes[-_MOST_ROWS // 2 :]]
    for number, each in enumerate(shown):
        if left_out > 0 and number == _MOST_ROWS // 2:
            table.add_row("...", "", "", "", "", "", f"{left_out} more decisions")
        before, after = each.rate_factors(gain)
        table.add_row(
            str(each.step),
            str(each.samples),
            _changed(each.before.batch_size, each.after.batch_size),
            _changed(each.before.workers, each.after.workers),
            _changed(f"{before:.4g}", f"{after:.4g}"),
            _noise(each),
            Text("; ".join([*(f"{name} {value}" for name, value in each.others.items()), *each.notes])),
        )
    return table


def _changed(before: object, after: object) -> str:
    return "" if before == after else f"{before} -> {after}"


def _noise(at: Change) -> str:
    """Returns the noise scale that the policy saw, with its interval."""
    seen = at.seen
    if seen is None or seen.noise_scale_low is None:
        return "unknown"
    if seen.noise_scale is None or seen.noise_scale_high is None:
        return f"at least {seen.noise_scale_low:.3g}"
    return f"{seen.noise_scale:.3g} ({seen.noise_scale_low:.3g} to {seen.noise_scale_high:.3g})"


def _totals(request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None) -> Table:
    """Returns steps, samples and time of the recorded run, and of the replay where they are predicted."""
    steps, samples = request.recorded.totals()
    known = [took for took in request.recorded.seconds if took is not None]
    seconds = math.fsum(known) if len(known) == steps else None
    rows: list[tuple[str, int, int, float | None]] = [("recorded", steps, samples, seconds)]
    if not (request.is_own or result.cut_off) and (trade_off is not None or result.steps == steps):
        rows.append((f"{request.name}, predicted", result.steps, result.samples, result.seconds))
    table = _table("", "steps", "vs recorded", "samples", "vs recorded", "time of steps", "vs recorded")
    for name, *values in rows:
        cells = [name]
        for value, recorded, unit in zip(values, (steps, samples, seconds), ("", "", " s"), strict=True):
            text = "" if value is None else f"{value:.1f}{unit}" if unit else str(value)
            cells += [text, "" if value is None or not recorded else f"{value / recorded:.2f}"]
        table.add_row(*cells)
    return table


def draw(request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None, path: Path) -> None:
    """Draws batch size, noise scale and workers over samples, and steps over samples. Whole, or not at all.

    Raises OSError where the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, figsize=(8, 10), height_ratios=(3, 1, 3), layout="constrained")
    _draw_settings(axes[0], axes[1], request, result)
    _draw_trade_off(axes[2], request, result, trade_off)

    def save(to: Path) -> None:
        with to.open("wb") as file:
            figure.savefig(file, format="png", dpi=120)

    try:
        write_whole(path, save)
    finally:
        pyplot.close(figure)


def _draw_settings(sizes: Any, workers: Any, request: ReplayRequest, result: ReplayResult) -> None:
    """Draws batch size and noise scale on one pair of axes, workers on another, over samples."""
    signals = request.recorded.signals
    samples = [each.samples for each in signals]
    if (noise := request.recorded.noise_scales()) is not None:
        sizes.plot(samples, noise, color="0.5", linewidth=1, label="noise scale")
    known = [(each.noise_scale_low, each.noise_scale_high) if each.noise_scale_high else None for each in signals]
    low, high = zip(*(ends or (math.nan, math.nan) for ends in known), strict=True)
    sizes.fill_between(samples, low, high, color="0.85", label="its interval")
    curves = {"recorded": [(each.samples, each.batch_size, each.workers) for each in signals]}
    if not request.is_own:
        curves[request.name] = [*result.curve, (result.samples, *result.curve[-1][1:])]
    for name, curve in curves.items():
        for axes, column in ((sizes, 1), (workers, 2)):
            axes.step([each[0] for each in curve], [each[column] for each in curve], where="post", label=name)
    sizes.set(yscale="log", ylabel="batch size [samples]", title=f"{request.run_dir.name}: {request.name}")
    sizes.legend()
    workers.set(ylabel="workers", xlabel="samples (noise scale: of the recorded run)")


def _draw_trade_off(axes: Any, request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None) -> None:
    """Draws steps over samples: of the recorded run, of the replay, and of fixed batch sizes."""
    points = {"recorded": request.recorded.totals()}
    if trade_off is not None:
        pairs = [trade_off.predict(trade_off.critical_batch * 2 ** (k / 4)) for k in range(-16, 17)]
        axes.plot([pair[1] for pair in pairs], [pair[0] for pair in pairs], color="0.5", label="fixed batch sizes")
        if not request.is_own and not result.cut_off:
            points[request.name] = result.steps, result.samples
    for name, (steps, samples) in points.items():
        axes.plot([samples], [steps], marker="o", linestyle="none", label=name)
    axes.set(xscale="log", yscale="log", xlabel="samples to the recorded run's end", ylabel="steps")
    axes.legend()
