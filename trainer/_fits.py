"""Whether a value of the configuration fits the annotation of the argument that it is for; nothing is built.

What cannot be told is let through: an annotation that only type checkers can read, what a function returns.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
import sys
import types
import typing
from dataclasses import is_dataclass
from enum import Enum
from os import PathLike
from typing import Any, Literal

from trainer._paths import nearest
from trainer.errors import UserError
from trainer.ranges import Rule


def locate(dotted: str) -> Any:
    """The object that a `_target_` names; a `UserError` says which part of the name does not exist."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name or name.startswith(f"{error.name}."):
                continue
            raise UserError(f"{dotted} needs the package '{error.name}', which is not installed; install it "
                            f"or choose another option") from error
        except ImportError as error:
            raise UserError(f"{dotted} cannot be imported: {error}") from error
        for part in parts[length:]:
            if not hasattr(found, part):
                raise UserError(f"{name} has no '{part}'{nearest(part, _members(found))}")
            found, name = getattr(found, part), f"{name}.{part}"
        return found
    raise UserError(f"there is no module '{parts[0]}'; a _target_ is module.Class")


def mismatch(value: Any, hint: Any, recursive: bool = True, key: str = "") -> str | None:
    """What is wrong with `value` for the annotation `hint`, or None; true and false are no numbers. `key` is
    what is to be set to another one."""
    if _fits(value, hint, recursive):
        return None
    as_list = type(value) in (str, int, float) and _fits([value], hint, recursive)
    advice = f"; a list is written {key}{'=' if key else ''}[{value}]" if as_list else ""
    return f"must be {_name(hint)}, but is {shown(value, recursive)}{advice}"


def _fits(value: Any, hint: Any, recursive: bool) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, (str, typing.TypeVar)):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each, recursive) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is typing.Annotated:
        node = isinstance(value, dict)
        return _fits(value, inner[0], recursive) and (node or all(
            rule.fits(value) for rule in inner[1:] if isinstance(rule, Rule)))
    if origin in (typing.Final, typing.ClassVar):
        return not inner or _fits(value, inner[0], recursive)
    if hasattr(hint, "__supertype__"):
        return _fits(value, hint.__supertype__, recursive)
    if hint is None or hint is type(None) or value is None:
        return value is None and hint in (None, type(None))
    if getattr(hint, "_is_protocol", False) or typing.is_typeddict(hint):
        return isinstance(value, dict)
    if recursive and isinstance(value, dict) and "_target_" in value:
        return _object_fits(value, origin or hint)
    return _plain_fits(value, origin or hint, inner, recursive)


def _plain_fits(value: Any, kind: Any, inner: tuple[Any, ...], recursive: bool) -> bool:
    if not inspect.isclass(kind):
        return True
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, (int, float)):
        return kind in (int, float, complex) and (isinstance(value, int) or kind is not int) \
            and (kind is int or abs(value) <= sys.float_info.max)  # as JSON may hold a longer integer
    if isinstance(value, str):
        return kind is str or issubclass(kind, (PathLike, Enum))
    if isinstance(value, dict):
        return issubclass(dict, kind) and (len(inner) < 2 or all(_fits(each, inner[1], recursive)
                                                                 for each in value.values()))
    if not any(issubclass(sequence, kind) for sequence in (list, tuple, set, frozenset)):
        return False
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(_fits(each, part, recursive) for each, part
                                                in zip(value, inner, strict=True))
    return not inner or all(_fits(each, inner[0], recursive) for each in value)


def _object_fits(node: dict[str, Any], kind: Any) -> bool:
    """Whether what a node makes may stand where `kind` is expected; what cannot be told is let through."""
    if not inspect.isclass(kind):
        return True
    try:
        target = functools.partial if node.get("_partial_", False) else locate(str(node["_target_"]))
    except UserError:
        return True  # told at the node itself
    return not inspect.isclass(target) or issubclass(target, kind)


def parameters_of(target: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters with their annotations evaluated; None when the target does not tell (built-ins)."""
    try:
        found = dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None
    function = target.__init__ if inspect.isclass(target) else inspect.unwrap(target)
    space = getattr(function, "__globals__", {})
    hints: dict[str, Any] = {}
    if is_dataclass(target):
        for owner in reversed(target.__mro__):
            owned = vars(importlib.import_module(owner.__module__))
            written = vars(owner).get("__annotations__", {})
            hints |= {name: _evaluated(hint, owned) for name, hint in written.items()}
    return {name: parameter.replace(annotation=hints.get(name, _evaluated(parameter.annotation, space)))
            for name, parameter in found.items()}


def _evaluated(hint: Any, space: dict[str, Any]) -> Any:
    """A string annotation becomes what it names; one that only type checkers can read stays a string."""
    try:
        return eval(hint, space) if isinstance(hint, str) else hint
    except (NameError, AttributeError, TypeError):
        return hint


def _name(hint: Any) -> str:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_name(each) for each in inner)
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, inner))
    if typing.get_origin(hint) is typing.Annotated:
        rules = [rule.words for rule in inner[1:] if isinstance(rule, Rule)]
        return " ".join([_name(inner[0]), *([" and ".join(rules)] if rules else [])])
    if hint is None or hint is type(None):
        return "null"
    kind = typing.get_origin(hint) or hint
    names = ["..." if each is Ellipsis else _name(each) for each in inner]
    return kind.__name__ + (f"[{', '.join(names)}]" if names else "") if inspect.isclass(kind) \
        else str(hint).replace("typing.", "")


def shown(value: Any, recursive: bool) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if recursive and isinstance(value, dict) and "_target_" in value:
        return f"the node of {value['_target_']}" + (" (_partial_)" if value.get("_partial_") is True else "")
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no finite number"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _members(found: Any) -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return modules + [name for name in dir(found) if not name.startswith("_")]
