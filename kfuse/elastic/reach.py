"""Whether a worker reaches other workers' hosts: the supervisor asks, where workers have lost contact (see `cuts`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence


def unreached(addresses: Mapping[int, Sequence[str | int]], timeout_s: float) -> list[int]:
    """The workers to which no TCP connection can be made in this time, by number. All are tried at once.

    addresses: host and port of the socket on which each listens. The connections carry nothing: the kernel of a host
    makes them, also for a worker that is stopped.
    """

    async def reaches(host: str, port: int) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except OSError:  # a timeout, too
            return False
        writer.close()
        return True

    async def all_of_them() -> list[bool]:
        return await asyncio.gather(*(reaches(str(host), int(port)) for host, port in addresses.values()))

    return [number for number, reached in zip(addresses, asyncio.run(all_of_them()), strict=True) if not reached]
