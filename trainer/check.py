"""Checks a composed configuration against the signatures that it will reach, before anything heavy starts.

Works on plain dicts. A node that is reached through `${...}` is checked where it stands, so one mistake is
one line. Let through: what a target takes as `**kwargs`, and values whose annotation cannot be evaluated.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Collection
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from os import PathLike
from typing import Any, Literal

from trainer._paths import NOTHING, Sources, at, holder, nearest, paths, unknown
from trainer.errors import UserError

SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
TOP: dict[str, Any] = {"run_root": str, "cache_root": str, "seed": int, "run": list[str],
                       "recipe_name": str | None}


@dataclass(frozen=True)
class Configuration:
    """A composed configuration: `raw` has its `${...}`, `settings` has them filled in. `broken` holds by key
    what composing found wrong, which is told with the rest and not judged again."""

    raw: dict[str, Any]
    settings: dict[str, Any]
    sources: Sources
    broken: dict[str, str] = field(default_factory=dict)

    def lines(self, problems: dict[str, str]) -> list[str]:
        """One line for each problem: `key (who set it): what is wrong; nearest: the right key`."""
        return [f"{key} ({self.sources.origin(key)}): {text}" for key, text in problems.items()]


def check(configuration: Configuration, groups: Collection[str], stage: type) -> list[str]:
    """All problems, one line each; `groups` may stand at the top, and a `stage` may be named in `run`."""
    checker = _Checker(configuration)
    checker.top_level(groups)
    for name, value in configuration.settings.items():
        checker.walk(name, value, configuration.raw.get(name))
    checker.stages(stage)
    return configuration.lines(checker.problems)


def unknown_arguments(given: dict[str, Any], raw: dict[str, Any], groups: Collection[str]) -> dict[str, str]:
    """By key what is wrong with those that `key=value` cannot set, because there is nothing of that name."""
    problems = {}
    keys = [path for name, value in given.items() for path in (name, *paths(value, f"{name}."))]
    for key in [key for key in keys if at(raw, key) is NOTHING]:
        parent = key.rpartition(".")[0]
        if key not in given and at(raw, parent) is NOTHING:
            continue  # what holds it is unknown itself
        while parent and at(raw, parent) is NOTHING:
            parent = parent.rpartition(".")[0]
        found, rest = (at(raw, parent), key[len(parent) + 1:]) if parent else (raw, key)
        name, _, below = rest.partition(".")
        if isinstance(found, str) and found.startswith("${"):
            problems[key] = f"{parent} is {found}; set {found[2:-1]}.{rest} instead"
        elif not isinstance(found, dict):
            problems[key] = f"{parent} is the value {found!r} and has no keys"
        else:
            siblings = [*map(str, found), *(() if parent else groups)]
            problems[key] = unknown(f"{parent}.{name}".lstrip("."), siblings, raw, below)
            if "nearest" not in problems[key] and (not found or "_target_" in found):
                problems[key] = f"unknown key; {parent} does not set it, if it can take it write +{key}=..."
    return problems


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


class _Checker:
    def __init__(self, configuration: Configuration) -> None:
        self.settings, self.raw = configuration.settings, configuration.raw
        self.sources = configuration.sources
        self.problems = dict(configuration.broken)
        self.located: dict[str, Any] = {}

    def add(self, key: str, text: str) -> None:
        self.problems.setdefault(key, text)

    def top_level(self, groups: Collection[str]) -> None:
        known = {*TOP, *groups} - {"recipe"}
        for name, value in self.settings.items():
            if name not in known:
                self.add(name, unknown(name, known, self.raw))
            elif name in groups and not isinstance(value, dict):
                self.add(name, f"must be a node of keys, but is {_shown(value, True)}")
        for name, hint in TOP.items():
            if name in self.settings:
                self.typed(name, self.settings[name], hint)

    def stages(self, stage: type) -> None:
        """`run` names stages; a node whose class could not be found may be one and is not judged."""
        names = [name for name, found in self.located.items() if "." not in name
                 and (found is None or (inspect.isclass(found) and issubclass(found, stage)))]
        wanted = self.settings.get("run")
        for name in (wanted or [""]) if isinstance(wanted, list) else ():
            if name not in names and name not in self.problems:
                self.add("run", f"there is no stage '{name}'{nearest(str(name), names)}; stages: "
                                f"{', '.join(names)}")

    def walk(self, key: str, value: Any, raw: Any) -> None:
        if isinstance(raw, str):
            if raw == "???":
                self.add(key, f"has no value yet and needs one; set it in a recipe or as {key}=...")
            return
        if isinstance(value, dict):
            self.node(key, value) if "_target_" in value else self.plain(key, value)
        if isinstance(value, (dict, list)):
            for name, child in value.items() if isinstance(value, dict) else enumerate(value):
                self.walk(f"{key}.{name}", child, raw[name])

    def plain(self, key: str, value: dict[str, Any]) -> None:
        """A dict without `_target_` has the keys that its group's file gives it; `{}` there takes any."""
        declared = self.sources.declared(key)
        for name in value if declared else ():
            if name not in declared:
                self.add(f"{key}.{name}", unknown(f"{key}.{name}", declared, self.raw))

    def node(self, key: str, node: dict[str, Any]) -> None:
        try:
            target = locate(str(node["_target_"]))
        except UserError as error:
            self.located[key] = None
            self.add(f"{key}._target_", str(error))
            return
        self.located[key] = target
        if not callable(target):
            self.add(f"{key}._target_", f"{node['_target_']} is not a class or function")
            return
        for name in ("_partial_", "_recursive_"):
            self.typed(f"{key}.{name}", node.get(name, False), bool)
        parameters = _parameters(target)
        if parameters is not None:
            self.arguments(key, node, parameters)

    def arguments(self, key: str, node: dict[str, Any], parameters: dict[str, inspect.Parameter]) -> None:
        kinds = {parameter.kind for parameter in parameters.values()}
        named = {name: parameter for name, parameter in parameters.items()
                 if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
        given = [name for name in node if name not in SPECIAL]
        positional = list(parameters)[:len(node.get("_args_", []))]
        for name in given:
            if name in named:
                self.typed(f"{key}.{name}", node[name], named[name].annotation, node.get("_recursive_", True))
            elif inspect.Parameter.VAR_KEYWORD not in kinds:
                siblings = [*named, *SPECIAL] if name.startswith("_") else list(named)
                self.add(f"{key}.{name}", unknown(f"{key}.{name}", siblings, self.raw))
        if not node.get("_partial_", False):
            for name, parameter in named.items():
                if parameter.default is parameter.empty and name not in given and name not in positional:
                    self.add(f"{key}.{name}", f"is missing; {node['_target_']} needs it")

    def typed(self, key: str, value: Any, hint: Any, recursive: bool = True) -> None:
        """Judges a value where it is read, and blames the key that holds it."""
        source = holder(self.raw, key)
        text = mismatch(value, hint, recursive)
        if text and at(self.raw, source) != "???":
            self.add(source, text + (f" where {key} reads it" if source != key else ""))


def mismatch(value: Any, hint: Any, recursive: bool = True) -> str | None:
    """What is wrong with `value` for the annotation `hint`, or None; true and false are no numbers."""
    if _fits(value, hint, recursive):
        return None
    as_list = isinstance(value, str) and _fits([value], hint, recursive)
    advice = f"; a list is written [{value}]" if as_list else ""
    return f"must be {_name(hint)}, but is {_shown(value, recursive)}{advice}"


def _fits(value: Any, hint: Any, recursive: bool) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, (str, typing.TypeVar)):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each, recursive) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin in (typing.Annotated, typing.Final, typing.ClassVar):
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
        return kind in (int, float, complex) and (isinstance(value, int) or kind is not int)
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


def _parameters(target: Any) -> dict[str, inspect.Parameter] | None:
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
    if hint is None or hint is type(None):
        return "null"
    return hint.__name__ if inspect.isclass(hint) and not inner else str(hint).replace("typing.", "")


def _shown(value: Any, recursive: bool) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if recursive and isinstance(value, dict) and "_target_" in value:
        return f"the node of {value['_target_']}" + (" (_partial_)" if value.get("_partial_") is True else "")
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _members(found: Any) -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return modules + [name for name in dir(found) if not name.startswith("_")]
