"""What tests of the Hub share: the server as they see it, and stages that write to it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from trainer.export.hub import HubRepository, HubRuntime
from trainer.export.serve_command import ServingFacts
from trainer.export.upload import Upload
from trainer.target import Target

TOKEN = "hf_writes"
REPO = "tester/drafter"
PLAIN = ServingFacts(None, None, {}, {}, {}, {}, {})


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
