"""A step's statistics on their way from the device to the host: read when they have arrived, not waited for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import tail as t
from kfuse.comm.tail import Control
from kfuse.statistics.figures import Measured
from kfuse.statistics.noise_scale import NoiseScale, moments, rounding_error


@dataclass(frozen=True, kw_only=True)
class StepStats(Measured):
    """What one optimizer step measured, over all workers, as it arrives from the device.

    With sample counts, S, G2 and the noise scale are in units of samples; without, `unit` is "micro-batches" and
    a micro-batch takes the sample's place.
    """

    step: int
    """Steps taken before this one."""
    samples: float
    """B: this step's samples (or micro-batches)."""
    unit: str
    skipped: bool
    """The update was left out because a gradient was not finite."""
    control: Control
    """The leader's control word that travelled with this step."""
    seconds: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """By rank, what a micro-batch of the step before took; 0.0 is unknown. The one figure that is not reproducible."""
    digests: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Of the parameters of each rank that sent its digest with this step (see `comm.check_every`), in rank order."""


@dataclass
class _InFlight:
    step: int
    unit: str
    host: Tensor
    arrived: torch.cuda.Event | None


class Statistics:
    """The queue of steps whose records are on their way, and the running noise scale over those that arrived."""

    def __init__(self) -> None:
        self.noise_scale = NoiseScale()
        self.bf16_wire = False
        """Gradients travel between workers in bf16, so that |gbar|^2 has its rounding error."""
        self.latest: StepStats | None = None
        self.keep_unread = False
        """Someone will `read` every step."""
        self._in_flight: deque[_InFlight] = deque()
        self._unread: list[StepStats] = []

    def push(self, step: int, unit: str, record: Tensor) -> None:
        """`record`: float64 [TAIL_SLOTS + 2 + workers * RANK_SLOTS] on the device.

        The engine's record, then 1 if the update was skipped, then what each rank alone wrote into the tail.
        """
        if record.device.type == "cuda":
            host = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
            host.copy_(record, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._in_flight.append(_InFlight(step, unit, host, arrived))
        else:
            self._in_flight.append(_InFlight(step, unit, record, None))
        self._receive(1)  # the step before has arrived by now, or soon will have

    def read(self, lag: int) -> list[StepStats]:
        """Steps not yet read, except the newest `lag` ones, which may still be on their way."""
        self._receive(lag)
        newest = self._in_flight[-1].step if self._in_flight else self.latest.step if self.latest else -1
        ready = [stats for stats in self._unread if stats.step <= newest - lag]
        self._unread = self._unread[len(ready) :]
        return ready

    def begin_run(self) -> None:
        """From now on every step is kept until it is read; what was measured before is not."""
        self._receive(0)
        self.keep_unread, self._unread, self.latest = True, [], None

    def end_run(self) -> None:
        self.keep_unread, self._unread = False, []

    def wait(self) -> StepStats | None:
        """The latest step's statistics; waits for the device."""
        self._receive(0)
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """The running estimate and the records not yet read, in plain values. Steps read so far are left out."""
        for item in self._in_flight:
            if item.arrived is not None:
                item.arrived.synchronize()
        in_flight = [(item.step, item.unit, item.host.tolist()) for item in self._in_flight]
        lists = ("seconds", "digests")  # tuples, but for plain formats
        unread = [asdict(stats) | {name: list(getattr(stats, name)) for name in lists} for stats in self._unread]
        return {"noise_scale": self.noise_scale.state_dict(), "in_flight": in_flight, "unread": unread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise_scale.load_state_dict(state["noise_scale"])
        self._in_flight = deque(
            _InFlight(step, unit, torch.tensor(record, dtype=torch.float64), None)
            for step, unit, record in state["in_flight"]
        )
        self._unread = [
            StepStats(
                **stats
                | {"control": Control(**stats["control"])}
                | {name: tuple(stats[name]) for name in ("seconds", "digests")}
            )
            for stats in state["unread"]
        ]
        self.latest = self._unread[-1] if self._unread else None

    def _receive(self, lag: int) -> None:
        while len(self._in_flight) > lag:
            item = self._in_flight.popleft()
            if item.arrived is not None:
                item.arrived.synchronize()
            self.latest = self._digest(item)
            if self.keep_unread:
                self._unread.append(self.latest)

    def _digest(self, item: _InFlight) -> StepStats:
        values = item.host.tolist()
        samples, micro_batches = values[t.SAMPLES], round(values[t.MICRO_BATCHES])
        grad_total, skipped = values[t.TAIL_SLOTS], bool(values[t.TAIL_SLOTS + 1])
        if self.latest is not None and self.latest.unit != item.unit:
            self.noise_scale = NoiseScale()  # what was averaged was in other units
        of_ranks = [values[i : i + t.RANK_SLOTS] for i in range(t.TAIL_SLOTS + 2, len(values), t.RANK_SLOTS)]
        digests = [t.digest_from_slots(slots[1:]) for slots in of_ranks]
        variance, grad_sq = moments(values[t.SUM_SQUARES], grad_total, samples, micro_batches)
        if variance is None:
            self.noise_scale.update(None, None)
        else:
            rounding = rounding_error(grad_total, samples, micro_batches, len(of_ranks) if self.bf16_wire else 0)
            self.noise_scale.update(variance, grad_sq, (samples, micro_batches), rounding)
        running = self.noise_scale.estimate()
        loss = values[t.LOSS] / samples if samples else math.nan
        return StepStats(
            step=item.step,
            samples=samples,
            micro_batches=micro_batches,
            unit=item.unit,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=math.sqrt(grad_total) if math.isfinite(grad_total) else None,
            grad_sq=grad_sq,
            grad_variance=variance,
            noise_scale=running.noise_scale,
            noise_scale_low=running.low,
            noise_scale_high=running.high,
            mean_grad_sq=running.mean_grad_sq,
            mean_grad_variance=running.mean_grad_variance,
            skipped=skipped,
            control=Control.from_slots(values),
            seconds=tuple(slots[0] for slots in of_ranks),
            digests=tuple(digest for digest in digests if digest is not None),
        )
