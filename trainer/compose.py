"""From `key=value` arguments to a composed configuration, which `check` then judges.

Hydra composes from memory: each file of conf/ and each recipe goes into its ConfigStore, so that checkout
and wheel work alike, from any folder, and Hydra makes no output folder. Where the command line replaces the
option of a group that a recipe tunes, the recipe's keys that the new option cannot take are left out.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer._paths import NOTHING, Choices, Source, Sources, at, holder, no_option, unknown
from trainer._secrets import MASK, masked
from trainer.check import Configuration, needs_value, takes, unknown_arguments
from trainer.errors import UserError

Groups = Mapping[str, Mapping[str, Any]]


def compose_configuration(arguments: list[str], choices: Choices) -> Configuration:
    """The configuration for `key=value` arguments; what composing cannot tell, `check` tells."""
    files, groups = _load(choices), choices.groups()
    overrides = _overrides(arguments, groups)
    choosing = [override for override in overrides if _chooses(override, groups)]
    chosen = [override.input_line for override in choosing]
    tuned = [override for override in overrides if override not in choosing]
    given = {_dotted(override.key_or_group): override.value() for override in tuned
             if override.input_line[0] not in "+~"}
    try:
        files, notes = _without_strangers(files, choosing)
        with _stored(files):
            composed = compose("config", chosen)
            base: Any = OmegaConf.to_container(composed, resolve=False)
            unknown_ones = unknown_arguments(given, base, groups)
            if tuned:
                composed = compose("config", chosen + [override.input_line for override in tuned if not any(
                    f"{key}.".startswith(f"{_dotted(override.key_or_group)}.") for key in unknown_ones)])
            order = _order(chosen)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explained(error, files, groups)) from error
    merged = [each.config_path for each in order if each.config_path in files]
    unknown_ones |= {key: text for key in unknown_ones if (text := _of_others(key, base, files, merged))}
    recipes = [each.config_path.removeprefix("recipe/") for each in order
               if each.parent == "config" and str(each.config_path).startswith("recipe/")]
    if recipes and composed.get("recipe_name", "") is None:
        composed.recipe_name = recipes[0]
    if composed.get("command", "") is None:
        composed.command = _command(overrides)
    sources = Sources(tuple(files[name] for name in merged),
                      tuple(_dotted(override.key_or_group) for override in tuned))
    raw, settings, broken = _resolve(composed)
    return Configuration(raw, settings, sources, unknown_ones | broken, notes)


def default_options(choices: Choices) -> dict[str, str]:
    """Group -> option where the command line chooses none: those of the default recipe."""
    files = _load(choices)
    try:
        with _stored(files):
            own = [str(each.config_path) for each in _order([]) if each.parent == "config"]
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explained(error, files, choices.groups())) from error
    return dict(name.split("/", 1) for name in own if "/" in name)


def _command(overrides: list[Override]) -> str:
    """What the command line sets, as a JSON list of its words without passwords and the like. It has no $, so
    that no `${...}` in it is filled in, which may lead to a password, too."""
    words = []
    for override in overrides:
        name = _dotted(override.key_or_group).rpartition(".")[2]
        given = None if override.is_delete() else {name: override.value()}
        words.append(override.input_line if masked(given) == given
                     else f"{override.input_line.partition('=')[0]}={MASK}")
    return json.dumps(words).replace("$", "\\u0024")


def _order(chosen: list[str]) -> list[ResultDefault]:
    """What is merged, in order, when the command line chooses so."""
    loader = GlobalHydra.instance().config_loader()
    return loader.compute_defaults_list("config", chosen, RunMode.RUN).defaults


def _without_strangers(files: dict[str, Source],
                       choosing: list[Override]) -> tuple[dict[str, Source], tuple[str, ...]]:
    """The files, of which recipes lack what they set for an option that the command line replaces and that
    the new option cannot take; and a note of it for each recipe."""
    files, notes = dict(files), []
    lines = [override.input_line for override in choosing]
    for line, group in [(override.input_line, override.key_or_group) for override in choosing
                        if override.key_or_group != "recipe" and not override.is_delete()]:
        with _stored(files):
            now, before = _order(lines), _order([each for each in lines if each != line])
        new, old = (next((each.config_path for each in order if each.parent == "config"
                          and str(each.config_path).startswith(f"{group}/")), "") for order in (now, before))
        if new == old:
            continue
        node: Any = OmegaConf.to_container(OmegaConf.merge(*(
            {key: value for key, value in files[each.config_path].content.items() if key != "defaults"}
            for each in now if str(each.config_path).startswith(f"{group}/"))))
        for name in [each.config_path for each in now if str(each.config_path).startswith("recipe/")]:
            content = files[name].content
            if not isinstance(content.get(group), dict):
                continue
            kept, left = _taken(content[group], node, group)
            files[name] = replace(files[name], content={**content, group: kept})
            if left:
                notes.append(f"{files[name].shown} sets {', '.join(left)} for {old.replace('/', '=')}, which "
                             f"{new.replace('/', '=')} cannot take and does without")
    return files, tuple(notes)


def _of_others(key: str, base: dict[str, Any], files: dict[str, Source], merged: list[str]) -> str:
    """What to say of an unknown key that other options of its group have and this one cannot take; "" where
    that is not so."""
    (group, _, rest), (parent, _, name) = key.partition("."), key.rpartition(".")
    if isinstance(node := at(base, parent), dict) and takes(node, name):
        return ""
    own = next((name for name in merged if name.startswith(f"{group}/")), "")
    others = [name.rpartition("/")[2] for name, file in files.items() if name.startswith(f"{group}/")
              and rest and at(file.content, rest) is not NOTHING]
    return f"unknown key; it belongs to {group}={', '.join(others)}, and not to {own.replace('/', '=')}" \
        if others and own else ""


def _taken(given: dict[str, Any], node: dict[str, Any], key: str) -> tuple[dict[str, Any], list[str]]:
    """What of `given` the node can take, and the paths of the rest."""
    kept, left = {}, []
    for name, value in given.items():
        inner, path = node.get(name, NOTHING), f"{key}.{name}"
        if (inner is NOTHING and not takes(node, str(name))) \
                or (isinstance(value, dict) and isinstance(inner, str)):
            left.append(path)
        elif isinstance(value, dict) and isinstance(inner, dict):
            kept[name], more = _taken(value, inner, path)
            left += more
        else:
            kept[name] = value
    return kept, left


def _load(choices: Choices) -> dict[str, Source]:
    """Every file, by the name that Hydra knows it by: `config`, or `group/option`."""
    paths = {"config": choices.main} | {f"{group}/{option}": path for group, options
                                        in choices.groups().items() for option, path in options.items()}
    files = {}
    for name, path in paths.items():
        shown, group = choices.shown(path), name.rpartition("/")[0]
        try:
            content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except (YAMLError, OSError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            raise UserError(f"{shown}{f' line {mark.line + 1}' if mark else ''} cannot be read: "
                            f"{getattr(error, 'problem', None) or error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("defaults", []), list):
            raise UserError(f"{shown} must hold 'key: value' lines, and its defaults a list")
        files[name] = Source(shown, "" if group == "recipe" else group, content, group == "recipe")
    return files


@contextlib.contextmanager
def _stored(files: dict[str, Source]) -> Iterator[None]:
    """Hydra is up and finds the files in its ConfigStore, for as long as it needs them."""
    store = ConfigStore.instance()
    before = dict(store.repo)
    try:
        for name, file in files.items():
            group, _, option = name.rpartition("/")
            store.store(option, OmegaConf.create(file.content), group or None, file.package or "_global_")
        with initialize(config_path=None, job_name="trainer", version_base="1.3"):
            yield
    finally:
        store.repo = before


def _overrides(arguments: list[str], groups: Groups) -> list[Override]:
    found = []
    for argument in arguments:
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException as error:
            raise UserError(f"'{argument}' cannot be read; settings are written key=value, lists key=[a,b], "
                            f"text with special signs key='\"...\"'") from error
        key, options = override.key_or_group, groups.get(override.key_or_group, {})
        if override.is_sweep_override():
            raise UserError(f"{key} (command line): one run takes one value; a list is written {key}=[a,b], "
                            f"and several values to compare need one command each")
        if override.is_hydra_override():
            raise UserError(f"{key} (command line): Hydra's own settings have no effect here; leave it out")
        wanted = argument.partition("=")[2]
        if options and _chooses(override, groups) and not override.is_delete() and wanted not in options:
            raise UserError(f"{key} (command line): {no_option(wanted, options)}")
        if _chooses(override, groups) and any(key == each.key_or_group for each in found
                                              if _chooses(each, groups)):
            raise UserError(f"{key} (command line): is chosen twice; give one choice of it")
        found.append(override)
    return found


def _chooses(override: Override, groups: Groups) -> bool:
    """Whether an argument chooses an option of a group, instead of setting a value."""
    return override.key_or_group in groups and not isinstance(override.value(), dict)


def _resolve(configuration: DictConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The configuration with and without its `${...}`, and those that lead nowhere, which become null."""
    raw: Any = OmegaConf.to_container(configuration, resolve=False)
    broken: dict[str, str] = {}
    while True:
        try:
            settings: Any = OmegaConf.to_container(configuration, resolve=True)
            return raw, settings, broken
        except OmegaConfBaseException as error:
            key = holder(raw, _dotted(error.full_key or ""))
            link = re.search(r"Interpolation key '([\w.]+)'", str(error))
            if key in broken or at(raw, key) is NOTHING:
                raise UserError(_plainly(error)) from error
            beside = at(raw, link[1].rpartition(".")[0]) if link and "." in link[1] else raw
            siblings = list(beside) if isinstance(beside, dict) else []
            reason = unknown(link[1], siblings, raw) if link else _plainly(error)
            broken[key] = needs_value(key) if at(raw, key) == "???" else \
                f"{at(raw, key)} leads nowhere: {reason}"
            with open_dict(configuration):
                OmegaConf.update(configuration, key, None)


def _explained(error: Exception, files: dict[str, Source], groups: Groups) -> str:
    """Hydra's complaint about a defaults list, with the file at fault and the choices."""
    found = re.match(r"In '([\w/]+)': Could not (\w+) '(?:(\w+)/)?([^'@]*)", _plainly(error))
    if not found:
        return _plainly(error).replace("final defaults list", "defaults; write 'override /group: option'")
    name, verb, group, option = found.groups()
    if verb == "override" or group not in groups:
        group = option if verb == "override" or not group else group
        advice = f"write it as /{group}" if group in groups else unknown(group, list(groups), {})
        return f"{group} ({files[name].shown}): in defaults: {advice}"
    asking = [file.shown for file in files.values() if {option, f"/{group}/{option}"} & {
        text for entry in file.content.get("defaults", []) for text in (
            [entry] if isinstance(entry, str) else map(str, entry.values()))}]
    return f"{group} ({asking[0] if asking else files[name].shown}): {no_option(option, groups[group])}"


def _dotted(key: str) -> str:
    return re.sub(r"\[(\w+)\]", r".\1", key).replace("/", ".")


def _plainly(error: BaseException) -> str:
    """What Hydra or OmegaConf has to say, on one line and without where they looked."""
    while error.__cause__ is not None and not str(error).strip():
        error = error.__cause__
    lines = [line.strip() for line in str(error).split("Config search path:")[0].splitlines()]
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "See http")))
    return text.replace("KeyError raised while resolving interpolation: ", "").strip()
