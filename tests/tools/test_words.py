"""The words of a tool's command line."""

from __future__ import annotations

import importlib
import sys

import pytest

from kfuse.cli.app import _TOOLS, main
from kfuse.settings.tree import ConfigError
from kfuse.tools.words import plain_value, read_words


def test_words_and_values_are_told_apart() -> None:
    words = ["jobs.yaml", "workers=4", "runs/lr=0.1", "plot=a=b", "-v=1"]
    assert read_words("kfuse plan", words, ("workers", "plot")) == (
        ["jobs.yaml", "runs/lr=0.1", "-v=1"],
        {"workers": "4", "plot": "a=b"},
    )
    with pytest.raises(ConfigError, match=r"^kfuse plan worker=4: must be one of workers=, plot= \(did you mean work"):
        read_words("kfuse plan", ["worker=4"], ("workers", "plot"))
    with pytest.raises(ConfigError, match=r"^workers=3: must be given once$"):
        read_words("kfuse plan", ["workers=2", "workers=3"], ("workers", "plot"))


def test_values_are_read_as_yaml() -> None:
    for text, value in (("3", 3), ("0.5", 0.5), ("null", None), ("[1,2]", [1, 2]), ("a b", "a b"), ("", None)):
        assert plain_value("key", text) == value
    with pytest.raises(ConfigError, match=r"^key=\[1: [^\n]+$"):
        plain_value("key", "[1")


def test_every_tool_has_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, module in _TOOLS.items():
        monkeypatch.setattr(sys, "argv", ["kfuse", name, "--help"])
        assert main() == 0
        assert capsys.readouterr().out == importlib.import_module(module).USAGE + "\n"
