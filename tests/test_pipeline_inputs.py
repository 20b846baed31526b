"""Stages that read others where they are finished, and views that are made anew every time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer import pipeline
from trainer.errors import UserError
from trainer.pipeline import Stage

SEEN: list[list[str]] = []
NOW = [0]


@dataclass(frozen=True)
class Part(Stage):
    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    size: int

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        (out / "part").write_text("x" * self.size)
        return {"size": self.size}


@dataclass(frozen=True)
class View(Stage):
    after: ClassVar[tuple[str, ...]] = ("needed",)
    uses: ClassVar[tuple[str, ...]] = ("useful",)
    lasting: ClassVar[bool] = False
    version: ClassVar[int] = 1

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        assert not list(out.iterdir()), "a view starts from nothing"
        SEEN.append(sorted(inputs))
        (out / "now").write_text(str(NOW[0]))
        if NOW[0] < 0:
            raise UserError("not now")
        return {"now": NOW[0]}


class Lasting(View):
    lasting: ClassVar[bool] = True


class Wrong(Part):
    def check(self, stages: Any) -> dict[str, str]:
        return {"useful.size": "is wrong"}


@dataclass(frozen=True)
class Quick(Part):
    """Can be tried elsewhere."""

    @property
    def quick(self) -> bool:
        return True

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        if self.size < 0:
            raise UserError("no part is so small")
        return super().run(inputs, out)


@dataclass(frozen=True)
class Wary(Stage):
    after: ClassVar[tuple[str, ...]] = ("needed",)
    version: ClassVar[int] = 1

    def foresee(self, inputs: dict[str, Path]) -> None:
        SEEN.append([(folder / "part").read_text() for folder in inputs.values()])
        raise UserError("nothing fits")

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        raise UserError("nothing fits, as was foreseen")

    def tell(self, folder: Path) -> None:
        print("told", folder.parent.name)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SEEN.clear()
    NOW[0] = 0
    monkeypatch.chdir(tmp_path)


def settings(*run: str) -> dict[str, Any]:
    return {"run_root": "runs", "run": list(run), "needed": {"_target_": f"{__name__}.Part", "size": 2},
            "useful": {"_target_": f"{__name__}.Part", "size": 3}, "view": {"_target_": f"{__name__}.View"}}


def test_what_is_useful_is_handed_over_where_it_is_finished() -> None:
    pipeline.run(settings("needed", "view"))
    assert SEEN == [["needed"]] and not Path("runs/useful").exists()
    pipeline.run(settings("useful"))
    pipeline.run(settings("view"))
    pipeline.run(settings("needed", "useful", "view"))
    assert SEEN[1:] == [["needed", "useful"]] * 2


def test_what_is_used_decides_what_is_kept() -> None:
    """A lasting result is made anew once there is more to use, and stays afterwards."""
    class_of = {"view": {"_target_": f"{__name__}.Lasting"}}
    first = pipeline.run(settings("needed", "view") | class_of)
    both = pipeline.run(settings("useful", "view") | class_of)
    assert both != first and pipeline.run(settings("view") | class_of) == both
    assert SEEN == [["needed"], ["needed", "useful"]]
    assert json.loads((first / "stage.json").read_text())["inputs"].keys() == {"needed"}


def test_what_is_used_alone_is_neither_shown_nor_checked(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings("needed", "view") | {"useful": {"_target_": f"{__name__}.Wrong", "size": 1}}
    assert pipeline.check(config) == {} and "useful" not in [each.name for each in pipeline.plan(config)]
    assert list(pipeline.check({**config, "run": ["useful"]})) == ["useful.size"]
    pipeline.run(config)
    assert "useful" not in capsys.readouterr().out


def test_what_is_needed_must_still_be_there() -> None:
    with pytest.raises(UserError, match=r"run= leaves out .*: 'needed' \(read by 'view'\)"):
        pipeline.run(settings("view"))


def test_a_view_is_made_anew_and_leaves_one_folder() -> None:
    first = pipeline.run(settings("needed", "view"))
    NOW[0] = -1
    with pytest.raises(UserError, match="not now"):
        pipeline.run(settings("view"))
    assert (first / "now").read_text() == "0", "the last view stays until there is a new one"
    NOW[0] = 1
    assert pipeline.run(settings("view")) == first and (first / "now").read_text() == "1"
    assert json.loads((first / "stage.json").read_text())["record"] == {"now": 1}
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == [first.name]


def test_a_rehearsal_does_what_is_quick_and_leaves_nothing() -> None:
    for kind, size, seen, said in (("Quick", 2, [["xx"]], "nothing fits"), ("Part", 2, [[]], "nothing fits"),
                                   ("Quick", -1, [[]], "no part is so small\nnothing fits")):
        SEEN.clear()
        config = settings("needed", "wary") | {"needed": {"_target_": f"{__name__}.{kind}", "size": size},
                                               "wary": {"_target_": f"{__name__}.Wary"}}
        with pytest.raises(UserError, match=f"^{said}$"):
            pipeline.rehearse(pipeline.plan(config), config["run"])
        assert seen == SEEN and not Path("runs").exists()
    with pytest.raises(UserError, match="as was foreseen"):
        pipeline.run(settings("needed", "wary") | {"wary": {"_target_": f"{__name__}.Wary"}})
    assert SEEN == [[]], "the next stage says so itself"


def test_the_last_stage_tells_first(capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Part, View):
        monkeypatch.setattr(kind, "tell", Wary.tell)
    pipeline.run(settings("needed", "view"))
    assert capsys.readouterr().out.splitlines()[-2:] == ["told view", "told needed"]
