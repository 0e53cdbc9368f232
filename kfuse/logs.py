"""How the records of the logger "kfuse" become lines in the processes that kfuse's commands start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


def set_up_logging(
    level: str, process: str, write: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
) -> None:
    """Writes each record of the logger "kfuse" from `level` on as one line: time, level, process, text.

    level: of observe.log_level. process: how the lines name this process, for example "worker 0". write: takes a line
    without its end. A second call replaces the first one's handler. Records go to
    the root logger's handlers instead if it has any, for example where a script has called `logging.basicConfig`. A
    level that the script has set on the logger is kept. Only the processes of kfuse's commands call this.
    """
    logger = logging.getLogger("kfuse")
    ours = [handler for handler in logger.handlers if isinstance(handler, _LineHandler)]
    for handler in ours:
        logger.removeHandler(handler)
    if ours or logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    logger.addHandler(_LineHandler(process, write))


class _LineHandler(logging.Handler):
    def __init__(self, process: str, write: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S"))
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self._write(" ".join(self.format(record).splitlines()))
