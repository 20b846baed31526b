"""The door: `python -m trainer` composes the configuration, checks it whole and hands it to the pipeline.

What the user can mend is told in a line on standard error. Everything but the standard library is imported
inside `main`, where an interrupt is told in a line, too. Gives up: Hydra's multirun and its own flags, except
`--cfg job`.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the imports go on: there is nothing to tell

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer import __version__
from trainer.errors import Several, UserError, gathered

if TYPE_CHECKING:
    from trainer._paths import Choices

USAGE = """usage: python -m trainer [recipe=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [FLAG]

Trains a drafter for speculative decoding on its target's own answers, exports it for vLLM, and measures it.
Finished stages are reused and a stopped one goes on: after any stop, give the same command again.

flags
  -h, --help     this text
  --cfg job      print the composed configuration and stop; --resolve fills in its ${...}
  --check        check all settings and what they need here, print what would run, and stop
  --version      print the version
"""
EXAMPLES = """
examples
  python -m trainer                            the default recipe, all stages
  python -m trainer recipe=NAME run_root=DIR   another recipe, results in another folder
  python -m trainer 'run=[STAGE,STAGE]'        some stages only; what they read must be there
  python -m trainer 'run=[sweep]'              speed by draft length and traffic; run=[tune] chooses
  python -m trainer 'run=[upload]' export.hub.repo=USER/NAME   what was exported, onto the Hub
  python -m trainer recipe=NAME --cfg job      every setting of a recipe

exit codes
  0 done; 1 a fault of this program (HYDRA_FULL_ERROR=1 shows the traceback); 2 something to mend, told in a
  line; 130 and 143 stopped by Ctrl-C and SIGTERM: the same command goes on from there"""


def main(arguments: list[str] | None = None, choices: Choices | None = None) -> int:
    """Runs the command line and returns its exit code; `choices` other than the installed are for tests."""
    arguments = sys.argv[1:] if arguments is None else arguments
    from trainer.progress import lasting_output
    from trainer.strategies.launch import reporting
    from trainer.strategies.world import World

    world = World.here()
    with lasting_output(goes_on=not any(argument.startswith("-") for argument in arguments)):
        if world.report is None:
            return _told(arguments, choices)
        with _signals(), reporting(world):
            return _main(arguments, choices)


def _told(arguments: list[str], choices: Choices | None) -> int:
    full = os.environ.get("HYDRA_FULL_ERROR", "") not in ("", "0")
    try:
        with _signals():
            return _main(arguments, choices)
    except UserError as error:
        if full:
            traceback.print_exc()
        problems = error.problems if isinstance(error, Several) else [str(error)]
        return _complain([" | ".join(line.strip() for line in problem.splitlines() if line.strip())
                          for problem in problems])
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


def _main(arguments: list[str], choices: Choices | None) -> int:
    from omegaconf import OmegaConf

    from trainer import pipeline
    from trainer._paths import find
    from trainer._secrets import masked
    from trainer.check import check
    from trainer.compose import compose_configuration
    from trainer.strategies.world import World

    choices, world = choices or find(), World.here()
    flags, overrides = _flags(arguments)
    if "help" in flags or "version" in flags:
        print(_help(choices) if "help" in flags else __version__, flush=True)
        return 0
    configuration = compose_configuration(overrides, choices)
    for note in () if world.follows else configuration.notes:
        print(f"note: {note}", file=sys.stderr)
    if "cfg" in flags:
        if configuration.broken:
            return _complain(configuration.lines(configuration.broken))
        shown = masked(configuration.settings if "resolve" in flags else configuration.raw)
        print(OmegaConf.to_yaml(OmegaConf.create(shown)).rstrip(), flush=True)
        return 0
    if problems := check(configuration, choices.groups(), pipeline.Stage):
        return _complain(problems)
    settings = pipeline.completed(configuration.settings)
    if problems := configuration.lines(configuration.held(pipeline.check(settings))):
        return _complain(problems)
    if "check" in flags:
        stages = pipeline.plan(settings, shown=True)
        pipeline.require_inputs(stages, settings["run"])
        with gathered() as attempt:
            attempt(partial(pipeline.preflight, stages, settings["run"]))
            attempt(partial(pipeline.rehearse, stages, settings["run"]))
        print("the settings are right, and all that they need is here", flush=True)
    elif world.follows:
        pipeline.take_part(settings, world)
    else:
        print(pipeline.run(settings, arguments), flush=True)
    return 0


def _help(choices: Choices) -> str:
    from omegaconf import OmegaConf

    from trainer.compose import default_options

    content: Any = OmegaConf.to_container(OmegaConf.load(choices.main))
    return f"{USAGE}\n{choices.listing(content['run'], default_options(choices))}\n{EXAMPLES}"


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
