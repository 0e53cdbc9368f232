"""Whether a worker reaches other workers' hosts: the supervisor asks, where workers have lost contact (see `cuts`)."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Mapping, Sequence


def unreached(addresses: Mapping[int, Sequence[str | int]], timeout_s: float) -> list[int]:
    """The workers to which no TCP connection can be made in this time, by number. All are tried at once.

    addresses: host and port of the socket on which each listens. The connections carry nothing: the kernel of a host
    makes them, also for a worker that is stopped.
    """
    missing, deadline = dict.fromkeys(addresses), time.monotonic() + timeout_s
    with selectors.DefaultSelector() as attempts:
        for number, (host, port) in addresses.items():
            connection = socket.socket(socket.AF_INET6 if ":" in str(host) else socket.AF_INET)
            connection.setblocking(False)
            if connection.connect_ex((host, port)) not in (0, errno.EINPROGRESS):  # there is no way to it
                connection.close()
                continue
            attempts.register(connection, selectors.EVENT_WRITE, number)
        while attempts.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in attempts.select(left):
                attempts.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                with key.fileobj as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        del missing[key.data]
        for key in attempts.get_map().values():
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return [*missing]
