"""docs/gpu.md names the tests that hold what it says: each one exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    named = 0
    for cell in page.split("|"):
        file = ""
        for path, name in re.findall(r"((?:gpu/)?test_\w+\.py)?`?::(test_\w+)", cell):
            file = path or file
            assert file, f"{name}: in no file"
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
            named += 1
    assert named > 80
