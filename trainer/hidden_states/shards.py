"""The folder of stored hidden states, format 2.

- `manifest.json`, written first, says what the states are (`base.Manifest`).
- `shard-00000.bin`, ...: samples one after the other, each from a page of 4096 bytes on, in the sections of
  `codec`: layer by layer, so that a drafter that reads fewer layers touches only those.
- `index.bin`: which sample lies where (`index`). A record is written when its sample is safe on the disk.

`writer.ShardWriter` appends, `reader.ShardReader` reads, also while a writer is at work or from a copy of the
folder. A killed writer leaves bytes that no record names; the next one cuts them off and goes on. Samples may
be stored in any order and are found by their id. Given up: nothing is ever removed or replaced in place.
"""

from __future__ import annotations

import re
from pathlib import Path

GIB = 1 << 30


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.bin"


def shard_numbers(folder: Path) -> list[int]:
    """The shards that lie in a folder, committed or not."""
    found = (re.fullmatch(r"shard-(\d{5,})\.bin", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def again(folder: Path) -> str:
    """The remedy for damage, which may lie in the folder that another one links to."""
    origin = (folder / "manifest.json").resolve().parent
    if origin == folder.resolve():
        return f"remove {folder} and run the stage hidden_states again"
    return (f"its files are those of {origin}: take a sound copy of it or leave hidden_states.path out, "
            f"remove {folder} and run the stage hidden_states again")
