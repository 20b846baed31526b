"""The model card of an exported folder."""

from __future__ import annotations

import re
from typing import Any

from trainer.export.base import FUSED_VLLM
from trainer.export.formats import FORMATS
from trainer.export.serve_line import draft_lengths

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def default_line(facts: dict[str, Any]) -> str:
    """The line that says which draft is the default."""
    return f"| default draft (K) | {facts['default_k']} |"


def model_card(form: str, facts: dict[str, Any], target_name: str) -> str:
    """README.md of the folder: no path of this machine is in it, since the folder may travel. Its commands
    are given inside the folder. Without a published target its users are told to fill in the place."""
    published = HUB_NAME.fullmatch(facts["target"]) is not None
    served = facts["target"] if published else f"PATH/TO/{target_name}"
    commands = FORMATS[form].commands(facts["method"], ".", served, draft_lengths(facts))
    if not published:
        commands.pop("vllm (short)", None)  # it looks for the target where this machine has it
    tags = ["speculative-decoding", form, facts["method"]]
    lines = ["---", *([f"base_model: {facts['target']}"] if published else []), "library_name: vllm",
             "license: unknown", "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags),
             "---", "", f"# A {facts['method']} speculator for {target_name}", "",
             "A drafter for speculative decoding: the target's text stays as it is, it only comes faster.",
             "", "| | |", "| --- | --- |",
             f"| target | `{facts['target'] if published else target_name}` |",
             f"| target identity | `{facts['target_identity']}` |",
             f"| chat template hash | `{facts['template_hash']}` |",
             f"| longest draft (max K) | {facts['max_k']} |", f"{default_line(facts)}",
             f"| trained modes | {', '.join(facts['trained_modes'])} |",
             "", "## Serve", "", "In this folder:", ""]
    fused = commands.pop(FUSED_VLLM)
    for command in commands.values():
        lines += ["```bash", command, "```", ""]
    lines += ["With fused verification, for which Speculator Trainer has to be in vLLM's environment as well "
              "(`pip install --no-deps`):", "", "```bash", fused, "```", ""]
    if facts["needs_v2"]:
        lines += ["vLLM has this method in its Model Runner V2 alone, which a build for CPUs lacks.", ""]
    lines += ["A `num_speculative_tokens` above the longest draft is not refused by every server, and "
              "drafts beyond it are noise.", "",
              "## Measured", "", "Acceptance and speed are measured after this card is written: see "
              "`report.json` and `report.html` of the run. Before publishing, copy them here, and set "
              "`license` above in keeping with the target's.", "", "Trained with Speculator Trainer.", ""]
    return "\n".join(lines)
