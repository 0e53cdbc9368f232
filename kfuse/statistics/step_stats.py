"""Copies each step's record from the device to the host without a wait, and computes the step's statistics from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm import measurement as t
from kfuse.comm.devices import Event
from kfuse.statistics.figures import Measured
from kfuse.statistics.noise_scale import Estimate, NoiseScale, moments, rounding_error


@dataclass(frozen=True, kw_only=True)
class StepStats(Measured):
    """What one optimizer step measured, over all workers, as it arrives from the device.

    With sample counts, S, G2 and the noise scale are in units of samples; without, `unit` is "micro-batches" and
    a micro-batch takes the sample's place.
    """

    step: int  # Steps taken before this one
    samples: float  # B: this step's samples (or micro-batches)
    unit: str
    skipped: bool  # The update was left out because a gradient was not finite
    decision: int = 0  # The number of the decision that rank 0 announced with this step; 0: none
    seconds: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Seconds per micro-batch by rank in the step before; 0.0 is unknown. Not reproducible."""
    previous_step_time_s: float | None = field(default=None, compare=False)
    """On the leader: see `policies.Signals`. Not reproducible."""
    previous_data_wait_s: float | None = field(default=None, compare=False)
    """The part of it that the leader waited for data."""
    figures: dict[str, float] = field(default_factory=dict, compare=False)
    """What a step function returned beside the loss, by name: means over the samples. One that is not finite is left
    out; empty too on a worker that has run no micro-batch so far."""

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": list(self.seconds)}

    @staticmethod
    def of_plain(values: dict[str, Any]) -> StepStats:
        return StepStats(**values | {"seconds": tuple(values["seconds"])})


# Records that may be on their way to the host before it waits for the oldest: so many steps it may be ahead.
_MOST_IN_FLIGHT = 8


@dataclass
class _Record:
    """A step's record, on its way to the host or there. Once taken in it has the step's moments."""

    step: int
    unit: str
    host: Tensor
    copied: Event | None
    figures: int  # How many of its last numbers are a step function's figures
    local: bool = False
    wire: str = "fp32"
    of_sums: Callable[[list[float]], list[float]] | None = None  # see `Statistics.push`
    variance: float | None = None
    grad_sq: float | None = None

    def values(self) -> list[float]:
        """Waits until the record is on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        values: list[float] = self.host.tolist()
        return values if self.of_sums is None else self.of_sums(values)

    def split(self) -> tuple[list[float], list[float]]:
        """The record without the figures, and these."""
        values = self.values()
        return values[: len(values) - self.figures], values[len(values) - self.figures :]


class Statistics:
    """The queue of records that are being copied to the host, and the running noise scale over those that arrived.

    A StepStats, with the noise scale's interval, is computed only when it is read.
    """

    def __init__(self) -> None:
        self.noise_scale = NoiseScale()
        self.wire = "fp32"  # From the next `push` on, how gradients travel between workers: see `rounding_error`
        # Steps whose records the last `push` took in, in order, and whether a gradient of theirs was not finite.
        self.arrived: list[tuple[int, bool]] = []
        # `push` waits for the record of the step before, so that all workers know it after the same step.
        self.at_fixed_lag = False
        # Names of a step function's figures, in the order of their slots; None before the first forward.
        self.figure_names: tuple[str, ...] | None = None
        self.keep_unread = False  # Steps are kept until `read` returns them
        self.presented = True  # Each step is read with the noise scale and its interval
        self._in_flight: deque[_Record] = deque()
        self._newest: _Record | None = None
        self._latest: StepStats | None = None
        self._unread: list[StepStats] = []

    def push(
        self,
        step: int,
        unit: str,
        record: Tensor,
        local: bool = False,
        figures: int = 0,
        of_sums: Callable[[list[float]], list[float]] | None = None,
    ) -> None:
        """Starts copying a step's record to the host, and takes in those of earlier steps that have arrived.

        The host waits for a GPU only with `at_fixed_lag`, or where it is too many steps ahead.
        record: float64 [RECORD_SLOTS + workers + figures] on the device, from `Measurement.record`.
        unit: "samples" or "micro-batches". local: the gradients were this worker's own, so their norm is unknown.
        figures: how many of its last numbers are a step function's.
        of_sums: computes the record on the host, of the copied numbers; `record` then has these numbers.
        """
        host, copied = record, None
        if (device := devices.of(record.device)).asynchronous:
            host = device.pinned(record.shape, record.dtype)
            host.copy_(record, non_blocking=True)
            copied = device.event()
            copied.record()
        self._in_flight.append(_Record(step, unit, host, copied, figures, local, self.wire, of_sums))
        self.arrived = []
        while len(self._in_flight) > 1:
            oldest, too_many = self._in_flight[0].copied, len(self._in_flight) > _MOST_IN_FLIGHT
            if not (self.at_fixed_lag or too_many or oldest is None or oldest.query()):
                break
            self._receive(len(self._in_flight) - 1)

    @property
    def latest(self) -> StepStats | None:
        """The newest step that has arrived; None before the first."""
        if self._latest is None and self._newest is not None:
            self._latest = self._stats(self._newest, self.noise_scale.estimate())
        return self._latest

    def read(self, lag: int) -> list[StepStats]:
        """The steps not yet read, in order, except the newest `lag` ones, whose records may not have arrived."""
        self._receive(lag)
        newest = self._in_flight[-1].step if self._in_flight else self.latest.step if self.latest else -1
        ready = [stats for stats in self._unread if stats.step <= newest - lag]
        self._unread = self._unread[len(ready) :]
        return ready

    def decisions(self, lag: int) -> list[tuple[int, int]]:
        """Step and number of each decision that was announced with a step not yet read, but for the newest `lag` ones.

        Waits for their records.
        """
        numbers = [(stats.step, stats.decision) for stats in self._unread if stats.decision]
        for item in list(self._in_flight)[: max(0, len(self._in_flight) - lag)]:
            if number := int(item.values()[t.DECISION]):
                numbers.append((item.step, number))
        return numbers

    def begin_run(self, presented: bool = True) -> None:
        """A training begins: from now on every step is kept until it is read. Earlier steps are dropped.

        presented: somebody sees each step's noise scale, so it is computed with its interval. Else it is unknown in
        the steps that are read, and computed where `latest` is asked for it.
        """
        self._receive(0)
        self.keep_unread, self.presented, self._unread = True, presented, []
        self._newest = self._latest = None

    def end_run(self) -> None:
        """The training has ended: steps are no longer kept."""
        self.keep_unread, self._unread = False, []

    def wait(self) -> StepStats | None:
        """The latest step's statistics; waits for the device."""
        self._receive(0)
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """The running estimate, the latest step and those not yet read, in plain values."""
        in_flight = [(it.step, it.unit, it.values(), it.figures, it.local, it.wire) for it in self._in_flight]
        latest = self._latest
        if latest is None and self._newest is not None:
            latest = self._stats(self._newest, self.noise_scale.means_alone())
        names = None if self.figure_names is None else list(self.figure_names)
        return {
            "noise_scale": self.noise_scale.state_dict(),
            "in_flight": in_flight,
            "unread": [stats.plain() for stats in self._unread],
            "latest": None if latest is None else latest.plain(),
            "figure_names": names,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.noise_scale.load_state_dict(state["noise_scale"])
        self._in_flight = deque()
        for step, unit, record, *more in state["in_flight"]:
            self._in_flight.append(_Record(step, unit, torch.tensor(record, dtype=torch.float64), None, *more))
        self._unread = list(map(StepStats.of_plain, state["unread"]))
        names = state["figure_names"]
        self.figure_names = None if names is None else tuple(names)
        self._newest = self._latest = None
        if (latest := state.get("latest")) is not None:
            now, stats = self.noise_scale.estimate(), StepStats.of_plain(latest)
            self._latest = replace(
                stats, noise_scale=now.noise_scale, noise_scale_low=now.low, noise_scale_high=now.high
            )

    def _receive(self, lag: int) -> None:
        while len(self._in_flight) > lag:
            self._take_in(self._in_flight.popleft())
            if self.keep_unread and self._newest is not None:
                latest = self.latest if self.presented else self._stats(self._newest, self.noise_scale.means_alone())
                assert latest is not None
                self._unread.append(latest)

    def _take_in(self, item: _Record) -> None:
        """Updates the running estimate with the step's S and G2."""
        values, _ = item.split()
        unit = self._newest.unit if self._newest else self._latest.unit if self._latest else item.unit
        if unit != item.unit:
            self.noise_scale = NoiseScale()  # what was averaged was in other units
        samples, micro_batches, grad_total = values[t.SAMPLES], round(values[t.MICRO_BATCHES]), values[t.GRAD_SQ]
        # A rounding error is nearly uncorrelated with the other workers' gradients, so |gbar|^2 has grown by as much.
        variance, grad_sq = moments(values[t.SUM_SQUARES], grad_total - values[t.ADDED], samples, micro_batches)
        item.variance, item.grad_sq = variance, grad_sq
        if variance is None:
            self.noise_scale.update(None, None)
        else:
            workers = len(values) - t.RECORD_SLOTS
            rounding = rounding_error(grad_total, samples, micro_batches, workers, item.wire)
            self.noise_scale.update(variance, grad_sq, (samples, micro_batches), rounding)
        self.arrived.append((item.step, bool(values[t.SKIPPED]) or not (item.local or math.isfinite(grad_total))))
        self._newest, self._latest = item, None

    def _stats(self, newest: _Record, running: Estimate) -> StepStats:
        values, sums = newest.split()
        samples, grad_total, step_time = values[t.SAMPLES], values[t.GRAD_SQ], values[t.STEP_TIME]
        loss = values[t.LOSS] / samples if samples else math.nan
        named = zip(self.figure_names or (), sums, strict=False)
        return StepStats(
            step=newest.step,
            samples=samples,
            micro_batches=round(values[t.MICRO_BATCHES]),
            unit=newest.unit,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=math.sqrt(grad_total) if math.isfinite(grad_total) else None,
            grad_sq=newest.grad_sq,
            grad_variance=newest.variance,
            noise_scale=running.noise_scale,
            noise_scale_low=running.low,
            noise_scale_high=running.high,
            mean_grad_sq=running.mean_grad_sq,
            mean_grad_variance=running.mean_grad_variance,
            skipped=bool(values[t.SKIPPED]),
            decision=int(values[t.DECISION]),
            previous_step_time_s=step_time if 0 < step_time < math.inf else None,
            previous_data_wait_s=values[t.DATA_WAIT] if step_time else None,
            seconds=tuple(values[t.RECORD_SLOTS :]),
            figures={name: mean for name, total in named if math.isfinite(mean := total / samples)},
        )
