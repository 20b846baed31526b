"""Stage `upload`: one exported folder onto the Hub, with a card of what was measured.

    python -m trainer 'run=[upload]' export.hub.repo=user/name

What `export` made of these settings goes, after its gates and, in a run that evaluates, those of `evaluate`;
or any exported folder, which `folder` names, as it lies. Done anew whenever it is named: what the Hub has
already is not sent again. Gives up: a card's figures come from `evaluate`, or from `sweep` where there is
nothing else; nothing is uploaded while training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer import _folders
from trainer._weight_files import CONVERT, pickles
from trainer.errors import UserError
from trainer.export.card import HUB_NAME, Card
from trainer.export.formats import FORMATS, FormatName
from trainer.export.hub import CARD, HubRepository
from trainer.export.provenance import read_provenance
from trainer.export.serve_command import ServingFacts
from trainer.export.serve_line import cpu_server, draft_lengths, speculation
from trainer.pipeline import Stage
from trainer.ranges import Text
from trainer.target import Hub, Target

PLATFORMS = {"rocm": "ROCm", "cuda": "CUDA"}


@dataclass(frozen=True)
class Upload(Stage):
    """`format` is one of those that were exported, null the first. `folder` names an exported folder, or a
    copy of one, that goes instead of what `export` made of these settings."""

    target: Target
    serving: ServingFacts
    hub: HubRepository
    format: FormatName | None
    folder: Text | None

    lasting: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @property
    def after(self) -> tuple[str, ...]:
        return () if self.folder else ("export",)

    @property
    def uses(self) -> tuple[str, ...]:
        return () if self.folder else ("evaluate", "sweep", "tune")

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        if self.hub.repo is None:
            found["export.hub.repo"] = "must name a repository on the Hub, like user/name, but is null"
        if self.folder:
            return found
        export = stages["export"]
        if self.format not in (None, *export.formats):
            found["upload.format"] = (f"must be among export.formats ({', '.join(export.formats)}), but "
                                      f"is {self.format}")
        source = self.target.source
        named = export.target_name or (source.repo if isinstance(source, Hub) else "")
        if not HUB_NAME.fullmatch(named):
            found["export.target_name"] = (
                "must be the target's name on the Hub, since who downloads the drafter has not this "
                f"machine's folder of it, but is {export.target_name or 'null'}")
        if problem := self.serving.problem(self.target.name):
            found["serving"] = problem
        return found

    def preflight(self) -> None:
        if self.folder:
            _files(self._given())
        self.hub.require_access()

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        folder = self._given()
        if folder is None:
            form = self.format or json.loads((inputs["export"] / "export.json").read_text())["formats"][0]
            folder = inputs["export"] / form
            files = _files(folder) | {CARD: self._card(form, folder, inputs, out)}
        else:
            files = _files(folder)
        facts = _folders.read_object(folder / "speculator.json", "give a folder of a finished stage export")
        if not HUB_NAME.fullmatch(str(facts.get("target"))):
            raise UserError(f"{folder / 'speculator.json'} says that its target is {facts.get('target')!r}, "
                            "expected its name on the Hub; export again with export.target_name=")
        size = sum(path.stat().st_size for path in files.values())
        print(f"upload: {folder} ({len(files)} files, {size / 1e6:,.1f} MB) to {self.hub.repo}, branch "
              f"{self.hub.branch}", flush=True)
        method = facts["method"]
        made = self.hub.upload(files, f"Speculator for {facts['target']} ({method})", method)
        (out / "upload.json").write_text(json.dumps(made, indent=1) + "\n")
        return {"repo": made["repo"], "commit": made["commit"], "tag": made["tag"], "bytes": size}

    def tell(self, folder: Path) -> None:
        made = json.loads((folder / "upload.json").read_text())
        print(f"uploaded: {made['url']} ({'private' if made['private'] else 'public'}), commit "
              f"{made['commit']}, tag {made['tag']}", flush=True)

    def _given(self) -> Path | None:
        return Path(self.folder).expanduser() if self.folder else None

    def _card(self, form: FormatName, folder: Path, inputs: Mapping[str, Path], out: Path) -> Path:
        facts = json.loads((folder / "speculator.json").read_text())
        rows = _measured(inputs, facts["method"])
        if not rows:
            print("upload: nothing was measured with these settings (neither evaluate nor sweep is finished),"
                  " and the card says so", flush=True)
        if self.hub.license == "unknown":
            print("upload: the card says that the license is unknown; set export.hub.license in keeping with "
                  "the target's", flush=True)
        card = Card(form, facts, self.target.name, read_provenance(folder), str(self.hub.repo),
                    self.hub.license, rows, self._lines(form, facts))
        path = out / CARD
        path.write_text(card.text(), encoding="utf-8")
        return path

    def _lines(self, form: FormatName, facts: dict[str, Any]) -> dict[str, str]:
        """Commands by what they are for: those of the format and, where vLLM loads it by its name, the whole
        line for each platform; one for both where they are the same."""
        repo, target, lengths = str(self.hub.repo), facts["target"], draft_lengths(facts)
        place = "DRAFTER" if form == "changes" else repo
        lines = FORMATS[form].commands(facts["method"], place, target, lengths, cpu_server(facts))
        if form == "changes":
            return {"Fetched first": f"hf download {repo} --local-dir DRAFTER", **lines}
        model, drafter = FORMATS[form].served(repo, target)
        found = {}
        for platform, name in PLATFORMS.items():
            draft = self.serving.part("draft", platform, facts["method"]) \
                | speculation(facts["method"], drafter, lengths)
            kept = {key: value for key, value in draft.items() if value is not None and (
                drafter is not None or key != "model")}
            found[f"vLLM on {name}"] = self.serving.line(platform, facts["method"], model, kept)
        if len({*found.values()}) == 1:
            found = {"vLLM on ROCm or CUDA": lines["vllm"]}
        return found | {name: line for name, line in lines.items() if name != "vllm"}


def _measured(inputs: Mapping[str, Path], method: str) -> list[dict[str, Any]]:
    """The rows of evaluate; without them those of a sweep with its longest draft and its fewest users."""
    if "evaluate" in inputs:
        return json.loads((inputs["evaluate"] / "rows.json").read_text())
    if "sweep" not in inputs:
        return []
    rows = [row for row in json.loads((inputs["sweep"] / "rows.json").read_text()) if row["method"] == method]
    longest = max((row["num_speculative_tokens"] for row in rows), default=0)
    fewest = min((row["users"] for row in rows), default=0)
    return [row for row in rows if (row["num_speculative_tokens"], row["users"]) == (longest, fewest)]


def _files(folder: Path | None) -> dict[str, Path]:
    """What of a folder is uploaded, by its path there: all files that are not hidden. Raises for what is no
    exported drafter, for pickles, and for links that lead out of it."""
    assert folder is not None, "who asks has one"
    if not ((folder / "speculator.json").is_file() and [*folder.glob("*.safetensors")]):
        raise UserError(f"{folder} is no folder of an exported drafter: it has no speculator.json, or no "
                        "*.safetensors; set upload.folder to one of the folders in a finished stage export, "
                        "such as speculators/, or to null")
    if found := pickles(folder):
        raise UserError(f"{folder} has {found}, which may run code when they are opened and are not "
                        f"uploaded; {CONVERT}, and remove them there")
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path} is a link to {path.resolve()}, out of the folder that is uploaded; put "
                            "a copy in its place (cp -L)")
        files[name.as_posix()] = path
    return files
