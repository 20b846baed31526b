"""Checkpoints: complete or absent, read strictly, the newest few kept; and the log beside them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.errors import UserError
from trainer.strategies.base import Moments
from trainer.strategies.process import Group
from trainer.strategies.single import Alone
from trainer.training import checkpoint
from trainer.training.log import Log


def made(hidden: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(hidden)
    model = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> Moments:
    return Alone(nn.Linear(1, 1), optimizer, Group(0, 1, "cpu")).moments()


def save(root: Path, step: int = 7, keep: int = 2) -> tuple[checkpoint.Saved, nn.Module,
                                                            torch.optim.Optimizer]:
    model, optimizer = made()
    return checkpoint.save(root, step, model, moments(optimizer), {"tokens": 12}, keep), model, optimizer


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved, model, optimizer = save(tmp_path)
    assert (saved.folder.name, saved.step) == ("step_000007", 7)
    again, fresh = made()
    for parameter in again.parameters():
        parameter.data.zero_()
    assert checkpoint.load(saved, again) == {"tokens": 12, "step": 7}
    Alone(again, fresh, Group(0, 1, "cpu")).load_moments(checkpoint.load_moments(saved))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
    one, two = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert one.keys() == two.keys() == {0, 1, 2}
    for index, entry in one.items():
        assert all(torch.equal(entry[key], two[index][key]) and entry[key].dtype == two[index][key].dtype
                   for key in ("step", "exp_avg", "exp_avg_sq"))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        save(tmp_path, step, keep=3)
    assert [saved.step for saved in checkpoint.find(tmp_path)] == [2, 9, 10]
    save(tmp_path, 11, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000011"]
    assert checkpoint.find(tmp_path / "nowhere") == []


def test_the_best_steps_that_the_newest_name_are_kept(tmp_path: Path) -> None:
    model, optimizer = made()
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, None)):
        state = {"best": None if best is None else {"step": best, "measured": 1.5}}
        checkpoint.save(tmp_path, step, model, moments(optimizer), state, keep=2)
        kept = [saved.step for saved in checkpoint.find(tmp_path)]
        assert kept == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [3, 5, 6]}[step]
    with torch.no_grad():
        before = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load_best(tmp_path, 3, model)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    (tmp_path / "step_000005/state.json").write_text("torn")
    checkpoint.save(tmp_path, 7, model, moments(optimizer), {"best": None}, keep=3)
    assert [saved.step for saved in checkpoint.find(tmp_path)] == [5, 6, 7]


def test_a_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "step_000004.partial").mkdir()
    (tmp_path / "step_000004.partial" / "weights.safetensors").write_bytes(b"torn")
    (tmp_path / "step_notes").mkdir()
    assert [saved.step for saved in checkpoint.find(tmp_path)] == [3]
    save(tmp_path, 4)
    assert [saved.step for saved in checkpoint.find(tmp_path)] == [3, 4]
    assert not (tmp_path / "step_000004.partial").exists()


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 3)
    model, optimizer = made(hidden=6)
    saved = checkpoint.save(tmp_path, 3, model, moments(optimizer), {"tokens": 99}, keep=2)
    again = made(hidden=6)[0]
    assert checkpoint.load(saved, again)["tokens"] == 99


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(tmp_path: Path, name: str, damage: Any,
                                                               capsys: pytest.CaptureFixture) -> None:
    one, two = save(tmp_path, 7, keep=3)[0], save(tmp_path, 9, keep=3)[0]
    assert checkpoint.newest(tmp_path) == two
    damage(two.folder / name)
    assert checkpoint.newest(tmp_path) == one
    said = capsys.readouterr().out
    assert said.startswith(f"train: {two.folder / name} ") and said.count("\n") == 1
    assert "step_000009.damaged, and an earlier one taken" in said
    assert checkpoint.newest(tmp_path) == one and not capsys.readouterr().out, "told once"
    assert save(tmp_path, 9, keep=1)[0] == checkpoint.newest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000009"]
    damage(two.folder / name)
    assert checkpoint.newest(tmp_path) is None


def test_a_checkpoint_without_checksums_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved = save(tmp_path, 7)[0]
    (saved.folder / "state.json").write_text('{"step": 7}')
    assert checkpoint.newest(tmp_path) is None
    assert "state.json names no checksums" in capsys.readouterr().out


def test_a_checkpoint_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        saved = save(tmp_path, 7)[0]
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in saved.folder.iterdir()} == {0o644}


def test_weights_of_another_drafter_are_refused(tmp_path: Path) -> None:
    saved, model, _ = save(tmp_path)
    wider = made(hidden=6)[0]
    before = [parameter.detach().clone() for parameter in wider.parameters()]
    with pytest.raises(UserError, match=r"does not fit the drafter: 3 tensors differ .*0\.weight"):
        checkpoint.load(saved, wider)
    assert all(torch.equal(one, two)
               for one, two in zip(before, wider.parameters(), strict=True)), "untouched"
    weights = checkpoint.trained(model)
    for changed in ({name: weights[name] for name in list(weights)[1:]}, {**weights, "more": torch.zeros(1)}):
        with pytest.raises(UserError, match="1 tensors differ"):
            checkpoint.load_weights(model, changed, tmp_path)



class Slow:
    """A number of a state that is known only when `now` is set."""

    def __init__(self) -> None:
        self.now = threading.Event()

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def item(self) -> int:
        assert self.now.wait(60)
        return 12


def test_a_writer_writes_what_there_was_while_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    writer, slow, lines = checkpoint.Writer(), Slow(), [1]
    writer.save(tmp_path, 7, model, moments(optimizer), {"tokens": slow, "log": lines}, keep=2)
    lines.append(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
    assert checkpoint.find(tmp_path) == [], "it is being written"
    slow.now.set()
    writer.close()
    [saved] = checkpoint.find(tmp_path)
    assert checkpoint.load(saved, model) == {"tokens": 12, "log": [1], "step": 7}
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(entry["exp_avg"].any() for entry in checkpoint.load_moments(saved).values())


def test_what_keeps_a_writer_from_writing_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model, optimizer = made()
    for call in ("wait", "close"):
        writer = checkpoint.Writer()
        writer.save(tmp_path / "file", 7, model, moments(optimizer), {}, keep=2)
        with pytest.raises((UserError, OSError)):
            getattr(writer, call)()
        writer.close()


def test_a_log_begins_with_the_lines_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, [], None)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": 1.0 / step})
    log.close()
    path.write_text(path.read_text().replace("0.05", "0.06") + '{"step": 40, "lo')
    again = Log(path, log.lines[:2], None)
    again.write({"step": 25})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == again.lines == [{"step": 10, "loss": 0.1}, {"step": 20, "loss": 0.05}, {"step": 25}]
