"""Every family that brings an MTP module: what is trained is what is drafted, and what goes back into the
target is what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from mtp_targets import FAMILIES, random_target
from tiny import random_samples, small, states_of
from torch import Tensor, nn
from transformers import AutoModel

from trainer.architectures.mtp import Mtp
from trainer.architectures.mtp_layouts import SHARED, layer_config
from trainer.data.packing import collate
from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.target import Target
from trainer.target_head import load_target_head, read_tensors, tensor_names

[SAMPLE] = random_samples([30])
ANCHOR = 12
FACTS = {  # whether the token comes first, is zero at position 0, and what is added to weights of norms
    "glm4_moe": (True, True, 0.0), "glm4_moe_lite": (True, True, 0.0), "deepseek_v3": (True, True, 0.0),
    "qwen3_5": (True, False, 1.0), "qwen3_5_moe": (True, False, 1.0), "qwen3_next": (True, False, 1.0)}
Begun = Callable[[str], tuple[Target, Mtp]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """The target of a family, and the drafter that begins with its module."""
    @cache
    def made(family: str) -> tuple[Target, Mtp]:
        target = random_target(family, tmp_path_factory.mktemp("made") / family)
        steps = 2 if family == "two_modules" else 4
        drafter = small(target, "mtp", start="own", steps=steps, tap_layers=target.tap_layers)
        return target, drafter.eval().requires_grad_(False)

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_training_has_the_logits_of_drafting(begun: Begun, family: str) -> None:
    """Where the answer goes on as drafted; also when the context came in pieces."""
    target, drafter = begun(family)
    [states] = states_of(target, [SAMPLE], target.tap_layers)
    taps, tokens = states.taps, list(SAMPLE.tokens)
    context = drafter.new_context()
    for start, end in ((0, 1), (1, 5), (5, ANCHOR)):
        context = drafter.extend(context, tokens[start:end], taps[start:end])
    whole = drafter.extend(drafter.new_context(), tokens[:ANCHOR], taps[:ANCHOR])
    drafted, again = (drafter.draft_logits(each, tokens[ANCHOR], drafter.max_k) for each in (context, whole))
    torch.testing.assert_close(drafted, again, atol=1e-4, rtol=1e-4)
    batch = collate([SAMPLE], [states], seed=0, device="cpu")
    batch.tokens[ANCHOR + 1:ANCHOR + 1 + drafter.max_k] = drafted.argmax(-1)
    trained = drafter.vocabulary.logits(drafter.drafted(batch, torch.tensor([ANCHOR])))[0]
    assert drafted.std() > 0.5
    torch.testing.assert_close(trained, drafted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FACTS)
def test_a_step_is_a_pass_of_the_decoder_of_transformers(begun: Begun, family: str) -> None:
    """A whole model of one layer, its own masks, positions and final norm included, over what a module reads
    at every position, put together here from the family's facts."""
    target, drafter = begun(family)
    token_first, blank, offset = FACTS[family]
    module, eps = drafter.heads[0], target.config["rms_norm_eps"]
    [states] = states_of(target, [SAMPLE], target.tap_layers)
    tokens = torch.tensor(SAMPLE.tokens)
    head = load_target_head(target.folder, target.config)
    token = head.embedding[tokens[1:]]
    if blank:
        token[0] = 0.0
    halves = [normed(token, module.token_norm, offset, eps),
              normed(head.normed(states.taps[:-1]), module.state_norm, offset, eps)]
    read = torch.cat(halves if token_first else halves[::-1], dim=-1) @ module.input_proj.weight.T
    model = AutoModel.from_config(layer_config(drafter.layout, target.config), dtype=torch.float32).eval()
    model.layers[0].load_state_dict(module.block.state_dict())
    model.norm.load_state_dict(module.norm.state_dict())
    with torch.inference_mode():
        expected = model(inputs_embeds=read[None]).last_hidden_state[0]
    for place in (1, 2, 17, 28):
        context = drafter.extend(drafter.new_context(), tokens[:place].tolist(), states.taps[:place])
        found = drafter.draft_logits(context, int(tokens[place]), 1)[0]
        torch.testing.assert_close(found, head.head @ expected[place - 1], atol=1e-4, rtol=1e-4)


def normed(vector: Tensor, norm: nn.Module, offset: float, eps: float) -> Tensor:
    return vector / (vector.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (offset + norm.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_was_trained_changes_in_the_target(begun: Begun, family: str,
                                                     tmp_path_factory: pytest.TempPathFactory) -> None:
    target, drafter = begun(family)
    folder = tmp_path_factory.mktemp("stitched") / family
    before = read_tensors(target.folder, tensor_names(target.folder))
    FORMATS["stitched"].write(folder, drafter.export(), Serving("t", [], 2, target.folder), torch.float32)
    found = read_tensors(folder, tensor_names(folder))
    assert found.keys() == before.keys(), "nothing is new, nothing is lost"
    assert all(torch.equal(found[name], before[name]) for name in before), "untrained, it is as it was"
    exported = drafter.export()
    names = {*exported.weights} - exported.exact
    assert names < before.keys() and not [name for name in names if name.endswith(SHARED)]
    again = Mtp.restore(FORMATS["stitched"].read(folder), "stitched",
                        load_target_head(target.folder, target.config))
    for name, tensor in drafter.heads.state_dict().items():
        assert torch.equal(tensor, again.heads.state_dict()[name]), name
    rounded = tmp_path_factory.mktemp("rounded") / family
    FORMATS["stitched"].write(rounded, exported, Serving("t", [], 2, target.folder), torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in read_tensors(rounded, exported.weights).items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == names
