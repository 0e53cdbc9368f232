"""kfuse's processes log what the setting asks for, each record once in one line; as a library it sets nothing up."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kfuse as kf
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
kf.fit(net, (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)), opt, train_epochs=1, batch_size=4, batch_micro=2)
"""


def records(module: str, *arguments: str, folder: Path) -> list[str]:
    """Runs one of the commands to its end; returns the lines of its output that are log records."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if RECORD.match(line) or line.startswith("OWN ")]


@pytest.mark.full
def test_a_run_logs_its_transport_and_checkpoints_where_it_is_asked_to(tmp_path: Path) -> None:
    run = ["train.steps=6", "checkpoint.every_steps=3", "policy=none", "observe.tensorboard=false"]
    lines = records("kfuse", *run, "observe.log_level=info", "workers.count=2", folder=tmp_path)
    assert sum("transport allreduce" in line for line in lines) == 1  # rank 0's only
    written = [re.search(r": checkpoint of step (\d+) written to ", line) for line in lines]
    assert [found.group(1) for found in written if found] == ["3", "6"]


@pytest.mark.full
@pytest.mark.parametrize(("own", "start"), [([], r"\d\d:\d\d:\d\d INFO worker 0: "), (["--own"], "OWN INFO ")])
def test_a_scripts_records_are_written_once_where_it_is_asked_to(own: list[str], start: str, tmp_path: Path) -> None:
    """By the script's own handler where it has one."""
    command = ["--run-dir", "run", "--observe-log-level", "info", "train.py", *own]
    (line,) = [line for line in records("kfuse.cli.kfuse_run", *command, folder=tmp_path) if "transport" in line]
    assert re.match(start, line)


def test_as_a_library_kfuse_installs_no_handler() -> None:
    net = torch.nn.Linear(3, 2)
    data = (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    kf.fit(net, data, kf.FusedSGD(net.parameters(), lr=0.1), train_epochs=1, batch_size=4)
    assert (LOG.handlers, LOG.level) == ([], logging.NOTSET)


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
    ("own", "level", "shown"),
    [(0, "debug", "DIWE"), (0, "warning", "WE"), (0, "off", ""), (20, "off", "IWE")],
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


def test_lines_go_to_standard_error_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with root_without_handlers():
        set_up_logging("warning", "worker 1")
        LOG.warning("here")
    out, err = capsys.readouterr()
    assert out == "" and RECORD.match(err) and err.endswith(" WARNING worker 1: here\n")
