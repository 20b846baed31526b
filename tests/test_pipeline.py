"""Stages: fingerprints, reuse, continuing, the order of things on disk, and what stays out of the record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainer import _folders, pipeline
from trainer._secrets import masked
from trainer.errors import UserError
from trainer.gates import Gate, require
from trainer.pipeline import Stage, build, fingerprint, plan

FACTS: dict[str, Any] = {}  # what the toy stages read from outside their settings
CALLS: list[str] = []


@dataclass(frozen=True)
class Engine:
    threads: int
    runtime: dict


@dataclass(frozen=True)
class Make(Stage):
    after: ClassVar[tuple[str, ...]] = ()
    version: ClassVar[int] = 1
    size: int
    engine: Engine
    runtime: dict

    def external(self) -> dict[str, Any]:
        return dict(FACTS)

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        CALLS.append("make")
        assert out.is_absolute() and out.name.endswith(".partial") and inputs == {}
        with (out / "items.txt").open("a") as file:
            file.write("x" * self.size)
        if self.runtime.get("fail"):
            raise self.runtime["fail"]
        return {"items": self.size, "where": out, "gates": require([Gate("g", 1.0, 0.5, ">=", "none")])}


@dataclass(frozen=True)
class Use(Stage):
    after: ClassVar[tuple[str, ...]] = ("make",)
    version: ClassVar[int] = 1
    factor: float

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        CALLS.append("use")
        (out / "result.txt").write_text(str(self.factor * len((inputs["make"] / "items.txt").read_text())))
        return {"factor": self.factor}


@dataclass(frozen=True)
class Careful(Stage):
    after: ClassVar[tuple[str, ...]] = ("make", "use")
    version: ClassVar[int] = 1
    refuses: str

    def foresee(self, inputs: dict[str, Path]) -> None:
        CALLS.append(f"foresee {' '.join(inputs)}")
        if self.refuses in inputs:
            raise UserError(f"{sorted(path.name for path in inputs[self.refuses].iterdir())} will not do")

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        CALLS.append("careful")
        return {}


@dataclass(frozen=True)
class Behind(Stage):
    after: ClassVar[tuple[str, ...]] = ("use",)
    version: ClassVar[int] = 1

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        CALLS.append("last")
        return {}


@dataclass(frozen=True)
class Bringing(Use):
    wanted: bool

    @property
    def brings(self) -> tuple[str, ...]:
        return ("last",) if self.wanted else ()


class Remarkable(Use):
    def remarks(self, stages: Mapping[str, Any]) -> list[str]:
        return [f"a size of {stages['make'].size} is odd"] if stages["make"].size % 2 else []


class Looking(Use):
    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        CALLS.append(Path("runs/latest.json").read_text())
        raise UserError("fails after that")


class Circular(Use):
    after: ClassVar[tuple[str, ...]] = ("use",)


class Refuses:
    def __init__(self, kind: str) -> None:
        raise {"user": UserError("there is no such folder"), "value": ValueError("no")}.get(
            kind, KeyError("ours"))


class Pair:
    def __init__(self, left: Any, right: Any = None) -> None:
        self.left, self.right = left, right


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FACTS.clear()
    CALLS.clear()
    monkeypatch.chdir(tmp_path)


def settings(size: int = 3, factor: float = 2.0, stages: tuple[str, ...] = ("make", "use"),
             **runtime: Any) -> dict[str, Any]:
    return {"run_root": "runs", "seed": 0, "run": list(stages), "recipe_name": "toy",
            "make": {"_target_": f"{__name__}.Make", "size": size, "runtime": runtime,
                     "engine": {"_target_": f"{__name__}.Engine", "threads": 2, "runtime": {"port": 0}}},
            "use": {"_target_": f"{__name__}.Use", "factor": factor}}


def folders(config: dict) -> dict[str, Path]:
    return {planned.name: planned.folder for planned in plan(config)}


def test_a_run_leaves_finished_folders_and_their_records() -> None:
    last = pipeline.run(settings())
    assert last == folders(settings())["use"] and (last / "result.txt").read_text() == "6.0"
    record = json.loads((last / "stage.json").read_text())
    make = json.loads((folders(settings())["make"] / "stage.json").read_text())
    assert record["stage"] == "use" and record["record"] == {"factor": 2.0} and record["resumed"] is False
    assert record["inputs"] == {"make": make["fingerprint"]} and last.name == record["fingerprint"][:16]
    assert make["settings"]["size"] == 3 and make["versions"]["python"] and make["seconds"] >= 0
    assert not [path for path in Path("runs").rglob("*") if path.suffix in (".partial", ".lock")]
    assert not list(Path("runs").rglob(".*"))


@pytest.mark.parametrize(("wanted", "run", "completed"), [
    (True, ["make", "use"], ["make", "use", "last"]), (False, ["make", "use"], ["make", "use"]),
    (True, ["make"], ["make"]), (True, ["last", "use"], ["last", "use"])])
def test_a_stage_brings_others_behind_a_run_that_names_it(wanted: bool, run: list[str],
                                                          completed: list[str]) -> None:
    config = settings(stages=tuple(run)) | {"last": {"_target_": f"{__name__}.Behind"}}
    config["use"] |= {"_target_": f"{__name__}.Bringing", "wanted": wanted}
    found = pipeline.completed(config)
    assert found["run"] == completed and {**found, "run": run} == config
    if "make" in run:
        pipeline.run(found)
        assert completed == CALLS


def test_the_record_says_what_ran_the_stage() -> None:
    record = json.loads((pipeline.run(settings()) / "stage.json").read_text())
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["memory_gib"] > 0
    assert record["hardware"]["processor"] and record["versions"]["torch"]
    assert record["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", record["commit"])


def test_a_finished_stage_is_reused_and_a_changed_one_rebuilds_what_reads_it() -> None:
    pipeline.run(settings())
    pipeline.run(settings())
    assert CALLS == ["make", "use"]
    pipeline.run(settings(factor=3.0))
    assert CALLS == ["make", "use", "use"]
    pipeline.run(settings(size=4))
    assert CALLS[3:] == ["make", "use"]


def test_runtime_changes_nothing_at_any_depth() -> None:
    changed = settings(device="cuda")
    changed["make"]["engine"]["runtime"]["port"] = 8000
    changed["make"]["engine"]["_convert_"] = "all"
    assert folders(changed) == folders(settings())
    changed["make"]["engine"]["threads"] = 3
    assert folders(changed)["use"] != folders(settings())["use"]


def test_keys_that_a_stage_calls_idle_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, changed = folders(settings()), settings()
    changed["make"]["engine"]["threads"] = 3
    monkeypatch.setattr(Make, "idle", ("engine.threads",))
    assert folders(changed) == folders(settings())
    assert folders(settings())["make"] != before["make"]
    changed["make"]["size"] = 4
    assert folders(changed)["make"] != folders(settings())["make"]


def test_a_setting_may_be_added_at_its_neutral_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made before it existed is found again; any other value makes it anew."""
    def made(**added: Any) -> str:
        return fingerprint({"_target_": "t", "inner": {"_target_": "u", **added}}, 1, {}, {}, (),
                           {"inner.threads": None})

    assert made(threads=None) == made() != made(threads=2)
    assert made(threads=None, other=None) != made()
    before, larger = folders(settings()), folders(settings(size=4))
    monkeypatch.setattr(Make, "neutral", {"size": 3})
    assert folders(settings()) != before and folders(settings(size=4)) == larger


def test_everything_that_decides_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [folders(settings())["use"]]
    FACTS["input"] = "sha256 of a file"
    seen.append(folders(settings())["use"])
    monkeypatch.setattr(Make, "version", 2)
    seen.append(folders(settings())["use"])
    other = settings()
    other["make"]["_target_"] = f"{__name__}.Make2"
    monkeypatch.setitem(globals(), "Make2", type("Make2", (Make,), {}))
    seen.append(folders(other)["use"])
    assert len(set(seen)) == 4


def test_only_nodes_have_keys_that_decide_nothing() -> None:
    """In a dict of the user's own, such as an environment, a key is what it is, whatever it is called."""
    def made(**own: Any) -> str:
        return fingerprint({"_target_": "t", "runtime": {"a": 1}, "_convert_": "all", "own": own}, 1, {}, {})

    assert len({made(), made(runtime=1), made(runtime=2), made(_X="1"), made(_convert_="all")}) == 5


def test_the_fingerprint_is_canonical() -> None:
    one = fingerprint({"b": 1, "a": [1, {"_target_": "t", "runtime": 3, "x": None}]}, 1, {}, {})
    assert one == fingerprint({"a": [1, {"x": None, "_target_": "t"}], "b": 1}, 1, {}, {})
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert one != fingerprint({"a": [{"x": None}, 1], "b": 1}, 1, {}, {})
    assert fingerprint({}, 1, {}, {"a": "1"}) != fingerprint({}, 1, {}, {"a": "2"})


def test_a_failed_stage_keeps_its_work_and_goes_on(capsys: pytest.CaptureFixture) -> None:
    planned = plan(settings())[0]
    object.__setattr__(planned.stage, "runtime", {"fail": RuntimeError("broken")})
    with pytest.raises(RuntimeError, match="broken"):
        pipeline._execute(planned, {})
    assert planned.state == "continue" and (planned.partial / "items.txt").read_text() == "xxx"
    (planned.partial / ".stage.json.999").write_text("half a rec")
    pipeline.run(settings())
    assert not (planned.folder / ".stage.json.999").exists()
    assert "make  continue" in capsys.readouterr().out
    assert (planned.folder / "items.txt").read_text() == "xxxxxx"
    assert json.loads((planned.folder / "stage.json").read_text())["resumed"] is True


def test_a_stage_that_only_misses_its_rename_is_not_run_again() -> None:
    pipeline.run(settings())
    make = plan(settings())[0]
    make.folder.rename(make.partial)
    pipeline.run(settings())
    assert CALLS == ["make", "use"] and make.folder.exists()


def test_what_a_finished_stage_has_to_tell_ends_every_run(monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(Use, "tell", lambda self, folder: print((folder / "result.txt").read_text()))
    for _ in range(2):
        pipeline.run(settings())
        assert capsys.readouterr().out.splitlines()[-1] == "6.0"
    pipeline.run(settings(stages=("make",)))
    assert "6.0" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", None])
def test_a_damaged_record_names_the_folder_to_remove(damage: str | None) -> None:
    pipeline.run(settings())
    make = folders(settings())["make"]
    if damage is None:
        (make / "stage.json").unlink()
    else:
        (make / "stage.json").write_text(damage)
    with pytest.raises(UserError, match=f"{make} exists but its stage.json cannot be .*remove the folder"):
        pipeline.run(settings())


def test_a_record_of_another_fingerprint_is_no_result() -> None:
    pipeline.run(settings())
    make, other = folders(settings())["make"], folders(settings(size=9))["make"]
    make.rename(other)
    with pytest.raises(UserError, match="was made by fingerprint .* not .*; remove the folder"):
        pipeline.run(settings(size=9))


def test_some_stages_only() -> None:
    with pytest.raises(UserError, match=r"leaves out .* 'make' \(read by 'use'\); write 'run=\[make,use\]'"):
        pipeline.run(settings(stages=("use",)))
    assert CALLS == []
    pipeline.run(settings(stages=("make",)))
    pipeline.run(settings(stages=("use",)))
    assert CALLS == ["make", "use"]


def test_what_a_stage_can_foresee_is_told_before_the_stages_between() -> None:
    config = settings(stages=("make", "use", "careful"))
    config["careful"] = {"_target_": f"{__name__}.Careful", "refuses": "make"}
    with pytest.raises(UserError, match=r"\['items.txt', 'stage.json'\] will not do"):
        pipeline.run(config)
    assert CALLS == ["make", "foresee make"]
    config["careful"]["refuses"] = "nothing"
    pipeline.run(config)
    assert CALLS[2:] == ["foresee make", "use", "careful"], "the next stage says so itself"
    pipeline.run(config)
    assert len(CALLS) == 5, "nothing to foresee of a finished stage"
@dataclass(frozen=True)
class Last(Stage):
    after: ClassVar[tuple[str, ...]] = ("make", "use")
    version: ClassVar[int] = 1

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        return {}


def test_all_that_is_left_out_is_named_at_once() -> None:
    config = settings(stages=("last",)) | {"last": {"_target_": f"{__name__}.Last"}}
    with pytest.raises(UserError, match=r"'make' \(read by 'use'\), 'use' \(read by 'last'\); write "
                                        r"'run=\[make,use,last\]'$"):
        pipeline.run(config)
    pipeline.run(settings(stages=("make",)))
    with pytest.raises(UserError, match=r"in runs: 'use' \(read by 'last'\); write 'run=\[use,last\]'$"):
        pipeline.run(config)
    pipeline.run(settings())
    pipeline.run(config)


@dataclass(frozen=True)
class Needy(Make):
    """Finds fault with its size beside that of others, with a file, and with the machine."""

    after: ClassVar[tuple[str, ...]] = ("make",)

    def check(self, stages: Mapping[str, Any]) -> dict[str, str]:
        return {"needy.size": "too large"} if self.size > stages["make"].size else {}

    def external(self) -> dict[str, Any]:
        if self.size == 2:
            raise UserError(f"no file {FACTS['file']}")
        return {}

    def preflight(self) -> None:
        CALLS.append("preflight")
        if FACTS.get("broken"):
            raise UserError(f"no {FACTS['broken']} here")

    def run(self, inputs: dict[str, Path], out: Path) -> dict[str, Any]:
        return {}


def needy(*sizes: int, run: tuple[str, ...] = ("make", "needy", "other")) -> dict[str, Any]:
    made = settings(stages=run)
    return made | {name: made["make"] | {"_target_": f"{__name__}.Needy", "size": size}
                   for name, size in zip(("needy", "other"), sizes, strict=True)}


def test_stages_find_fault_with_settings_that_do_not_go_together() -> None:
    assert pipeline.check(needy(3, 1)) == {}
    assert pipeline.check(needy(4, 4)) == {"needy.size": "too large"}
    assert pipeline.check(needy(4, 4, run=("make",))) == {}, "what is not reached is not judged"
    assert CALLS == []


def test_what_is_missing_is_told_at_once_and_before_anything_runs() -> None:
    FACTS.update(file="a", broken="server")
    with pytest.raises(UserError, match=r"^no file a\nno server here$"):
        pipeline.run(needy(2, 2))  # the same fault of two stages is told once
    with pytest.raises(UserError, match=r"'make' \(read by 'needy'\); write 'run=\[make,needy\]'"):
        pipeline.run(needy(1, 1, run=("needy",)))
    with pytest.raises(UserError, match=r"^no server here$"):
        pipeline.run(needy(1, 1))
    assert CALLS == ["preflight"] * 4 and not Path("runs").exists()


def test_a_finished_stage_needs_nothing() -> None:
    pipeline.run(needy(1, 1, run=("make", "needy")))
    CALLS.clear()
    stages = plan(needy(1, 1, run=("make", "needy")))
    FACTS["broken"] = "server"
    pipeline.preflight(stages, ["make", "needy"])
    assert CALLS == []
    with pytest.raises(UserError, match="no server here"):
        pipeline.preflight(plan(needy(3, 1, run=("needy",))), ["needy"])


def test_the_order_is_that_of_the_dependence() -> None:
    assert [planned.name for planned in plan(settings(stages=("use", "make", "use")))] == ["make", "use"]


def test_a_stage_that_is_not_configured() -> None:
    config = settings(stages=("use",))
    del config["make"]
    with pytest.raises(UserError, match="stage 'use' reads 'make', which the configuration does not have"):
        plan(config)


def test_stages_in_a_circle_are_our_fault() -> None:
    config = settings(stages=("use",))
    config["make"] = {"_target_": f"{__name__}.Circular", "factor": 1.0}
    with pytest.raises(AssertionError, match="circle"):
        plan(config)


def test_a_full_disk_in_words_of_a_library_and_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Storage(Exception):
        pass

    for fault, free in ((Storage("Os { code: 28, message: \"No space left on device\" }"), 10**12),
                        (Storage("file write failed"), 1000)):
        monkeypatch.setattr(_folders, "_free_bytes", lambda folder, free=free: free)
        with pytest.raises(UserError, match="the disk is full: stage 'make' could not go on writing"):
            pipeline._execute(failing(fault), {})
    monkeypatch.setattr(_folders, "_free_bytes", lambda folder: 10**12)
    with pytest.raises(Storage):
        pipeline._execute(failing(Storage("file write failed")), {})


def failing(fault: Exception) -> pipeline.Planned:
    planned = plan(settings())[0]
    object.__setattr__(planned.stage, "runtime", {"fail": fault})
    return planned


def test_a_record_that_json_cannot_hold_is_told_with_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Use, "run", lambda self, inputs, out: {"bad": {1, 2}})
    with pytest.raises(TypeError, match="set is nothing that JSON can hold"):
        pipeline.run(settings())
    assert plan(settings())[1].state != "reuse"


def test_a_folder_that_cannot_be_written() -> None:
    Path("runs").write_text("a file where the folder should be")
    for root, said in (("runs", "run_root=runs cannot hold make .*; set run_root="),
                       ("", "run_root= is empty"), ("x" * 300, "File name too long")):
        with pytest.raises(UserError, match=said):
            pipeline.run(settings() | {"run_root": root})


def test_latest_points_at_the_newest_folders() -> None:
    pipeline.run(settings())
    pipeline.run(settings(size=5, stages=("make",)))
    latest = json.loads(Path("runs/latest.json").read_text())
    assert latest == {"make": str(folders(settings(size=5))["make"].resolve()),
                      "use": str(folders(settings())["use"].resolve())}
    Path("runs/latest.json").write_text("{broken")
    pipeline.run(settings())
    assert set(json.loads(Path("runs/latest.json").read_text())) == {"make", "use"}


def test_latest_names_each_stage_as_soon_as_it_is_finished() -> None:
    """Whoever looks while the next one runs, or after it failed, finds the last one that did not."""
    with pytest.raises(UserError, match="fails after that"):
        pipeline.run(settings() | {"use": {"_target_": f"{__name__}.Looking", "factor": 2.0}})
    assert json.loads(CALLS[-1]) == {"make": str(folders(settings())["make"].resolve())}


def test_remarks_are_told_once_and_not_of_what_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    config = settings() | {"use": {"_target_": f"{__name__}.Remarkable", "factor": 2.0}}
    for stages, count in ((("make",), 0), (("make", "use"), 1), (("make", "use"), 0)):
        pipeline.run(config | {"run": list(stages)})
        assert capsys.readouterr().out.splitlines().count("note: a size of 3 is odd") == count


def test_a_finished_run_needs_no_right_to_write(capsys: pytest.CaptureFixture) -> None:
    pipeline.run(settings())
    Path("runs/latest.json.lock").mkdir()  # now it cannot be written
    pipeline.run(settings())
    assert "note:" not in capsys.readouterr().out, "it says already what is there"
    Path("runs/latest.json").unlink()
    assert pipeline.run(settings()) == folders(settings())["use"]
    assert "note: runs/latest.json cannot be written and does not name" in capsys.readouterr().out


def test_the_header_and_the_numbers(capsys: pytest.CaptureFixture) -> None:
    pipeline.run(settings())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["recipe toy", f"  make  run       {folders(settings())['make']}",
                         f"  use   run       {folders(settings())['use']}"]
    assert lines[3] == f"results go to {Path('runs').resolve()}; run_root= puts them elsewhere"
    assert lines[5:7] == ["make: done in 0:00, items 3", "  gate g: 1 >= 0.5"]


def test_secrets_stay_out_of_the_record_and_the_fingerprint() -> None:
    node = {"token": "a", "api_key": "b", "password": "c", "hf_token": "d",
            "mask_token": "<m>", "eos_token": "<e>",
            "environment": {"HF_TOKEN": "e", "WANDB_API_KEY": "f", "PATH": "/bin"}, "list": [{"secret": "g"}],
            "arguments": ["--api-key", "h", "--api-key=i", "--dtype", "float32", "--seed=3"],
            "none": {"token": None}}
    assert masked(node) == {
        "token": "***", "api_key": "***", "password": "***", "hf_token": "***", "mask_token": "<m>",
        "eos_token": "<e>", "environment": {"HF_TOKEN": "***", "WANDB_API_KEY": "***", "PATH": "/bin"},
        "list": [{"secret": "***"}], "arguments": ["--api-key", "***", "--api-key=***", "--dtype", "float32",
                                                   "--seed=3"], "none": {"token": None}}
    assert masked([]) == []
    config = settings(token="sesame")
    pipeline.run(config)
    assert "sesame" not in (folders(config)["make"] / "stage.json").read_text()
    named = settings()
    named["make"]["engine"]["threads"] = 2
    assert folders(named) == folders(config)


def test_build_makes_nested_objects_of_plain_parts() -> None:
    pair = build({"_target_": f"{__name__}.Pair", "left": {"a": [1, {"b": 2}]},
                  "right": {"_target_": f"{__name__}.Pair", "_partial_": True, "left": 1}})
    assert type(pair.left) is dict and type(pair.left["a"]) is list and type(pair.left["a"][1]) is dict
    assert pair.right(right=2).right == 2


def test_build_hands_arguments_over_as_they_are() -> None:
    engine = Engine(2, {})
    inner = {"_target_": f"{__name__}.Pair", "left": 3}
    pair = build({"_target_": f"{__name__}.Pair", "right": inner}, left=engine)
    assert pair.left is engine and pair.right.left == 3


def test_build_lets_the_errors_of_constructors_through() -> None:
    for wrapped in (lambda node: node, lambda node: {"_target_": f"{__name__}.Pair", "left": [node]}):
        with pytest.raises(UserError, match="^there is no such folder$"):
            build(wrapped({"_target_": f"{__name__}.Refuses", "kind": "user"}))
        with pytest.raises(KeyError, match="ours"):
            build(wrapped({"_target_": f"{__name__}.Refuses", "kind": "other"}))
    late = build({"_target_": f"{__name__}.Refuses", "_partial_": True})
    with pytest.raises(UserError, match="^there is no such folder$"):
        late(kind="user")
    with pytest.raises(UserError, match="^there is no such folder$"):
        build({"_target_": f"{__name__}.Refuses"}, kind="user")
    with pytest.raises(UserError, match="os.system cannot be built"):
        build({"_target_": "os.system", "command": "true"})


def test_what_a_constructor_refuses_names_the_setting() -> None:
    node = {"_target_": f"{__name__}.Pair", "left": {"_target_": f"{__name__}.Refuses", "kind": "value"}}
    with pytest.raises(UserError, match=r"^make\.left cannot be built .*\(ValueError: no\); mend"):
        build(node, "make")
