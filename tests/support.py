"""Combinations of settings: how a script and the command line are refused them, and training with them."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import hydra
import torch
import torch.nn.functional as F
from distributed import run_workers
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import kfuse as kf
from kfuse import session
from kfuse.cli.check import prepare, validate
from kfuse.comm.group import Group
from kfuse.comm.settings import CommOptions
from kfuse.data import DataSplit
from kfuse.elastic.link import Link
from kfuse.elastic.protocol import Member, View
from kfuse.settings import rules
from kfuse.settings.declared import CommSettings
from kfuse.settings.tree import ConfigError, by_key, resolved


class Case(NamedTuple):
    """A combination: one value of each axis."""

    sync: str = "ssgd"
    state: str = "replicated"
    schedule: str = "auto"
    workers: str = "fixed"
    reproducible: str = "no"
    precision: str = "fp32"
    clip: str = "none"
    optimizer: str = "adamw"


AXES: dict[str, tuple[str, ...]] = {
    "sync": ("ssgd", "local:N", "local:N with outer steps", "sma", "pair"),
    "state": ("replicated", "sharded"),
    "schedule": ("auto", "allreduce", "reduce_scatter", "all_to_all", "tree"),
    "workers": ("fixed", "elastic, mirror", "elastic, none"),
    "reproducible": ("no", "yes"),
    "precision": ("fp32", "autocast bf16", "bf16 parameters", "bf16 messages"),
    "clip": ("none", "clip_norm", "GradScaler"),
    "optimizer": ("adamw", "sgd", "lamb", "torch"),
}

CASES = [Case(*values) for values in itertools.product(*AXES.values())]

SAMPLES, BATCH, MICRO, STEPS, SEED = 72, 24, 2, 3, 4
CLIP_NORM = 0.4
"""Below the norm of every step's gradient."""
_BUCKET_MB = 2 * 4096 * 4 / 2**20


def overrides(case: Case) -> dict[str, Any]:
    """The combination's settings, as of the command line, but for those that choose classes. All have all of them."""
    outer = case.sync == "local:N with outer steps"
    return {
        "comm.sync": "local:2" if case.sync.startswith("local") else case.sync,
        "comm.outer_lr": 0.7 if outer else 1.0,
        "comm.outer_momentum": 0.5 if outer else 0.0,
        "comm.state": case.state,
        "comm.schedule": case.schedule,
        "comm.reproducible": case.reproducible == "yes",
        "comm.dtype": "bf16" if case.precision == "bf16 messages" else "fp32",
        "elastic.redundancy": "mirror" if case.workers == "fixed" else case.workers.split()[-1],
        "train.precision": {"autocast bf16": "bf16", "bf16 parameters": "bf16-true"}.get(case.precision, "fp32"),
        "train.clip_norm": CLIP_NORM if case.clip == "clip_norm" else None,
    }


def facts(case: Case) -> dict[str, Any]:
    """Returns what the rules ask of a combination. With several workers, as the tests have."""
    kind = {"adamw": kf.FusedAdamW, "sgd": kf.FusedSGD, "lamb": kf.FusedLAMB, "torch": kf.Optimizer}[case.optimizer]
    job = {"job": "fixed" if case.workers == "fixed" else "elastic", "scaler": case.clip == "GradScaler"}
    return overrides(case) | job | rules.optimizer_facts(kind)


@cache
def supported() -> list[Case]:
    """Returns the combinations that no rule refuses."""
    return [case for case in CASES if not list(rules.broken(facts(case)))]


# -- a training with a combination, in a script ---------------------------------------------------------------------


def supervised() -> Any:
    """In place of the connection to a supervisor, which has nothing to say."""
    link: Any = Link()
    link.elastic, link.job = True, {"run_dir": "."}
    return link


def options(case: Case) -> CommOptions:
    """Raises ValueError for what kf.init refuses."""
    own = {key.replace(".", "_"): value for key, value in overrides(case).items() if not key.startswith("train.")}
    values = resolved("kf.init", CommSettings, {"comm_bucket_mb": _BUCKET_MB, "comm_check_every": 1, **own})
    rules.check(by_key(values))
    return CommOptions.of(values)


def net(case: Case) -> nn.Sequential:
    """Some 17,000 parameters: several buckets, of several shards each."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 60), nn.Tanh(), nn.Linear(60, 3))
    return model.to(torch.bfloat16) if case.precision == "bf16 parameters" else model


@cache
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 24, generator=generator)
    return x, torch.sin(3 * x[:, :3])


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


# With a large eps an update follows the gradient: with a small one an error in a gradient near 0 would be a whole step.
ADAMW = {"lr": 3e-2, "eps": 1e-2, "weight_decay": 0.1}
LAMB = {"lr": 1e-2, "eps": 1e-2}
SGD = {"lr": 0.5, "momentum": 0.9}


def optimizer(case: Case, model: nn.Module) -> Any:
    params: Any = list(model.parameters())
    makes: dict[str, Callable[[], Any]] = {
        "adamw": lambda: kf.FusedAdamW(params, **ADAMW),
        "sgd": lambda: kf.FusedSGD(params, **SGD),
        "lamb": lambda: kf.FusedLAMB(params, **LAMB),
        "torch": lambda: kf.Optimizer(torch.optim.AdamW(params, **ADAMW)),
    }
    return makes[case.optimizer]()


class Refused(Exception):
    """kfuse refuses the combination. Two with the same words are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused) and str(other) == str(self)

    __hash__ = Exception.__hash__


def train(
    case: Case,
    group: Group,
    steps: int = STEPS,
    batch: int = BATCH,
    more: Callable[[Any], dict[str, Any]] = lambda opt: {},
) -> nn.Sequential:
    """Trains a model as the combination says, over `group`: the model. batch: samples of a step. Raises Refused.

    more: makes further arguments of kf.fit for an optimizer.
    """
    # As kf.init does it; but one group serves all trainings.
    link = None if case.workers == "fixed" else supervised()
    settings: dict[str, Any] = dict(batch_size=batch, micro_batch=MICRO, steps=steps, seed=SEED)
    given = overrides(case)
    settings |= {"train_precision": given["train.precision"], "clip_norm": given["train.clip_norm"]}
    try:
        session._current = joined = session.Session(group, options(case), link)
        if joined.elastic:
            joined.view = View(1, (Member(0, os.getpid(), "host"),), ("127.0.0.1", 1), "start")
        model = net(case)
        opt = optimizer(case, model)
        if case.clip == "GradScaler":
            _train_scaled(case, model, opt, {key: settings[key] for key in settings if key != "train_precision"})
        else:
            kf.fit(model, data(), opt, loss_fn=loss, **settings | more(opt))
    except (ValueError, TypeError, RuntimeError) as error:
        raise Refused(" ".join(str(error).split())) from error
    return model


def _train_scaled(case: Case, model: nn.Module, opt: Any, settings: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in kf.DataLoader(model, data(), opt, **settings):
        for x, y in step:
            scaler.scale(loss_of(case, model, x, y)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def loss_of(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast bf16"):
        return loss(model(x.to(torch.bfloat16) if case.precision == "bf16 parameters" else x), y)


C = TypeVar("C", bound=Any)
T = TypeVar("T")


def asked_by_workers(cases: Sequence[C], ask: Callable[[C, Group], T]) -> dict[C, T | Refused]:
    """For a worker of a group: of each combination what `ask` returns, or how a script is refused it.

    With a supervisor one worker is refused what several are: of these combinations each worker asks its part, alone.
    cases: of `Case`, or of one with more settings.
    """
    group = kf.init().group
    alone = Group(device=group.device, timeout_s=group.timeout_s)
    found: dict[C, T | Refused] = {}
    for number, case in enumerate(cases):
        if case.workers != "fixed" and number % group.size != group.rank:
            continue
        try:
            found[case] = ask(case, group if case.workers == "fixed" else alone)
        except Refused as refused:
            found[case] = refused.with_traceback(None)
    return found


def asked(cases: Sequence[Case]) -> dict[Case, Refused | None]:
    """For a worker of a group: of each combination how a script is refused it; None: it trains."""
    batch = kf.init().group.size * MICRO

    def ask(case: Case, group: Group) -> None:
        train(case, group, steps=1, batch=batch)

    return asked_by_workers(cases, ask)


def ask_script(cases: Sequence[Case]) -> dict[Case, Refused | None]:
    """How a script on two workers is refused each combination."""
    first, second = run_workers(2, asked, list(cases), timeout_s=500)
    assert all(first[case] == second[case] for case in first.keys() & second.keys()), "workers are refused alike"
    return {case: (first if case in first else second)[case] for case in cases}


# -- the command line -------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A model for the check of the configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(24, 3)


def split() -> DataSplit:
    """Data for the check of the configuration."""
    pairs = torch.utils.data.TensorDataset(*data())
    return DataSplit(pairs, pairs, {})  # type: ignore[arg-type]


@cache
def composed(*chosen: str) -> DictConfig:
    """The configuration with these overrides, on which the combinations' settings are set."""
    own = ["model._target_=support.Head", "data._target_=support.split"]
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        cfg = hydra.compose("config", [*chosen, *own])
    prepare(cfg, own)
    return cfg


_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def ask_command_line(
    case: Case, policy: tuple[str, ...] = ("policy=none",), more: Mapping[str, Any] | None = None
) -> str | None:
    """How `kfuse` refuses the combination; None: it does not.

    policy: the overrides that choose it. more: other settings, by key.
    """
    fixed = case.workers == "fixed"
    with patch.dict(os.environ, _TORCHRUN if fixed else {}):
        cfg = copy.deepcopy(composed(f"launcher={'torchrun' if fixed else 'local'}", *policy))
        cfg.optimizer = composed("policy=none", f"optimizer={case.optimizer}").optimizer
        for key, value in {**overrides(case), **(more or {})}.items():
            OmegaConf.update(cfg, key, value)
        try:
            validate(cfg)
        except ConfigError as error:
            return str(error)
    return None
