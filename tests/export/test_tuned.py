"""What tuning writes into exported folders: the keys that vLLM reads, the card, the commands, the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer._folders import change, read_sealed, sums, write_sealed
from trainer.errors import UserError
from trainer.export.serve_line import SCHEDULE, draft_lengths
from trainer.export.tuned import exported_facts, write_tuned

COMMAND = """vllm serve t --speculative-config '{"method": "dflash", "num_speculative_tokens": 3}'"""
TUNED = {"default_k": 4, "speculate": True, "speedup": 1.5, SCHEDULE: [[1, 3, 7], [4, 16, 2]]}
PLAIN = {"default_k": None, "speculate": False, "speedup": 1.0, SCHEDULE: None}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A finished stage as it is on the disk, with empty weights."""
    root, facts = tmp_path / "0123", {"method": "dflash", "max_k": 7, "default_k": 3,
                                      "formats": ["speculators", "native"]}
    for form in facts["formats"]:
        folder = root / form
        folder.mkdir(parents=True)
        alone = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {}}}
        (folder / "config.json").write_text(json.dumps(alone if form == "speculators" else {"hidden": 1}))
        (folder / "speculator.json").write_text(json.dumps(facts))
        (folder / "README.md").write_text(f"| max K | 7 |\n| default draft (K) | 3 |\n{COMMAND}\n")
        (folder / "model.safetensors").write_bytes(b"")
    (root / "export.json").write_text(json.dumps({**facts, "serve_commands": {"vllm": COMMAND}}))
    write_sealed(root / "stage.json", {"stage": "export", "files": sums(root)})
    return root


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_every_format_is_served_as_tuned(export: Path) -> None:
    write_tuned(export, TUNED)
    keys = '"num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 3, 7], [4, 16, 2]]'
    for form in ("speculators", "native"):
        facts, card = exported_facts(export / form), (export / form / "README.md").read_text()
        assert (facts["default_k"], facts["speculate"], facts["max_k"]) == (4, True, 7)
        assert facts[SCHEDULE] == [[1, 3, 7], [4, 16, 2]]
        assert "| default draft (K) | 4 |" in card and keys in card and card.count("## Tuned") == 1
        assert "draft lengths K = 4 is the best" in card and "batches of 4 to 16: K = 2" in card
    config = read(export / "speculators/config.json")["speculators_config"]
    assert config == {"proposal_methods": [{"speculative_tokens": 4}], "verifier": {}}
    assert read(export / "native/config.json") == {"hidden": 1}
    assert keys in exported_facts(export)["serve_commands"]["vllm"]
    assert change(export, read_sealed(export / "stage.json")["files"]) == ""


def test_tuning_again_replaces_what_was_tuned(export: Path) -> None:
    before = {path: path.read_bytes() for path in export.rglob("*") if path.is_file()}
    write_tuned(export / "native", TUNED)  # a format stands for the whole export
    write_tuned(export, {**TUNED, "default_k": 3, SCHEDULE: None})
    assert SCHEDULE not in exported_facts(export)
    assert exported_facts(export)["serve_commands"]["vllm"] == COMMAND
    card = (export / "speculators/README.md").read_text()
    assert card.startswith(before[export / "speculators/README.md"].decode()) and card.count("## Tuned") == 1
    assert (export / "native/model.safetensors").read_bytes() == b""


def test_where_speculation_loses_the_folder_says_so(export: Path) -> None:
    write_tuned(export, TUNED)
    write_tuned(export, PLAIN)
    facts = exported_facts(export)
    assert (facts["speculate"], facts["default_k"]) == (False, 4) and SCHEDULE not in facts
    assert "Do not speculate" in (export / "native/README.md").read_text()


def test_a_copy_of_one_format_is_enough(export: Path, tmp_path: Path) -> None:
    (export / "speculators").rename(tmp_path / "copy")
    (tmp_path / "copy/README.md").unlink()
    write_tuned(tmp_path / "copy", TUNED)
    assert read(tmp_path / "copy/speculator.json")[SCHEDULE] == [[1, 3, 7], [4, 16, 2]]
    assert not (tmp_path / "copy/README.md").exists()


def test_a_server_drafts_as_many_as_the_longest_of_a_schedule() -> None:
    assert draft_lengths({"default_k": 3}) == {"num_speculative_tokens": 3}
    assert draft_lengths({"default_k": 3, SCHEDULE: [[1, 8, 3]]}) == {"num_speculative_tokens": 3}
    uneven = {"default_k": 3, SCHEDULE: [[1, 8, 5], [9, 16, 0]]}
    assert draft_lengths(uneven) == {"num_speculative_tokens": 5, SCHEDULE: [[1, 8, 5], [9, 16, 0]]}


def test_what_is_no_export_or_was_changed_is_left_alone(export: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"speculator.json cannot be read \(No such file"):
        write_tuned(tmp_path, TUNED)
    card = export / "native/README.md"
    card.write_text("mine")
    with pytest.raises(UserError, match="README.md is not as it was left"):
        write_tuned(export, TUNED)
    assert card.read_text() == "mine" and exported_facts(export)["default_k"] == 3
    (export / "export.json").write_text("[]")
    with pytest.raises(UserError, match="export.json cannot be read"):
        exported_facts(export)


def test_no_format_leads_out_of_the_folder(export: Path, tmp_path: Path) -> None:
    facts = read(export / "export.json")
    (export / "export.json").write_text(json.dumps({**facts, "formats": ["native", "../../elsewhere"]}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/speculator.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"names the formats '../../elsewhere', expected some of speculators"):
        write_tuned(export, TUNED)
    assert read(tmp_path / "elsewhere/speculator.json") == facts
