"""The command `kfuse replay RUN_DIR [override ...]`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kfuse.settings.messages import explain
from kfuse.settings.tree import ConfigError
from kfuse.tools.replay import report
from kfuse.tools.replay.decisions import compared
from kfuse.tools.replay.request import read_request
from kfuse.tools.replay.run import run
from kfuse.tools.replay.simulated import RecordedSteps, SimulatedSteps

USAGE = """\
kfuse replay RUN_DIR [policy=...] [policy.NAME=VALUE ...] [plot=PATH]

Prints what a policy would have decided on the run recorded in RUN_DIR, and how many steps and samples it would have
taken to the same point; draws it to RUN_DIR/replay_POLICY.png, or to PATH (plot=null: no plot). Without policy=... it
is the run's own policy, with other arguments if you give some. batch.min, batch.max, workers.min and workers.max set
other bounds than the run's. Nothing is trained. docs/policies.md says what is assumed.
Exit status 0; 1 where the policy raises an error; 2 for what is no run directory, or no policy."""


def main(words: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> int:
    """Replays, prints and draws. Returns the exit status: 1 where the policy fails, or the plot cannot be written.

    words: of the command line, after `kfuse replay`. compose: makes a run's configuration from overrides. Raises
    ConfigError for what cannot be replayed.
    """
    try:
        request = read_request(words, compose)
    except (HydraException, OmegaConfBaseException) as error:  # of overrides that it cannot read
        raise ConfigError(explain(error)) from error
    console, recorded = report.console(), request.recorded
    source = RecordedSteps(recorded) if request.is_own else SimulatedSteps(recorded, request.gain, request.bounds)
    try:
        result = run(request.policy, source, request.begin, request.bounds, request.sync)
    except (Exception, SystemExit):  # the user's class may raise anything
        traceback.print_exc()
        name = type(request.policy).__name__
        report.say(console, f"the policy {name} has raised an error at step {source.next_step}")
        return 1
    trade_off = recorded.trade_off()
    report.print_report(console, request, result, trade_off)
    if request.events is not None:
        first, with_rates = recorded.signals[0].step, request.rates_follow_at_once
        report.say(console, compared(result.changes, request.gain, request.events, first, with_rates))
    elif request.is_own:
        report.say(console, "not compared with the recorded decisions: there is no events.jsonl")
    if request.plot is None:
        return 0
    try:
        report.draw(request, result, trade_off, request.plot)
    except OSError as error:
        report.say(console, f"{request.plot}: cannot be written: {error.strerror or error}")
        return 1
    report.say(console, f"plot: {request.plot}")
    return 0
