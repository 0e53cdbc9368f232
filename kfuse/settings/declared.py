"""How a setting is declared, and the settings that decide how gradients are reduced: the arguments of `kf.init`."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, get_type_hints

from kfuse.comm.settings import MODES, TRANSPORT_NAMES, TREES, CommOptions, Sync


@dataclass(frozen=True)
class Setting:
    """Declares a setting in a TypedDict: `batch_size: Annotated[int, Setting(32, "samples ...", at_least=1)]`.

    The annotated type says what kind of value it takes, and whether `null` is allowed.
    """

    default: Any
    help: str  # what it is, its unit, and what special values mean
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()  # if not empty: the values that are allowed
    pattern: str = ""  # a regular expression that an allowed value matches, if it is not one of `choices`
    parse: Callable[[str], object] | None = None  # raises ValueError for a text that is not allowed
    form: str = ""  # what the pattern matches, or `parse` takes, in words
    key: str = ""  # its name at the shell, where Python's name does not begin with the section: train.epochs for epochs

    def is_in_range(self, value: Any) -> bool:
        """Returns whether a value of the right type is allowed. NaN and infinity never are."""
        if isinstance(value, list):
            return all(map(self.is_in_range, value))
        if isinstance(value, str) and self.parse is not None:
            with contextlib.suppress(ValueError):
                return self.parse(value) is not None
            return False
        if isinstance(value, str):
            matches = bool(self.pattern) and re.fullmatch(self.pattern, value) is not None
            return value in self.choices or matches or not (self.choices or self.pattern)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (
            abs(value) <= sys.float_info.max
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """What a value must be, in words: "at least 1"; "" where every value of its type is allowed."""
        if self.choices or self.pattern:
            alone = "one of " if len(self.choices) > 1 else ""
            return alone + ", ".join(filter(None, [*self.choices, self.form]))
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least} to {self.at_most}"
        words = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        return ", ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


class CommSettings(TypedDict, total=False):
    """How gradients are reduced over the workers: the arguments of `kf.init`."""

    comm_schedule: Annotated[
        str,
        Setting(
            CommOptions.schedule,
            "how gradients are summed; auto: allreduce or, on CPUs, all_to_all where it is quicker, and what "
            "comm.reproducible or comm.state needs; symmetric is experimental; a dotted path: your own Transport class",
            choices=("auto", *TRANSPORT_NAMES),
            pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+",
            form="package.module.Class",
        ),
    ]
    comm_state: Annotated[
        str,
        Setting(
            CommOptions.state,
            "where optimizer state lies; sharded: each worker keeps and updates its part (ZeRO-1), with kfuse's "
            "optimizers",
            choices=("replicated", "sharded"),
        ),
    ]
    comm_tree: Annotated[str, Setting(CommOptions.tree, "shape of comm.schedule=tree", choices=TREES)]
    comm_sync: Annotated[
        str,
        Setting(
            CommOptions.sync,
            "how the workers keep together: ssgd (gradients are reduced at every step), local:N (models are averaged "
            "every N steps), sma (models are drawn to a central one), pair (each averages with another one, and waits "
            "for nobody), pair:N,M (so too: every N steps with one of its host, every M with one of another host)",
            choices=MODES,
            parse=Sync.parse,
            form="local:N, pair:N,M with N at most M",
        ),
    ]
    comm_outer_lr: Annotated[
        float,
        Setting(
            CommOptions.outer_lr, "with comm.sync=local:N: rate of the outer step to the average; DiLoCo: 0.7", above=0
        ),
    ]
    comm_outer_momentum: Annotated[
        float,
        Setting(
            CommOptions.outer_momentum,
            "with comm.sync=local:N: Nesterov momentum of outer steps; DiLoCo: 0.9; 0: none",
            at_least=0,
            below=1,
        ),
    ]
    comm_sma_alpha: Annotated[
        float | None,
        Setting(
            CommOptions.sma_alpha,
            "with comm.sync=sma: how strongly models are drawn together; null: 1 / workers",
            above=0,
            at_most=1,
        ),
    ]
    comm_sma_momentum: Annotated[
        float,
        Setting(CommOptions.sma_momentum, "with comm.sync=sma: momentum of the central model", at_least=0, below=1),
    ]
    comm_dtype: Annotated[
        str,
        Setting(
            CommOptions.dtype,
            "type of gradients in messages; bf16 halves the bytes, int8 with a scale for each 64 elements halves them "
            "again",
            choices=("fp32", "bf16", "int8"),
        ),
    ]
    comm_bucket_mb: Annotated[
        float, Setting(CommOptions.bucket_mb, "MiB of fp32 gradients reduced together; the default is DDP's", above=0)
    ]
    comm_reproducible: Annotated[bool, Setting(CommOptions.reproducible, "the same bits for any number of workers")]
    comm_check_every: Annotated[
        int | None,
        Setting(
            CommOptions.check_every, "steps between comparisons of all workers' parameters; null: never", at_least=1
        ),
    ]
    comm_audit_every: Annotated[
        int | None,
        Setting(
            CommOptions.audit_every,
            "steps between audits: a micro-batch is run again on another worker, and the gradients are compared; null: "
            "never",
            at_least=1,
        ),
    ]
    comm_audit_on_corruption: Annotated[
        str,
        Setting(
            CommOptions.audit_on_corruption,
            "where an audit's gradients differ; report: an event; replace: the worker that two others contradict is "
            "replaced, and the step is made again; stop: the job ends",
            choices=("report", "replace", "stop"),
        ),
    ]
    comm_timeout_s: Annotated[
        float,
        Setting(
            60.0,
            "seconds without an answer, after which a worker counts as lost; ten times as many until each optimizer "
            "has made two steps, as one worker may compile for longer",
            above=0,
            at_most=10**6,
        ),
    ]
    elastic_redundancy: Annotated[
        str,
        Setting(
            CommOptions.redundancy,
            "where a lost worker's part of the sharded optimizer state comes from; mirror: another worker, where "
            "possible on another host, keeps a copy; none: the last checkpoint",
            choices=("mirror", "none"),
        ),
    ]


def declared(group: type) -> dict[str, tuple[Any, Setting]]:
    """Returns the type and the declaration of each setting of a TypedDict, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}
