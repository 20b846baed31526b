"""What is watched beside the figures of a run: trained tensors that stay as they began, and a term that is
next to all of the loss. Both are told by name, in the output, the log and the record of the stage."""

from __future__ import annotations

import zlib
from typing import Any

from torch import nn

from trainer.errors import UserError

UNMOVED_AFTER = 50  # steps in which every tensor that gets a gradient moves
DOMINATING = 0.9    # share of the loss
SHARE = "share/"    # of a term, in the log
TERM = "loss/"      # of a term, among the figures of a step


class Monitors:
    """Begins with a fresh drafter, before a checkpoint is loaded into it: what a resumed run compares with is
    what the first one began with. What was told before stands in the lines of the log."""

    def __init__(self, drafter: nn.Module) -> None:
        self.drafter, self.start = drafter, _sums(drafter)

    def watch(self, step: int, last: bool, sums: dict[str, tuple[float, float]],
              lines: list[dict[str, Any]]) -> dict[str, Any]:
        """More for the line of the log of `step`, behind `lines`; `sums` are those since the last one."""
        total = sums["loss"][0]
        found: dict[str, Any] = {SHARE + name.removeprefix(TERM): round(part / total, 5)
                                 for name, (part, _) in sums.items() if name.startswith(TERM) and total}
        for name, share in list(found.items()):
            term = name.removeprefix(SHARE)
            if share > DOMINATING and all(line.get("dominating") != term for line in lines):
                found["dominating"] = term
                print(f"train: the loss term {term} is {share:.0%} of the loss at step {step}; the others "
                      f"hardly count: mend their weights in drafter.*", flush=True)
        if last or (lines[-1]["step"] if lines else 0) < UNMOVED_AFTER <= step:
            unmoved = [name for name, now in _sums(self.drafter).items() if now == self.start[name]]
            if len(unmoved) == len(self.start):
                raise UserError(f"no trained tensor has moved by step {step}, so nothing is learnt; raise "
                                "optimizer.lr, or train.clip where it is as small")
            if unmoved:
                found["unmoved"] = unmoved
                print(f"train: {len(unmoved)} trained tensors have not moved by step {step}: "
                      f"{', '.join(unmoved)}; no gradient reaches them, or their rate in optimizer.* is too "
                      "small", flush=True)
        return found


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found in a whole run: tensors that have not moved to its end, and terms that were next to all
    of the loss at some step."""
    return {"unmoved": lines[-1].get("unmoved", []),
            "dominating": [{"term": line["dominating"], "step": line["step"],
                            "share": line[SHARE + line["dominating"]]}
                           for line in lines if "dominating" in line]}


def _sums(drafter: nn.Module) -> dict[str, int]:
    """A checksum of every tensor that is trained."""
    return {name: zlib.crc32(parameter.detach().cpu().contiguous().reshape(-1).numpy())
            for name, parameter in drafter.named_parameters() if parameter.requires_grad}
