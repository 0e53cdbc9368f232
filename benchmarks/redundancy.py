"""What each choice of elastic.redundancy costs, and what a lost worker costs with it.

    python benchmarks/redundancy.py --rounds 7 --json benchmarks/results/redundancy.json

Three workers on this machine (gloo, one thread each) train an MLP with sharded AdamW state.

1) Steps. Two optimizers in the same processes, one of them mirrored, take turns: a few steps each, round after round.
   Ratios are of a round's times.
2) Jobs. The choices take turns, one job of each in a round. A job makes steps undisturbed, of which steps 10 to 60 are
   timed, checkpoints included; then rank 1 is killed in its update, and the job goes on. The step of the
   kill is drawn for each round, the same for all choices, out of as many as two checkpoints take.
   Ratios are of a round's times, to those of `none`; they need a machine that nobody else uses.

Bytes are those of the optimizer's tensors on rank 0 after 60 steps, over the number of parameters. The pause is that of
the survivors: from the error to the first step in their new group, as the `view` event has it. Steps are those that are
made again. `lost step again` is the time from the kill until rank 0 has completed the step of the kill: the loss is
noticed, the new group is formed, the steps are made again. Figures after a kill are medians, least and largest ones.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from machine import parser_of, warn_if_busy, write
from rich.console import Console
from rich.table import Table
from step_report import median_interval
from turns import network, seconds_in_turns

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from chaos import Chaos  # noqa: E402
from distributed import run_workers  # noqa: E402
from elastic_job import assert_exact, override, run_job, words  # noqa: E402

import kfuse as kf  # noqa: E402
from kfuse import rank, session  # noqa: E402
from kfuse.optim.layout import Part  # noqa: E402

CHOICES = ("none", "mirror")
TIMED, KILLS = (10, 60), (61, 160)
"""The first and the last step: of those that are timed, and of those that a kill's is drawn from."""
HIDDEN, CHECKPOINT_EVERY = 1000, 50
TRAINING = words(
    f"model=mlp data=digits model.hidden=[{HIDDEN},{HIDDEN}] batch.size=48 batch.micro=4 train.epochs=1000",
    f"train.steps={KILLS[1] + 20}",
    "train.eval_every=1000 train.save_model=false comm.state=sharded comm.bucket_mb=1",
    f"workers.count=3 workers.max=3 checkpoint.every_steps={CHECKPOINT_EVERY}",
    "policy._target_=redundancy.Watched",
)


class Watched(Chaos):
    """Writes, on rank 0, when each step was completed, the time of a step, and the bytes that are held."""

    _started = 0.0

    def after_step(self) -> None:
        if rank() == 0 and self._step == TIMED[0]:
            self._started = time.perf_counter()
        if rank() == 0 and self._step == TIMED[1] and self._started:
            seconds = (time.perf_counter() - self._started) / (TIMED[1] - TIMED[0])
            held = {"step_s": seconds, "bytes": held_bytes(), "workers": session.current().group.size}
            (self._directory / "held.json").write_text(json.dumps(held))
        if rank() == 0 and self._step >= KILLS[0]:
            with (self._directory / "ends").open("a") as file:
                file.write(f"{self._step} {time.time()}\n")
        super().after_step()


def held_bytes() -> int:
    """Of the optimizer's state tensors."""
    return sum(t.nbytes for flat in gc.get_objects() if type(flat) is Part for t in flat.tensors.values())


def run(directory: Path, choice: str, kill: int) -> dict[str, float]:
    """One job of this choice, in which a worker is lost in step `kill`."""
    events = [{"step": kill, "moment": "updating", "rank": 1, "how": "kill", "workers": 3}]
    marks = directory / "events"
    given = [override("+policy.directory", str(marks)), override("+policy.events", events)]
    job = run_job(directory / "run", [*TRAINING, f"elastic.redundancy={choice}", "+policy.adaptive=false", *given])
    assert job.error is None, job.told()
    assert_exact(job)
    held = json.loads((marks / "held.json").read_text())
    after = next(view for view in job.views if view["reason"] == "failure")
    back = job.of_kind("went_back")
    struck = (marks / "event-0").stat().st_mtime
    ends = [(int(step), float(at)) for step, at in map(str.split, (marks / "ends").read_text().splitlines())]
    again = next(at for step, at in ends if step == kill and at > struck)
    found = {"pause_s": after["pause_s"], "steps_lost": float(back[0]["steps"]) if back else 0.0}
    return {**held, "kill_step": float(kill), **found, "lost_step_again_s": again - struck}


def steps_in_turns(rounds: int, steps: int) -> list[list[float]]:
    """On each of several workers: seconds a step without mirrors and with them, by round."""
    kf.init(comm_state="sharded", comm_bucket_mb=1.0)
    pairs = []
    for mirrors in (False, True):
        model = network(HIDDEN)
        with patch.object(session.Session, "mirrors", mirrors):
            pairs.append((model, kf.FusedAdamW(model.parameters(), lr=1e-3)))
    return seconds_in_turns(pairs, 16, rounds, steps)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=60, help="rounds of steps (default 60)")
    args = parser.parse_args()
    warn_if_busy()
    kills = np.random.default_rng(0).integers(KILLS[0], KILLS[1], args.rounds, endpoint=True)
    console, found = Console(width=140), dict[str, list[dict[str, float]]]((choice, []) for choice in CHOICES)
    path = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
        turns = np.array(run_workers(3, steps_in_turns, args.turns, 5)[0])
        for number in range(args.rounds):
            for choice in CHOICES if number % 2 else reversed(CHOICES):
                told = io.StringIO()  # for a failed test
                with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(told):
                    found[choice].append(run(Path(name), choice, int(kills[number])))
    ratio = median_interval(turns[:, 1] / turns[:, 0])
    console.print(
        f"a step with mirrors: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of one without, "
        f"which takes {1e3 * np.median(turns[:, 0]):.1f} ms; {args.turns} rounds in turns"
    )
    report(console, found, {"step_with_mirrors": ratio, "turns_s": turns.tolist()}, args.json)
    return 0


def report(
    console: Console, found: dict[str, list[dict[str, float]]], steps: dict[str, Any], file: Path | None
) -> None:
    params = 64 * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN + HIDDEN * 10 + 10
    table = Table(title=f"elastic.redundancy, 3 workers, {params / 1e6:.2f} M parameters, {len(found['none'])} rounds")
    after = ("pause, ms", "steps made again", "lost step again, ms")
    for heading in ("choice", "bytes a parameter", "step, ms", "to none (95 %)", *after):
        table.add_column(heading, justify="right")
    rows: dict[str, Any] = {}
    for choice, runs in found.items():
        ratios = np.array([a["step_s"] / b["step_s"] for a, b in zip(runs, found["none"], strict=True)])
        row = {
            "bytes_per_parameter": max(each["bytes"] for each in runs) / params,
            "step_s": float(np.median([each["step_s"] for each in runs])),
            "step_to_none": median_interval(ratios),
            "pause_s": _spread(runs, "pause_s"),
            "steps_made_again": _spread(runs, "steps_lost"),
            "lost_step_again_s": _spread(runs, "lost_step_again_s"),
        }
        rows[choice] = row
        low, middle, high = (row["step_to_none"][key] for key in ("low", "median", "high"))
        table.add_row(
            choice,
            f"{row['bytes_per_parameter']:.2f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            _said(row["pause_s"], 1e3),
            _said(row["steps_made_again"], 1),
            _said(row["lost_step_again_s"], 1e3),
        )
    console.print(table)
    write(file, ["torch"], checkpoint_every=CHECKPOINT_EVERY, **steps, rows=rows, rounds=found)


def _spread(runs: list[dict[str, float]], figure: str) -> dict[str, float]:
    values = [each[figure] for each in runs]
    return {"median": float(np.median(values)), "least": min(values), "largest": max(values)}


def _said(spread: dict[str, float], scale: float) -> str:
    median, least, largest = (scale * spread[key] for key in ("median", "least", "largest"))
    return f"{median:.0f} ({least:.0f} to {largest:.0f})"


if __name__ == "__main__":
    sys.exit(main())
