"""What tests of the Hub share: the server as they see it, and stages that write to it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from tiny import OFFLINE, dflash, finished_inputs, make_dflash, random_samples, uneven

from trainer.cpu_build import CpuServer
from trainer.export.hub import HubRepository, HubRuntime
from trainer.export.serve_command import ServingFacts
from trainer.export.stage import Export
from trainer.export.upload import Upload
from trainer.target import Target
from trainer.training import checkpoint
from trainer.training.build import save_counts

TOKEN = "hf_writes"
REPO = "tester/drafter"
PLAIN = ServingFacts(None, None, {}, {}, {}, {}, {})
SETTINGS = {"layers": 1, "block_size": 8}


class Hub:
    """The server, and what tests ask of it."""

    def __init__(self, url: str, cache: Path) -> None:
        self.url, self.cache = url, cache

    def ask(self, path: str, content: Any = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data=body), timeout=30) as answer:
            return json.load(answer)

    def order(self, *faults: dict[str, Any]) -> None:
        """Faults, once each unless they say how often."""
        self.ask("/_faults", [{"times": 1, **fault} for fault in faults])

    def asked(self, method: str, part: str) -> list[dict[str, Any]]:
        return [each for each in self.ask("/_asked") if each["method"] == method and part in each["path"]]

    def repo(self, name: str = REPO) -> dict[str, Any]:
        return self.ask("/_repos")[name]

    def files(self, revision: str = "main", name: str = REPO) -> dict[str, bytes]:
        """A download of the repository."""
        folder = Path(snapshot_download(name, revision=revision, cache_dir=self.cache))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
                if path.is_file() and path.name != ".gitattributes"}


def place(**changes: Any) -> HubRepository:
    return HubRepository(**{"repo": REPO, "private": True, "branch": "main", "license": "unknown",
                            "runtime": HubRuntime(3, 0.01), **changes})


def stage(target: Target, **changes: Any) -> Upload:
    """Keys of the repository and of the stage alike."""
    own = {name: changes.pop(name) for name in ("format", "folder", "serving") if name in changes}
    return Upload(**{"target": target, "serving": PLAIN, "hub": place(**changes), "format": None,
                     "folder": None, **own})


def export_for(target: Target, folder: Path) -> Path:
    """A finished stage export in an empty folder: of a random drafter, for a target said to be published."""
    train, counts = folder / "train", torch.arange(320).flip(0)
    train.mkdir()
    save_counts(train, counts)
    save_file(checkpoint.trained(uneven(dflash(target, counts, **SETTINGS))), train / "weights.safetensors")
    inputs = {**finished_inputs(target, folder, random_samples((30, 22, 17)), heldout=0), "train": train}
    out = folder / "export"
    out.mkdir()
    Export(target=target, drafter=make_dflash(**SETTINGS), source=OFFLINE,
           formats=["speculators", "native"], dtype="bfloat16", default_k=3, target_name="org/target",
           cpu_server=CpuServer("float32", 512, 2), max_context=None, trained_modes=["chat"], probe_rows=1,
           calibration_drafts=20, recipe="some_recipe", command='["train.epochs=2"]',
           hub=place()).run(inputs, out)
    return out
