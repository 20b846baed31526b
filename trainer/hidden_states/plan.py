"""View `plan`: what the hidden states of a run take in every mode and storage, before a byte of them is made.

    python -m trainer recipe=NAME run=[plan]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

from trainer.data.prompts import read_prompts
from trainer.data.responses import Length, read_samples
from trainer.hidden_states.base import Manifest, Storage
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.shards import GIB
from trainer.pipeline import Stage


@dataclass(frozen=True)
class Need:
    """What one mode takes on the disk in one storage; `share` of it fits there now (1: all)."""

    mode: str
    storage: Storage
    bytes_per_token: float
    bytes: int
    share: float


@dataclass(frozen=True)
class Plan(Stage):
    """Sizes are exact where `responses` is finished; before that every answer is taken to be as long as it
    may become."""

    prompts: Any        # the stage of that name
    responses: Any      # the same; its `longest` says how long rows may become
    hidden_states: Any  # the same; its `manifest` says what would be stored

    after: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ("prompts", "responses")
    lasting: ClassVar[bool] = False
    version: ClassVar[int] = 1

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        rows, manifest = self._rows(inputs), self.hidden_states.manifest()
        free = shutil.disk_usage(out).free
        needs = needed(rows, manifest, free)
        facts = {"rows": len(rows), "tokens": sum(row.tokens for row in rows), "exact": "responses" in inputs,
                 "layers": manifest.tap_layers, "last_rows": manifest.last_rows, "dtype": manifest.dtype,
                 "hidden_size": manifest.hidden_size, "free_bytes": free}
        _show(facts, needs, manifest, out)
        (out / "plan.json").write_text(json.dumps({**facts, "needs": [*map(asdict, needs)]}, indent=1) + "\n")
        return {name: facts[name] for name in ("rows", "tokens", "free_bytes")}

    def _rows(self, inputs: dict[str, Path]) -> list[Length]:
        if "responses" in inputs:
            return [Length(sample.id, len(sample.tokens), sample.supervised) for name in ("train", "heldout")
                    for sample in read_samples(inputs["responses"], name)]
        if "prompts" in inputs:
            return self.responses.longest(read_prompts(inputs["prompts"]))
        with tempfile.TemporaryDirectory() as folder:
            self.prompts.run({}, Path(folder))
            return self.responses.longest(read_prompts(Path(folder)))


def needed(rows: Sequence[Length], manifest: Manifest, free: int) -> list[Need]:
    """Offline and hybrid store the same, hybrid as much of it as there is room for; online stores nothing."""
    found = []
    tokens = sum(row.tokens for row in rows)
    for storage in get_args(Storage):
        codec = Codec.of(replace(manifest, storage=storage))
        total = sum(codec.stored_bytes(len(row.id.encode()), row.tokens, _kept(row, manifest),
                                       manifest.alignment) for row in rows)
        share = min(1.0, free / total) if total else 1.0
        found += [Need("offline", storage, total / tokens, total, float(share == 1)),
                  Need("hybrid", storage, total / tokens, round(total * share), share)]
    return [*found, Need("online", manifest.storage, 0.0, 0, 1.0)]


def _kept(row: Length, manifest: Manifest) -> int:
    """Rows of the last state that are stored: none before the first supervised token is read."""
    return {"all": row.tokens, "none": 0}.get(manifest.last_rows, min(row.supervised, max(0, row.tokens - 1)))


def _show(facts: dict[str, Any], needs: Sequence[Need], manifest: Manifest, out: Path) -> None:
    from rich import print as rich_print
    from rich.table import Table

    table = Table("mode", "storage", "bytes a token", "on the disk", "fits", box=None, padding=(0, 2))
    for need in needs:
        fits = "yes" if need.share == 1 else "no" if need.mode == "offline" else f"{need.share:.0%} of it"
        named = manifest.dtype if need.storage == "native" else need.storage
        table.add_row(need.mode, named, f"{need.bytes_per_token:,.0f}", f"{need.bytes / GIB:,.3f} GiB", fits)
    length = "" if facts["exact"] else " at most (answers are not there yet)"
    print(f"{facts['rows']:,} rows, {facts['tokens']:,} tokens{length}; layers {manifest.tap_layers} and the "
          f"last one, {manifest.hidden_size} wide; {facts['free_bytes'] / GIB:,.1f} GiB free in {out.parent}")
    rich_print(table)
