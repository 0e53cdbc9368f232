"""The figures of the elastic benchmark follow from its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = json.loads((BENCHMARKS / "results" / "elastic.json").read_text())


@pytest.mark.parametrize("name", RESULTS["measured"])
def test_committed_figures_are_those_of_the_measurements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from elastic_report import Episode, summarize

    measured: dict[str, Any] = RESULTS["measured"][name]
    episodes = [Episode(**episode) for episode in measured["episodes"]]
    figures = summarize(SimpleNamespace(**{**measured, "episodes": episodes}), back_s=60.0)  # type: ignore[arg-type]
    assert figures == RESULTS["figures"][name]
    samples, seconds = sum(e.samples for e in episodes), sum(e.seconds for e in episodes)
    assert figures["samples a second, under kills"] == pytest.approx(samples / seconds)
