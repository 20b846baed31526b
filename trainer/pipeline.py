"""Stages, and how a run goes through them: fingerprint, reuse or run in `.partial`, record, rename.

A folder is named by what made it (settings, code version, outside facts, upstream fingerprints): one that
exists is complete and is reused, a `.partial` one can only be continued by the same settings. Gives up:
nothing is deleted here, old folders stay until their owner removes them. Only this and `__main__` know Hydra.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from trainer import _folders, _latest, _together
from trainer._folders import full_disk, locked, write_sealed
from trainer._secrets import masked
from trainer._stage_record import fingerprint, finished, made_by, require_unchanged, say
from trainer._stages import Planned, Stage
from trainer.errors import UserError, first_line, gathered
from trainer.strategies.world import World

REFUSALS = (ValueError, TypeError)  # by which constructors refuse what they are given


def build(node: dict[str, Any], place: str = "", /, **arguments: Any) -> Any:
    """The object that a plain node describes, nested nodes first; `arguments` are handed over as they are.
    `place` is the key of the node, for messages."""
    try:
        if arguments:
            return instantiate({**node, "_partial_": True}, _convert_="all")(**arguments)
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause: BaseException | None = error
        while isinstance(cause, InstantiationException):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if cause is None or isinstance(cause, REFUSALS):
            inner = re.search(r"^full_key: (\S+)", str(error), re.MULTILINE)
            key = ".".join(part for part in (place, inner[1] if inner else "") if part)
            reason = f"{type(cause).__name__}: {first_line(cause)}" if cause else first_line(error)
            raise UserError(f"{key or node.get('_target_')} cannot be built from its settings "
                            f"({reason}); mend them") from error
        raise cause from None


def completed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with what the stages in `run` bring along behind them."""
    stages = _stages(settings)
    brought = [name for each in settings["run"] for name in stages[each].brings]
    return {**settings, "run": [*dict.fromkeys([*settings["run"], *brought])]}


def check(settings: dict[str, Any]) -> dict[str, str]:
    """By key what the stages that `run` reaches find wrong with their settings, before anything is done."""
    stages = _stages(settings)
    return {key: text for name in _needed(stages, settings["run"])
            for key, text in stages[name].check(stages).items()}


def plan(settings: dict[str, Any], shown: bool = False) -> list[Planned]:
    """The stages in `run`, all that they stand on and the finished ones that they use, in order of their
    dependence; `shown` on standard output, too. Raises once for all that is missing on this machine and keeps
    a stage from being planned."""
    root = _folders.usable("run_root", settings["run_root"], max(settings["run"], key=len, default=""))
    planned: dict[str, Planned] = {}
    with gathered() as attempt:
        for name, stage in (stages := _stages(settings)).items():
            upstreams, external = (*stage.after, *stage.uses), attempt(stage.external)
            if external is None or not planned.keys() >= {*upstreams}:  # no fingerprint, so nothing finished
                if name in settings["run"]:
                    attempt(stage.preflight)
                continue
            inputs = {upstream: planned[upstream].fingerprint for upstream in upstreams
                      if upstream in (*stage.after, *settings["run"]) or planned[upstream].state == "reuse"}
            node = masked(settings[name])
            deciding = {each: made for each, made in inputs.items() if stage.lasting or each in stage.after}
            digest = fingerprint(node, stage.version, external, deciding, stage.idle, stage.neutral)
            planned[name] = Planned(name, stage, node, digest, inputs, root / name / digest[:16])
        needed = _needed(stages, settings["run"])
        found = [each for each in planned.values() if each.name in needed or each.state == "reuse"]
        if shown:
            _show(found, [name for name in needed if name not in planned], stages, settings)
    return found


def _needed(stages: Mapping[str, Stage], run: list[str]) -> list[str]:
    """Those in `run` and all that they stand on, without what they only use, in the order of `stages`."""
    found: list[str] = []
    for name in reversed(stages):
        if name in run or any(name in stages[reader].after for reader in found):
            found.insert(0, name)
    return found


def _stages(settings: dict[str, Any]) -> dict[str, Stage]:
    """The stages in `run` and all that they stand on, built, in order of their dependence."""
    built: dict[str, Stage] = {}

    def add(name: str, reader: str, open_stages: tuple[str, ...]) -> None:
        assert name not in open_stages, f"stages read each other in a circle: {(*open_stages, name)}"
        if name in built:
            return
        if not isinstance(settings.get(name), dict):
            raise UserError(f"stage '{reader}' reads '{name}', which the configuration does not have; "
                            f"choose an option for the group {name}")
        stage = build(settings[name], name)
        assert isinstance(stage, Stage), f"{name} is no Stage but {type(stage).__name__}"
        for upstream in (*stage.after, *stage.uses):
            add(upstream, name, (*open_stages, name))
        built[name] = stage

    for name in settings["run"]:
        add(name, name, ())
    return built


def _show(found: list[Planned], lacking: list[str], stages: Mapping[str, Stage],
          settings: dict[str, Any]) -> None:
    """The header of a run: what happens to each stage, and where its folder is; those that are `lacking`
    something have none yet. Then what there is to remark."""
    if settings.get("recipe_name"):
        print(f"recipe {settings['recipe_name']}")
    lines = [(planned.name, planned.state, str(planned.folder)) for planned in found]
    lines += [(name, "run", "in a folder that is named by what is not here") for name in lacking]
    width, remarks = max(len(name) for name, *_ in lines), []
    for name, state, place in lines:
        if state != "reuse" and name in settings["run"]:
            remarks += stages[name].remarks(stages)
        elif state != "reuse":
            state = "not in run="
        print(f"  {name:<{width}}  {state:<8}  {place}", flush=True)
    for remark in remarks:
        print(f"note: {remark}", flush=True)
    root = Path(settings["run_root"]).expanduser()
    if not root.is_absolute():
        print(f"results go to {root.resolve()}; run_root= puts them elsewhere", flush=True)


def require_inputs(stages: list[Planned], names: list[str]) -> set[str]:
    """What the stages of these names read; raises once for all that is neither finished nor among them."""
    read: set[str] = set()
    missing: dict[str, str] = {}
    for planned in reversed(stages):  # whoever reads a stage comes before it
        if planned.state == "reuse" or planned.name not in {*names, *read}:
            continue
        if planned.name not in names:
            missing[planned.name] = next(each.name for each in stages if planned.name in each.stage.after
                                         and each.name in {*names, *read})
        read.update(planned.stage.after)
    if missing:
        named = ", ".join(f"'{name}' (read by '{reader}')" for name, reader in reversed(missing.items()))
        whole = ",".join(each.name for each in stages if each.name in {*names, *missing})
        raise UserError(f"run= leaves out what has no finished folder for these settings in "
                        f"{stages[0].folder.parent.parent}: {named}; write 'run=[{whole}]'")
    return read | {name for planned in stages if planned.name in names for name in planned.stage.uses}


def preflight(stages: list[Planned], names: list[str]) -> None:
    """Raises once for all that is missing on this machine for those of these names that will run."""
    with gathered() as attempt:
        for planned in stages:
            if planned.name in names and planned.state != "reuse":
                attempt(partial(_folders.require_writable, "run_root", planned.folder.parent.parent,
                                planned.name))
                attempt(planned.stage.preflight)


def rehearse(stages: list[Planned], names: list[str]) -> None:
    """Raises once for all that a run of these names would say after its quick stages, which are done here in
    a folder that is not kept."""
    with tempfile.TemporaryDirectory() as place, gathered() as attempt:
        folders = {planned.name: planned.folder.resolve() for planned in stages if planned.state == "reuse"}
        for planned in [each for each in stages if each.name in names and each.state != "reuse"]:
            inputs = {name: folders[name] for name in planned.stage.after if name in folders}
            if not planned.stage.quick:
                attempt(partial(planned.stage.foresee, inputs))
            elif len(inputs) == len(planned.stage.after):
                out = Path(place, planned.name)
                out.mkdir()
                if attempt(partial(planned.stage.run, inputs, out)) is not None:
                    folders[planned.name] = out


def run(settings: dict[str, Any], arguments: Sequence[str] = ()) -> Path:
    """Goes through the stages named in `run`; returns report.json or the last stage's folder. `arguments`
    are those of the command line that made the settings."""
    stages, world = plan(settings, shown=True), World.here()
    _together.meet(world, max(planned.stage.processes for planned in stages))
    read = require_inputs(stages, settings["run"])
    preflight(stages, settings["run"])
    by_name = {planned.name: planned for planned in stages}
    wanted = [planned for planned in stages if planned.name in settings["run"]]
    for planned in stages:
        if planned.state == "reuse" and (planned in wanted or planned.name in read):
            require_unchanged(planned.folder)
    _remember(stages, settings)
    for place, planned in enumerate(wanted):
        if planned.state != "reuse":
            _execute(planned, _inputs(planned, by_name), arguments)
            _remember(stages, settings)
        for later in wanted[place + 2:]:  # the next one says so itself
            if planned.name in later.stage.after and later.state != "reuse":
                later.stage.foresee({name: by_name[name].folder.resolve() for name in later.stage.after
                                     if by_name[name].state == "reuse"})
    _together.over(world)
    for planned in reversed(wanted):
        planned.stage.tell(planned.folder)
    result = by_name["report"].folder / "report.json" if "report" in settings["run"] else wanted[-1].folder
    return result if result.exists() else wanted[-1].folder


def _remember(stages: list[Planned], settings: dict[str, Any]) -> None:
    _latest.remember(Path(settings["run_root"]).expanduser(), {
        planned.name: str(planned.folder.resolve()) for planned in stages if planned.folder.exists()})


def take_part(settings: dict[str, Any], world: World) -> None:
    """In a process that follows another one through `run`: takes part in the stages of several processes."""
    by_name = {planned.name: planned for planned in plan(settings)}
    _together.meet(world, max(planned.stage.processes for planned in by_name.values()))
    _together.take_part({planned.fingerprint: (planned, planned.stage.run, _inputs(planned, by_name))
                         for planned in by_name.values() if planned.stage.processes > 1}, world)


def _inputs(planned: Planned, by_name: Mapping[str, Planned]) -> dict[str, Path]:
    return {name: by_name[name].folder.resolve() for name in planned.inputs
            if name in planned.stage.after or by_name[name].state == "reuse"}


def _execute(planned: Planned, inputs: dict[str, Path], arguments: Sequence[str] = ()) -> None:
    out = planned.partial
    with locked(planned.folder, f"stage '{planned.name}'"), full_disk(f"stage '{planned.name}'", out):
        state = planned.state
        if state == "reuse":  # finished by another process since the plan was made
            return
        if not planned.stage.lasting:
            shutil.rmtree(out, ignore_errors=True)
        _folders.require_folder(out)
        for stale in out.glob(".stage.json.*"):  # left by a process that was killed while it wrote
            stale.unlink()
        if (out / "stage.json").exists():  # written last: only the rename is missing
            finished(out, planned.fingerprint, "that file")
            require_unchanged(out)
        else:
            print(f"{planned.name}: {state}", flush=True)
            began = time.monotonic()
            record = _together.run(planned, planned.stage.run, planned.stage.processes, inputs, out.resolve(),
                                   arguments)
            seconds = time.monotonic() - began
            _folders.settle(out)
            write_sealed(out / "stage.json", _record(planned, record, seconds, state == "continue"))
            say(planned.name, record, seconds)
        if not planned.stage.lasting:
            shutil.rmtree(planned.folder, ignore_errors=True)
        out.rename(planned.folder)
        _folders.sync(planned.folder.parent)


def _record(planned: Planned, record: dict[str, Any], seconds: float, resumed: bool) -> dict[str, Any]:
    """What stage.json holds; `seconds` are those of the last call alone when `resumed` is true."""
    return {"stage": planned.name, "version": planned.stage.version, "fingerprint": planned.fingerprint,
            "settings": planned.settings, "inputs": planned.inputs, "record": record,
            "seconds": round(seconds, 3), "resumed": resumed, **made_by(),
            "files": _folders.sums(planned.partial, planned.stage.sized)}
