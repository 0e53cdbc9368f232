"""`kfuse-run --workers 2 --max-workers 4 script.py ...`: runs the user's own training script on elastic workers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kfuse.elastic.launchers import LocalLauncher
from kfuse.elastic.supervisor import Elasticity
from kfuse.observe import Display, RunDirectory
from kfuse.run import Reports, supervise


def main(argv: list[str] | None = None) -> int:
    """Exit status: the script's own success (0) or failure (1), 2 for wrong arguments, 130 after Ctrl-C."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    run_dir = args.run_dir or Path("runs", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
    reports = Reports(RunDirectory(run_dir, tensorboard=True, ledger=False), Display(progress=not args.quiet))
    launcher = LocalLauncher([sys.executable, str(args.script), *args.arguments])
    elasticity = Elasticity(args.workers, args.min_workers, args.max_workers, replace=not args.no_replace)
    return supervise(launcher, {"run_dir": str(run_dir.absolute())}, reports, elasticity)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kfuse-run",
        description="Runs a training script that uses kf.fit or kf.DataLoader on workers that may come and go.",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes at first (default 1)")
    parser.add_argument("--min-workers", type=int, default=1, help="policies never go below it (default 1)")
    parser.add_argument("--max-workers", type=int, help="policies never go above it (default: --workers)")
    parser.add_argument("--no-replace", action="store_true", help="restore lost workers only up to --min-workers")
    parser.add_argument("--run-dir", type=Path, help="where metrics and events go (default runs/DATE/TIME)")
    parser.add_argument("--quiet", action="store_true", help="show only the script's own output and the summary")
    parser.add_argument("script", type=Path, help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    args = parser.parse_args(argv)
    args.max_workers = max(args.workers, args.min_workers) if args.max_workers is None else args.max_workers
    if not 1 <= args.min_workers <= args.workers <= args.max_workers:
        parser.error(
            f"--workers {args.workers}: allowed is --min-workers {args.min_workers} (at least 1) "
            f"to --max-workers {args.max_workers}"
        )
    if not args.script.is_file():
        parser.error(f"{args.script}: no such file; a Python script is needed")
    return args


if __name__ == "__main__":
    sys.exit(main())
