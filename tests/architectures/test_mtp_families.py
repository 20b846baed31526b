"""Every family that brings an MTP module: what is trained is what is drafted, and what goes back into the
target is what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from mtp_targets import FAMILIES, random_target
from tiny import random_samples, small, states_of

from trainer.architectures.mtp import Mtp
from trainer.architectures.mtp_layouts import SHARED
from trainer.data.packing import collate
from trainer.export.base import Serving
from trainer.export.formats import FORMATS
from trainer.target import Target
from trainer.target_head import load_target_head, read_tensors, tensor_names

[SAMPLE] = random_samples([30])
ANCHOR = 12
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
