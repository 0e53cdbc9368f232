"""The shared core of the monitors: a step's statistics from the squared norms of its gradients.

What a monitor sees of micro-batch j is s_j, the gradient that its backward left: v_j g_j, times the loss scale. g_j is
the gradient of its mean loss, and v_j = 1 / `accumulate` what the loop multiplies that loss by. At the end of a step it
sees t, the mean over the n workers of the sums of their s_j. With W = sum_j v_j, over all workers, the step's gradient
is the weighted mean gbar = sum_j w_j g_j = (n / W) t, w_j = v_j / W. The weights need not be those of the samples: DDP,
FSDP and loops that accumulate take micro-batches as equal, others weight them by tokens.

With V the variance of gbar, E|gbar - G|^2, and k = sum_j w_j^2,

    E sum_j |w_j g_j|^2 = k |G|^2 + V    and    E|gbar|^2 = |G|^2 + V.

So V = (sum_j |w_j g_j|^2 - k |gbar|^2) / (1 - k) is unbiased, however the variance of a g_j depends on its weight; only
its mean must not. A step of B samples has V = tr(Sigma) / B: S = B V. With b_j samples each, 1 / B = sum_j w_j^2 / b_j:
with weights in proportion to the b_j B is their sum, with equal weights M times their harmonic mean. For equal
micro-batches these are the formulas of `kfuse.statistics.noise_scale.moments`.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from kfuse.comm import devices
from kfuse.comm import measurement as t
from kfuse.integrations import log
from kfuse.kernels import BLOCK
from kfuse.statistics.step_stats import Statistics, StepStats

_callbacks: WeakSet[Callable[..., Tensor]] = WeakSet()  # Those of futures that torch's threads still hold
_travelling = set[dist.Work]()  # the messages of the monitors' newest steps


@cache
def wait_at_exit() -> None:
    """Makes Python wait at exit for callbacks to be dropped and messages to arrive, some seconds at most.

    A script may end while another worker, which is slower, still reads the last step's figures.
    """
    atexit.register(_wait)


def drop_before_exit(callback: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `callback`, for a future; at exit Python waits until torch has dropped it."""
    wait_at_exit()
    _callbacks.add(callback)
    return callback


def _wait() -> None:
    end = time.monotonic() + 5.0
    while (_callbacks or not all(work.is_completed() for work in _travelling)) and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.1)  # for the tensors of messages, which Python does not see being dropped


_LOG = logging.getLogger("kfuse")
_ONE_MICRO_BATCH = "one micro-batch a step: nothing to compare it with; accumulate, or use kf.nn's layers"
_UNKNOWN = "a gradient was not finite, or a backward's was not that of one micro-batch: see docs/frameworks.md"


def block_norms(values: Tensor) -> list[Tensor]:
    """Returns the norms of `values` (any shape) in blocks of BLOCK elements: tensors [k] of fp32, or of fp64.

    Blocks keep the rounding error that of one, some tens of 2^-24, whatever the size: S is a difference of such sums.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    flat = (values.detach().coalesce().values() if values.is_sparse else values.detach()).reshape(-1)
    rest = flat.numel() % BLOCK
    if flat.numel() < BLOCK or not rest:
        parts = [flat.view(max(1, flat.numel() // BLOCK), -1)]
    else:
        parts = [flat[:-rest].view(-1, BLOCK), flat[-rest:].view(1, -1)]
    return [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts]


def sum_squares(norms: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of all `norms` (tensors [k], at least one): float64 scalar on their device."""
    return torch.cat(list(norms)).double().square().sum()


def total_square(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the sum of squares of all `tensors`, at least one: float64 scalar on their device, without a wait."""
    return sum_squares([norms for values in tensors for norms in block_norms(values)])


@dataclass(frozen=True)
class Options:
    """How the loop makes its gradients; see `kf.monitor`. Raises ValueError for values out of range."""

    samples: float | None
    accumulate: float
    scaler: torch.amp.GradScaler | None
    name: str

    def __post_init__(self) -> None:
        if self.samples is not None and not 1 <= self.samples < math.inf:
            raise ValueError(f"samples={self.samples!r}: must be at least 1")
        if isinstance(self.accumulate, bool) or not 0 < self.accumulate < math.inf:
            raise ValueError(f"accumulate={self.accumulate!r}: must be above 0")


def one_device(who: str, params: Sequence[Tensor]) -> torch.device:
    """Returns the parameters' device. Raises ValueError for none or several, and for complex parameters."""
    if not params:
        raise ValueError(f"{who}: the model has no parameter that requires a gradient")
    devices = {param.device for param in params}
    if len(devices) > 1:
        raise ValueError(f"{who}: parameters lie on {sorted(map(str, devices))}: must be one device")
    if not all(param.is_floating_point() for param in params):
        raise ValueError(f"{who}: a parameter is complex: must be real")
    return params[0].device


class Monitor:
    """A training's statistics, measured beside it. Made by `kf.ddp_hook`, `kf.fsdp_monitor` and `kf.monitor`.

    All workers have the same figures; each step's are computed on the device and copied to the host without a wait.

    name: names this monitor's figures where `kf.log_to` sends them.
    samples: of each micro-batch on this worker; None: micro-batches are the unit. 0: it is empty, and does not count.
    accumulate: what this micro-batch's mean loss is divided by. Where the loop divides the sum over this micro-batch's
    tokens by all tokens of the step, it is all tokens / this micro-batch's tokens.
    Set both before a backward whose micro-batch has others. They may be scalar tensors, which nobody waits for.
    last: False where another backward of the same step follows for certain: `kf.monitor`'s then leaves out a pass.
    device: where the squares are. workers: n, the workers whose gradients are averaged.
    micro_batches: this worker's of the step under way.
    """

    def __init__(self, device: torch.device, options: Options, *, workers: int = 1, rank: int = 0) -> None:
        self.name, self.device, self.workers, self._rank = options.name, device, workers, rank
        self.samples: float | Tensor | None = options.samples
        self.accumulate: float | Tensor = options.accumulate
        self.last = True
        self._scaler = options.scaler
        self._statistics = Statistics()
        self.handles: list[Any] = []  # of hooks, which `close` removes
        self.observers: list[Callable[[StepStats], object]] = []  # get each step's figures, a step or two later
        self.watch: Callable[[], Any] = lambda: None  # returns what sees the model's forwards, while the model is there
        self._told = set[str]()  # the reasons that were logged
        self._steps = 0  # whose message has arrived
        self._seen = 0.0  # samples of the steps that `log_to` was there for
        self._pending: tuple[Tensor, dist.Work | None] | None = None  # the newest step's message, while it travels
        if workers > 1:
            wait_at_exit()
        self.drop()

    def drop(self) -> None:
        """Forgets the micro-batches of the step under way."""
        self._squares = torch.zeros((), dtype=torch.float64, device=self.device)
        self._sums: list[Any] = [0.0] * 4  # as in `message`, numbers or scalar tensors
        self.micro_batches = 0

    # -- for training loops ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> StepStats | None:
        """The newest finished step's figures; None before the first. Waits for the device."""
        self._settle()
        stats = self._statistics.wait()
        if stats is not None:
            self._reason(stats)
        return stats

    @property
    def why(self) -> str | None:
        """Why the newest finished step's S or the running noise scale is unknown; None where both are known.

        Waits for the device. Why S is unknown is logged once for each reason, when figures are read or sent.
        """
        if (stats := self.stats) is None:
            return "no step has ended"
        if stats.grad_variance is None or stats.noise_scale is not None:
            return self._reason(stats)
        return "too few steps so far, or the gradient cannot be told from its noise (docs/noise.md, when it is None)"

    def state_dict(self) -> dict[str, Any]:
        """The running estimate and the numbers of steps and samples, in plain values: the same on every worker."""
        self._settle()
        self._statistics.wait()
        return {"steps": self._steps, "samples": self._seen, "noise_scale": self._statistics.noise_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self._statistics.noise_scale.load_state_dict(state["noise_scale"])
        self._steps, self._seen = state["steps"], state["samples"]

    def forward_was_made(self) -> None:
        """Tells of a forward, before its backward. Needed where it was not `model(...)`, which no hook sees.

        A step with more backwards than forwards has no statistics.
        """
        if (watch := self.watch()) is not None:
            watch.forward_was_made()

    @property
    def ended(self) -> int:
        """The number of steps that have ended, those included whose figures are still on their way."""
        return self._steps + (self._pending is not None)

    def drain(self) -> None:
        """Gives all ended steps' figures to `kf.log_to` and the observers. Waits for the device."""
        self._settle()
        self._send(lag=0)

    def close(self) -> None:
        """Sends the last step's figures to `kf.log_to`, and removes hooks (not DDP's, which torch cannot remove)."""
        self.drain()
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # -- for the integrations, in the order in which a step calls them -----------------------------------------------

    def micro_batch(self, square: Tensor | float) -> None:
        """Takes in a micro-batch. square: |s_j|^2 as seen, float64 scalar on the device; NaN: unknown."""
        self.micro_batches += 1
        samples: Any = 1.0 if self.samples is None else self.samples
        if not isinstance(samples, Tensor) and samples == 0:
            return
        weight = 1 / self.accumulate
        of_this = [square * self._unscale(), 1.0, weight, weight**2, weight**2 / samples]
        if isinstance(samples, Tensor):
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            of_this = [torch.where(samples > 0, each, zero) for each in of_this]
        self._squares, *self._sums = [a + b for a, b in zip([self._squares, *self._sums], of_this, strict=True)]

    def message(self, total: Tensor) -> Tensor:
        """Returns the step's sums, which are emptied, to be summed over the workers: float64 [6].

        Over micro-batches: |s_j|^2, 1, v_j, v_j^2, v_j^2 / b_j; and |t|^2, of this worker's part. Squares are without
        loss scale.
        total: of this worker's part of t, the squares as seen; the parts make up t.
        """
        sums = [self._squares, *self._sums, total.to(self.device) * self._unscale()]
        message = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=self.device) for each in sums])
        self.drop()
        return message

    def step(self, message: Tensor, sent: dist.Work | None = None) -> None:
        """Ends a step: its figures are on their way to the host, and to `kf.log_to`. Never waits for a GPU.

        message: the sum of all workers' messages, at least one micro-batch among them; with `sent`, once that is done.
        It is then waited for at the end of the next step, or when figures are read.
        """
        self._settle()
        self._pending = (message, sent)
        if sent is None:
            self._settle()
        else:
            _travelling.add(sent)

    def _settle(self) -> None:
        """Takes in the step whose message was still travelling."""
        if self._pending is None:
            return
        (message, sent), self._pending = self._pending, None
        if sent is not None:
            _travelling.discard(sent)
            sent.wait()
        self._statistics.keep_unread = bool(log.TARGETS or self.observers)
        unit = "micro-batches" if self.samples is None else "samples"
        self._statistics.push(self._steps, unit, message, of_sums=self._record)
        self._steps += 1
        self._send(lag=int(devices.of(self.device).asynchronous))

    def _record(self, message: list[float]) -> list[float]:
        """Returns the record of a step, with the slots of `kfuse.comm.measurement`, from the sum of all messages."""
        squares, micro_batches, weights, squared_weights, by_samples, seen = message
        record = [0.0] * (t.RECORD_SLOTS + self.workers)
        record[t.MICRO_BATCHES], record[t.LOSS], record[t.GRAD_SQ] = micro_batches, math.nan, math.nan
        if weights:
            k, samples = squared_weights / weights**2, round(weights**2 / by_samples, 9)
            of_mean = seen * (self.workers / weights) ** 2
            # `moments` computes (SUM_SQUARES - B |gbar|^2) / (M - 1), which shall be B V.
            more = (micro_batches - 1) * (squares / weights**2 - k * of_mean) / (1 - k) if micro_batches > 1 else 0.0
            record[t.SUM_SQUARES], record[t.SAMPLES], record[t.GRAD_SQ] = samples * (of_mean + more), samples, of_mean
        record[t.SKIPPED] = float(self._scaler is not None and not math.isfinite(seen))  # by the scaler
        return record

    def low_precision(self) -> None:
        """Tells that gradients travel between workers in 16 bits: S has the rounding error of bf16."""
        self._statistics.wire = "bf16 sums"

    def _unscale(self) -> Tensor | float:
        """Returns 1 / (loss scale)^2, on the device."""
        if self._scaler is None:
            return 1.0
        scale: Tensor = self._scaler.scale(torch.ones((), dtype=torch.float32, device=self.device))
        return scale.double() ** -2

    def _send(self, lag: int) -> None:
        """Gives `log_to`'s targets the steps that have arrived, except the newest `lag`."""
        if not self._statistics.keep_unread:
            return
        for stats in self._statistics.read(lag):
            self._reason(stats)
            for observe in self.observers:
                observe(stats)
            self._seen += stats.samples
            known = {"step": stats.step, "samples": self._seen, "batch_size": stats.samples, "workers": self.workers}
            record = {name: known[name] if name in known else getattr(stats, name) for name in log.FIGURES}
            for target in log.TARGETS if self._rank == 0 else ():
                target({"monitor": self.name, **record})

    def _reason(self, stats: StepStats) -> str | None:
        """Returns why S of a finished step is unknown, and logs it if it is new; None where S is known."""
        if stats.grad_variance is not None:
            return None
        why = _ONE_MICRO_BATCH if stats.micro_batches < 2 else _UNKNOWN
        if why not in self._told and self._rank == 0:
            _LOG.warning("monitor %r: gradient variance and noise scale of step %d: %s", self.name, stats.step, why)
        self._told.add(why)
        return why
