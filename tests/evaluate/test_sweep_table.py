"""What a sweep says of itself: where it loses, where nothing can be told."""

from __future__ import annotations

from typing import Any

import pytest
from test_traffic import row

from trainer.evaluate.sweep_table import LOST, markdown, print_sweep, verdict


def measured(k: int, speedup: float | None, **changes: Any) -> dict[str, Any]:
    tok_s = 10.0 * (speedup or 1)
    return row(k, **{"speedup": speedup, "tok_s": tok_s, "baseline_tok_s": 10.0, "repeats": 3, "requests": 4,
                     "tok_s_repeats": [tok_s - 1, tok_s, tok_s + 1], "baseline_tok_s_repeats": [10.0] * 3,
                     "drafts": 330, "differing": 0, "interpreted": False, "output_tokens": 600, "prompts": 4,
                     "attention_backend": "TRITON_ATTN", "vllm": "0.32.0", **changes})


def test_the_best_length_or_none() -> None:
    assert verdict([measured(1, 1.1), measured(2, 1.234), measured(3, 0.9)]) == "K=2, 1.23x"
    assert verdict([measured(1, 0.9), measured(2, 1.0)]) == LOST
    assert verdict([measured(1, None)]) == "no speed-up to tell"


def test_where_speculation_loses_the_tables_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [measured(k, speedup, users=users) for users, by_k in {1: (1.2, 1.1), 16: (0.9, 0.8)}.items()
            for k, speedup in enumerate(by_k, 1)]
    print_sweep(rows)
    shown = capsys.readouterr().out
    for text in (shown, markdown(rows)):
        assert "Speculation loses in 1 of 2 classes of traffic, with every K: chat at 16 users." in text
        assert text.count(LOST) == 1 and "K=1, 1.20x" in text
        assert "Attention backend: TRITON_ATTN; vLLM 0.32.0." in text
    lines = markdown(rows).splitlines()
    assert "| chat | 16 users | 10.0 | 0.90 | 0.80 | do not speculate: plain decoding is faster |" in lines
    detail = "| chat | 1 user | 2 | 10.0 (10.0 to 10.0) | 11.0 (10.0 to 12.0) | 1.10 | 2.440 | 0.80 0.64 |"
    assert f"{detail} identical |" in lines


@pytest.mark.parametrize(("changes", "said"), [
    ({"interpreted": True, "tok_s": None, "tok_s_repeats": []}, "interprets the kernels of this method"),
    ({"output_tokens": 499}, "1 rows have less than 500 timed tokens"),
    ({"mean_accepted_length": 1.01}, "1 rows accept next to nothing (accepted length below 1.05)"),
    ({"differing": 3, "lossless": False}, "chat at 1 user, K=1: 3 of 12 answers"),
    ({"output_tokens": 1512, "drafts": 100, "mean_accepted_length": 5.0}, "only 9% to 9% had a draft"),
    ({"prompts": 1}, "One prompt of chat was measured"), ({"repeats": 1}, "no spread can be told")])
def test_why_nothing_can_be_told(changes: dict[str, Any], said: str) -> None:
    page = markdown([measured(1, None, **changes)])
    assert said in page and "| no speed-up to tell |" in page
    assert said not in markdown([measured(1, 1.2)])


def test_each_method_has_its_table() -> None:
    page = markdown([measured(1, 1.2), measured(1, 0.7, method="ngram")])
    assert page.index("## dflash for org/target") < page.index("## ngram for org/target")
    assert "Speculation loses in 1 of 1 classes" in page.partition("## ngram")[2]
