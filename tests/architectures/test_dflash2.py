"""DFlash2 against its equations in float64: convolutions along a block, and the walk over candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_decoder import SAMPLES
from slow_dflash import SlowDFlash
from tiny import make_small, small, uneven
from torch import Tensor

from trainer.architectures.dflash2 import DFlash2
from trainer.errors import UserError
from trainer.records import Batch
from trainer.target import Target
from trainer.target_head import load_target_head
from trainer.training.build import draft_problem

SLOTS = 5  # of a block, the anchor's included
TOP = 5


def make(target: Target, **settings: Any) -> DFlash2:
    return uneven(small(target, "dflash2", **{"anchors": 60, "conv_kernel_size": 3, **settings}))


class SlowDFlash2(SlowDFlash):
    def __init__(self, drafter: DFlash2, target: Target) -> None:
        head = load_target_head(target.folder, target.config)
        exported = drafter.export()
        super().__init__(exported, head.embedding, head.head)
        self.keys_of = exported.flavours["speculators"]

    def states(self, taps: Tensor, anchor: int, slots: int) -> list[Tensor]:
        start = len(taps)
        features = [self.norm(self.weights["fc.weight"] @ row.double(), "hidden_norm") for row in taps]
        stream = [self.embedding[token] for token in [anchor] + [self.mask] * (slots - 1)]
        for layer in range(self.shape["num_hidden_layers"]):
            name = f"layers.{layer}."
            normed = [self.norm(each, name + "input_layernorm") for each in stream]
            inputs = self.conv(normed, normed, name + "attention_conv", 0)
            keys = [self.keys(each, place, name) for place, each in enumerate(features)]
            keys += [self.keys(each, start + slot, name) for slot, each in enumerate(inputs)]
            values = [self.heads(each, name, "v_proj") for each in features + inputs]
            mixed = [self.weights[name + "self_attn.o_proj.weight"]
                     @ self.attend(self.queries(each, start + slot, name), keys, values)
                     for slot, each in enumerate(inputs)]
            moved = self.conv(normed, mixed, name + "attention_conv", 1)
            stream = [one + two for one, two in zip(stream, moved, strict=True)]
            normed = [self.norm(each, name + "post_attention_layernorm") for each in stream]
            inner = [self.gated(each, name) for each in self.conv(normed, normed, name + "mlp_conv", 0)]
            moved = self.conv(normed, inner, name + "mlp_conv", 1)
            stream = [one + two for one, two in zip(stream, moved, strict=True)]
        return [self.norm(each, "norm") for each in stream]

    def gated(self, read: Tensor, name: str) -> Tensor:
        gate, up = (self.weights[f"{name}mlp.{part}_proj.weight"] @ read for part in ("gate", "up"))
        return self.weights[name + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def conv(self, normed: list[Tensor], inputs: list[Tensor], name: str, side: int) -> list[Tensor]:
        taps, group = self.keys_of["conv_kernel_size"], self.keys_of["conv_group_size"]
        groups, out = len(normed[0]) // group, []
        for slot in range(len(inputs)):
            own = self.weights[name + ".kernel_projection.weight"] @ normed[slot]
            total = torch.zeros_like(inputs[slot])
            for tap in range(min(taps, slot + 1)):
                for channel in range(len(total)):
                    kernel = self.weights[name + ".base_kernel"][side, tap, channel] \
                        + own[(side * taps + tap) * groups + channel // group]
                    total[channel] += kernel * inputs[slot - tap][channel]
            out.append(total)
        return out

    def scores(self, state: Tensor, previous: int, label: int | None = None) -> dict[int, float]:
        """By candidate its score behind the id before it."""
        logits = self.head @ state
        candidates = logits.topk(TOP).indices.tolist()
        if label is not None and label not in candidates:
            candidates[-1] = label
        left = self.weights["candidate_selector.predecessor_codebook"][previous] \
            * (self.weights["candidate_selector.hidden_projection.weight"] @ state)
        right = self.weights["candidate_selector.successor_codebook"]
        return {each: float(logits[each] + left @ right[each]) for each in candidates}


@pytest.mark.parametrize("anchor", [1, 7, 20])
def test_drafting_is_the_slow_walk(target: Target, batch: Batch, anchor: int) -> None:
    drafter = make(target).eval()
    slow = SlowDFlash2(drafter, target)
    tokens, taps = batch.tokens[:24].tolist(), batch.taps[:24]
    states = slow.states(taps[:anchor], tokens[anchor], SLOTS)[1:]
    with torch.no_grad():
        hidden = drafter.drafted(batch, torch.tensor([anchor]))[0]
    torch.testing.assert_close(hidden, torch.stack(states).float(), atol=1e-4, rtol=1e-4)
    context = drafter.extend(drafter.new_context(), tokens[:anchor], taps[:anchor])
    found, token, draft = drafter.draft_logits(context, tokens[anchor], SLOTS - 1), tokens[anchor], []
    for state, logits in zip(states, found, strict=True):
        expected = slow.scores(state, token)
        assert set(logits.topk(TOP).indices.tolist()) == set(expected), "no other token comes before them"
        assert {each: float(logits[each]) for each in expected} == pytest.approx(expected, abs=1e-3)
        token = max(expected, key=expected.__getitem__)
        draft.append(token)
    assert drafter.propose(context, tokens[anchor], SLOTS - 1) == draft


def test_the_selector_is_trained_by_the_choice_among_its_candidates(target: Target, batch: Batch) -> None:
    """With the token that came in the place of the last candidate where it is missing, behind true tokens;
    and acceptance in training is that of the walk."""
    drafter = make(target, selector_weight=0.5)
    slow, loss, count, accepted = SlowDFlash2(drafter, target), 0.0, 0.0, 0
    for document, sample in enumerate(SAMPLES):
        taps, tokens = batch.taps[batch.document == document], list(sample.tokens)
        for anchor in range(6, len(tokens) - 1):
            states, right = slow.states(taps[:anchor], tokens[anchor], SLOTS)[1:], True
            for slot, state in enumerate(states[:len(tokens) - 1 - anchor]):
                previous, label = tokens[anchor + slot], tokens[anchor + slot + 1]
                scores = slow.scores(state, previous, label)
                row = torch.tensor([*scores.values()], dtype=torch.float64)
                weight = float(torch.tensor(-slot / 4.0).exp())
                loss -= 0.5 * weight * float(row.log_softmax(-1)[list(scores).index(label)])
                count += weight
                free = slow.scores(state, previous)
                right = right and max(free, key=free.__getitem__) == label
                accepted += right
    step = drafter.loss(batch)
    assert float(step.count) == pytest.approx(count, rel=1e-5)
    assert float(step.ratios["loss/selector"].total) == pytest.approx(loss, rel=1e-3)
    length = step.ratios["accepted_length"]
    assert float(length.total - length.count) == accepted


def test_a_fresh_convolution_changes_nothing(target: Target) -> None:
    z = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    for layer in small(target, "dflash2", conv_kernel_size=4).layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            assert all(torch.equal(conv(conv.kernels(z), side, z), z) for side in (0, 1))


def test_a_later_slot_changes_nothing_before_it(target: Target, batch: Batch) -> None:
    """Convolutions reach back, never on; attention in a block is in both directions, so it is left out."""
    conv = make(target).layers[0].attention_conv
    z = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    kernels = conv.kernels(z)
    changed = z.clone()
    changed[:, 3:] += 1
    one, two = conv(kernels, 0, z), conv(kernels, 0, changed)
    assert torch.equal(one[:, :3], two[:, :3]) and not torch.allclose(one[:, 3], two[:, 3])


def test_only_whole_blocks_are_served() -> None:
    drafter = make_small("dflash2", block_size=5)
    assert draft_problem(drafter, 4) is None
    assert {draft_problem(drafter, k) for k in (1, 3, 5)} == {
        f"must be 4, as a server drafts whole blocks alone (drafter.block_size=5), but is {k}"
        for k in (1, 3, 5)}


def test_groups_that_do_not_divide_the_hidden_size_are_said(target: Target) -> None:
    with pytest.raises(UserError, match="drafter.conv_group_size=24 must divide the hidden size 64"):
        make(target, conv_group_size=24)
