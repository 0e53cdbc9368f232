"""After a loss: who has kept the sums of which micro-batches (`elastic.keep_sums`; see `kfuse.comm.kept_sums`)."""

from __future__ import annotations

import torch

from kfuse.comm.engine import Engine
from kfuse.comm.group import Group
from kfuse.session import Session
from kfuse.train.progress import Stage
from kfuse.train.settings import Settings

Kept = tuple[tuple[int, ...], ...]
"""By rank, the micro-batches whose sum the worker has; empty: none has any."""


def gather(engine: Engine, group: Group, newest: int, own: int) -> Kept:
    """What the workers of a new view have kept of the step that comes.

    newest: the most advanced worker's position (`Progress.position`). own: this worker's, -1 for none. Sums count only
    where the two are equal: then they were computed with the parameters that all will have. Raises CommError.
    """
    at, stage = divmod(newest, len(Stage))
    if not engine.options.keep_sums or stage != Stage.UPDATE:
        return ()
    sums = engine.kept_sums
    usable = sums is not None and own == newest and sums.step == at
    mine = sums.micro_batches if sums is not None and usable else ()
    what = "micro-batches whose sums are kept"
    counts = [int(count) for count in group.all_gather(torch.tensor([len(mine)], device=group.device), what)]
    if not any(counts):
        return ()
    padded = torch.tensor([*mine, *[-1] * (max(counts) - len(mine))], device=group.device)
    rows = group.all_gather(padded, what)
    return tuple(tuple(row.tolist()[:count]) for row, count in zip(rows, counts, strict=True))


def refuse(session: Session, settings: Settings) -> None:
    """Raises ValueError for the option in a job without a supervisor, where no step is made again, and where the
    micro-batches of a step may be others when it is made again, on fewer workers.
    """
    if session.comm.keep_sums and settings.max_micro_batch is not None:
        raise ValueError(f"elastic.keep_sums=true: must be false with max_micro_batch={settings.max_micro_batch}")
    if session.comm.keep_sums and not session.elastic:
        raise ValueError(
            "elastic.keep_sums=true: must be false without a supervisor (torchrun, one process): there no step is made "
            "again after a loss"
        )
