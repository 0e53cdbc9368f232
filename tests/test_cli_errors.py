"""Every mistake on the command line ends in one clear line with exit status 2, and nothing is written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kfuse.cli.app import main

USER_MODULE = """
import torch
import kfuse.data

value = 3

class Net(torch.nn.Module):
    def __init__(self, num_classes: int, width: int = 64):
        super().__init__()
        self.head = torch.nn.Linear(width, num_classes)

class Frozen(torch.nn.Module):
    pass

def load_triple():
    return kfuse.data.DataSplit((torch.zeros(4),) * 3, (torch.zeros(4),) * 2, {})

def load_uneven():
    return kfuse.data.DataSplit((torch.zeros(4), torch.zeros(5)), (torch.zeros(4),) * 2, {})

def load():
    raise RuntimeError("the disk\\nis gone")
"""

# The command line, and what its error must say.
WRONG = [
    # Types.
    ("batch.size=abc", ["batch.size=abc", "a whole number, at least 1"]),
    ("batch.size=3.5", ["batch.size=3.5", "a whole number, at least 1"]),
    ("batch.size=null", ["batch.size=null", "a whole number, at least 1"]),
    ("comm.reproducible=maybe", ["comm.reproducible=maybe", "true or false"]),
    ("batch=3", ["batch=3", "batch.size, batch.micro, batch.micro_max, batch.min, batch.max"]),
    ("data.heldout=x", ["data.heldout=x", "a number"]),
    ("model.hidden=64", ["model.hidden=64", "a list, each a whole number"]),
    ("model.hidden=[a]", ["model.hidden=['a']", "a list, each a whole number"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas=[0.9]", "a list of 2"]),
    ("policy.every=x", ["policy.every=x", "a whole number"]),
    # Bounds and choices.
    ("batch.size=0", ["batch.size=0", "at least 1"]),
    ("lr.base=nan", ["lr.base=nan", "above 0"]),
    ("lr.base=inf", ["lr.base=inf", "above 0"]),
    ("lr.base=0", ["lr.base=0.0", "above 0"]),
    ("seed=-1", ["seed=-1", "0 to 4294967295"]),
    ("train.target_accuracy=2", ["train.target_accuracy=2.0", "above 0, at most 1, or null"]),
    ("lr.scaling=cubic", ["lr.scaling=cubic", "none, linear, sqrt, adascale"]),
    ("lr.change_warmup_steps=-1", ["lr.change_warmup_steps=-1", "a whole number, at least 0"]),
    ("train.precision=fp16", ["train.precision=fp16", "fp32, bf16"]),
    ("comm.schedule=ring", ["comm.schedule=ring", "auto, allreduce, reduce_scatter, all_to_all, tree"]),
    ("policy.every=0", ["policy.every=0", "a whole number, at least 1"]),
    ("data.heldout=1.5", ["data.heldout=1.5", "below 1"]),
    ("model.dropout=2", ["model.dropout=2", "below 1"]),
    ("model.hidden=[-3]", ["model.hidden=[-3]", "must be at least 1"]),
    ("optimizer.betas=[0.9,1.5]", ["betas=[0.9, 1.5]", "1.5"]),
    ("optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true", ["optimizer.momentum=0", "Nesterov"]),
    ("optimizer=lamb optimizer.eps=-1", ["optimizer.eps=-1", "must be 0 or more"]),
    # Numbers that are none, and sizes of nothing.
    ("optimizer.eps=inf", ["optimizer.eps=inf", "finite"]),
    ("optimizer.betas=[nan,0.9]", ["optimizer.betas=[nan, 0.9]", "finite"]),
    ("optimizer=sgd optimizer.momentum=nan", ["optimizer.momentum=nan", "finite"]),
    ("model.dropout=nan", ["model.dropout=nan", "finite"]),
    ("model.dropout=-0.5", ["model.dropout=-0.5", "below 1"]),
    ("model.hidden=[0]", ["model.hidden=[0]", "must be at least 1"]),
    ("model=convnet model.width=0", ["model.width=0", "at least 1"]),
    ("model=gpt data=text model.layers=-1", ["model.layers=-1", "at least 1"]),
    ("policy=schedule 'policy.phases=[{epoch: 1, lr_scale: true}]'", ["phases[0].lr_scale=True", "above 0"]),
    ("policy=schedule 'policy.phases=0:8 1G:16'", ["policy.phases=0:8 1G:16", "1G:16 must be SAMPLES:BATCH_SIZE"]),
    (
        "policy=compose policy@policy.first=gns policy@policy.second=none policy.first.every=0",
        ["policy.first.every=0:"],
    ),
    ("workers.threads=99999999999999999999", ["workers.threads=99999999999999999999", "1 to 4096"]),
    ("comm.timeout_s=1e300", ["comm.timeout_s=1e+300", "above 0, at most 1000000"]),
    # A sweep over nothing, directories without a name, checkpoints that are none.
    ("-m 'seed=range(0)'", ["a sweep over nothing"]),
    ("hydra.run.dir=", ["hydra.run.dir=", "must be a directory"]),
    ("checkpoint.resume=", ["checkpoint.resume=", "no such path"]),
    ("checkpoint.resume=folder", ["checkpoint.resume=folder", "no checkpoint there"]),
    ("checkpoint.resume=empty.txt", ["checkpoint.resume=empty.txt", "no checkpoint there"]),
    ("hydra.searchpath=[file:///nope]", ["path=/nope is not available"]),
    # What no key can tell alone.
    ("batch.micro=64", ["batch.micro=64", "batch.size=32"]),
    ("checkpoint.resume=nowhere", ["checkpoint.resume=nowhere", "no such path"]),
    ("batch.min=600", ["batch.min=600", "batch.max=256"]),
    ("batch.size=1024", ["batch.size=1024", "batch.min=8 to batch.max=256"]),
    ("workers.count=3", ["workers.count=3", "workers.min=1 to workers.max=2"]),
    ("workers.min=3 workers.count=3", ["workers.min=3", "workers.max=2"]),
    ("train.epochs=null", ["train.epochs=null", "train.steps=null"]),
    ("comm.tree=oak", ["comm.tree=oak", "binary, star, host"]),
    ("comm.sync=often", ["comm.sync=often", "must be one of ssgd, local:N, sma, pair"]),
    ("comm.sync=8", ["comm.sync=8", "local:8 averages every 8 steps"]),
    ("comm.sync=local:0", ["comm.sync=local:0", "1 to 1048576"]),
    ("comm.outer_lr=0", ["comm.outer_lr=0", "above 0"]),
    ("comm.outer_momentum=1", ["comm.outer_momentum=1", "at least 0 and below 1"]),
    ("comm.sma_alpha=2", ["comm.sma_alpha=2", "at most 1"]),
    ("comm=reproducible comm.sync=local:4", ["comm.sync=local:4", "must be ssgd"]),
    ("comm._target_=nothing.Here", ["comm._target_=nothing.Here", "no module nothing"]),
    ("comm._target_=torch.nn.Linear", ["comm._target_=torch.nn.Linear", "plan, launch, wait"]),
    ("comm.reproducible=true comm.dtype=bf16", ["comm.dtype=bf16", "fp32"]),
    ("comm=reproducible comm.schedule=allreduce", ["comm.schedule=allreduce", "all_to_all"]),
    ("comm.schedule=symmetric comm.dtype=bf16", ["comm.dtype=bf16: must be fp32 with comm.schedule=symmetric"]),
    ("comm.schedule=symmetric", ["comm.schedule=symmetric: must be used with GPUs"]),
    ("comm.nccl_min_ctas=4 comm.nccl_max_ctas=2", ["comm.nccl_max_ctas=2", "at least comm.nccl_min_ctas=4"]),
    ("comm.nccl_cta_policy=most", ["comm.nccl_cta_policy=most", "default, efficiency, zero"]),
    ("lr.decay=cosine lr.warmup_steps=9 train.steps=9", ["lr.warmup_steps=9", "9 steps"]),
    ("lr.decay=wsd lr.warmup_steps=9 train.steps=9", ["lr.warmup_steps=9", "at most 0.9 of the run's 9 steps"]),
    ("lr.decay=wsd lr.decay_fraction=2", ["lr.decay_fraction=2", "above 0, at most 1"]),
    ("policy=seesaw lr.decay=cosine", ["lr.decay=cosine: must be one of none, constant with", "SeesawPolicy"]),
    ("policy=seesaw lr.scaling=none", ["lr.scaling=none: must be one of sqrt, linear with", "SeesawPolicy"]),
    ("policy=critical_batch lr.scaling=none", ["lr.scaling=none: must be one of sqrt, linear, adascale with"]),
    (
        "policy=compose policy@policy.first=gns policy@policy.second=seesaw lr.decay=wsd",
        ["lr.decay=wsd: must be one of none, constant with", "ComposePolicy"],
    ),
    ("lr.decay=steps", ["lr.decay=steps", "none, cosine, linear, wsd, constant"]),
    ("model.init=nothing.pt", ["model.init=nothing.pt", "no such file"]),
    ("model=gpt data=text model.heads=3", ["model.width=128", "heads=3"]),
    (
        "model=gpt data=digits",
        ["model:", "vocab_size, block_size", "num_classes", "it fits data=text; these data fit model=mlp|convnet\n"],
    ),
    (
        "data=text",
        ["model:", "input_shape, num_classes", "it fits data=digits|cifar10|image_folder; these data fit model=gpt\n"],
    ),
    ("data=text model=convnet", ["model: ConvNet needs input_shape, num_classes", "these data fit model=gpt\n"]),
    # Unknown keys, groups and options.
    ("batch.sise=8", ["batch.sise", "did you mean batch.size?", "micro"]),
    ("size=8", ["size", "did you mean batch.size?"]),
    ("+batch.sise=8", ["batch.sise", "did you mean batch.size?"]),
    ("+lr_base=1", ["lr_base", "did you mean lr.base?"]),
    ("modle=mlp", ["modle", "did you mean model?"]),
    ("model.hidn=3", ["model.hidn", "did you mean model.hidden?"]),
    ("+model.hidn=3", ["model.hidn=3", "hidden"]),
    ("model=gpr", ["model=gpr", "convnet, gpt, mlp", "did you mean gpt?"]),
    ("data=digit", ["data=digit", "cifar10, digits, image_folder, text"]),
    ("launcher=cloud", ["launcher=cloud", "local"]),
    ("launcher=torchrun", ["launcher=torchrun", "torchrun --nproc-per-node N -m kfuse"]),
    ("~seed", ["seed", "needed"]),
    ("~batch", ["batch", "needed"]),
    ("+batch.size=8", ["batch.size", "already", "remove + prefix"]),
    ("+model=gpt", ["model=OPTION", "without a plus"]),
    ("model=null", ["model=null"]),
    ("hydra.run.dri=x", ["hydra.run.dri", "did you mean hydra.run.dir?"]),
    ("optimizer=torch +optimizer.momentun=1", ["optimizer.momentun=1", "momentum"]),
    ("+optimizer.lr=1", ["optimizer.lr=1", "lr.base"]),
    ("seed='${batch.bucket}'", ["seed", "batch.bucket"]),
    # Flags in place of keys.
    ("--epochs 5", ["--epochs", "did you mean train.epochs=5?"]),
    ("--lr 0.1", ["--lr", "did you mean lr.base=0.1?"]),
    ("--batch-size=32", ["--batch-size=32", "did you mean batch.size=32?"]),
    ("--train.steps=3", ["--train.steps=3", "did you mean train.steps=3?"]),
    ("--model gpt data=text", ["--model", "did you mean model=gpt?"]),
    ("--seed -1", ["--seed", "did you mean seed=...?"]),
    ("--min 3", ["--min: no such flag; must be key=value, without dashes\n"]),
    ("--re", ["--re: no such flag"]),
    ("--epochs 3 --lr=.1 seed=1 -b 64", ["--epochs:", "did you mean train.epochs=3 lr.base=.1 batch.size=64?"]),
    ("--bf16", ["--bf16", "did you mean train.precision=bf16?"]),
    ("--no-progress --deterministic", ["did you mean observe.progress=false comm.reproducible=true?"]),
    ("--scheduler cosine", ["did you mean lr.decay=cosine?"]),
    ("--log-interval 10", ["did you mean observe.every=10?"]),
    ("--out runs/a", ["did you mean hydra.run.dir=runs/a?"]),
    ("--num-workers 4", ["did you mean data.workers=4?"]),
    ("--workers 2", ["did you mean workers.count=2?"]),
    ("--device cuda", ["--device: no such flag; must be key=value, without dashes\n"]),
    ("--weight-decay 0.1", ["did you mean optimizer.weight_decay=0.1?"]),
    ("--momentum 0.9", ["did you mean optimizer=sgd optimizer.momentum=0.9?"]),
    ("--data-path book.txt", ["did you mean data=text data.path=book.txt?"]),
    ("-help", ["-help: no such flag", "did you mean kfuse --help?"]),
    ("help", ["help: must be key=value", "did you mean kfuse --help?"]),
    ("-V", ["did you mean kfuse --version?"]),
    ("epochs 3", ["epochs: must be key=value", "did you mean train.epochs=...?"]),
    ("learning_rate=0.1", ["learning_rate: no such key (did you mean lr.base?)"]),
    ("batch_size=64", ["batch_size: no such key (did you mean batch.size?)"]),
    ("lr=0.1", ["lr=0.1: lr is a section", "did you mean lr.base=0.1?"]),
    ("model=GPT", ["did you mean gpt?"]),
    # Data that is missing or unfit.
    ("data=text data.path=nope.txt", ["data.path=nope.txt", "does not exist"]),
    ("data=text data.path=empty.txt", ["data.path=empty.txt", "is empty"]),
    ("data=text 'data.path=\"~/nope.txt\"'", ["data.path=/", "/nope.txt: /", "nope.txt does not exist"]),
    ("data._target_=mistaken.load_triple", ["data._target_=mistaken.load_triple: train", "a pair (x, y) has two"]),
    ("data._target_=mistaken.load_uneven", ["data._target_=mistaken.load_uneven: train", "same first dimension"]),
    ("data=text data.path=short.txt", ["data.path=short.txt", "too short"]),
    ("data=text data.path=binary.txt", ["data.path=binary.txt", "not UTF-8"]),
    ("data=text data.path=folder", ["data.path=folder", "is a folder"]),
    ("data=cifar10", ["data.path", "a value is needed"]),
    ("data=cifar10 data.path=folder", ["data.path=folder", "data_batch_1"]),
    ("data=image_folder data.path=nope", ["data.path=nope", "not a folder"]),
    # Classes of the user's own.
    ("model._target_=nosuch.Net", ["model._target_=nosuch.Net", "no module nosuch"]),
    ("model._target_=mistaken.Nett", ["model._target_=mistaken.Nett", "did you mean Net?"]),
    ("model._target_=mistaken.value", ["model._target_=mistaken.value", "a class or function"]),
    ("model._target_=broken.Net", ["model._target_=broken.Net", "SyntaxError"]),
    ("model._target_=lacking.Net", ["model._target_=lacking.Net", "nosuchpackage"]),
    ("model._target_=Net", ["model._target_=Net", "package.module.Class"]),
    ("model._target_=null", ["model._target_", "dotted path"]),
    ("model._target_=mistaken.Net +model.witdh=3", ["model.witdh=3", "width"]),
    ("model._target_=builtins.dict", ["model._target_=builtins.dict", "torch.nn.Module"]),
    ("model._target_=mistaken.Frozen", ["model._target_=mistaken.Frozen", "no parameters"]),
    ("data._target_=mistaken.load", ["mistaken.load", "the disk is gone"]),
    ("data._target_=builtins.dict", ["data._target_=builtins.dict", "DataSplit"]),
    ("policy._target_=builtins.dict", ["policy._target_=builtins.dict", "BasePolicy"]),
    (
        "policy=compose policy@policy.first=gns policy@policy.second=none policy.second._target_=builtins.dict",
        ["policy.second={}: must be a kf.BasePolicy"],
    ),
    (
        "policy=compose policy@policy.first=gns policy@policy.second=none policy.second._target_=nosuch.Mine",
        ["policy.second._target_=nosuch.Mine", "no module nosuch"],
    ),
    ("policy=compose policy@policy.first=gns", ["policy@policy.second", "seesaw"]),
    ("policy=compose policy@policy.first=gsn policy@policy.second=none", ["policy=gsn", "did you mean gns?"]),
    ("optimizer._target_=builtins.dict", ["optimizer._target_=builtins.dict", "torch.optim.Optimizer"]),
    ("optimizer._target_=torch.optim.LBFGS", ["torch.optim.LBFGS", "several times a step"]),
    ("optimizer._target_=torch.optim.SparseAdam", ["torch.optim.SparseAdam", "sparse gradients only"]),
    ("+launcher.nodes=3", ["launcher.nodes=3", "no argument"]),
    # The command line itself.
    ("batch.size", ["batch.size", "key=value"]),
    ("'batch.size=['", ["batch.size=[", "key=value"]),
    ("batch.size=8,16", ["batch.size=8,16", "-m"]),
    ("--foo", ["--foo"]),
    ("--experimental-rerun x", ["--experimental-rerun: not supported"]),
    ("--cfg everything", ["--cfg", "everything", "job"]),
    ("--config-dir nosuch", ["--config-dir=nosuch"]),
    # Sweeps: no run starts where one of them is wrong.
    ("-m batch.size=8,abc", ["batch.size=abc", "a whole number, at least 1"]),
    ("-m batch.size=8,9000", ["batch.size=9000", "batch.max=256"]),
    ("-m model=mlp,gpr", ["model=gpr", "did you mean gpt?"]),
    ("-m 'batch.size=8,'", ["batch.size=8,", "key=value"]),
    ("-m 'seed=choice('", ["seed=choice(", "key=value"]),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to give commands in, with files that are no use."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("hi")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 500)
    (tmp_path / "folder").mkdir()
    (tmp_path / "mistaken.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "lacking.py").write_text("import nosuchpackage\n")
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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("batch.size=0", "batch.size=0"),
        ("data=text data.path=empty.txt", "empty.txt is empty"),
        ("-m seed=1,x", "seed=x"),
    ],
)
@pytest.mark.full
def test_mistake_is_one_line_from_a_shell(command: str, said: str, workplace: Path) -> None:
    before = sorted(workplace.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", "kfuse", *command.split()], cwd=workplace, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kfuse: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert sorted(workplace.rglob("*")) == before
