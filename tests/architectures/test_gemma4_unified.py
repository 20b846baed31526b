"""A Gemma 4 that takes pictures and sound without towers (`gemma4_unified`): its text part is as that of the
others, nested and by a name of its own, and so is its assistant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_decoder import SAMPLES
from test_gemma4_assistant import (
    COUNTS,
    FULL,
    SLIDING,
    STEPS,
    batch_of,
    compare_with_transformers,
    make,
    start_of,
)
from tiny import copied, engine, make_small

from trainer.architectures.gemma4_assistant import Gemma4Assistant
from trainer.errors import UserError
from trainer.evaluate.decode import decode
from trainer.export.formats import FORMATS
from trainer.kernels.select import verify
from trainer.records import Sampling
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import first_drafter, require_buildable


@pytest.fixture(scope="module")
def unified(tiny_gemma4: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The weights of the tiny Gemma 4, as such a checkpoint is laid out."""
    folder = tmp_path_factory.mktemp("made") / "target"
    target = copied(tiny_gemma4, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = {**json.loads((folder / "config.json").read_text()), "model_type": "gemma4_unified_text",
            "use_bidirectional_attention": "vision", "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gemma4_unified", "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": text, "vision_config": None, "audio_config": None, "tie_word_embeddings": True}))
    return target


def test_it_gives_what_the_plain_one_gives(unified: Target, tiny_gemma4: Target) -> None:
    one, two = (batch_of(target, SLIDING, FULL) for target in (unified, tiny_gemma4))
    torch.testing.assert_close(one.taps, two.taps, atol=1e-5, rtol=1e-5)


def test_transformers_has_our_logits_in_its_class(unified: Target, tmp_path: Path) -> None:
    require_buildable(make_small("gemma4_assistant"), unified, None)
    drafter = make(unified).eval()
    found = compare_with_transformers(drafter, unified, batch_of(unified, SLIDING, FULL), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [found] == ["Gemma4UnifiedAssistantForCausalLM"]
    assert config["model_type"] == "gemma4_unified_assistant"
    assert config["text_config"]["model_type"] == "gemma4_unified_text"


def test_drafting_leaves_the_text(unified: Target, tmp_path: Path) -> None:
    """With what its folder describes, and the whole target in this process."""
    start_of(make(unified), tmp_path)
    head = load_target_head(unified.folder, unified.config)
    again = Gemma4Assistant.restore(FORMATS["native"].read(tmp_path), "native", head)
    prompt = list(SAMPLES[0].tokens)
    with engine().load(unified.folder, unified.end_ids) as loaded:
        [plain] = loaded.generate([prompt], ["a"], Sampling(20, 0.0, 1.0, 0))
        assert decode(loaded, again, verify("cpu"), prompt, STEPS, 20, unified.end_ids).tokens == plain.tokens


def test_assistants_of_the_other_kind_are_refused(unified: Target, tiny_gemma4: Target,
                                                  tmp_path: Path) -> None:
    for place, (one, other) in enumerate([(unified, tiny_gemma4), (tiny_gemma4, unified)]):
        folder = tmp_path / str(place)
        made = make_small("gemma4_assistant", start_from=start_of(make(one), folder))
        assert first_drafter(made, one, COUNTS)
        with pytest.raises(UserError, match="its model_type is gemma4_.*assistant, expected gemma4_"):
            first_drafter(made, other, COUNTS)
