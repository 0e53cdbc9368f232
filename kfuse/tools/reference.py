"""Writes the generated tables of pages of docs/: `python -m kfuse.tools.reference PAGE ...`.

A page has each between the lines <!-- NAME --> and <!-- end -->. Tests compare pages and code.
"""

from __future__ import annotations

import importlib.resources
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from kfuse.policies.signals import Signals
from kfuse.settings.instantiate import CLASS_GROUPS
from kfuse.settings.rules import RULES, Compared
from kfuse.settings.tree import SCRIPTS_ONLY, SECTIONS, SETTINGS, CommandSettings, Leaf, show
from kfuse.statistics.figures import FIGURES, METRICS, StepContext


def updated(page: str) -> str:
    """Returns the text of a page with its generated tables written anew."""
    parts = {"settings": _settings, "options": _options, "figures": _figures, "rules": _rules}
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->",
        lambda found: "\n\n".join([f"<!-- {found[1]} -->", *parts[found[1]](), "<!-- end -->"]),
        page,
        flags=re.DOTALL,
    )


def _settings() -> Iterator[str]:
    for section, about in {"": "", **SECTIONS}.items():
        if section:
            yield f"### {section}"
            yield about
        rows = [
            (
                "<br>".join(f"`{name}`" for name in dict.fromkeys(_names(leaf))),
                f"`{show(leaf.default)}`",
                leaf.allowed.removesuffix(", or null"),
                leaf.setting.help,
            )
            for leaf in SETTINGS.values()
            if leaf.key.rpartition(".")[0] == section
        ]
        yield _table(("setting", "default", "must be", "what it is"), rows)


def _names(leaf: Leaf) -> Iterator[str]:
    """Yields its name at the shell, and then its name in Python."""
    if leaf.name not in SCRIPTS_ONLY:
        yield leaf.key
    if leaf.name not in CommandSettings.__annotations__:
        yield leaf.name


def _options() -> Iterator[str]:
    configs = importlib.resources.files("kfuse.configs")
    for group in (*CLASS_GROUPS, "comm"):
        for file in sorted(configs.joinpath(group).iterdir(), key=lambda file: file.name):
            yield f"### {group}={file.name.removesuffix('.yaml')}"
            yield f"```yaml\n{file.read_text().strip()}\n```"


def _figures() -> Iterator[str]:
    signals = {each.name: each.metadata for each in fields(Signals)}
    types = {each.name: str(each.type) for kind in (StepContext, Signals) for each in fields(kind)}
    rows: dict[str, list[tuple[str, str, str]]] = {"both": [], "metrics.jsonl": [], "Signals": []}
    for name in dict.fromkeys([*METRICS, *signals]):
        about = FIGURES.get(name) or signals[name]
        where = "Signals" if name not in METRICS else "both" if name in signals else "metrics.jsonl"
        rows[where].append((f"`{name}`<br>{types[name].replace(' | None', '?')}", about["unit"], about["help"]))
    for name, value in vars(Signals).items():
        if isinstance(value, property):
            rows["Signals"].append((f"`{name}`<br>int", "steps", (inspect.getdoc(value) or "").rstrip(".")))
    for where, those in rows.items():
        yield _table((f"in {where}", "unit", "what it is"), those)


def _rules() -> Iterator[str]:
    rows = []
    for rule in RULES:
        facts = {key: "..." for key in (*rule.when, rule.key)}
        when = " and ".join(f"`{key}`: {condition.words(facts, True)}" for key, condition in rule.when.items())
        must = (
            f"{rule.must.how} `{rule.must.other}`" if isinstance(rule.must, Compared) else rule.must.words(facts, True)
        )
        rows.append((f"`{rule.key}`", must, when, rule.why))
    yield _table(("", "must be", "with", "because"), rows)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(updated(path.read_text()))
