"""The words of a tool's command line."""

from __future__ import annotations

from typing import Any

import pytest

from kfuse.config.schema import ConfigError
from kfuse.tools.words import plain_value, read_words


def test_words_and_values_are_told_apart() -> None:
    words = ["jobs.yaml", "workers=4", "runs/lr=0.1", "plot=a=b", "-v=1"]
    assert read_words("kfuse plan", words, ("workers", "plot")) == (
        ["jobs.yaml", "runs/lr=0.1", "-v=1"],
        {"workers": "4", "plot": "a=b"},
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["worker=4"], r"^kfuse plan worker=4: must be one of workers=, plot= \(did you mean workers\?\)$"),
        (["workers=2", "workers=3"], r"^workers=3: must be given once$"),
    ],
)
def test_unknown_and_repeated_keys_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_words("kfuse plan", words, ("workers", "plot"))


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("0.5", 0.5), ("null", None), ("[1,2]", [1, 2]), ("a b", "a b"), ("", None)]
)
def test_values_are_read_as_yaml(text: str, value: Any) -> None:
    assert plain_value("key", text) == value


def test_what_yaml_cannot_read_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^key=\[1: [^\n]+$"):
        plain_value("key", "[1")
