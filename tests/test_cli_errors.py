"""Every mistake on the command line ends in one clear line with exit status 2, and nothing is written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    ("workers.max=0", ["workers.max=0: must be a whole number, 1 to"]),
    ("batch.micro=64", ["batch.micro=64", "batch.size=32"]),
    ("policy=seesaw lr.decay=cosine", ["lr.decay=cosine", "SeesawPolicy"]),
    ("lr.decay=cosine lr.warmup_steps=9 train.steps=9", ["lr.warmup_steps=9"]),
    ("checkpoint.resume=folder", ["checkpoint.resume=folder"]),
    ("observe.sinks=[csv,wandb]", ["observe.sinks: wandb is not installed: pip install 'kfuse[wandb]'"]),
    ("observe.sinks=csv", ["observe.sinks=csv: must be a list, [...], of tensorboard, csv, prometheus"]),
    # Arguments of classes.
    ("model.hidden=[a]", ["model.hidden=['a']", "a list, each a whole number"]),
    ("optimizer=sgd optimizer.momentum=nan", ["optimizer.momentum=nan", "finite"]),
    ("policy=compose policy@policy.first=gns policy@policy.second=none policy.first.every=0", ["policy.first.every=0"]),
    (
        "model=gpt data=digits",
        ["GPT needs vocab_size, block_size, and these data tell input_shape", "with model=gpt"],
    ),
    ("data=text data.path=nope.txt", ["nope.txt", "No such file"]),
    ("data=cifar10", ["data.path", "a value is needed"]),
    ("model._target_=mistaken.Nett", ["model._target_=mistaken.Nett", "no attribute 'Nett'"]),
    ("model._target_=broken.Net", ["model._target_=broken.Net", "SyntaxError"]),
    ("model._target_=mistaken.Frozen", ["model._target_=mistaken.Frozen", "no parameters"]),
    ("data._target_=mistaken.load", ["mistaken.load", "the disk is gone"]),
    ("policy._target_=builtins.dict", ["policy._target_=builtins.dict", "BasePolicy"]),
    ("optimizer._target_=torch.optim.LBFGS", ["torch.optim.LBFGS", "steps once"]),
    ("comm.schedule=torch.nn.Lineer", ["comm.schedule=torch.nn.Lineer", "no attribute"]),
    ("comm.schedule=torch.nn.Linear", ["comm.schedule=torch.nn.Linear", "Transport; it has no plan"]),
    ("launcher._target_=builtins.dict", ["launcher._target_=builtins.dict", "Launcher; it has no open"]),
    # Unknown keys, options and flags.
    ("batch.sise=8", ["batch.sise", "did you mean batch.size?"]),
    ("policy.epochs=2", ["policy.epochs: no such key", "++policy.epochs=VALUE"]),
    ("size=8", ["size", "did you mean batch.size?"]),
    ("+lr_base=1", ["lr_base", "did you mean lr.base?"]),
    ("model=gpr", ["model=gpr", "convnet, gpt, hf, mlp", "did you mean gpt?"]),
    ("~seed", ["seed", "needed"]),
    ("--config-dir=absent", ["--config-dir absent: no such directory"]),
    ("--epochs 5", ["--epochs", "did you mean train.epochs?"]),
    ("batch_size=64", ["batch_size", "did you mean batch.size?"]),
    ("--lr=1", ["--lr=1", "lr.base?"]),
    ("statistics.curvature_every=9 optimizer=lamb", ["statistics.curvature_every=9: must be null", "FusedLAMB"]),
    ("batch.size=8,16", ["batch.size=8,16", "-m"]),
    ("comm.sync=pair:8,2", ["comm.sync=pair:8,2: must be one of ssgd, sma, pair, local:N, pair:N,M with N at most M"]),
    # Sweeps: no run starts where one of them is wrong.
    ("-m batch.size=8,abc", ["batch.size=abc", "a whole number"]),
]


def assert_one_line(found: tuple[int, str, str], *said: str) -> None:
    status, out, err = found
    assert (status, out) == (2, "")
    assert err.startswith("kfuse: error: ") and err.endswith("\n") and err.count("\n") == 1
    assert [words for words in said if words not in err] == [], err


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[words for words, _ in WRONG])
def test_mistake_is_one_line(words: str, said: list[str], workplace: Path, command: Any) -> None:
    (workplace / "mistaken.py").write_text(USER_MODULE)
    (workplace / "broken.py").write_text("def (\n")
    before = sorted(workplace.rglob("*"))
    assert_one_line(command(*shlex.split(words)), *said)
    assert sorted(workplace.rglob("*")) == before


# A directory where the file must be, or a file where the directory must be: root may write anywhere else.
@pytest.mark.full
@pytest.mark.parametrize(
    ("taken", "sweep"), [(".hydra/config.yaml/x", True), (".hydra", False), ("metrics.jsonl/x", False), ("tb", True)]
)
def test_run_directory_that_cannot_be_written_is_one_line(
    taken: str, sweep: bool, workplace: Path, command: Any
) -> None:
    run_dir = workplace / "here" / "0" if sweep else workplace / "here"
    (run_dir / taken).parent.mkdir(parents=True)
    (run_dir / taken).touch()
    words = ["-m", "hydra.sweep.dir=here", "seed=1"] if sweep else ["hydra.run.dir=here"]
    status, _, err = command("checkpoint.resume=auto", "train.steps=1", *words)
    assert_one_line((status, "", err), str(run_dir / taken.removesuffix("/x")), "cannot be written", "hydra.run.dir")


RUN = "model=mlp data=digits train.steps=3 policy=none observe.sinks=[] hydra.run.dir=run"


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("words", "to", "lines", "unbuffered"),
    [
        (RUN, "| true", 0, ""),
        (RUN, "> /dev/full", 1, "1"),
        ("--help", "| true", 0, "1"),
        ("--help", "> /dev/full", 1, ""),
    ],
)
def test_an_output_that_is_closed_or_full_ends_no_run(
    words: str, to: str, lines: int, unbuffered: str, tmp_path: Path
) -> None:
    script = f"set -o pipefail; {shlex.quote(sys.executable)} -m kfuse {words} {to}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == lines, done.stderr
    if words == RUN:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["exit_reason"] == "steps" and summary["steps"] == 3
