"""The command line: `kfuse key=value ...`, a Hydra app. `kfuse --help` says what matters first."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kfuse.cli.check import prepare, validate
from kfuse.cli.first import FirstWorker
from kfuse.cli.output import leave, survive_closed_output
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.observe.earlier import choose_resume
from kfuse.observe.lock import taken
from kfuse.settings.shell import explain, explain_flags, settings_help
from kfuse.settings.tree import ConfigError
from kfuse.version import __version__

USAGE_ERROR = 2


class FailedElsewhere(Exception):
    """A job of a sweep ended with this exit status, in a process that a launcher of Hydra's started (submitit)."""


# The commands that train nothing. Each module has `USAGE` and `main`.
_TOOLS = {
    "cbs": "kfuse.tools.cbs.command",
    "doctor": "kfuse.tools.doctor.command",
    "plan": "kfuse.tools.plan.command",
    "predict": "kfuse.tools.predict",
    "ramp": "kfuse.tools.ramp",
    "replay": "kfuse.tools.replay.command",
    "report": "kfuse.tools.report.command",
    "schedule": "kfuse.tools.step_programs",
    "status": "kfuse.tools.status",
}
# A home directory at the start of a value: bash expands none after a name with a dot, and Hydra does not read it.
_HOME = re.compile(r"(?:^|(?<=[=,\['\"]))~(?=/|$)")
_PAIR = re.compile(r"^(\+{0,2}comm\.sync=)(pair:\d+,\d+)$")  # without quotes Hydra takes it for two values of a sweep


def main() -> int:
    """Runs the command line in `sys.argv`; returns the exit status.

    0: trained. 2: the command line or configuration is wrong; one line is printed, no file is written. Any other: the
    status of the run, the largest of a sweep's. Under torchrun rank 0 does this; the others wait for its configuration.
    """
    survive_closed_output()
    words = [_PAIR.sub(r"\1'\2'", _HOME.sub(os.path.expanduser("~"), word)) for word in sys.argv[1:]]
    if words and words[0] in _TOOLS:
        return _tool(words[0], words[1:])
    if "WORLD_SIZE" not in os.environ:  # else torchrun has started this process
        return leave(_main(words))
    from kfuse.cli.worker import follow  # not before it is needed: a wrong command line is refused without torch
    from kfuse.elastic.rendezvous import Rendezvous

    try:
        rendezvous = Rendezvous.of_environment()
    except RuntimeError as error:
        return _refuse(str(error))
    if rendezvous is None or rendezvous.size == 1:
        return _main(words)
    if rendezvous.rank > 0:
        return follow(rendezvous)
    status = USAGE_ERROR
    try:
        status = _main(words, fixed=True)
    finally:
        rendezvous.dismiss(status)
    return status


def _main(words: list[str], fixed: bool = False) -> int:
    """fixed: torchrun has started the workers, so there can be one run only, and no other launcher."""
    try:
        with FirstWorker() as first:
            return _command(words, fixed, first)
    except KeyboardInterrupt:
        return STOP_STATUS["interrupted"]
    except Exception as error:  # of Hydra: `_job` handles the errors of a run
        return _refuse(explain(error))


def _command(words: list[str], fixed: bool, first: FirstWorker) -> int:
    if "--version" in words:  # Hydra's own prints Hydra's
        print(f"kfuse {__version__}")
        return 0
    if "--help-all" in words:
        print(f"All settings (key=default):\n{settings_help()}")
        return 0
    args, sweep = _parse(words), 0
    if not (args.help or args.hydra_help or args.cfg or args.info or args.shell_completion):
        jobs = _jobs(args)
        if args.multirun:
            sweep = len(jobs)
        if fixed and len(jobs) > 1:
            raise ConfigError("-m: sweeps are not supported with launcher=torchrun")
        for overrides in jobs:  # the first worker of a sweep would have checked what other runs train
            _check(args, overrides, fixed, None if args.multirun else first)
    # Hydra's own parser takes overrides in one piece only, not `seed=1 -m model=mlp,gpt`.
    sys.argv[1:] = [*(word for word in words if word not in args.overrides), *args.overrides]
    return _run_hydra(sweep, first)


def _tool(name: str, words: list[str]) -> int:
    tool: Any = importlib.import_module(_TOOLS[name])
    if {"-h", "--help"} & {*words}:
        print(tool.USAGE)
        return 0
    try:
        return int(tool.main(*_tool_arguments(name, words)))
    except ConfigError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return STOP_STATUS["interrupted"]


def _tool_arguments(name: str, words: list[str]) -> tuple[Any, ...]:
    """What a tool's `main` takes: its words, or for those that take a run's overrides what these configure.

    `replay` has overrides of the policy alone. It gets them, and the function that composes a configuration from some.
    Raises ConfigError.
    """
    if name in ("cbs", "plan", "predict", "ramp", "report", "status"):
        return (words,)
    try:
        args = _parse(words)
        if args.multirun:
            raise ConfigError(f"kfuse {name} takes overrides only, not --multirun")
        if name == "replay":
            return args.overrides, partial(_compose, args)
        return (OmegaConf.to_container(_check(args, args.overrides, fixed=False), resolve=True),)
    except Exception as error:
        raise ConfigError(explain(error)) from error


def _refuse(message: str) -> int:
    print(f"kfuse: error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _parse(words: list[str]) -> argparse.Namespace:
    parser = get_args_parser()
    parser.allow_abbrev = parser.exit_on_error = False
    try:
        args, unknown = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    if unknown:
        raise ConfigError(explain_flags([word for word in unknown if word.startswith("-")]))
    args.multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    return args


def _jobs(args: argparse.Namespace) -> list[list[str]]:
    """The overrides of each run: one list, or a sweep's many."""
    if not args.multirun:
        return [args.overrides]
    with _hydra(args):
        parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(args.overrides)
        return [jobs for batch in BasicSweeper.split_arguments(parsed, None) for jobs in batch]


@contextlib.contextmanager
def _hydra(args: argparse.Namespace) -> Iterator[None]:
    """Context: Hydra's state, as a run will have it. Raises ConfigError for a --config-dir that is not there."""
    with hydra.initialize_config_module("kfuse.configs", version_base="1.3"):
        if args.config_dir is not None:
            if not os.path.isdir(folder := os.path.abspath(args.config_dir)):
                raise ConfigError(f"--config-dir {args.config_dir}: no such directory")
            search_path = GlobalHydra.instance().config_loader().get_search_path()
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery("schema"))
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("kfuse", search_path)
        yield


def _compose(args: argparse.Namespace, overrides: list[str]) -> DictConfig:
    """One run's configuration, as Hydra will compose it."""
    with _hydra(args), warnings.catch_warnings():
        warnings.filterwarnings("error", "provider=hydra.searchpath")  # a path that is not there
        try:
            return hydra.compose(args.config_name or "config", overrides)
        except (ValueError, UserWarning) as error:  # Hydra's, without the key
            raise ConfigError(f"{' '.join(overrides)}: {error}") from error


def _check(args: argparse.Namespace, overrides: list[str], fixed: bool, first: FirstWorker | None = None) -> DictConfig:
    """Composes and validates one run's configuration, before anything is written. Returns it."""
    cfg = _compose(args, overrides)
    prepare(cfg, overrides)
    fixed_launcher = validate(cfg, first)
    if fixed and not fixed_launcher:
        raise ConfigError("launcher: torchrun started this process; must be launcher=torchrun")
    return cfg


def _run_hydra(sweep: int, first: FirstWorker) -> int:
    """Runs the jobs of `sys.argv` through Hydra. Returns the exit status, the largest of a sweep's.

    sweep: how many jobs there are; 0: one, and no sweep.
    """
    statuses: list[int] = []
    ended: list[tuple[Path, list[str], int]] = []  # of a sweep: directory, overrides and status of each run
    here = os.getpid()

    @hydra.main(config_path="pkg://kfuse.configs", config_name="config", version_base="1.3")
    def job(cfg: DictConfig) -> None:
        context = HydraConfig.get()
        if sweep:
            print(
                f"job {context.job.num} ({context.job.num + 1} of {sweep}): {' '.join(context.overrides.task)}",
                flush=True,
            )
        status = _job(cfg, Path(context.runtime.output_dir), first)
        if status and os.getpid() != here:
            raise FailedElsewhere(status)  # Hydra raises it again in the command's process
        statuses.append(status)
        ended.append((Path(context.runtime.output_dir), list(context.overrides.task), status))
        if status in STOP_STATUS.values():  # by Ctrl-C or SIGTERM, which mean the rest of a sweep too
            raise KeyboardInterrupt

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of printing them
    try:
        job()
    except KeyboardInterrupt:
        if len(statuses) < sweep:
            print(f"not run: {sweep - len(statuses)} of {sweep} jobs")
        statuses.append(STOP_STATUS["interrupted"])
    except FailedElsewhere as error:
        print("kfuse: error: a job has failed; what it wrote is in hydra.sweep.dir, .submitit", file=sys.stderr)
        statuses += error.args
    if sweep and ended:
        from kfuse.cli.sweep import show

        show(ended)
        print(f"report  kfuse report {ended[0][0].parent}")
    return max(statuses, default=0)


def _job(cfg: DictConfig, run_dir: Path, first: FirstWorker) -> int:
    """One run, in the directory that Hydra made for it; returns its exit status."""
    context = HydraConfig.get()
    given = any(word.lstrip("+").startswith("hydra.run.dir=") for word in context.overrides.hydra)
    goes_on = cfg.checkpoint.resume is None and given and context.mode == RunMode.RUN
    prepare(cfg, list(context.overrides.task))
    OmegaConf.resolve(cfg)
    try:
        with contextlib.ExitStack() as held:
            _claim(run_dir, cfg, goes_on, held)
            from kfuse.cli.run import run  # not before it is needed: `--help` is quick

            return run(cfg, run_dir, first)
    except ConfigError as error:
        return _refuse(str(error))
    except Exception as error:
        if isinstance(error, OSError) and Path(error.filename or "").is_relative_to(run_dir):
            return _refuse(explain(error))
        # If it reached Hydra, Hydra would print its own message and not run the rest of a sweep.
        traceback.print_exc()
        return 1


def _claim(run_dir: Path, cfg: DictConfig, goes_on: bool, held: contextlib.ExitStack) -> None:
    """Takes the run directory until `held` ends. In a new one writes .hydra/config.yaml; else `run` does, once training
    has begun.

    A run's directory is refused to a second one that does not resume it. goes_on: resumes if it holds a run.
    """
    path, where = run_dir / ".hydra" / "config.yaml", f"hydra.run.dir={run_dir}"
    if cfg.checkpoint.resume == "never" and not goes_on and path.exists():
        raise ConfigError(f"{where}: holds a run already; use a new one, or checkpoint.resume=auto")
    held.enter_context(taken(run_dir, where))
    choose_resume(run_dir, run_dir / "checkpoints", None if goes_on else cfg.checkpoint.resume, where, shell=True)
    if goes_on:
        cfg.checkpoint.resume = "auto"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        OmegaConf.save(cfg, path)
