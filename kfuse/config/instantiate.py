"""Classes and functions that a configuration names by `_target_`: found, checked, called.

A node is a mapping: `_target_` is a dotted path, every other key an argument. Nothing here needs Hydra.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

_SEQUENCES = (list, tuple, Sequence, Collection, Iterable)


def locate(path: object) -> Callable[..., Any]:
    """The class or function at a dotted path. Raises ValueError, in one line, where there is none."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")) or "." not in path:
        raise ValueError(f"_target_={path}: must be a dotted path, package.module.Class")
    module, names = _import_longest(path)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            where = getattr(found, "__name__", type(found).__name__)
            raise ValueError(f"_target_={path}: {where} has no {name}{did_you_mean(name, dir(found))}")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"_target_={path}: must be a class or function, not something of type {kind}")
    return typing.cast(Callable[..., Any], found)


def _import_longest(path: str) -> tuple[types.ModuleType, list[str]]:
    """The longest prefix of `path` that is a module, imported, and the names after it."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            return importlib.import_module(name), parts[end:]
        except ModuleNotFoundError as error:
            # Absent itself, or inside something that is no package: then a shorter prefix is the module.
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise ValueError(f"_target_={path}: importing {name} needs {error.name}, not installed") from error
        except Exception as error:  # the module is the user's: it may raise anything
            raise ValueError(f"_target_={path}: importing {name} failed: {one_line(error)}") from error
    raise ValueError(f"_target_={path}: there is no module {parts[0]}")


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments: all but `_target_`."""
    return {name: value for name, value in node.items() if name != "_target_"}


def build(node: Mapping[str, Any], /, *first: Any, always: Mapping[str, Any] | None = None, **supplied: Any) -> Any:
    """Calls what `_target_` names with `first`, the node's arguments, `always`, and what it names of `supplied`.

    The node's arguments win. Raises ValueError where nothing is found, and whatever the call raises.
    """
    factory = locate(node.get("_target_"))
    known = _parameters(factory)
    fitting = {name: value for name, value in supplied.items() if known is not None and name in known}
    return factory(*first, **(fitting | dict(always or {}) | arguments(node)))


def check_arguments(
    node: Mapping[str, Any], supplied: Collection[str], first: Collection[str] = (), always: Collection[str] = ()
) -> Callable[..., Any]:
    """Returns what `_target_` names, once its signature takes what `build` will call it with.

    first: what is given by position, in words. always: arguments that it must take, by name or by **kwargs.
    Raises ValueError for an unknown argument, one of the wrong type (as annotated), and one that is missing.
    """
    factory = locate(node.get("_target_"))
    known = _parameters(factory)
    if known is None:
        return factory
    given = arguments(node)
    name = getattr(factory, "__name__", str(node["_target_"]))
    kinds = [p.kind for p in known.values()]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    positions = [n for n, p in known.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(first)]
    if len(positions) < len(first) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ValueError(f"{name} takes no argument by position, and is given {', '.join(first)}")
    by_name = [n for n, p in known.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_name = [n for n in by_name if n not in positions]
    for key in always:
        if key not in by_name and not takes_any:
            raise ValueError(f"{name} must take an argument {key}; it has {', '.join(by_name) or 'none'}")
    hints = _hints(factory)
    for key, value in given.items():
        if key not in by_name and not takes_any:
            raise ValueError(f"{key}={show(value)}: {name} has no argument {key}; it has {', '.join(by_name)}")
        if not all(map(math.isfinite, _numbers(value))):
            raise ValueError(f"{key}={show(value)}: must be finite")
        if key in hints and not fits(value, hints[key]):
            raise ValueError(f"{key}={show(value)}: must be {describe(hints[key])}")
    all_given = [*first, *given, *always, *supplied]
    missing = [n for n in by_name if known[n].default is inspect.Parameter.empty and n not in all_given]
    if missing:
        raise MissingArguments(name, missing, all_given)
    return factory


class MissingArguments(ValueError):
    """A class or function needs `names`, and is not given them."""

    def __init__(self, factory: str, names: Sequence[str], given: Sequence[str]) -> None:
        super().__init__(f"{factory} needs {', '.join(names)}, and is given {', '.join(given) or 'nothing'}")
        self.names = names


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-ins have none
        return None


def _numbers(value: Any) -> list[float]:
    """The floats in a plain value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, float) else []


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    annotated = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        return typing.get_type_hints(annotated)
    except Exception:  # annotations may name what exists for type checkers only
        return {}


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value (as YAML has them) suits a type annotation. True where that cannot be told."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if (origin or hint) in _SEQUENCES:
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and args[-1:] != (...,):
            return len(value) == len(args) and all(map(fits, value, args))
        return not args or all(fits(item, args[0]) for item in value)
    if (origin or hint) in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def describe(hint: Any) -> str:
    """A type annotation in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe, args)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in words:
        return words[hint]
    if (origin or hint) in _SEQUENCES:
        if origin is tuple and args[-1:] != (...,):
            return f"a list of {len(args)}: " + ", ".join(map(describe, args))
        return f"a list, each {describe(args[0])}" if args else "a list"
    if (origin or hint) in (dict, Mapping):
        return "a mapping"
    return str(getattr(hint, "__name__", hint))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean X?)"` where something known is close to `word`, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def show(value: object) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def one_line(error: BaseException) -> str:
    """An exception as `Type: message`, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
