"""View `serve_command`: the `vllm serve` line of a target with a published drafter, with ours, or with none.

    python -m trainer recipe=NAME run=[serve_command] serve_command.platform=cuda

Nothing of the target is fetched for it, but for the line of what these settings trained: that is named by
what the target's files hold. What the line needs besides the two names are `ServingFacts`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainer.errors import UserError
from trainer.export.formats import FORMATS
from trainer.export.serve_line import SCHEDULE, Place, draft_lengths, serve_line, speculation
from trainer.export.stitched import RECORD, Changes
from trainer.export.tuned import exported_facts, possible_lengths
from trainer.pipeline import Stage
from trainer.ranges import Count, Text
from trainer.target import Target
from trainer.training.build import MakeDrafter, draft_problem

Platform = Literal["rocm", "cuda"]
PARTS = ("flags", "variables", "draft")
K = "num_speculative_tokens"
OWN = ("method", "model", K)  # of a draft: what another drafter says for itself


@dataclass(frozen=True)
class ServingFacts:
    """How a target is served. `flags` are those of `vllm serve` without their dashes (true: the flag alone),
    `variables` go into its environment. `rocm` and `cuda` hold what one platform has besides, and `methods`
    what a method has, with a `draft` (the `--speculative-config` of its published drafter) and platforms of
    its own; null takes away. `serves` is the target's name, null for any; `published` the platform whose line
    was published, null where none was."""

    serves: str | None
    published: Platform | None
    flags: dict
    variables: dict
    rocm: dict
    cuda: dict
    methods: dict

    def __post_init__(self) -> None:
        platforms = ("rocm", "cuda")
        nodes = [("rocm", self.rocm, PARTS), ("cuda", self.cuda, PARTS)]
        for name, method in self.methods.items():
            nodes.append((f"methods.{name}", method, (*PARTS, *platforms)))
            nodes += [(f"methods.{name}.{each}", method[each], PARTS) for each in platforms if each in method]
        for place, node, known in nodes:
            if unknown := [part for part in node if part not in known]:
                raise UserError(f"serving.{place} has {', '.join(unknown)}, which nothing reads; it takes "
                                f"{', '.join(known)}")

    def problem(self, target: str) -> str | None:
        """Why these are not the facts of this target, for people; None where they are."""
        if self.serves in (None, target):
            return None
        return (f"holds the facts of {self.serves}, but the target is {target}; set serving= to the option "
                "of that target, or serving=plain")

    def line(self, platform: Platform, method: str | None, model: Place,
             draft: Mapping[str, Any] | None) -> str:
        """The `vllm serve` line of a model, with a `draft` of the method."""
        flags, variables = (self.part(part, platform, method) for part in ("flags", "variables"))
        return serve_line(model, draft, flags, variables)

    def part(self, name: str, platform: Platform, method: str | None) -> dict[str, Any]:
        """Flags, variables or draft, the more special ones on top of the others; null ones still there."""
        own = self.methods.get(method, {})
        layers = [{"flags": self.flags, "variables": self.variables}, getattr(self, platform), own,
                  own.get(platform, {})]
        return {key: value for layer in layers for key, value in layer.get(name, {}).items()}


@dataclass(frozen=True)
class ServeCommand(Stage):
    """`speculator` is `published`, `trained` (what `export` made, in its first format) or a folder or name on
    the Hub; `method` is `auto` (the drafter's), `none` (no drafter) or one of those in `serving.methods`; `k`
    null takes the published draft length, or the default of a drafter that was trained here; `arguments` are
    further words of the line."""

    serving: ServingFacts
    target: Target
    drafter: MakeDrafter
    platform: Platform
    method: Text
    speculator: Text
    k: Count | None
    arguments: list

    lasting: ClassVar[bool] = False
    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    @property
    def after(self) -> tuple[str, ...]:
        return ("export",) if self.trained else ()

    @property
    def trained(self) -> bool:
        return self.speculator == "trained" and self.method != "none"

    @property
    def served_method(self) -> str | None:
        return {"none": None, "auto": self.drafter.func.method}.get(self.method, self.method)

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        facts, name, found = self.serving, self.target.name, {}
        published, known = ", ".join(facts.methods) or "none", ["auto", "none", *facts.methods]
        if problem := facts.problem(name):
            found["serving"] = problem
        if self.trained and self.method != "auto":
            found["serve_command.method"] = f"must be auto for the trained drafter, but is {self.method}"
        elif self.method not in known:
            found["serve_command.method"] = (f"must be one of {', '.join(known)}, the methods published for "
                                             f"{name}, but is {self.method}")
        elif self.speculator == "published" and self.served_method not in (None, *facts.methods):
            found["serve_command.speculator"] = (
                "must be trained, or a drafter's folder or name on the Hub, as no "
                f"{self.served_method} drafter is published for {name} (published: {published}), but is "
                "published")
        if self.k is not None and self.trained and (problem := draft_problem(self.drafter, self.k)):
            found["serve_command.k"] = problem
        return found

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        method, model, draft = self.served_method, self.target.source.served, None
        if method is not None:
            draft = {"method": method} | self.serving.part("draft", self.platform, method)
            if self.trained:
                model, own = self._trained(inputs["export"])
                draft = own | {name: value for name, value in draft.items() if name not in OWN}
            elif self.speculator != "published":
                model, own = self._named(model)
                draft.pop("model", None)  # the published one
                draft |= {"method": method} | own
            draft[K] = self._k(draft)
            if self.k is not None:
                draft.pop(SCHEDULE, None)  # of a tuned drafter: other lengths than the one that was asked for
            draft = {name: value for name, value in draft.items() if value is not None}
        further = [shlex.quote(str(argument)) for argument in self.arguments]
        line = " ".join([self.serving.line(self.platform, method, model, draft), *further])
        facts = {"platform": self.platform, "method": method, "draft": draft, "command": line}
        (out / "serve_command.json").write_text(json.dumps(facts, indent=1) + "\n")
        return {}

    def tell(self, folder: Path) -> None:
        if self.serving.published not in (None, self.platform):
            print(f"note: published for {self.serving.published}; this line leaves out what is that "
                  f"platform's own, and was not tried on {self.platform}")
        if self.k is not None and self.speculator == "published" and self.served_method is not None:
            known = self.serving.part("draft", self.platform, self.served_method).get(K)
            if known is not None and self.k > known:
                print(f"note: published with {known} drafted tokens, and serve_command.k={self.k} is more: "
                      "not every server refuses a draft longer than its drafter was trained for, and what "
                      "lies beyond is noise")
        print(json.loads((folder / "serve_command.json").read_text())["command"], flush=True)

    def _k(self, draft: Mapping[str, Any]) -> int:
        k = self.k or draft.get(K)
        if k is None:
            raise UserError(f"no draft length is published for {draft.get('model', 'this drafter')}; set "
                            "serve_command.k")
        return k

    def _trained(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """What a server loads as its model, and the draft, of a finished `export`."""
        facts = json.loads((folder / "export.json").read_text())
        form = next((form for form in facts["formats"] if FORMATS[form].loaded), None)
        if form is None:
            raise UserError(f"{folder} has the changes to the target alone, which no server loads; put "
                            "stitched among export.formats, or apply them with tools/apply_mtp.py")
        self._require_possible(facts, folder)
        model, drafter = FORMATS[form].served(folder / form, facts["target"])
        return str(model), speculation(facts["method"], drafter, draft_lengths(facts))

    def _named(self, target: str) -> tuple[str, dict[str, Any]]:
        """What a server loads as its model, and what the drafter that is named says of the draft."""
        folder = Path(self.speculator).expanduser()
        whole = (folder / RECORD).is_file()  # a target with its drafter inside
        own: dict[str, Any] = {} if whole else {"model": self.speculator}
        if (folder / "speculator.json").is_file():
            facts = exported_facts(folder)
            if Changes.name in facts.get("formats", ()) and not whole:
                raise UserError(f"{folder} has the changes to the target alone, which no server loads; apply "
                                "them with tools/apply_mtp.py, and name the folder that it makes")
            self._require_possible(facts, folder)
            own |= draft_lengths(facts)
        return self.speculator if whole else target, own

    def _require_possible(self, facts: Mapping[str, Any], folder: Path) -> None:
        if self.k is not None and self.k not in (possible := possible_lengths(facts)):
            raise UserError(f"serve_command.k={self.k} is a draft length that no server takes of the drafter "
                            f"in {folder}; set it to one of {', '.join(map(str, possible))}")

