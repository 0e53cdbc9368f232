"""The trainings of this process that are under way, for `kf.state_dict`, `kf.set_lr` and the like; how they may end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfuse.train.trainer import Trainer

_RUNNING: list[Trainer] = []  # in the order in which they began
_GIVEN: list[Mapping[str, Any]] = []  # at most one: the state that the next training begins from


@contextlib.contextmanager
def active(trainer: Trainer) -> Iterator[None]:
    """Context of a training: it is the `newest`. It begins from the state that was given, if one was."""
    if _GIVEN:
        trainer.load_state_dict(_GIVEN.pop())
    _RUNNING.append(trainer)
    try:
        yield
    finally:
        _RUNNING[:] = [each for each in _RUNNING if each is not trainer]


def newest() -> Trainer | None:
    """Returns the training that began last and has not ended; None if there is none."""
    return _RUNNING[-1] if _RUNNING else None


def load_state_dict(state: Mapping[str, Any]) -> None:
    """As `kf.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise TypeError(f"kf.load_state_dict takes what kf.state_dict returned, not {type(state).__name__}")
    if _RUNNING:
        _RUNNING[-1].load_state_dict(state)
    else:
        _GIVEN[:] = [state]


@contextlib.contextmanager
def exits_are_errors() -> Iterator[None]:
    """Context: a SystemExit of the model, the data or the policy of a job that has no script becomes a RuntimeError: it
    would end a worker as if all was well.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"training has raised {type(error).__name__}: {error}") from error
