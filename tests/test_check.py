"""The configuration check on plain dicts: signatures, annotations, who is blamed, and what is nearest."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Protocol, Union

import pytest

from trainer import pipeline
from trainer._paths import Choices, Source, Sources, find, holder, unknown
from trainer.architectures.mtp import Mtp
from trainer.check import Configuration, check, locate, mismatch, unknown_arguments
from trainer.compose import compose_configuration
from trainer.errors import UserError
from trainer.ranges import Count, Device, Gives, Layers, Like, Positive, Seed, Share

if TYPE_CHECKING:
    from decimal import Decimal

HERE = __name__


class Engine:
    def __init__(self, threads: int) -> None:
        self.threads = threads


class Server(Engine):
    pass


class Other:
    def __init__(self, name: str = "x") -> None:
        self.name = name


@dataclass(frozen=True)
class Base:
    first: int


@dataclass(frozen=True)
class Job(Base):
    engine: Engine
    rate: float
    exact: Decimal
    names: list[str]
    make: Callable[..., Other]


def open_call(size: int, **rest: Any) -> None:
    """Takes anything."""


def listed(*items: int, last: str) -> None:
    """Takes any number of items."""


class Talks(Protocol):
    def talk(self) -> None: ...


def judge(settings: dict, raw: dict | None = None, files: tuple[Source, ...] = ()) -> list[str]:
    groups = [name for name, value in settings.items() if isinstance(value, dict)]
    return check(Configuration(raw or settings, settings, Sources(files)), groups, pipeline.Stage)


def node(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{name}", **arguments}


def job(**changes: Any) -> dict[str, Any]:
    return node("Job", first=1, engine=node("Server", threads=2), rate=1, exact="1.0", names=["a"],
                make=node("Other", _partial_=True)) | changes


def test_a_right_node_has_no_problems() -> None:
    assert judge({"job": job()}) == []


@pytest.mark.parametrize(("changes", "problem"), [
    ({"rat": 2}, "job.rat (configuration): unknown key; nearest: job.rate"),
    ({"engine": None}, "job.engine (configuration): must be Engine, but is null"),
    ({"engine": "server"}, "job.engine (configuration): must be Engine, but is 'server' (str)"),
    ({"engine": {"threads": 2}}, "job.engine (configuration): must be Engine, but is {'threads': 2} (dict)"),
    ({"engine": node("Other")},
     f"job.engine (configuration): must be Engine, but is the node of {HERE}.Other"),
    ({"engine": node("Server", threads=2, _partial_=True)},
     f"job.engine (configuration): must be Engine, but is the node of {HERE}.Server (_partial_)"),
    ({"engine": node("Server", threads="2")},
     "job.engine.threads (configuration): must be int, but is '2' (str)"),
    ({"engine": node("Server")}, f"job.engine.threads (configuration): is missing; {HERE}.Server needs it"),
    ({"engine": node("Server", thread=2, threads=2)},
     "job.engine.thread (configuration): unknown key; nearest: job.engine.threads"),
    ({"first": True}, "job.first (configuration): must be int, but is true"),
    ({"names": ["a", 1]}, "job.names (configuration): must be list[str], but is ['a', 1] (list)"),
    ({"names": "a"}, "job.names (configuration): must be list[str], but is 'a' (str); a list is "
                     "written job.names=[a]"),
    ({"make": node("Other", _partial_=True, nmae="y")},
     "job.make.nmae (configuration): unknown key; nearest: job.make.name"),
    ({"make": node("Other", _partial_="yes")},
     "job.make._partial_ (configuration): must be bool, but is 'yes' (str)"),
    ({"_partail_": True}, "job._partail_ (configuration): unknown key; nearest: job._partial_"),
])
def test_a_wrong_node_is_one_line(changes: dict, problem: str) -> None:
    assert judge({"job": job(**changes)}) == [problem]


def test_an_inherited_field_and_one_only_type_checkers_can_read() -> None:
    assert judge({"job": job(first="1")}) == ["job.first (configuration): must be int, but is '1' (str)"]
    assert judge({"job": job(exact=[1])}) == []


def test_partial_nodes_may_lack_arguments_but_not_invent_them() -> None:
    assert judge({"job": node("Server", _partial_=True)}) == []
    assert len(judge({"job": node("Server", _partial_=True, nope=1)})) == 1


@dataclass(frozen=True)
class Reads:
    make: Annotated[Callable[..., Engine], Gives(("context", "size"))]


class Late(Engine):
    def __init__(self, context: int, size: int, threads: int, name: str, free: int = 3) -> None: ...


def test_a_partial_node_has_what_its_reader_does_not_give() -> None:
    late = node("Late", _partial_=True, threads=2)
    missing = f"is missing; {HERE}.Late needs it"
    assert judge({"a": node("Reads", make=late)}) == [f"a.make.name (configuration): {missing}"]
    assert judge({"a": node("Reads", make=late | {"name": "x"})}) == []
    assert judge({"a": node("Reads", make=late | {"name": "x", "zzz": 1})}) == [
        "a.make.zzz (configuration): unknown key; a.make takes free, name, threads"], "none that is given"
    settings = {"late": late, "a": node("Reads", make=late), "b": node("Reads", make=late)}
    raw = {"late": late, "a": node("Reads", make="${late}"), "b": node("Reads", make="${late}")}
    assert judge(settings, raw) == [f"late.name (configuration): {missing}"], "told once, where it stands"


def test_open_signatures_and_positional_arguments() -> None:
    assert judge({"call": node("open_call", size=1, anything=2)}) == []
    assert judge({"call": node("open_call", size="1")}) == [
        "call.size (configuration): must be int, but is '1' (str)"]
    assert judge({"call": node("listed", _args_=[1, 2, 3], last="x")}) == []
    assert judge({"call": node("Server", _args_=[1])}) == []


def test_a_real_optimizer() -> None:
    adamw = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "betas": [0.9, 0.95]}
    assert judge({"optimizer": adamw}) == []
    assert judge({"optimizer": adamw | {"weight_deacy": 0.1}}) == [
        "optimizer.weight_deacy (configuration): unknown key; nearest: optimizer.weight_decay"]
    assert judge({"optimizer": adamw | {"lr": "fast"}}) == [
        "optimizer.lr (configuration): must be float or Tensor, but is 'fast' (str)"]
    assert "o.betas (configuration): must be tuple" in judge({"o": adamw | {"betas": [0.9]}})[0]


def test_nodes_in_lists_and_dicts_are_reached() -> None:
    assert judge({"all": {"of": [node("Other"), {"deep": node("Other", nmae=1)}]}}) == [
        "all.of.1.deep.nmae (configuration): unknown key; nearest: all.of.1.deep.name"]


def test_a_node_handed_over_as_a_dict() -> None:
    holder_node = {"_target_": f"{HERE}.TakesDict", "_recursive_": False, "inside": node("Server", threads=1)}
    assert judge({"a": holder_node}) == []
    assert len(judge({"a": holder_node | {"_recursive_": True}})) == 1


class TakesDict:
    def __init__(self, inside: dict[str, Any]) -> None:
        self.inside = inside


def test_one_mistake_behind_many_links_is_one_line_where_it_stands() -> None:
    raw = {"seed": "x", "engine": node("Server", threads="${seed}", thread=1),
           "a": node("Job", **job(first="${seed}", engine="${engine}")),
           "b": node("Job", **job(first="${a.first}", engine="${engine}"))}
    engine = node("Server", threads="x", thread=1)
    settings = {"seed": "x", "engine": engine, "a": node("Job", **job(first="x", engine=engine)),
                "b": node("Job", **job(first="x", engine=engine))}
    assert judge(settings, raw) == [f"seed (configuration): {mismatch('x', Seed)}",
                                    "engine.thread (configuration): unknown key; nearest: engine.threads"]


def test_a_value_that_is_right_in_itself_is_blamed_with_its_reader() -> None:
    raw = {"run_root": "here", "engine": node("Server", threads="${run_root}")}
    assert judge({"run_root": "here", "engine": node("Server", threads="here")}, raw) == [
        "run_root (configuration): must be int, but is 'here' (str) where engine.threads reads it"]


def test_mandatory_values_that_nobody_gave() -> None:
    raw = {"engine": node("Server", threads="???")}
    assert judge(raw) == ["engine.threads (configuration): has no value yet and needs one; set it in a "
                          "recipe or as engine.threads=..."]


SERVER = node("Server", threads=1, environment={}, runtime={"port": 0})
FILES = (Source("conf/engine/server.yaml", "engine", SERVER),
         Source("conf/config.yaml", "", {"seed": 0}),
         Source("recipes/fast.yaml", "", {"engine": {"threads": 4, "thraeds": 3}, "sede": 1}, recipe=True))


def test_who_set_a_key() -> None:
    sources = Sources(FILES, ("engine.runtime", "extra.deep.key"))
    expected = {"engine.threads": "recipes/fast.yaml", "engine.runtime.port": "command line",
                "engine._target_": "conf/engine/server.yaml", "engine.missing": "conf/engine/server.yaml",
                "engine.runtime": "command line", "engine": "command line",
                "seed": "conf/config.yaml", "sede": "recipes/fast.yaml", "extra": "command line",
                "no": "configuration"}
    assert {key: sources.origin(key) for key in expected} == expected


def test_plain_dicts_have_the_keys_of_their_group() -> None:
    settings = {"hardware": {"device": "cpu", "devise": "x", "free": {"A": 1}}}
    files = (Source("conf/hardware/cpu.yaml", "hardware", {"device": "cpu", "free": {}}),
             Source("recipes/r.yaml", "", {"hardware": {"devise": "x", "free": {"A": 1}}}, recipe=True))
    assert judge(settings, files=files) == [
        "hardware.devise (recipes/r.yaml): unknown key; nearest: hardware.device"]


def test_top_level_keys_and_stages() -> None:
    configuration = Configuration({"sede": 1, "run": ["a", "b"]}, {"sede": 1, "run": ["a", "b"]}, Sources())
    assert check(configuration, ["engine"], pipeline.Stage) == [
        "sede (configuration): unknown key; nearest: seed",
        "run (configuration): there is no stage 'a'; stages: "]


def test_arguments_that_set_nothing() -> None:
    raw = {"engine": node("Server", threads=1, environment={}), "train": {"engine": "${engine}", "lr": 1},
           "other": node("Other"), "call": node("open_call", size=1)}
    given = {"engine.threads": 2, "engine.thraeds": 2, "engine.fancy": 1, "engine.environment.A": 1,
             "other.name": "y", "call.any": 1,
             "train.engine.threads": 3, "train.lr.x": 1, "threads": 1, "engine.lrr": 1,
             "trian": {"a": {"b": 1}}, "train": {"lr": 2, "lrr": {"x": 1}}}
    assert unknown_arguments(given, raw, ["recipe"]) == {
        "engine.thraeds": "unknown key; nearest: engine.threads",
        "engine.fancy": "unknown key; engine takes environment, threads",
        "engine.environment.A": "unknown key; engine.environment can take it but does not set it: write "
                                "+engine.environment.A=...",
        "other.name": "unknown key; other can take it but does not set it: write +other.name=...",
        "call.any": "unknown key; call can take it but does not set it: write +call.any=...",
        "train.engine.threads": "train.engine is ${engine}; set engine.threads instead",
        "train.lr.x": "train.lr is the value 1 and has no keys",
        "threads": "unknown key; nearest: engine.threads",
        "engine.lrr": "unknown key; nearest: train.lr",
        "trian": "unknown key; nearest: train",
        "train.lrr": "unknown key; nearest: train.lr"}


def test_a_whole_node_may_stand_in_the_place_of_null() -> None:
    raw = {"prompts": {"thinking": None, "limit": 3}}
    whole = {"_target_": "a.b", "share": 0.5, "engine": {"batch": 1}}
    assert unknown_arguments({"prompts.thinking": whole}, raw, []) == {}
    assert unknown_arguments({"prompts.thinking.share": 0.5}, raw, []) == {
        "prompts.thinking.share": "prompts.thinking is the value None and has no keys"}
    assert unknown_arguments({"prompts.limit": {"a": 1}}, raw, []) == {
        "prompts.limit.a": "prompts.limit is the value 3 and has no keys"}


def test_unknown_without_a_neighbour_lists_what_there_is() -> None:
    assert unknown("a.zzz", ["one", "two"], {}) == "unknown key; a takes one, two"
    assert unknown("zzz", [], {}) == "unknown key; the configuration takes none"
    assert unknown("foo", ["a"], {"b": {"floor": 1}}) == "unknown key; the configuration takes a"
    assert unknown("zzz", ["b", "a", "b"], {}) == "unknown key; the configuration takes a, b"


def test_links_in_a_circle_end() -> None:
    assert holder({"a": "${b}", "b": "${a}"}, "a") in ("a", "b")
    assert holder({"a": "${b.c}", "b": {"c": 1}}, "a") == "b.c"
    assert holder({"a": "${gone}"}, "a") == "a"


def test_what_lies_behind_a_link_is_held_there() -> None:
    raw = {"a": {"x": "${b}"}, "b": {"y": {"z": "${c}"}}, "c": 3}
    assert [holder(raw, key) for key in ("a.x", "a.x.y", "a.x.y.z", "a.x.new")] == ["b", "b.y", "c", "b.new"]


@pytest.mark.parametrize(("value", "hint"), [
    (1, int), (1, float), (1.5, float), ("x", str), (True, bool), (None, None), (None, int | None),
    (3, Optional[int]),  # noqa: UP045 (libraries still write it so)
    (3, Union[int, str]),  # noqa: UP007
    ("a", Literal["a", "b"]), (1, Literal[1, 2]), ([1, 2], list), ([1, 2], list[int]), ([], list[int]),
    ([1, 2], tuple[int, ...]), ([1, "a"], tuple[int, str]), ([1], Sequence[int]), ([1], Iterable),
    ({"a": 1}, dict), ({"a": 1}, dict[str, int]), ({"a": 1}, Mapping[str, float]), ("x", Path),
    ("x", Path | None), (1, Any), (1, object),
    (1, Annotated[int, "doc"]), (1, Count), (None, Count | None), ([1, 2], list[Count]), (0.0, Share),
    (1, Share), ("cuda:1", Device),
    ("x", Annotated[str, Like("x", "x")]), ({"_target_": f"{HERE}.open_call"}, Positive),
    (1, "Unknown"), ({"_target_": "nowhere.X"}, Engine),
    ({"_target_": f"{HERE}.Server"}, Engine | None), ({"_target_": f"{HERE}.open_call"}, Engine),
    ({"_target_": f"{HERE}.Other"}, Talks),
    ({"_target_": f"{HERE}.Server", "_partial_": True}, Callable[..., Engine])])
def test_values_that_fit(value: object, hint: object) -> None:
    assert mismatch(value, hint) is None


@pytest.mark.parametrize(("value", "hint", "said"), [
    (True, int, "must be int, but is true"), (True, float, "must be float, but is true"),
    (1, bool, "must be bool, but is 1 (int)"), (1.0, int, "must be int, but is 1.0 (float)"),
    ("1", int, "must be int, but is '1' (str)"), (1, str, "must be str, but is 1 (int)"),
    (None, int, "must be int, but is null"), (0, None, "must be null, but is 0 (int)"),
    ("x", int | None, "must be int or null, but is 'x' (str)"),
    ("c", Literal["a", "b"], "must be one of a, b, but is 'c' (str)"),
    (True, Literal[1, 2], "must be one of 1, 2, but is true"),
    ([1, True], list[int], "must be list[int], but is [1, True] (list)"),
    ([1], tuple[int, str], "must be tuple[int, str], but is [1] (list)"),
    ({"a": "b"}, dict[str, int], "must be dict[str, int], but is {'a': 'b'} (dict)"),
    (2, list[Count], "must be list[int of at least 1], but is 2 (int); a list is written [2]"),
    (0, list[Count], "must be list[int of at least 1], but is 0 (int)"),
    (True, list, "must be list, but is true"),
    ([1], dict, "must be dict, but is [1] (list)"), ({}, list, "must be list, but is {} (dict)"),
    (5, Path, "must be Path, but is 5 (int)"), (5, Engine, "must be Engine, but is 5 (int)"),
    (5, Talks, "must be Talks, but is 5 (int)"), ("x" * 99, int, f"must be int, but is '{'x' * 56}... (str)"),
    ({"_target_": f"{HERE}.Other"}, dict, f"must be dict, but is the node of {HERE}.Other"),
    (float("nan"), float, "must be float, but is nan, which is no finite number"),
    (float("-inf"), Positive, "must be float above 0, but is -inf, which is no finite number"),
    (0, Count, "must be int of at least 1, but is 0 (int)"),
    (True, Count, "must be int of at least 1, but is true"),
    (0, Count | None, "must be int of at least 1 or null, but is 0 (int)"),
    ([1, 0], list[Count], "must be list[int of at least 1], but is [1, 0] (list)"),
    (1.5, Share, "must be float of at least 0 and of at most 1, but is 1.5 (float)"),
    ([], Layers, "must be list[int of at least 0] that is not empty and without repetition, but is [] "
                 "(list)"),
    ("cuda:x", Device, "must be str that is cpu, cuda or cuda:NUMBER, but is 'cuda:x' (str)"),
    ([1.0, "x"], tuple[float, ...], "must be tuple[float, ...], but is [1.0, 'x'] (list)")])
def test_values_that_do_not_fit(value: object, hint: object, said: str) -> None:
    assert mismatch(value, hint) == said


@pytest.mark.parametrize(("dotted", "said"), [
    ("no_such_package.X", "there is no module 'no_such_package'"),
    ("trainer.piepline.Stage", "trainer has no 'piepline'; nearest: pipeline"),
    ("trainer.pipeline.Stag", "trainer.pipeline has no 'Stag'; nearest: Stage"),
    ("trainer.pipeline.Stage.rnu", "trainer.pipeline.Stage has no 'rnu'; nearest: run")])
def test_targets_that_do_not_exist(dotted: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        locate(dotted)


def test_a_target_whose_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wants_more.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "wants_name.py").write_text("from json import no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="wants_more.X needs the package 'no_such_package_at_all'"):
        locate("wants_more.X")
    with pytest.raises(UserError, match="wants_name.X cannot be imported: cannot import name 'no_such_name'"):
        locate("wants_name.X")
    assert "wants_more" not in sys.modules


def test_descriptions_and_layouts(tmp_path: Path) -> None:
    choices = find()
    assert choices.main.is_file() and "recipe" in choices.groups() and "drafter" in choices.groups()
    assert choices.shown(choices.main) == "conf/config.yaml"
    assert Choices(tmp_path, tmp_path / "none").groups() == {}


MTP = {"mtp_smollm2", "mtp_qwen3_5_27b", "mtp_qwen3_6_27b", "mtp_qwen3_6_35b_a3b", "mtp_glm_flash",
       "mtp_gemma4_26b_a4b", "mtp_gemma4_31b"}


@pytest.mark.parametrize("recipe", sorted({*find().groups()["recipe"]} | MTP))
def test_the_recipes_of_the_project_are_right(recipe: str) -> None:
    """Every setting, and all of them together, for stages that are built and see no target."""
    choices = find()
    configuration = compose_configuration([f"recipe={recipe}"], choices)
    assert check(configuration, choices.groups(), pipeline.Stage) == []
    assert pipeline.check(configuration.settings) == {}


def test_a_recipe_that_a_drafter_s_needs_name_is_one_for_it() -> None:
    [named] = re.findall(r"recipe=(\w+)", Mtp.needs)
    node = compose_configuration([f"recipe={named}"], find()).settings["drafter"]
    assert locate(node["_target_"]) is Mtp


METHODS = ("eagle3", "dflash", "dflash2", "dspark", "mtp")


def test_drafters_of_one_target_share_its_answers() -> None:
    """Which layers a drafter reads, how their states are computed, and what its masks are, changes no answer;
    the length and type of what answers do."""
    def made(recipe: str, *more: str) -> str:
        node = compose_configuration([f"recipe={recipe}", *more], find()).settings["responses"]
        return pipeline.fingerprint(node, 1, {}, {}, pipeline.build(node).idle)

    assert len({made(f"{method}_smollm2") for method in METHODS}) == 1
    assert made("dflash_smollm2", "target.mask_token=5") == made("eagle3_smollm2")
    assert made("eagle3_smollm2", "target.max_length=512") != made("eagle3_smollm2")
    assert made("eagle3_smollm2", "target_engine.prefill_tokens=512") == made("eagle3_smollm2")
    full = made("eagle3_smollm2_full")
    assert made("eagle3_smollm2_full", "target_engine.states.dtype=float32") == full
    assert made("eagle3_smollm2_full", "target_engine.answers.dtype=float32") != full
