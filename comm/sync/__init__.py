"""How the workers of a training keep together: `Sync`, the value of `comm.sync`, `kf.set_sync` and `Decision.sync`.

ssgd       every step's gradients are reduced: all workers have one model (synchronous SGD)
local:N    each worker updates with its own gradients; their models are averaged every N steps (local SGD)
sma        each worker has a model of its own, which is drawn to a central one (synchronous model averaging)
pair       each worker averages its model with that of another one, and waits for nobody
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("ssgd", "local", "sma", "pair")
EVERY_MAX = 2**20  # most steps between synchronisations


@dataclass(frozen=True)
class Sync:
    """A mode, and how many steps lie between synchronisations: with `local` N, else 1."""

    mode: str = "ssgd"  # one of `MODES`
    every: int = 1

    @staticmethod
    def parse(text: object) -> Sync:
        """Returns what a text ("ssgd", "local:8") stands for. Raises ValueError for anything else."""
        mode, colon, every = text.partition(":") if isinstance(text, str) else ("", "", "")
        if mode not in MODES or (mode == "local") != bool(colon) or (colon and not every.isdecimal()):
            raise ValueError(f"comm.sync={text}: must be one of ssgd, local:N, sma, pair")
        if colon and not 1 <= int(every) <= EVERY_MAX:
            raise ValueError(f"comm.sync={text}: N must be 1 to {EVERY_MAX}")
        return Sync(mode, int(every) if colon else 1)

    def __str__(self) -> str:
        """The text that `parse` takes."""
        return f"{self.mode}:{self.every}" if self.mode == "local" else self.mode
