"""What `kfuse replay` prints and draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from kfuse.observe.whole_file import write_whole
from kfuse.tools.replay.recorded import TradeOff
from kfuse.tools.replay.request import ReplayRequest
from kfuse.tools.replay.run import Change, ReplayResult
from kfuse.tools.replay.simulated import Gain

_MOST_ROWS = 60
"""Of the table: of more decisions the first and the last ones are shown."""
_WIDTH = 110
"""Of the tables at least, in characters: a narrower terminal wraps them."""


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
    _print_changes(console, result.changes, request.gain)
    _print_summary(console, request, result, trade_off)


def _print_changes(console: Console, changes: Sequence[Change], gain: Gain) -> None:
    """A line for each decision: when it applies, what it changes, and what the policy saw."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    if not changes:
        say(console, "It decides nothing.")
        return
    table = Table(box=SIMPLE, padding=(0, 1))
    columns = ("step", "samples", "batch size", "workers", "lr factor", "noise scale then", "also")
    for column in columns:
        table.add_column(column, justify="left" if column == "also" else "right", no_wrap=column != "also")
    shown: Sequence[Change | None] = changes
    if len(changes) > _MOST_ROWS:
        shown = [*changes[: _MOST_ROWS // 2], None, *changes[-(_MOST_ROWS // 2) :]]
    for each in shown:
        if each is None:
            left_out = len(changes) - 2 * (_MOST_ROWS // 2)
            table.add_row("...", "", "", "", "", "", f"{left_out} more decisions")
            continue
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
    console.print(table)


def _changed(before: object, after: object) -> str:
    return "" if before == after else f"{before} -> {after}"


def _noise(at: Change) -> str:
    """The noise scale that the policy saw, with its interval."""
    seen = at.seen
    if seen is None or seen.noise_scale_low is None:
        return "unknown"
    if seen.noise_scale is None or seen.noise_scale_high is None:
        return f"at least {seen.noise_scale_low:.3g}"
    return f"{seen.noise_scale:.3g} ({seen.noise_scale_low:.3g} to {seen.noise_scale_high:.3g})"


def _print_summary(console: Console, request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None) -> None:
    """Steps, samples and time, of the recorded run and of the replay."""
    from rich.box import SIMPLE
    from rich.table import Table

    recorded = request.recorded
    steps = recorded.signals[-1].step - recorded.signals[0].step + 1
    samples = sum(count for _, count in recorded.counts())
    known = [took for took in recorded.seconds if took is not None]
    seconds = math.fsum(known) if len(known) == steps else None
    table = Table(box=SIMPLE, padding=(0, 1))
    formats: dict[str, Callable[[float], str]] = {
        "steps": str,
        "samples": str,
        "time of steps": lambda took: f"{took:.1f} s",
    }
    table.add_column("", no_wrap=True)
    for column in (each for name in formats for each in (name, "vs recorded")):
        table.add_column(column, justify="right", no_wrap=True)
    rows: list[tuple[str, int, int, float | None]] = [("recorded", steps, samples, seconds)]
    if not request.is_own and not result.cut_off:
        steps_known = trade_off is not None or result.steps == steps
        if steps_known:
            rows.append((f"{request.name}, predicted", result.steps, result.samples, result.seconds))
    for name, *values in rows:
        cells = [name]
        for value, reference, text in zip(values, (steps, samples, seconds), formats.values(), strict=True):
            cells.append("" if value is None else text(value))
            cells.append("" if value is None or not reference else f"{value / reference:.2f}")
        table.add_row(*cells)
    console.print(table)
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


def draw(request: ReplayRequest, result: ReplayResult, trade_off: TradeOff | None, path: Path) -> None:
    """Draws batch size, noise scale and workers over samples, and steps over samples. Whole, or not at all.

    Raises OSError where the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = (3, 1, 3)
    figure, (sizes, workers, trade) = pyplot.subplots(3, figsize=(8, 10), height_ratios=heights, layout="constrained")
    signals = request.recorded.signals
    if (noise := request.recorded.noise_scales()) is not None:
        sizes.plot([each.samples for each in signals], noise, color="0.5", linewidth=1, label="noise scale")
    unknown = (math.nan, math.nan)
    ends = [(each.noise_scale_low, each.noise_scale_high) if each.noise_scale_high else unknown for each in signals]
    low, high = zip(*ends, strict=True)
    sizes.fill_between([each.samples for each in signals], low, high, color="0.85", label="its interval")
    recorded = [(each.samples, each.batch_size, each.workers) for each in signals]
    curves = {"recorded": recorded} if request.is_own else {"recorded": recorded, request.name: [*result.curve]}
    for name, curve in curves.items():
        end = curve if name == "recorded" else [*curve, (result.samples, *curve[-1][1:])]
        for axes, column in ((sizes, 1), (workers, 2)):
            axes.step([each[0] for each in end], [each[column] for each in end], where="post", label=name)
    sizes.set(yscale="log", ylabel="batch size [samples]", title=f"{request.run_dir.name}: {request.name}")
    sizes.legend()
    workers.set(ylabel="workers", xlabel="samples (noise scale: of the recorded run)")
    steps, samples = (sum(each) for each in zip(*request.recorded.counts(), strict=True))
    points = {"recorded": (steps, samples)}
    if not request.is_own and trade_off is not None and not result.cut_off:
        points[request.name] = result.steps, result.samples
    if trade_off is not None:
        sweep = [trade_off.critical_batch * 2 ** (k / 4) for k in range(-16, 17)]
        pairs = [trade_off.predict(batch_size) for batch_size in sweep]
        trade.plot([pair[1] for pair in pairs], [pair[0] for pair in pairs], color="0.5", label="fixed batch sizes")
    for name, (steps, samples) in points.items():
        trade.plot([samples], [steps], marker="o", linestyle="none", label=name)
    trade.set(xscale="log", yscale="log", xlabel="samples to the recorded run's end", ylabel="steps")
    trade.legend()

    def save(to: Path) -> None:
        with to.open("wb") as file:
            figure.savefig(file, format="png", dpi=120)

    try:
        write_whole(path, save)
    finally:
        pyplot.close(figure)
