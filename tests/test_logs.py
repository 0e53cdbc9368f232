"""kfuse's processes log what the setting asks for, each record once in one line."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfuse.logs import set_up_logging

RECORD = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) (supervisor|worker \d+): \S.*$")
LOG = logging.getLogger("kfuse")
SCRIPT = """
import logging, sys
import torch
import kfuse as kf

if "--own" in sys.argv:
    logging.basicConfig(format="OWN %(levelname)s %(message)s")
net = torch.nn.Linear(3, 2)
opt = kf.FusedSGD(net.parameters(), lr=0.1)
kf.fit(net, (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)), opt, epochs=1, batch_size=4, micro_batch=2)
"""


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True])
def test_a_scripts_records_are_written_once_where_it_is_asked_to(own: bool, tmp_path: Path) -> None:
    """By the script's own handler where it has one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "kfuse.cli.kfuse_run", "--workers", "2", "--run-dir", "run"]
    command += ["--observe-log-level", "info", "train.py", *["--own"] * own]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=tmp_path, **pipes, timeout=300)
    [line] = [line for line in done.stdout.splitlines() if "transport allreduce" in line]
    label, _, line = line.partition(" ")
    assert label == "[0]" and (line.startswith("OWN INFO ") if own else RECORD.match(line)), "rank 0's only"


@contextlib.contextmanager
def root_without_handlers() -> Iterator[None]:
    """pytest has handlers of its own at the root; they and the logger's own state are put back at the end."""
    root = logging.getLogger()
    kept = root.handlers, LOG.handlers, LOG.level
    root.handlers, LOG.handlers = [], []
    LOG.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers, LOG.handlers, level = kept
        LOG.setLevel(level)


@pytest.mark.parametrize(
    ("own", "level", "shown"), [(0, "debug", "DIWE"), (0, "warning", "WE"), (0, "off", ""), (20, "off", "IWE")]
)
def test_a_level_shows_its_records_and_graver_ones_in_one_line_each(own: int, level: str, shown: str) -> None:
    """own: the level that the script has set, which is kept."""
    lines: list[str] = []
    with root_without_handlers():
        LOG.setLevel(own)
        for _ in range(1 if own else 2):  # a second call adds no second handler
            set_up_logging(level, "worker 7", lines.append)
        for each in (LOG.debug, LOG.info, LOG.warning, LOG.error):
            each("first\nsecond %d", 3)
    assert "".join(line.split()[1][0] for line in lines) == shown
    assert all(RECORD.match(line) and line.endswith(" worker 7: first second 3") for line in lines)
