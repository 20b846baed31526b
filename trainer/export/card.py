"""The model card and the exact serve commands of an exported folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any


def serve_commands(form: str, method: str, folder: Path, target: str, k: int) -> dict[str, str]:
    """Commands by platform; the folder's own draft length is `k`."""
    speculation = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": k})
    explicit = f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(speculation)}"
    commands = {"vllm": explicit}
    if form == "speculators":
        commands["vllm (short)"] = f"vllm serve {shlex.quote(str(folder))}"
    return commands


def model_card(facts: dict[str, Any], commands: dict[str, str], target_name: str) -> str:
    lines = ["---", "tags:", "- speculative-decoding", f"- {facts['method']}", "---", "",
             f"# A {facts['method']} speculator for {target_name}", "",
             "A drafter for speculative decoding: the target's text stays as it is, it only comes faster.",
             "",
             "| | |", "| --- | --- |",
             f"| target | `{facts['target']}` |", f"| target identity | `{facts['target_identity']}` |",
             f"| chat template hash | `{facts['template_hash']}` |",
             f"| longest draft (max K) | {facts['max_k']} |", f"| default draft (K) | {facts['default_k']} |",
             f"| trained modes | {', '.join(facts['trained_modes'])} |",
             "", "## Serve", ""]
    for name, command in commands.items():
        lines += [f"{name}:", "", "```bash", command, "```", ""]
    lines += ["A `num_speculative_tokens` above the longest draft is not refused by every server, and "
              "drafts beyond it are noise.", "", "Trained with Speculator Trainer.", ""]
    return "\n".join(lines)
