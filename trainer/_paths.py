"""Paths: where the configuration lies, what it offers, and who set a key.

Two layouts are known: the checkout (`conf/` and `recipes/` beside the package) and the installed wheel
(`trainer/conf/` and `trainer/conf/recipe/`). The first comment line of a YAML file is its description.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import textwrap
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError

NOTHING: Any = object()  # what `at` returns for a key that does not exist; null is a value
COMMAND_LINE = "command line"
WIDTH = 110


@dataclass(frozen=True)
class Choices:
    """A folder of groups (one folder a group, one file an option) and a folder of recipes."""

    conf: Path
    recipes: Path

    @property
    def main(self) -> Path:
        return self.conf / "config.yaml"

    def groups(self) -> dict[str, dict[str, Path]]:
        """Group -> option -> file, in alphabetical order; the group `recipe` comes last."""
        folders = [folder for folder in sorted(self.conf.iterdir())
                   if folder.is_dir() and folder.resolve() != self.recipes.resolve()]
        found = {folder.name: _yaml_files(folder) for folder in folders}
        found["recipe"] = _yaml_files(self.recipes)
        return {group: options for group, options in found.items() if options}

    def shown(self, file: Path) -> str:
        """The file as messages name it: `conf/drafter/dflash.yaml`, `recipes/smoke.yaml`."""
        root = self.conf.parent
        return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)

    def listing(self, stages: list[str], defaults: dict[str, str]) -> str:
        """The stages, groups, drafters and recipes as `--help` shows them, each with its description."""
        groups = self.groups()
        chosen = {group: options[defaults[group]] for group, options in groups.items()
                  if defaults.get(group) in options}
        further = [group for group in defaults if group in chosen and group not in stages
                   and _is_stage(chosen[group])]
        lines, titles = [], {"stages, in order": stages, "further stages, where run= names them": further}
        for title, names in titles.items():
            lines += [*([""] if lines else []), title] if names else []
            for name in names:
                lines += _entry(name, description(chosen[name]) if name in chosen else "")
        lines += ["", "groups and their options (* default)"]
        for group, options in groups.items():
            names = [f"{option}*" if option == defaults.get(group) else option for option in options]
            lines += _entry(group, ", ".join(names)) if group != "recipe" else []
        for group in ("drafter", "recipe"):
            lines += ["", f"{group}s (* default)"] if group in groups else []
            for name, file in groups.get(group, {}).items():
                lines += _entry(f"{name}*" if name == defaults.get(group) else name, description(file))
        return "\n".join(lines)


def find() -> Choices:
    """The configuration of this installation."""
    package = Path(__file__).resolve().parent
    for conf, recipes in ((package / "conf", package / "conf" / "recipe"),
                          (package.parent / "conf", package.parent / "recipes")):
        if (conf / "config.yaml").is_file():
            return Choices(conf, recipes)
    raise UserError(f"no conf/config.yaml beside or inside {package}: the installation is incomplete; "
                    f"install the project again")


def description(file: Path) -> str:
    """The first comment line of a YAML file, without its mark; "" when the file does not start with one."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#") and not text.startswith("# @"):
            return text.lstrip("# ")
        if text and not text.startswith("#"):
            return ""
    return ""


def _is_stage(file: Path) -> bool:
    """Whether the class that an option names says that it is a Stage. Its file is read, not imported: that
    would take PyTorch along."""
    found = re.search(r"^_target_: ([\w.]+)\.(\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    with suppress(ImportError, OSError, SyntaxError):
        spec = importlib.util.find_spec(found[1]) if found else None
        tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")) if spec else ast.Module([], [])
        return any(isinstance(node, ast.ClassDef) and node.name == found[2]
                   and any(isinstance(base, ast.Name) and base.id == "Stage" for base in node.bases)
                   for node in tree.body)
    return False


@dataclass(frozen=True)
class Source:
    """What one file set: `content` lies at `package` ("" is the top); `recipe` marks files that only tune."""

    shown: str
    package: str
    content: Any
    recipe: bool = False

    def at(self, key: str) -> Any:
        if not self.package:
            return at(self.content, key)
        inside = f"{key}.".removeprefix(f"{self.package}.")
        if len(inside) == len(key) + 1:
            return NOTHING
        return at(self.content, inside[:-1]) if inside else self.content


@dataclass(frozen=True)
class Sources:
    """Who set what: the files in the order of their merging, and the keys given on the command line (not the
    groups chosen there, whose keys come from files)."""

    files: tuple[Source, ...] = ()
    given: tuple[str, ...] = ()

    def origin(self, key: str) -> str:
        """Who set the key last; for a key that nobody set, who set the node that should have it."""
        if any(f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}.") for given in self.given):
            return COMMAND_LINE
        file = self._file(key)
        parent = key.rpartition(".")[0]
        if file is None and parent:
            node = f"{parent}._target_"
            return self.origin(node if key != node and self._file(node) else parent)
        return file.shown if file else "configuration"

    def declared(self, key: str) -> set[str]:
        """The keys that the group's own files give the dict at `key`; empty when they leave it open."""
        found = [file.at(key) for file in self.files if not file.recipe]
        return {str(name) for content in found if isinstance(content, dict) for name in content}

    def _file(self, key: str) -> Source | None:
        return next((file for file in reversed(self.files) if file.at(key) is not NOTHING), None)


def at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts and lists, or `NOTHING`."""
    for part in key.split("."):
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return NOTHING
    return tree


def holder(raw: Any, key: str) -> str:
    """The key that holds the value of `key`: itself, or where its `${...}`, or that of what it lies in, leads
    as far as that exists."""
    parent, _, name = key.rpartition(".")
    seen = [key := f"{holder(raw, parent)}.{name}" if parent else key]
    while (link := re.fullmatch(r"\$\{([\w.]+)\}", str(at(raw, key)))) and at(raw, link[1]) is not NOTHING:
        key = link[1]
        if key in seen:
            return key
        seen.append(key)
    return key


def unknown(key: str, siblings: Collection[str], tree: dict[str, Any], rest: str = "") -> str:
    """What to say of a key that is not among its `siblings`: the nearest right one, else what there is.
    `rest` is what was asked for below the key."""
    parent, _, name = key.rpartition(".")
    near = [f"{parent}.{each}".lstrip(".") for each in difflib.get_close_matches(name, siblings, 1, 0.6)]
    found = [f"{each}.{rest}" if at(tree, f"{each}.{rest}") is not NOTHING else each for each in near]
    if not found:  # the right name in the wrong place, or nearly so
        leaves = {path: path.rpartition(".")[2] for path in paths(tree) if path != key}
        names = leaves.values()
        alike = [name] if name in names else difflib.get_close_matches(name, names, 1, 0.8)
        found = [path for path, leaf in leaves.items() if leaf in alike][:2]
    if found:
        return f"unknown key; nearest: {' or '.join(found)}"
    return f"unknown key; {parent or 'the configuration'} takes {', '.join(sorted(set(siblings))) or 'none'}"


def paths(tree: Any, start: str = "") -> Iterator[str]:
    """Every dotted key of a tree of dicts."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield start + str(name)
        yield from paths(value, f"{start}{name}.")


def nearest(name: str, names: Collection[str], count: int = 1) -> str:
    """The end of a message: the likeliest of `names`, `count` of them at most, or nothing."""
    near = difflib.get_close_matches(name, names, count, 0.6)
    return f"; nearest: {', '.join(near)}" if near else ""


def no_option(name: str, options: Collection[str]) -> str:
    """What to say of an option that a group has not got."""
    return f"there is no '{name}'{nearest(name, options, 3)}; choices: {', '.join(options)}"


def _entry(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<22} ", subsequent_indent=" " * 25,
                         break_on_hyphens=False) or [f"  {name}"]


def _yaml_files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))} if folder.is_dir() else {}
