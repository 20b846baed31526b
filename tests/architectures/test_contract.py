"""Every drafter of conf/drafter keeps the promise of `architectures/base.py`; a new YAML is tested the moment
it exists."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_small, placed, small, suits, uneven

from trainer.architectures.base import Drafter
from trainer.data.packing import collate
from trainer.engines.transformers import TransformersEngine, TransformersRuntime
from trainer.errors import UserError
from trainer.evaluate.decode import Selection
from trainer.export.formats import FORMATS, Serving
from trainer.records import Batch, Sample, Tap
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import draft_problem
from trainer.training.loop import Pace, fit

DRAFTERS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf/drafter").glob("*.yaml"))
STEP = Pace(steps=1, accumulate=1, warmup=0.0, floor=1.0, clip=1e9, precision="float32")
SMALL = {"layers": 2, "block_size": 5, "steps": 4, "draft_vocab_size": 300, "loss_chunk": 64,
         "start": "random"}


def settings_of(name: str, **settings: Any) -> dict[str, Any]:
    node = yaml.safe_load((Path(__file__).parents[2] / f"conf/drafter/{name}.yaml").read_text())
    assert node["_partial_"], "a drafter's node waits for its context"
    node |= {key: value for key, value in {**SMALL, **settings}.items() if key in node}
    return {key: value for key, value in node.items() if key[0] != "_"}


def make(name: str, target: Target, **settings: Any) -> Drafter:
    """Small, with the settings that it has of those given."""
    return small(target, name, **{key: value for key, value in settings_of(name, **settings).items()
                                  if key in settings or key in SMALL})


@pytest.fixture
def tiny_target(name: str, tiny_target: Target, tiny_gemma4: Target) -> Target:
    """The first that suits the drafter of a test."""
    return next(target for target in (tiny_target, tiny_gemma4) if suits(target, name))


@pytest.fixture(scope="module")
def batches() -> dict[tuple[Tap, ...], Batch]:
    """Those that were made, by what is tapped: each of a target of its own."""
    return {}


@pytest.fixture
def batch(name: str, tiny_target: Target, batches: dict[tuple[Tap, ...], Batch]) -> Batch:
    """With the states that the drafter reads."""
    made = make_small(name)
    taps = made.func.reads(**made.keywords)[0]
    if taps not in batches:
        batches[taps] = batch_of(tiny_target, taps)
    return batches[taps]


def batch_of(target: Target, taps: tuple[Tap, ...]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate((40, 57, 23)):
        tokens = torch.randint(0, 256, (length,), generator=generator).tolist()
        samples.append(Sample(f"s{number}", tuple(tokens), tuple(index >= 8 for index in range(length))))
    engine = TransformersEngine("float32", 4, 0, 512, False, TransformersRuntime("cpu"))
    with engine.load(target.folder, target.end_ids):
        states = list(engine.hidden_states([sample.tokens for sample in samples], taps))
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
    read = type(drafter).reads(**make_small(name).keywords)
    assert read == (drafter.tap_layers, drafter.needs_last)


@pytest.mark.parametrize("name", DRAFTERS)
def test_loss_falls_on_one_batch(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = make(name, tiny_target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    values = []
    for _ in range(60):
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


@pytest.mark.parametrize(("name", "form"), [(name, form) for name in DRAFTERS
                                            for form in make_small(name).func.formats])
@pytest.mark.parametrize("rows", [300, None])
def test_exported_folders_read_back_bit_for_bit(name: str, form: str, rows: int | None, tiny_target: Target,
                                                batch: Batch, tmp_path: Path) -> None:
    drafter = make(name, tiny_target, draft_vocab_size=rows).eval()
    serving = Serving("target", ["LlamaForCausalLM"], 2, tiny_target.folder)
    FORMATS[form].write(tmp_path, drafter.export(), serving, torch.float32)
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
    parts = [drafter.loss(_part(batch, document)) for document in range(3)]
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


def row_logits(drafter: Drafter, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
    """Logits [A, S, Vd] of training, with the true tokens before each position."""
    with torch.no_grad():
        hidden = drafter.drafted(batch, anchors)
        valid = torch.ones(len(anchors), dtype=torch.bool)
        previous = drafter.targets(batch, anchors, valid, hidden.shape[1]).previous
        return drafter.row_logits(hidden.flatten(0, 1), previous.flatten()).unflatten(0, previous.shape)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_token_moves_a_logit_before_it(name: str, tiny_target: Target, batch: Batch) -> None:
    """Drafts after 10 and after 12 overlap. Position s of the draft after a predicts token a + 1 + s: it may
    read tokens up to a + s and states before a, whatever comes later in its document or behind it."""
    drafter, anchors = uneven(make(name, tiny_target)), torch.tensor([10, 12])
    before = row_logits(drafter, batch, anchors)
    for first in range(10, 17):
        tokens, taps = batch.tokens.clone(), batch.taps.clone()
        tokens[first:], taps[first:] = 7, 9.0
        said, seen = (row_logits(drafter, replace(batch, **changes), anchors)
                      for changes in ({"tokens": tokens}, {"taps": taps}))
        for index, anchor in enumerate(anchors.tolist()):
            unmoved = max(0, first - anchor)
            assert torch.equal(said[index, :unmoved], before[index, :unmoved])
            assert torch.equal(seen[index], before[index]) == (first >= anchor), "states before it do count"


@pytest.mark.parametrize("name", DRAFTERS)
def test_overlapping_drafts_do_not_see_each_other(name: str, tiny_target: Target, batch: Batch) -> None:
    drafter = uneven(make(name, tiny_target))
    near, far = (row_logits(drafter, batch, torch.tensor([10, other])) for other in (11, 50))
    assert torch.equal(near[0], far[0]) and not torch.allclose(near[1], far[1])


@pytest.mark.parametrize("name", DRAFTERS)
def test_training_accepts_what_decoding_accepts(name: str, tiny_target: Target, batch: Batch) -> None:
    """Where the answer goes on as the drafter would, up to a token, training counts as many accepted ones."""
    drafter, anchor = uneven(make(name, tiny_target)).eval(), 12
    known = batch.tokens[:anchor].tolist()
    context = drafter.extend(drafter.new_context(), known, batch.taps[:anchor])
    draft = drafter.propose(context, int(batch.tokens[anchor]), drafter.max_k)
    for right in range(drafter.max_k + 1):
        tokens = batch.tokens.clone()
        tokens[anchor + 1:anchor + 1 + drafter.max_k] = torch.tensor(draft)
        if right < drafter.max_k:
            tokens[anchor + 1 + right] = (draft[right] + 1) % 256
        with torch.no_grad():
            _, _, accepted, drafts = drafter(replace(batch, tokens=tokens), torch.tensor([anchor]),
                                             torch.ones(1, dtype=torch.bool))
        assert accepted.tolist() == [1] * right + [0] * (drafter.max_k - right) and int(drafts) == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_estimate_reads_nothing_from_its_token_on(name: str, tiny_target: Target, batch: Batch) -> None:
    """Whether token i is verified must not change with token i or a later one: then the text would no longer
    have the target's distribution."""
    drafter = uneven(make(name, tiny_target)).eval()
    context = drafter.extend(drafter.new_context(), batch.tokens[:9].tolist(), batch.taps[:9])
    if not drafter.estimates:
        assert drafter.confidence(context, 5, [1, 2]) is None
        return
    draft_of, seen = st.lists(st.integers(0, 319), min_size=drafter.max_k, max_size=drafter.max_k), set()

    @settings(max_examples=60, deadline=None)
    @given(draft_of, draft_of, st.integers(0, drafter.max_k - 1), st.floats(0, 1), st.floats(0.1, 10))
    def check(draft: list[int], other: list[int], place: int, threshold: float, temperature: float) -> None:
        changed = [*draft[:place], *other[place:]]
        one, two = (drafter.confidence(context, 5, each) for each in (draft, changed))
        assert one.shape == (drafter.max_k,) and torch.equal(one[:place + 1], two[:place + 1])
        select = Selection(threshold, [temperature] * drafter.max_k)
        first, second = select.length(one), select.length(two)
        assert [first > each for each in range(place + 1)] == [second > each for each in range(place + 1)]
        seen.add(torch.equal(one, two))

    check()
    assert seen == {True, False}, "tokens before a position do decide"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_with_a_row_without_supervision_is_that_of_the_other_row(name: str, tiny_target: Target,
                                                                        batch: Batch) -> None:
    empty, found = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), []
    for rows in ([batch], [empty, batch], [batch, empty]):
        drafter = make(name, tiny_target)
        [taken] = fit(placed(drafter, partial(torch.optim.SGD, lr=1.0)), rows.__getitem__,
                      replace(STEP, accumulate=len(rows)), 0)
        found.append((taken.grad_norm, taken.totals["loss"], [each.clone() for each in drafter.parameters()]))
    for norm, loss, parameters in found[1:]:
        assert norm == pytest.approx(found[0][0], rel=1e-6) and loss == found[0][1]
        for one, two in zip(parameters, found[0][2], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_of_unequal_rows_has_one_denominator(name: str, tiny_target: Target, batch: Batch) -> None:
    """Documents of 32, 49 and 3 supervised tokens, as rows of one step or packed into one row: the same
    objective and gradient, not a mean of means."""
    mask = batch.loss_mask & ~((batch.document == 2) & (batch.position >= 11))
    packed, found = replace(batch, loss_mask=mask), []
    rows = [_part(packed, document) for document in range(3)]
    for chosen in ([packed], rows):
        drafter = uneven(make(name, tiny_target, anchors=200))
        before = [each.detach().clone() for each in drafter.parameters()]
        [taken] = fit(placed(drafter, partial(torch.optim.SGD, lr=1.0)), chosen.__getitem__,
                      replace(STEP, accumulate=len(chosen)), 0)
        steps = [old - new.detach() for old, new in zip(before, drafter.parameters(), strict=True)]
        found.append((taken.totals["loss"], taken.grad_norm, torch.cat([each.flatten() for each in steps])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert float((found[0][2] - found[1][2]).norm()) < 1e-5 * found[0][1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_small_steps_are_not_lost_in_half_precision(name: str, tiny_target: Target, batch: Batch) -> None:
    """A thousand steps of 1e-4 take a norm's weight from 1 to 0.9, and one step moves all that has a
    gradient; in bfloat16, next to 1 the smallest step is 0.004."""
    drafter = uneven(make(name, tiny_target))
    before = [each.detach().clone() for each in drafter.parameters()]
    gradients: list[torch.Tensor | None] = []

    class Watched(torch.optim.AdamW):
        def step(self, *given: Any) -> None:
            found = (each.grad for each in drafter.parameters())
            gradients.extend(None if each is None else each.clone() for each in found)
            super().step(*given)

    [_] = fit(placed(drafter, partial(Watched, lr=1e-4, weight_decay=0.0)), [batch].__getitem__,
              replace(STEP, precision="bfloat16"), 0)
    moved = 0
    for parameter, old, gradient in zip(drafter.parameters(), before, gradients, strict=True):
        if gradient is not None:
            large = gradient.abs() > 1e-3
            assert bool((parameter != old)[large].all())
            moved += int(large.any())
    assert moved > 5
    weight = torch.nn.Parameter(torch.ones_like(drafter.norm.weight))
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    torch.testing.assert_close(weight, torch.full_like(weight, 0.9), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_more_rows_than_distinct_tokens_are_filled_and_said(name: str, tiny_target: Target) -> None:
    counts = torch.zeros(320, dtype=torch.int64)
    counts[100:110] = 3
    counts[110:] = torch.tensor([1] * 5 + [0] * 205)
    drafter = small(tiny_target, name, counts, **{key: 64 for key in ("draft_vocab_size",)
                                                  if key in settings_of(name)})
    covered = drafter.coverage(counts)
    if covered is None:
        assert "draft_vocab_size" not in settings_of(name)
        return
    special = {*tiny_target.end_ids, tiny_target.tokenizer.bos_token_id}
    assert special <= set(drafter.vocabulary.ids.tolist()) and covered.special == len(special)
    assert (covered.rows, covered.total, covered.covered, covered.distinct) == (64, 320, 1.0, 15)
    first, note = covered.sentences()
    assert "draft_vocab_size=64 of 320 tokens covers 100.00%" in first
    assert note.startswith("note: drafter.draft_vocab_size=64 is more than the 15 distinct tokens among")
    few = small(tiny_target, name, counts, draft_vocab_size=10).coverage(counts)
    assert few.covered == pytest.approx((10 - len(special)) * 3 / 35) and len([*few.sentences()]) == 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_is_as_long_as_was_trained_at_most(name: str, tiny_target: Target) -> None:
    made, longest = make_small(name), small(tiny_target, name).max_k
    shortest = made.func.shortest_draft(**made.keywords)
    assert [draft_problem(made, k) for k in (shortest, longest)] == [None, None]
    assert str(longest) in draft_problem(made, longest + 1) and draft_problem(made, shortest - 1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_draft_of_a_single_token_is_told_by_its_setting(name: str) -> None:
    """Whatever the setting is called, and by which rule: nothing is said of blocks where there are none."""
    setting = make_small(name).func.length_setting
    [value] = [value for value in (1, 2) if make_small(name).func.longest_draft(
        **make_small(name, **{setting: value}).keywords) == 1]
    assert draft_problem(make_small(name, **{setting: value}), 2) == (
        f"must be 1, the only draft with drafter.{setting}={value}, but is 2")


@pytest.mark.parametrize("name", [name for name in DRAFTERS
                                  if "speculators" in make_small(name).func.formats])
@pytest.mark.parametrize("damage", ["another size", "ids, not offsets", "no table", "no head",
                                    "no vocabulary"])
def test_a_folder_with_another_vocabulary_s_tensors_is_refused(name: str, damage: str,
                                                               tiny_target: Target) -> None:
    drafter = make(name, tiny_target, draft_vocab_size=300)
    exported, head = drafter.export(), load_target_head(tiny_target.folder, tiny_target.config)
    weights, rows = dict(exported.weights), drafter.vocabulary.ids.numel()
    if damage == "another size":
        weights["d2t"] = torch.zeros(77, dtype=torch.int64)
    elif damage == "ids, not offsets":
        weights["d2t"] = drafter.vocabulary.ids
    elif damage == "no vocabulary":
        weights = {key: each for key, each in weights.items() if key not in ("d2t", "lm_head.weight")}
    elif rows < 320:
        del weights["d2t" if damage == "no table" else "lm_head.weight"]
    if rows == 320 and damage.startswith("no "):
        return
    with pytest.raises(UserError, match="d2t does not name 300 ascending ids" if damage.startswith("ids")
                       and rows < 320 else f"draft_vocab_size={rows} of 320, but its tensors have"):
        type(drafter).restore(replace(exported, weights=weights), drafter.formats[0], head)


def _part(batch: Batch, document: int) -> Batch:
    """One document of a packed row as a row of its own."""
    rows = batch.document == document
    return Batch(batch.tokens[rows], batch.loss_mask[rows], batch.document[rows], batch.position[rows],
                 batch.taps[rows], batch.last[rows], batch.seed)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("scaled", [{"logits_scaling": 8.0}, {"final_logit_softcapping": 30.0}])
def test_what_is_added_to_scaled_logits_is_refused(name: str, scaled: dict[str, float],
                                                   tiny_target: Target) -> None:
    made, config = make_small(name), {**tiny_target.config, **scaled}
    if name in ("dspark", "dflash2"):
        with pytest.raises(ValueError, match=f"is not served as trained for a target with {[*scaled][0]}="):
            made.func.fits(config, (1, 2), None, **made.keywords)
    else:
        assert made.func.fits(config, (1, 2), None, **made.keywords) == {}
