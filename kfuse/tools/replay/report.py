"""What `kfuse replay` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfuse.tools.replay.run import Change, Replay
from kfuse.tools.replay.steps import Recorded

_WIDTH = 110
"""Characters of the tables: a narrower terminal wraps them."""


def console() -> Console:
    """Returns where to print: as wide as the tables need at least."""
    return Console(width=max(Console().width, _WIDTH))


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_report(console: Console, recorded: Recorded, result: Replay, predicted: str | None) -> None:
    """Prints the decisions, and steps and samples of the recorded run and of the replay.

    predicted: the policy's name; None for the run's own, whose steps are those of the run.
    """
    if result.changes:
        console.print(_changes(result.changes))
    else:
        say(console, "It decides nothing.")
    trade_off, (steps, samples) = recorded.trade_off(), recorded.totals()
    table = _table("", "steps", "vs recorded", "samples", "vs recorded")
    table.add_row("recorded", str(steps), "1.00", str(samples), "1.00")
    if predicted and not result.cut_off and (trade_off is not None or result.steps == steps):
        ratios = f"{result.steps / steps:.2f}", f"{result.samples / samples:.2f}"
        table.add_row(f"{predicted}, predicted", str(result.steps), ratios[0], str(result.samples), ratios[1])
    console.print(table)
    if trade_off is None:
        say(console, "The noise scale was never known: steps and samples of another policy cannot be predicted.")
    else:
        say(
            console,
            f"To the same point: at least {trade_off.least_steps:.0f} steps (with very large batches), and at least "
            f"{trade_off.least_samples:.0f} samples (with very small ones); twice of both at the critical batch size, "
            f"{trade_off.critical_batch:.0f}",
        )
    if result.cut_off:
        say(console, f"Cut off after {result.steps} steps: the recorded run's end would take many more.")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="left" if column == "also" else "right", no_wrap=column != "also")
    return table


def _changes(changes: Sequence[Change]) -> Table:
    """Returns a line for each decision: when it applies, what it changes, and what the policy saw."""
    table = _table("step", "samples", "batch size", "workers", "lr factor", "noise scale then", "also")
    for each in changes:
        now, then = each.before, each.after
        rates = [f"{factor:.4g}" for factor in each.rates]
        pairs = [(now.batch_size, then.batch_size), (now.workers, then.workers), rates]
        seen, noise = each.seen, "unknown"
        if seen is not None and seen.noise_scale_low is not None:
            noise = f"at least {seen.noise_scale_low:.3g}"
            if seen.noise_scale is not None and seen.noise_scale_high is not None:
                noise = f"{seen.noise_scale:.3g} ({seen.noise_scale_low:.3g} to {seen.noise_scale_high:.3g})"
        table.add_row(
            str(each.step),
            str(each.samples),
            *("" if before == after else f"{before} -> {after}" for before, after in pairs),
            noise,
            Text("; ".join([*(f"{name} {value}" for name, value in each.others.items()), *each.notes])),
        )
    return table
