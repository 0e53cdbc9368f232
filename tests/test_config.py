"""The configuration accepts what is allowed, groups and `_target_` included, and the command line trains by it."""

from __future__ import annotations

import re
import shlex
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

import kfuse.cli.run
from kfuse.cli.check import prepare, validate
from kfuse.cli.first import FirstWorker
from kfuse.settings import instantiate
from kfuse.settings.tree import AT_SHELL, ConfigError, show
from kfuse.train.build import _optimizer

USER_MODULE = """
import torch
import kfuse.optim

class Net(torch.nn.Module):
    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.head = torch.nn.Linear(width, num_classes)
        # Fails on the meta device, where most models can be built without memory.
        self.scale = float(self.head.weight.detach().sum())

class SlowAdam(torch.optim.Adam):
    def __init__(self, params, lr, slowness=1.0, **rest):
        super().__init__(params, lr / slowness, **rest)

class Keywords(torch.optim.SGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)

class OtherName(torch.optim.SGD):
    def __init__(self, weights, lr, factor=1.0):
        super().__init__(weights, lr * factor)

class NoRate(torch.optim.SGD):
    def __init__(self, params, momentum=0.0):
        super().__init__(params, lr=1.0, momentum=momentum)

class OursDerived(kfuse.FusedSGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
"""


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        cfg = hydra.compose("config", list(overrides))
    prepare(cfg, overrides)
    return cfg


@pytest.fixture
def runs(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[DictConfig, Path]]:
    """The runs that the command line comes to, instead of training; with a user's module and a text in place."""
    (workplace / "users_own.py").write_text(USER_MODULE)
    (workplace / "book.txt").write_text("What is written here is enough for a block or two. " * 40)
    seen: list[tuple[DictConfig, Path]] = []
    monkeypatch.setattr(kfuse.cli.run, "run", lambda cfg, run_dir, first: seen.append((cfg, run_dir)) or 0)
    return seen


Runs = list[tuple[DictConfig, Path]]


# -- what is allowed ---------------------------------------------------------------------------------------------


NEEDED = {
    "data=cifar10": None,  # files, which no test has
    "data=csv": None,
    "data=image_folder": None,
    "data=hf": None,
    "model=hf": None,
    "launcher=torchrun": None,
    "policy=schedule": "policy.phases='[{epoch: 1, batch_size: 64}]'",
    "policy=compose": "policy@policy.first=seesaw policy@policy.second=gns policy.second.factor=2",
    "policy=sync_switch": "policy.step=5",
    "data=text": "model=gpt",
}
VALID = [
    "'policy.phases=0:32 10K:64 1M:128' policy=schedule",
    "policy=seesaw lr.decay=constant",
    "train.epochs=null train.steps=10",
    "lr.decay=wsd lr.warmup_steps=10 lr.decay_fraction=0.2",
    "train.save_model=false model.init=null",
    "batch.size=8 batch.min=8 batch.max=8",
]


@pytest.mark.full
def test_every_option_of_every_group_is_valid() -> None:
    groups = [path for path in files("kfuse.configs").iterdir() if path.is_dir() and not path.name.startswith("_")]
    options = [f"{group.name}={each.name.removesuffix('.yaml')}" for group in groups for each in group.iterdir()]
    assert NEEDED.keys() <= {*options}
    options = [f"{option} {NEEDED.get(option, '')}" for option in options if NEEDED.get(option, "") is not None]
    for overrides in ["", *options, *VALID]:
        validate(compose(*shlex.split(overrides)))


# -- `_target_` --------------------------------------------------------------------------------------------------


def test_plain_values_against_annotations() -> None:
    fitting: list[tuple[Any, Any]] = [
        *((1, hint) for hint in (int, float, int | None, Any)),
        *((None, hint) for hint in (int | None, None)),
        *(([1, 2], hint) for hint in (Sequence[int], tuple[float, float], tuple[int, ...])),
        ({"a": 1}, Mapping[str, int]),
        ("a", Literal["a", "b"]),
        ("anything", Path),
    ]
    unfit: list[tuple[Any, Any]] = [
        *((True, hint) for hint in (int, float)),
        *((1.0, int), ("1", int), (1, bool), (None, int), ("ab", Sequence[str]), ("c", Literal["a", "b"])),
        *(([1, "x"], Sequence[int]), ([1], tuple[float, float]), ([1], dict[str, int])),
    ]
    assert [pair for pair in fitting if not instantiate.fits(*pair)] == []
    assert [pair for pair in unfit if instantiate.fits(*pair)] == []


def test_locate_and_build_look_into_classes_and_arguments() -> None:
    assert instantiate.locate("collections.OrderedDict.fromkeys") == OrderedDict.fromkeys
    inner = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    assert instantiate.build({"_target_": "fractions.Fraction", "numerator": inner, "denominator": 3}) == Fraction(1, 6)


def test_class_of_ones_own_drops_the_arguments_of_the_one_it_replaces(runs: Runs) -> None:
    cfg = compose("model._target_=users_own.Net", "+model.width=3", "model.dropout=0.5")
    assert cfg.model == {"_target_": "users_own.Net", "dropout": 0.5, "width": 3}
    with pytest.raises(ConfigError, match=r"^model\.dropout=0\.5: no such argument; Net has num_classes, width$"):
        validate(cfg)
    validate(compose("model._target_=users_own.Net", "+model.width=3"))


def test_optimizer_of_ones_own_gets_parameters_rate_and_clipping(runs: Runs) -> None:
    for name in ("Keywords", "OtherName", "OursDerived"):
        cfg = compose("optimizer=torch", f"optimizer._target_=users_own.{name}", "lr.base=0.25", "train.clip_norm=0.5")
        validate(cfg)
        model = torch.nn.Linear(2, 2)
        opt = _optimizer(OmegaConf.to_container(cfg, resolve=True), model)  # type: ignore[arg-type]
        (group,) = opt.param_groups
        assert group["lr"] == 0.25 and group["params"] == list(model.parameters())
        assert opt.clip_norm == 0.5 and opt.skip_nonfinite
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=0\.001: no such argument; NoRate has params, momentum$"):
        validate(compose("optimizer=torch", "optimizer._target_=users_own.NoRate"))
    own = ["optimizer._target_=users_own.SlowAdam", "+optimizer.slowness=2.0"]
    validate(compose(*own, "optimizer.eps=0.1"))
    with pytest.raises(ConfigError, match="epsilon"):  # tried as what it derives from
        validate(compose(*own, "optimizer.eps=-1.0"))


# -- the command line ----------------------------------------------------------------------------------------------


def test_run_gets_the_configuration_that_is_on_disk_and_its_directory_is_used_once(runs: Runs, command: Any) -> None:
    assert command("batch.micro=4", "batch.min=${batch.micro}", "hydra.run.dir=here")[0] == 0
    ((cfg, run_dir),) = runs
    assert run_dir == Path.cwd() / "here"
    assert cfg.batch.min == 4
    written = (run_dir / ".hydra" / "config.yaml").read_text()
    assert "${" not in written
    assert OmegaConf.create(written) == cfg
    assert sorted(path.name for path in run_dir.iterdir()) == [".hydra", ".lock"]
    status, _, err = command("hydra.run.dir=here", "seed=1", "checkpoint.resume=never")
    assert status == 2 and "holds a run already" in err
    assert (run_dir / ".hydra" / "config.yaml").read_text() == written
    assert len(runs) == 1


def test_options_of_ones_own_are_found_in_a_directory(workplace: Path, runs: Runs, command: Any) -> None:
    (workplace / "options" / "model").mkdir(parents=True)
    (workplace / "options" / "model" / "mine.yaml").write_text("_target_: users_own.Net\nwidth: 7\n")
    (workplace / "options" / "whole.yaml").write_text("defaults: [config, _self_]\nseed: 5\n")
    assert command("--config-dir=options", "--config-name=whole", "model=mine", "hydra.run.dir=run")[0] == 0
    assert command("--config-dir=options", "-m", "model=glob([mi*,ml*],exclude=*x)", "hydra.sweep.dir=sweep")[0] == 0
    assert runs[0][0].model == runs[1][0].model == {"_target_": "users_own.Net", "width": 7}
    assert [cfg.seed for cfg, _ in runs] == [5, 0, 0]


def test_a_model_that_needs_other_data_chooses_them(runs: Runs, command: Any) -> None:
    for words in (["model=gpt"], ["model=gpt", "data=text"], ["model=convnet"]):
        assert command(*words, f"hydra.run.dir=run{len(runs)}")[0] == 0
    assert [cfg.data._target_.rpartition(".")[2] for cfg, _ in runs] == ["load_text", "load_text", "load_digits"]


def test_sweep_runs_each_job_in_its_own_directory_and_flags_may_stand_between_overrides(
    runs: Runs, command: Any
) -> None:
    assert command("policy=none,gns", "-m", "seed=1,2", "hydra.sweep.dir=sweep")[0] == 0
    found = [(cfg.policy._target_.split(".")[-1], cfg.seed) for cfg, _ in runs]
    assert found == [("NoPolicy", 1), ("NoPolicy", 2), ("GNSPolicy", 1), ("GNSPolicy", 2)]
    assert [run_dir for _, run_dir in runs] == [Path.cwd() / "sweep" / str(job) for job in range(4)]


@pytest.mark.full
def test_sweep_says_what_each_job_is_and_goes_on_after_a_failure(
    workplace: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cfg: DictConfig, run_dir: Path, first: FirstWorker) -> int:
        if cfg.seed == 1:
            raise RuntimeError("a mistake of ours")
        return 0

    monkeypatch.setattr(kfuse.cli.run, "run", run)
    status, out, err = command("-m", "seed=1,2", "batch.size=16", "hydra.sweep.dir=sweep")
    assert status == 1
    assert err.startswith("Traceback") and "RuntimeError: a mistake of ours\n" in err
    told = [f"job {k} ({k + 1} of 2): seed={k + 1} batch.size=16" for k in range(2)]
    assert re.findall(r"^job .*$", out, re.MULTILINE) == told


@pytest.mark.full
def test_interrupt_ends_the_whole_sweep(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def run(cfg: DictConfig, run_dir: Path, first: FirstWorker) -> int:
        seeds.append(cfg.seed)
        return 130 if cfg.seed == 2 else 0

    monkeypatch.setattr(kfuse.cli.run, "run", run)
    status, out, _ = command("-m", "seed=1,2,3,4", "hydra.sweep.dir=sweep")
    assert (status, seeds) == (130, [1, 2])
    assert "not run: 2 of 4 jobs" in out


@pytest.mark.full
def test_every_example_of_the_help_runs(
    workplace: Path, runs: Runs, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "my.py").write_text(USER_MODULE)
    with pytest.raises(SystemExit, match="0"):
        command("--help")
    out = capsys.readouterr().out
    chosen = compose()
    first = {key: value for key, value in re.findall(r"^  ([\w.]+)=(\S+)  +", out, re.MULTILINE) if key in AT_SHELL}
    assert len(first) == 6 and first == {key: show(OmegaConf.select(chosen, key)) for key in first}
    status, every, _ = command("--help-all")
    assert status == 0
    assert all(re.search(rf"^  {re.escape(key)}=\S+  +\S", every, re.MULTILINE) for key in AT_SHELL)
    examples = re.findall(r"^  kfuse(?: (\S+(?: \S+)*))?  +\S", out, re.MULTILINE)
    assert len(examples) == 6
    for number, example in enumerate(examples):
        where = "hydra.sweep.dir" if example.startswith("-m") else "hydra.run.dir"
        status, _, err = command(*example.split(), f"{where}=run{number}")
        assert status == 0, err
    assert len(runs) == 11  # five, and a sweep of six


def test_home_directory_is_found_where_a_path_is_taken(
    workplace: Path, runs: Runs, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(workplace))
    words = "-m model=gpt data=text data.path=~/book.txt,'~/./book.txt' hydra.sweep.dir=~/sweep"
    assert command(*words.split())[0] == 0
    assert [run_dir for _, run_dir in runs] == [workplace / name for name in ("sweep/0", "sweep/1")]
    assert [cfg.data.path for cfg, _ in runs] == [f"{workplace}/book.txt", f"{workplace}/./book.txt"]
