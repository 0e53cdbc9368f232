"""How the workers of a training keep together: `Sync`, the value of `comm.sync`, `kf.set_sync` and `Decision.sync`.

ssgd       every step's gradients are reduced: all workers have one model (synchronous SGD)
local:N    each worker updates with its own gradients; their models are averaged every N steps (local SGD)
sma        each worker has a model of its own, which is drawn to a central one (synchronous model averaging)
pair       each worker averages its model with that of another one, and waits for nobody
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MODES = ("ssgd", "sma", "pair")  # those that a word names
LOCAL = r"local:0*([1-9]\d{0,5})"  # the pattern of `local:N`


@dataclass(frozen=True)
class Sync:
    """A mode, and how many steps lie between synchronisations: with `local` N, else 1."""

    mode: str = "ssgd"  # "local", or one of `MODES`
    every: int = 1

    @staticmethod
    def parse(text: object) -> Sync:
        """Returns what a text ("ssgd", "local:8") stands for. Raises ValueError for anything else."""
        if isinstance(text, str) and text in MODES:
            return Sync(text)
        if not isinstance(text, str) or (local := re.fullmatch(LOCAL, text)) is None:
            raise ValueError(f"comm.sync={text}: must be one of {', '.join(MODES)}, local:N with N from 1 to 999999")
        return Sync("local", int(local[1]))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        return f"{self.mode}:{self.every}" if self.mode == "local" else self.mode
