"""Reads the words of a tool's command line: `kfuse plan jobs.yaml workers=4`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from omegaconf import OmegaConf

from kfuse.settings.tree import ConfigError, did_you_mean


def read_words(tool: str, words: Sequence[str], keys: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the words that are no `key=value`, in order, and the values by key, as texts.

    Raises ConfigError, which names the word, for a key that is not among `keys` and for one that is given twice.

    tool: as the command line has it, for messages: "kfuse plan". A word with no name before its `=`, such as the path
    runs/lr=0.1, is no `key=value`.
    """
    plain, given = list[str](), dict[str, str]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            plain.append(word)
        elif key not in keys:
            allowed = ", ".join(f"{each}=" for each in keys)
            raise ConfigError(f"{tool} {word}: must be one of {allowed}{did_you_mean(key, keys)}")
        elif key in given:
            raise ConfigError(f"{word}: must be given once")
        else:
            given[key] = text
    return plain, given


def plain_value(key: str, text: str) -> Any:
    """Returns the value of a text as YAML reads it: 3, 0.5, null, [1,2]. Raises ConfigError, in one line."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={text}"]))[key]  # type: ignore[index,call-overload]
    except Exception as error:  # of YAML
        raise ConfigError(f"{key}={text}: {str(error).splitlines()[0]}") from error
