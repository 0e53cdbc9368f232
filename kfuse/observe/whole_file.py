"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, save: Callable[[Path], object]) -> None:
    """Writes a file that is there whole or not at all, also after a kill or a power failure. All may read it.

    save: writes to the path that it is given: a hidden name beside `path`, with this host and process in it. The file
    is seen to the disk and renamed to `path`. After an error, which is raised again, the hidden file is removed; one of
    a killed process stays. The directory must be there. Raises OSError, and what `save` raises.
    """
    hidden = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        save(hidden)
        hidden.chmod(0o644)
        with hidden.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
