"""Signals that tell a worker that its machine is about to be taken away: it passes them on to the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfuse.elastic.client import ControlClient


def pass_on(client: ControlClient) -> None:
    """From now on each of the client's `notice_signals` sends the supervisor a "notice", and SIGTERM ends nothing.

    A thread sends it, so that nothing is raised in the user's code. A signal that has a handler already, or gets one
    later, is the script's own, and sends nothing. SIGTERM is caught also where it is no notice: where a whole job gets
    it (Slurm, systemd), the supervisor has a checkpoint written first. Outside the main thread, which alone can set
    handlers, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    notices = {signal.Signals[name] for name in client.notice_signals}
    read, write = os.pipe()
    os.set_blocking(write, False)

    def caught(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):  # full: the thread is told already
            os.write(write, bytes([number]))

    def listen() -> None:
        while number := os.read(read, 1):
            if number[0] in notices and signal.getsignal(number[0]) is caught:
                client.send("notice")

    def block() -> None:
        """Until a forked child has released the signals: what is sent to it alone must not come over the pipe."""
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def release() -> None:
        """A forked child has nothing to do with the supervisor."""
        if others == -1:
            signal.set_wakeup_fd(-1)
        for number in ours:
            if signal.getsignal(number) is caught:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    before = threading.local()
    ours = [number for number in {signal.SIGTERM, *notices} if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, caught)
    # Handlers in Python wait for the end of a long call of C, such as a forward. This does not.
    others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=release)
    threading.Thread(target=listen, name="kfuse-notice", daemon=True).start()
