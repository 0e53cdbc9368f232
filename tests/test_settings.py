"""The tree of settings, and the rules: each is refused where it says so, in scripts and at the shell alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfuse as kf
from kfuse.settings import rules
from kfuse.settings.declared import CommSettings, Setting
from kfuse.settings.tree import (
    AT_SHELL,
    SCRIPTS_ONLY,
    SETTINGS,
    CommandSettings,
    ConfigError,
    JobSettings,
    Leaf,
    TrainSettings,
    resolved,
    spell,
)

DEFAULTS = {leaf.key: leaf.default for leaf in SETTINGS.values()}


@given(st.integers(), st.none() | st.integers(), st.none() | st.integers())
def test_bounds_include_least_and_most(value: int, least: int | None, most: int | None) -> None:
    leaf = Leaf("x", int, False, Setting(0, "", at_least=least, at_most=most))
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    assert leaf.allows(value) == (low <= value <= high)


@given(st.floats())
def test_above_and_below_are_strict_and_numbers_are_finite(value: float) -> None:
    assert Leaf("x", float, False, Setting(1.0, "", above=0.5)).allows(value) == (0.5 < value < math.inf)
    assert Leaf("x", float, False, Setting(1.0, "", below=0.5)).allows(value) == (-math.inf < value < 0.5)


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("batch_size", 1e3, 1000),
        ("batch_size", True, None),
        ("batch_size", "4", None),
        ("batch_size", None, None),
        pytest.param("lr_base", 10**400, None, id="too large for a float"),
        ("comm_reproducible", 1, None),
        ("comm_sync", "local:8", "local:8"),
        ("comm_sync", "local:0", None),
        ("comm_sync", 8, None),
        ("comm_schedule", "my.Transport", "my.Transport"),
        ("comm_schedule", "ring", None),
    ],
)
def test_a_value_is_taken_in_the_settings_type(name: str, value: Any, becomes: Any) -> None:
    if becomes is not None:
        assert SETTINGS[name].checked(value) == becomes
        return
    with pytest.raises(ConfigError, match=f"^{SETTINGS[name].key}="):
        SETTINGS[name].checked(value, shell=True)


def test_every_default_is_allowed_and_every_setting_has_one_key() -> None:
    assert all(leaf.allows(leaf.default) for leaf in SETTINGS.values())
    assert len(AT_SHELL) + len(SCRIPTS_ONLY) == len(SETTINGS)
    assert all(spell(leaf.key, shell=False) == leaf.name for leaf in SETTINGS.values())
    groups = (CommSettings, JobSettings, CommandSettings, TrainSettings)
    assert {name for group in groups for name in group.__annotations__} == SETTINGS.keys()


def test_an_unknown_setting_is_named_with_the_one_that_may_be_meant() -> None:
    with pytest.raises(TypeError, match=r"kf\.fit takes no micro= \(did you mean micro_batch\?\)"):
        resolved("kf.fit", TrainSettings, {"micro": 3})


AUDITS = {"comm.reproducible": True, "comm.audit_every": 5, "comm.audit_on_corruption": "replace"}
# What each rule refuses, beside the defaults.
REFUSED: list[dict[str, Any]] = [
    {"batch.micro": 64},
    {"batch.micro": 8, "batch.micro_max": 12},
    {"batch.min": 33},
    {"batch.max": 16},
    {"workers.min": 2},
    {"workers.count": 3, "workers.max": 2},
    {"workers.count": 1, "job.workers": 2},
    {"workers.count": 4, "workers.max": 4, "job.gpus": 2},
    {"comm.state": "sharded", "comm.sync": "local:4"},
    {"job.ranks": 2, "batch.micro": 5},
    {"job.ranks": 2, "comm.sync": "local:4"},
    {"job.ranks": 2, "comm.state": "sharded"},
    {"job.ranks": 2, "comm.tree": "latency"},
    {"job.ranks": 2, "comm.audit_every": 5, "comm.reproducible": True},
    {"job.ranks": 2, "train.target_accuracy": 0.9, "heldout": False},
    {"job.ranks": 2, "optimizers": 2},
    {"job.ranks": 2, "streams": 32},
    {"job.ranks": 2, "weight_fn": True},
    {"job.ranks": 2, "data": rules.NO_SEEK, "train.steps": 9},
    {"job.ranks": 2, "statistics.curvature_every": 5, "optimizer": "AdamW"},
    {"comm.reproducible": True, "comm.sync": "sma"},
    {"comm.sync": "pair", "job": "fixed"},
    {"comm.sync": "pair:1,8", "job": "fixed"},
    {"comm.state": "sharded", "comm.schedule": "allreduce"},
    {"comm.reproducible": True, "comm.schedule": "my.Transport"},
    {"comm.schedule": "symmetric", "job": "elastic"},
    {"comm.schedule": "symmetric", "job.gpus": None},
    {"comm.reproducible": True, "comm.dtype": "bf16"},
    {"comm.schedule": "symmetric", "comm.dtype": "bf16"},
    {"comm.schedule": "allreduce", "comm.dtype": "int8"},
    {"comm.audit_every": 5},
    {"comm.audit_on_corruption": "stop"},
    {**AUDITS, "workers.max": 3, "job": "fixed"},
    {"observe.log_dir": "logs", "job": "fixed"},
    {**AUDITS, "workers.max": 2},
    {"comm.state": "sharded", "optimizer": "SGD", "optimizer.shards_state": False},
    *(
        {"statistics.curvature_every": 9, name: value}
        for name, value in {
            "optimizer": "FusedLAMB",
            "optimizers": 2,
            "comm.state": "sharded",
            "comm.sync": "sma",
            "train.precision": "bf16-true",
            "weight_fn": True,
            "streams": 32,
        }.items()
    ),
    {"lr.scaling": "none", "policy": "SeesawPolicy", "policy.scaling": ("sqrt", "linear")},
    {"lr.decay": "cosine", "policy": "SeesawPolicy", "policy.decay": ("none",)},
    {"scheduler": "StepLR", "policy.decay": ("none",)},
    {"streams": 8},
    {"streams": 32, "comm.sync": "sma"},
    {"streams": 32, "weight_fn": True},
    {"optimizers": 2, "comm.state": "sharded"},
    {"optimizers": 2, "comm.sync": "local:2"},
    {"optimizers": 2, "lr.scaling": "adascale"},
    {"scaler": True, "comm.sync": "sma"},
    {"scaler": True, "job": "elastic"},
    {"scaler": True, "comm.state": "sharded"},
    {"train.epochs": 3, "data": "stream", "train.steps": 3},
    {"train.steps": None, "data": "stream"},
    {"comm.audit_every": 5, "comm.reproducible": True, "data": rules.NO_SEEK, "train.steps": 3},
    {"statistics.curvature_every": 9, "data": rules.NO_SEEK, "train.steps": 3},
    {"statistics.curvature_every": 9, "batch.size": 16, "batch.micro": 8, "policy": "NoPolicy"},
    {"lr.decay": "linear", "run.steps": None},
    {"lr.decay": "linear", "lr.warmup_steps": 5, "run.steps": 5.0, "run.warmup_most": 4},
    {"train.target_accuracy": 0.9, "step_fn": True, "heldout": True},
    {"train.heldout_every": 5, "heldout": False},
    {"metrics": "top", "heldout": False},
    {"metrics": "top", "step_fn": True},
    {"checkpoint.every_steps": 5},
    {"checkpoint.resume": "auto"},
    {"train.save_model": True},
]


def test_each_rule_refuses_what_it_says_and_nothing_else_does() -> None:
    assert list(rules.broken(DEFAULTS)) == []
    found = []
    for facts in REFUSED:
        [rule] = rules.broken(DEFAULTS | facts)
        found.append(rule)
        for shell in (True, False):
            message = rule.message(DEFAULTS | facts, shell)
            key = spell(rule.key, shell)
            assert message.startswith(f"{key}=") and ": must be " in message and "\n" not in message
    assert len(set(map(id, found))) == len(rules.RULES)


def test_a_policy_that_sets_a_mode_which_a_rule_refuses_is_refused() -> None:
    facts = DEFAULTS | {"comm.reproducible": True, "policy": "Mine", "policy.modes": ("ssgd", "sma")}
    said = r"^policy=Mine: it sets comm\.sync=sma: must be ssgd with comm\.reproducible"
    with pytest.raises(ConfigError, match=said):
        rules.check(facts, shell=True)


def test_a_script_is_refused_before_it_joins() -> None:
    with pytest.raises(ConfigError, match=r"^comm_dtype=bf16: must be fp32 with comm_reproducible=True \("):
        kf.init(comm_reproducible=True, comm_dtype="bf16")
