"""Whether a worker reaches other workers' hosts: the supervisor asks, where a link may be cut (see `cuts`)."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence


def unreached(addresses: Mapping[int, Sequence[str | int]], timeout_s: float) -> list[int]:
    """The workers to which no TCP connection can be made in this time, by number. All are tried at once.

    addresses: host and port of the socket on which each listens. The connections carry nothing: the kernel of a host
    makes them, also for a worker that is stopped. What counts is what this host's kernel says once the time is over:
    this thread may have waited for the interpreter's lock meanwhile.
    """
    poll, waiting, missing = select.poll(), dict[int, tuple[int, socket.socket]](), list[int]()
    for number, (host, port) in addresses.items():
        connection = socket.socket(socket.AF_INET6 if ":" in str(host) else socket.AF_INET)
        connection.setblocking(False)
        if connection.connect_ex((str(host), int(port))) not in (0, errno.EINPROGRESS):
            missing.append(number)
            connection.close()
            continue
        poll.register(connection, select.POLLOUT)
        waiting[connection.fileno()] = number, connection
    deadline, is_over = time.monotonic() + timeout_s, False
    while waiting and not is_over:
        left_s = deadline - time.monotonic()
        is_over = left_s <= 0
        for file, _ in poll.poll(max(0.0, 1000 * left_s)):
            number, connection = waiting.pop(file)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                missing.append(number)
            poll.unregister(file)
            connection.close()
    for number, connection in waiting.values():
        missing.append(number)
        connection.close()
    return missing
