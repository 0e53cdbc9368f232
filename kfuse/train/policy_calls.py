"""Calls the policy of a training. An error that it raises is reported, and ends the job on all workers.

Only an `Exception` is an error of the policy. KeyboardInterrupt (Ctrl-C) and SystemExit pass through, as elsewhere in a
script.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from kfuse.checkpoint.snapshot import plain_copy
from kfuse.comm.group import CommError
from kfuse.elastic.client import ControlError
from kfuse.membership import Session
from kfuse.policies import BasePolicy
from kfuse.policies.signals import Decision, Signals, checked_decision
from kfuse.train.progress import Progress
from kfuse.train.reporter import Reporter

_KILLED_S = 5.0

Returned = TypeVar("Returned")


class PolicyCalls:
    """The calls of one policy in one training. As a part of the training state it stands for the policy."""

    def __init__(self, policy: BasePolicy, session: Session, progress: Progress, reporter: Reporter) -> None:
        self.policy = policy
        self._session, self._progress, self._reporter = session, progress, reporter
        self.decides = getattr(policy.decide, "__func__", None) is not BasePolicy.decide
        """Whether the policy has a `decide` of its own."""
        self._reported: Exception | None = None
        """The error that ends training; None: none does."""

    def initial(self) -> Decision | None:
        """What the policy begins with; None if that is nothing."""
        return self._call("initial", lambda: checked_decision(self.policy.initial(), self._name("initial")))

    def decide(self, signals: Signals) -> Decision | None:
        """The policy's decision; None if it is empty."""
        if not self.decides:
            return None
        return self._call("decide", lambda: checked_decision(self.policy.decide(signals), self._name("decide")))

    def state_dict(self) -> dict[str, Any]:
        """The policy's state: what a checkpoint and a joining worker need of it.

        What a checkpoint cannot hold is an error of the policy too.
        """
        what = f"the value of {self._name('state_dict')}"
        state: dict[str, Any] = self._call("state_dict", lambda: plain_copy(self.policy.state_dict(), what))
        return state or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The policy takes over another worker's state, or a checkpoint's."""
        self._call("load_state_dict", lambda: self.policy.load_state_dict(state))

    def hook(self, name: str) -> None:
        """Calls a hook. Raises CommError if a worker is lost in a collective of it."""
        method = getattr(self.policy, name)
        if getattr(method, "__func__", None) is not getattr(BasePolicy, name):
            self._call(name, method)

    def _call(self, method: str, act: Callable[[], Returned]) -> Returned:
        """Returns what a method of the policy returns. Reports an error of it, and raises that on.

        Meanwhile the supervisor is told, with the heartbeats, in which method this worker is.
        """
        client = self._session.control_client
        before = None if client is None else client.doing
        if client is not None:
            client.doing = f"the policy's {self._name(method)}", time.monotonic()
        try:
            return act()
        except (CommError, ControlError):  # of a hook's collective: a worker, or the supervisor, is lost
            raise
        except Exception as error:
            self._end(method, error)
        finally:
            if client is not None:
                client.doing = before

    def _end(self, method: str, error: Exception) -> NoReturn:
        """Reports the error with its traceback, once, and raises it. A supervisor ends all workers."""
        if error is self._reported:  # of kf.state_dict, which a hook has called
            raise error
        self._reported = error
        name, step = self._name(method), self._progress.step
        why = " ".join("".join(traceback.format_exception_only(error)).split())
        told = f"kfuse: step {step}: the policy's {name} has raised an error; training ends"
        frames = "".join(traceback.format_exception(error))
        about = {"method": name, "why": why, "traceback": frames}
        if self._session.elastic:
            event = self._reporter.policy_failure(step, **about)
            self._session.give_up(f"the policy's {name} has raised {why}", event, [told, *frames.splitlines()])
            time.sleep(_KILLED_S)  # the supervisor has told it, and kills this process
        else:
            self._reporter.policy_failed(step, **about)
            print(told, file=sys.stderr, flush=True)  # Python prints the traceback of what is raised here
        raise error

    def _name(self, method: str) -> str:
        return f"{type(self.policy).__name__}.{method}"
