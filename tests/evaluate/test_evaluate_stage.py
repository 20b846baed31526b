"""Stage `evaluate` in this process: real drafting from the exported folder, rows, and gates."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import dflash, engine, make_dflash, uneven

from trainer.architectures.dflash import DFlash
from trainer.data.prompts import Jsonl, Prompts
from trainer.errors import GateFailed
from trainer.evaluate.decode import decode
from trainer.evaluate.rows import Tally, in_process
from trainer.evaluate.stage import Evaluate
from trainer.export.formats import FORMATS, Serving
from trainer.records import Sampling
from trainer.target import Target

PROMPTS = [{"id": f"{kind}{number}", "turns": [f"{kind} {number}?"], "category": kind, "split": "heldout"}
           for number in range(3) for kind in ("chat", "maths")] + [{"turns": ["train"], "split": "train"}]


@pytest.fixture(scope="module")
def inputs(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("prompts", "export"):
        (folder / name).mkdir()
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    Prompts(Jsonl(str(source)), None, 6).run({}, folder / "prompts")
    drafter = uneven(dflash(tiny_target, block_size=8, layers=1))
    FORMATS["speculators"].write(folder / "export/speculators", drafter.export(),
                                Serving("t", ["LlamaForCausalLM"], 3), torch.float32)
    (folder / "export/export.json").write_text(json.dumps({"method": "dflash", "max_k": 7}))
    return {"prompts": folder / "prompts", "export": folder / "export"}


def stage(target: Target, **changes: Any) -> Evaluate:
    return Evaluate(**{"target": target, "drafter": make_dflash(), "engine": engine(), "server": None,
                       "dtype": "float32", "sampling": Sampling(12, 0.0, 1.0, 0), "prompts": 6, "k": [3],
                       "users": 1, "warmup": 0, "rounds": 2, "format": "speculators",
                       "agreement": 0.02, **changes})


def test_rows_hold_what_was_decoded(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    record = stage(tiny_target, k=[3, 7]).run(inputs, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["dataset"], row["num_speculative_tokens"]) for row in rows] == [
        ("heldout", 3), ("heldout", 7), ("heldout/chat", 3), ("heldout/maths", 3)]
    for row in rows:
        positions = row["per_position_acceptance"]
        assert len(positions) == row["num_speculative_tokens"]
        assert positions == sorted(positions, reverse=True)
        assert row["mean_accepted_length"] == pytest.approx(1 + sum(positions), abs=1e-3)
        assert row["acceptance_rate"] == pytest.approx(sum(positions) / len(positions), abs=1e-3)
        assert row["engine"] == "in_process" and row["lossless"] is True and row["speedup"] is None
        assert (row["model"], row["method"], row["dtype"], row["users"]) == ("tiny", "dflash", "float32", 1)
    for figure in ("drafts", "output_tokens", "prompts"):
        assert rows[0][figure] == rows[2][figure] + rows[3][figure] > 0
    assert record["lossless"] is True and record["gates"]["in_process_lossless"]["passed"]
    assert record["accepted_length"] == rows[0]["mean_accepted_length"] and record["k"] == 3


def test_the_folder_is_what_is_measured(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    """Counts equal a decoding with the drafter that was exported, whatever the settings of the run say."""
    stage(tiny_target, drafter=partial(DFlash, seed=99)).run(inputs, tmp_path)
    [row] = [row for row in json.loads((tmp_path / "rows.json").read_text()) if row["dataset"] == "heldout"]
    drafter, total = uneven(dflash(tiny_target, block_size=8, layers=1)).eval(), Tally()
    with engine().load(tiny_target.folder, tiny_target.end_ids) as loaded:
        for prompt in PROMPTS[:6]:
            ids = tiny_target.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt["turns"][0]}], add_generation_prompt=True,
                return_dict=False)
            [plain] = loaded.generate([ids], ["any"], Sampling(12, 0.0, 1.0, 0))
            total.add(decode(loaded, drafter, ids, 3, 12, tiny_target.end_ids), plain)
    assert row == in_process({key: row[key] for key in ("model", "method", "users", "dtype")}, "heldout", 3,
                             total)
    assert (row["prompts"], row["output_tokens"]) == (6, total.output_tokens)


def judged(evaluate: Evaluate, heldout: int = 6) -> dict[str, str]:
    return evaluate.check({"prompts": Prompts(Jsonl("any"), None, heldout),
                           "export": SimpleNamespace(formats=["speculators"])})


def test_settings_that_need_each_other(tiny_target: Target) -> None:
    assert judged(stage(tiny_target, k=[4, 1])) == {}
    assert judged(stage(tiny_target, k=[3, 5, 9])) == {
        f"evaluate.k.{place}": f"must lie between 1 and 4, the longest draft of this drafter, but is {k}"
        for place, k in ((1, 5), (2, 9))}
    assert judged(stage(tiny_target, format="native")) == {
        "evaluate.format": "must be one of export.formats (speculators), but is native"}
    assert list(judged(stage(tiny_target), heldout=0)) == ["prompts.heldout"]


def test_a_text_that_changes_with_the_drafter_stops_the_run(tiny_target: Target, inputs: dict[str, Path],
                                                            tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that does not forget rejected tokens, as a server with a wrong rewind."""
    monkeypatch.setattr("trainer.engines.transformers.TransformersSession.rewind", lambda self, length: None)
    with pytest.raises(GateFailed, match="gate in_process_lossless failed: .* must be <= 0"):
        stage(tiny_target).run(inputs, tmp_path)


def test_some_prompts_stand_for_all(tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    stage(tiny_target, prompts=2).run(inputs, tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["dataset"], row["prompts"]) for row in rows] == [
        ("heldout", 2), ("heldout/chat", 1), ("heldout/maths", 1)]
