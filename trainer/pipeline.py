"""Stages, and how a run goes through them: fingerprint, reuse or run in `.partial`, record, rename.

A folder is named by what made it (settings, code version, outside facts, upstream fingerprints): one that
exists is complete and is reused, a `.partial` one can only be continued by the same settings. Gives up:
nothing is deleted here, old folders stay until their owner removes them. Only this and `__main__` know Hydra.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from trainer import __version__, _folders
from trainer._folders import full_disk, locked, read_sealed, write_json, write_sealed
from trainer._secrets import masked
from trainer.errors import UserError, gathered
from trainer.progress import clock, compact

PACKAGES = ("torch", "transformers", "safetensors", "hydra-core", "numpy")


class Stage(ABC):
    """One step of the run; implementations are frozen dataclasses that do nothing heavy when built."""

    after: ClassVar[tuple[str, ...]]  # names of the stages whose folders it reads
    version: ClassVar[int]  # raise it when the code changes the result
    uses: ClassVar[tuple[str, ...]] = ()  # stages whose folders it reads where they are finished
    lasting: ClassVar[bool] = True  # False: a view of how things are now, made anew every time
    sized: ClassVar[tuple[str, ...]] = ()  # globs of files with checksums of their own, or that may grow

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        """By key what is wrong with settings that are right one by one, of this stage or together with those
        of `stages`, by name all that it stands on. Cheap: nothing outside the settings is looked at."""
        return {}

    def external(self) -> dict[str, Any]:
        """JSON-able facts outside the settings that decide the result, such as the hash of an input file."""
        return {}

    def preflight(self) -> None:
        """Raises UserError unless what it needs on this machine is there. Asked of every stage that will run,
        before the first one does."""
        return

    def foresee(self, inputs: dict[str, Path]) -> None:
        """Raises what can be told already from those of `inputs` that are finished, before the stages between
        are run."""
        return

    @abstractmethod
    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        """Writes its result into `out`, going on from what lies there, and returns the numbers that matter;
        "gates" among them holds gates as JSON by name. `inputs` holds the folder of each stage in `after`,
        and of those in `uses` that are finished."""

    def tell(self, folder: Path) -> None:
        """Prints what people want to see of a finished `folder`; every run that names the stage ends so."""
        return


@dataclass(frozen=True)
class Planned:
    """A stage with its place: where its folder is, and what it was computed from."""

    name: str
    stage: Stage
    settings: dict[str, Any]
    fingerprint: str
    inputs: dict[str, str]
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.partial")

    @property
    def state(self) -> str:
        if self.stage.lasting and finished(self.folder, self.fingerprint):
            return "reuse"
        return "continue" if self.partial.is_dir() and any(self.partial.iterdir()) else "run"


def build(node: dict[str, Any], **arguments: Any) -> Any:
    """The object that a plain node describes, nested nodes first; `arguments` are handed over as they are."""
    try:
        if arguments:
            return instantiate({**node, "_partial_": True}, _convert_="all")(**arguments)
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause: BaseException | None = error
        while isinstance(cause, InstantiationException):
            cause = cause.__cause__
        if cause is None:
            raise UserError(f"{node.get('_target_')} cannot be built: {_first_line(error)}") from error
        raise cause from None


def fingerprint(settings: Any, version: int, external: dict[str, Any], inputs: dict[str, str]) -> str:
    """sha256 of everything that decides the result, in canonical JSON."""
    facts = {"settings": _deciding(settings), "version": version, "external": external, "inputs": inputs}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def finished(folder: Path, expected: str, remove: str = "the folder") -> bool:
    """Whether the folder holds the finished result with this fingerprint; a damaged record is an error."""
    if not folder.exists():
        return False
    try:
        found = read_sealed(folder / "stage.json")["fingerprint"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} exists but its stage.json cannot be read ({_first_line(error)}); remove "
                        f"{remove} and run the same command again") from error
    if found != expected:
        raise UserError(f"{folder} was made by fingerprint {found}, not {expected}; remove {remove} and run "
                        f"the same command again")
    return True


def require_unchanged(folder: Path) -> None:
    """Raises when a file of the finished `folder` is not as the stage left it; records of older versions
    name no files, and nothing is compared."""
    if found := _folders.change(folder, read_sealed(folder / "stage.json").get("files", {})):
        raise UserError(f"{found}; remove {folder} and run the same command again")


def check(settings: dict[str, Any]) -> dict[str, str]:
    """By key what the stages that `run` reaches find wrong with their settings, before anything is done."""
    stages = _stages(settings)
    return {key: text for stage in stages.values() for key, text in stage.check(stages).items()}


def plan(settings: dict[str, Any]) -> list[Planned]:
    """The stages in `run` and all that they stand on, in order of their dependence. Raises once for all that
    is missing on this machine, where that keeps a stage from being planned."""
    root = _folders.usable("run_root", settings["run_root"], max(settings["run"], key=len, default=""))
    planned: dict[str, Planned] = {}
    with gathered() as attempt:
        for name, stage in _stages(settings).items():
            upstreams, external = (*stage.after, *stage.uses), attempt(stage.external)
            if external is None or not planned.keys() >= {*upstreams}:  # no fingerprint, so nothing finished
                if name in settings["run"]:
                    attempt(stage.preflight)
                continue
            inputs = {upstream: planned[upstream].fingerprint for upstream in upstreams}
            node = masked(settings[name])
            digest = fingerprint(node, stage.version, external, inputs)
            planned[name] = Planned(name, stage, node, digest, inputs, root / name / digest[:16])
    return list(planned.values())


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
        stage = build(settings[name])
        assert isinstance(stage, Stage), f"{name} is no Stage but {type(stage).__name__}"
        for upstream in (*stage.after, *stage.uses):
            add(upstream, name, (*open_stages, name))
        built[name] = stage

    for name in settings["run"]:
        add(name, name, ())
    return built


def show(stages: list[Planned], settings: dict[str, Any]) -> None:
    """The header of a run: what happens to each stage, and where its folder is."""
    if settings.get("recipe_name"):
        print(f"recipe {settings['recipe_name']}")
    width = max(len(planned.name) for planned in stages)
    for planned in stages:
        state = planned.state
        if planned.name not in settings["run"] and state != "reuse":
            state = "not in run="
        print(f"  {planned.name:<{width}}  {state:<8}  {planned.folder}", flush=True)
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
                attempt(planned.stage.preflight)


def run(settings: dict[str, Any]) -> Path:
    """Goes through the stages named in `run`; returns report.json or the last stage's folder."""
    stages = plan(settings)
    show(stages, settings)
    read = require_inputs(stages, settings["run"])
    preflight(stages, settings["run"])
    by_name = {planned.name: planned for planned in stages}
    wanted = [planned for planned in stages if planned.name in settings["run"]]
    for planned in stages:
        if planned.state == "reuse" and (planned in wanted or planned.name in read):
            require_unchanged(planned.folder)
    for place, planned in enumerate(wanted):
        if planned.state != "reuse":
            _execute(planned, {name: by_name[name].folder.resolve() for name in planned.inputs
                               if name in planned.stage.after or by_name[name].state == "reuse"})
        for later in wanted[place + 1:]:
            if planned.name in later.stage.after and later.state != "reuse":
                later.stage.foresee({name: by_name[name].folder.resolve() for name in later.stage.after
                                     if by_name[name].state == "reuse"})
    _remember(Path(settings["run_root"]).expanduser(), stages)
    for planned in wanted:
        planned.stage.tell(planned.folder)
    result = by_name["report"].folder / "report.json" if "report" in settings["run"] else wanted[-1].folder
    return result if result.exists() else wanted[-1].folder


def _execute(planned: Planned, inputs: dict[str, Path]) -> None:
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
            record = planned.stage.run(inputs, out.resolve())
            seconds = time.monotonic() - began
            _folders.settle(out)
            write_sealed(out / "stage.json", _stage_json(planned, record, seconds, state == "continue"))
            _say(planned.name, record, seconds)
        if not planned.stage.lasting:
            shutil.rmtree(planned.folder, ignore_errors=True)
        out.rename(planned.folder)
        _folders.sync(planned.folder.parent)


def _stage_json(planned: Planned, record: dict[str, Any], seconds: float, resumed: bool) -> dict[str, Any]:
    """`seconds` are those of the last call alone when `resumed` is true."""
    return {"stage": planned.name, "version": planned.stage.version, "fingerprint": planned.fingerprint,
            "settings": planned.settings, "inputs": planned.inputs, "record": record,
            "seconds": round(seconds, 3), "resumed": resumed, "versions": _versions(),
            "files": _folders.sums(planned.partial, planned.stage.sized)}


def _remember(root: Path, stages: list[Planned]) -> None:
    """`latest.json` maps each stage to its newest finished folder, so that people and scripts find it. A
    convenience: it is made anew where it cannot be read, and only missed where it cannot be written."""
    path = root / "latest.json"
    fresh = {planned.name: str(planned.folder.resolve()) for planned in stages if planned.folder.exists()}
    try:
        if fresh.items() - _known(path).items():
            with locked(path, "latest.json", wait=True):
                write_json(path, {**_known(path), **fresh})
    except (OSError, UserError) as error:
        reason = _first_line(error.__cause__ or error)
        print(f"note: {path} cannot be written and does not name these results ({reason})", flush=True)


def _known(path: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(folder) for name, folder in known.items()} if isinstance(known, dict) else {}
    return {}


def _say(name: str, record: dict[str, Any], seconds: float) -> None:
    numbers = [f"{key} {compact(value)}" for key, value in record.items() if isinstance(value, (int, float))]
    print(f"{name}: done in {clock(seconds)}" + "".join(f", {number}" for number in numbers[:8]), flush=True)
    for gate, held in record.get("gates", {}).items():
        print(f"  gate {gate}: {held['value']:.6g} {held['comparison']} {held['bound']:.6g}", flush=True)


def _deciding(node: Any) -> Any:
    """What can change the result: without `runtime` nodes and the keys that only steer the building."""
    if isinstance(node, dict):
        return {str(key): _deciding(value) for key, value in node.items()
                if key != "runtime" and (not str(key).startswith("_") or key in ("_target_", "_args_"))}
    return [_deciding(value) for value in node] if isinstance(node, list) else node


def _versions() -> dict[str, str]:
    found = {"trainer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
