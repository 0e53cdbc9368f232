"""Which combinations of settings are refused, and docs/support.md, which says so. tests/test_support.py and
tests/test_support_policies.py ask the code.

PYTHONPATH=.:tests python tests/support_page.py > docs/support.md
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import support_policies
from support import AXES, CASES, Case
from support_policies import Choice

PAGE = Path(__file__).parents[1] / "docs" / "support.md"


@dataclass(frozen=True)
class Rule:
    """Values of two axes that are refused together, whatever the other axes say."""

    together: dict[str, tuple[str, ...]]
    """By axis."""
    why: str
    when: str
    """What refuses them in a script."""
    message: str
    """`general`."""
    command_line: str = ""
    """Its message, where that is another one."""

    def refuses(self, case: Case | Choice) -> bool:
        return all(getattr(case, axis) in values for axis, values in self.together.items())


def general(message: str) -> str:
    """A message with "..." for the values that differ within a rule."""
    message = re.sub(r"([\w.]+)='?[^ ]*?'?: ", r"\1=...: ", message, count=1)
    return re.sub(r"comm\.sync=\S+$", "comm.sync=...", message)


_LOCAL = ("local:N", "local:N with outer steps", "sma")
_APART = (*_LOCAL, "pair")
_ELASTIC = ("elastic, mirror", "elastic, snapshot", "elastic, none")

RULES = (
    Rule(
        {"sync": _APART, "state": ("sharded",)},
        "Each worker updates a whole model of its own.",
        "kf.CommOptions",
        "comm.sync=...: must be ssgd with comm.state=sharded",
    ),
    Rule(
        {"sync": _APART, "reproducible": ("yes",)},
        "The models depend on the number of workers.",
        "kf.CommOptions",
        "comm.sync=...: must be ssgd with comm.reproducible=true",
    ),
    Rule(
        {"sync": ("pair",), "workers": ("fixed",)},
        "Workers are at different steps: a supervisor passes on what they decide.",
        "kf.fit, kf.DataLoader",
        "comm.sync=...: must be one of ssgd, local:N, sma without a supervisor (torchrun, one process), which passes "
        "on decisions between workers at different steps: kfuse and kfuse-run have one",
        "comm.sync=...: must be one of ssgd, local:N, sma with launcher=torchrun, which has no supervisor to pass on "
        "decisions between workers at different steps",
    ),
    Rule(
        {"sync": _LOCAL, "clip": ("GradScaler",)},
        "Each worker would find another scale.",
        "the first opt.step()",
        "GradScaler with comm.sync: must be ssgd, as in the other modes each worker would find another scale; autocast "
        "with bfloat16 needs no scaler",
    ),
    Rule(
        {"workers": _ELASTIC, "clip": ("GradScaler",)},
        "A worker that joins would begin with another scale.",
        "the first opt.step()",
        "GradScaler in a job whose workers may change: one that joins would scale its loss otherwise than the rest. "
        "Use autocast with bfloat16, which needs no scaler, or a fixed number of workers (torchrun)",
    ),
    Rule(
        {"state": ("sharded",), "schedule": ("allreduce", "tree")},
        "They bring each worker the whole sum; it needs its shard.",
        "kf.CommOptions",
        "comm.schedule=...: must be one of auto, all_to_all, reduce_scatter, symmetric with comm.state=sharded",
    ),
    Rule(
        {"state": ("sharded",), "optimizer": ("torch",)},
        "A torch optimizer updates whole tensors.",
        "the optimizer",
        "comm.state=...: kf.Optimizer has whole state only: use kf.FusedAdamW, kf.FusedSGD or kf.FusedLAMB, or "
        "comm.state=replicated",
        "optimizer._target_=...: must be kfuse.FusedAdamW, FusedSGD or FusedLAMB with comm.state=sharded",
    ),
    Rule(
        {"reproducible": ("yes",), "schedule": ("allreduce", "reduce_scatter", "tree")},
        "They add up in an order that depends on the number of workers.",
        "kf.CommOptions",
        "comm.schedule=...: must be one of auto, all_to_all, symmetric with comm.reproducible=true",
    ),
    Rule(
        {"reproducible": ("yes",), "precision": ("bf16 messages",)},
        "What is rounded to bf16 depends on the number of workers.",
        "kf.CommOptions",
        "comm.dtype=...: must be fp32 with comm.reproducible=true",
    ),
)


def refusing(case: Case) -> list[Rule]:
    """The rules that refuse the combination."""
    return [rule for rule in RULES if rule.refuses(case)]


_IN_LOOPS = "kf.fit, kf.DataLoader"

POLICY_RULES = (
    Rule(
        {"policy": ("seesaw", "compose"), "scaling": ("none", "adascale")},
        "Seesaw's rate follows the batch size by its root, or for SGD in proportion.",
        _IN_LOOPS,
        "lr_scaling=...: must be one of sqrt, linear with ...",
        "lr.scaling=...: must be one of sqrt, linear with policy._target_=...",
    ),
    Rule(
        {"policy": ("critical_batch",), "scaling": ("none",)},
        "The rate must follow the batch size.",
        _IN_LOOPS,
        "lr_scaling=...: must be one of sqrt, linear, adascale with ...",
        "lr.scaling=...: must be one of sqrt, linear, adascale with policy._target_=...",
    ),
    Rule(
        {"policy": ("seesaw", "compose"), "decay": ("cosine", "linear", "wsd")},
        "Seesaw is a decay: the rate would fall twice.",
        _IN_LOOPS,
        "decay=...: must be one of none, constant with ...",
        "lr.decay=...: must be one of none, constant with policy._target_=...",
    ),
    Rule(
        {"policy": ("seesaw", "compose"), "scheduler": ("torch's",)},
        "Seesaw is a decay: the rate would fall twice.",
        _IN_LOOPS,
        "scheduler=...: must be None with ..., a decay of its own",
    ),
    Rule(
        {"policy": ("curvature",), "optimizer": ("sgd", "torch")},
        "It needs Adam's second moments.",
        _IN_LOOPS,
        "CurvaturePolicy needs the second moments of kf.FusedAdamW or kf.FusedLAMB; ... gives none",
        "optimizer._target_=...: must be kfuse.FusedAdamW or kfuse.FusedLAMB with policy._target_=...",
    ),
    Rule(
        {"policy": ("curvature",), "state": ("sharded",)},
        "No worker has all second moments.",
        _IN_LOOPS,
        "comm.state=sharded: must be replicated with CurvaturePolicy, which needs all second moments",
        "comm.state=sharded: must be replicated with policy._target_=..., which needs all second moments",
    ),
    Rule(
        {"policy": ("sync_switch",), "state": ("sharded",)},
        "It begins with sma: rule 1.",
        _IN_LOOPS,
        "SyncSwitchPolicy: it sets comm.sync=sma: must be ssgd with comm.state=sharded",
        "policy._target_=...: it sets comm.sync=sma: must be ssgd with comm.state=sharded",
    ),
    Rule(
        {"policy": ("sync_switch",), "reproducible": ("yes",)},
        "It begins with sma: rule 2.",
        _IN_LOOPS,
        "SyncSwitchPolicy: it sets comm.sync=sma: must be ssgd with comm.reproducible=true",
        "policy._target_=...: it sets comm.sync=sma: must be ssgd with comm.reproducible=true",
    ),
)


def refusing_choice(choice: Choice) -> list[Rule]:
    """The rules that refuse the combination of a policy with other settings."""
    return [*(rule for rule in POLICY_RULES if rule.refuses(choice)), *refusing(choice.case)]


def is_said_by(message: str, said: str) -> bool:
    """Whether `said` is this message of a rule, with values in place of "..."."""
    return re.fullmatch(".+?".join(map(re.escape, message.split("..."))), said) is not None


SUPPORTED = [case for case in CASES if not refusing(case)]

_SETTINGS = {
    "sync": "`comm.sync`; outer steps: `comm.outer_lr`, `comm.outer_momentum`",
    "state": "`comm.state`",
    "schedule": "`comm.schedule`",
    "workers": "fixed: torchrun, one process. elastic: `kfuse`, `kfuse-run`; `elastic.redundancy`",
    "reproducible": "`comm.reproducible`",
    "precision": "`train.precision=fp32`, `bf16`, `bf16-true`; bf16 messages: `comm.dtype=bf16`",
    "clip": "`train.clip_norm`. GradScaler: torch's, in a script's own loop",
    "optimizer": "`optimizer`; `kf.FusedAdamW`, `kf.FusedSGD`, `kf.FusedLAMB`; torch: `kf.Optimizer` of any of torch's",
}

_POLICY_SETTINGS = {
    "policy": "`policy`; `kf.Hook`, `policy=` of `kf.DataLoader`. compose: here of seesaw and gns",
    "scaling": "`lr.scaling`, `lr_scaling=`",
    "decay": "`lr.decay`, `decay=`",
    "micro_batches": "`batch.micro_max`, `max_micro_batch=`: those of a batch that has become larger",
    "change": "`lr.change_warmup_steps`, `change_warmup_steps=`: how the rate rises after a change of the batch size",
    "scheduler": "`scheduler=` of a script",
}

_PAGE = """\
# Which settings go together

{supported} of the {count} combinations of these values are supported. The others are refused with a message,
before training starts or at the first step.

| | values | set by |
| --- | --- | --- |
{axes}
## What excludes what

Any value of the first column is refused together with any of the second. Everything else goes together.

| | | not with | because |
| --- | --- | --- | --- |
{rules}
## Policies and the learning rate

These go together with one another and with all of the above, but for what the second table excludes. (With GradScaler
they are not tested.)

| | values | set by |
| --- | --- | --- |
{policy_axes}
| | | not with | because |
| --- | --- | --- | --- |
{policy_rules}
Instead of `scheduler=`, a torch scheduler may be stepped in the body of a loop over `kf.DataLoader`. Beside seesaw
it is refused: `a torch scheduler that was made for this optimizer: must be None with SeesawPolicy, a decay of its own`.

A policy of your own says what it does not go with: `lr_settings()`, `modes` and `fisher_every` of `kf.BasePolicy`.

## On several GPUs

`comm.schedule=symmetric` needs several GPUs, and is not in the table. It goes with what `all_to_all` goes with, but not
with elastic workers, nor with bf16 messages: [schedules.md](schedules.md#symmetric-memory).
Experimental: no GPU has run it; `tests/gpu/test_symmetric.py` compares combinations with `all_to_all`, over doubles.

## What has no effect

- `comm.dtype` and `comm.schedule` with `local:N`, `sma` and `pair`: no gradients are sent.
- `elastic.redundancy` with replicated state, or with a fixed number of workers.
- `local:N` and `sma` on one worker, which trains as with `ssgd`, but for outer steps. So rule 4 needs several workers.
- `gns`, `norm_test`, `critical_batch` and `curvature` with `local:N`, `sma` and `pair` on several workers: there the
  gradient has no noise scale, and its moments are each worker's own. They ask for nothing. `goodput` asks for workers
  only, and `lr.scaling=adascale` has its smallest gain, min(1, k).
- `lr.change_warmup_steps` with `lr.scaling=none`: the rate does not follow the batch size.
- `autoscale`, and what other policies ask for as workers, with a fixed number of them: an event `clipped` says so.

## What is tested

- A script and the command line support or refuse each combination as this page says, with this message.
- `ssgd` on 1 to 4 workers ends within rounding of DistributedDataParallel with torch's optimizer (LAMB: of the paper's
  formula). With `comm.reproducible=true` the bits are the same for any number of workers, state and schedule.
- `local:N`, outer steps and `sma` on 1 to 4 workers end within rounding of the published update, computed with torch.
  `pair` has tests of its own: `tests/test_pair*.py`.
- A selection of elastic jobs loses a worker and goes on.
- Policies and settings of the learning rate, each two values together, train on two workers, which end with one model.
  With `comm.reproducible=true` one worker has the same bits (not with `goodput`, which decides by measured times).

`make test` trains with each two values together, `make test-all` with each three, and `pytest -m long
tests/test_support.py` with all combinations of a fixed number of workers. `tests/support_page.py` has the rules and
writes this page; `tests/test_support.py` and `tests/test_support_policies.py` compare the rules with the code.

## Messages

`...` stands for the value. The numbers are those of the rules.

| | refused by | message |
| --- | --- | --- |
{messages}"""


def _axes(values: dict[str, tuple[str, ...]], settings: dict[str, str]) -> str:
    """The rows of a table of axes."""
    return "".join(f"| **{axis}** | {'; '.join(values[axis])} | {setting} |\n" for axis, setting in settings.items())


def _rules(rules: tuple[Rule, ...], first: int) -> tuple[str, str]:
    """The rows of a table of rules, numbered from `first` on, and those of their messages."""
    rows = messages = ""
    for number, rule in enumerate(rules, first):
        sides = (f"{axis}: {'; '.join(values)}" for axis, values in rule.together.items())
        rows += f"| {number} | {' | '.join(sides)} | {rule.why} |\n"
        in_scripts = rule.command_line or {"clip", "scheduler"} & rule.together.keys()
        messages += f"| {number} | {rule.when}{'' if in_scripts else ', the command line'} | `{rule.message}` |\n"
        if rule.command_line:
            messages += f"| {number} | the command line | `{rule.command_line}` |\n"
    return rows, messages


def page() -> str:
    """docs/support.md."""
    rules, messages = _rules(RULES, 1)
    policy_rules, more = _rules(POLICY_RULES, len(RULES) + 1)
    return _PAGE.format(
        supported=len(SUPPORTED),
        count=len(CASES),
        axes=_axes(AXES, _SETTINGS),
        rules=rules,
        policy_axes=_axes(support_policies.AXES, _POLICY_SETTINGS),
        policy_rules=policy_rules,
        messages=messages + more,
    )


if __name__ == "__main__":
    sys.stdout.write(page())
