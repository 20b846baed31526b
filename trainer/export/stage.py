"""Stage `export`: trained weights -> folders that a server loads as they are, each read back and compared.

The gates rebuild a drafter from the folder alone (its config.json and tensors, no settings of the run) and
compare its logits with the trainer's own twice: with the trained weights rounded to the exported dtype, which
must give the same, and with the trained weights as they are, which shows what the rounding costs. """

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from trainer.architectures.base import Drafter
from trainer.data.responses import read_samples
from trainer.export.card import model_card, serve_commands
from trainer.export.formats import FORMATS, FormatName, Serving
from trainer.gates import Gate, require
from trainer.hidden_states.base import MakeSource
from trainer.pipeline import Stage
from trainer.ranges import Count, Distinct, Dtype, Filled
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import MakeDrafter, draft_problem, load_trained

ROUNDING = 32.0  # steps of the dtype, relative to the logits; trained drafters were moved by 1 to 5


@dataclass(frozen=True)
class Export(Stage):
    """`default_k` is what a server drafts unless told otherwise; `target_name` is written as the target to
    serve with (null: its folder)."""

    target: Target
    drafter: MakeDrafter
    source: MakeSource
    formats: Annotated[list[FormatName], Filled(), Distinct()]
    dtype: Dtype
    default_k: Count
    target_name: str | None
    trained_modes: list[str]
    probe_rows: Count

    after: ClassVar[tuple[str, ...]] = ("responses", "hidden_states", "train")
    version: ClassVar[int] = 1

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        problem = draft_problem(self.drafter, self.default_k)
        return {} if problem is None else {"export.default_k": problem}

    def external(self) -> dict[str, Any]:
        return self.target.facts

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        drafter = load_trained(self.drafter, self.target, inputs["train"])
        dtype = getattr(torch, self.dtype)
        exported = drafter.export()
        name = self.target_name or str(self.target.folder)
        serving = Serving(name, self.target.config.get("architectures") or self._architectures(),
                          self.default_k)
        facts = {"method": drafter.method, "needs_v2": drafter.needs_v2, "max_k": drafter.max_k,
                 "default_k": self.default_k, "target": name, "target_identity": self.target.identity,
                 "template_hash": self.target.template_hash, "trained_modes": self.trained_modes,
                 "formats": self.formats}
        for form in self.formats:
            FORMATS[form].write(out / form, exported, serving, dtype)
            (out / form / "speculator.json").write_text(json.dumps(facts, indent=1) + "\n")
        gates = require(self._gates(drafter, inputs, out, dtype))
        for form in self.formats:
            (out / form / "README.md").write_text(model_card(form, facts, self.target.name))
        final = out.with_name(out.name.removesuffix(".partial"))  # where the folder will lie when finished
        first = self.formats[0]
        commands = serve_commands(first, drafter.method, final / first, name, self.default_k)
        (out / "export.json").write_text(json.dumps({**facts, "serve_commands": commands}, indent=1) + "\n")
        return {"gates": gates, "formats": self.formats, "max_k": drafter.max_k, "default_k": self.default_k,
                "parameters": sum(tensor.numel() for tensor in exported.weights.values())}

    def _architectures(self) -> list[str]:
        return json.loads((self.target.folder / "config.json").read_text()).get("architectures", [])

    def _gates(self, drafter: Drafter, inputs: dict[str, Path], out: Path, dtype: torch.dtype) -> list[Gate]:
        rounded = drafter.rounded(dtype)
        head = load_target_head(self.target.folder, self.target.config)
        source = self.source(folder=inputs["hidden_states"], layers=drafter.tap_layers)
        samples = read_samples(inputs["responses"], "train")
        gates = []
        try:
            probes = [(sample.tokens, source.get(sample).taps.float())
                      for sample in samples[:self.probe_rows]]
        finally:
            source.close()
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
