"""Stages, and how a run goes through them: fingerprint, reuse or run in `.partial`, record, rename.

A folder is named by what made it (settings, code version, outside facts, upstream fingerprints): one that
exists is complete and is reused, a `.partial` one can only be continued by the same settings. Gives up:
nothing is deleted here, old folders stay until their owner removes them. Only this and `__main__` know Hydra.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from trainer import __version__
from trainer._paths import flush, locked, sync, write_json
from trainer.errors import UserError
from trainer.progress import clock, compact

SECRETS = ("token", "api_key", "password", "secret")
SECRET_ENDINGS = ("_api_key", "_password", "_secret", "hf_token", "access_token", "auth_token")
MASK = "***"
PACKAGES = ("torch", "transformers", "safetensors", "hydra-core", "numpy")
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 1 << 20  # with less than this left, any failure to write is taken for a full disk


class Stage(ABC):
    """One step of the run; implementations are frozen dataclasses that do nothing heavy when built."""

    after: ClassVar[tuple[str, ...]]  # names of the stages whose folders it reads
    version: ClassVar[int]  # raise it when the code changes the result
    uses: ClassVar[tuple[str, ...]] = ()  # stages whose folders it reads where they are finished
    lasting: ClassVar[bool] = True  # False: a view of how things are now, made anew every time

    def external(self) -> dict[str, Any]:
        """JSON-able facts outside the settings that decide the result, such as the hash of an input file."""
        return {}

    def foresee(self, inputs: dict[str, Path]) -> None:  # noqa: B027 (most stages have nothing to foresee)
        """Raises what can be told already from those of `inputs` that are finished, before the stages between
        are run."""

    @abstractmethod
    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        """Writes its result into `out`, going on from what lies there, and returns the numbers that matter;
        "gates" among them holds gates as JSON by name. `inputs` holds the folder of each stage in `after`,
        and of those in `uses` that are finished."""


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


def masked(node: Any, name: str = "") -> Any:
    """The node with passwords and the like replaced; `${...}` stays, it only says where one comes from."""
    if isinstance(node, dict):
        return {key: masked(value, str(key).lower()) for key, value in node.items()}
    if isinstance(node, list):  # may be command-line arguments: --api-key=VALUE, or --api-key and then VALUE
        flags = ["", *map(_flag, node)]
        return [masked(value, flags[place] or name) for place, value in enumerate(node)]
    if not isinstance(node, str) or node.startswith("${"):
        return node
    flag, given, _ = node.partition("=")
    if given and _is_secret(_flag(flag)):
        return f"{flag}={MASK}"
    return MASK if _is_secret(name) else node


def _flag(argument: Any) -> str:
    text = str(argument)
    return text[2:].replace("-", "_").lower() if text.startswith("--") else ""


def _is_secret(name: str) -> bool:
    return name in SECRETS or name.endswith(SECRET_ENDINGS)


def finished(folder: Path, expected: str) -> bool:
    """Whether the folder holds the finished result with this fingerprint; a damaged one is an error."""
    if not folder.exists():
        return False
    try:
        found = json.loads((folder / "stage.json").read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} exists but its stage.json cannot be read ({_first_line(error)}); remove "
                        f"the folder and run the same command again") from error
    if found != expected:
        raise UserError(f"{folder} was made by fingerprint {found}, not {expected}; remove the folder and "
                        f"run the same command again")
    return True


def plan(settings: dict[str, Any]) -> list[Planned]:
    """The stages in `run` and all that they stand on, in order of their dependence."""
    root = Path(settings["run_root"]).expanduser()
    planned: dict[str, Planned] = {}

    def add(name: str, reader: str, open_stages: tuple[str, ...]) -> None:
        assert name not in open_stages, f"stages read each other in a circle: {(*open_stages, name)}"
        if name in planned:
            return
        if not isinstance(settings.get(name), dict):
            raise UserError(f"stage '{reader}' reads '{name}', which the configuration does not have; "
                            f"choose an option for the group {name}")
        stage = build(settings[name])
        assert isinstance(stage, Stage), f"{name} is no Stage but {type(stage).__name__}"
        upstreams = (*stage.after, *stage.uses)
        for upstream in upstreams:
            add(upstream, name, (*open_stages, name))
        inputs = {upstream: planned[upstream].fingerprint for upstream in upstreams}
        node = masked(settings[name])
        digest = fingerprint(node, stage.version, stage.external(), inputs)
        planned[name] = Planned(name, stage, node, digest, inputs, root / name / digest[:16])

    for name in settings["run"]:
        add(name, name, ())
    return list(planned.values())


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


def run(settings: dict[str, Any]) -> Path:
    """Goes through the stages named in `run`; returns report.json or the last stage's folder."""
    stages = plan(settings)
    show(stages, settings)
    by_name = {planned.name: planned for planned in stages}
    wanted = [planned for planned in stages if planned.name in settings["run"]]
    for planned in wanted:
        for name in planned.stage.after:
            if name not in settings["run"] and by_name[name].state != "reuse":
                names = ",".join(each.name for each in stages if each.name in (*settings["run"], name))
                raise UserError(f"stage '{planned.name}' reads '{name}', which is not in run= and has no "
                                f"finished folder for these settings ({by_name[name].folder}); add it: "
                                f"run=[{names}]")
    for place, planned in enumerate(wanted):
        if planned.state != "reuse":
            _execute(planned, {name: by_name[name].folder.resolve() for name in planned.inputs
                               if name in planned.stage.after or by_name[name].state == "reuse"})
        for later in wanted[place + 1:]:
            if planned.name in later.stage.after and later.state != "reuse":
                later.stage.foresee({name: by_name[name].folder.resolve() for name in later.stage.after
                                     if by_name[name].state == "reuse"})
    _remember(Path(settings["run_root"]).expanduser(), stages)
    result = by_name["report"].folder / "report.json" if "report" in settings["run"] else wanted[-1].folder
    return result if result.exists() else wanted[-1].folder


def _execute(planned: Planned, inputs: dict[str, Path]) -> None:
    out = planned.partial
    with locked(planned.folder, f"stage '{planned.name}'"), _full_disk(f"stage '{planned.name}'", out):
        state = planned.state
        if state == "reuse":  # finished by another process since the plan was made
            return
        if not planned.stage.lasting:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(exist_ok=True)
        for stale in out.glob(".stage.json.*"):  # left by a process that was killed while it wrote
            stale.unlink()
        if not (out / "stage.json").exists():  # written last: where it exists, only the rename is missing
            print(f"{planned.name}: {state}", flush=True)
            began = time.monotonic()
            record = planned.stage.run(inputs, out.resolve())
            seconds = time.monotonic() - began
            flush(out)
            write_json(out / "stage.json", _stage_json(planned, record, seconds, resumed=state == "continue"))
            _say(planned.name, record, seconds)
        if not planned.stage.lasting:
            shutil.rmtree(planned.folder, ignore_errors=True)
        out.rename(planned.folder)
        sync(planned.folder.parent)


@contextlib.contextmanager
def _full_disk(stage: str, folder: Path) -> Iterator[None]:
    """Says in one sentence when the disk is full; libraries report that in their own words, or not at all."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _tells_of_full_disk(error) or _free_bytes(folder) < FULL_BYTES:
            raise UserError(f"the disk is full: {stage} could not go on writing to {folder}; free some space "
                            f"and run the same command to go on, or set run_root= to another disk") from error
        raise


def _stage_json(planned: Planned, record: dict[str, Any], seconds: float, resumed: bool) -> dict[str, Any]:
    """`seconds` are those of the last call alone when `resumed` is true."""
    return {"stage": planned.name, "version": planned.stage.version, "fingerprint": planned.fingerprint,
            "settings": planned.settings, "inputs": planned.inputs, "record": record,
            "seconds": round(seconds, 3), "resumed": resumed, "versions": _versions()}


def _remember(root: Path, stages: list[Planned]) -> None:
    """`latest.json` maps each stage to its newest finished folder, so that people and scripts find it."""
    path = root / "latest.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}  # a convenience, made anew
    fresh = {planned.name: str(planned.folder.resolve()) for planned in stages if planned.folder.exists()}
    with _full_disk("latest.json", root):
        write_json(path, {**(known if isinstance(known, dict) else {}), **fresh})


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


def _tells_of_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def _versions() -> dict[str, str]:
    found = {"trainer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
