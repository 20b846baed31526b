"""The records of verification: what does not fit is said before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.kernels.verification import DraftDistribution, Sampling, Verification, Verified, draft_ids


def sampling(requests: int, **changed: torch.Tensor) -> Sampling:
    made = Sampling(temperature=torch.ones(requests), top_k=torch.zeros(requests, dtype=torch.int32),
                    top_p=torch.ones(requests), min_p=torch.zeros(requests), seed=torch.arange(requests),
                    position=torch.zeros(requests, dtype=torch.int64))
    return replace(made, **changed)


def step(**changed: Any) -> Verification:
    made = {"target_logits": torch.zeros(3, 8), "starts": torch.tensor([0, 2, 3], dtype=torch.int32),
            "drafts": torch.tensor([4, -1, -1]), "sampling": sampling(2), "vocab_size": 7}
    return Verification(**made | changed)


def distribution(ids: int = 7, **changed: torch.Tensor) -> DraftDistribution:
    made = DraftDistribution(logits=torch.zeros(3, ids), temperature=torch.ones(2), lse=torch.zeros(3),
                             drawn_logit=torch.zeros(3))
    return replace(made, **changed)


@pytest.mark.parametrize(("changed", "said"), [
    ({"target_logits": torch.zeros(3, 8, dtype=torch.float64)}, "target_logits is .3, 8. torch.float64"),
    ({"target_logits": torch.zeros(8, 3).T}, "side by side"),
    ({"target_logits": torch.zeros(8)}, "target_logits is .8."),
    ({"vocab_size": 9}, "vocab_size is 9; target_logits have 1 to 8 ids"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"starts": torch.tensor([0], dtype=torch.int32)}, "starts has no request"),
    ({"starts": torch.tensor([0, 2, 3])}, r"starts is \[3\] torch.int64 .* expected \[3\] torch.int32"),
    ({"drafts": torch.tensor([4, -1])}, r"drafts is \[2\] .* expected \[3\] torch.int64"),
    ({"sampling": sampling(2, top_k=torch.zeros(2))}, "sampling.top_k is .2. torch.float32"),
    ({"sampling": sampling(3)}, "sampling.temperature is .3."),
    ({"distribution": distribution(6)}, "6 ids, the vocabulary 7"),
    ({"distribution": distribution(6, token_ids=torch.arange(6))}, "verification.draft_ids"),
    ({"distribution": distribution(lse=torch.zeros(2))}, "distribution.lse is .2."),
    ({"distribution": distribution(logits=torch.zeros(2, 7))}, "distribution.logits has 2 rows"),
    ({"distribution": distribution(6, token_ids=torch.arange(5), draft_ids=draft_ids(torch.arange(6), 7))},
     "distribution.token_ids is .5."),
])
def test_what_does_not_fit_is_said(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step(**changed)


@pytest.mark.parametrize(("changed", "said"), [
    ({"starts": torch.tensor([0, 0, 3], dtype=torch.int32)}, "starts must rise from 0 to 3"),
    ({"starts": torch.tensor([0, 2, 2], dtype=torch.int32)}, "starts must rise"),
    ({"drafts": torch.tensor([4, -2, -1])}, "drafts are token ids or -1"),
    ({"sampling": sampling(2, temperature=torch.tensor([1, -1.0]))}, "sampling.temperature"),
    ({"sampling": sampling(2, top_k=torch.tensor([1, -1], dtype=torch.int32))}, "sampling.top_k"),
    ({"sampling": sampling(2, top_p=torch.tensor([1, torch.nan]))}, "sampling.top_p"),
    ({"sampling": sampling(2, min_p=torch.tensor([1, 2.0]))}, "sampling.min_p"),
    ({"distribution": distribution(temperature=torch.zeros(2))}, "distribution.temperature"),
])
def test_values_that_no_step_has_are_said(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        step(**changed).check_values()


def test_what_fits_passes() -> None:
    ids = torch.tensor([6, 0, 3])
    inverse = draft_ids(ids, 7)
    assert inverse.dtype == torch.int32 and inverse.tolist() == [1, -1, -1, 2, -1, -1, 0]
    for drawn in (None, distribution(), distribution(9), distribution(3, token_ids=ids, draft_ids=inverse)):
        step(distribution=drawn).check_values()
    step(target_logits=torch.zeros(3, 16)[:, :8]).check_values()


def test_requests_with_a_faulty_row_are_named() -> None:
    tokens = torch.zeros(3, 2, dtype=torch.int64)
    Verified(tokens, torch.tensor([1, 2, 1], dtype=torch.int32)).raise_faults()
    with pytest.raises(ValueError, match="request 1 behind 0 tokens, request 2 behind 1 tokens"):
        Verified(tokens, torch.tensor([1, -1, -2], dtype=torch.int32)).raise_faults()
