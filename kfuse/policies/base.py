"""The policy interface: KungFu's hooks (Mai et al., OSDI 2020) and a pure decision rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfuse.policies.signals import Decision, Signals


class BasePolicy:
    """A rule that adapts training while it runs. Override any hook, `decide`, or both.

    The hooks run on every worker, at the same steps, and may use kfuse's module-level verbs
    (`kf.allreduce`, `kf.resize`, ...). `decide` is a pure function of the signals and the policy's
    attributes: it has no side effects, so that a policy can be replayed offline and a step that is
    redone after a failure is decided in the same way.
    """

    def before_train(self) -> None:
        """Called once, before the first step."""

    def before_epoch(self) -> None:
        """Called before the first step of each epoch."""

    def before_step(self) -> None:
        """Called before each optimizer step."""

    def after_step(self) -> None:
        """Called after each optimizer step."""

    def after_epoch(self) -> None:
        """Called after the last step of each epoch."""

    def after_train(self) -> None:
        """Called once, after the last step."""

    def initial(self) -> Decision | None:
        """What to begin with: called once, on rank 0, before the first step of a run that does not resume another.

        Batch size, learning-rate factor and synchronisation are in force from the first step; more workers are asked
        for, and join when they are ready.
        """
        return None

    def decide(self, signals: Signals) -> Decision | None:
        """What to change, given one finished step; None for nothing.

        A change takes some steps to appear in the signals (a new worker has to start), and asking for
        the same thing again meanwhile does no harm.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a joining worker or a resumed run needs to carry on: a copy of the instance attributes
        that are plain values (None, bool, int, float, str, and lists, tuples and dicts of those).

        Attributes of other types are left out: a policy that keeps its state in them overrides this.
        """
        state = {}
        for name, value in vars(self).items():
            try:
                state[name] = _plain(value)
            except TypeError:
                continue
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes that `state_dict` returned, here or in another process."""
        for name, value in state.items():
            setattr(self, name, _plain(value))


def _plain(value: Any) -> Any:
    """A copy of `value` in builtin types only. Raises TypeError where that cannot be."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # a subclass (numpy.float64 is a float) becomes its builtin
        if isinstance(value, kind):
            return kind(value)
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not a plain value")


class NoPolicy(BasePolicy):
    """Leaves batch size, learning rate and worker count as configured."""
