"""The door: `python -m trainer` composes the configuration, checks it whole and hands it to the pipeline.

Hydra composes from memory: each file of conf/ and each recipe goes into its ConfigStore, so that checkout
and wheel work alike, from any folder, and Hydra makes no output folder. What the user can mend is told in a
line on standard error. Gives up: Hydra's multirun and its own flags, except `--cfg job`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports go on: there is nothing to tell

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer import __version__, pipeline
from trainer._paths import NOTHING, Choices, Source, Sources, at, find, holder, unknown
from trainer.check import Configuration, check, unknown_arguments
from trainer.errors import UserError
from trainer.progress import lasting_output

USAGE = """usage: python -m trainer [recipe=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [FLAG]

Trains a drafter for speculative decoding on its target's own answers, exports it for vLLM, and measures it.
Finished stages are reused and a stopped one goes on: after any stop, give the same command again.

flags
  -h, --help     this text
  --cfg job      print the composed configuration and stop; --resolve fills in its ${...}
  --check        check the whole configuration, print what would run, and stop
  --version      print the version
"""
EXAMPLES = """
examples
  python -m trainer                            the default recipe, all stages
  python -m trainer recipe=NAME run_root=DIR   another recipe, results in another folder
  python -m trainer 'run=[STAGE,STAGE]'        some stages only; what they read must be there
  python -m trainer recipe=NAME --cfg job      every setting of a recipe

exit codes
  0 done; 1 a fault of this program (HYDRA_FULL_ERROR=1 shows the traceback); 2 something to mend, told in a
  line; 130 and 143 stopped by Ctrl-C and SIGTERM: the same command goes on from there"""
Groups = Mapping[str, Mapping[str, Any]]


def main(arguments: list[str] | None = None, choices: Choices | None = None) -> int:
    """Runs the command line and returns its exit code; `choices` other than the installed are for tests."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with lasting_output(goes_on=not any(argument.startswith("-") for argument in arguments)):
        return _told(arguments, choices)


def _told(arguments: list[str], choices: Choices | None) -> int:
    full = os.environ.get("HYDRA_FULL_ERROR", "") not in ("", "0")
    try:
        with _signals():
            return _main(arguments, choices or find())
    except UserError as error:
        if full:
            traceback.print_exc()
        return _complain([" | ".join(line.strip() for line in str(error).splitlines() if line.strip())])
    except KeyboardInterrupt as error:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + int(error.args[0] if error.args else signal.SIGINT)
    except Exception as error:  # noqa: BLE001 (nothing is hidden: this is where every fault of ours is told)
        if full:
            traceback.print_exc()
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            return _complain([f"{getattr(error, 'filename', '')}: this path is too long; give a shorter one"])
        first = (str(error).strip().splitlines() or [""])[0]
        told = f"{type(error).__name__}: {first}; set HYDRA_FULL_ERROR=1 for the traceback"
        return _complain([told], "internal error", 1)


def _main(arguments: list[str], choices: Choices) -> int:
    flags, overrides = _flags(arguments)
    if "help" in flags or "version" in flags:
        print(_help(choices) if "help" in flags else __version__, flush=True)
        return 0
    configuration = compose_configuration(overrides, choices)
    problems = configuration.lines(configuration.broken) if "cfg" in flags else check(
        configuration, choices.groups(), pipeline.Stage)
    if problems:
        return _complain(problems)
    if "cfg" in flags:
        shown = pipeline.masked(configuration.settings if "resolve" in flags else configuration.raw)
        print(OmegaConf.to_yaml(OmegaConf.create(shown)).rstrip(), flush=True)
    elif "check" in flags:
        print("the configuration is right", flush=True)
        try:
            pipeline.show(pipeline.plan(configuration.settings), configuration.settings)
        except UserError as error:  # a file, a download, another environment: not the configuration's fault
            print(f"but it cannot run here as things are: {error}", flush=True)
    else:
        print(pipeline.run(configuration.settings), flush=True)
    return 0


def compose_configuration(arguments: list[str], choices: Choices) -> Configuration:
    """The configuration for `key=value` arguments; what composing cannot tell, `check` tells."""
    files, groups = _load(choices), choices.groups()
    overrides = _overrides(arguments, groups)
    chosen = [override.input_line for override in overrides if _chooses(override, groups)]
    tuned = [override for override in overrides if not _chooses(override, groups)]
    given = {_dotted(override.key_or_group): override.value() for override in tuned
             if override.input_line[0] not in "+~"}
    with _stored(files), initialize(config_path=None, job_name="trainer", version_base="1.3"):
        try:
            composed = compose("config", chosen)
            base: Any = OmegaConf.to_container(composed, resolve=False)
            unknown_ones = unknown_arguments(given, base, groups)
            if tuned:
                composed = compose("config", chosen + [override.input_line for override in tuned if not any(
                    f"{key}.".startswith(f"{_dotted(override.key_or_group)}.") for key in unknown_ones)])
            loader = GlobalHydra.instance().config_loader()
            order = loader.compute_defaults_list("config", chosen, RunMode.RUN).defaults
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_explained(error, files, groups)) from error
    merged = [each.config_path for each in order if each.config_path in files]
    recipes = [each.config_path.removeprefix("recipe/") for each in order
               if each.parent == "config" and str(each.config_path).startswith("recipe/")]
    if recipes and composed.get("recipe_name", "") is None:
        composed.recipe_name = recipes[0]
    sources = Sources(tuple(files[name] for name in merged),
                      tuple(_dotted(override.key_or_group) for override in overrides))
    raw, settings, broken = _resolve(composed)
    return Configuration(raw, settings, sources, unknown_ones | broken)


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
    """Hydra finds the files in its ConfigStore, for as long as it needs them."""
    store = ConfigStore.instance()
    before = dict(store.repo)
    try:
        for name, file in files.items():
            group, _, option = name.rpartition("/")
            store.store(option, OmegaConf.create(file.content), group or None, file.package or "_global_")
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
        key, options = override.key_or_group, ", ".join(groups.get(override.key_or_group, ()))
        if override.is_sweep_override():
            raise UserError(f"{key} (command line): one run takes one value; a list is written {key}=[a,b], "
                            f"and several values to compare need one command each")
        if override.is_hydra_override():
            raise UserError(f"{key} (command line): Hydra's own settings have no effect here; leave it out")
        wanted = argument.partition("=")[2]
        if options and _chooses(override, groups) and not override.is_delete() and wanted not in groups[key]:
            raise UserError(f"{key} (command line): there is no '{wanted}'; choices: {options}")
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
            broken[key] = f"{at(raw, key)} leads nowhere: {reason}"
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
    return (f"{group} ({asking[0] if asking else files[name].shown}): there is no '{option}'; "
            f"choices: {', '.join(groups[group])}")


def _dotted(key: str) -> str:
    return re.sub(r"\[(\w+)\]", r".\1", key).replace("/", ".")


def _plainly(error: BaseException) -> str:
    """What Hydra or OmegaConf has to say, on one line and without where they looked."""
    while error.__cause__ is not None and not str(error).strip():
        error = error.__cause__
    lines = [line.strip() for line in str(error).split("Config search path:")[0].splitlines()]
    text = " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "See http")))
    return text.replace("KeyError raised while resolving interpolation: ", "").strip()


def _help(choices: Choices) -> str:
    content: Any = OmegaConf.to_container(OmegaConf.load(choices.main))
    defaults = {group: option for entry in content["defaults"] if entry != "_self_"
                for group, option in entry.items()}
    return f"{USAGE}\n{choices.listing(content['run'], defaults)}\n{EXAMPLES}"


def _flags(arguments: list[str]) -> tuple[set[str], list[str]]:
    flags: set[str] = set()
    overrides, rest = [], iter(arguments)
    for argument in rest:
        name = {"-h": "help", "-c": "cfg", "-m": "multirun"}.get(argument, argument.lstrip("-"))
        if not argument.startswith("-"):
            overrides.append(argument)
        elif name == "multirun":
            raise UserError("--multirun is not supported; give one command for each run")
        elif name == "cfg" or name.startswith("cfg="):
            if (name[4:] or next(rest, "")) != "job":
                raise UserError("--cfg shows 'job' and nothing else; write --cfg job")
            flags.add("cfg")
        elif name in ("help", "resolve", "check", "version"):
            flags.add(name)
        else:
            raise UserError(f"there is no flag {argument}; settings have no dashes (key=value); see --help")
    return flags, overrides


def _complain(problems: list[str], kind: str = "error", code: int = 2) -> int:
    print("\n".join(f"{kind}: {problem}" for problem in problems), file=sys.stderr)
    return code


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the run like Ctrl-C; a second one cannot disturb the cleaning up."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: stop, signal.SIGHUP: stop}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()
              if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
