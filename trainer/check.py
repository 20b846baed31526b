"""Checks a composed configuration against the signatures that it will reach, before anything heavy starts.

Works on plain dicts. A node that is reached through `${...}` is checked where it stands, so one mistake is
one line. Let through: what a target takes as `**kwargs`, and values whose annotation cannot be evaluated.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any

from trainer._fits import locate, mismatch, parameters_of, shown
from trainer._paths import NOTHING, Sources, at, holder, nearest, paths, unknown
from trainer.errors import UserError
from trainer.ranges import Distinct, Filled, Gives, Seed, Text

SPECIAL = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
TOP: dict[str, Any] = {"run_root": Text, "cache_root": Text, "seed": Seed, "recipe_name": str | None,
                       "command": str | None,
                       "run": Annotated[list[str], Filled(), Distinct()]}


@dataclass(frozen=True)
class Configuration:
    """A composed configuration: `raw` has its `${...}`, `settings` has them filled in. `broken` holds by key
    what composing found wrong, which is told with the rest and not judged again; `notes` are for the user."""

    raw: dict[str, Any]
    settings: dict[str, Any]
    sources: Sources
    broken: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def lines(self, problems: dict[str, str]) -> list[str]:
        """One line for each problem: `key (who set it): what is wrong; nearest: the right key`."""
        return [f"{key} ({self.sources.origin(key)}): {text}" for key, text in problems.items()]

    def held(self, problems: dict[str, str]) -> dict[str, str]:
        """The same problems by the keys that hold the values."""
        return {holder(self.raw, key): text for key, text in problems.items()}


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
        if found is None and isinstance(given.get(parent), dict):
            continue  # a whole node in the place of null, which is checked as any other
        if isinstance(found, str) and found.startswith("${"):
            problems[key] = f"{parent} is {found}; set {found[2:-1]}.{rest} instead"
        elif not isinstance(found, dict):
            problems[key] = f"{parent} is the value {found!r} and has no keys"
        else:
            siblings = {*map(str, found), *(() if parent else groups),
                        *_arguments_of(found, settings=True)} - {"**"}
            special = name.startswith("_")
            problems[key] = unknown(f"{parent}.{name}".lstrip("."), [each for each in siblings if special
                                                                     or not each.startswith("_")], raw, below)
            if takes(found, name):
                problems[key] = f"unknown key; {parent} can take it but does not set it: write +{key}=..."
    return problems


def needs_value(key: str) -> str:
    """What to say of a key whose file leaves it to the user (`???`)."""
    return f"has no value yet and needs one; set it in a recipe or as {key}=..."


def takes(node: dict[str, Any], name: str) -> bool:
    """Whether a key may be added to a node: its target has such an argument; `{}` takes any."""
    if "_target_" not in node:
        return not node
    return name in (known := _arguments_of(node)) or "**" in known


def _arguments_of(node: dict[str, Any], settings: bool = False) -> set[str]:
    """Names of the arguments that the node's target takes, "**" for any; none where it cannot be found. With
    `settings` those are left out that a reader hands over."""
    try:
        found = parameters_of(locate(str(node["_target_"]))) if "_target_" in node else None
    except UserError:
        return set()  # told at the node itself
    names = {"**" if each.kind is each.VAR_KEYWORD else name for name, each in (found or {}).items()
             if each.kind is not each.VAR_POSITIONAL}
    return names - _handed_over(node, found or {}) if settings else names


def _handed_over(node: dict[str, Any], parameters: dict[str, inspect.Parameter]) -> set[str]:
    """The arguments that a `_partial_` node leaves to its reader, which are no settings."""
    return {name for name, each in parameters.items() if node.get("_partial_") is True
            and name not in node and each.default is each.empty and each.kind is not each.VAR_KEYWORD}


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
                self.add(name, f"must be a node of keys, but is {shown(value, True)}")
        for name, hint in TOP.items():
            if name in self.settings:
                self.typed(name, self.settings[name], hint)

    def stages(self, stage: type) -> None:
        """`run` names stages; a node whose class could not be found may be one and is not judged."""
        names = [name for name, found in self.located.items() if "." not in name
                 and (found is None or (inspect.isclass(found) and issubclass(found, stage)))]
        wanted = self.settings.get("run")
        for name in wanted if isinstance(wanted, list) else ():
            if name not in names and name not in self.problems:
                self.add("run", f"there is no stage '{name}'{nearest(str(name), names)}; stages: "
                                f"{', '.join(names)}")

    def walk(self, key: str, value: Any, raw: Any) -> None:
        if isinstance(raw, str):
            if raw == "???":
                self.add(key, needs_value(key))
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
        parameters = parameters_of(target)
        if parameters is not None:
            self.arguments(key, node, parameters)

    def arguments(self, key: str, node: dict[str, Any], parameters: dict[str, inspect.Parameter]) -> None:
        kinds = {parameter.kind for parameter in parameters.values()}
        named = {name: parameter for name, parameter in parameters.items()
                 if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
        given = [name for name in node if name not in SPECIAL]
        for name in given:
            if name in named:
                self.typed(f"{key}.{name}", node[name], named[name].annotation, node.get("_recursive_", True))
                self.waiting(f"{key}.{name}", node[name], named[name].annotation)
            elif inspect.Parameter.VAR_KEYWORD not in kinds:
                settings = named.keys() - _handed_over(node, named)
                siblings = {*settings, *SPECIAL} if name.startswith("_") else settings
                self.add(f"{key}.{name}", unknown(f"{key}.{name}", siblings, self.raw))
        if not node.get("_partial_", False):
            self.complete(key, node, parameters)

    def waiting(self, key: str, node: Any, hint: Any) -> None:
        """A `_partial_` node has all but what its reader says that it gives."""
        gives = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Gives)]
        if not gives or not isinstance(node, dict) or node.get("_partial_") is not True:
            return
        try:
            parameters = parameters_of(locate(str(node["_target_"]))) or {}
        except UserError:
            return  # told at the node itself
        self.complete(holder(self.raw, key), node, parameters, gives[0].names)

    def complete(self, key: str, node: dict[str, Any], parameters: dict[str, inspect.Parameter],
                 elsewhere: Collection[str] = ()) -> None:
        """Every argument without a default is in the node, unless it comes from `elsewhere`."""
        positional = list(parameters)[:len(node.get("_args_", []))]
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in (*node, *positional, *elsewhere) \
                    and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                self.add(f"{key}.{name}", f"is missing; {node['_target_']} needs it")

    def typed(self, key: str, value: Any, hint: Any, recursive: bool = True) -> None:
        """Judges a value where it is read, and blames the key that holds it."""
        source = holder(self.raw, key)
        text = mismatch(value, hint, recursive, source)
        if text and at(self.raw, source) != "???":
            self.add(source, text + (f" where {key} reads it" if source != key else ""))
