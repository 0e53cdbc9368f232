"""The worker count by trial: one more or one fewer, kept if it pays."""

from __future__ import annotations

import statistics

from kfuse.policies.signals import Bounds, ConfiguredPolicy, Decision, Signals, check_number, check_whole


class AutoscalePolicy(ConfiguredPolicy):
    """Tries one worker more, then one fewer, and keeps what pays (Or et al., MLSys 2020).

    It measures the throughput R(n), samples a second, with n workers and with n + 1. The further worker pays if

        (R(n + 1) / R(n) - 1) / (1 / n) > threshold              1: it adds as much as each of the others; 0: nothing

    It adds workers one at a time while they pay, and goes back from one that does not. If the first one does not pay,
    it tries fewer in the same way. Then it is settled. It measures anew when the batch size changes, or the workers
    otherwise than by its own request (a lost worker).

    window: steps whose median time counts; at least 1.
    settle: steps that are left out before, in which a worker that has joined warms up; at least 0.
    threshold: the least scaling efficiency that pays; above 0. The default is the paper's.
    patience_s: seconds of training in which requested workers must have come, else the present ones stay; above 0.
    120 is the default time in which a new worker must be ready (elastic.boot_timeout_s).
    """

    owned_fields = ("workers",)

    def __init__(
        self,
        window: int = 50,
        settle: int = 10,
        threshold: float = 0.1,
        patience_s: float = 120.0,
    ) -> None:
        check_whole("policy.window", window, 1)
        check_whole("policy.settle", settle, 0)
        check_number("policy.threshold", threshold)
        check_number("policy.patience_s", patience_s)
        self.window, self.settle, self.threshold, self.patience_s = window, settle, threshold, patience_s
        self.last_step = -1
        self.batch_size = self.workers = 0  # Batch size and workers of the last signals
        self.base = self.goal = 0  # Workers that it goes back to, and that it asks for
        self.direction = 0  # 1: tries more workers; -1: fewer; 0: is settled
        self.grown = False  # A further worker has paid
        self.rates: dict[str, float] = {}  # Samples a second, by worker count
        self.times: list[float] = []  # Seconds of each step with the present workers
        self.waited_s = 0.0  # Seconds of steps since it began to ask for the goal

    def decide(self, signals: Signals) -> Decision | None:
        if signals.step > self.last_step:  # else it is decided on again, after a failure
            self.last_step = signals.step
            self._follow(signals)
        return None if self.goal == signals.workers else Decision(workers=self.goal)

    def _follow(self, signals: Signals) -> None:
        """Takes in a step: its settings, its time, and at the end of a window what follows."""
        if (signals.batch_size, signals.workers) != (self.batch_size, self.workers):
            if (signals.batch_size, signals.workers) != (self.batch_size, self.goal):  # it has not asked for that
                bounds = signals.bounds
                self.base = self.goal = min(max(signals.workers, bounds.workers_min), bounds.workers_max)
                self.direction, self.grown, self.rates = 1, False, {}
            self.batch_size, self.workers, self.times, self.waited_s = signals.batch_size, signals.workers, [], 0.0
        if signals.previous_step_time_s is None or not signals.previous_step_time_s > 0:
            return
        if self.goal != signals.workers:
            self.waited_s += signals.previous_step_time_s
            if self.waited_s >= self.patience_s:
                self._settle_at(signals.workers)
        elif self.direction:
            self.times.append(signals.previous_step_time_s)
            if len(self.times) == self.settle + self.window:
                self.rates[str(signals.workers)] = signals.batch_size / statistics.median(self.times[self.settle :])
                self._choose(signals.workers, signals.bounds)

    def _choose(self, now: int, bounds: Bounds) -> None:
        """Keeps the present workers, which are measured, or goes back, and chooses what to try next."""
        if now < self.base and self._pays(self.base, now):
            self._settle_at(self.base)
            return
        if now > self.base and not self._pays(now, self.base):
            self.direction = -1
        else:
            self.grown = self.grown or now > self.base
            self.base = now
        if self.base >= bounds.workers_max:
            self.direction = -1
        self.goal = min(max(self.base + self.direction, bounds.workers_min), bounds.workers_max)
        if self.goal == self.base or (self.direction < 0 and self.grown):  # one fewer was measured, and is worse
            self._settle_at(self.base)
        self.waited_s = 0.0

    def _pays(self, more: int, fewer: int) -> bool:
        fast, slow = self.rates[str(more)], self.rates[str(fewer)]
        return (fast / slow - 1) / (more / fewer - 1) > self.threshold

    def _settle_at(self, workers: int) -> None:
        """Asks for these workers, and tries nothing more."""
        self.base = self.goal = workers
        self.direction, self.times = 0, []
