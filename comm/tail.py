"""The tail: a few fp32 numbers that travel at the end of the last bucket, so that no message is theirs alone.

First one flag per parameter (how many micro-batches gave it a gradient), then the slots named below, then one for each
rank, which it alone writes: how many seconds its last step's micro-batches took, each. Sums over all micro-batches come
out of the same reduction as the gradients. Only the leader writes the control word, so its sum is the leader's
decision; integers up to 2^24 and every fp32 value survive the sum with zeros exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

SUM_SQUARES = 0  # sum over micro-batches of b_j |g_j|^2
SAMPLES = 1  # sum of b_j
LOSS = 2  # sum of b_j times the micro-batch's mean loss; NaN where a loss was not given
MICRO_BATCHES = 3
CONTROL = 4
TAIL_SLOTS = 12


@dataclass(frozen=True)
class Control:
    """The control word. A zero field says nothing."""

    batch_size: int = 0
    lr_scale: float = 0.0
    generation: int = 0  # switch to this view at the step boundary
    stop: int = 0  # reason code: see kfuse.session
    transport: int = 0  # 1 + index in kfuse.comm.transports.NAMES
    tree: int = 0  # 1 + index in kfuse.comm.transports.TREES
    sync_every: int = 0  # steps

    def slots(self) -> tuple[float, ...]:
        return tuple(map(float, vars(self).values()))

    @staticmethod
    def from_slots(values: Sequence[float]) -> Control:
        batch_size, lr_scale, *whole = values[CONTROL : CONTROL + len(fields(Control))]
        return Control(int(batch_size), float(lr_scale), *map(int, whole))
