"""Classes and functions that a configuration names by `_target_`: found, checked, called.

A node is a mapping: `_target_` is a dotted path, every other key an argument, which may be a node too. Nothing here
needs Hydra.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from kfuse.settings.tree import AT_SHELL, show

CLASS_GROUPS = ("model", "data", "optimizer", "policy", "launcher")
# The keys of the group data that are not arguments of its class.
LOADING = tuple(key.partition(".")[2] for key in AT_SHELL if key.startswith("data."))

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_SEQUENCES = (list, tuple, Sequence, Collection, Iterable)
_MAPPINGS = (dict, Mapping)


def class_arguments(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's node without the keys that are not arguments of its class."""
    return {name: value for name, value in node.items() if group != "data" or name not in LOADING}


def locate(path: object) -> Callable[..., Any]:
    """Returns the class or function at a dotted path, also in the working directory.

    Raises ValueError, in one line, if there is none.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")) or "." not in path:
        raise ValueError(f"_target_={path}: must be a dotted path, package.module.Class")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    name, *parts, last = path.split(".")
    try:
        found: Any = importlib.import_module(name)
        for part in parts:
            name = f"{name}.{part}"
            is_module = hasattr(found, "__path__") and importlib.util.find_spec(name) is not None
            found = importlib.import_module(name) if is_module else getattr(found, part)
        found = getattr(found, last)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"_target_={path}: {one_line(error)}") from error
    if not callable(found):
        raise ValueError(f"_target_={path}: must be a class or function, not something of type {type(found).__name__}")
    return typing.cast(Callable[..., Any], found)


def is_node(value: object) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_target_"}


def build(node: Mapping[str, Any], /, *first: Any, **supplied: Any) -> Any:
    """Calls what `_target_` names, and returns the result.

    The arguments are `first` by position, the node's own, and those of `supplied` that the signature names. Where a
    name is in both the node's value is used. An argument that is a node is built first.
    Raises ValueError if `_target_` names nothing that can be called, and whatever the call raises.
    """
    given = arguments(supplied_node(node, **supplied))
    own = {name: build(value) if is_node(value) else value for name, value in given.items()}
    return locate(node.get("_target_"))(*first, **own)


def supplied_node(node: Mapping[str, Any], /, **supplied: Any) -> dict[str, Any]:
    """Returns the node with those of `supplied` that its signature names: `build` makes the same of it without them."""
    known = parameters(locate(node.get("_target_")))
    return {name: value for name, value in supplied.items() if name in known} | dict(node)


def initial_weights(node: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The model's node without `init`, and `init`: the file with the weights to start from, or None.

    A class that has an argument `init` of its own gets it, as any other. Raises as `locate`.
    """
    if "init" in parameters(locate(node.get("_target_"))):
        return dict(node), None
    return {name: value for name, value in node.items() if name != "init"}, node.get("init")


def check_arguments(node: Mapping[str, Any], *first: Any, supplied: Collection[str] = ()) -> Callable[..., Any]:
    """Returns what `_target_` names, if its signature takes what `build` will call it with.

    first: what is given by position. supplied: arguments that it may take.
    Raises ValueError for an unknown argument, one of the wrong type (as annotated), and missing ones.
    """
    factory = locate(node.get("_target_"))
    if (signature := _signature(factory)) is None:
        return factory
    given, known = arguments(node), signature.parameters
    has = f"{getattr(factory, '__name__', node['_target_'])} has {', '.join(known) or 'no arguments'}"
    takes_any = any(each.kind == each.VAR_KEYWORD for each in known.values())
    for key, value in given.items():
        if key not in known and not takes_any:
            raise ValueError(f"{key}={show(value)}: no such argument; {has}")
        if not is_finite(value):
            raise ValueError(f"{key}={show(value)}: must be finite")
        if key in known and not fits(value, known[key].annotation):
            raise ValueError(f"{key}={show(value)}: must be {describe(known[key].annotation)}")
    try:
        signature.bind(*first, **{name: None for name in supplied if name in known} | given)
    except TypeError as error:
        raise ValueError(f"{error}; {has}") from error
    return factory


def parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns its parameters by name; none where it has no signature."""
    signature = _signature(factory)
    return {} if signature is None else signature.parameters


def _signature(factory: Callable[..., Any]) -> inspect.Signature | None:
    """Returns its signature, annotations evaluated where that is possible; None where it has none."""
    try:
        return inspect.signature(factory, eval_str=True)
    except (TypeError, ValueError):  # some built-ins have none
        return None
    except Exception:  # annotations may name what exists for type checkers only
        return inspect.signature(factory)


def is_finite(value: Any) -> bool:
    """Returns whether each number in a plain value is one that a float can hold."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, int | float) or abs(value) <= sys.float_info.max


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a plain value (as YAML has them) suits a type annotation. True where that is not known."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is None:
        return value is None
    if hint in list(_PLAIN):
        plain = isinstance(value, int | float if hint is float else hint)
        return plain and (hint is bool or not isinstance(value, bool))
    if (origin or hint) in _SEQUENCES:
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and args[-1:] != (...,):
            return len(value) == len(args) and all(map(fits, value, args))
        return not args or all(fits(item, args[0]) for item in value)
    return (origin or hint) not in _MAPPINGS or isinstance(value, Mapping)


def describe(hint: Any) -> str:
    """Returns a type annotation in words, for example "a list of 2: a number, a number"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe, args)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if hint in list(_PLAIN):
        return _PLAIN[hint]
    if (origin or hint) in _SEQUENCES:
        if origin is tuple and args[-1:] != (...,):
            return f"a list of {len(args)}: " + ", ".join(map(describe, args))
        return f"a list, each {describe(args[0])}" if args else "a list"
    return "a mapping" if (origin or hint) in _MAPPINGS else str(getattr(hint, "__name__", hint))


def one_line(error: BaseException) -> str:
    """Returns an exception as "Type: message", in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
