"""The trained model leaves as files that plain torch reads, whole or not at all; a run may start from either."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import assert_none_left, command_line, compose, read_lines, words
from test_fit_checkpoint import assert_equal
from torch import nn

import kfuse as kf
from kfuse.checkpoint import manager
from kfuse.checkpoint.manager import load_weights, model_weights
from kfuse.session import reset
from kfuse.settings.tree import ConfigError
from kfuse.train.evaluation import params_sha256


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


def test_the_files_are_read_in_plain_torch_and_loaded_again(tmp_path: Path) -> None:
    model = tied(tmp_path, heldout=(torch.arange(8), torch.arange(8)))
    state = model_weights(model)
    assert list(state) == list(model.state_dict()) and vars(state) == vars(model.state_dict())
    assert state["head.weight"] is state["embedding.weight"] and type(state["norm.weight"]) is torch.Tensor
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    compiled = model_weights(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert list(compiled) == list(model.state_dict())
    fresh = [Tied(), Tied()]
    fresh[0].load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.load_model(fresh[1], tmp_path / "model.safetensors")
    for each in fresh:
        assert_equal(each.state_dict(), model.state_dict())
    for name in ("model.pt", "model.safetensors"):
        assert (tmp_path / name).stat().st_size < 12000  # the shared weights are in it once
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644
        again = Tied()
        load_weights(again, str(tmp_path / name))
        assert_equal(again.state_dict(), model.state_dict())
        assert again.head.weight is again.embedding.weight
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["model"] == str(tmp_path / "model.pt") and summary["best_model"] == str(tmp_path / "best.pt")
    assert not list(tmp_path.glob(".*"))


class Chosen(nn.Module):
    """Has these accuracies, one for each evaluation, whatever it is trained to."""

    accuracies = iter([0.5, 0.75, 0.25, 0.75])

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.weight * x
        right = round(next(self.accuracies) * len(x))
        return torch.tensor([[0.0, 1.0]] * right + [[1.0, 0.0]] * (len(x) - right))


class Kept(kf.BasePolicy):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, list[Any]()

    def before_epoch(self) -> None:
        self.seen.append(model_weights(self.model)["weight"])


def test_the_best_is_by_accuracy_where_it_is_known_else_by_loss(tmp_path: Path) -> None:
    """Of equal ones the first; later evaluations leave the file alone."""
    x, one = torch.rand(8, 2), torch.ones(8, 1)
    line = nn.Linear(1, 1, bias=False)
    nn.init.ones_(line.weight)  # from 1 towards -1, past 0, which the held-out targets want
    labelled = (x, torch.ones(8, dtype=torch.int64))
    for key, best, model, data, heldout in (
        ("accuracy", max, Chosen(), labelled, labelled),
        ("loss", min, line, (one, -one), (one, 0 * one)),
    ):
        kept, folder = Kept(model), tmp_path / key
        how: dict[str, Any] = {"batch_size": 8, "epochs": 4 if key == "accuracy" else 9, "run_dir": folder}
        kf.fit(model, data, kf.FusedSGD(model.parameters(), lr=0.1), kept, heldout=heldout, **how)
        found = [event[key] for event in read_lines(folder / "events.jsonl") if event["kind"] == "evaluation"]
        epoch = found.index(best(found))
        assert 0 < epoch < len(found) - 1
        assert torch.equal(plain(folder / "best.pt")["weight"], kept.seen[epoch + 1])
        assert not torch.equal(plain(folder / "model.pt")["weight"], kept.seen[epoch + 1])


@pytest.mark.parametrize(("where", "name"), [(torch, "save"), (manager, "model_weights")])
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
    (tmp_path / "a" / "summary.json").unlink()  # the run has not ended: another may take its place
    monkeypatch.setattr(where, name, full)
    model = tied(tmp_path / "a", checkpoint_resume="auto", checkpoint_dir=tmp_path / "none", epochs=2)
    assert (tmp_path / "a" / "model.pt").read_bytes() == old and params_sha256(model)
    assert f"model failed {tmp_path / 'a' / 'model.pt'}: No space left on device" in caplog.text
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert "model" not in summary and summary["exit_reason"] == "epochs"
    assert not list((tmp_path / "a").glob(".*"))


def test_files_of_another_model_or_of_none_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content, message in [
        (b"", "cannot be read"),
        ([1], "must hold a model's state_dict"),
        (nn.Linear(3, 4).state_dict(), "size mismatch for weight"),
        (nn.Sequential(nn.Linear(3, 2)).state_dict(), r"Missing key\(s\).*Unexpected key\(s\)"),
    ]:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
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
    compose(["model._target_=test_saved_model.OwnInit", "model.init=ones"])


class OwnInit(nn.Linear):
    """A model whose class has an argument `init` of its own."""

    def __init__(self, input_shape: list[int], num_classes: int, init: str) -> None:
        super().__init__(8 * 8, num_classes)
        assert init == "ones"


TRAINING = words(
    "comm=reproducible model.hidden=[24] batch.size=32 batch.micro=8 batch.min=8 train.epochs=1 policy=none",
    "observe.sinks=[]",
)


@pytest.mark.full
def test_a_run_starts_from_a_saved_model(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with command_line(tmp_path / "first", [*TRAINING, "workers.count=1"]) as (process, first):
        assert process.wait(120) == 0
        assert_none_left(first.pids)
    assert first.summary["model"] == str(tmp_path / "first" / "model.pt")
    assert (tmp_path / "first" / "best.pt").exists()
    zero = [*TRAINING, "train.epochs=null", "train.steps=1", "lr.base=1e-30", "train.save_model=false"]
    start = [*zero, f"model.init={tmp_path / 'first' / 'model.safetensors'}"]
    with command_line(tmp_path / "second", start) as (process, second):
        assert process.wait(120) == 0
    assert second.summary["heldout_accuracy"] == first.summary["heldout_accuracy"] > 0.2
    assert not (tmp_path / "second" / "model.pt").exists() and "model" not in second.summary
