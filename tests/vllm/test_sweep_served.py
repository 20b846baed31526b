"""Stage `sweep` through the command line, on real vLLM servers that it starts: killed in the middle, then to
its end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from runs import PATIENCE, Home, wait_until
from vllm_support import FEW, own_cores, vllm_python

pytestmark = pytest.mark.vllm
BEFORE = "run=[prompts,responses,hidden_states,train,export]"
SETTINGS = ["recipe=smoke", "hardware.compile=false",
            "engine.max_model_len=1024", "engine.max_num_seqs=4", "engine.runtime.kv_cache_gib=1",
            f"engine.runtime.threads='{own_cores()[0]}'", *FEW, "prompts.limit=24", "prompts.heldout=10",
            "responses.sampling.max_new_tokens=12", "train.tokens=640", "train.steps=20",
            "sweep.k=[1,2]", "sweep.users=[1,2]", "sweep.categories=[chat]", "sweep.prompts=2",
            "sweep.max_new_tokens=16", "sweep.repeats=2"]


def test_a_killed_sweep_on_real_servers(tmp_path: Path) -> None:
    home = Home(tmp_path / "home", tmp_path / "cache")
    settings = [*SETTINGS, f"engine.python={vllm_python()}"]
    home.call(*settings, BEFORE)

    def cells() -> list[bytes]:
        found = list(home.root.glob("sweep/*.partial/cells.jsonl"))
        return found[0].read_bytes().splitlines() if found else []

    sweeping = home.start(*settings, "run=[sweep]")
    try:
        wait_until(lambda: len(cells()) >= 2, sweeping.is_alive, home)
        sweeping.kill()
        sweeping.join(timeout=PATIENCE)
    finally:
        sweeping.kill()
    measured = cells()
    out = home.call(*settings, "run=[sweep]")
    assert f"sweep: {len(measured)} of 4 cells are measured already" in out
    folder = home.stage("sweep")
    assert (folder / "cells.jsonl").read_bytes().splitlines()[:len(measured)] == measured
    rows = json.loads((folder / "rows.json").read_text())
    assert Counter((row["num_speculative_tokens"], row["users"]) for row in rows) == Counter(
        (k, users) for k in (1, 2) for users in (1, 2))
    for row in rows:
        rates = row["per_position_acceptance"]
        assert len(rates) == row["num_speculative_tokens"] and rates == sorted(rates, reverse=True)
        assert row["mean_accepted_length"] == pytest.approx(1 + sum(rates), abs=1e-3)
        assert row["lossless"] is True and row["differing"] == 0
        assert row["attention_backend"] == "CPU_ATTN" and row["vllm"].startswith("0.")
        assert row["drafts"] > 0 and 0 < row["output_tokens"] <= 2 * 2 * 16
        assert len(row["tok_s_repeats"]) == len(row["baseline_tok_s_repeats"]) == 2
        assert min(row["baseline_tok_s_repeats"]) > 0 and row["ms_per_token"] > 0
    assert "Attention backend: CPU_ATTN" in out and "dflash for" in out
    assert (folder / "sweep.md").read_text().startswith("# Sweep\n")
