"""`kfuse report`: the page shows what the run directory has, in one file, and is small for a long run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_job import chaos, run_job, words

from kfuse.cli import app
from kfuse.tools.report.charts import charts
from kfuse.tools.report.recorded import MOST_PARTS, read_runs

TRAINING = words(
    "comm.bucket_mb=0.002 lr.base=0.003 workers.count=2 workers.max=3 model=mlp data=digits model.hidden=[24]",
    "batch.size=16 batch.micro=4 batch.max=64 train.epochs=1 train.heldout_every=20",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with a larger batch, a lost worker and a new one."""
    directory = tmp_path_factory.mktemp("report")
    events = [{"step": 12, "moment": "after_step", "rank": 1, "how": "kill"}]
    policy = chaos(directory, events=events, phases=[{"step": 20, "workers": 3}])
    run_dir = run_job(directory / "run", [*TRAINING, *policy]).directory
    (run_dir / "settings.json").write_text('{"settings": {"batch.micro": 4}, "run": {"commit": "abc"}}')
    return run_dir


def test_the_page_shows_what_was_recorded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (run,) = read_runs([run_dir])
    made = {chart.title: chart for chart in charts([run])}
    drawn = made["Training loss over samples"].figure.renderers[0].data_source.data
    assert drawn["samples"].tolist() == [line["samples"] for line in lines]
    assert drawn["loss"].tolist() == [line["loss"] for line in lines]
    sizes = made["Batch size and noise scale"].figure.renderers[-1].data_source.data
    assert sizes["batch_size"].tolist() == [line["batch_size"] for line in lines]
    low = np.array([line["noise_scale_low"] for line in lines], float)
    assert np.array_equal(sizes["noise_scale_low"], low, equal_nan=True)
    assert {16, 32} <= {line["batch_size"] for line in lines}
    assert "1 lost" in made["Workers and events over time"].text
    held_out = made["Held-out accuracy over samples"].figure.renderers[0].data_source.data["accuracy"]
    assert held_out.tolist() == [event["accuracy"] for event in events if event["kind"] == "evaluation"]

    assert app._tool("report", [str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    html = (run_dir / "report.html").read_text()
    assert not re.search(r"""<(script|link|img)[^>]*(src|href)=["'](?!data:)""", html), "it needs no network"
    assert "was ended by SIGKILL" in html and "batch.micro" in html and "run.commit" in html
    assert run.summary["noise_scale_low"] == lines[-1]["noise_scale_low"]


def test_a_long_run_is_a_small_page_with_its_extremes(run_dir: Path, tmp_path: Path) -> None:
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0]) | {"signals": {}}
    generator = np.random.default_rng(0)
    losses = generator.random(20_000)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses.tolist()):
            given = {"step": step, "samples": 16 * step, "loss": loss, "workers": 1 if step == 7_777 else 2}
            file.write(json.dumps(line | given) + "\n")
    (run,) = read_runs([tmp_path])
    drawn = run.steps["loss"][run.drawn]
    assert drawn.min() == losses.min() and drawn.max() == losses.max()
    assert run.steps["workers"][run.drawn].min() == 1 and len(drawn) <= 3 * MOST_PARTS + 9
    assert "between 1 and 2" in next(chart for chart in charts([run]) if chart.title.startswith("Workers")).text
    assert app._tool("report", [str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_what_comes_again_and_what_is_odd(run_dir: Path, tmp_path: Path) -> None:
    """After a resumption evaluations come again; names may have markup; two runs may have the same name."""
    lines = [json.loads(line) | {"signals": {}} for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:25]]
    events: list[dict[str, Any]] = [
        *({"step": step, "kind": "evaluation", "loss": 1.0, "accuracy": step / 100} for step in (9, 19, 39)),
        {"step": 10, "kind": "resumed", "path": "<b>&"},
        {"step": 19, "kind": "evaluation", "loss": "no number", "accuracy": 0.5},
        {"step": None, "kind": "failure", "why": "no step"},
        {"step": 25, "kind": "failure", "why": "the job's own"},
    ]
    for folder in ("a/run", "b/run"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (tmp_path / folder / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events) + "{torn")
    runs = read_runs([tmp_path / "a/run", tmp_path / "b/run"])
    assert [run.name for run in runs] == ["a/run", "b/run"]
    assert runs[0].evaluations["step"].tolist() == [9, 19] and runs[0].evaluations["accuracy"].tolist() == [0.09, 0.5]
    assert "lost" not in next(chart for chart in charts(runs) if chart.title.startswith("Workers")).text
    assert app._tool("report", [str(tmp_path / "a/run"), str(tmp_path / "b/run")]) == 0
    assert "resumes from &lt;b&gt;&amp;" in (tmp_path / "a/run/comparison.html").read_text()


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], [str(tmp_path)]):
        assert app._tool("report", given) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
