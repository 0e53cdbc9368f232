"""The configuration accepts what is allowed, groups and `_target_` included, and the command line trains by it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

import kfuse.cli.run
from kfuse.cli import kfuse_run
from kfuse.cli.app import main
from kfuse.cli.check import prepare, validate
from kfuse.settings import instantiate
from kfuse.settings.tree import AT_SHELL, ConfigError
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

class Anything(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

class OtherName(torch.optim.SGD):
    def __init__(self, weights, lr, factor=1.0):
        super().__init__(weights, lr * factor)

class NoRate(torch.optim.SGD):
    def __init__(self, params, momentum=0.0):
        super().__init__(params, lr=1.0, momentum=momentum)

class OursDerived(kfuse.optim.FusedSGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
"""


PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def compose(*overrides: str) -> DictConfig:
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        cfg = hydra.compose("config", list(overrides))
    prepare(cfg, overrides)
    return cfg


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    (tmp_path / "users_own.py").write_text(USER_MODULE)
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[DictConfig, Path]]]:
    """The runs that the command line comes to, instead of training."""
    seen: list[tuple[DictConfig, Path]] = []

    def run(cfg: DictConfig, run_dir: Path) -> int:
        seen.append((cfg, run_dir))
        return 0

    monkeypatch.setattr(kfuse.cli.run, "run", run)
    yield seen


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kfuse", *arguments])
    return main()


# -- what is allowed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer=torch"],
        ["policy=none"],
        ["policy=schedule", "policy.phases=[{epoch: 1, batch_size: 64}]"],
        ["policy=schedule", "policy.phases=0:32 10K:64 1M:128"],
        ["policy=critical_batch", "policy.factor=0.5"],
        ["policy=seesaw", "lr.decay=constant"],
        ["policy=compose", "policy@policy.first=seesaw", "policy@policy.second=gns", "policy.second.factor=2"],
        ["comm=reproducible"],
        ["model=convnet"],
        ["model=gpt"],
        ["train.epochs=null", "train.steps=10"],
        ["lr.decay=cosine", "lr.warmup_steps=10"],
        ["lr.decay=wsd", "lr.warmup_steps=10", "lr.decay_fraction=0.2"],
        ["lr.decay=constant"],
        ["train.save_model=false", "model.init=null"],
        ["batch.size=8", "batch.min=8", "batch.max=8"],
    ],
    ids=" ".join,
)
def test_every_option_of_every_group_is_valid(overrides: list[str]) -> None:
    validate(compose(*overrides))


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


def test_locate_finds_what_is_inside_a_class() -> None:
    assert instantiate.locate("collections.OrderedDict.fromkeys") == __import__("collections").OrderedDict.fromkeys


def test_build_makes_an_argument_that_is_a_node() -> None:
    inner = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    node = {"_target_": "fractions.Fraction", "numerator": inner, "denominator": 3}
    assert instantiate.build(node) == __import__("fractions").Fraction(1, 6)


def test_class_of_ones_own_drops_the_arguments_of_the_one_it_replaces(workplace: Path) -> None:
    cfg = compose("model._target_=users_own.Net", "+model.width=3", "model.dropout=0.5")
    assert cfg.model == {"_target_": "users_own.Net", "dropout": 0.5, "width": 3}
    with pytest.raises(ConfigError, match=r"^model\.dropout=0\.5: Net has no argument dropout"):
        validate(cfg)
    validate(compose("model._target_=users_own.Net", "+model.width=3"))


def test_optimizer_of_ones_own_is_tried_as_what_it_derives_from(workplace: Path) -> None:
    own = ["optimizer._target_=users_own.SlowAdam", "+optimizer.slowness=2.0"]
    validate(compose(*own, "optimizer.eps=0.1"))
    with pytest.raises(ConfigError, match="epsilon"):
        validate(compose(*own, "optimizer.eps=-1.0"))


def test_optimizer_of_ones_own_gets_parameters_rate_and_clipping(workplace: Path) -> None:
    for name in ("Keywords", "Anything", "OtherName", "OursDerived"):
        cfg = compose("optimizer=torch", f"optimizer._target_=users_own.{name}", "lr.base=0.25", "train.clip_norm=0.5")
        validate(cfg)
        model = torch.nn.Linear(2, 2)
        opt = _optimizer(OmegaConf.to_container(cfg, resolve=True), model)  # type: ignore[arg-type]
        (group,) = opt.param_groups
        assert group["lr"] == 0.25 and group["params"] == list(model.parameters())
        assert opt.clip_norm == 0.5 and opt.skip_nonfinite
    with pytest.raises(ConfigError, match=r"^optimizer: NoRate must take an argument lr; it has momentum"):
        validate(compose("optimizer=torch", "optimizer._target_=users_own.NoRate"))


# -- the command line ----------------------------------------------------------------------------------------------


def test_run_gets_the_configuration_that_is_on_disk(
    workplace: Path, runs: list[tuple[DictConfig, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, "batch.micro=4", "batch.min=${batch.micro}", "hydra.run.dir=here") == 0
    ((cfg, run_dir),) = runs
    assert run_dir == workplace / "here"
    assert cfg.batch.min == 4
    written = (run_dir / ".hydra" / "config.yaml").read_text()
    assert "${" not in written
    assert OmegaConf.create(written) == cfg
    assert [path.name for path in run_dir.iterdir()] == [".hydra"]


@pytest.mark.full
def test_home_directory_is_found_wherever_a_path_is_taken(
    workplace: Path,
    runs: list[tuple[DictConfig, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = workplace / "home"
    (home / "options" / "model").mkdir(parents=True)
    (home / "options" / "model" / "mine.yaml").write_text("_target_: users_own.Net\nwidth: 7\n")
    (home / "book.txt").write_text("What is written here is enough for a block or two. " * 40)
    (home / "train.py").touch()
    (home / "options" / "manifest.json").touch()  # so that it looks like a checkpoint
    monkeypatch.setenv("HOME", str(home))
    text = ["model=gpt", "data=text"]
    for number, arguments in enumerate(
        [
            ["--config-dir", "~/options", "model=mine"],
            [*text, "data.path='~/book.txt'"],
            ["checkpoint.resume=~/options"],
        ]
    ):
        assert command(monkeypatch, *arguments, f"hydra.run.dir='~/run{number}'") == 0, capsys.readouterr().err
    assert command(monkeypatch, "-m", *text, "data.path=~/book.txt,~/../home/book.txt", "hydra.sweep.dir=~/sweep") == 0
    made = [f"run{number}" for number in range(3)] + ["sweep/0", "sweep/1"]
    assert [run_dir for _, run_dir in runs] == [home / name for name in made]
    assert runs[0][0].model == {"_target_": "users_own.Net", "width": 7}
    assert {cfg.data.path for cfg, _ in runs if "path" in cfg.data} == {f"{home}/book.txt", f"{home}/../home/book.txt"}
    assert {cfg.checkpoint.resume for cfg, _ in runs} == {"never", f"{home}/options"}
    args = kfuse_run._parse(["--run-dir", "~/run", "--token-file=~/token", "~/train.py"])
    assert (args.run_dir, args.token_file, args.script) == (home / "run", home / "token", home / "train.py")


def test_a_model_that_needs_other_data_chooses_them(
    workplace: Path, runs: list[tuple[DictConfig, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["model=gpt"], ["model=gpt", "data=text"], ["model=convnet"]):
        assert command(monkeypatch, *arguments, f"hydra.run.dir=run{len(runs)}") == 0
    assert [cfg.data._target_.rpartition(".")[2] for cfg, _ in runs] == ["load_text", "load_text", "load_digits"]


def test_run_directory_is_used_once(
    workplace: Path,
    runs: list[tuple[DictConfig, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "hydra.run.dir=here") == 0
    first = (workplace / "here" / ".hydra" / "config.yaml").read_text()
    assert command(monkeypatch, "hydra.run.dir=here", "seed=1") == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (workplace / "here" / ".hydra" / "config.yaml").read_text() == first
    assert len(runs) == 1


def test_sweep_runs_each_job_in_its_own_directory_and_flags_may_stand_between_overrides(
    workplace: Path, runs: list[tuple[DictConfig, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, "policy=none,gns", "-m", "seed=1,2", "hydra.sweep.dir=sweep") == 0
    found = [(cfg.policy._target_.split(".")[-1], cfg.seed) for cfg, _ in runs]
    assert found == [("NoPolicy", 1), ("NoPolicy", 2), ("GNSPolicy", 1), ("GNSPolicy", 2)]
    assert [run_dir for _, run_dir in runs] == [workplace / "sweep" / str(job) for job in range(4)]


@pytest.mark.full
def test_sweep_says_what_each_job_is_and_ends_with_a_table(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(cfg: DictConfig, run_dir: Path) -> int:
        if cfg.seed == 1:
            raise RuntimeError("a mistake of ours")
        summary = {"steps": 10 * cfg.seed, "loss": 0.25, "eval_accuracy": 0.5, "eval_loss": None, "wall_s": 75.0}
        (run_dir / "summary.json").write_text(json.dumps({**summary, "exit_reason": "steps"}))
        return 0

    monkeypatch.setattr(kfuse.cli.run, "run", run)
    # Another run's directory, and its results: this sweep's job is refused, and they are not its own.
    (workplace / "sweep" / "2" / ".hydra").mkdir(parents=True)
    (workplace / "sweep" / "2" / ".hydra" / "config.yaml").touch()
    (workplace / "sweep" / "2" / "summary.json").write_text('{"steps": 77}')
    assert command(monkeypatch, "-m", "seed=1,2,3", "batch.size=16", "hydra.sweep.dir=sweep") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback") and "RuntimeError: a mistake of ours\n" in captured.err
    out = captured.out.splitlines()
    assert [line for line in out if line.startswith("job ")] == [
        f"job {k} ({k + 1} of 3): seed={k + 1}" for k in range(3)
    ]
    where = workplace / "sweep"
    refused = f"hydra.run.dir={where / '2'}: holds a run already; use a new one, or checkpoint.resume=auto"
    names = ["job", "seed", "steps", "loss", "eval_accuracy", "wall_s", "exit_reason", "status", "run_dir", "error"]
    cells = [
        ["0", "1", "-", "-", "-", "-", "-", "1", f"{where}/0", "RuntimeError: a mistake of ours"],
        ["1", "2", "20", "0.25", "0.5", "75", "steps", "0", f"{where}/1", "-"],
        ["2", "3", "-", "-", "-", "-", "-", "2", f"{where}/2", refused],
    ]
    assert [re.split(r"  +", line.strip()) for line in out[-4:]] == [names, *cells]
    with (where / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [[row[name] for name in names] for row in rows] == [
        [cell.replace("75", "75.0") if cell != "-" else "" for cell in line] for line in cells
    ]


@pytest.mark.full
def test_interrupt_ends_the_whole_sweep(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def run(cfg: DictConfig, run_dir: Path) -> int:
        seeds.append(cfg.seed)
        return 130 if cfg.seed == 2 else 0

    monkeypatch.setattr(kfuse.cli.run, "run", run)
    assert command(monkeypatch, "-m", "seed=1,2,3,4", "hydra.sweep.dir=sweep") == 130
    assert seeds == [1, 2]
    assert "not run: 2 of 4 jobs" in capsys.readouterr().out


def help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, "--help")
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_every_example_of_the_help_runs(
    workplace: Path,
    runs: list[tuple[DictConfig, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "book.txt").write_text("What is written here is enough for a block or two. " * 40)
    (workplace / "my.py").write_text(USER_MODULE)
    out = help_text(monkeypatch, capsys)
    assert all(re.search(rf"^  {re.escape(key)}=\S+  +\S", out, re.MULTILINE) for key in AT_SHELL)
    examples = re.findall(r"^  kfuse(?: (\S+(?: \S+)*))?  +\S", out, re.MULTILINE)
    assert len(examples) == 6
    for number, example in enumerate(examples):
        where = "hydra.sweep.dir" if example.startswith("-m") else "hydra.run.dir"
        assert command(monkeypatch, *example.split(), f"{where}=run{number}") == 0, capsys.readouterr().err
    assert len(runs) == 11  # five, and a sweep of six


@pytest.mark.full
def test_version_is_ours(tmp_path: Path) -> None:
    for module, program in (("kfuse", "kfuse"), ("kfuse.cli.kfuse_run", "kfuse-run")):
        done = subprocess.run([sys.executable, "-m", module, "--version"], cwd=tmp_path, timeout=60, **PIPES)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{program} {kfuse.__version__}\n", "")
