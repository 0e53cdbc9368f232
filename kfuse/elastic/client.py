"""The worker's side of the control channel: a receiver thread and a heartbeat thread, beside training."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import socket
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, TypeVar

from kfuse.elastic import protocol
from kfuse.elastic.link import Link
from kfuse.elastic.protocol import ControlError, View

_SUPERVISOR_LOST_GRACE_S = 10.0  # for the main thread to end the process once the supervisor is gone
_SAVING_S = 30.0  # added while it writes a last checkpoint: twice that one's own limit
_STUCK_S = 60.0  # without the interpreter's lock, after which the process is ended
_MOST_WAITING = 100_000  # messages; beyond it only records of steps are dropped
_SENT_AT_ONCE = 64  # messages that wait, in one call of the system
_POLL_S = 0.01
_MOST_REACHED = 512  # connections of other workers that were accepted and are dropped, with each heartbeat
_ENDS_POLL_S = 0.1
_ENDED_S = 5.0  # until then the supervisor, told that the job must end, has ended this process
_ALIVE = protocol.encode({"type": "alive"})
_NEWS_S = 2.0  # of the supervisor's end, once its end of this process's output is closed

T = TypeVar("T")


class ControlClient(Link):
    """The connection to the supervisor that the environment names. Thread-safe."""

    elastic = True
    failed: str | None = None  # why the job has failed, where this worker has a moment for a last checkpoint

    def __init__(self, timeout_s: float = 60.0) -> None:
        """Connects. Raises ControlError if the supervisor does not answer."""
        host, _, port = os.environ[protocol.ENV_CONTROL].rpartition(":")
        super().__init__(int(os.environ[protocol.ENV_WORKER]))
        self._changed = threading.Condition()
        self._view: View | None = None  # the newest one; it is planned only once all are in the one before
        self._over = False
        self._unsent: deque[bytes] = deque()
        self._dropped = protocol.DroppedRecords("the supervisor took no records, and too many waited in a worker")
        self._lost: str | None = None
        self._saves = False  # a last checkpoint, as the supervisor is lost
        self._closing = threading.Event()
        try:
            self._socket, lines, welcome = self._connect((host, int(port)), timeout_s)
            self._messages, _, _ = self._connect((host, int(port)), timeout_s, messages=True)
        except OSError as error:
            raise ControlError(f"no supervisor at {protocol.place(host, int(port))}: {error}") from error
        self.job, self.workers_bounds = welcome["job"], welcome["workers_bounds"]
        self.silence_s, self.catch_up_s = welcome["silence_s"], welcome["catch_up_s"]
        self.notice_signals: list[str] = welcome["notice_signals"]  # names: see `kfuse.elastic.notice`
        protocol.set_acknowledgement_timeout(self._socket, self.silence_s)
        threading.Thread(target=self._receive, args=(lines,), name="kfuse-control", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="kfuse-heartbeat", daemon=True).start()

    def _connect(self, address: tuple[str, int], timeout_s: float, **more: Any) -> tuple[socket.socket, BinaryIO, Any]:
        """A connection, what comes over it, and the supervisor's welcome. Raises ControlError and OSError."""
        connection = socket.create_connection(address, timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not more:  # other workers find out here whether they reach this host; nothing is read from it
            own = (connection.getsockname()[0], 0)
            self._reached = socket.create_server(own, family=connection.family, backlog=socket.SOMAXCONN)
            self._reached.setblocking(False)
            more = {"address": self._reached.getsockname()[:2]}
        who = {"worker": self.worker, "pid": os.getpid(), "host": socket.gethostname()}
        connection.sendall(protocol.encode({"type": "hello", "token": os.environ[protocol.ENV_TOKEN], **who, **more}))
        lines = connection.makefile("rb")
        line = lines.readline(protocol.MAX_LINE)
        if not line:
            raise ControlError(f"the supervisor at {protocol.place(*address)} refused this worker")
        connection.settimeout(None)
        return connection, lines, protocol.decode(line)

    # -- messages to the supervisor -------------------------------------------------------------------------------

    def send(self, message: str, **fields: Any) -> None:
        """Sends a message of this type, in order; never waits for the other side.

        A step's metrics wait for others, at most for `protocol.METRICS_S`. What the connection does not take, as of a
        stopped supervisor, waits in memory. Where too many wait, records of steps are dropped, and an event says of
        which steps. If the supervisor is lost, nothing is sent, and `check` raises.
        """
        with self._changed:
            if self._lost:
                return
            if message == "record" and fields["kind"] in protocol.OF_STEPS and len(self._unsent) >= _MOST_WAITING:
                self._dropped.add(fields["data"]["step"])
                return
            if (event := self._dropped.take()) is not None:
                self._unsent.append(protocol.encode({"type": "record", "kind": "event", "data": event}))
            self._unsent.append(protocol.encode({"type": message, **fields}))
            if fields.get("kind") != "metrics" or len(self._unsent) >= protocol.METRICS_AT_ONCE:
                self._flush()

    def give_up(self, why: str, event: dict[str, Any] | None = None, lines: Sequence[str] = ()) -> None:
        self.send("fatal", why=why, event=event, lines=list(lines))
        time.sleep(_ENDED_S)  # what this process would print, as others would, is said by the supervisor

    def _flush(self) -> None:
        """Sends what the connection takes without waiting: of that a lost worker loses nothing."""
        try:
            while self._unsent and not self._lost:
                sent = self._messages.sendmsg([*islice(self._unsent, _SENT_AT_ONCE)], [], socket.MSG_DONTWAIT)
                while sent:
                    line = self._unsent.popleft()
                    if sent < len(line):
                        self._unsent.appendleft(line[sent:])
                    sent -= min(sent, len(line))
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost = f"the supervisor is gone: {error}"

    def close(self) -> None:
        """Says goodbye, waits until the supervisor has all messages or is lost, and ends the connection."""
        if self._closing.is_set():
            return
        with self._changed:
            self.send("goodbye")
            # Bytes that are not acknowledged would be lost with this process's end: they may wait for a link.
            while (self._unsent or any(fcntl.ioctl(self._messages, termios.TIOCOUTQ, bytes(4)))) and not self._lost:
                self._changed.wait(_POLL_S)
                self._flush()
        self._closing.set()
        for each in (self._messages, self._socket, self._reached):
            each.close()

    # -- views ----------------------------------------------------------------------------------------------------

    def view(self, after: int, recovers: bool = False) -> View | None:
        view = self._view
        return view if view is not None and view.generation > after and (view.recovers or not recovers) else None

    def await_view(self, after: int, timeout_s: float | None = None, recovers: bool = False) -> View:
        found = self._await(lambda: self.view(after, recovers), timeout_s)
        if found is None:
            raise ControlError(f"waited {timeout_s:.0f} s for a view after {after}")
        return found

    def await_over(self, current: int) -> bool:
        self._await(lambda: True if self._over else self.view(current, recovers=True))
        over, self._over = self._over, False
        return over

    # -- decisions ------------------------------------------------------------------------------------------------

    def publish(self, decision: dict[str, Any]) -> int:
        """Sends it through the supervisor, which outlives the views."""
        with self._changed:
            number = super().publish(decision)
        self.send("decision", number=number, decision=decision)
        return number

    def fetch(self, worker: int, number: int, timeout_s: float) -> dict[str, Any]:
        """As `Link.fetch`; earlier ones of that worker are dropped."""
        found = self._await(lambda: self._decisions.get((worker, number)), timeout_s)
        if found is None:
            raise TimeoutError(f"nothing in {timeout_s:g} s")
        with self._changed:
            self._decisions = {key: it for key, it in self._decisions.items() if key[0] != worker or key[1] >= number}
        return found

    def take_apart(self) -> list[dict[str, Any]]:
        with self._changed:
            keys = [key for key, each in self._decisions.items() if "apart" in each and key[0] != self.worker]
            return [self._decisions.pop(key) for key in keys]

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """As `Link.saving`, where the supervisor is lost."""
        self._saves = True
        try:
            yield
        finally:
            self._saves = False

    def check(self) -> None:
        if self._lost:
            raise ControlError(self._lost)
        if self.failed:
            raise ControlError(f"the job has failed: {self.failed}")

    def is_ending(self) -> bool:
        """Whether the supervisor is gone, or the job has failed. Where nobody reads this process's output any more,
        waits for that news, which comes a moment later.
        """
        outputs = select.poll()
        for number in (1, 2):
            outputs.register(number, 0)  # errors are told in any case
        unread = any(event & (select.POLLERR | select.POLLHUP) for _, event in outputs.poll(0))
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._lost or self.failed, _NEWS_S if unread else 0.0))

    def _await(self, find: Callable[[], T | None], timeout_s: float | None = None) -> T | None:
        """Waits until `find` returns a value, and returns it; None after the timeout. Raises ControlError."""
        with self._changed:
            self._changed.wait_for(lambda: find() is not None or self._lost or self.failed, timeout_s)
            if (found := find()) is None:
                self.check()
            return found

    # -- threads --------------------------------------------------------------------------------------------------

    def _receive(self, lines: BinaryIO) -> None:
        why = ""
        try:
            while line := self._next(lines):
                message = protocol.decode(line)
                with self._changed:
                    match message.pop("type"):
                        case "view":
                            self._view = self._made(message["view"])
                        case "stop":
                            self.stop = message["reason"]
                        case "over":
                            self._over = True
                        case "goodbye":  # of rank 0 to the other ranks of its worker, whose processes go on
                            self._closing.set()
                        case "failed":
                            self.failed, self.writes_last = message["why"], message["saves"]
                        case "reach":
                            threading.Thread(target=self._tell_unreached, kwargs=message, daemon=True).start()
                        case "decision":
                            self._decisions[message["worker"], message["number"]] = message["decision"]
                    self._changed.notify_all()
        except (OSError, ValueError) as error:
            why = f": {error}"
        if self._closing.is_set():
            return
        with self._changed:
            self._lost = f"the supervisor is gone{why}"
            self._changed.notify_all()
        # The main thread notices at its next wait. If it is stuck elsewhere, the process must not stay behind.
        lost_at = time.monotonic()
        while time.monotonic() - lost_at < _SUPERVISOR_LOST_GRACE_S + _SAVING_S * self._saves:
            if self._closing.wait(_ENDS_POLL_S):
                break
        else:
            with contextlib.suppress(OSError):  # the supervisor was the reader
                print(f"kfuse: worker {self.worker} ends: {self._lost}", file=sys.stderr, flush=True)
            os._exit(70)

    def _made(self, view: dict[str, Any]) -> View:
        """A view that has arrived."""
        return View.from_json(view)

    def _next(self, lines: BinaryIO) -> bytes:
        """The next message that arrives; an empty one at the end."""
        return lines.readline(protocol.MAX_LINE)

    def _beat(self) -> None:
        """Sends a heartbeat, and takes what has come from other workers."""
        self._socket.sendall(_ALIVE)
        with contextlib.suppress(BlockingIOError):  # there are no more
            for _ in range(_MOST_REACHED):
                self._reached.accept()[0].close()

    def _tell_unreached(self, inquiry: int, addresses: list[tuple[int, Any]], timeout_s: float) -> None:
        """Tells the supervisor which of these workers this one does not reach; none while it goes on without them."""
        from kfuse.elastic.reach import unreached  # only where workers have lost contact

        missing = [] if self.bears_cuts else unreached(dict(addresses), timeout_s)
        self.send("reached", inquiry=inquiry, missing=missing)

    def _send_heartbeats(self) -> None:
        """Sends what waits, and heartbeats.

        These stop if the process is stopped, or if something holds the interpreter's lock for long. In the second
        case the supervisor kills this process; if the supervisor is lost, a watchdog without a lock does.
        """
        due = time.monotonic() + protocol.HEARTBEAT_S
        while not (self._closing.wait(protocol.METRICS_S) or self._lost):
            try:
                with self._changed:
                    self._flush()
                if (now := time.monotonic()) >= due:
                    due = now + protocol.HEARTBEAT_S
                    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
                    self._beat()
            except OSError:
                break
        faulthandler.cancel_dump_traceback_later()
