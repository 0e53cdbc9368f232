"""Which settings exclude each other: one table. Scripts, commands, docs/support.md and the tests read it.

A rule is asked of `Facts`: settings by key ("comm.sync"), and what the settings do not say, by these names:

    job                   "fixed" | "elastic": whether workers may come and go
    job.ranks             processes of each worker (kfuse-run --ranks)
    job.workers           as many as torchrun started; job.gpus: as many GPUs as this process sees, where there are any
    policy, optimizer     their classes' names; scheduler: a torch scheduler's, or None
    policy.scaling, .decay    what the policy accepts of lr.scaling and lr.decay: a tuple, or None for everything
    policy.modes          what it sets comm.sync to
    optimizer.shards_state    as the class declares it
    optimizers            how many step in a loop's body, each after a pass of its own
    data                  "data set" | "stream"; heldout, step_fn, weight_fn, scaler: whether there is one
    streams               of the model's CarriedState; None: it has none
    metrics               their names, or None
    run.steps             length of the run in steps of the first batch size; run.warmup_most: of its warm-up, at most

A rule that needs a fact that is not known is passed over: it is asked again where it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfuse.settings.tree import AT_SHELL, ConfigError, show, spell

Facts = Mapping[str, Any]


class Is:
    """One of these values."""

    other: str | None = None  # the fact that the value is compared with: none

    def __init__(self, *values: Any) -> None:
        self.values = values

    def holds(self, value: Any, facts: Facts) -> bool:
        return value in self.values

    def words(self, facts: Facts, shell: bool) -> str:
        one_of = "one of " if len(self.values) > 1 else ""
        return one_of + ", ".join(show(value, shell) for value in self.values)


class AtLeast(Is):
    """At least this number; true where it is None."""

    def holds(self, value: Any, facts: Facts) -> bool:
        return value is None or value >= self.values[0]

    def words(self, facts: Facts, shell: bool) -> str:
        return f"at least {self.values[0]}"


class IsNot(Is):
    """None of these values, nor such a one with numbers: `pair:1,8` is a `pair`."""

    def holds(self, value: Any, facts: Facts) -> bool:
        return value not in self.values and str(value).partition(":")[0] not in self.values

    def words(self, facts: Facts, shell: bool) -> str:
        return "another than " + ", ".join(show(value, shell) for value in self.values)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "at least": operator.ge,
    "at least three times": lambda value, other: value >= 3 * other,
    "at most": operator.le,
    "equal to": operator.eq,
    "a multiple of": lambda value, other: value % other == 0,
    "one of": lambda value, other: value in other,
}


@dataclass(frozen=True)
class Compared:
    """Compared with another fact; true where either is None."""

    how: str
    other: str

    def holds(self, value: Any, facts: Facts) -> bool:
        other = facts[self.other]
        return value is None or other is None or _COMPARISONS[self.how](value, other)

    def words(self, facts: Facts, shell: bool) -> str:
        if self.how == "one of":
            return Is(*facts[self.other]).words(facts, shell)
        is_setting = self.other in AT_SHELL
        return f"{self.how} {_shown(self.other, facts, shell) if is_setting else show(facts[self.other], shell)}"


@dataclass(frozen=True)
class Rule:
    """While each fact of `when` is as it says there, `key` must be `must`."""

    key: str
    must: Is | Compared
    when: Mapping[str, Is] = field(default_factory=dict)
    why: str = ""

    def is_broken(self, facts: Facts) -> bool:
        """Returns whether it refuses these facts; False where one of them is unknown."""
        if not {self.key, *self.when, self.must.other or self.key} <= facts.keys():
            return False
        applies = all(condition.holds(facts[key], facts) for key, condition in self.when.items())
        return applies and not self.must.holds(facts[self.key], facts)

    def message(self, facts: Facts, shell: bool) -> str:
        """Returns `KEY=VALUE: must be ... with OTHER=VALUE (why)`."""
        others = dict.fromkeys(_shown(key, facts, shell) for key in self.when)
        given = f" with {' and '.join(others)}" if others else ""
        why = f" ({self.why})" if self.why else ""
        of_class = self.key.startswith(("policy.", "optimizer."))  # what the class declares is in no user's words
        must = "another one" if of_class else self.must.words(facts, shell)
        return f"{_shown(self.key, facts, shell)}: must be {must}{given}{why}"


def _shown(key: str, facts: Facts, shell: bool) -> str:
    """Returns KEY=VALUE; of what is known of a policy, an optimizer or a run, its name; of ranks the flag."""
    if key == "job.ranks":
        return f"--ranks {facts.get(key)}"
    known_by = key.partition(".")[0]
    key = known_by if known_by in ("policy", "optimizer") else key
    return f"{spell(key, shell)}={show(facts.get(key), shell)}"


_GIVEN = IsNot(None)
_SHARDING = Is("auto", "all_to_all", "reduce_scatter", "symmetric")
_ADDED_HERE = Is("auto", "all_to_all", "reduce_scatter")
_CANONICAL = Is("auto", "all_to_all", "symmetric")

NO_SEEK = "stream without seek"
_STREAM = Is("stream", NO_SEEK)
_CURVED = "statistics.curvature_every"
_REPLICAS = {"job.ranks": AtLeast(2)}
_DIAGONAL = "SGD", "FusedSGD", "Adam", "AdamW", "FusedAdamW"

RULES = (
    Rule("batch.micro", Compared("at most", "batch.size")),
    Rule("batch.micro_max", Compared("a multiple of", "batch.micro")),
    Rule("batch.min", Compared("at most", "batch.size")),
    Rule("batch.max", Compared("at least", "batch.size")),
    Rule("workers.min", Compared("at most", "workers.count")),
    Rule("workers.max", Compared("at least", "workers.count")),
    Rule("workers.count", Compared("equal to", "job.workers"), why="torchrun has started them"),
    Rule("workers.count", Compared("at most", "job.gpus"), why="each worker needs a GPU of its own"),
    Rule("comm.sync", Is("ssgd"), {"comm.state": Is("sharded")}, "in others each worker updates a model of its own"),
    Rule("comm.sync", Is("ssgd"), {"comm.reproducible": Is(True)}, "other modes' models depend on the workers' number"),
    Rule("comm.sync", IsNot("pair"), {"job": Is("fixed")}, "it needs a supervisor: kfuse or kfuse-run"),
    Rule("comm.sync", Is("ssgd"), {"scaler": Is(True)}, "each worker would find another scale; bf16 needs none"),
    Rule("comm.schedule", _SHARDING, {"comm.state": Is("sharded")}, "others bring each worker the whole sum"),
    Rule("comm.schedule", _CANONICAL, {"comm.reproducible": Is(True)}, "others' order depends on the workers' number"),
    Rule("comm.schedule", IsNot("symmetric"), {"job": Is("elastic")}, "it needs a fixed number of workers: torchrun"),
    Rule("comm.schedule", IsNot("symmetric"), {"job.gpus": Is(None)}, "it needs GPUs"),
    Rule("comm.dtype", Is("fp32"), {"comm.reproducible": Is(True)}, "what is rounded depends on the workers' number"),
    Rule("comm.dtype", Is("fp32"), {"comm.schedule": Is("symmetric")}, "GPUs read each other's fp32 sums"),
    Rule(
        "comm.schedule",
        _ADDED_HERE,
        {"comm.dtype": Is("int8")},
        "other schedules would add int8 bytes without their scales",
    ),
    Rule("comm.reproducible", Is(True), {"comm.audit_every": _GIVEN}, "gradients are compared bit for bit"),
    Rule("comm.audit_on_corruption", Is("report"), {"comm.audit_every": Is(None)}, "without audits nothing is found"),
    Rule("comm.audit_on_corruption", IsNot("replace"), {"job": Is("fixed")}, "it needs a supervisor: kfuse, kfuse-run"),
    Rule("observe.log_dir", Is(None), {"job": Is("fixed")}, "torchrun has --log-dir"),
    Rule("workers.max", AtLeast(3), {"comm.audit_on_corruption": Is("replace")}, "two others must contradict a worker"),
    Rule("comm.state", Is("replicated"), {"optimizer.shards_state": Is(False)}, "it cannot keep a part"),
    Rule("comm.state", Is("replicated"), {"scaler": Is(True)}, "no worker has a whole gradient that it could look at"),
    Rule("comm.state", Is("replicated"), {"optimizers": IsNot(1)}, "each may be at another update when one is lost"),
    Rule("comm.sync", Is("ssgd"), {"optimizers": IsNot(1)}, "in others the workers' models are one optimizer's"),
    Rule("lr.scaling", IsNot("adascale"), {"optimizers": IsNot(1)}, "its gain is that of one optimizer's gradients"),
    Rule("batch.size", Compared("equal to", "streams"), why="each step has one sample of each stream of CarriedState"),
    Rule("comm.sync", Is("ssgd"), {"streams": _GIVEN}, "a stream of CarriedState goes from worker to worker"),
    Rule("weight_fn", Is(False), {"streams": _GIVEN}, "a step with CarriedState has weights that are known before"),
    Rule("comm.audit_every", Is(None), {"data": Is(NO_SEEK)}, "it reads samples again: a kfuse.data.Source can"),
    Rule(
        "batch.size",
        Compared("at least three times", "batch.micro"),
        {_CURVED: _GIVEN, "policy": Is("NoPolicy", "BasePolicy")},
        "a measurement needs three micro-batches",
    ),
    Rule(_CURVED, Is(None), {"data": Is(NO_SEEK)}, "it reads samples again: a kfuse.data.Source can"),
    Rule(_CURVED, Is(None), {"optimizer": IsNot(*_DIAGONAL)}, "it does not scale each entry of a gradient by itself"),
    Rule(_CURVED, Is(None), {"optimizers": IsNot(1)}, "curvature is measured along the update of one optimizer"),
    Rule(_CURVED, Is(None), {"comm.state": Is("sharded")}, "no worker has the whole gradient"),
    Rule(_CURVED, Is(None), {"comm.sync": IsNot("ssgd")}, "each worker has parameters of its own"),
    Rule(_CURVED, Is(None), {"train.precision": Is("bf16-true")}, "bf16 parameters cannot be moved by so little"),
    Rule(_CURVED, Is(None), {"weight_fn": Is(True)}, "its micro-batches count by their samples"),
    Rule(_CURVED, Is(None), {"streams": _GIVEN}, "CarriedState changes with each run of a micro-batch"),
    Rule("batch.micro", Compared("a multiple of", "job.ranks"), _REPLICAS, "each rank has a part of it"),
    Rule("comm.sync", Is("ssgd"), _REPLICAS, "the others are for whole models"),
    Rule("comm.state", Is("replicated"), _REPLICAS, "the ranks have a shard of the state each"),
    Rule("comm.tree", IsNot("latency"), _REPLICAS, "the ranks' links would choose different trees"),
    Rule("comm.audit_every", Is(None), _REPLICAS, "no rank has the whole gradient"),
    Rule("train.target_accuracy", Is(None), _REPLICAS | {"heldout": Is(False)}, "each rank may log another"),
    Rule("optimizers", Is(1), _REPLICAS, "several have not been tried"),
    Rule("streams", Is(None), _REPLICAS, "a stream of CarriedState has one process"),
    Rule("weight_fn", Is(False), _REPLICAS, "the ranks would weigh their parts otherwise"),
    Rule("data", IsNot(NO_SEEK), _REPLICAS, "each rank reads a part: a kfuse.data.Source can"),
    Rule(_CURVED, Is(None), _REPLICAS, "no rank has the whole gradient"),
    Rule("lr.scaling", Compared("one of", "policy.scaling"), {"policy": _GIVEN}, "it is right with these alone"),
    Rule("lr.decay", Compared("one of", "policy.decay"), {"policy": _GIVEN}, "the policy lowers the rate itself"),
    Rule("scheduler", Is(None), {"policy.decay": _GIVEN}, "the policy lowers the rate itself"),
    Rule("scaler", Is(False), {"job": Is("elastic")}, "a worker that joins would begin with another scale"),
    Rule("train.epochs", Is(None), {"data": _STREAM}, "a stream has no epochs"),
    Rule("train.steps", _GIVEN, {"data": _STREAM}, "a stream has no epochs"),
    Rule("lr.decay", Is("none", "constant"), {"run.steps": Is(None)}, "the length of the run is unknown"),
    Rule(
        "lr.warmup_steps",
        Compared("at most", "run.warmup_most"),
        {"lr.decay": IsNot("none", "constant")},
        "the decay takes the rest of the run",
    ),
    Rule(
        "train.target_accuracy",
        Is(None),
        {"step_fn": Is(True), "heldout": Is(True)},
        "a step function gives no accuracy: without heldout= kf.log does",
    ),
    Rule("train.heldout_every", Is(None), {"heldout": Is(False)}, "heldout= is what is evaluated"),
    Rule("metrics", Is(None), {"heldout": Is(False)}, "heldout= is what they are computed on"),
    Rule("metrics", Is(None), {"step_fn": Is(True)}, "a step function keeps its output; let it return (loss, figures)"),
    Rule("checkpoint.every_steps", Is(None), {"checkpoint.dir": Is(None)}, "there is no folder to write to"),
    Rule("checkpoint.resume", IsNot("auto"), {"checkpoint.dir": Is(None)}, "there is no folder to look in"),
    Rule("train.save_model", IsNot(True), {"checkpoint.dir": Is(None), "run_dir": Is(None)}, "there is no folder"),
)


def broken(facts: Facts) -> Iterable[Rule]:
    """Yields the rules that refuse these facts."""
    return (rule for rule in RULES if rule.is_broken(facts))


def check(facts: Facts, shell: bool = False) -> None:
    """Raises ConfigError where a rule refuses the facts, and where the policy sets a mode that one refuses.

    shell: how the message spells settings and values.
    """
    for rule in broken(facts):
        raise ConfigError(rule.message(facts, shell))
    for mode in facts.get("policy.modes", ()):
        with_mode = {**facts, "comm.sync": mode}
        for rule in broken(with_mode):
            raise ConfigError(f"{_shown('policy', facts, shell)}: it sets {rule.message(with_mode, shell)}")


def policy_facts(policy: Any) -> dict[str, Any]:
    """Returns what rules ask of a `kfuse.policies.BasePolicy`."""
    return {
        "policy": type(policy).__name__,
        "policy.scaling": policy.lr_settings.get("scaling"),
        "policy.decay": policy.lr_settings.get("decay"),
        "policy.modes": tuple(policy.modes),
    }


def optimizer_facts(kind: type, name: str | None = None) -> dict[str, Any]:
    """Returns what rules ask of an optimizer's class. name: for messages, where kfuse's class wraps another one."""
    return {
        "optimizer": name or kind.__name__,
        "optimizer.shards_state": bool(getattr(kind, "shards_state", False)),
    }


def run_facts(steps: float | None, decay: str, decay_fraction: float) -> dict[str, Any]:
    """Returns what rules ask of a run of so many steps of the first batch size; None: unknown."""
    if steps is None:
        return {"run.steps": None}
    most = (1 - decay_fraction) * steps if decay == "wsd" else max(0, math.ceil(steps) - 1)
    return {"run.steps": steps, "run.warmup_most": most}
