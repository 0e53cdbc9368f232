"""docs/reference.md is what the code says, and no kind of event is left out of it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kfuse
from kfuse.cli.app import _TOOLS, main
from kfuse.tools.reference import updated

DOCS = Path(__file__).parents[2] / "docs"


def test_reference_is_up_to_date() -> None:
    for page in ("reference.md", "support.md"):
        written = (DOCS / page).read_text()
        assert "<!-- end -->" in written and written == updated(written), "make reference writes it anew"


def emitted() -> Iterator[tuple[str, set[str]]]:
    """Each kind of event in the source, with the names of its fields: `event(step, "view", pause_s=...)`, or a dict."""
    for file in Path(kfuse.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "event":
                kinds = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                yield from ((kind, {word.arg for word in node.keywords if word.arg}) for kind in kinds)
            elif isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                pairs = dict(zip(keys, node.values, strict=True))
                if isinstance(kind := pairs.get("kind"), ast.Constant) and "type" not in pairs:  # else a message
                    yield kind.value, {str(key) for key in keys if key}


def test_every_kind_of_event_is_described() -> None:
    _, _, page = (DOCS / "reference.md").read_text().partition("## Events")
    described = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, flags=re.MULTILINE))
    found = list(emitted())
    assert {kind for kind, _ in found} == set(described)
    for kind, names in found:
        assert names - {"kind", "step"} <= set(re.findall(r"\w+", described[kind])), kind


def test_every_tool_has_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, module in _TOOLS.items():
        monkeypatch.setattr(sys, "argv", ["kfuse", name, "--help"])
        assert main() == 0
        assert capsys.readouterr().out == importlib.import_module(module).USAGE + "\n"
