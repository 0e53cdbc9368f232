"""Policies that change how the workers keep together, for tests whose workers import them by path."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import chaos

import kfuse as kf
from kfuse import session
from kfuse.comm.group import CommError
from kfuse.comm.sync.averaging import CentralModel
from kfuse.elastic import protocol
from kfuse.observe.recorder import Recorder
from kfuse.optim.updates import Updates


class Modes(kf.BasePolicy):
    """Asks for a mode at given steps: {step: mode}."""

    def __init__(self, modes: Mapping[int, str]) -> None:
        self._modes = dict(modes)
        self.known: list[bool] = []
        """For each step, whether the mean gradient's norm is known."""

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        self.known.append(signals.grad_norm is not None)
        return kf.Decision(sync=self._modes.get(signals.step))


class PairLater(kf.BasePolicy):
    """Says that it will ask for pair averaging."""

    modes = ("ssgd", "pair")


class LostThenTerminated(kf.BasePolicy):
    """A worker is lost in the first step, and SIGTERM arrives while the failure is being recorded."""

    def after_step(self) -> None:
        failed = Recorder.failed

        def terminated(self: Recorder, why: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            failed(self, why)

        Recorder.failed = terminated  # type: ignore[method-assign]
        raise CommError("lost contact with rank 1")


_CALLS = {
    "end": (CentralModel, "end_step"),
    "average": (Updates, "average_models"),
}


class ChaosOfModes(chaos.Chaos):
    """`chaos.Chaos`, which asks for modes at given steps besides. modes: {"step": mode}.

    killed: {"step", "rank", "call", "after"}: once from that step on, that rank of three workers dies before or after
    this call of `_CALLS`.
    """

    def __init__(self, modes: Mapping[str, str], killed: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._modes = {int(step): mode for step, mode in modes.items()}
        if killed is not None and protocol.ENV_WORKER in os.environ:
            self._patch_call(killed)

    def _patch_call(self, killed: Mapping[str, Any]) -> None:
        owner, name = _CALLS[killed["call"]]
        original, mark = getattr(owner, name), self._directory / "killed in the call"

        def call(*arguments: Any, **named: Any) -> None:
            group = session.current().group
            place = group.rank == killed["rank"] and group.size == 3
            strikes = place and self._step >= killed["step"] and not mark.exists()
            if strikes and killed["after"]:
                original(*arguments, **named)
            if strikes:
                mark.touch()
                chaos.strike("kill")
            original(*arguments, **named)

        setattr(owner, name, call)

    def decide(self, signals: kf.Signals) -> kf.Decision | None:
        decision = super().decide(signals) or kf.Decision()
        return replace(decision, sync=self._modes.get(signals.step))
