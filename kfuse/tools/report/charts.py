"""The charts of a report, by Bokeh: each is a figure, and what it shows in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure as new_figure
from numpy.typing import NDArray

from kfuse.observe.recorder import figure
from kfuse.tools.report.recorded import Column, Recorded

# After Wong's palette (2011), which the colour-blind tell apart; all are seen on white and on black.
COLOURS = ("#2f86d6", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

Rows = NDArray[np.intp]
Series = tuple[str, dict[str, Column], Rows]
"""A run's name, columns of it, and which of their rows are drawn."""


@dataclass(frozen=True)
class Chart:
    """figure: a Bokeh figure. text: what it shows, in a sentence for each run."""

    title: str
    text: str
    figure: Any


def charts(runs: Sequence[Recorded]) -> list[Chart]:
    """Returns the charts that these runs have something to show in."""
    steps = [(run.name, run.steps | {"throughput": _speed(run.steps)}, run.drawn) for run in runs]
    held_out = [(run.name, run.evaluations, np.arange(len(run.evaluations["step"]))) for run in runs]
    time = "seconds of training"
    made = [
        _lines("Training loss over samples", steps, "samples", "loss", "samples", "loss"),
        _noise(steps),
        _lines("Held-out accuracy over samples", held_out, "samples", "accuracy", "samples", "accuracy"),
        _workers(runs),
        _lines("Held-out loss over samples", held_out, "samples", "loss", "samples", "loss"),
        _lines("Learning rate over time", steps, "seconds", "lr", time, "learning rate"),
        _lines("Best learning rate by the curvature", steps, "samples", "best_lr", "samples", "learning rate"),
        _lines("Noise scale by the curvature", steps, "samples", "curvature_noise_scale", "samples", "samples"),
        _lines("Training loss over time", steps, "seconds", "loss", time, "loss"),
        _lines("Held-out accuracy over time", held_out, "seconds", "accuracy", time, "accuracy"),
        _lines("Samples a second", steps, "seconds", "throughput", time, "samples a second"),
        *(_step_time(run) for run in runs),
    ]
    return [chart for chart in made if chart is not None]


def _lines(title: str, series: Sequence[Series], x: str, y: str, x_label: str, y_label: str) -> Chart | None:
    """A line a run; None where no run has a number of it."""
    plot = _figure(title, x_label, y_label)
    texts, items = list[str](), list[LegendItem]()
    for (name, columns, rows), colour in zip(series, cycle(COLOURS), strict=False):
        known = np.isfinite(columns[y])
        if not known.any():
            continue
        drawn = rows[known[rows]]
        source = ColumnDataSource({each: columns[each][drawn] for each in dict.fromkeys((x, y, "step"))})
        line = plot.line(x, y, source=source, color=colour, line_width=1.5)
        items.append(LegendItem(label=name, renderers=[line]))
        plot.add_tools(_hover(line, name, {"step": "step", x_label: x, y_label: y}))
        texts.append(f"{name}: {_course(columns[y][known])}.")
    if not items:
        return None
    if len(series) > 1:
        _legend(plot, items)
    return Chart(title, " ".join(texts), plot)


def _noise(series: Sequence[Series]) -> Chart:
    """The batch size, and the noise scale with its interval, both in samples."""
    plot = _figure("Batch size and noise scale", "samples", "samples", y_axis_type="log")
    texts, items = list[str](), list[LegendItem]()
    shown = ("step", "samples", "batch_size", "noise_scale", "noise_scale_low", "noise_scale_high")
    for (name, columns, rows), colour in zip(series, cycle(COLOURS), strict=False):
        source = ColumnDataSource({each: columns[each][rows] for each in shown})
        band = plot.patches(*_bands(columns, rows), color=colour, alpha=0.2)
        noise = plot.line("samples", "noise_scale", source=source, color=colour, line_width=1.5)
        least = plot.line("samples", "noise_scale_low", source=source, color=colour, line_dash="dotted")
        batch = plot.step("samples", "batch_size", source=source, color=colour, line_width=2.5, mode="before")
        items += [
            LegendItem(label=f"{name}: batch size", renderers=[batch]),
            LegendItem(label=f"{name}: noise scale, low end dotted", renderers=[noise, least, band]),
        ]
        tips = {"step": "step", "batch size": "batch_size", "noise scale": "noise_scale", "low": "noise_scale_low"}
        plot.add_tools(_hover(batch, name, tips))
        sizes, low = columns["batch_size"], columns["noise_scale_low"]
        text = f"{name}: batch size {_course(sizes[np.isfinite(sizes)]) if np.isfinite(sizes).any() else 'unknown'}"
        if np.isfinite(low).any():
            now = f"{figure(columns['noise_scale'][-1])}, with the low end {figure(low[-1])}"
            text += f"; the noise scale's low end {_course(low[np.isfinite(low)])}; at the end the noise scale is {now}"
        texts.append(text + ".")
    _legend(plot, items)
    return Chart("Batch size and noise scale", " ".join(texts), plot)


def _bands(columns: dict[str, Column], rows: Rows) -> tuple[list[Column], list[Column]]:
    """Returns x and y of polygons: the intervals of successive drawn steps that have both ends."""
    x, low, high = (columns[name][rows] for name in ("samples", "noise_scale_low", "noise_scale_high"))
    known = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    pieces = [piece for piece in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1) if len(piece) > 1]
    return (
        [np.concatenate([x[piece], x[piece][::-1]]) for piece in pieces],
        [np.concatenate([low[piece], high[piece][::-1]]) for piece in pieces],
    )


def _workers(runs: Sequence[Recorded]) -> Chart:
    """The worker count, and on it what happened."""
    plot = _figure("Workers and events over time", "seconds of training", "workers")
    texts, items = list[str](), list[LegendItem]()
    for run, colour in zip(runs, cycle(COLOURS), strict=False):
        source = ColumnDataSource({name: run.steps[name][run.drawn] for name in ("step", "seconds", "workers")})
        line = plot.step("seconds", "workers", source=source, color=colour, line_width=2.5, mode="after")
        items.append(LegendItem(label=run.name, renderers=[line]))
        rows, counts = [event.row for event in run.events], run.steps["workers"]
        events = ColumnDataSource(
            {
                "seconds": run.steps["seconds"][rows],
                "workers": counts[rows],
                "step": [event.step for event in run.events],
                "text": [event.text for event in run.events],
            }
        )
        marks = plot.scatter("seconds", "workers", source=events, color=colour, size=9, marker="triangle")
        plot.add_tools(HoverTool(renderers=[marks], tooltips=[(run.name, "@text"), ("step", "@step{0}")]))
        lost = sum(event.kind == "failure" and event.of_worker for event in run.events)
        known = counts[np.isfinite(counts)]
        texts.append(f"{run.name}: {_course(known) if len(known) else 'unknown'}{f', {lost} lost' if lost else ''}.")
    plot.y_range.start, plot.yaxis.ticker = 0, BasicTicker(min_interval=1)
    _legend(plot, items)
    return Chart("Workers and events over time", " ".join(texts), plot)


def _step_time(run: Recorded) -> Chart | None:
    """Where the leader's time goes: waiting for data, and the rest of a step."""
    total, waited = run.steps["step_time_s"], run.steps["data_wait_s"]
    known = np.isfinite(total) & np.isfinite(waited)
    if not known.any():
        return None
    title = f"Time of a step: {run.name}"
    plot = _figure(title, "step", "milliseconds")
    drawn = run.drawn[known[run.drawn]]
    source = ColumnDataSource(
        {"step": run.steps["step"][drawn], "data": 1e3 * waited[drawn], "rest": 1e3 * (total - waited)[drawn]}
    )
    areas = plot.varea_stack(["data", "rest"], x="step", source=source, color=["#d55e00", "#56b4e9"], alpha=0.7)
    labels = ("waiting for data", "forward, backward, messages and update")
    _legend(plot, [LegendItem(label=label, renderers=[area]) for label, area in zip(labels, areas, strict=True)])
    plot.y_range.end = 1.5e3 * float(np.percentile(total[known], 99))  # a regroup's step would leave the others flat
    plot.y_range.start = 0
    share = waited[known].sum() / max(float(total[known].sum()), 1e-9)
    median = figure(1e3 * float(np.median(total[known])))
    text = f"{run.name}: a step takes {median} ms in the median; {share:.1%} of the time is spent waiting for data."
    text += "".join(f" Step {event.step}: {event.text}." for event in run.events if event.kind == "input_bound")
    return Chart(title, text, plot)


def _course(values: Column) -> str:
    """Returns how a figure went: its first and last value, and the least and the largest."""
    first, last, low, high = map(figure, (values[0], values[-1], values.min(), values.max()))
    if low == high:
        return f"{first} throughout"
    between = "" if {low, high} == {first, last} else f", between {low} and {high}"
    return f"from {first} to {last}{between}"


def _speed(columns: dict[str, Column]) -> Column:
    """Returns the samples a second, as a mean over about a hundredth of the run on either side."""
    samples, seconds = columns["samples"], columns["seconds"]
    width = max(len(samples) // 100, 1)
    rows = np.arange(len(samples))
    first, last = np.maximum(rows - width, 0), np.minimum(rows + width, len(samples) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = (samples[last] - samples[first]) / (seconds[last] - seconds[first])
    return np.where(np.isfinite(speed), speed, np.nan)


# -- parts -----------------------------------------------------------------------------------------------------------


def _figure(title: str, x_label: str, y_label: str, **given: Any) -> Any:
    plot = new_figure(
        height=320, sizing_mode="stretch_width", tools="xpan,xwheel_zoom,box_zoom,reset,save", toolbar_location="above",
        x_axis_label=x_label, y_axis_label=y_label, background_fill_alpha=0, border_fill_alpha=0, outline_line_alpha=0,
        name=title, **given,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.grid.grid_line_alpha = 0.35
    if x_label == "samples":
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")
    return plot


def _hover(line: Any, name: str, shown: dict[str, str]) -> HoverTool:
    tips = [("run", name), *((label, f"@{{{column}}}{{%.6g}}") for label, column in shown.items())]
    formatters: dict[str, Any] = {f"@{{{column}}}": "printf" for column in shown.values()}
    return HoverTool(renderers=[line], tooltips=tips, formatters=formatters, mode="vline")


def _legend(plot: Any, items: list[LegendItem]) -> None:
    legend = Legend(items=items, orientation="horizontal", ncols=2, click_policy="hide", background_fill_alpha=0)
    plot.add_layout(legend, "below")
