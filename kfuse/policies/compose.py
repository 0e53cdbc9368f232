"""Several policies as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

from kfuse.policies.signals import BasePolicy, Decision, Signals, checked_decision


def _of_all(hook: str) -> Callable[[ComposePolicy], None]:
    """Returns a hook that calls that of each part, in order."""

    def call(self: ComposePolicy) -> None:
        for part in self.parts.values():
            getattr(part, hook)()

    return call


class ComposePolicy(BasePolicy):
    """Two or three policies on the same signals, in declared precedence: for each field of a decision the first wins.

    A policy's `owned_fields` are its own also while it asks for nothing: what later policies say of them is dropped.
    Otherwise a later one that asks at each step would undo what the first asked for now and then, back and forth. Later
    policies see bounds that leave these fields as they are, so that they plan for them.
    All hooks are called, in order. The settings of the learning rate must be right for all policies.

    first, second, third: the policies; third may be left out. One of them may be a ComposePolicy, for more.

    Raises ValueError for what is no policy, and for policies of which no setting of the learning rate suits all.
    """

    def __init__(self, first: BasePolicy, second: BasePolicy, third: BasePolicy | None = None) -> None:
        self.parts = {"first": first, "second": second} | ({} if third is None else {"third": third})
        for name, part in self.parts.items():
            if not isinstance(part, BasePolicy):
                raise ValueError(f"policy.{name}={part!r}: must be a kf.BasePolicy")
        common: dict[str, tuple[str, ...]] = {}
        for part in self.parts.values():
            for name, allowed in part.lr_settings.items():
                common[name] = tuple(value for value in common.get(name, allowed) if value in allowed)
        self.lr_settings = common
        for setting, allowed in common.items():
            if not allowed:
                names = ", ".join(type(part).__name__ for part in self.parts.values())
                raise ValueError(f"policy: no value of lr.{setting} is right with all of {names}")
        self.modes = tuple(mode for part in self.parts.values() for mode in part.modes)
        self.owned_fields = tuple(dict.fromkeys(name for part in self.parts.values() for name in part.owned_fields))

    before_train = _of_all("before_train")
    before_epoch = _of_all("before_epoch")
    before_step = _of_all("before_step")
    after_step = _of_all("after_step")
    after_epoch = _of_all("after_epoch")
    after_train = _of_all("after_train")

    def with_parts(self) -> list[BasePolicy]:
        return [self, *(each for part in self.parts.values() for each in part.with_parts())]

    def initial(self) -> Decision | None:
        return self._merged("initial", lambda part, owned: part.initial())

    def decide(self, signals: Signals) -> Decision | None:
        return self._merged("decide", lambda part, owned: part.decide(_leaving(signals, owned)))

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of each. One that `state` has nothing of stays as it is."""
        for name, part in self.parts.items():
            part.load_state_dict(state.get(name, {}))

    def _merged(self, method: str, ask: Callable[[BasePolicy, Set[str]], Decision | None]) -> Decision | None:
        """Returns the policies' decisions as one. Raises TypeError where one returns another type."""
        merged, owned = Decision(), set[str]()
        for part in self.parts.values():
            decision = checked_decision(ask(part, owned), f"{type(part).__name__}.{method}")
            if decision is not None:
                merged = replace(decision, **dict.fromkeys(owned)).merged(merged)
            owned.update(part.owned_fields)
        return None if merged.is_empty else merged


def _leaving(signals: Signals, owned: Set[str]) -> Signals:
    """Returns the signals with bounds that leave the owned fields as they are."""
    bounds = signals.bounds
    if "batch_size" in owned:
        bounds = replace(bounds, batch_min=signals.batch_size, batch_max=signals.batch_size)
    if "workers" in owned:
        bounds = replace(bounds, workers_min=signals.workers, workers_max=signals.workers)
    return replace(signals, bounds=bounds)
