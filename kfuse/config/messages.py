"""Hydra's and OmegaConf's errors in one line: the key, its value, and what it must be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from kfuse.config.instantiate import did_you_mean, one_line
from kfuse.config.schema import CLASS_GROUPS, SETTINGS

# What other tools call a setting.
_ALIASES = {
    "learning_rate": "lr.base",
    "lr": "lr.base",
    "batch": "batch.size",
    "bs": "batch.size",
    "workers": "workers.count",
    "num_workers": "workers.count",
    "nproc_per_node": "workers.count",
    "max_steps": "train.steps",
    "resume": "checkpoint.resume",
    "output_dir": "hydra.run.dir",
    "run_dir": "hydra.run.dir",
}


def explain(error: BaseException) -> str:
    """Returns one line for an error raised while a configuration is composed or read."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: must be key=value, quoted where it holds spaces or ,[]{{}}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not error.options:
            return _lines(error)[0]
        return f"{group}={option}: must be one of {', '.join(error.options)}{did_you_mean(option, error.options)}"
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error, "")
    if isinstance(error, ConfigCompositionException):
        first = _lines(error)[0]
        if isinstance(error.__cause__, OmegaConfBaseException):
            override = re.match(r"Error merging override (.*)", first)
            return _omegaconf(error.__cause__, override.group(1) if override else "")
        if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", first):
            return f"{ambiguous.group(1)}: must be one value; a list needs [brackets], a sweep -m"
        if twice := re.match(r"Multiple values for ([^. ]+)", first):
            group = twice.group(1)
            return f"{group}: has a value already; must be {group}=OPTION, without a plus"
        return " ".join(_lines(error))
    if isinstance(error, OSError):
        where = "another run directory: hydra.run.dir=DIR, for a sweep hydra.sweep.dir=DIR"
        return f"{error.filename}: cannot be written: {error.strerror}; choose {where}"
    if isinstance(error, HydraException | ValueError):
        return " ".join(_lines(error))
    return one_line(error)


def explain_flag(flag: str, after: str | None) -> str:
    """Returns one line for `--epochs 5` or `--epochs=5`, with the setting that may be meant.

    after: the next argument of the command line, if there is one.
    """
    name, equals, value = flag.lstrip("-").partition("=")
    if not equals and after is not None and not after.startswith("-") and "=" not in after:
        value = after
    word = name.replace("-", "_")
    known = {key.replace(".", "_"): key for key in SETTINGS} | {group: group for group in (*CLASS_GROUPS, "comm")}
    # The last part of a key alone, unless two keys share it (batch.min, workers.min).
    last = [key.rpartition(".")[2] for key in SETTINGS]
    known |= {name: key for name, key in zip(last, SETTINGS, strict=True) if last.count(name) == 1}
    known |= _ALIASES
    close = [word] if word in known else difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    key = name if name in SETTINGS else known[close[0]] if close else None
    meant = f" (did you mean {key}={value or '...'}?)" if key else ""
    return f"{flag}: no such flag; must be key=value, without dashes{meant}"


def _omegaconf(error: OmegaConfBaseException, override: str) -> str:
    key = str(error.full_key or error.key or "")
    reason = _lines(error)[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: a value is needed ({key}=...)"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error, key)
    if key in SETTINGS and override:
        return f"{override}: must be {SETTINGS[key].allowed}"
    below = [name for name in SETTINGS if name.startswith(f"{key}.")]
    if below and override:
        return f"{override}: {key} is a section; set its keys: {', '.join(below)}"
    return f"{override or key}: {reason}"


def _unknown_key(error: OmegaConfBaseException, key: str) -> str:
    parent, _, name = key.rpartition(".")
    siblings = [str(k) for k in error.parent_node] if isinstance(error.parent_node, DictConfig | Mapping) else []
    everywhere = [*SETTINGS, *siblings]
    # A key given without its section (`size=8`) is as common as a misspelt one.
    suggestion = did_you_mean(name, siblings).replace("mean ", f"mean {parent}." if parent else "mean ")
    at_home = [k for k in SETTINGS if k.rpartition(".")[2] == name]
    if not suggestion and at_home:
        suggestion = f" (did you mean {at_home[0]}?)"
    there = f"; keys of {parent}: {', '.join(siblings)}" if parent else ""
    return f"{key}: no such key{suggestion or did_you_mean(key, everywhere)}{there}"


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
