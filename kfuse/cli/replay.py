"""`kfuse replay RUN_DIR [override ...]`: what a policy would have decided on a recorded run, without training.

`replay_request` reads what is asked for, kfuse/replay runs the policy, and `replay_report` prints and draws.
"""

from __future__ import annotations

import traceback

from kfuse.cli import replay_report
from kfuse.cli.replay_request import ReplayRequest
from kfuse.replay.events import compared
from kfuse.replay.run import ReplayResult, run
from kfuse.replay.steps import RecordedSteps, SimulatedSteps, StepSource

USAGE = """\
kfuse replay RUN_DIR [policy=...] [policy.NAME=VALUE ...] [plot=PATH]

Prints what a policy would have decided on the run recorded in RUN_DIR, and how many steps and samples it would have
taken to the same point; draws it to RUN_DIR/replay_POLICY.png, or to PATH (plot=null: no plot). Without policy=... it
is the run's own policy, with other arguments if you give some. batch.min, batch.max, workers.min and workers.max set
other bounds than the run's. Nothing is trained. docs/policies.md says what is assumed.
Exit status 0; 1 where the policy raises an error; 2 for what is no run directory, or no policy."""


def main(request: ReplayRequest) -> int:
    """Replays, prints and draws. Returns the exit status: 1 where the policy fails, or the plot cannot be written."""
    console, recorded = replay_report.console(), request.recorded
    source: StepSource = (
        RecordedSteps(recorded) if request.is_own else SimulatedSteps(recorded, request.gain, request.bounds)
    )
    try:
        result = run(request.policy, source, request.begin, request.bounds, request.sync)
    except (Exception, SystemExit):  # the user's class may raise anything
        traceback.print_exc()
        name = type(request.policy).__name__
        replay_report.say(console, f"the policy {name} has raised an error at step {source.next_step}")
        return 1
    trade_off = recorded.trade_off()
    replay_report.print_report(console, request, result, trade_off)
    if request.is_own:
        replay_report.say(console, _compared(request, result))
    if request.plot is None:
        return 0
    try:
        replay_report.draw(request, result, trade_off, request.plot)
    except OSError as error:
        replay_report.say(console, f"{request.plot}: cannot be written: {error.strerror or error}")
        return 1
    replay_report.say(console, f"plot: {request.plot}")
    return 0


def _compared(request: ReplayRequest, result: ReplayResult) -> str:
    """Whether the run's own policy decides as it did."""
    if request.events is None:
        return "not compared with the recorded decisions: there is no events.jsonl"
    first = request.recorded.signals[0].step
    return compared(result.changes, request.gain, request.events, first, request.rates_follow_at_once)
