"""Policies, optimizers and settings of the learning rate that do not go together: refused before training.

A script's training and the check of a configuration call the same functions. A message names the settings as its reader
has written them: see `Spelling`. What an optimizer can do is an attribute of its class: `tells_fisher`, `shards_state`.
A class without the attribute, as torch's own, cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfuse.comm.sync import Sync

if TYPE_CHECKING:
    from kfuse.policies.signals import BasePolicy


@dataclass(frozen=True)
class Spelling:
    """What messages call the policy, the optimizer and the settings. The defaults are those of a script."""

    policy: str
    """Its class."""
    optimizer: str
    """The torch optimizer's class, where kfuse's wraps one."""
    scaling: str = "lr_scaling"
    decay: str = "decay"
    no_moments: str = "{policy} needs the second moments of kf.FusedAdamW or kf.FusedLAMB; {optimizer} gives none"
    """The whole message: `{policy}` and `{optimizer}` stand for these two."""


def command_line(policy: str, optimizer: str) -> Spelling:
    """That of the command line. policy, optimizer: the dotted paths of the classes."""
    return Spelling(
        f"policy._target_={policy}",
        f"optimizer._target_={optimizer}",
        "lr.scaling",
        "lr.decay",
        "{optimizer}: must be kfuse.FusedAdamW or kfuse.FusedLAMB with {policy}",
    )


def refuse_rates(policy: BasePolicy, scaling: str, decay: str, scheduler: str | None, spelling: Spelling) -> None:
    """Raises ValueError where the policy is not right with these settings of the learning rate.

    scheduler: what messages call the torch scheduler; None: there is none. A policy that is a decay would be one beside
    it, and the rate would fall twice.
    """
    allowed = policy.lr_settings()
    for name, key, value in (("scaling", spelling.scaling, scaling), ("decay", spelling.decay, decay)):
        if name in allowed and value not in allowed[name]:
            raise ValueError(f"{key}={value}: must be one of {', '.join(allowed[name])} with {spelling.policy}")
    if scheduler is not None and "decay" in allowed:
        raise ValueError(f"{scheduler}: must be None with {spelling.policy}, a decay of its own")


def refuse_fisher(policy: BasePolicy, optimizer: type, sharded: bool, spelling: Spelling) -> None:
    """Raises ValueError where the policy needs the Fisher information, and the optimizer's state does not tell it."""
    if policy.fisher_every is None:
        return
    if not getattr(optimizer, "tells_fisher", False):
        raise ValueError(spelling.no_moments.format(policy=spelling.policy, optimizer=spelling.optimizer))
    if sharded:
        raise ValueError(
            f"comm.state=sharded: must be replicated with {spelling.policy}, which needs all second moments"
        )


def refuse_modes(policy: BasePolicy, check: Callable[[str], object], spelling: Spelling) -> None:
    """Raises ValueError where the policy asks for a mode of synchronisation that other settings rule out.

    check: raises ValueError for such a mode.
    """
    for mode in policy.modes:
        try:
            check(mode)
        except ValueError as error:
            raise ValueError(f"{spelling.policy}: it sets {error}") from error


def refuse_pair_alone(sync: str, elastic: bool) -> None:
    """Raises ValueError for the mode `pair` in a job without a supervisor. elastic: the job has one."""
    if Sync.parse(sync).mode == "pair" and not elastic:
        raise ValueError(
            "comm.sync=pair: must be one of ssgd, local:N, sma without a supervisor (torchrun, one process), which "
            "passes on decisions between workers at different steps: kfuse and kfuse-run have one"
        )


def refuse_decay(decay: str, warmup_steps: float, total: float | None, decay_fraction: float, prefix: str = "") -> None:
    """Raises ValueError where a run of `total` steps has no room for this warm-up and decay.

    total: in steps of the first batch size; None: unknown. prefix: of the settings' names, `lr.` on the command line.
    """
    if decay in ("none", "constant"):
        return
    if total is None:
        raise ValueError(f"{prefix}decay={decay}: must be none or constant in a run without a set length")
    setting = f"{prefix}warmup_steps={warmup_steps}"
    if decay == "wsd" and warmup_steps > (1 - decay_fraction) * total:
        most = f"{1 - decay_fraction:g} of the run's {total:.0f} steps"
        raise ValueError(f"{setting}: must be at most {most} with {prefix}decay=wsd")
    if not total > warmup_steps:
        raise ValueError(f"{setting}: must be below the run's {total:.0f} steps with {prefix}decay={decay}")
