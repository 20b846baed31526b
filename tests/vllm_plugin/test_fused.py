"""What both model runners do with a kernel, and what is refused before any of vLLM is touched."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from trainer import vllm_plugin
from trainer.errors import UserError
from trainer.kernels.select import verify
from trainer.kernels.verification import Sampling, Verification, Verified
from trainer.vllm_plugin.fused import Fused, only, top_k_or_off, wide

LOG = logging.getLogger(__name__)


def sampling(temperature: list[float]) -> Sampling:
    count = len(temperature)
    none = torch.zeros(count)
    return Sampling(torch.tensor(temperature), none.int(), none + 1, none, torch.arange(count),
                    torch.zeros(count, dtype=torch.int64))


def step(logits: Tensor, drafts: list[int], how: Sampling) -> Verification:
    starts = torch.arange(len(how.seed) + 1, dtype=torch.int32) * (len(logits) // len(how.seed))
    return Verification(logits, starts, torch.tensor(drafts), how, logits.shape[1])


def test_requests_of_others_cost_a_row_and_change_nobody() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    drafts = [*logits.argmax(1)[:2].tolist(), -1] * 3
    how, kept = sampling([0.9, 0.8, 0.7]), torch.tensor([True, False, True])
    whole = step(logits, drafts, how)
    fewer, cheap = only(kept, whole.drafts, whole.starts, how)
    assert fewer.view(3, 3)[1].tolist() == [-1, -1, -1]
    assert torch.equal(fewer.view(3, 3)[kept], whole.drafts.view(3, 3)[kept])
    assert cheap.temperature.tolist() == pytest.approx([0.9, 0, 0.7])
    expected, found = verify("cpu")(whole), verify("cpu")(step(logits, fewer.tolist(), cheap))
    width = expected.tokens.shape[1]
    assert torch.equal(wide(found.tokens, width)[kept], expected.tokens[kept])
    assert found.counts[1] == 1


def test_ragged_requests_keep_their_own_drafts() -> None:
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    drafts, _ = only(torch.tensor([False, True, False]), torch.arange(6), starts, sampling([0.0] * 3))
    assert drafts.tolist() == [-1, 1, 2, 3, -1, -1]


def test_logits_without_a_maximum_emit_a_token_and_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.zeros(6, 10)
    logits[0, 4], logits[1], logits[3:] = 1, torch.nan, -torch.inf
    fused = Fused(verify("cpu"), LOG)
    for _ in range(2):
        tokens, counts = fused.emit(step(logits, [4, 1, -1, 1, 1, -1], sampling([0.0, 0.5])))
        assert tokens[0].tolist() == [4, 0, -1] and tokens[1].tolist() == [0, -1, -1]
        assert counts.tolist() == [2, 1] and counts.dtype == torch.int32
    assert [record.getMessage() for record in caplog.records] == [
        "logits without a finite maximum came to fused verification, which emits token 0"]


def test_features_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    fused = Fused(verify("cpu"), LOG)
    for features in (("logprobs",), (), ("logprobs", "bad_words")):
        fused.tell(features)
    assert [record.getMessage().split()[5].rstrip(":") for record in caplog.records] == ["logprobs",
                                                                                          "bad_words"]


def test_a_filter_of_the_whole_vocabulary_is_none() -> None:
    assert top_k_or_off(torch.tensor([5, 320, 0, 400]), 320).tolist() == [5, 0, 0, 0]


def test_tokens_of_a_step_are_as_wide_as_vllm_s() -> None:
    assert wide(torch.tensor([[1, 2]]), 4).tolist() == [[1, 2, -1, -1]]


def test_it_is_off_unless_asked_for() -> None:
    assert [vllm_plugin.asked_for(each) for each in ({}, {"TRAINER_FUSED_VERIFY": "0"},
                                                     {"TRAINER_FUSED_VERIFY": "1"})] == [False, False, True]
    with pytest.raises(UserError, match="TRAINER_FUSED_VERIFY=true is not known; set 1"):
        vllm_plugin.asked_for({"TRAINER_FUSED_VERIFY": "true"})


@pytest.mark.parametrize(("version", "tried"), [("0.32.0", True), ("0.32.0+cpu", True), ("0.32.1", False),
                                                ("0.32.0rc1", False), ("0.33.0", False)])
def test_versions_that_were_not_tried_are_refused(version: str, tried: bool) -> None:
    if tried:
        vllm_plugin.require_tried(version)
        return
    with pytest.raises(UserError, match=f"tried with vLLM 0.32.0 alone, and this is vLLM {version}: leave"):
        vllm_plugin.require_tried(version)


def test_the_kernel_is_the_device_s_unless_named() -> None:
    assert vllm_plugin.load_kernel(None, "cpu") == ("cpu", verify("cpu"))
    assert vllm_plugin.load_kernel("reference", "cpu") == ("reference", verify("reference"))
    with pytest.raises(UserError, match="TRAINER_VERIFY_KERNEL=cpu takes logits of a CPU, and this vLLM "):
        vllm_plugin.load_kernel("cpu", "cuda")
    with pytest.raises(UserError, match="TRAINER_VERIFY_KERNEL: verify=fast is not known"):
        vllm_plugin.load_kernel("fast", "cpu")
    with pytest.raises(UserError, match="TRAINER_FUSED_VERIFY=1 has no kernel for the device tpu"):
        vllm_plugin.load_kernel(None, "tpu")


def test_a_kernel_that_lacks_a_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(vllm_plugin.select, "verify", lacking)
    with pytest.raises(UserError, match="TRAINER_VERIFY_KERNEL=triton needs triton, which this environment"):
        vllm_plugin.load_kernel("triton", "cuda")


def test_a_step_reaches_the_kernel_as_it_is() -> None:
    seen = []

    def kernel(given: Verification) -> Verified:
        seen.append(given)
        return Verified(torch.tensor([[3]]), torch.tensor([1], dtype=torch.int32))

    given = step(torch.zeros(1, 5), [-1], sampling([0.0]))
    tokens, counts = Fused(kernel, LOG).emit(given)
    assert seen == [given] and (tokens.tolist(), counts.tolist()) == ([[3]], [1])
