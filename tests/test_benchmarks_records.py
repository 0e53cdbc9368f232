"""Who reads a table can take its figures again: each recorded command is in the documentation."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTPUTS = ("--json", "--plot", "--picture")


def of_documentation() -> str:
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return " ".join(page.read_text().replace("\\\n", " ") for page in pages)


def without_outputs(command: str) -> list[str]:
    """The script's name and its arguments, but for the files that it writes."""
    words = shlex.split(command)
    words = words[words.index(next(word for word in words if word.endswith(".py"))) :]
    kept = [word for k, word in enumerate(words) if word not in OUTPUTS and words[k - 1] not in OUTPUTS]
    return [Path(kept[0]).name, *kept[1:]]


def test_the_command_of_each_result_is_documented() -> None:
    documented = of_documentation()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        command = json.loads(path.read_text()).get("command")
        if command is None:  # the table of gpu.sh
            continue
        said = r"\s+".join(map(re.escape, without_outputs(command)))
        further = r"(?!\s+(?!--(?:json|plot|picture)\s)--\w)"  # not the beginning of a command with more arguments
        assert re.search(rf"\b{said}(?=[\s`;)]){further}", documented), f"{path.name}: {command}: not in any page"
