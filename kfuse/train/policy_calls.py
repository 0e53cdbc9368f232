"""Calls the policy of a training, and does what `policy.on_error` says where it raises an error.

An error is whatever the policy raises, SystemExit and KeyboardInterrupt too. A stop by the user is none: Ctrl-C, or
the handler of another signal that raises one of these two. It goes on as it is. A handler that raises an Exception may
be the policy's own (an alarm): that is its error.

stop: the error ends the job, on all workers. It is told once, also where all workers have it.

go_on: training continues with the present settings, and the policy is called again at the next step. `decide` makes no
communication, so only rank 0's error matters. A hook may call collectives. Therefore, before each collective and at the
end of a hook, the workers exchange their state (ended, collective, failed). If one has failed, all abandon the hook.
That is one small message more each time, in this mode only, and for hooks that the policy has.

Errors in before_train, state_dict and load_state_dict always end the job. Before training there is nothing to go on
with; a checkpoint or a worker without the policy's state would lead to other decisions, and nobody would notice.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Literal, TypeVar, get_args

import torch

from kfuse.checkpoint.snapshot import plain_copy
from kfuse.comm.group import CommError
from kfuse.elastic.client import ControlError
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals, checked_decision
from kfuse.session import Session
from kfuse.train import user_stop
from kfuse.train.progress import Progress
from kfuse.train.reporter import Reporter

_KILLED_S = 5.0

OnError = Literal["stop", "go_on"]

Returned = TypeVar("Returned")


def check_on_error(key: str, value: object) -> None:
    """Raises ValueError, which names `key`, for what `policy.on_error` cannot be."""
    if value not in get_args(OnError):
        raise ValueError(f"{key}={value}: must be one of {', '.join(get_args(OnError))}")


class PolicyError(RuntimeError):
    """Raised in place of a SystemExit or KeyboardInterrupt of the policy, which would end the process without an error.
    The policy's own exception is its `__cause__`.
    """


class _State(IntEnum):
    """What a worker tells the others in a hook."""

    ENDED = 0
    """The hook has returned."""
    COLLECTIVE = 1
    """A collective comes."""
    FAILED = 2


class _HookLeft(BaseException):
    """Raised in a hook that all workers leave. No Exception: the hook's own handlers must not take it."""


class PolicyCalls:
    """The calls of one policy in one training. As a part of the training state it stands for the policy."""

    def __init__(
        self, policy: BasePolicy, on_error: OnError, session: Session, progress: Progress, reporter: Reporter
    ) -> None:
        self.policy, self._on_error = policy, on_error
        self._session, self._progress, self._reporter = session, progress, reporter
        self.decides = getattr(policy.decide, "__func__", None) is not BasePolicy.decide
        """Whether the policy has a `decide` of its own."""
        self._failing: set[str] = set()
        """Methods that have failed the last time: reported again only once they have worked."""
        self._left = False
        """All workers have left the hook under way."""
        self._end: BaseException | None = None
        """The error that ends training; None: none does."""

    def initial(self) -> Decision | None:
        """What the policy begins with; None if that is nothing."""
        return self._decision("initial", self.policy.initial)

    def decide(self, signals: Signals) -> Decision | None:
        """The policy's decision; None if it is empty."""
        return self._decision("decide", lambda: self.policy.decide(signals)) if self.decides else None

    def _decision(self, method: str, ask: Callable[[], object]) -> Decision | None:
        decision, error = self._call(method, lambda: checked_decision(ask(), self._name(method)))
        if error is not None:
            self._failed(method, error, reports=self._session.group.rank == 0)
        else:
            self._failing.discard(method)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The policy's state: what a checkpoint and a joining worker need of it.

        If the policy raises an error, or returns what a checkpoint cannot hold, training ends.
        """
        name = self._name("state_dict")
        state, error = self._call("state_dict", lambda: plain_copy(self.policy.state_dict(), f"the value of {name}"))
        if error is not None:
            self._failed("state_dict", error, stops=True)
        return state or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The policy takes over another worker's state, or a checkpoint's. If it raises an error, training ends."""
        _, error = self._call("load_state_dict", lambda: self.policy.load_state_dict(state))
        if error is not None:
            self._failed("load_state_dict", error, stops=True)

    def hook(self, name: str) -> None:
        """Calls a hook. Raises CommError if a worker is lost in a collective of it."""
        method = getattr(self.policy, name)
        if getattr(method, "__func__", None) is getattr(BasePolicy, name):
            return
        if self._on_error == "go_on" and name != "before_train":
            self._hook_that_may_fail(name, method)
            return
        _, error = self._call(name, method)
        if error is not None:
            _raise_lost_worker(error)
            self._failed(name, error, stops=True)

    def _hook_that_may_fail(self, name: str, method: Callable[[], None]) -> None:
        session, error = self._session, None
        self._left, session.before_collective = False, self._tell_collective
        try:
            with contextlib.suppress(_HookLeft):
                _, error = self._call(name, method)
            _raise_lost_worker(error)
            if self._left:
                return
            states = self._tell(_State.ENDED if error is None else _State.FAILED)
        finally:
            session.before_collective = None
        if error is not None:
            first = len(states) == 1 or states.index(_State.FAILED) == session.group.rank
            self._failed(name, error, reports=first)  # of several workers the first one says so
        elif _State.COLLECTIVE in states and _State.FAILED not in states:
            self._mismatch(name, states)
        else:
            self._failing.discard(name)

    def _tell_collective(self) -> None:
        """Before a collective of a hook. Raises _HookLeft unless all workers come to one."""
        self._left = self._left or set(self._tell(_State.COLLECTIVE)) != {_State.COLLECTIVE}
        if self._left:
            raise _HookLeft

    def _tell(self, state: _State) -> list[_State]:
        """By rank, how the workers are. Raises CommError."""
        group = self._session.group
        if group.size == 1 or self._session.apart:
            return [state]
        told = group.all_gather(torch.tensor([float(state)], device=group.device), "the policy's hook")
        return [_State(int(each)) for each in told]

    def _mismatch(self, name: str, states: list[_State]) -> None:
        """On workers whose hook has ended, while others wait in it for a collective of all."""
        if self._session.group.rank == states.index(_State.ENDED):
            waiting = [rank for rank, state in enumerate(states) if state == _State.COLLECTIVE]
            why = f"ranks {waiting} call a collective (kf.allreduce, ...) that the others do not: they have left it"
            self._failed(name, RuntimeError(why))

    def _call(self, method: str, act: Callable[[], Returned]) -> tuple[Returned | None, BaseException | None]:
        """What a method of the policy returns, or what it raises. A stop by the user (`user_stop`) is raised on.

        Meanwhile the supervisor is told, with the heartbeats, in which method this worker is.
        """
        client = self._session.control_client
        before = None if client is None else client.doing
        if client is not None:
            client.doing = f"the policy's {self._name(method)}", time.monotonic()
        try:
            return act(), None
        except Exception as error:
            return None, error
        except _HookLeft:
            raise
        except BaseException as error:
            if user_stop.by_signal(error):
                raise
            return None, error
        finally:
            if client is not None:
                client.doing = before

    def _failed(self, method: str, error: BaseException, reports: bool = True, stops: bool = False) -> None:
        """Reports the error with its traceback; then raises it, or not, as `on_error` says.

        reports: whether this worker is the one to report it, where training goes on. stops: whatever `on_error` says.
        """
        if error is self._end:  # of kf.state_dict, which a hook has called
            raise error
        stops = stops or self._on_error == "stop"
        name, step = self._name(method), self._progress.step
        text = _text(error)
        why = f"{type(error).__name__}: {text}" if text else type(error).__name__
        what = "training ends" if stops else "training goes on with the settings as they are"
        told = f"kfuse: step {step}: the policy's {name} has raised an error; {what}"
        frames = _traceback(error)
        about = {"method": name, "why": why, "traceback": frames, "goes_on": not stops}
        if stops:
            self._end = error if isinstance(error, Exception) else PolicyError(f"the policy's {name} has raised {why}")
            if self._session.elastic:
                event = self._reporter.policy_failure(step, **about)
                self._session.give_up(f"the policy's {name} has raised {why}", event, [told, *frames.splitlines()])
                time.sleep(_KILLED_S)  # the supervisor has told it, and kills this process
            else:
                self._reporter.policy_failed(step, **about)
                print(told, file=sys.stderr, flush=True)  # Python prints the traceback of what is raised here
            if self._end is error:
                raise error
            raise self._end from error
        if reports and method not in self._failing:
            self._reporter.policy_failed(step, **about)
            print(told, file=sys.stderr)
            print(frames, end="", file=sys.stderr, flush=True)
        self._failing.add(method)

    def _name(self, method: str) -> str:
        return f"{type(self.policy).__name__}.{method}"


def _raise_lost_worker(error: BaseException | None) -> None:
    """Raises what a hook's collective has raised because a worker, or the supervisor, is lost."""
    if isinstance(error, CommError | ControlError):
        raise error


def _text(error: BaseException) -> str:
    """In one line; empty where the exception's own __str__ raises an error."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return ""


def _traceback(error: BaseException) -> str:
    """The error's traceback, from the policy's own code on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
