"""What was uploaded and downloaded again is served by real vLLM, with the text of the target."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_support import Hub, export_for, stage
from huggingface_hub import snapshot_download
from tiny import engine
from vllm_support import small_server

from trainer.evaluate.serving import measure
from trainer.records import Sampling
from trainer.target import Target
from trainer.target_made import Kept, RandomLlama


@pytest.mark.vllm
def test_the_downloaded_copy_is_served(hub: Hub, tmp_path: Path) -> None:
    # vLLM's CPU build has no attention for heads as narrow as those of the other tests' target
    source = RandomLlama(hidden_size=64, layers=3, heads=2, key_value_heads=1, intermediate_size=128,
                         vocab_size=320, tied=False, seed=7, scale=0.2, runtime=Kept(str(tmp_path / "cache")))
    target = Target("random", source, "<|mask|>", [1, 2], {}, 512, False)
    for name in ("made", "out"):
        (tmp_path / name).mkdir()
    exported = export_for(target, tmp_path / "made")
    made = stage(target, format="native").run({"export": exported}, tmp_path / "out")
    folder = Path(snapshot_download("tester/drafter", revision=made["tag"], local_dir=tmp_path / "copy"))
    prompts, sampling = [list(range(40, 60)), list(range(90, 130))], Sampling(24, 0.0, 1.0, 0)
    with engine().load(target.folder, target.end_ids) as loaded:
        plain = loaded.generate(prompts, ["a", "b"], sampling)
    with small_server().serve(target.folder, tmp_path / "vllm.log", folder, "dflash", 3) as server:
        [found] = measure([server], prompts, sampling, 1, 0, 1)
    assert [each.tokens for each in found.outputs] == [each.tokens for each in plain]
    assert found.counters.drafts > 0 and len(found.per_position) == 3
