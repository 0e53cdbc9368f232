"""`kfuse-run --workers 2 script.py ...`: runs the user's own training script on elastic workers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from kfuse.cli.output import leave, survive_closed_output
from kfuse.cli.run import supervise
from kfuse.cores import cores
from kfuse.elastic.job import Job
from kfuse.elastic.launchers import HostsLauncher, Launcher, LocalLauncher, local
from kfuse.elastic.launchers.agent import AgentError, join
from kfuse.elastic.launchers.replica import ReplicaLauncher
from kfuse.elastic.protocol import STOP_STATUS
from kfuse.elastic.supervisor import Supervisor
from kfuse.logs import set_up_logging
from kfuse.observe.earlier import earlier
from kfuse.observe.lock import taken
from kfuse.observe.recorder import Display, Recorder
from kfuse.observe.run_dir import RunDirectory
from kfuse.observe.sinks import missing
from kfuse.settings import rules
from kfuse.settings.tree import ConfigError, JobSettings, Leaf, by_key, completed, did_you_mean, leaves, show
from kfuse.version import __version__

_ABOUT = """\
Runs a training script that uses kf.fit or kf.DataLoader on workers that may come and go.

on one machine:
  kfuse-run --workers 2 --max-workers 4 train.py --my-option
on several, with the script at the same place and the same token file on each:
  kfuse-run --listen 10.0.0.1:29400 --token-file job.token --workers 8 train.py   on the first, at its address
  kfuse-run --join 10.0.0.1:29400 --token-file job.token                                on each of the others
"""
_EPILOG = """\
Each worker's CPU threads: OMP_NUM_THREADS, where it is set; else a host's cores divided by the workers that may be
on it (the smaller of --max-workers and, on several hosts, --slots).
Exit status: 0 where all workers' scripts end with 0, also if they never train or leave the training loop early; 1 after
a failure, also of a script whose training had ended; 2 for wrong arguments; 130 after Ctrl-C; 143 after SIGTERM.
"""
_LEAST_TOKEN = 16
_LEAVES = leaves(JobSettings)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status, as `--help` describes it."""
    survive_closed_output()
    args = _parse(sys.argv[1:] if argv is None else argv)
    if args.join is not None:
        return _join(args)
    run_dir = args.run_dir or Path("runs", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
    where = f"--run-dir {run_dir}"
    with contextlib.ExitStack() as held:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(taken(run_dir, where))
            run = earlier(run_dir)
            if run is not None and (run.ended or args.run_dir is None):
                how = "has ended" if run.ended else "is another command's"
                return _refuse(f"{where}: must be a new directory: the run in it {how}")
            shown = args.settings["observe_sinks"], args.settings["observe_ledger"]
            directory = RunDirectory(run_dir, *shown, settings=by_key(args.settings))
            directory.code = Path() if args.module else args.script.parent
        except ConfigError as error:
            return _refuse(str(error))
        except OSError as error:
            return _refuse(f"{where}: cannot be written: {error.strerror or error}")
        return leave(_run(args, directory, None if run is None else run.has_steps))


def _run(args: argparse.Namespace, directory: RunDirectory, has_steps: bool | None) -> int:
    """has_steps: whether some are recorded of the run in the directory, which goes on; None: there is no run."""
    settings = args.settings
    recorder = Recorder(directory, Display(progress=settings["observe_progress"] is not False))
    set_up_logging(settings["observe_log_level"], "supervisor", recorder.line)
    command = [sys.executable, *["-m"] * args.module, str(args.script), *args.arguments]
    # A script that has called kf.init catches SIGTERM: it ends when it notices that the supervisor is gone.
    share = settings["workers_max"] * args.ranks
    here = LocalLauncher(command, parent_end_signal=signal.SIGTERM, share=share)
    launcher: Launcher = here if args.ranks == 1 else ReplicaLauncher(here, args.ranks)
    if args.listen is not None:
        host, port = args.listen
        grace_s, signals = settings["elastic_grace_s"], settings["elastic_notice_signals"]
        most = settings["workers_max"]
        launcher = HostsLauncher(command, host, port, args.token, args.slots, most, grace_s, signals, args.ranks)
    told = {"log_level": settings["observe_log_level"], "ledger": settings["observe_ledger"]}
    job = {"run_dir": str(directory.path.absolute()), "has_steps": has_steps, "observe": told}
    return supervise(Supervisor(launcher, job, recorder, Job(settings, script=True)), recorder)


def _refuse(message: str, status: int = 2) -> int:
    print(f"kfuse-run: error: {message}", file=sys.stderr)
    return status


def _join(args: argparse.Namespace) -> int:
    host, port = args.join
    try:
        left = asyncio.run(join(host, port, args.token, args.slots))
    except AgentError as error:
        return _refuse(str(error), 1)
    except KeyboardInterrupt:
        return STOP_STATUS["interrupted"]
    return 0 if left else STOP_STATUS["terminated"]


class _Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _as_flags(text: str) -> str:
    """Returns the text with settings as flags: `--max-workers 2` for workers.max=2."""
    for leaf in _LEAVES.values():
        text = text.replace(f"{leaf.key}=", f"{_flag(leaf)} ").replace(leaf.key, _flag(leaf))
    return text


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="kfuse-run",
        usage="kfuse-run [--workers N] [--max-workers N] [OPTION ...] SCRIPT [ARGUMENT ...]",
        allow_abbrev=False,
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", type=_path, nargs="?", help="a Python file, or a folder with __main__.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    hosts, rest = parser.add_argument_group("several hosts"), parser.add_argument_group("lost workers, records")
    for leaf in _LEAVES.values():
        about = _as_flags(f"{leaf.setting.help} ({leaf.allowed}; default {show(leaf.default)})").replace("%", "%%")
        # --observe-sinks csv,wandb
        kind: Callable[[str], Any] = _value if leaf.kind != list[str] else _list
        group = parser if leaf.name in ("workers_count", "workers_max") else rest
        group.add_argument(_flag(leaf), dest=leaf.name, metavar="VALUE", type=kind, default=leaf.default, help=about)
    ranks = "processes of each worker, over which the script shards its model with fully_shard (default 1)"
    parser.add_argument("--ranks", type=int, default=1, help=ranks)
    directory = "for metrics and events: new, or that of a run that has not ended (default runs/DATE/TIME)"
    parser.add_argument("--run-dir", type=_path, help=directory)
    parser.add_argument("-m", "--module", action="store_true", help="the script is named as a module, as for python -m")
    parser.add_argument("--version", action="version", version=f"kfuse-run {__version__}")
    hosts.add_argument("--listen", metavar="HOST:PORT", type=_address, help="supervise here, for other hosts too")
    hosts.add_argument("--join", metavar="HOST:PORT", type=_address, help="run workers here for that supervisor")
    hosts.add_argument("--token-file", type=_path, help="holds the job's secret; needed with --listen and --join")
    gpus = local.gpus()
    slots = "processes that this host takes (default: its GPUs, or its cores where it has none; with --listen also 0)"
    hosts.add_argument("--slots", type=int, help=slots)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"{unknown[0].partition('=')[0]}: no such option{_meant(unknown[0])}")
    try:
        args.settings = _settings(args)
    except ConfigError as error:
        parser.error(_as_flags(str(error)))
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: must be at least 1")
    if args.ranks > 1 and gpus:
        parser.error(f"--ranks {args.ranks}: must be 1 where there are GPUs (it has run on CPUs only)")
    several_hosts = args.listen is not None or args.join is not None
    if not several_hosts and (args.slots is not None or args.token_file is not None):
        parser.error("--slots and --token-file: must be used with --listen or --join")
    args.slots = gpus or cores() if args.slots is None else args.slots
    least = 0 if args.listen is not None else 1
    if args.slots < least:
        parser.error(f"--slots {args.slots}: must be at least {least}")
    if several_hosts and 0 < args.slots < args.ranks:
        parser.error(f"--slots {args.slots}: must be at least {args.ranks}, the processes of a worker (--ranks), or 0")
    option, here = ("--slots", args.slots) if several_hosts else ("--workers", args.settings["workers_count"])
    if 0 < gpus < here:
        parser.error(f"{option} {here}: must be at most {gpus}, the GPUs here, as each worker needs one of its own")
    if several_hosts:
        args.token = _token(parser, args.token_file)
    if args.join is not None:
        given = [getattr(args, name) != leaf.default for name, leaf in _LEAVES.items()]
        if any(given) or (args.script, args.listen, args.run_dir, args.ranks) != (None, None, None, 1):
            parser.error("--join: the supervisor has the script; must be used with --token-file and --slots only")
    elif args.script is None:
        parser.error("a script is needed: kfuse-run --workers 2 train.py, or a module: kfuse-run -m my.train")
    elif args.module:
        sys.path.append(os.getcwd())
        if find_spec(str(args.script).partition(".")[0]) is None:
            parser.error(f"-m {args.script}: no such module")
    elif not (args.script.is_file() or (args.script / "__main__.py").is_file()):
        absent = "" if args.script.exists() else f"no such file{_meant(str(args.script))}; "
        parser.error(f"{args.script}: {absent}must be a Python script, or a folder with __main__.py")
    return args


def _meant(word: str) -> str:
    """Returns " (did you mean --max-workers?)" for workers.max=2, --workers-max and what is spelt alike."""
    name = word.partition("=")[0].lstrip("-")
    flags = {spelt: _flag(leaf) for leaf in _LEAVES.values() for spelt in (leaf.key, leaf.name.replace("_", "-"))}
    return did_you_mean(flags.get(name, f"--{name}"), [*flags.values(), "--run-dir", "--slots", "--ranks"])


def _value(text: str) -> Any:
    """Returns a number, true, false or null as what it stands for, any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _list(text: str) -> list[str]:
    """Returns a list's words, as at the shell: [csv, wandb]; the brackets may be left out."""
    return [word.strip(" '\"") for word in text.strip("[] ").split(",") if word.strip()]


def _flag(leaf: Leaf) -> str:
    """Returns --section-name; of the numbers of workers, the words that launchers use: --workers, --max-workers."""
    section, _, name = leaf.name.partition("_")
    if name in ("count", "min", "max"):
        return f"--{section}" if name == "count" else f"--{name}-{section}"
    return "--" + leaf.name.replace("_", "-")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that the flags give, by name. Raises ConfigError."""
    given = {name: leaf.checked(getattr(args, name), shell=True) for name, leaf in _LEAVES.items()}
    settings = completed(given)
    rules.check(by_key(settings), shell=True)
    if why := missing(settings["observe_sinks"]):
        raise ConfigError(f"--observe-sinks: {why}")
    return settings


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare) == (bare == host) or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: must be HOST:PORT, or [ADDRESS]:PORT for IPv6")
    return bare, int(port)


def _token(parser: argparse.ArgumentParser, file: Path | None) -> str:
    if file is None:
        parser.error(f"--token-file: needed with --listen and --join; any secret of at least {_LEAST_TOKEN} characters")
    try:
        status = file.stat()
        # A file of another user, as a Secret of Kubernetes, can be read by this one only through its group.
        if status.st_mode & (0o077 if status.st_uid == os.getuid() else 0o007):
            parser.error(f"--token-file {file}: must be readable by its owner alone (chmod 600)")
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--token-file {file}: cannot be read: {error}")
    if len(token) < _LEAST_TOKEN:
        parser.error(f"--token-file {file}: must hold a secret of at least {_LEAST_TOKEN} characters")
    return token


if __name__ == "__main__":
    sys.exit(main())
