"""What every test starts with: no session of kfuse, one thread for torch, and no deadline for Hypothesis's examples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import elastic_job
import hypothesis
import pytest
import torch

from kfuse.comm import devices
from kfuse.session import reset

_OF = devices.of
collect_ignore = [] if find_spec("lightning") and find_spec("transformers") else ["frameworks"]

# How long an example takes, or is drawn, says more of what else the machine does than of what is tested.
hypothesis.settings.register_profile("kfuse", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("kfuse")


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    """No session outlives its test, and no double of a device.

    With one thread a test takes the same time beside busy processes: several would wait for the one without a core.
    """
    torch.set_num_threads(1)
    reset()
    yield
    reset()
    left, devices.of = devices.of, _OF
    assert left is _OF, "the test has left a double of the device behind"


@pytest.fixture(autouse=True, scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> None:
    elastic_job.REFERENCES = tmp_path_factory.mktemp("references")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory for a command, which looks for a user's own modules there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    return tmp_path


@pytest.fixture
def command(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`kfuse` with some words, in this process: its exit status, its output, its errors."""
    from kfuse.cli.app import main

    def act(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kfuse", *words])
        return (main(), *capsys.readouterr())

    return act
