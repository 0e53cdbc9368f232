"""docs/reference.md and docs/support.md are what the code says, and every tool has help."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kfuse.cli.app import _TOOLS, main
from kfuse.tools.reference import updated

DOCS = Path(__file__).parents[2] / "docs"


def test_reference_is_up_to_date() -> None:
    for page in ("reference.md", "support.md"):
        written = (DOCS / page).read_text()
        assert "<!-- end -->" in written and written == updated(written), "make reference writes it anew"


def test_every_tool_has_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, module in _TOOLS.items():
        monkeypatch.setattr(sys, "argv", ["kfuse", name, "--help"])
        assert main() == 0
        assert capsys.readouterr().out == importlib.import_module(module).USAGE + "\n"
