"""The trained model leaves as files that plain torch reads, whole or not at all; a run may start from either."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import assert_none_left, command_line, compose, read_lines, words
from test_fit_checkpoint import Growing, assert_equal, network, problem, with_fit
from test_kfuse_run import run_script
from torch import nn

import kfuse as kf
from kfuse.checkpoint import saved_model
from kfuse.checkpoint.saved_model import load_weights, model_weights
from kfuse.session import reset
from kfuse.settings.tree import ConfigError
from kfuse.train.evaluation import params_sha256

needs_safetensors = pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="needs safetensors")
both = pytest.mark.parametrize("name", ["model.pt", pytest.param("model.safetensors", marks=needs_safetensors)])


class Tied(nn.Module):
    """Its embedding is its output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embedding(x)))
        return out


def plain(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def tied(folder: Path, **arguments: Any) -> Tied:
    """A model with shared weights, in the flat buffers of a fused optimizer, trained and saved there."""
    torch.manual_seed(0)
    model = Tied()
    opt = kf.FusedAdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 64, (40,))
    kf.fit(model, (tokens, tokens.roll(1)), opt, batch_size=8, run_dir=folder, **arguments)
    return model


@both
def test_both_files_are_read_in_plain_torch(tmp_path: Path, name: str) -> None:
    model, fresh = tied(tmp_path), Tied()
    if name == "model.pt":
        fresh.load_state_dict(torch.load(tmp_path / name, weights_only=True))
    else:
        import safetensors.torch

        safetensors.torch.load_model(fresh, tmp_path / name)
    assert_equal(fresh.state_dict(), model.state_dict())
    assert (tmp_path / name).stat().st_size < 12000  # the shared weights are in it once
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644
    again = Tied()
    load_weights(again, str(tmp_path / name))
    assert_equal(again.state_dict(), model.state_dict())
    assert again.head.weight is again.embedding.weight


def test_the_copy_is_dense_and_shares_as_the_model_does() -> None:
    model = Tied()
    state = model_weights(model)
    assert list(state) == list(model.state_dict()) and vars(state) == vars(model.state_dict())
    assert state["head.weight"] is state["embedding.weight"] and type(state["norm.weight"]) is torch.Tensor
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    compiled = model_weights(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert list(compiled) == list(model.state_dict())


def test_the_summary_has_the_paths(tmp_path: Path) -> None:
    net = network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.05)
    returned = with_fit(net, opt, Growing(), run_dir=tmp_path, heldout=problem(), batch_size=8, train_epochs=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert returned is not None
    for found in (summary, returned):
        assert found["model"] == str(tmp_path / "model.pt") and found["best_model"] == str(tmp_path / "best.pt")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


class Chosen(nn.Module):
    """Has the accuracies given, one for each evaluation, whatever it is trained to; None: the output is no class."""

    def __init__(self, accuracies: list[float], classes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.evaluations, self._accuracies, self._classes = 0, accuracies, classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training or not self._classes:
            return self.weight * x[:, :1] if not self._classes else self.weight * x[:, :2]
        right = round(self._accuracies[self.evaluations] * len(x))
        self.evaluations += 1
        return torch.tensor([[0.0, 1.0]] * right + [[1.0, 0.0]] * (len(x) - right))


def test_the_best_is_by_accuracy_where_it_is_known(tmp_path: Path) -> None:
    """Of equal ones the first; later evaluations leave the file alone."""
    model = Chosen([0.5, 0.75, 0.25, 0.75], classes=True)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)
    x, y = torch.rand(8, 2), torch.ones(8, dtype=torch.int64)
    seen: list[torch.Tensor] = []

    class Keep(kf.BasePolicy):
        def before_epoch(self) -> None:
            seen.append(model.weight.detach().clone())

    kf.fit(model, (x, y), opt, kf.Hook(Keep()), heldout=(x, y), batch_size=4, train_epochs=4, run_dir=tmp_path)
    assert torch.equal(plain(tmp_path / "best.pt")["weight"], seen[2])  # of the second epoch's end
    assert not torch.equal(plain(tmp_path / "model.pt")["weight"], seen[2])


def test_the_best_is_by_loss_where_there_are_no_classes(tmp_path: Path) -> None:
    model = Chosen([], classes=False)
    opt = kf.FusedSGD(model.parameters(), lr=0.1)  # from 1 towards -1, past 0, which the held-out targets want
    x = torch.ones(8, 2)
    kf.fit(
        model,
        (x, -torch.ones(8, 1)),
        opt,
        heldout=(x, torch.zeros(8, 1)),
        batch_size=8,
        train_epochs=9,
        run_dir=tmp_path,
    )
    losses = [event["loss"] for event in read_lines(tmp_path / "events.jsonl") if event["kind"] == "evaluation"]
    best = plain(tmp_path / "best.pt")["weight"].item()
    assert 0 < losses.index(min(losses)) < len(losses) - 1
    assert best**2 == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ({}, set()),
        ({"run_dir": "run"}, {"run/model.pt"}),
        ({"checkpoint_dir": "kept"}, {"kept/model.pt"}),
        ({"run_dir": "run", "checkpoint_dir": "kept"}, {"run/model.pt"}),
        ({"run_dir": "run", "train_save_model": False}, set()),
    ],
)
def test_where_it_goes(arguments: dict[str, Any], files: set[str], tmp_path: Path) -> None:
    given = {name: tmp_path / value if isinstance(value, str) else value for name, value in arguments.items()}
    net = network()
    with_fit(net, kf.FusedAdamW(net.parameters(), lr=0.05), Growing(), batch_size=8, **given)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/model.pt")} == files


@pytest.mark.parametrize(("where", "name"), [(torch, "save"), (saved_model, "model_weights")])
def test_what_cannot_be_written_is_said_and_leaves_the_old_file(
    where: Any, name: str, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f".model.pt.{socket.gethostname()}.99999999").write_bytes(b"half")  # a killed process's
    tied(tmp_path / "a", heldout=(torch.arange(8), torch.arange(8)))
    old = (tmp_path / "a" / "model.pt").read_bytes()

    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    reset()
    monkeypatch.setattr(where, name, full)
    model = tied(tmp_path / "a", checkpoint_resume="auto", checkpoint_dir=tmp_path / "none", train_epochs=2)
    assert (tmp_path / "a" / "model.pt").read_bytes() == old and params_sha256(model)
    assert f"model failed {tmp_path / 'a' / 'model.pt'}: No space left on device" in caplog.text
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert "model" not in summary and summary["exit_reason"] == "epochs"
    assert not list((tmp_path / "a").glob(".*"))


def test_a_state_that_plain_torch_could_not_read_is_not_written(tmp_path: Path, caplog: Any) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"path": tmp_path}

    model = Odd(3, 2)
    kf.fit(model, (torch.randn(8, 3), torch.randn(8, 2)), kf.FusedSGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    assert "model failed" in caplog.text and "_extra_state" in caplog.text
    assert not (tmp_path / "model.pt").exists()


# -- starting from it -------------------------------------------------------------------------------------------------


def test_files_of_another_model_or_of_none_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content, message in [
        (None, "cannot be read: .*No such file"),
        (b"", "cannot be read"),
        ([1], "must hold a model's state_dict"),
        (nn.Linear(3, 4).state_dict(), "size mismatch for weight"),
        (nn.Sequential(nn.Linear(3, 2)).state_dict(), r"Missing key\(s\).*Unexpected key\(s\)"),
    ]:
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(ValueError, match=message) as error:
            load_weights(nn.Linear(3, 2), str(path))
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_the_command_line_checks_the_file_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for value, message in ((tmp_path / "none.pt", "No such file"), ("3", "must be the path")):
        with pytest.raises(ConfigError, match=rf"^model.init={value}: .*{message}"):
            compose([f"model.init={value}"])
    torch.save(nn.Linear(3, 2).state_dict(), path)
    with pytest.raises(ConfigError, match=rf"^model.init={path}: .*Missing key.*Unexpected key"):
        compose([f"model.init={path}"])


class OwnInit(nn.Module):
    """A model whose class has an argument `init` of its own."""

    def __init__(self, input_shape: list[int], num_classes: int, init: str = "zeros") -> None:
        super().__init__()
        self.layer = nn.Linear(8 * 8, num_classes)
        assert init == "ones"


def test_a_class_with_an_argument_init_gets_it() -> None:
    compose(["model._target_=test_saved_model.OwnInit", "model.init=ones"])


TRAINING = words(
    "comm=reproducible model.hidden=[24] batch.size=32 batch.micro=8 batch.min=8 train.epochs=2 policy=none",
    "observe.tensorboard=false",
)


@pytest.mark.full
@both
def test_a_run_starts_from_either_file(tmp_path: Path, name: str) -> None:
    with command_line(tmp_path / "first", [*TRAINING, "workers.count=2"]) as (process, first):
        assert process.wait(120) == 0
        assert_none_left(first.pids)
    assert first.summary["model"] == str(tmp_path / "first" / "model.pt")
    assert (tmp_path / "first" / "best.pt").exists()
    zero = [*TRAINING, "train.epochs=null", "train.steps=1", "lr.base=1e-30", f"model.init={tmp_path / 'first' / name}"]
    with command_line(tmp_path / "second", [*zero, "train.save_model=false"]) as (process, second):
        assert process.wait(120) == 0
    assert second.summary["eval_accuracy"] == first.summary["eval_accuracy"] > 0.5
    assert not (tmp_path / "second" / "model.pt").exists() and "model" not in second.summary


SCRIPT = """
import sys, torch, kfuse as kf
import test_fit_checkpoint as t
for training in (1, 2):
    net = t.network()
    opt = kf.FusedAdamW(net.parameters(), lr=0.05)
    kf.fit(net, t.problem(), opt, batch_size=8, train_epochs=2, heldout=t.problem(), run_dir="mine", seed=training)
print("threads", torch.get_num_threads())
"""


@pytest.mark.full
def test_under_kfuse_run_it_goes_to_the_jobs_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script's second training to that one's. Each worker has its share of the cores."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended = run_script(tmp_path, SCRIPT)
    assert ended.status == 0, ended.said
    for folder in (ended.run_dir, ended.run_dir / "2"):
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["model"] == str(folder / "model.pt") and summary["best_model"] == str(folder / "best.pt")
        net = network()
        net.load_state_dict(plain(folder / "model.pt"))
        assert params_sha256(net) == summary["params_sha256"]
    assert not (tmp_path / "mine").exists()
    notes = [event["note"] for event in ended.lines("events.jsonl") if event["kind"] == "note"]
    assert notes == [f"run_dir={tmp_path / 'mine'} is not used: kfuse-run keeps the run directory, --run-dir"]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.said.count(f"threads {share}") == 2
