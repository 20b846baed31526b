"""Stage `export`: trained weights -> folders that a server loads as they are, each read back and compared.

The gates rebuild a drafter from the folder alone (its config.json and tensors, no settings of the run) and
compare its logits with the trainer's own twice: with the trained weights rounded to the exported dtype, which
must give the same, and with the trained weights as they are, which shows what the rounding costs. """

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from trainer import cpu_build
from trainer.architectures.base import Drafter
from trainer.architectures.geometry import geometry, lengthened
from trainer.data.responses import read_samples
from trainer.errors import UserError
from trainer.export.base import told
from trainer.export.beside import beside
from trainer.export.calibration import calibrate
from trainer.export.card import HUB_NAME, Card
from trainer.export.formats import FORMATS, FormatName, Serving
from trainer.export.hub import HubRepository
from trainer.export.layout import known, own
from trainer.export.provenance import provenance, write_provenance
from trainer.export.serve_line import cpu_server, draft_lengths
from trainer.gates import Gate, require
from trainer.hidden_states.base import HiddenStateSource, MakeSource
from trainer.pipeline import Stage
from trainer.ranges import AtLeast, Count, Distinct, Dtype, Filled
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import MakeDrafter, draft_problem, load_trained, require_drafts, without_values

OWN = ("dtype", "target_name", "probe_rows", "calibration_drafts")  # what speculator.json does not say
Probe = tuple[tuple[int, ...], torch.Tensor]  # a sample's tokens and taps
ROUNDING = 32.0  # steps of the dtype, relative to the logits; trained drafters were moved by 1 to 5


@dataclass(frozen=True)
class Export(Stage):
    """`default_k` is what a server drafts unless told otherwise; `target_name` is written as the target to
    serve with (null: as its source names it); `max_context` scales the draft's rotary positions for texts
    longer than its positions (null: they are the target's). A drafter that estimates its own acceptance is
    calibrated on `calibration_drafts` held-out drafts. `cpu_server` is what the line for a build of vLLM for
    CPUs says. `recipe` and `command` are told in provenance.json; where `hub` has a repository, the stage
    upload ends every run that exports."""

    target: Target
    drafter: MakeDrafter
    source: MakeSource
    formats: Annotated[list[FormatName], Filled(), Distinct()]
    dtype: Dtype
    default_k: Count
    target_name: str | None
    cpu_server: cpu_build.CpuServer
    max_context: Count | None
    trained_modes: list[str]
    probe_rows: Count
    calibration_drafts: Annotated[int, AtLeast(2)]
    recipe: str | None
    command: str | None
    hub: HubRepository

    after: ClassVar[tuple[str, ...]] = ("responses", "hidden_states", "train")
    version: ClassVar[int] = 1
    idle: ClassVar[tuple[str, ...]] = ("recipe", "command", "hub", "cpu_server")

    @property
    def brings(self) -> tuple[str, ...]:
        return ("upload",) if self.hub.repo else ()

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        kind, settings = self.drafter.func, self.drafter.keywords
        problem, possible = draft_problem(self.drafter, self.default_k), (*kind.formats, *kind.other_formats)
        found = {} if problem is None else {"export.default_k": problem}
        problems = {form: FORMATS[form].problem(kind.method, settings) for form in self.formats
                    if form in kind.other_formats}
        if unknown := [form for form in self.formats if form not in possible]:
            found["export.formats"] = (f"must be among {', '.join(possible)}, the formats of this drafter, "
                                       f"but has {', '.join(unknown)}{kind.needs and f'; {kind.needs}'}")
        elif wrong := [f"has {form}, and {text}" for form, text in problems.items() if text]:
            found["export.formats"] = wrong[0]
        if self.max_context is not None and not kind.scales:
            found["export.max_context"] = "must be null for this drafter, whose positions are the target's"
        return found

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def preflight(self) -> None:
        require_drafts(self.drafter, self.target, {"export.default_k": self.default_k})
        if not self.drafter.func.other_formats:
            return
        try:  # what would be written, before anything is trained
            if self.max_context is not None:
                lengthened(geometry(self.target.config, 1, 1), self.max_context)
            own(without_values(self.drafter, self.target).export(), self._serving(""))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(str(error)) from error

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        drafter = load_trained(self.drafter, self.target, inputs["train"])
        if self.max_context is not None:
            drafter = drafter.lengthened(self.max_context)
        dtype = getattr(torch, self.dtype)
        exported = drafter.export()
        name = self.target_name or self.target.source.served
        if not HUB_NAME.fullmatch(name):
            print(f"export: the folders name the target by the path {name}; give export.target_name=<hub id> "
                  "before you publish them", flush=True)
        serving = self._serving(name)
        if known(exported):
            print(f"export: target and draft\n{beside(self.target.config, own(exported, serving))}",
                  flush=True)
        samples = read_samples(inputs["responses"], "train")
        facts = {"method": drafter.method, "needs_v2": drafter.needs_v2, "max_k": drafter.max_k,
                 "possible_k": self._possible(drafter.max_k), "default_k": self.default_k, "target": name,
                 "model": self.target.name,
                 "target_identity": self.target.identity, "template_hash": self.target.template_hash,
                 "target_commit": self.target.source.commit, "trained_modes": self.trained_modes,
                 "trained_context": max(len(sample.tokens) for sample in samples), "formats": self.formats,
                 **({} if self.max_context is None else {"max_context": self.max_context})}
        if not drafter.needs_v2:
            facts["cpu_server"] = asdict(self.cpu_server)
        with closing(self.source(folder=inputs["hidden_states"], layers=drafter.tap_layers)) as source:
            probes = [(sample.tokens, source.get(sample).taps.float())
                      for sample in samples[:self.probe_rows]]
            if drafter.estimates:
                facts["confidence"] = self._calibrated(drafter.rounded(dtype), inputs["responses"], source)
        for form in self.formats:
            FORMATS[form].write(out / form, exported, serving, dtype)
            FORMATS[form].seal(out / form, serving)
            (out / form / "speculator.json").write_text(json.dumps(facts, indent=1) + "\n")
        gates = require(self._gates(drafter, probes, out, dtype))
        made = provenance(inputs, self.recipe, self.command, self.target.source.commit,
                          {key: getattr(self, key) for key in OWN})
        for form in self.formats:
            write_provenance(out / form, made)
            (out / form / "README.md").write_text(Card(form, facts, self.target.name, made).text())
        final = out.with_name(out.name.removesuffix(".partial"))  # where the folder will lie when finished
        first = self.formats[0]
        commands = FORMATS[first].commands(drafter.method, final / first, name, draft_lengths(facts),
                                           cpu_server(facts))
        (out / "export.json").write_text(json.dumps({**facts, "serve_commands": commands}, indent=1) + "\n")
        return {"gates": gates, "formats": self.formats, "max_k": drafter.max_k, "default_k": self.default_k,
                **({"confidence": facts["confidence"]} if drafter.estimates else {}),
                "parameters": sum(tensor.numel() for tensor in exported.weights.values())}

    def tell(self, folder: Path) -> None:
        facts = json.loads((folder / "export.json").read_text())
        for form in facts["formats"]:
            print(f"exported: {folder / form}, {FORMATS[form].use}")
        first = facts["formats"][0]
        commands = FORMATS[first].commands(facts["method"], folder.resolve() / first, facts["target"],
                                           draft_lengths(facts),
                                           None if facts["needs_v2"] else cpu_build.here(self.cpu_server))
        print("\n".join(told(commands, facts)), flush=True)

    def _calibrated(self, drafter: Drafter, responses: Path, source: HiddenStateSource) -> dict[str, Any]:
        found = calibrate(drafter, read_samples(responses, "heldout"), source, self.calibration_drafts)
        if not found["drafts"]:
            print("export: no held-out answer is long enough to calibrate the confidence on, which stays as "
                  "it was trained; raise prompts.heldout or responses.sampling.max_new_tokens", flush=True)
        elif "error_after" in found:
            print(f"export: confidence calibrated on {found['drafts']} held-out drafts; expected error of a "
                  f"prefix's survival on {found['judged_on']} others {found['error_before']:.4f} before, "
                  f"{found['error_after']:.4f} after", flush=True)
        return found

    def _possible(self, longest: int) -> list[int]:
        """The draft lengths with which the drafter can be served."""
        return [k for k in range(1, longest + 1)
                if draft_problem(self.drafter, k, self.target.config) is None]

    def _serving(self, name: str) -> Serving:
        whole = json.loads((self.target.folder / "config.json").read_text())
        names = self.target.config.get("architectures") or whole.get("architectures", [])
        return Serving(name, names, self.default_k, self.target.folder,
                       self.target.config["num_hidden_layers"])

    def _gates(self, drafter: Drafter, probes: list[Probe], out: Path, dtype: torch.dtype) -> list[Gate]:
        rounded = drafter.rounded(dtype)
        head = load_target_head(self.target.folder, self.target.config)
        gates = []
        for form in self.formats:
            again = type(drafter).restore(FORMATS[form].read(out / form), form, head)
            trained, kept, found = ([_logits(each, drafter.max_k, *probe) for probe in probes]
                                    for each in (drafter, rounded, again))
            misread = max(float((one - two).abs().max()) for one, two in zip(kept, found, strict=True))
            gates += [Gate(f"readback_{form}", misread, 1e-4, "<=",
                           "the exported folder does not describe the trained drafter: a config key "
                           "(rope, head_dim, layer ids, mask token) or a tensor differs"),
                      Gate(f"rounding_{form}", _moved(trained, found), ROUNDING * torch.finfo(dtype).eps,
                           "<=",
                           f"the trained weights do not survive export.dtype={self.dtype}: some are too "
                           "large or too small for it; export in float32")]
        return gates


def _logits(drafter: Drafter, k: int, tokens: tuple[int, ...], taps: torch.Tensor) -> torch.Tensor:
    """Draft logits [k, draft vocabulary] in the middle of a sample."""
    anchor = len(tokens) // 2
    context = drafter.extend(drafter.new_context(), tokens[:anchor], taps[:anchor])
    return drafter.draft_logits(context, tokens[anchor], k)


def _moved(trained: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Relative change of the logits of several drafts. A draft counts up to the first token that differs:
    what is behind one may be another draft's."""
    pairs = [(one[:same], two[:same]) for one, two in zip(trained, found, strict=True)
             for same in [int((one.argmax(-1) == two.argmax(-1)).int().cumprod(0).sum()) + 1]]
    wide, other = (torch.cat(each) for each in zip(*pairs, strict=True))
    return float((other - wide).norm() / (wide - wide.mean(-1, keepdim=True)).norm())
