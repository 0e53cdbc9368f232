"""Writes docs/reference.md: `python -m kfuse.tools.reference > docs/reference.md`. A test compares the two."""

from __future__ import annotations

import importlib.resources
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields

from kfuse.policies.signals import Signals
from kfuse.settings.groups import CLASS_GROUPS
from kfuse.settings.rules import RULES
from kfuse.settings.tree import SCRIPTS_ONLY, SECTIONS, SETTINGS, CommandSettings, show
from kfuse.statistics.figures import FIGURES, METRICS, StepContext

_VALUE = "a pair [before, after]"
EVENTS = {
    "view": (
        "A list of workers trains together from this step on",
        "generation, workers (rank, pid and host of each), reason (start, restart, grow, shrink, replace, failure, "
        "quit or stop), pause_s = regroup_s + transfer_s",
    ),
    "decision": (
        "A policy or script has changed a setting",
        f"batch_size, lr, workers or sync ({_VALUE}), topology, tree (a name or a list of parents; with why, where the "
        "workers have changed and a list was dropped), or replace (a worker's number)",
    ),
    "schedule": (
        "In a new view messages were measured, and schedule and bucket size were chosen, where `comm.schedule=auto` or "
        "`comm.bucket_mb=null` leaves a choice",
        "schedule, bucket_mb, workers, predicted_s (by schedule: seconds a step), probe_s, reason",
    ),
    "clipped": ("A request was out of range, or could not be met", "note"),
    "policy_failed": (
        "The policy has raised an error on a worker; the job ends",
        "worker, method, why, traceback",
    ),
    "input_bound": (
        "A policy's request for more workers was refused: training is input-bound, so they would wait for data too",
        "workers (a pair [present, requested]), waiting (part of the time that the leader waits for data)",
    ),
    "evaluation": ("The model was evaluated on the held-out samples", "loss, accuracy, metrics (by name)"),
    "skipped": ("The step made no update", "why"),
    "interference": (
        "Something else slows the workers' messages: a majority sees less than 0.8 of the usual throughput",
        "ranks (that voted for it)",
    ),
    "links": (
        "The links between the workers were measured",
        "latency_s, bytes_per_s (by rank and rank; null from a rank to itself)",
    ),
    "left_out": (
        "With `comm.sync=pair`, after a loss or as the job stops: workers that were behind go on from the furthest "
        "one's state, and use none of their samples up to there",
        "workers (numbers), steps (how many each was behind)",
    ),
    "straggler": ("A worker has become slow", "worker, rank, throughput (over the median worker's)"),
    "corruption": (
        "A micro-batch was run again on another worker, with other gradients (`comm.audit_every`)",
        "micro_batch; worker and rank of the one that computes wrongly, null where that is unknown; note; "
        "runs (worker, rank, pid, host and digest of each)",
    ),
    "ready": ("A worker is ready to join", "worker, boot_s"),
    "waiting": ("Some workers are ready, others are late", "workers, late (numbers of both)"),
    "quit": ("A worker's script has ended before training did", "worker, pid, rank, how"),
    "went_back": (
        "Parts of the sharded optimizer state were lost with their workers: training goes on from an earlier step",
        "to (snapshot or checkpoint), steps (that are made again), why",
    ),
    "failure": ("A worker is lost; or, with why, the job has failed", "worker, pid, host, rank, how; why"),
    "records_lost": (
        "Lines of these steps are missing, in whole or in part: too many waited, or the worker that had them was lost",
        "steps (first and last), lines, why",
    ),
    "loader_lost": ("A loader process of a worker has ended unexpectedly", "worker, pid (the loader's), how"),
    "checkpoint": ("A checkpoint is written", "path, bytes, wall_s (of writing), snapshot_s (of the training loop)"),
    "checkpoint_failed": ("A checkpoint could not be written", "why"),
    "checkpoint_rejected": ("A checkpoint that is not whole is passed over", "path, why"),
    "resumed": ("Training resumes from a checkpoint", "path"),
    "started": ("There was no checkpoint to resume from: training starts from the beginning", "note"),
    "model_failed": ("A file of the model (model.pt, model.safetensors or best.pt) could not be written", "path, why"),
    "note": ("An argument of the script has no effect here", "note"),
    "disk": ("Records could not be written for a while", "note"),
}
"""Each kind of event: what has happened, and its fields besides time, step and kind."""


def reference() -> str:
    """Returns the text of docs/reference.md: settings, options of the groups, figures of a step, events."""
    parts = [
        "# Reference",
        "Written by `python -m kfuse.tools.reference > docs/reference.md`.",
        "## Settings",
        "`kfuse section.name=value ...`; `null` is no value. A sweep (`-m`) takes several values: `batch.size=32,64`.",
        *_settings(),
        "## Options of the groups",
        "`kfuse group=option`. The keys are arguments of the option's class: `group.key=value`; `???` must be given.",
        *_options(),
        "## Figures of a step",
        "Policies see the `Signals` of each step. `metrics.jsonl` has a line for each step, or each `observe.every`-th."
        " None, in the file null, is unknown. Signals that are no column are in a line's `signals`, in each line where "
        "they have changed: `kfuse replay` needs them. [statistics.md](statistics.md) explains the statistics.",
        _figures(),
        "## Events",
        "`events.jsonl` has a line for each event: `time` (Unix), `step`, `kind`, and the fields of its kind. Fields "
        "whose names end with `_s` are in seconds.",
        _table(("kind", "what has happened", "fields"), ((f"`{kind}`", *about) for kind, about in EVENTS.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _settings() -> Iterable[str]:
    """A table for each section of the settings, with the section's docstring."""
    for section, about in {"": "", **SECTIONS}.items():
        own = [leaf for leaf in SETTINGS.values() if leaf.key.rpartition(".")[0] == section]
        if section:
            yield f"### {section}"
            yield about
        yield _table(
            ("`kfuse`", "Python", "type", "default", "must be", "what it is"),
            (
                (
                    "" if leaf.name in SCRIPTS_ONLY else f"`{leaf.key}`",
                    f"`{leaf.name}`" if leaf.name not in CommandSettings.__annotations__ else "",
                    leaf.kind.__name__,
                    f"`{show(leaf.default)}`",
                    leaf.allowed,
                    leaf.setting.help,
                )
                for leaf in own
            ),
        )


def _options() -> Iterable[str]:
    """Each option's file, with its comments."""
    configs = importlib.resources.files("kfuse.configs")
    for group in (*CLASS_GROUPS, "comm"):
        for file in sorted(configs.joinpath(group).iterdir(), key=lambda file: file.name):
            yield f"### {group}={file.name.removesuffix('.yaml')}"
            yield f"```yaml\n{file.read_text().strip()}\n```"


def _figures() -> str:
    """One table of the fields of `Signals` and the columns of metrics.jsonl."""
    signals = {each.name: each.metadata for each in fields(Signals)}
    types = {each.name: each.type for kind in (StepContext, Signals) for each in fields(kind)}
    rows = []
    for name in dict.fromkeys([*METRICS, *signals]):
        about = FIGURES.get(name) or signals[name]
        where = [word for word, there in (("Signals", signals), ("metrics.jsonl", METRICS)) if name in there]
        rows.append((f"`{name}`", str(types[name]), about["unit"], ", ".join(where), about["help"]))
    for name, value in vars(Signals).items():
        if isinstance(value, property):
            rows.append((f"`{name}`", "int", "steps", "Signals", (inspect.getdoc(value) or "").rstrip(".")))
    return _table(("figure", "type", "unit", "in", "what it is"), rows)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_SUPPORT = """\
# Which settings go together

Written by `python -m kfuse.tools.reference support > docs/support.md` from `kfuse/settings/rules.py`. All settings go
together but for what follows; what does not is refused before training starts (a GradScaler at the first step), with
one line: `KEY=VALUE: must be ... with OTHER=VALUE (why)`. In a script the keys are spelt as there: `comm_sync`.

`job`: fixed without a supervisor (torchrun, one process), elastic with one (`kfuse`, `kfuse-run`). `scaler`: torch's
GradScaler. `policy.scaling`, `policy.decay`: what a policy accepts, `lr_settings()` of kf.BasePolicy. A mode that a
policy sets (`modes`) must be allowed too. `run.warmup_most`: the steps that the decay leaves for a warm-up.

{rules}

## What has no effect

- `comm.dtype` and `comm.schedule` with `local:N`, `sma` and `pair`: no gradients are sent.
- `elastic.redundancy` with replicated state, or with a fixed number of workers.
- `local:N` and `sma` on one worker, which trains as with `ssgd`, but for outer steps.
- `gns`, `norm_test`, `critical_batch` and `curvature` with `local:N`, `sma` and `pair` on several workers: there the
  gradient has no noise scale, and its moments are each worker's own. They ask for nothing. `goodput` asks for workers
  only, and `lr.scaling=adascale` has its smallest gain, min(1, k).
- `lr.change_warmup_steps` with `lr.scaling=none`: the rate does not follow the batch size.
- `autoscale`, and what other policies ask for as workers, with a fixed number of them: an event `clipped` says so.

## What is tested

- `tests/test_settings.py`: each rule refuses what it says, and nothing else does. `tests/test_support*.py`: scripts and
  the command line refuse what the rules do, and take each two values that no rule excludes.
- `ssgd` on 1 to 4 workers ends within rounding of DistributedDataParallel with torch's optimizer (LAMB: of the paper's
  formula). With `comm.reproducible=true` the bits are the same for any number of workers, state and schedule.
- `local:N`, outer steps and `sma` on 1 to 4 workers end within rounding of the published update, computed with torch.
  `pair` has tests of its own: `tests/test_pair*.py`.
- A selection of elastic jobs loses a worker and goes on.
"""


def support_page() -> str:
    """Returns the text of docs/support.md, of which the rules are the table."""
    rows = []
    for rule in RULES:
        facts = {key: "..." for key in (*rule.when, rule.key)}
        needs = rule.must.needs()
        must = " ".join([getattr(rule.must, "how", "one of"), *(f"`{key}`" for key in needs)]) if needs else ""
        when = " and ".join(f"`{key}`: {condition.words(facts, True)}" for key, condition in rule.when.items())
        rows.append((f"`{rule.key}`", must or rule.must.words(facts, True), when, rule.why))
    return _SUPPORT.format(rules=_table(("", "must be", "with", "because"), rows))


if __name__ == "__main__":
    sys.stdout.write(support_page() if sys.argv[1:] == ["support"] else reference())
