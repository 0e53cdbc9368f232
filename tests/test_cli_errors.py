"""Every mistake on the command line ends in one clear line with exit status 2, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kfuse.cli.app import main

USER_MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, num_classes: int, width: int = 64):
        super().__init__()
        self.head = torch.nn.Linear(width, num_classes)

class Frozen(torch.nn.Module):
    pass

def load():
    raise RuntimeError("the disk\\nis gone")
"""

# The command line, and what its error must say.
WRONG = [
    # A value of the wrong type, out of range, or that excludes another: tests/test_settings.py has the rest.
    ("batch.size=abc", ["batch.size=abc", "a whole number, 1 to"]),
    ("batch=3", ["batch=3", "batch.size, batch.micro"]),
    ("lr.base=nan", ["lr.base=nan", "above 0"]),
    ("comm.sync=8", ["comm.sync=8", "local:N"]),
    ("batch.micro=64", ["batch.micro=64", "batch.size=32"]),
    ("comm=reproducible comm.sync=local:4", ["comm.sync=local:4", "must be ssgd"]),
    ("policy=seesaw lr.decay=cosine", ["lr.decay=cosine", "SeesawPolicy"]),
    ("lr.decay=cosine lr.warmup_steps=9 train.steps=9", ["lr.warmup_steps=9"]),
    ("checkpoint.resume=folder", ["checkpoint.resume=folder"]),
    # Arguments of classes.
    ("model.hidden=[a]", ["model.hidden=['a']", "a list, each a whole number"]),
    ("optimizer=sgd optimizer.momentum=nan", ["optimizer.momentum=nan", "finite"]),
    ("policy=compose policy@policy.first=gns policy@policy.second=none policy.first.every=0", ["policy.first.every=0"]),
    ("model=gpt data=digits", ["model:", "vocab_size, block_size"]),
    ("data=text data.path=nope.txt", ["nope.txt", "cannot be read"]),
    ("data=cifar10", ["data.path", "a value is needed"]),
    ("model._target_=mistaken.Nett", ["model._target_=mistaken.Nett", "did you mean Net?"]),
    ("model._target_=broken.Net", ["model._target_=broken.Net", "SyntaxError"]),
    ("model._target_=mistaken.Frozen", ["model._target_=mistaken.Frozen", "no parameters"]),
    ("data._target_=mistaken.load", ["mistaken.load", "the disk is gone"]),
    ("policy._target_=builtins.dict", ["policy._target_=builtins.dict", "BasePolicy"]),
    ("optimizer._target_=torch.optim.LBFGS", ["torch.optim.LBFGS", "steps once"]),
    ("comm.schedule=torch.nn.Lineer", ["comm.schedule=torch.nn.Lineer", "did you mean Linear?"]),
    # Unknown keys, options and flags.
    ("batch.sise=8", ["batch.sise", "did you mean batch.size?"]),
    ("size=8", ["size", "did you mean batch.size?"]),
    ("+lr_base=1", ["lr_base", "did you mean lr.base?"]),
    ("model=gpr", ["model=gpr", "convnet, gpt, mlp", "did you mean gpt?"]),
    ("~seed", ["seed", "needed"]),
    ("--epochs 5", ["--epochs", "did you mean train.epochs?"]),
    ("batch.size=8,16", ["batch.size=8,16", "-m"]),
    # Sweeps: no run starts where one of them is wrong.
    ("-m batch.size=8,abc", ["batch.size=abc", "a whole number"]),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to give commands in, with files that are no use."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "mistaken.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    return tmp_path


@pytest.mark.parametrize(("command", "said"), WRONG, ids=[command for command, _ in WRONG])
def test_mistake_is_one_line(
    command: str,
    said: list[str],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(workplace.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["kfuse", *shlex.split(command)])
    status = main()
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("kfuse: error: ") and err.endswith("\n") and err.count("\n") == 1
    for words in said:
        assert words in err
    assert sorted(workplace.rglob("*")) == before


# A directory where the file must be, or a file where the directory must be: root may write anywhere else.
@pytest.mark.parametrize("taken", [".hydra/config.yaml/x", ".hydra", "metrics.jsonl/x", "tb"])
@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
@pytest.mark.full
def test_run_directory_that_cannot_be_written_is_one_line(
    taken: str, sweep: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = workplace / "here" / "0" if sweep else workplace / "here"
    (run_dir / taken).parent.mkdir(parents=True)
    (run_dir / taken).touch()
    arguments = ["-m", "hydra.sweep.dir=here", "seed=1"] if sweep else ["hydra.run.dir=here"]
    monkeypatch.setattr(sys, "argv", ["kfuse", "checkpoint.resume=auto", "train.steps=1", *arguments])
    assert main() == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kfuse: error: {run_dir / taken.removesuffix('/x')}") and err.count("\n") == 1
    assert "cannot be written" in err and "hydra.run.dir" in err


@pytest.mark.parametrize("arguments", [["hydra.run.dir=empty.txt/x"], ["-m", "seed=1", "hydra.sweep.dir=empty.txt/x"]])
def test_run_directory_that_cannot_be_made_is_one_line(
    arguments: list[str], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kfuse", *arguments])
    assert main() == 2
    err = capsys.readouterr().err
    assert re.match(r"kfuse: error: .*empty\.txt.*: cannot be written: Not a directory; choose .*\n$", err)
    assert err.count("\n") == 1


@pytest.mark.full
def test_mistake_is_one_line_from_a_shell(workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    command = [sys.executable, "-m", "kfuse", "data=text", "data.path=empty.txt"]
    done = subprocess.run(command, cwd=workplace, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kfuse: error: ") and done.stderr.count("\n") == 1
    assert "empty.txt is too short" in done.stderr
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_closed_or_full_ends_no_run(tmp_path: Path, unbuffered: str) -> None:
    run = "model=mlp data=digits train.steps=3 policy=none observe.tensorboard=false hydra.run.dir="
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    kfuse = f"{shlex.quote(sys.executable)} -m kfuse"
    for words in (f"{run}%s", "--help"):
        for number, (to, lines) in enumerate(((" | true", 0), (" > /dev/full", 1))):
            script = f"set -o pipefail; {kfuse} {words.replace('%s', str(number))}{to}"
            done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0 and len(done.stderr.splitlines()) == lines, done.stderr
            if words != "--help":
                summary = json.loads((tmp_path / str(number) / "summary.json").read_text())
                assert summary["exit_reason"] == "steps" and summary["steps"] == 3
