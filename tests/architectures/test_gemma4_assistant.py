"""The Gemma 4 assistant against its equations in float64, what it may not see, how its head is masked, and
which targets and assistants it refuses."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_decoder import SAMPLES, check_logits, slow_sums
from slow_gemma4 import SlowGemma4
from tiny import copied, make_small, objective, small, states_of, uneven
from torch import Tensor

from trainer.architectures.centroids import CentroidHead, ordering
from trainer.architectures.gemma4_assistant import Gemma4Assistant
from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.export.formats import FORMATS, Serving
from trainer.records import Batch, KeysValues, LastState
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import first_drafter, require_buildable, require_start
from trainer.training.checkpoint import load_weights, trained

STEPS, GAMMA = 3, 3.0
SLIDING, FULL = "sliding_attention", "full_attention"
COUNTS = torch.arange(320).flip(0)
CENTROIDS = {"num_centroids": 16, "centroid_top_k": 3}


@pytest.fixture(scope="module")
def target(tiny_gemma4: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    def uneven_norms(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 1.5 + 0.25)

    return copied(tiny_gemma4, tmp_path_factory.mktemp("made") / "target", uneven_norms)


def batch_of(target: Target, *kinds: str) -> Batch:
    taps = [LastState(), *map(KeysValues, sorted(kinds))]
    return collate(SAMPLES, states_of(target, SAMPLES, taps), seed=11, device="cpu", tokens=70)


@pytest.fixture(scope="module")
def batch(target: Target) -> Batch:
    return batch_of(target, SLIDING, FULL)


def make(target: Target, **settings: Any) -> Gemma4Assistant:
    settings["objective"] = objective(settings.get("objective", "ce"), gamma=GAMMA)
    drafter = small(target, "gemma4_assistant", **{"anchors": None, "steps": STEPS, **settings})
    given = None if drafter.masked_embedding is None else drafter.masked_embedding.token_ordering.clone()
    uneven(drafter, scale=0.3)
    if given is not None:
        drafter.masked_embedding.token_ordering.data.copy_(given)
    return drafter


def slow_of(drafter: Gemma4Assistant, target: Target) -> SlowGemma4:
    return SlowGemma4(drafter.export(), load_target_head(target.folder, target.config))


@pytest.mark.parametrize("settings", [{}, {"layer_types": [SLIDING, SLIDING, FULL], "heads": 4},
                                      {"layer_types": [FULL], "hidden_size": 96}, CENTROIDS])
def test_training_and_drafting_have_the_logits_of_the_slow_one(target: Target,
                                                               settings: dict[str, Any]) -> None:
    drafter = make(target, **settings).eval()
    batch = batch_of(target, *drafter.kinds)
    slow = slow_of(drafter, target)
    places = torch.tensor([1, 7, 21, 24 + 1, 37 + 11])  # behind 21 tokens of which a window has 16
    with torch.no_grad():
        hidden = drafter.drafted(batch, places)
        rows = hidden.flatten(0, 1)
        trained = drafter._masked(rows, drafter.row_logits(rows, rows)).unflatten(0, hidden.shape[:2])
    assert trained.shape[:2] == (5, STEPS)
    check_logits(drafter, slow, batch, places.tolist(), trained)


@pytest.mark.parametrize("term", ["ce", "kl"])
def test_sums_over_a_packed_row_are_those_of_the_slow_one(target: Target, batch: Batch, term: str) -> None:
    drafter = make(target, objective=term)
    slow, head = slow_of(drafter, target), load_target_head(target.folder, target.config)
    expected = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for document, sample in enumerate(SAMPLES):
        rows = batch.document == document
        tokens, taps = list(sample.tokens), batch.taps[rows]
        teacher = head.logits(batch.last[rows]) if term == "kl" else None
        sums = slow_sums(lambda anchor, tokens=tokens, taps=taps: slow.draft(
            tokens, taps, anchor, STEPS, forced=tokens[anchor + 1:]), range(320), tokens, sample.loss_mask,
            STEPS, GAMMA, teacher, first_anchor=1)
        expected = {name: expected[name] + value for name, value in sums.items()}
    step = drafter.loss(batch)
    length, first = step.ratios["accepted_length"], step.ratios["accepted@1"]
    found = {"loss": float(step.loss_sum.detach()), "count": float(step.count), "first": float(first.total),
             "accepted": float(length.total - length.count), "blocks": float(length.count)}
    assert found == pytest.approx(expected, rel=1e-4) and found["blocks"] == 17 + 6 + 12


def test_each_tap_counts_where_it_is_seen_and_nowhere_else(target: Target, batch: Batch) -> None:
    """A draft behind 21 tokens reads the last state of token 20 alone, sliding keys of its window of 16, full
    keys of all 21; and no later one, whatever the step."""
    drafter = make(target)
    for layer in drafter.layers:  # even attention, so that no row is too faint to be seen
        layer.self_attn.q_norm.weight.data.mul_(0.1)
    last, full, sliding = (part.shape[1] for part in drafter.parts(batch.taps).values())
    parts = {"last": slice(0, last), "full": slice(last, last + full), "sliding": slice(last + full, None)}
    assert sliding == batch.taps.shape[1] - last - full

    def moved(part: str, row: int) -> bool:
        taps = batch.taps.clone()
        taps[row, parts[part]] += 1
        with torch.no_grad():
            before, after = (drafter.drafted(Batch(batch.tokens, batch.loss_mask, batch.document,
                                                   batch.position, each, batch.last, 0), torch.tensor([21]))
                             for each in (batch.taps, taps))
        same = [torch.equal(one, two) for one, two in zip(before[0], after[0], strict=True)]
        assert len({*same}) == 1, "all steps see the same"
        return not same[0]

    assert [row for row in range(24) if moved("last", row)] == [20]
    assert [row for row in range(24) if moved("full", row)] == list(range(21))
    assert [row for row in range(24) if moved("sliding", row)] == list(range(5, 21))


def test_clusters_have_equal_size_and_near_tokens() -> None:
    generator = torch.Generator().manual_seed(2)
    middles = torch.randn(6, 8, generator=generator) * 10
    rows = middles.repeat_interleave(5, 0) + torch.randn(30, 8, generator=generator) * 0.1
    shuffled = torch.randperm(30, generator=generator)
    found = ordering(rows[shuffled], 6)
    assert sorted(found.tolist()) == list(range(30))
    for cluster in (shuffled[found] // 5).view(6, 5):
        assert len({*cluster.tolist()}) == 1
    assert sorted(ordering(torch.ones(12, 4), 3).tolist()) == list(range(12)), "no direction to differ in"


def test_centroids_learn_to_choose_the_token_s_cluster() -> None:
    head = CentroidHead(24, 40, clusters=10, chosen=2)
    generator = torch.Generator().manual_seed(0)
    rows, hidden = (torch.randn(40, 24, generator=generator) for _ in range(2))
    head.start(rows)
    labels = torch.arange(40)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    for _ in range(200):
        loss = head.losses(hidden, labels).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    masked = head.masked(hidden, hidden @ rows.T)
    inside = masked > masked.amin(-1, keepdim=True)
    assert inside.sum(-1).eq(8).all(), "two clusters of four"
    assert inside[labels, labels].float().mean() > 0.9
    torch.testing.assert_close(masked[inside], (hidden @ rows.T)[inside])


def test_a_masked_head_is_trained_kept_and_read_back(target: Target, batch: Batch, tmp_path: Path) -> None:
    """All that is not trained, too: what starts it is not known where its folder is read."""
    drafter = small(target, "gemma4_assistant", steps=STEPS, objective="ce", **CENTROIDS)
    step = drafter.loss(batch)
    assert {"loss/ce", "loss/centroids"} <= step.ratios.keys()
    step.loss_sum.backward()
    assert drafter.masked_embedding.centroids.weight.grad.abs().max() > 0
    torch.optim.AdamW(drafter.parameters(), lr=1e-3).step()
    drafter.masked_embedding.token_ordering.data.copy_(torch.randperm(320))
    other = small(target, "gemma4_assistant", steps=STEPS, **CENTROIDS)
    load_weights(other, trained(drafter), tmp_path)
    rounded = drafter.rounded(torch.bfloat16)
    for kept in (other, rounded):
        assert torch.equal(kept.masked_embedding.token_ordering, drafter.masked_embedding.token_ordering)
    FORMATS["native"].write(tmp_path, drafter.export(), Serving("t", [], 2), torch.bfloat16)
    again = Gemma4Assistant.restore(FORMATS["native"].read(tmp_path), "native", drafter.head)
    known = batch.tokens[:20].tolist(), batch.taps[:20]
    one, two = (each.draft_logits(each.extend(each.new_context(), *known), 70, STEPS)
                for each in (rounded, again))
    assert torch.equal(one, two)


def start_of(drafter: Gemma4Assistant, folder: Path) -> str:
    FORMATS["native"].write(folder, drafter.export(), Serving("t", [], 2), torch.float32)
    return str(folder)


@pytest.mark.parametrize("settings", [{}, CENTROIDS])
def test_training_begins_with_an_assistant(target: Target, batch: Batch, tmp_path: Path,
                                           settings: dict[str, Any]) -> None:
    given = make(target, **settings)
    made = make_small("gemma4_assistant", start_from=start_of(given, tmp_path), seed=9, **settings)
    begun = first_drafter(made, target, COUNTS)[0]
    for (name, one), (_, two) in zip(begun.named_parameters(), given.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_transformers_writes_what_training_begins_with(target: Target, tmp_path: Path) -> None:
    """Its checkpoints say sizes by layer, and have what is theirs to have."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    given = make(target)
    start_of(given, tmp_path / "ours")
    config = Gemma4AssistantConfig.from_pretrained(tmp_path / "ours")
    model = Gemma4AssistantForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    made = make_small("gemma4_assistant", start_from=str(tmp_path / "theirs"))
    begun = first_drafter(made, target, COUNTS)[0]
    assert torch.equal(begun.pre_projection.weight, model.pre_projection.weight)
    assert torch.equal(begun.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize("settings", [{}, {"layer_types": [SLIDING, FULL, SLIDING, FULL], "hidden_size": 96},
                                      CENTROIDS])
def test_transformers_has_our_logits(target: Target, batch: Batch, tmp_path: Path,
                                     settings: dict[str, Any]) -> None:
    drafter = make(target, **settings).eval()
    assert compare_with_transformers(drafter, target, batch, tmp_path) == "Gemma4AssistantForCausalLM"


def compare_with_transformers(drafter: Gemma4Assistant, target: Target, batch: Batch, folder: Path) -> str:
    """The name of the class that its config.json leads to, which is fed by its own target. It does not cap
    logits, and lets sliding layers see one token more than a target's do (and vLLM's): here it is given no
    more than those."""
    from transformers import AutoModelForCausalLM

    assistant, model = (AutoModelForCausalLM.from_pretrained(each).eval()
                        for each in (start_of(drafter, folder), target.folder))
    *known, token = batch.tokens[:22].tolist()
    ours = drafter.draft_logits(drafter.extend(drafter.new_context(), known, batch.taps[:21]), token, STEPS)
    with torch.inference_mode():
        given = model.get_decoder()(torch.tensor([known]), return_shared_kv_states=True, use_cache=False)
        shared = {kind: tuple(part[:, :, -16:] if kind == SLIDING else part for part in parts)
                  for kind, parts in given.shared_kv_states.items()}
        fed, place = given.last_hidden_state[:, -1:], torch.tensor([[len(known) - 1]])
        for expected in ours:
            both = torch.cat([model.get_input_embeddings()(torch.tensor([[token]])), fed], dim=-1)
            found = assistant(inputs_embeds=both, position_ids=place, shared_kv_states=shared)
            logits, fed, token = found.logits[0, 0], found.last_hidden_state, int(expected.argmax())
            logits = torch.tanh(logits / 30) * 30 if drafter.masked_embedding is None else logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    return type(assistant).__name__


OTHERS = {  # of an assistant's config.json: what is changed, and what is told
    "another kind": ({"model_type": "gemma4_text"}, {},
                     "model_type is gemma4_text, expected gemma4_assistant"),
    "no text part": ({"text_config": []}, {}, "its config.json is not that of an assistant (TypeError"),
    "a size in quotes": ({}, {"hidden_size": "32"}, "its hidden_size is '32', and here it is 32; set"),
    "no number": ({}, {"rope_parameters": dict.fromkeys([FULL, SLIDING], {"rope_theta": "abc"})},
                  "is not that of an assistant (ValueError: could not convert"),
    "another target": ({"backbone_hidden_size": 96}, {},
                       "backbone_hidden_size is 96, and here it is 64; it belongs to another target"),
    "other keys": ({}, {"head_dim": 8}, "key heads and head_dim of sliding_attention is (2, 8), and here it "
                                        "is (2, 32); it belongs to another target"),
    "another window": ({}, {"sliding_window": 8}, "sliding_window is 8, and here it is 16"),
    "other layers": ({}, {"layer_types": [FULL, FULL]}, "set drafter.layer_types to it"),
    "another size": ({}, {"hidden_size": 40}, "is 40, and here it is 32; set drafter.hidden_size to it"),
    "other heads": ({}, {"num_attention_heads": 4}, "set drafter.heads to it"),
    "a masked head": ({"use_ordered_embeddings": True, "num_centroids": 8}, {},
                      "num_centroids is 8, and here it is null; set drafter.num_centroids to it"),
    "no sizes": ({}, {"rope_parameters": None}, "is not that of an assistant (TypeError"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_assistant_is_refused(target: Target, tmp_path: Path, case: str) -> None:
    changes, inner, said = OTHERS[case]
    folder = tmp_path / "given"
    start_of(make(target), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= inner
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError) as caught:
        first_drafter(make_small("gemma4_assistant", start_from=str(folder)), target, COUNTS)
    assert said in str(caught.value) and "drafter.start_from=" in str(caught.value)


def test_tensors_of_another_assistant_are_refused(target: Target, tmp_path: Path) -> None:
    made = make_small("gemma4_assistant", start_from=start_of(make(target), tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, tmp_path / "model.safetensors")
    for begin in (partial(require_start, made, target), partial(first_drafter, made, target, COUNTS)):
        with pytest.raises(UserError, match="1 of its tensors are not those that .*model.norm.weight: exp"):
            begin()


ORDER, HEAD = "masked_embedding.token_ordering", "lm_head.weight"
SPOILT = {  # a tensor, what it becomes, and what is told
    "no order": (ORDER, lambda order: torch.zeros_like(order), "does not name each of the 320 tokens once"),
    "another order": (ORDER, lambda order: order + 100, "does not name each of the 320 tokens once"),
    "a broken order": (ORDER, lambda order: order.float(), r"expected \[320\] of int64, found \[320\]"),
    "eight bits": ("model.norm.weight", lambda norm: norm.to(torch.int8), r"found \[32\] of int8"),
    "no numbers": ("model.norm.weight", lambda norm: norm * torch.nan, "expected finite numbers"),
    "another head": (HEAD, lambda _: torch.randn(320, 32), "lm_head.weight is not its model.embed_tokens"),
    "a small head": (HEAD, lambda _: torch.ones(3, 3), r"lm_head.weight: expected \[320, 32\], found")}


@pytest.mark.parametrize("case", SPOILT)
def test_tensors_that_mean_something_else_are_told(target: Target, masked: Path, tmp_path: Path,
                                                   case: str) -> None:
    name, change, said = SPOILT[case]
    made = make_small("gemma4_assistant", start_from=str(tmp_path), **CENTROIDS)
    shutil.copytree(masked, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()  # as some write it
    save_file(tensors, tmp_path / "model.safetensors")
    require_start(made, target)
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"drafter.start_from=.* cannot be begun with: .*{said}"):
        require_start(made, target)


@pytest.fixture(scope="module")
def masked(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(start_of(make(target, **CENTROIDS), tmp_path_factory.mktemp("masked")))


@pytest.mark.parametrize(("settings", "said"), [
    ({"heads": 3}, "drafter.heads=3 must be a multiple of the target's heads of keys and values"),
    ({"num_centroids": 7, "centroid_top_k": 2}, "drafter.num_centroids=7 does not divide the target's 320"),
])
def test_sizes_that_do_not_fit_the_target_are_refused(target: Target, settings: dict[str, Any],
                                                      said: str) -> None:
    with pytest.raises(UserError, match=said):
        require_buildable(make_small("gemma4_assistant", **settings), target, None)


def test_a_kind_of_attention_that_the_target_has_not_got_is_refused(target: Target) -> None:
    """Layers that share the keys of others have none of their own."""
    made = make_small("gemma4_assistant")
    config = {**target.config, "layer_types": [FULL, FULL, SLIDING, FULL], "num_kv_shared_layers": 2}
    found = made.func.fits(config, (), None, **made.keywords)
    assert "names sliding_attention, of which the target has no layer with keys" in found["layer_types"]


@pytest.mark.parametrize(("key", "value"), [("sliding_window", 0), ("head_dim", "32"),
                                            ("rope_parameters", "x"),
                                            ("rope_parameters", {FULL: {"rope_theta": 1e4}}),
                                            ("rope_parameters", dict.fromkeys([FULL, SLIDING], {}))])
def test_a_target_that_says_nonsense_is_refused(target: Target, key: str, value: Any) -> None:
    made = make_small("gemma4_assistant")
    with pytest.raises(ValueError, match=f"target's config.json says {key}.* keys would be misread; mend"):
        made.func.fits({**target.config, key: value}, (), None, **made.keywords)


@pytest.mark.parametrize("missing", ["sliding_window", "rope_parameters", "layer_types"])
def test_a_target_that_does_not_say_enough_is_refused(target: Target, missing: str) -> None:
    made = make_small("gemma4_assistant")
    with pytest.raises(ValueError, match=f"config.json has no {missing}"):
        made.func.fits({**target.config, missing: None}, (), None, **made.keywords)


def test_a_folder_of_another_target_is_not_restored(target: Target, tiny_target: Target) -> None:
    exported = make(target).export()
    exported.flavours["native"]["backbone_hidden_size"] = 96
    with pytest.raises(UserError, match="backbone_hidden_size 96, and its target has 64"):
        Gemma4Assistant.restore(exported, "native", load_target_head(target.folder, target.config))


def test_settings_that_exclude_each_other_are_said() -> None:
    known = {"layer_types": [SLIDING, FULL], "num_centroids": None, "centroid_top_k": 32}
    assert Gemma4Assistant.check(**known) == {}
    assert [*Gemma4Assistant.check(**{**known, "layer_types": [FULL, SLIDING]})] == ["layer_types"]
    assert [*Gemma4Assistant.check(**{**known, "num_centroids": 8})] == ["centroid_top_k"]
