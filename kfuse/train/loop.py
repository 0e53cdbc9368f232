"""The training loop: forward, backward and update, evaluation, and a policy's hooks, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kfuse.data import Dataset
from kfuse.train.coordinator import Coordinator
from kfuse.train.evaluation import evaluate
from kfuse.train.progress import Phase, StepSamples

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Loop:
    """Trains by a coordinator until its settings say enough.

    Each phase is either done, and the position says so, or not done at all: after a failure it is done again.
    """

    def __init__(
        self,
        run: Coordinator,
        loss_fn: LossFunction,
        heldout: Dataset | None = None,
        facts: Mapping[str, float] | None = None,
    ) -> None:
        """`facts`: figures of the data that belong into the summary, such as a corpus's entropy."""
        self._run, self._loss_fn = run, loss_fn
        self._heldout, self._facts = heldout, dict(facts or {})
        self._device = run.session.group.device
        self._phases: dict[Phase, Callable[[], None]] = {
            Phase.SWITCH: run.switch,
            Phase.BEGIN: run.begin,
            Phase.STEP: self._step,
            Phase.AFTER_STEP: run.policy.after_step,
            Phase.READ: run.read_statistics,
            Phase.SYNC: run.synchronize_models,
            Phase.EVALUATE: self._evaluate_when_due,
            Phase.END: run.end,
        }

    def run(self) -> dict[str, Any] | None:
        """Trains; returns the summary, or None on a worker that left before the end.

        Raises CommError where workers were lost and there is no supervisor, ControlError where that one is lost.
        """
        run = self._run
        self._started = time.perf_counter()
        if not run.model.training:  # else modules that the user put into eval mode (a frozen BatchNorm) stay so
            run.model.train()
        with run.in_force():
            stays = run.start()
            while stays and not run.over:
                over = run.position.phase is Phase.SWITCH and run.finished() is not None
                stays = run.attempt(self._conclude if over else self._do_phase)
        if not run.over:
            return None
        run.policy.after_train()
        return run.result

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _do_phase(self) -> None:
        self._run.do(self._phases[self._run.position.phase])

    def _step(self) -> None:
        run = self._run
        started = time.perf_counter()
        samples = run.begin_step()
        mine = samples.range_of(run.session.group.rank)
        data_wait_s = sum(self._micro_batch(samples, j, last=j == mine[-1]) for j in mine)
        run.opt.step()
        run.opt.zero_grad()
        run.end_step(samples, time.perf_counter() - started, data_wait_s)

    def _micro_batch(self, samples: StepSamples, j: int, last: bool) -> float:
        """Forward and backward of micro-batch j; returns the seconds its data took."""
        settings = self._run.settings
        x, y, waited = self._run.fetch(samples, j)
        with self._run.opt.micro_batch(samples=samples.sizes[j], last=last) as micro_batch:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = self._loss_fn(self._run.model(x), y)
            micro_batch.loss = loss.detach()
            loss.backward()  # type: ignore[no-untyped-call]
        return waited

    def _evaluate_when_due(self) -> None:
        if self._run.evaluation_due:
            self._evaluate(self._run.position.step + 1)

    def _evaluate(self, steps: int) -> None:
        """Evaluates on the held-out data after `steps` steps, unless that is done."""
        run, at = self._run, self._run.position
        if self._heldout is None or at.evaluated == steps:
            return
        result = evaluate(run.model, self._heldout, self._loss_fn, run.session.group, run.settings.precision)
        at.accuracy, at.eval_loss, at.evaluated = result.accuracy, result.loss, steps
        run.reports.event(at.step, "evaluation", accuracy=result.accuracy, loss=result.loss)

    def _conclude(self) -> None:
        """Training is over: evaluates what is left to evaluate."""
        if not self._run.position.stop:
            self._evaluate(self._run.position.step)
        self._run.conclude(self._seconds(), self._facts)
