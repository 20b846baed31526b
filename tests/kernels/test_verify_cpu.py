"""The CPU path's own ways: what it reads, in what portions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import sampling, uneven

from trainer.kernels import cpu_rows, verify_cpu, verify_reference
from trainer.kernels.verification import Verification


@given(st.lists(st.integers(0, 30), max_size=12))
def test_runs_are_the_rows_in_their_order(rows: list[int]) -> None:
    taken = torch.arange(31)
    parts = [taken[run] for run in cpu_rows.runs(rows)]
    assert torch.cat([taken[:0], *parts]).tolist() == rows


def test_evenly_spaced_rows_are_one_run() -> None:
    assert list(cpu_rows.runs([3, 7, 11, 15])) == [slice(3, 16, 4)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_row_behind_a_rejection_is_read(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.setattr(verify_cpu, "AT_ONCE", 1)
    read, most_likely, look = [], verify_cpu.most_likely, cpu_rows.Rows.look
    monkeypatch.setattr(verify_cpu, "most_likely", lambda logits, rows: (
        read.extend(rows), most_likely(logits, rows))[1])
    monkeypatch.setattr(cpu_rows.Rows, "look", lambda self, rows: (
        read.extend(rows.tolist()), look(self, rows))[1])
    logits = torch.full((12, 40), -torch.inf)
    logits[:, 3] = 0
    drafts = torch.tensor([3, 3, 3, -1, 3, 2, 3, -1, 2, 3, 3, -1])
    done = verify_cpu.verify(Verification(logits, torch.tensor([0, 4, 8, 12]).int(), drafts,
                                          sampling(3, temperature), 40))
    assert done.counts.tolist() == [4, 2, 1]
    assert sorted(read) == [0, 1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("block", [False, True])
def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch, block: bool) -> None:
    steps = [uneven(seed, block, one_hot) for seed in (5, 10) for one_hot in (False, True)]
    whole = [verify_cpu.verify(step) for step in steps]
    monkeypatch.setattr(cpu_rows, "CACHED", 1)
    monkeypatch.setattr(verify_cpu, "AT_ONCE", 1)
    for step, expected in zip(steps, whole, strict=True):
        found = verify_cpu.verify(step)
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.counts, expected.counts)


@pytest.mark.parametrize(("few", "first"), [(10 ** 9, ()), (1, (1000,)), (1, (1, 2))])
@pytest.mark.parametrize("one_hot", [False, True])
def test_whole_rows_and_cells_give_the_same(monkeypatch: pytest.MonkeyPatch, one_hot: bool, few: int,
                                            first: tuple[int, ...]) -> None:
    monkeypatch.setattr(cpu_rows, "FEW", few)
    monkeypatch.setattr(cpu_rows, "FIRST", first)
    for seed in range(12):
        step = uneven(seed, seed % 4 == 3, one_hot, [torch.float32, torch.bfloat16][seed % 2], 2500)
        found, expected = verify_cpu.verify(step), verify_reference.verify(step)
        assert torch.equal(found.tokens, expected.tokens), seed
        assert torch.equal(found.counts, expected.counts), seed


def test_a_draft_that_top_p_surely_keeps_needs_no_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = []
    monkeypatch.setattr(cpu_rows.Rows, "_cut", lambda self, row, scaled: cut.append(row))
    logits = torch.zeros(8, 300)
    logits[:, 7] = 12  # nearly certain
    verify_cpu.verify(Verification(logits, torch.tensor([0, 8]).int(), torch.tensor([7] * 7 + [-1]),
                                   sampling(1, top_p=0.9), 300))
    assert cut == [7]


def test_logits_of_another_device_are_refused() -> None:
    on_meta = torch.device("meta")
    how = sampling(1)
    moved = type(how)(**{name: getattr(how, name).to(on_meta) for name in how.__dataclass_fields__})
    step = Verification(torch.zeros(1, 4, device=on_meta), torch.zeros(2, dtype=torch.int32, device=on_meta),
                        torch.zeros(1, dtype=torch.int64, device=on_meta), moved, 4)
    with pytest.raises(ValueError, match="the logits are on meta"):
        verify_cpu.verify(step)
