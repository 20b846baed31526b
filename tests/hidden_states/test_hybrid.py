"""Hybrid: asked once, then read; a budget; another process at the same folder; fewer layers than are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stored_states import SAMPLES, equal, extract, index_of, make
from tiny import states_of

from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.hybrid import Hybrid
from trainer.hidden_states.reader import ShardReader
from trainer.hidden_states.shards import GIB
from trainer.hidden_states.writer import ShardWriter
from trainer.records import HiddenStates
from trainer.target import Target

Made = tuple[Hybrid, list[Any]]


def opened(target: Target, folder: Path, layers: list[int], **runtime: Any) -> Made:
    """A hybrid source on a probed folder of layers 1 to 3, and the rows that it asks its engine for."""
    stage = make("hybrid", target, [1, 2, 3])
    if not folder.exists():
        extract(stage, folder)
    make_source: partial[Hybrid] = stage.source
    given = make_source.keywords | {"runtime": replace(make_source.keywords["runtime"], **runtime)}
    source = make_source.func(folder=folder, layers=layers, **given)
    asked: list[Any] = []
    real = source.online.engine.hidden_states
    source.online.engine.hidden_states = lambda rows, wanted: asked.extend(rows) or real(rows, wanted)
    return source, asked


def expected(target: Target, folder: Path, layers: list[int]) -> list[HiddenStates]:
    codec = Codec.of(Manifest.read(folder), layers)
    return [codec.roundtrip(state, sample.loss_mask)
            for sample, state in zip(SAMPLES, states_of(target, SAMPLES, layers), strict=True)]


@pytest.mark.parametrize("commit_tokens", [1, 10_000])
def test_a_sample_is_asked_for_once(tiny_target: Target, tmp_path: Path, commit_tokens: int) -> None:
    source, asked = opened(tiny_target, tmp_path / "states", [1, 2, 3], commit_tokens=commit_tokens)
    wanted = expected(tiny_target, tmp_path / "states", [1, 2, 3])
    for _ in range(3):
        for number, sample in enumerate(SAMPLES):
            assert equal(source.get(sample), wanted[number])
    assert asked == [sample.tokens for sample in SAMPLES]
    source.close()
    again, asked = opened(tiny_target, tmp_path / "states", [1, 2, 3])
    assert all(equal(again.get(sample), state) for sample, state in zip(SAMPLES, wanted, strict=True))
    assert not asked, "another run reads what this one kept"
    again.close()


def test_what_was_appended_is_committed_with_the_end(tiny_target: Target, tmp_path: Path) -> None:
    source, _ = opened(tiny_target, tmp_path / "states", [1, 2, 3], commit_tokens=10_000)
    source.get(SAMPLES[0])
    assert len(index_of(tmp_path / "states")) == 0
    source.close()
    assert len(index_of(tmp_path / "states")) == 1


def test_all_layers_of_the_folder_are_kept_whoever_asks(tiny_target: Target, tmp_path: Path) -> None:
    source, _ = opened(tiny_target, tmp_path / "states", [2])
    for sample, state in zip(SAMPLES, expected(tiny_target, tmp_path / "states", [2]), strict=True):
        assert equal(source.get(sample), state)
        assert equal(source.get(sample), state)
    source.close()
    reader = ShardReader(tmp_path / "states", [1, 2, 3])
    for sample, state in zip(SAMPLES, expected(tiny_target, tmp_path / "states", [1, 2, 3]), strict=True):
        assert equal(reader.get(sample), state)


def test_what_does_not_fit_is_asked_for_again(tiny_target: Target, tmp_path: Path) -> None:
    source, asked = opened(tiny_target, tmp_path / "states", [1, 2, 3])
    sizes = [source.writer.size(sample) for sample in SAMPLES]
    source.close()
    budget = (sizes[0] + sizes[1]) / GIB
    source, asked = opened(tiny_target, tmp_path / "states", [1, 2, 3], budget_gib=budget)
    wanted = expected(tiny_target, tmp_path / "states", [1, 2, 3])
    for number in (0, 1, 2, 0, 1, 2, 3):
        assert equal(source.get(SAMPLES[number]), wanted[number])
    assert asked == [SAMPLES[number].tokens for number in (0, 1, 2, 2, 3)]
    source.close()
    assert sum(path.stat().st_size for path in (tmp_path / "states").glob("shard-*")) <= budget * GIB
    source, asked = opened(tiny_target, tmp_path / "states", [1, 2, 3], budget_gib=budget)
    source.get(SAMPLES[4])
    source.close()
    assert len(index_of(tmp_path / "states")) == 2, "the budget holds over all runs together"


def test_two_at_one_folder(tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one keeps nothing, and reads what the first one has committed."""
    first, _ = opened(tiny_target, tmp_path / "states", [1, 2, 3], commit_tokens=1)
    second, asked = opened(tiny_target, tmp_path / "states", [1, 3], commit_tokens=1)
    assert "is being written by another process" in capsys.readouterr().out and second.writer is None
    wanted = expected(tiny_target, tmp_path / "states", [1, 3])
    assert equal(second.get(SAMPLES[0]), wanted[0]) and len(asked) == 1
    first.get(SAMPLES[0])
    first.get(SAMPLES[1])
    assert all(equal(second.get(SAMPLES[number]), wanted[number]) for number in (0, 1))
    assert len(asked) == 1
    second.close()
    first.close()
    assert len(index_of(tmp_path / "states")) == 2


def test_the_folder_is_free_after_closing(tiny_target: Target, tmp_path: Path) -> None:
    source, _ = opened(tiny_target, tmp_path / "states", [1, 2, 3])
    source.close()
    ShardWriter(tmp_path / "states", Manifest.read(tmp_path / "states"), GIB).close()
