"""Stored states that serve another run: fewer layers, a folder from elsewhere, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disks import remount
from stored_states import SAMPLES, change, contents, equal, extract, flip, make
from tiny import copied, manifest_of, states_of, write_responses

from trainer.errors import UserError
from trainer.hidden_states.base import Manifest
from trainer.hidden_states.codec import Codec
from trainer.hidden_states.reuse import link
from trainer.records import Sample
from trainer.target import Target


def finished(target: Target, folder: Path, layers: list[int], samples: list[Sample] = SAMPLES,
             **changes: Any) -> dict[str, Any]:
    """An extraction as the pipeline leaves it."""
    record = extract(make("offline", target, layers, **changes), folder, samples)
    (folder / "stage.json").write_text(json.dumps({"record": record}))
    return record


def check(target: Target, folder: Path, layers: list[int]) -> None:
    stage = make("offline", target, layers)
    codec = Codec.of(Manifest.read(folder), layers)
    source = stage.source(folder=folder, layers=layers)
    for sample, state in zip(SAMPLES, states_of(target, SAMPLES, layers), strict=True):
        assert equal(source.get(sample), codec.roundtrip(state, sample.loss_mask))
    source.close()


def test_a_run_that_reads_fewer_layers_extracts_nothing(tiny_target: Target, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    finished(tiny_target, tmp_path / "states/one", [0, 1, 2, 3])
    record = finished(tiny_target, tmp_path / "states/two", [3, 1])
    assert record["reused"] == str(tmp_path / "states/one")
    assert "nothing is extracted" in capsys.readouterr().out
    assert set(record["gates"]) == {"bad_rows", "top1_agreement", "cosine_layer_1", "cosine_layer_3"}
    check(tiny_target, tmp_path / "states/two", [1, 3])
    assert all(path.is_symlink() for path in (tmp_path / "states/two").glob("*.bin"))
    shutil.move(tmp_path / "states", tmp_path / "moved")
    check(tiny_target, tmp_path / "moved/two", [1, 3])


def test_links_of_a_run_that_ended_early_are_decided_anew(tiny_target: Target, tmp_path: Path) -> None:
    """Killed between the links and its end, a stage must not write through them, nor think them its own."""
    finished(tiny_target, tmp_path / "states/one", [1, 2])
    before = contents(tmp_path / "states/one")
    for name, layers in (("two", [2]), ("three", [1, 2])):
        out = tmp_path / "states" / name
        out.mkdir()
        link(tmp_path / "states/one", out)
        record = finished(tiny_target, out, layers)
        assert record["reused"] == str(tmp_path / "states/one")
        check(tiny_target, out, layers)
    assert contents(tmp_path / "states/one") == before


OTHERS: dict[str, dict[str, Any]] = {
    "fewer layers": {"layers": [1, 2]},
    "another storage": {"layers": [1, 2, 3], "storage": "float8_e4m3fn"},
    "other rows": {"layers": [1, 2, 3], "last_rows": "all"},
    "fewer samples": {"layers": [1, 2, 3], "samples": SAMPLES[:4]},
    "other tokens": {"layers": [1, 2, 3], "samples": [replace(SAMPLES[0], tokens=SAMPLES[0].tokens[::-1]),
                                                      *SAMPLES[1:]]},
    "another mask": {"layers": [1, 2, 3], "samples": [
        replace(SAMPLES[0], loss_mask=tuple(not flag for flag in SAMPLES[0].loss_mask)), *SAMPLES[1:]]},
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_does_not_fit_is_left_alone(other: str, tiny_target: Target, tmp_path: Path) -> None:
    finished(tiny_target, tmp_path / "states/one", **OTHERS[other])
    record = finished(tiny_target, tmp_path / "states/two", [1, 2, 3])
    assert record["reused"] is None
    check(tiny_target, tmp_path / "states/two", [1, 2, 3])


def test_an_extraction_under_way_is_no_result(tiny_target: Target, tmp_path: Path) -> None:
    finished(tiny_target, tmp_path / "states/one.partial", [1, 2, 3])
    extract(make("offline", tiny_target, [1, 2, 3]), tmp_path / "states/three")  # without its stage.json
    assert finished(tiny_target, tmp_path / "states/two", [1, 2, 3])["reused"] is None


def test_what_was_begun_is_gone_on_with(tiny_target: Target, tmp_path: Path) -> None:
    extract(make("offline", tiny_target, [1, 2]), tmp_path / "states/two", SAMPLES[:2])
    finished(tiny_target, tmp_path / "states/one", [1, 2, 3])
    assert extract(make("offline", tiny_target, [1, 2]), tmp_path / "states/two")["reused"] is None


def test_a_folder_from_elsewhere(tiny_target: Target, tmp_path: Path) -> None:
    finished(tiny_target, tmp_path / "there/states", [0, 1, 2, 3])
    before = contents(tmp_path / "there/states")
    record = finished(tiny_target, tmp_path / "here/states", [1, 2], path=str(tmp_path / "there/states"))
    assert record["reused"] == str(tmp_path / "there/states")
    check(tiny_target, tmp_path / "here/states", [1, 2])
    assert contents(tmp_path / "there/states") == before


def test_another_dtype_from_elsewhere_is_told_and_judged(tiny_target: Target, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    finished(tiny_target, tmp_path / "there/states", [1, 2], storage="float8_e4m3fn")
    record = finished(tiny_target, tmp_path / "here/states", [1, 2], path=str(tmp_path / "there/states"))
    assert "says storage float8_e4m3fn, this run native; the gates judge" in capsys.readouterr().out
    assert record["gates"]["top1_agreement"]["bound"] == 0.9


def test_a_folder_from_elsewhere_must_fit(tiny_target: Target, tmp_path: Path) -> None:
    there, here = tmp_path / "there/states", tmp_path / "here/states"

    def adopt(target: Target = tiny_target, layers: tuple[int, ...] = (1, 2)) -> None:
        shutil.rmtree(here, ignore_errors=True)
        extract(make("offline", target, list(layers), path=str(there)), here)

    with pytest.raises(UserError, match=f"^hidden_states.path={there} is no folder: expected .*, found "
                                        "nothing that can be reached; check the path$"):
        adopt()
    there.parent.mkdir()
    there.write_text("")
    for told in (adopt, make("offline", tiny_target, [1, 2], path=str(there)).preflight):  # also beforehand
        with pytest.raises(UserError, match=f"^hidden_states.path={there} is no folder: expected .*, found a "
                                            "file;"):
            told()
    there.unlink()
    there.mkdir()
    with pytest.raises(UserError, match=f"^hidden_states.path={there} holds no hidden states: "):
        adopt()
    manifest_of(tiny_target, [1, 2]).write(there)
    with pytest.raises(UserError, match=f"^hidden_states.path={there} lacks 5 of the 5 samples of this run "
                                        r"\(s0, s1, s2, \.\.\.\)"):
        adopt()
    path = Manifest.path(there)
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(UserError, match="is of format 3, expected format 2: other formats are not read; its "
                                        f"files are those of {there}: take"):
        adopt()
    path.unlink()
    finished(tiny_target, there, [1, 2], SAMPLES[1:])
    answers = {"responses": write_responses(tmp_path / "answers", SAMPLES)}
    beforehand = make("offline", tiny_target, [1, 2], path=str(there))
    for told in (adopt, lambda: beforehand.foresee(answers)):
        with pytest.raises(UserError, match=r"lacks 1 of the 5 samples of this run \(s0\).*responses=stored"):
            told()
    shutil.rmtree(there)
    finished(tiny_target, there, [1, 2])
    with pytest.raises(UserError, match=r"reads layers \[1, 3\] .* hold layers \[1, 2\]"):
        adopt(layers=(1, 3))
    other = copied(tiny_target, tmp_path / "other",
                   lambda tensors: [each.add_(1) for each in tensors.values()])
    for told in (lambda: adopt(other), make("offline", other, [1, 2], path=str(there)).preflight):
        with pytest.raises(UserError, match=f"another target: expected {other.identity}, found .*; set targ"):
            told()
    (there / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds no hidden states"):
        adopt()


def test_a_read_only_folder_from_elsewhere(tiny_target: Target, tmp_path: Path, disk: Path) -> None:
    """Nothing is locked or written there."""
    remount(disk, "size=1m")
    finished(tiny_target, disk / "states", [1, 2])
    remount(disk, "ro")
    finished(tiny_target, tmp_path / "here/states", [1, 2], path=str(disk / "states"))
    check(tiny_target, tmp_path / "here/states", [1, 2])


def test_a_folder_that_came_without_the_one_it_links_to(tiny_target: Target, tmp_path: Path) -> None:
    finished(tiny_target, tmp_path / "states/one", [1, 2, 3])
    finished(tiny_target, tmp_path / "states/two", [1, 2])
    shutil.copytree(tmp_path / "states/two", tmp_path / "alone/two", symlinks=True)
    with pytest.raises(UserError, match=rf"{tmp_path}/alone/two/manifest.json is missing or not readable "
                                        rf"\(No such file or directory\); .* its files are those of "
                                        f"{tmp_path}/alone/one: "):
        check(tiny_target, tmp_path / "alone/two", [1, 2])
    shutil.copytree(tmp_path / "states/two", tmp_path / "copied/two")  # what the links lead to
    check(tiny_target, tmp_path / "copied/two", [1, 2])


def test_damage_is_said_to_be_where_it_is(tiny_target: Target, tmp_path: Path) -> None:
    """Removing the folder of links alone would bring it back."""
    finished(tiny_target, tmp_path / "there/states", [1, 2])
    finished(tiny_target, tmp_path / "here/states", [1, 2], path=str(tmp_path / "there/states"))
    change(tmp_path / "there/states", "s2", "layer 2", flip())
    with pytest.raises(UserError, match=f"^{tmp_path}/here/states/shard-00000.bin, sample s2: section 'layer "
                                        f"2' is damaged: .*; its files are those of {tmp_path}/there/states"):
        check(tiny_target, tmp_path / "here/states", [1, 2])


def test_a_damaged_folder_beside_is_not_taken(tiny_target: Target, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    finished(tiny_target, tmp_path / "states/one", [1, 2, 3])
    os.truncate(tmp_path / "states/one/shard-00000.bin", 100)
    assert finished(tiny_target, tmp_path / "states/two", [1, 2])["reused"] is None
    assert "states/one/shard-00000.bin is truncated: expected at least" in capsys.readouterr().out
    check(tiny_target, tmp_path / "states/two", [1, 2])
