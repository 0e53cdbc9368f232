"""Growth, and workers killed in backward, while sums are shared and while a group forms: one worker's bits each time.

    python benchmarks/gpu_elastic.py --device cuda --json elastic.json

The jobs are those of the tests, with their faults (tests/chaos.py), on GPUs: reproducible sums, 60 steps. Each must end
as the first one, which has one worker to which nothing happens.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_workers import PlacedLauncher, last_line, report, scratch
from report import parser_of, row

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from elastic_job import Job, assert_same_training, chaos, run_job, words

TRAINING = words(
    "comm=reproducible comm.bucket_mb=0.25 comm.timeout_s=10 train.clip_norm=1.0 lr.base=0.001 model=mlp",
    "model.hidden=[700,300] data=digits batch.size=48 batch.micro=8 batch.max=96 train.steps=60 train.heldout_every=30",
    "workers.max=2 elastic.replace=false",
)
GROWTH = {"phases": [{"step": 5, "workers": 2}]}
AND_BACK = {"phases": [*GROWTH["phases"], {"step": 30, "workers": 1}], "gates": [{"step": 20, "workers": 2}]}
PAUSE_S = 10.0  # the longest that is accepted, after a kill too
JOBS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "growth from 1 to 2, and back": AND_BACK,
    "SIGKILL in backward": {"events": [{"step": 20, "moment": "mid_reduction", "rank": 1, "how": "kill"}]},
    "SIGKILL while sums are shared": {"events": [{"step": 20, "moment": "point", "rank": 1, "how": "kill"}]},
    "SIGKILL while a group forms": {
        **GROWTH,  # training waits from step 12 on until the new worker is there
        "events": [{"step": 20, "moment": "joining", "rank": 1, "how": "kill"}],
    },
}
"""Arguments of `chaos.Chaos`. A job that does not grow begins with the workers that its events need."""


def main() -> int:
    """Runs all jobs. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    return report(options.device, _run(options.device), options.json, "jobs end with one worker's parameters")


def _run(device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    alone: Job | None = None
    with scratch() as folder:
        for number, (name, faults) in enumerate(JOBS.items()):
            started, said, directory = time.monotonic(), io.StringIO(), Path(folder, str(number))
            count = 2 if "events" in faults and "phases" not in faults else 1
            given = [*TRAINING, f"workers.count={count}", *chaos(directory, **faults)]
            found: dict[str, Any] = {}
            try:
                with contextlib.redirect_stdout(said):  # it tells all that it has seen
                    job = run_job(directory / "run", given, launcher=PlacedLauncher(device))
                    alone = alone or job
                    assert_same_training(job, alone)
                kinds = [event["kind"] for event in job.events]
                right = ("failure" in kinds) == ("events" in faults) and len(job.views) > (number > 0)
                verdict = "ok" if right else f"what should have happened did not: {kinds}"
                pauses = [view["pause_s"] for view in job.views if "pause_s" in view]
                found = {"rows": {f"{name}, longest pause in s": row(max(pauses, default=0.0), PAUSE_S, device)}}
                found |= {"pause_s": pauses, "params_sha256": job.summary["params_sha256"], "events": job.events}
            except (AssertionError, OSError, RuntimeError) as error:
                print(said.getvalue())
                verdict = f"failed: {last_line(error)}"
            yield name, {"verdict": verdict, "seconds": round(time.monotonic() - started, 1), **found}


if __name__ == "__main__":
    sys.exit(main())
