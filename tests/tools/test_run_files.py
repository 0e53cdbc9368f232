"""A recorded run whose files are damaged: `kfuse replay`, `plan` and `cbs` give a result, or one line and status 2."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_job import compose, override, read_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import kfuse as kf
from kfuse.cli.app import main
from kfuse.policies import SchedulePolicy
from kfuse.policies.signals import OTHER_SIGNALS
from kfuse.settings.tree import ConfigError
from kfuse.statistics.figures import METRICS
from kfuse.tools.cbs import command as cbs
from kfuse.tools.cbs.branches import BranchError
from kfuse.tools.run_files import read_config, read_metrics

Capsys = pytest.CaptureFixture[str]

PHASES = [{"step": 60, "batch_size": 16, "lr_scale": 0.7}, {"step": 90, "batch_size": 8}]
CONFIG = [
    "policy=schedule",
    override("policy.phases", PHASES),
    "batch.size=8",
    "batch.micro=2",
    "lr.scaling=linear",
    "lr.base=0.05",
    "train.epochs=16",
    "workers.max=1",
]
QUICK = ("replay", "replay another policy", "plan")
"""Of `commands`: those that build no model."""
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose policy decides twice, with checkpoints."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("valid") / "run"
    x, y = torch.randn(64, 6), torch.randn(64, 1)
    net = torch.nn.Linear(6, 1)
    kf.fit(
        net,
        (x, y),
        kf.FusedSGD(net.parameters(), lr=0.05),
        kf.Hook(SchedulePolicy(PHASES)),
        batch_size=8,
        batch_micro=2,
        train_epochs=16,
        lr_scaling="linear",
        loss_fn=F.mse_loss,
        run_dir=folder,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every_steps=50,
    )
    (folder / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(compose(CONFIG)), folder / ".hydra" / "config.yaml")
    return folder


@pytest.fixture
def run(valid: Path, tmp_path: Path) -> Path:
    """A copy of its own for one test."""
    return Path(shutil.copytree(valid, tmp_path / "run"))


def kfuse(*words: object) -> int:
    """Exit status of the command line, in this process."""
    before, sys.argv = sys.argv, ["kfuse", *map(str, words)]
    try:
        return main()
    finally:
        sys.argv = before


def commands(run: Path, jobs: Path) -> dict[str, list[object]]:
    """The commands that read a run directory."""
    jobs.write_text(json.dumps([{"name": "a", "run": str(run), "samples_left": 1000}]))
    return {
        "replay": ["replay", run, "plot=null"],
        "replay another policy": ["replay", run, "policy=gns", "plot=null"],
        "plan": ["plan", jobs, "workers=2"],
        "cbs": ["cbs", f"run={run}", "factors=[1,2]", "samples=128"],
    }


def change_lines(file: Path, change: Callable[[Lines], None]) -> None:
    lines = read_lines(file)
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


# -- valid and damaged metrics ----------------------------------------------------------------------------------------


def test_the_valid_run_is_taken(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    given = commands(run, tmp_path / "jobs.yaml")
    for name in QUICK:
        assert kfuse(*given[name]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "2 decisions, as recorded in events.jsonl" in out and "gns, predicted" in out, out
    assert [line["step"] for line in read_metrics(run)] == [line["step"] for line in read_lines(run / "metrics.jsonl")]


def each(name: str, value: Any) -> Callable[[Lines], None]:
    """A change of all lines."""
    return lambda lines: [line.update({name: value}) for line in lines] and None


def fifth(**changed: Any) -> Callable[[Lines], None]:
    """A change of line 5, which is that of step 4."""
    return lambda lines: lines[4].update(changed)


def without(name: str) -> Callable[[Lines], None]:
    return lambda lines: lines[4].pop(name)


# A change of the lines, and what is said of them: each kind of check once.
DAMAGES: list[tuple[Callable[[Lines], None], str]] = [
    (fifth(step_time_s=float("nan")), "line 5: step_time_s=nan: must be a number"),
    (fifth(step_time_s=0.0), "line 5: step_time_s=0.0: must be a number"),
    (lambda lines: lines[0].pop("signals"), "line 1: signals: missing: another version of kfuse"),
    (without("noise_scale_low"), "line 5: noise_scale_low: missing: another version of kfuse"),
    (each("batch_size", "x"), "line 1: batch_size=x: must be a whole number"),
    (fifth(workers=True), "line 5: workers=true: must be a whole number, 1 to "),
    (fifth(loss=[1]), "line 5: loss=[1]: must be a number or null"),
    (fifth(step=3), "line 5: step=3: must be above 3, that of the line before"),
    (fifth(step=10**9), "line 5: samples=40: must be at least 1000000029, after the line before"),
    (fifth(epoch=7000), "line 5: epoch=7000: must be below samples"),
    (fifth(signals=3), "line 5: signals=3: must be an object"),
    (fifth(signals={"done": 2}), "line 5: signals.done=2: must be a number or null, 0 to 1"),
    (fifth(signals={"throughput": ["x"]}), "line 5: signals.throughput=['x']: must be a list"),
    (fifth(signals={"bounds": 7}), "line 5: signals.bounds=7: must have batch_min, batch_max"),
    (
        fifth(signals={"bounds": {"batch_min": 9, "batch_max": 8, "workers_min": 1, "workers_max": 1}}),
        "line 5: batch.min=9, batch.max=8: must be 1 <= min <= max",
    ),
]


def refused(run: Path, words: list[object], said: str, capsys: Capsys) -> None:
    """The command ends in one line that says it."""
    assert kfuse(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and captured.err.count("\n") == 1, captured


def test_damaged_metrics_are_refused_with_their_line(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = run / "metrics.jsonl"
    whole, given = file.read_bytes(), commands(run, tmp_path / "jobs.yaml")
    for number, (damage, said) in enumerate(DAMAGES):
        file.write_bytes(whole)
        change_lines(file, damage)
        refused(run, given[QUICK[number % len(QUICK)]], f"{file}: {said}", capsys)
    for text in (b"garbage", b"[]", b"{", b"[" * 100_000, b"\xff\xfe"):
        lines = whole.splitlines(keepends=True)
        lines[4] = text + b"\n"
        file.write_bytes(b"".join(lines))
        refused(run, given["replay"], f"{file}: line 5 is damaged: it must be a JSON object", capsys)
    file.write_bytes(b"")
    refused(run, given["replay"], "has no step yet", capsys)


def test_steps_whose_time_is_unknown_are_left_out_of_a_plan(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    given = commands(run, tmp_path / "jobs.yaml")
    change_lines(run / "metrics.jsonl", fifth(step_time_s=None))
    assert kfuse(*given["plan"]) == 0
    change_lines(run / "metrics.jsonl", each("step_time_s", None))
    assert kfuse(*given["plan"]) == 2
    assert "must have 5 steps or more with one batch size and number of workers" in capsys.readouterr().err


def test_every_figure_has_a_rule(run: Path) -> None:
    """A column or signal that nobody checks would be believed whatever it is: text is refused in each."""
    whole = read_lines(run / "metrics.jsonl")
    for name in (*METRICS, *OTHER_SIGNALS):
        lines = copy.deepcopy(whole)
        (lines[4] if name in METRICS else lines[4].setdefault("signals", {}))[name] = "text"
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError, match=rf"line 5: (signals\.)?{name}"):
            read_metrics(run)


# -- damaged configurations and events --------------------------------------------------------------------------------


def test_damaged_configurations_are_refused(run: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = run / ".hydra" / "config.yaml"
    text, given = file.read_text(), commands(run, tmp_path / "jobs.yaml")
    for old, new, said in (
        ("  scaling: linear", "  scaling: abc", "lr.scaling=abc: must be one of none, linear, sqrt, adascale"),
        ("  size: 8", "  size: null", "batch.size=null: must be a whole number, "),
        ("seed: 0", f"seed: {10**400}", "seed=1000"),
        ("  steps: null", "  steps: .nan", "train.steps=nan: must be a whole number, "),
        ("batch:", "batch: 3\nwas:", "batch=3: must be settings"),
        ("policy:", "policy: null\nwas:", "policy=null: must be settings"),
        ("seed: 0", "seed: 0\nseed: 1", "cannot be read: "),
        ("seed: 0", "seed: ${nothing}", "cannot be read: InterpolationKeyError: "),
    ):
        assert f"\n{old}\n" in f"\n{text}"
        file.write_text(f"\n{text}".replace(f"\n{old}\n", f"\n{new}\n", 1)[1:])
        for words in given.values():
            refused(run, words, f"{file}: {said}", capsys)
    for other in ("", "[]", "x", "{}", "3", "\xff"):
        file.write_text(other, encoding="latin-1")
        for words in given.values():
            refused(run, words, f"{file}: ", capsys)


def test_what_a_command_does_not_need_may_be_missing(run: Path) -> None:
    """A setting that the run's version did not have is none that damages it."""
    file = run / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("  decay_fraction: 0.1\n", ""))
    assert "decay_fraction" not in read_config(run, ["lr.scaling"])["lr"]
    with pytest.raises(ConfigError, match=r"config.yaml: lr.decay_fraction: missing: another version of kfuse"):
        read_config(run, ["lr.decay_fraction"])
    assert kfuse("replay", run, "plot=null") == 0


def test_damaged_events_are_refused_with_their_line(run: Path, capsys: Capsys) -> None:
    file = run / "events.jsonl"
    whole = file.read_text()
    number = next(k for k, event in enumerate(read_lines(file), 1) if event["kind"] == "decision")
    for changed, said in (
        ({"kind": None}, "kind=null: must be text"),
        ({"step": "7"}, "step=7: must be a whole number"),
        ({"step": None}, "step=null: must be a whole number"),
        ({"batch_size": [8]}, "batch_size=[8]: must be a list of 2: a whole number, a whole number"),
        ({"lr": [0.1, 10**400]}, "lr=[0.1, 1000"),
    ):
        file.write_text(whole)
        change_lines(file, lambda lines, changed=changed: lines[number - 1].update(changed))  # type: ignore[misc]
        refused(run, ["replay", run, "plot=null"], f"{file}: line {number}: {said}", capsys)
    assert kfuse("replay", run, "policy=gns", "plot=null") == 0, "another policy needs no events"
    file.unlink()
    assert kfuse("replay", run, "plot=null") == 0
    assert "not compared with the recorded decisions: there is no events.jsonl" in capsys.readouterr().out


# -- any one field ----------------------------------------------------------------------------------------------------

REMOVED = object()
VALUES = [REMOVED, None, "text", "", -1, 0, 0.0, 1, 2.5, float("nan"), float("inf"), [], [None], {}, True]
VALUES += [1e308, 5e-324, 10**25, 10**400]


def fields_of(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields of plain values, those of lists included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in fields_of(item))


def damaged(value: Any, path: tuple[Any, ...], new: object) -> Any:
    """A copy with another value in this field, or without it."""
    out = copy.deepcopy(value)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    if new is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return out


def assert_result_or_one_line(run: Path, words: list[object], capsys: Capsys) -> None:
    status = kfuse(*words)
    captured = capsys.readouterr()
    assert status in (0, 2), captured
    if status == 2:
        assert captured.err.count("\n") == 1 and captured.out == "", captured
        assert str(run) in captured.err, captured.err
    else:
        assert captured.err == ""


@pytest.mark.full
@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", ".hydra/config.yaml"])
def test_any_one_field_damaged_gives_a_result_or_one_line(
    file: str, valid: Path, tmp_path: Path, capsys: Capsys
) -> None:
    run = Path(shutil.copytree(valid, tmp_path / "run"))
    given_words = commands(run, tmp_path / "jobs.yaml")
    is_yaml = file.endswith("yaml")
    whole = OmegaConf.to_container(OmegaConf.load(run / file)) if is_yaml else read_lines(run / file)
    # Of the lines that are like one another a few.
    paths = [path for path in fields_of(whole) if is_yaml or path[0] in (0, 1, 50, len(whole) - 1)]

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from(paths), st.sampled_from(VALUES), st.sampled_from(QUICK))
    def check(path: tuple[Any, ...], new: object, name: str) -> None:
        other = damaged(whole, path, new)
        text = OmegaConf.to_yaml(other) if is_yaml else "".join(json.dumps(line) + "\n" for line in other)
        (run / file).write_text(text)
        assert_result_or_one_line(run, given_words[name], capsys)

    check()


@pytest.mark.full
def test_any_one_field_of_the_configuration_damaged_gives_branches_or_one_line(
    valid: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first branch, which is not trained."""

    def not_trained(*arguments: object) -> None:
        raise BranchError("not trained")

    monkeypatch.setattr(cbs, "_measure", not_trained)
    run = Path(shutil.copytree(valid, tmp_path / "run"))
    words, file = commands(run, tmp_path / "jobs.yaml")["cbs"], run / ".hydra" / "config.yaml"
    whole: Any = OmegaConf.to_container(OmegaConf.load(file))
    assert kfuse(*words) == 1 and "not trained" in capsys.readouterr().out

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.sampled_from([*fields_of(whole)]), st.sampled_from(VALUES))
    def check(path: tuple[Any, ...], new: object) -> None:
        file.write_text(OmegaConf.to_yaml(damaged(whole, path, new)))
        status = kfuse(*words)
        captured = capsys.readouterr()
        assert (status, captured.out) in ((1, "kfuse cbs: not trained\n"), (2, "")), captured
        if status == 2:
            assert captured.err.count("\n") == 1 and str(run) in captured.err, captured.err

    check()
