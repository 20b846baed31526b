"""Every drafter of conf/drafter keeps the promise of `architectures/base.py`; a new YAML is tested the moment
it exists."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import small

from trainer.architectures.base import Drafter
from trainer.data.packing import collate
from trainer.engines.transformers import TransformersEngine, TransformersRuntime
from trainer.export.formats import FORMATS, Serving
from trainer.records import Batch, Sample
from trainer.target import Target
from trainer.target_head import load_target_head

DRAFTERS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/drafter").glob("*.yaml"))
SMALL = {"layers": 2, "block_size": 5, "steps": 4, "draft_vocab_size": 300, "loss_chunk": 64}


def settings_of(name: str, **settings: Any) -> dict[str, Any]:
    node = yaml.safe_load((Path(__file__).parents[2] / f"conf/drafter/{name}.yaml").read_text())
    assert node["_partial_"], "a drafter's node waits for its context"
    node |= {key: value for key, value in {**SMALL, **settings}.items() if key in node}
    return {key: value for key, value in node.items() if key[0] != "_"}


def make(name: str, target: Target, **settings: Any) -> Drafter:
    """Small, with the settings that it has of those given."""
    return small(target, name, **{key: value for key, value in settings_of(name, **settings).items()
                                  if key in settings or key in SMALL})


@pytest.fixture(scope="module")
def batch(tiny_target: Target) -> Batch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate((40, 57, 23)):
        tokens = torch.randint(0, 256, (length,), generator=generator).tolist()
        samples.append(Sample(f"s{number}", tuple(tokens), tuple(index >= 8 for index in range(length))))
    engine = TransformersEngine("float32", 4, 0, 512, False, TransformersRuntime("cpu"))
    with engine.load(tiny_target.folder, tiny_target.end_ids):
        states = list(engine.hidden_states([sample.tokens for sample in samples], [1, 2]))
    return collate(samples, states, seed=11, device="cpu")


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_seed_gives_the_same_sums(name: str, tiny_target: Target, batch: Batch) -> None:
    one, two = (make(name, tiny_target).loss(batch) for _ in range(2))
    assert torch.equal(one.loss_sum, two.loss_sum) and torch.equal(one.count, two.count)
    other = make(name, tiny_target).loss(replace(batch, seed=12))
    assert not torch.equal(one.loss_sum, other.loss_sum)


@pytest.mark.parametrize("name", DRAFTERS)
def test_its_settings_alone_tell_the_longest_draft(name: str, tiny_target: Target) -> None:
    drafter, settings = make(name, tiny_target), settings_of(name)
    assert type(drafter).longest_draft(**settings) == drafter.max_k >= 1
    assert 1 <= type(drafter).shortest_draft(**settings) <= drafter.max_k
    assert type(drafter).check(**settings) == {}


@pytest.mark.parametrize("name", DRAFTERS)
def test_loss_falls_on_one_batch(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = make(name, tiny_target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    values = []
    for _ in range(30):
        step = drafter.loss(batch)
        (step.loss_sum / step.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(step.loss_sum.detach() / step.count))
    assert values[-1] < 0.6 * values[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_never_look_past_the_anchor(name: str, tiny_target: Target, batch: Batch) -> None:
    """Tokens and states after the anchor may be anything: a draft does not see them."""
    drafter = make(name, tiny_target).eval()
    first = batch.document == 0
    taps, tokens = batch.taps[first], batch.tokens[first]
    known = tokens[:20].tolist()
    seen = drafter.draft_logits(drafter.extend(drafter.new_context(), known, taps[:20]), int(tokens[20]),
                                drafter.max_k)
    changed = taps.clone()
    changed[20:] = 7.0
    again = drafter.draft_logits(drafter.extend(drafter.new_context(), known, changed[:20]), int(tokens[20]),
                                 drafter.max_k)
    assert torch.equal(seen, again)


@pytest.mark.parametrize("name", DRAFTERS)
def test_extending_in_pieces_equals_extending_at_once(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = make(name, tiny_target).eval()
    taps, tokens = batch.taps[batch.document == 1], batch.tokens[batch.document == 1].tolist()
    whole = drafter.extend(drafter.new_context(), tokens[:30], taps[:30])
    pieces = drafter.new_context()
    for start, end in ((0, 1), (1, 9), (9, 30)):
        pieces = drafter.extend(pieces, tokens[start:end], taps[start:end])
    one, two = (drafter.draft_logits(context, 65, drafter.max_k) for context in (whole, pieces))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("rows", [300, None])
def test_exported_folders_read_back_bit_for_bit(name: str, form: str, rows: int | None, tiny_target: Target,
                                                batch: Batch, tmp_path: Path) -> None:
    drafter = make(name, tiny_target, draft_vocab_size=rows).eval()
    FORMATS[form].write(tmp_path, drafter.export(), Serving("target", ["LlamaForCausalLM"], 2), torch.float32)
    head = load_target_head(tiny_target.folder, tiny_target.config)
    again = type(drafter).restore(FORMATS[form].read(tmp_path), form, head)
    known = batch.tokens[:20].tolist(), batch.taps[:20]
    one, two = (each.draft_logits(each.extend(each.new_context(), *known), 70, drafter.max_k)
                for each in (drafter, again))
    assert torch.equal(one, two)
    assert again.propose(again.extend(again.new_context(), *known), 70, 3) == \
        drafter.propose(drafter.extend(drafter.new_context(), *known), 70, 3)


@pytest.mark.parametrize("name", DRAFTERS)
def test_sums_do_not_depend_on_how_samples_are_packed(name: str, tiny_target: Target, batch: Batch) -> None:
    """Every candidate is an anchor, so the packed row and its documents one by one have the same sums."""
    drafter = make(name, tiny_target, anchors=200)
    whole = drafter.loss(batch)
    parts = []
    for document in range(3):
        rows = batch.document == document
        part = Batch(batch.tokens[rows], batch.loss_mask[rows], batch.document[rows], batch.position[rows],
                     batch.taps[rows], batch.last[rows], batch.seed)
        parts.append(drafter.loss(part))
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole.count, sum(part.count for part in parts))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_without_supervision_has_weight_zero(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = make(name, tiny_target)
    step = drafter.loss(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    assert float(step.count) == 0 and float(step.loss_sum) == 0
    step.loss_sum.backward()  # it still takes part in the step


@pytest.mark.parametrize("name", DRAFTERS)
def test_training_state_survives_a_copy(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = make(name, tiny_target)
    assert torch.equal(drafter.loss(batch).loss_sum, copy.deepcopy(drafter).loss(batch).loss_sum)
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
