"""A script for kfuse-run: a stock configuration by `fit`. Worker 0 is killed within the fourth step where it can be."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from stock import BY_SAMPLES, MAKERS, MORE_BY_FIT
from transformers import TrainerCallback

from kfuse.integrations.transformers import fit, init
from kfuse.session import current


class Killed(TrainerCallback):  # type: ignore[misc]
    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 3 and current().worker == 0 and current().group.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(name: str, folder: str) -> None:
    init(comm_reproducible=True)
    trainer = MAKERS[name](Path(folder), **MORE_BY_FIT.get(name, {}))
    trainer.add_callback(Killed())
    fit(trainer, tokens=name not in BY_SAMPLES)


if __name__ == "__main__":
    main(*sys.argv[1:])
