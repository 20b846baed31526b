"""The promise of a source of hidden states, and what every folder of them says about itself."""

from __future__ import annotations

import errno
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from trainer.errors import UserError
from trainer.hidden_states.shards import again
from trainer.ranges import Gives
from trainer.records import HiddenStates, Sample

Storage = Literal["native", "float8_e4m3fn"]
LastRows = Literal["supervised", "all", "none"]
FORMAT = 2
DTYPES = ("float32", "bfloat16", "float16")
LAYER_CONVENTION = "residual stream after L decoder layers; 0 = embeddings"
LAST_CONVENTION = "after all layers, before the final norm"
CONVENTIONS = {"layer_convention": LAYER_CONVENTION, "last_convention": LAST_CONVENTION, "format": FORMAT}
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class HiddenStateSource(ABC):
    """Gives the hidden states of one sample. Every source gives equal tensors for equal samples."""

    every_tap: ClassVar[bool] = False  # whether it hands on taps that are no layer ids, too
    shared: ClassVar[bool] = False     # whether several processes may each have one at the same time

    @abstractmethod
    def get(self, sample: Sample) -> HiddenStates:
        """States in the dtype of the manifest, on the CPU; rows of `last` that are not kept are zero. May be
        called by several threads at once."""

    @property
    @abstractmethod
    def ahead(self) -> int:
        """How many rows of training are worth preparing before they are needed, each by a thread."""

    @abstractmethod
    def give_up(self) -> None:
        """Lets go of what other threads wait for in vain: they fail, and only `close` may follow."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What breaks off the block, an interrupt included, need not wait for a server that is lost."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise

    @abstractmethod
    def close(self) -> None: ...


# A source's YAML node, waiting for a finished `hidden_states` stage and the layers to give.
MakeSource = Annotated[Callable[..., HiddenStateSource], Gives(("folder", "layers"))]


@dataclass(frozen=True)
class Manifest:
    """What a folder of hidden states holds, by name, so that no reader mistakes its conventions. Written
    before anything else and never changed; which samples lie there is the index's business."""

    target: str            # identity of the target
    template: str          # hash of chat template and its arguments
    tap_layers: list[int]  # "after L layers", ascending
    hidden_size: int
    dtype: str             # of the states that a reader gets
    storage: Storage       # how they lie on the disk
    last_rows: LastRows    # which rows of the last state are kept
    engine: str            # what computed them, with its version
    alignment: int = 4096  # bytes; a sample starts at a multiple
    layer_convention: str = LAYER_CONVENTION
    last_convention: str = LAST_CONVENTION
    format: int = FORMAT

    @staticmethod
    def path(folder: Path) -> Path:
        return folder / "manifest.json"

    def write(self, folder: Path) -> None:
        """Puts the manifest into the folder; where one is already, it must say the same (but for the version
        of the engine, of which the older one stays)."""
        path = self.path(folder)
        if path.exists():
            Manifest.read(folder).require(folder, **{name: value for name, value in asdict(self).items()
                                                     if name not in ("engine", *CONVENTIONS)})
            return
        beside = path.with_suffix(".partial")
        with writing(folder):
            with beside.open("w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self), indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            beside.rename(path)
            sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        path = cls.path(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{path} is missing or not readable ({reason}); expected the manifest of hidden "
                            f"states: {again(folder)}") from error
        if fault := _fault(content):
            raise UserError(f"{path} {fault}; {again(folder)}")
        return cls(**content)

    def require(self, folder: Path, *, layers: Sequence[int] = (), last: bool = False,
                **expected: Any) -> None:
        """Raises unless the folder holds `layers` (all of them, maybe more), the last state where `last` says
        that it is read, and in every other named field exactly what is `expected`."""
        path = self.path(folder)
        if missing := sorted(set(layers) - set(self.tap_layers)):
            raise UserError(f"the drafter reads layers {sorted(layers)} but the hidden states hold layers "
                            f"{self.tap_layers} ({path}), so {missing} are missing; set both from "
                            f"target.tap_layers and extract again")
        if last and self.last_rows == "none":
            raise UserError(f"the drafter reads the target's last state but {path} says last_rows=none; set "
                            f"hidden_states.last_rows=supervised and extract again")
        for name, value in expected.items():
            if (found := getattr(self, name)) != value:
                raise UserError(f"{path} holds hidden states of another {_WORDS.get(name, name)}: expected "
                                f"{value}, found {found}; {again(folder)}")


_WORDS = {"target": "target", "template": "chat template", "tap_layers": "choice of layers",
          "dtype": "dtype", "storage": "storage", "last_rows": "choice of rows of the last state",
          "hidden_size": "hidden size"}


def _fault(content: Any) -> str:
    """What is wrong with a manifest's content; "" when nothing is."""
    if not isinstance(content, dict):
        return f"is no manifest: expected a JSON object, found {type(content).__name__}"
    if (found := content.get("format")) != FORMAT:
        return f"is of format {found!r}, expected format {FORMAT}: other formats are not read"
    names = {field.name for field in fields(Manifest)}
    if names != content.keys():
        return (f"is no manifest of format {FORMAT}: missing {sorted(names - content.keys())}, unknown "
                f"{sorted(content.keys() - names)}")
    for name, expected in CONVENTIONS.items():
        if content[name] != expected:
            return f"has another {name}: expected {expected!r}, found {content[name]!r}"
    for name, known in (("dtype", DTYPES), ("storage", get_args(Storage)), ("last_rows", get_args(LastRows))):
        if content[name] not in known:
            return f"says {name} {content[name]!r}, expected one of {', '.join(known)}"
    layers = content["tap_layers"]
    if not isinstance(layers, list) or not all(isinstance(each, int) for each in layers) \
            or layers != sorted(set(layers)):
        return f"says tap_layers {layers!r}, expected ascending layer ids"
    for name, unit in (("hidden_size", 1), ("alignment", 64)):
        value = content[name]
        if not isinstance(value, int) or value < unit or value % unit:
            return f"says {name} {value!r}, expected a positive multiple of {unit}"
    return ""


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Says in one sentence that `place` may not be written; other errors, a full disk among them, pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise UserError(f"{place} cannot be written ({error.strerror}); hidden states stored there can be "
                        "read but not extended: make the folder writable, or set run_root= to another "
                        "one") from error


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
