"""DFlash against its equations in float64, and the rules of anchors, labels, weights and draft vocabulary."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from slow_dflash import SlowDFlash
from tiny import copied, dflash, make_dflash, objective, random_samples, states_of, uneven, uneven_norms

from trainer.architectures.dflash import DFlash
from trainer.data.packing import collate
from trainer.errors import UserError
from trainer.records import Batch, Sample
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import count_tokens, require_buildable

GAMMA = 3.0


def with_mask(sample: Sample, *spans: tuple[int, int]) -> Sample:
    return replace(sample, loss_mask=tuple(any(start <= index < end for start, end in spans)
                                           for index in range(len(sample.tokens))))


# Two answers with a hole between, the second to the very end; a document that begins with its answer; one
# that ends with it; a single token; none.
SAMPLES = [with_mask(sample, *spans) for sample, spans in zip(
    random_samples((24, 13, 19, 9, 11)), (((5, 12), (14, 24)), ((0, 9),), ((6, 19),), ((4, 5),), ()),
    strict=True)]


@pytest.fixture(scope="module")
def target(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return copied(tiny_target, tmp_path_factory.mktemp("made") / "target", uneven_norms)


@pytest.fixture(scope="module")
def batch(target: Target) -> Batch:
    return collate(SAMPLES, states_of(target, SAMPLES, [1, 2]), seed=11, device="cpu")


def make(target: Target, **settings: Any) -> DFlash:
    settings["objective"] = objective(settings.get("objective", "ce"), gamma=GAMMA)
    return uneven(dflash(target, **{"anchors": 60, **settings}))


def slow_of(drafter: DFlash, target: Target) -> SlowDFlash:
    head = load_target_head(target.folder, target.config)
    return SlowDFlash(drafter.export(), head.embedding, head.head)


def part(batch: Batch, document: int) -> Batch:
    rows = batch.document == document
    return Batch(batch.tokens[rows], batch.loss_mask[rows], batch.document[rows], batch.position[rows],
                 batch.taps[rows], batch.last[rows], batch.seed)


def sums(drafter: DFlash, batch: Batch) -> dict[str, float]:
    step = drafter.loss(batch)
    length, first = step.ratios["accepted_length"], step.ratios["accepted@1"]
    assert torch.equal(length.count, first.count)
    return {"loss": float(step.loss_sum.detach()), "count": float(step.count), "first": float(first.total),
            "accepted": float(length.total - length.count), "blocks": float(length.count)}


@pytest.mark.parametrize("rows", [None, 150])
def test_logits_of_training_and_drafting_are_those_of_the_slow_decoder(target: Target, batch: Batch,
                                                                       rows: int | None) -> None:
    """One block each at the start, in the middle and at the end of packed documents."""
    drafter = make(target, draft_vocab_size=rows)
    slow = slow_of(drafter, target)
    places = torch.tensor([0, 7, 23, 24, 24 + 3, 37 + 18])
    with torch.no_grad():
        trained = drafter.vocabulary.logits(drafter.drafted(batch, places))
    for place, found in zip(places.tolist(), trained, strict=True):
        own = part(batch, int(batch.document[place]))
        before, token = int(batch.position[place]), int(batch.tokens[place])
        expected = slow.logits(own.taps[:before], token, 5).float()
        assert expected.std() > 1
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        context = drafter.extend(drafter.new_context(), own.tokens[:before].tolist(), own.taps[:before])
        torch.testing.assert_close(drafter.draft_logits(context, token, 4), expected, atol=1e-4, rtol=1e-4)
        shorter = slow.logits(own.taps[:before], token, 3).float()
        torch.testing.assert_close(drafter.draft_logits(context, token, 2), shorter, atol=1e-4, rtol=1e-4)
        assert drafter.propose(context, token, 4) == [slow.ids[row] for row in expected.argmax(-1).tolist()]


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_sums_over_a_packed_row_are_those_of_the_slow_decoder(target: Target, batch: Batch,
                                                              objective: str) -> None:
    drafter = make(target, objective=objective, draft_vocab_size=150)
    slow, head = slow_of(drafter, target), load_target_head(target.folder, target.config)
    expected = dict.fromkeys(("loss", "count", "accepted", "first", "blocks"), 0.0)
    for document, sample in enumerate(SAMPLES):
        own = part(batch, document)
        teacher = head.logits(own.last) if objective == "kl" else None
        for name, value in slow.sums(sample.tokens, sample.loss_mask, own.taps, 5, GAMMA, teacher).items():
            expected[name] += value
    found = sums(drafter, batch)
    everything = sum(exp(-slot / GAMMA) * max(0, length - slot - 1) for length in (7, 10, 9, 13)
                     for slot in range(4))
    assert expected["blocks"] == 6 + 9 + 8 + 12
    assert found == pytest.approx(expected, rel=1e-4)
    assert (found["count"] < 0.8 * everything) == (objective == "ce"), "some tokens have only a teacher"


def test_acceptance_is_counted_up_to_the_first_miss(target: Target, batch: Batch) -> None:
    """The labels are what the drafter itself proposes, except for one token, so that blocks are accepted in
    part."""
    drafter = make(target, draft_vocab_size=None)
    own = part(batch, 2)
    tokens = own.tokens.clone()
    for anchor in (8, 12):
        context = drafter.extend(drafter.new_context(), own.tokens[:anchor].tolist(), own.taps[:anchor])
        tokens[anchor + 1:anchor + 5] = torch.tensor(drafter.propose(context, int(tokens[anchor]), 4))
    tokens[15] = (tokens[15] + 1) % 256
    mask = torch.zeros_like(own.loss_mask)
    mask[8:17] = True
    changed = replace(own, tokens=tokens, loss_mask=mask)
    slow = slow_of(drafter, target).sums(tokens.tolist(), mask.tolist(), own.taps, 5, GAMMA)
    found = sums(drafter, changed)
    assert found == pytest.approx(slow, rel=1e-4) and found["blocks"] == 8
    assert 4 + 2 <= found["accepted"] < 20 and found["first"] >= 2


def test_a_later_token_changes_nothing_before_it(target: Target, batch: Batch) -> None:
    """Anchors 10 and 12 have overlapping blocks; each sees the states before it and its own token, not
    more."""
    drafter = make(target)
    anchors = torch.tensor([10, 12, 24 + 7])

    def logits(tokens: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            changed = replace(batch, tokens=tokens, taps=taps)
            return drafter.vocabulary.logits(drafter.drafted(changed, anchors))

    before = logits(batch.tokens, batch.taps)
    tokens, taps = batch.tokens.clone(), batch.taps.clone()
    tokens[13:24], taps[12:24] = 7, 9.0
    assert torch.equal(logits(tokens, taps), before)
    taps[11] += 1
    after = logits(tokens, taps)
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])
    assert not torch.allclose(after[1], before[1])
    tokens[10] += 1
    assert not torch.allclose(logits(tokens, taps)[0], before[0])


def test_a_block_ends_with_its_document(target: Target, batch: Batch) -> None:
    """Another following document leaves the sums of the blocks of this one as they are."""
    drafter = make(target)
    anchors, valid = torch.tensor([20, 21, 22]), torch.ones(3, dtype=torch.bool)
    everything = torch.ones_like(batch.loss_mask)

    def found(tokens: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(drafter(replace(batch, tokens=tokens, loss_mask=everything), anchors, valid))

    other = batch.tokens.clone()
    other[24:] = 3
    one, two = found(batch.tokens), found(other)
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))
    rows = drafter.vocabulary.rows[batch.tokens]
    in_vocabulary = [[rows[place + slot] >= 0 for slot in range(1, 24 - place)] for place in (20, 21, 22)]
    assert float(one[1]) == pytest.approx(sum(exp(-slot / GAMMA) for block in in_vocabulary
                                              for slot, known in enumerate(block) if known))


def test_anchors_are_drawn_where_the_target_sampled_two_tokens(target: Target, batch: Batch) -> None:
    allowed = {start + index for start, sample in zip((0, 24, 37, 56, 65), SAMPLES, strict=True)
               for index in range(len(sample.tokens) - 1) if sample.loss_mask[index]
               and sample.loss_mask[index + 1]}
    drafter, drawn = make(target, anchors=9), []
    for seed in range(200):
        anchors, valid = drafter.draw(replace(batch, seed=seed))
        assert valid.all() and anchors.tolist() == sorted(set(anchors.tolist())) and len(anchors) == 9
        assert set(anchors.tolist()) <= allowed
        drawn += anchors.tolist()
    assert set(drawn) == allowed
    assert max(map(drawn.count, allowed)) < 3 * min(map(drawn.count, allowed))
    again = drafter.draw(replace(batch, seed=199))[0]
    assert torch.equal(again, anchors), "the seed alone decides"
    anchors, valid = make(target, anchors=50).draw(batch)
    assert set(anchors[valid].tolist()) == allowed and len(anchors) == 50 and not valid[len(allowed):].any()


def test_padding_is_seen_by_nothing(target: Target, batch: Batch) -> None:
    states = states_of(target, SAMPLES, [1, 2])
    for settings in ({"objective": "ce"}, {"objective": "kl"}):
        drafter = make(target, **settings)
        gradients = []
        for tokens in (None, 100):
            padded = collate(SAMPLES, states, seed=11, device="cpu", tokens=tokens)
            drafter.zero_grad()
            step = drafter.loss(padded)
            step.loss_sum.backward()
            gradients.append([parameter.grad.clone() for parameter in drafter.parameters()
                              if parameter.requires_grad])
        assert sums(drafter, padded) == pytest.approx(sums(drafter, batch), rel=1e-6)
        for one, two in zip(*gradients, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_logits_in_chunks_give_the_same_step(target: Target, batch: Batch, objective: str) -> None:
    found = []
    for chunk in (10_000, 7):
        drafter = make(target, objective=objective, loss_chunk=chunk)
        step = drafter.loss(batch)
        step.loss_sum.backward()
        found.append((step.loss_sum.detach(), drafter.fc.weight.grad,
                      drafter.layers[0].mlp.up_proj.weight.grad))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


def test_the_teacher_is_the_target_with_scale_and_soft_cap(target: Target, batch: Batch) -> None:
    drafter = make(target, objective="kl", draft_vocab_size=280)
    head = replace(drafter.head, logit_scale=0.5, softcap=6.0)
    drafter.vocabulary.scale, drafter.vocabulary.softcap = 0.5, 6.0
    expected = head.logits(batch.last)[:, drafter.vocabulary.ids]
    assert float(expected.abs().max()) < 6
    torch.testing.assert_close(drafter.vocabulary.teacher_logits(head.normed(batch.last)), expected,
                               atol=1e-5, rtol=1e-5)


def test_stored_states_may_be_narrower_than_the_weights(target: Target, batch: Batch) -> None:
    """Extraction writes bfloat16 by default; training in float32 reads it all the same."""
    narrow = replace(batch, taps=batch.taps.bfloat16(), last=batch.last.bfloat16())
    for term in ("ce", "kl"):
        drafter = make(target, objective=term)
        widened = replace(narrow, taps=narrow.taps.float())
        assert sums(drafter, narrow) == pytest.approx(sums(drafter, widened), rel=1e-6)
        context = drafter.extend(drafter.new_context(), narrow.tokens[:8].tolist(), narrow.taps[:8])
        assert drafter.draft_logits(context, 3, 2).dtype == torch.float32


def test_only_the_drafter_s_own_weights_are_trained(target: Target) -> None:
    drafter = make(target)
    frozen = {name for name, parameter in drafter.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"layers.{layer}.self_attn.k_norm.weight" for layer in range(2)}
    names = {name for name, _ in drafter.named_parameters()}
    assert not any("embed" in name or "head" in name for name in names)
    assert not drafter.vocabulary.embedding.requires_grad and not drafter.vocabulary.head.requires_grad


def test_the_draft_vocabulary_comes_from_supervised_tokens(target: Target) -> None:
    """Ten distinct tokens were seen, 64 rows are asked for: seen ones, then special ones, then the lowest
    ids."""
    sample = Sample("s", (9,) * 5 + tuple(range(100, 110)) * 3, (False,) * 5 + (True,) * 30)
    counts = count_tokens([sample], 320)
    assert int(counts.sum()) == 30 and counts[9] == 0
    drafter = dflash(target, counts, draft_vocab_size=64)
    ids = drafter.vocabulary.ids.tolist()
    special = {*target.end_ids, target.tokenizer.bos_token_id}
    assert set(range(100, 110)) | special <= set(ids) and len(ids) == 64 and ids == sorted(ids)
    assert set(ids) - special - set(range(100, 110)) == set(range(64 - 10 - len(special)))
    head = load_target_head(target.folder, target.config)
    assert torch.equal(drafter.vocabulary.head, head.head[ids])
    assert drafter.vocabulary.rows[ids].tolist() == list(range(64)) and drafter.vocabulary.rows[319] == -1


@pytest.mark.parametrize(("settings", "said"), [
    ({"draft_vocab_size": 1}, "draft_vocab_size=1 must lie between"),
    ({"draft_vocab_size": 400}, "draft_vocab_size=400 must lie between"),
    ({"start_layers": [0, 3]}, "start_layers names layer 3, but tiny has 3 layers"),
    ({"attention": "none"}, "attention=none is not known")])
def test_settings_that_do_not_fit_are_said(target: Target, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        dflash(target, **settings)


@pytest.mark.parametrize(("changes", "said"), [
    ({"rms_norm_eps": None, "intermediate_size": None}, "no rms_norm_eps, intermediate_size, so the"),
    ({"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "rope_type 'none' of the target is"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "cannot be used for rope_type llama3")])
def test_a_target_of_another_kind_is_said_before_anything_is_loaded(target: Target, changes: dict[str, Any],
                                                                    said: str) -> None:
    other = replace(target)
    other.__dict__["config"] = {**target.config, **changes}
    with pytest.raises(UserError, match=said):
        require_buildable(make_dflash(), other, "cpu")


def test_settings_that_do_not_fit_each_other_are_said_before_it_is_built() -> None:
    for start, layers in (([], 2), ([0, -1], 2)):
        assert DFlash.check(start_layers=start, start_from=None, layers=layers) == {}
    assert DFlash.check(start_layers=[0], start_from=None, layers=2) == {
        "start_layers": "must name one target layer for each of the 2 draft layers, or none, but is [0]"}
    assert DFlash.check(start_layers=[], start_from="folder", layers=2) == {}
    assert list(DFlash.check(start_layers=[0, 1], start_from="folder", layers=2)) == ["start_from"]


def test_a_vocabulary_as_large_as_the_target_s_is_the_target_s(target: Target) -> None:
    for size in (None, 320):
        drafter = dflash(target, draft_vocab_size=size)
        assert not drafter.vocabulary.reduced and len(drafter.vocabulary.ids) == 320
        assert "lm_head.weight" not in drafter.export().weights


def test_draft_layers_may_start_from_the_target_s(target: Target) -> None:
    """Without query and key norms in the target, the copied layer attends as sharply as the target's own."""
    drafter = dflash(target, start_layers=[-1, 0])
    from safetensors.torch import load_file

    tensors = load_file(target.folder / "model.safetensors")
    for layer, index in zip(drafter.layers, (2, 0), strict=True):
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] not in ("q_norm", "k_norm"):
                assert torch.equal(parameter, tensors[f"model.layers.{index}.{name}"])
    with torch.no_grad():
        taps = torch.randn(6, 128)
        torch.testing.assert_close(drafter.fc(taps), taps[:, 64:], atol=0.5, rtol=0.1)


def test_norms_of_one_plus_weight_are_copied_as_they_act(target: Target, tmp_path: Any) -> None:
    plain = dflash(target, start_layers=[1, 2])
    shifted = copied(target, tmp_path / "shifted", lambda tensors: [
        tensor.sub_(1) for tensor in tensors.values() if tensor.ndim == 1], config={"model_type": "gemma"})
    found = dflash(shifted, start_layers=[1, 2])
    for (name, one), (_, two) in zip(plain.named_parameters(), found.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6, msg=name)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone(target: Target) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = dflash(target, seed=3), dflash(target, seed=3), dflash(target, seed=4)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first, second)
               for first, second in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
