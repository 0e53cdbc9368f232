"""Each schedule of kfuse beside DDP, ZeroRedundancyOptimizer and FSDP2: time a step, exposed communication, bytes sent.

    python benchmarks/comm.py --json benchmarks/results/comm.json                     # one loopback interface
    python benchmarks/comm.py --link 2gbit --megabytes 64 --variants zero,sharded     # each worker behind a link

Workers (gloo, one thread each) are processes of this machine, behind links of a rate where `--link` says so (links.py).
They train an MLP of eight square layers as compare.py says. See README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from compare import Schedule, figures, parse, parser, run, show
from replicas import Settings
from report import warn_if_busy, write

LAYERS = 8
BYTES_A_PARAMETER = 24
"""Of a replica, about: to tell how many variants fit in memory at once."""
ALWAYS = ("local", "kfuse-alone", "kfuse-alone-no-stats", "ddp")
"""Variants that the others are compared with."""
PROGRAMS = ("allreduce", "all_to_all", "tree", "reproducible", "auto", "sharded", "sharded-reproducible")
DEFAULT = ("zero", "fsdp", *PROGRAMS, *(f"{name}-no-stats" for name in PROGRAMS))


def main() -> None:
    """Measures every size that the command line names, and reports."""
    args = _arguments()
    warn_if_busy()
    sizes = []
    for workers in args.workers:
        for megabytes in args.megabytes:
            width = max(8, round((megabytes * 2**20 / 4 / LAYERS) ** 0.5))
            shape: dict[str, Any] = {"problem": "mlp", "layers": LAYERS, "width": width, "lr": 1e-3}
            settings = Settings(
                **shape, workers=workers, samples=args.samples, bucket_mb=args.bucket_mb, seed=args.seed
            )
            facts = {"workers": workers, "megabytes": megabytes, "parameters": LAYERS * width**2}
            title = f"\n{megabytes:g} MB of parameters, {workers} workers"
            sizes.append({**facts, **_times(settings, args, title)})
    about = {name: value for name, value in vars(args).items() if name != "json"}
    write(args.json, ("torch", "numpy"), benchmark="comm", settings=about, sizes=sizes)


def _times(settings: Settings, args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Of variants in groups whose replicas fit in memory together; each has `ALWAYS` too."""
    each = settings.workers * settings.layers * settings.width**2 * BYTES_A_PARAMETER / 2**30
    others = [name for name in args.variants if name not in ALWAYS]
    room = max(2, int(args.memory_gib / each) - len(ALWAYS))
    size: dict[str, Any] = {"variants": {}, "pairs": {}}
    for first in range(0, max(1, len(others)), room):
        names = (*ALWAYS, *others[first : first + room])
        outcome = run(settings, Schedule(names, args.rounds, own_interface=True, link=args.link))
        found = figures(outcome, names, own_interface=True)
        show(title, found)
        size = {kind: {**found[kind], **size[kind]} for kind in size}
    return size


def _arguments() -> argparse.Namespace:
    def always(args: argparse.Namespace) -> Sequence[str]:
        return (*ALWAYS, *(() if args.variants else DEFAULT))

    found = parser(__doc__, rounds=12, samples=32)
    found.add_argument("--workers", type=_list(int), default=[2])
    found.add_argument("--megabytes", type=_list(float), default=[0.0625, 1, 4, 16, 64], help="of fp32 parameters")
    found.add_argument("--link", help="each worker's own link has this rate, as tc writes it: 2gbit; needs root")
    found.add_argument("--memory-gib", type=float, default=8.0, help="that all replicas together may take")
    args = parse(found, always)
    if min(args.workers) < 2:
        found.error(f"--workers {min(args.workers)}: must be at least 2")
    return args


def _list(kind: type) -> Any:
    return lambda text: [kind(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
