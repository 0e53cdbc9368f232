"""What `kfuse replay` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kfuse.policies.signals import BasePolicy, Bounds
from kfuse.tools.replay.run import Change, Replay
from kfuse.tools.replay.steps import DecidedSettings, Gain, Recorded, TradeOff

_WIDTH = 110
"""Characters of the tables: a narrower terminal wraps them."""


@dataclass(frozen=True)
class ReplayRequest:
    """A replay, checked and ready to run."""

    run_dir: Path
    policy: BasePolicy
    name: str
    """Its option of `policy=`, or its class."""
    is_own: bool
    """The policy is the run's own, so it follows the recorded steps."""
    recorded: Recorded
    events: Sequence[Mapping[str, Any]] | None
    """The run's records of events.jsonl, where the policy is its own; None where there are none."""
    begin: DecidedSettings
    """What the run was configured with."""
    bounds: Bounds
    gain: Gain
    """The learning rate's factor, by `lr.scaling` of the run."""
    sync: str | None
    notes: tuple[str, ...]
    """What is not known of the run, in sentences."""


def console() -> Console:
    """Returns where to print: as wide as the tables need at least."""
    return Console(width=max(Console().width, _WIDTH))


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_report(console: Console, request: ReplayRequest, result: Replay, trade_off: TradeOff | None) -> None:
    """Prints the decisions, and steps and samples of the recorded run and of the replay."""
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


def _changes(changes: Sequence[Change], gain: Gain) -> Table:
    """Returns a line for each decision: when it applies, what it changes, and what the policy saw."""
    table = _table("step", "samples", "batch size", "workers", "lr factor", "noise scale then", "also")
    for each in changes:
        now, then = each.before, each.after
        rates = [f"{factor:.4g}" for factor in each.rate_factors(gain)]
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


def _totals(request: ReplayRequest, result: Replay, trade_off: TradeOff | None) -> Table:
    """Returns steps and samples of the recorded run, and of the replay where they are predicted."""
    steps, samples = request.recorded.totals()
    table = _table("", "steps", "vs recorded", "samples", "vs recorded")
    table.add_row("recorded", str(steps), "1.00", str(samples), "1.00")
    if not (request.is_own or result.cut_off) and (trade_off is not None or result.steps == steps):
        ratios = f"{result.steps / steps:.2f}", f"{result.samples / samples:.2f}"
        table.add_row(f"{request.name}, predicted", str(result.steps), ratios[0], str(result.samples), ratios[1])
    return table
