"""Every transport between two workers, on steps whose results are known: NCCL on GPUs, gloo on a CPU.

    python benchmarks/gpu_ranks.py --device cuda --json transports.json

Parameters and statistics after steps of all kinds (gpu_kinds.py) must be the known ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import gpu_kinds
import torch
from gpu_workers import last_line, report, start
from report import parser_of
from workers import leave, messages_of, set_torchrun_variables

from kfuse import session
from kfuse.comm.settings import TRANSPORT_NAMES, CommOptions

LIMIT_S, TIMEOUT_S = 25.0, 10.0
"""How long the workers may take to start, or for a case; and what they wait for each other's messages."""


def main() -> int:
    """Runs all cases. Exit status 1 where one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--only", metavar="SCHEDULE", help="the cases of one transport")
    options = parser.parse_args()
    kept: dict[str, Any] = {"bucket_mb": gpu_kinds.BUCKET_MB}
    cases = [CommOptions(name, **kept) for name in TRANSPORT_NAMES if name != "symmetric"]
    if options.device == "cuda" and torch.cuda.device_count() > 1:  # it needs a GPU each
        cases += [CommOptions("symmetric", **kept), CommOptions("symmetric", reproducible=True, **kept)]
    cases += [CommOptions("allreduce", dtype="bf16", **kept), CommOptions(dtype="bf16", **kept)]
    cases.append(CommOptions(state="sharded", **kept))
    # Deterministic algorithms stay on: the last ones.
    cases += [CommOptions(reproducible=True, **kept), CommOptions(reproducible=True, state="sharded", **kept)]
    named = {name_of(case): case for case in cases if options.only in (None, case.schedule)}
    results = _run(options.device, named, 1 if options.device == "cuda" else 3)
    return report(options.device, results, options.json, "transports give what one worker gives")


def name_of(case: CommOptions) -> str:
    other = [value for value in (case.dtype, case.state) if value not in ("fp32", "replicated")]
    return ", ".join([case.schedule, *["reproducible"] * case.reproducible, *other])


def _run(device: str, cases: dict[str, CommOptions], patience: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One pair of workers for all cases. A case that fails or hangs ends them; the next ones get a new pair."""
    left = dict(cases)
    while left:
        answers: dict[str, list[list[str]]] = {name: [] for name in left}
        try:
            for name, wrong in messages_of(2, work, device, left, TIMEOUT_S * patience, limit_s=LIMIT_S * patience):
                answers[name].append(wrong)
                if len(answers[name]) == 2:
                    del left[name]
                    yield name, {"verdict": "; ".join([*answers[name][0], *answers[name][1]]) or "ok"}
        except Exception as error:  # of a worker, or a time that is over
            name = next(iter(left))
            del left[name]
            yield name, {"verdict": f"failed: {last_line(error)}"}


def work(rank: int, device: str, cases: dict[str, CommOptions], timeout_s: float, port: int, answers: Any) -> None:
    """One rank: what is wrong in each case."""
    set_torchrun_variables(rank, 2, port)
    for name, case in cases.items():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
        session.reset()
        group = start(device, rank, **case.named(), comm_timeout_s=timeout_s).group
        wrong = [gpu_kinds.check(kind, group.device) for kind in gpu_kinds.KINDS]
        answers.put((name, [each for each in wrong if each is not None]))
    leave(answers)


if __name__ == "__main__":
    sys.exit(main())
