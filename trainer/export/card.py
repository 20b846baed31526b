"""The model card of an exported folder: what it is, how to serve it, how it came about, what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.export.base import CPU_VLLM, FUSED_VLLM
from trainer.export.formats import FORMATS
from trainer.export.serve_line import SCHEDULE, Place, cpu_server, draft_lengths

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TUNED = "\n## Tuned\n"  # the last section, which is replaced when a drafter is tuned again
DATA = ("prompts", "responses", "hidden_states")
UNMEASURED = ("Acceptance and speed are measured after this card is written: see `report.json` and "
              "`report.html` of the run. Before publishing, copy them here, and set `license` above in "
              "keeping with the target's.")


@dataclass(frozen=True)
class Card:
    """README.md of a folder of the format `form` with these `facts`; no path of this machine is in it, since
    the folder may travel. `place` is where it is served from, `rows` what was measured, and `lines` are
    commands by what they are for, in place of those of the format."""

    form: str
    facts: Mapping[str, Any]
    target_name: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    place: Place = "."
    license: str = "unknown"
    rows: Sequence[Mapping[str, Any]] | None = None
    lines: Mapping[str, str] | None = None

    def text(self) -> str:
        parts = [self._head(), self._table(), self._serve(), *self._measured(), *self._repeat()]
        tuned = TUNED + f"\n{told_tuning(self.facts)}\n" if "speculate" in self.facts else ""
        return "\n".join([*parts, "Trained with Speculator Trainer.", ""]) + tuned

    @property
    def published(self) -> bool:
        """Without a published target the card's readers are told to fill in the place."""
        return HUB_NAME.fullmatch(self.facts["target"]) is not None

    def _head(self) -> str:
        facts, form = self.facts, FORMATS[self.form]
        tags = ["speculative-decoding", self.form, facts["method"]]
        base = [f"base_model: {facts['target']}"] if self.published else []
        return "\n".join(["---", *base, "library_name: vllm", f"license: {self.license}",
                          "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", "",
                          f"# {form.title.format(target=self.target_name)} ({facts['method']})", "",
                          form.about, ""])

    def _table(self) -> str:
        facts, stages = self.facts, self.provenance.get("stages", {})
        data = [f"{name} `{stages[name]['fingerprint'][:16]}`" for name in DATA if name in stages]
        rows = {"target": f"`{facts['target'] if self.published else self.target_name}`",
                "target revision": _code(facts.get("target_commit")),
                "target identity": f"`{facts['target_identity']}`",
                "chat template hash": f"`{facts['template_hash']}`",
                "longest draft (max K)": facts["max_k"]}
        more = {"trained modes": ", ".join(facts["trained_modes"]),
                "trained context": f"{facts['trained_context']} tokens, the longest sample"
                if "trained_context" in facts else None,
                "longest context": f"{facts['max_context']} tokens, by scaled positions"
                if "max_context" in facts else None,
                "recipe": _code(self.provenance.get("recipe")), "training data": ", ".join(data) or None}
        lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
        lines += [default_line(facts), *(f"| {name} | {value} |" for name, value in more.items() if value)]
        return "\n".join(["| | |", "| --- | --- |", *lines, ""])

    def _serve(self) -> str:
        lines = ["## Serve", ""]
        if self.lines is not None:
            for name, command in self.lines.items():
                lines += [f"{name}:", "", *_block(command)]
        else:
            served = self.facts["target"] if self.published else f"PATH/TO/{self.target_name}"
            commands = FORMATS[self.form].commands(self.facts["method"], self.place, served,
                                                   draft_lengths(self.facts), cpu_server(self.facts))
            if not self.published:
                commands.pop("vllm (short)", None)  # it looks for the target where this machine has it
            lines += ["In this folder:", ""]
            fused, cpu = commands.pop(FUSED_VLLM), commands.pop(CPU_VLLM, None)
            for command in commands.values():
                lines += _block(command)
            if cpu is not None:
                lines += ["With a build of vLLM for CPUs, which takes nearly all memory unless it is told "
                          "how much, in GiB:", "", *_block(cpu)]
            lines += ["With fused verification, for which Speculator Trainer has to be in vLLM's environment "
                      "as well (`pip install --no-deps`):", "", *_block(fused)]
        if self.facts["needs_v2"]:
            lines += ["vLLM has this method in its Model Runner V2 alone, which a build for CPUs lacks.", ""]
        return "\n".join([*lines, "A `num_speculative_tokens` above the longest draft is not refused by "
                          "every server, and drafts beyond it are noise.", ""])

    def _measured(self) -> list[str]:
        if self.rows is None:
            return ["## Measured", "", UNMEASURED, ""]
        if not self.rows:
            return ["## Measured", "", "Nothing was measured yet.", ""]
        lines = ["| data | engine | K | users | accepted length | accepted by position | speed-up |",
                 "| --- | --- | --- | --- | --- | --- | --- |", *map(_row, self.rows)]
        return ["## Measured", "", "The accepted length counts the target's own token; position i counts "
                "where all up to it were accepted; the speed-up is over plain decoding on the machine of the "
                "measurement.", "", *lines, ""]

    def _repeat(self) -> list[str]:
        if not self.provenance.get("repeat"):
            return []
        ran = self.provenance["versions"]
        return ["## Made by", "", *_block(self.provenance["repeat"]),
                f"Speculator Trainer {ran['trainer']}{_at(self.provenance.get('commit'))}, torch "
                f"{ran.get('torch')}, transformers {ran.get('transformers')}. `provenance.json` has all "
                "settings and fingerprints.", ""]


def default_line(facts: Mapping[str, Any]) -> str:
    """The line that says which draft is the default."""
    return f"| default draft (K) | {facts['default_k']} |"


def told_tuning(facts: Mapping[str, Any]) -> str:
    """What was tuned, in words."""
    if not facts["speculate"]:
        return "Do not speculate: over the measured traffic no draft length was faster than plain decoding."
    batches = "; ".join(f"batches of {first} to {last}: K = {k}"
                        for first, last, k in facts.get(SCHEDULE, []))
    return (f"Of single draft lengths K = {facts['default_k']} is the best over the measured traffic"
            f"{f' ({batches})' if batches else ''}; {facts['tuned_speedup']:.2f}x plain decoding is "
            "expected.")


def _row(row: Mapping[str, Any]) -> str:
    speedup, engine = row.get("speedup"), str(row.get("engine")).replace("_", " ")
    cells = [row["dataset"], "vLLM" if engine == "vllm" else engine,
             row["num_speculative_tokens"], row.get("users") or "", f"{row['mean_accepted_length']:.2f}",
             " ".join(f"{rate:.2f}" for rate in row["per_position_acceptance"]),
             "" if speedup is None else f"{speedup:.2f}x"]
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _block(command: str) -> list[str]:
    return ["```bash", command, "```", ""]


def _code(text: Any) -> str | None:
    return None if text is None else f"`{text}`"


def _at(commit: str | None) -> str:
    return f" at `{commit}`" if commit else ""
