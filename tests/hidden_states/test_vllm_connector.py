"""The connector as vLLM calls it, case by case: who gets a file, what is in it, what is left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_support import vllm_python

from trainer.engines.vllm_installation import find_installation
from trainer.engines.vllm_states import place_connector
from trainer.target import Target

pytestmark = pytest.mark.vllm
WORKER = Path(__file__).with_name("connector_worker.py")


@pytest.fixture(scope="module")
def found(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("connector")
    modules = place_connector(output / "module")
    installation = find_installation(vllm_python())
    answer = subprocess.run(
        [installation.python, str(WORKER), str(tiny_target.folder), str(output)],
        env=installation.environment("0", 1) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(modules)},
        capture_output=True, text=True, timeout=300, cwd=output)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads((output / "found.json").read_text())


def test_only_who_asks_and_ends_well_gets_a_file(found: dict[str, Any]) -> None:
    for case in ("aborted", "failed", "ignored", "not asked", "asked in vain"):
        assert found["answers"][case] == [False, None]
    assert found["answers"]["too few blocks"] == [False, {"error": "only 8 states are kept for 9 tokens"}]
    assert found["jobs of these"] == 0


def test_files_hold_the_rows_of_the_blocks_in_order(found: dict[str, Any]) -> None:
    assert len(found["rows"]) == 30
    for row in found["rows"]:
        assert row["keeps"] and row["states"] and row["tokens"] and row["sums"] and row["described"]
        assert row["done"] == [["same id"], None], "blocks are given back as soon as they are copied"


def test_the_answer_has_a_bare_name_and_the_facts(found: dict[str, Any]) -> None:
    names = [row["facts"]["file"] for row in found["rows"]]
    assert len(set(names)) == len(names), "even for requests of one name"
    assert all(len(name) == 44 and "/" not in name for name in names)
    facts = found["rows"][0]["facts"]
    assert {name: facts[name] for name in facts if name not in ("file", "rows")} == {
        "format": 2, "layers": [1, 3], "hidden_size": 64, "dtype": "float32", "model_layers": 3,
        "vocabulary": 320, "max_num_seqs": 2, "prefix_caching": False}
    assert found["with prefix caching"] is True


def test_a_name_begins_with_its_reader_and_nothing_else_of_the_request(found: dict[str, Any]) -> None:
    assert found["whose"] == ["89abcdef", "89abcdef", *["00000000"] * 6] and found["all different"]


def test_one_worker_writes(found: dict[str, Any]) -> None:
    assert found["rank 1 writes"] is False
    assert found["a worker without the layer writes"] is False
    assert found["nothing more to give back"] == [None, None]


def test_a_failed_write_is_told_and_its_blocks_are_given_back(found: dict[str, Any]) -> None:
    assert found["blocks of a failed write"] == ["g"]
    assert list(found["what it says"]) == ["true"] and found["what it says"]["true"]


def test_what_nobody_fetched_is_removed(found: dict[str, Any]) -> None:
    young = f"{1:032x}.safetensors.partial"
    assert found["kept at the start"] == [young, "notes.safetensors"], "only old files, and only ours"
    assert found["stale file in between"] is True and found["stale file after a while"] is False
    assert found["kept at the end"] == [young, "notes.safetensors"], "only what this server wrote"
    assert found["partial files"] == []


def test_wrong_settings_stop_the_server(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "hand out layers [1, 3]" in refused["other layers"] and "[2, 3]" in refused["other layers"]
    assert "must ascend and end with 3" in refused["no last layer"]
    assert "must ascend and end with 3" in refused["no order"]
    assert "with folder and layers, found ['folder', 'layers', 'path']" in refused["a path more"]
