"""Stage `export`: trained weights -> folders that a server loads as they are, each read back and compared.

The gate rebuilds a drafter from the folder alone (its config.json and tensors, no settings of the run) and
compares its logits with the trainer's own, the trained weights rounded to the exported dtype. """

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer.architectures.base import Drafter
from trainer.data.responses import read_samples
from trainer.errors import UserError
from trainer.export.card import model_card, serve_commands
from trainer.export.formats import Serving, choose
from trainer.gates import Gate, require
from trainer.hidden_states.base import HiddenStateSource
from trainer.pipeline import Stage
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import MakeDrafter, load_trained


@dataclass(frozen=True)
class Export(Stage):
    """`default_k` is what a server drafts unless told otherwise; `target_name` is written as the target to
    serve with (null: its folder)."""

    target: Target
    drafter: MakeDrafter
    source: Any
    formats: list[str]
    dtype: str
    default_k: int
    target_name: str | None
    trained_modes: list[str]
    probe_rows: int

    after: ClassVar[tuple[str, ...]] = ("responses", "hidden_states", "train")
    version: ClassVar[int] = 1

    def external(self) -> dict[str, Any]:
        for name in self.formats:
            choose(name)
        return {"target": self.target.identity}

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        drafter = load_trained(self.drafter, self.target, inputs["train"])
        if not 1 <= self.default_k <= drafter.max_k:
            raise UserError(f"export.default_k={self.default_k} must lie between 1 and {drafter.max_k}, the "
                            "longest draft that this drafter was trained for")
        dtype = getattr(torch, self.dtype)
        exported = drafter.export()
        name = self.target_name or str(self.target.folder)
        serving = Serving(name, self.target.config.get("architectures") or self._architectures(),
                          self.default_k)
        facts = {"method": drafter.method, "max_k": drafter.max_k, "default_k": self.default_k,
                 "target": name, "target_identity": self.target.identity,
                 "template_hash": self.target.template_hash, "trained_modes": self.trained_modes,
                 "formats": self.formats}
        for form in self.formats:
            choose(form).write(out / form, exported, serving, dtype)
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
        source: HiddenStateSource = self.source(folder=inputs["hidden_states"],
                                                layers=drafter.tap_layers)
        samples = read_samples(inputs["responses"], "train")
        gates = []
        try:
            probes = [(sample, source.get(sample).taps.float()) for sample in samples[:self.probe_rows]]
        finally:
            source.close()
        for form in self.formats:
            again = type(drafter).restore(choose(form).read(out / form), form, head)
            worst = max(_difference(rounded, again, sample.tokens, taps) for sample, taps in probes)
            gates.append(Gate(f"readback_{form}", worst, 1e-4, "<=",
                              "the exported folder does not describe the trained drafter: a config key "
                              "(rope, head_dim, layer ids, mask token) or a tensor differs"))
        return gates


def _difference(one: Drafter, other: Drafter, tokens: tuple[int, ...], taps: torch.Tensor) -> float:
    """Largest absolute difference of draft logits in the middle of a sample."""
    anchor = len(tokens) // 2
    found = [drafter.draft_logits(drafter.extend(drafter.new_context(), taps[:anchor]), tokens[anchor],
                                  drafter.max_k) for drafter in (one, other)]
    return float((found[0] - found[1]).abs().max())
