"""What a user can get wrong, through the command line: each is one line with a remedy, and nothing done is
lost."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import remount
from runs import ALONE, COMMITS, SMOKE, Home, check_went_on, quick, told
from vllm_support import vllm_python

from trainer.target import Target


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path: Path, cache: Path) -> Home:
    return Home(tmp_path / "home", cache)


PROMPTS = {
    "empty": ("", "prompts.jsonl holds no prompt"),
    "blank lines": ("\n\n", "prompts.jsonl holds no prompt"),
    "malformed": ('{"turns": ["hello"]}\n{"turns": ["hello"\n', "prompts.jsonl, line 2: not valid JSON"),
    "no turns": ('{"text": "hello"}\n', 'prompts.jsonl, line 1: expected an object with "turns"'),
    "half a character": ('{"turns": ["hi \\ud83d"]}\n', "prompts.jsonl, line 1: holds '\\ud83d', half of a"),
    "a call without result": (json.dumps({"messages": [
        {"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": [{"name": "look"}]},
        {"role": "user", "content": "Well?"}]}) + "\n", "line 1: message 3 has role 'user', but 1 calls of"),
    "too long": (json.dumps({"turns": ["word " * 300]}) + '\n{"turns": ["hi"]}\n', "prompt row-1 has 15"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompts(home: Home, capfd: pytest.CaptureFixture[str], case: str) -> None:
    text, expected = PROMPTS[case]
    path = home.folder / "prompts.jsonl"
    path.write_text(text)
    result = quick(home, capfd, *ALONE, "prompts=jsonl", f"prompts.source.path={path}", "prompts.heldout=0",
                   "run=[prompts,responses]")
    assert expected in told(*result)
    assert not list(home.root.glob("responses/*/responses.jsonl"))


def test_a_bad_prompt_among_many_is_left_out_and_named(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    path = home.folder / "prompts.jsonl"
    rows = [json.dumps({"turns": [f"What is {number} times {number + 7}?"],
                        "split": "heldout" if number > 115 else "train"}) for number in range(120)]
    path.write_text("\n".join([*rows, '{"turns": ["hello"', rows[0]]) + "\n")
    given = ["prompts=jsonl", f"prompts.source.path={path}", "prompts.heldout=4", "prompts.limit=null"]
    status, out, err = quick(home, capfd, *ALONE, *given, "prompts.duplicates.similarity=1", "run=[prompts]")
    assert status == 0 and not err
    assert f"prompts: left out: {path}, line 121: not valid JSON" in out
    assert "prompts: 1 left out of training, repeats a training text (first: row-122, row-1)" in out
    facts = json.loads((home.stage("prompts") / "prompts.json").read_text())
    assert (facts["read"], facts["kept"], facts["heldout"], len(facts["bad"])) == (122, 120, 4, 1)
    [dropped] = facts["dropped"]
    assert (dropped["id"], dropped["of"]) == ("row-122", "row-1")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_a_failing_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('users must not speak first') }}")


def with_a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for message in messages %}")


TARGETS = {without_tokenizer: "has no tokenizer", without_a_shard: "lacks 1 of the 2 shards",
           with_a_failing_template: "users must not speak first", with_a_broken_template: "chat template of"}


@pytest.mark.parametrize("spoil", TARGETS)
def test_bad_targets(home: Home, tiny_target: Target, capfd: pytest.CaptureFixture[str],
                     spoil: Callable[[Path], None]) -> None:
    folder = home.folder / "target"
    shutil.copytree(tiny_target.folder, folder)
    spoil(folder)
    result = quick(home, capfd, *ALONE, "target=folder", "target.name=mine", f"target.source.path={folder}",
                   "target.mask_token='<|mask|>'", "target.tap_layers=[1,2]", "target.max_length=2048")
    assert TARGETS[spoil] in told(*result) and str(folder) in result[2]
    assert not list(home.root.glob("responses/*/responses.jsonl"))


def test_no_work_for_a_server_that_cannot_start(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = told(*quick(home, capfd, *SMOKE, "engine.python=/nonexistent/python"))
    assert "engine.python=/nonexistent/python does not run" in line
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = told(*quick(home, capfd, *SMOKE, f"engine.python={vllm_python()}",
                           f"engine.runtime.port={port}"))
    assert f"engine.runtime.port={port} cannot be used" in line
    assert not home.root.exists()


SETTINGS = {
    "evaluate.k.1": ("evaluate.k=[3,9]",
                     "must lie between 1 and 3, the longest draft with drafter.block_size=4, but is 9"),
    "export.default_k": ("export.default_k=4", "must lie between 1 and 3, the longest draft with drafter."),
    "evaluate.format": ("export.formats=[speculators] evaluate.format=native",
                        "must be one of export.formats (speculators), but is native"),
    "prompts.heldout": ("prompts.heldout=0",
                        "must be at least 1, since evaluate measures on held-out prompts, but is 0"),
    "drafter.start_layers": ("drafter.start_layers=[0,1]", "must name one target layer for each of the 1"),
    "drafter.tap_layers": ("drafter.tap_layers=[0,2]",
                           "must be among hidden_states.tap_layers [1, 2], but [0] is not"),
    "hidden_states.last_rows": ("hidden_states.last_rows=none drafter.objective.terms=[{_target_:"
                                "trainer.architectures.losses.ForwardKL}]", "must be supervised or all"),
}


def test_settings_that_do_not_go_together(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """All are told at once, by the key that holds the value, whether it is a check or a run."""
    for flags in (["--check"], []):
        given = " ".join(setting for setting, _ in SETTINGS.values()).split()
        status, out, err = quick(home, capfd, *ALONE, *flags, *given)
        found = {line.split()[1]: line for line in err.splitlines()}
        assert status == 2 and not out and found.keys() == SETTINGS.keys(), err
        for key, line in found.items():
            assert line.startswith(f"error: {key} (command line): {SETTINGS[key][1]}"), line
    assert not home.root.exists()


def test_what_a_target_of_one_s_own_needs_is_told_at_once(home: Home,
                                                          capfd: pytest.CaptureFixture[str]) -> None:
    status, _, err = quick(home, capfd, *ALONE, "--check", "target=folder")
    needed = ("target.tap_layers", "target.name", "target.source.path", "target.mask_token")
    assert status == 2 and err.splitlines() == [
        f"error: {key} (conf/target/folder.yaml): has no value yet and needs one; set it in a recipe or as "
        f"{key}=..." for key in needed]


def test_a_drafter_without_an_argument(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    line = told(*quick(home, capfd, *ALONE, "~drafter.layers"))
    assert line == ("error: drafter.layers (command line): is missing; trainer.architectures.dflash.DFlash "
                    "needs it\n")


def test_given_answers_in_a_recipe_that_samples(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    path = home.folder / "prompts.jsonl"
    rows = [{"turns": [f"{number}?"], "answers": ["yes"]} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["prompts=jsonl", f"prompts.source.path={path}", "prompts.heldout=1", "responses=as_given"]
    status, out, err = quick(home, capfd, *ALONE, "--check", *given)
    assert status == 0 and out.endswith("the settings are right, and all that they need is here\n")
    assert err == (
        "note: recipes/smoke.yaml sets responses.sampling for responses=regenerate, which responses=as_given "
        "cannot take and does without\n")


GEMMA4 = "drafter=gemma4_assistant export.formats=[native] evaluate.format=native"
CHECKED = {  # what is set, and a part of what is told
    "prompts without answers": ("responses=as_given", "prompts bring no answer that is not empty"),
    "a draft vocabulary too small": ("drafter.draft_vocab_size=2", "=2 must lie between 3, as 2 special"),
    "a draft vocabulary too large": ("drafter.draft_vocab_size=999", "draft_vocab_size=999 must lie between"),
    "a kind of slice": ("+train.acceptance.weights.categry.code=1", "train.acceptance.weights.categry "
                        "(command line): is no kind of slice; nearest: category"),
    "a slice that no prompt is of": (
        "+train.acceptance.weights.category.cod=1", "weighs the category 'cod', but no held-out answer is of "
        "it; nearest: code (there: chat, code, "),
    "weights of nothing measured": ("+train.acceptance.weights.turn.first=1 train.acceptance.every=null",
                                    "train.acceptance.every is null"),
    "attention that cannot train here": ("drafter.attention=flex", "drafter.attention=flex has no backward"),
    "too long for the target": ("target.max_length=9999", "target.max_length=9999 is more than the 2048"),
    "an optimizer's setting": ("+optimizer.capturable=true", "mend optimizer.capturable"),
    "a mask token with a meaning": ("target.mask_token=65", "is an ordinary token of texts"),
    "a prompt without room": ("target.max_length=20", "which leaves no room for an answer within"),
    "layers beyond the target's": ("target.tap_layers=[1,7]", "target.tap_layers [1, 7] must lie between"),
    "a draft longer than any text": ("drafter.block_size=2000", "of fewer than 1024 tokens, which a row of "
                                     "train.tokens=1024 and a text of target.max_length=1024"),
    "a bias of more ranks than rows": ("drafter=dspark drafter.markov_rank=301",
                                       "drafter.markov_rank=301 must be at most the 300 rows"),
    "groups that do not divide": ("drafter=dflash2 export.default_k=3 drafter.conv_group_size=7",
                                  "must divide the hidden"),
    "a convolution longer than a block": ("drafter=dflash2 export.default_k=3 drafter.conv_kernel_size=9",
                                          "conv_kernel_size (command line): must be at most block_size=4"),
    "a start for a drafter that knows none": (
        "drafter=mtp drafter.start_from=x", "error: drafter.start_from (command line): unknown key; it "
        "belongs to drafter=dflash, dflash2, dspark, eagle3, gemma4_assistant, and not to drafter=mtp\n"),
    "a module in a recipe for other drafters": (
        "drafter=mtp", "error: export.formats (conf/export/vllm.yaml): must be among stitched, changes, the "
        "formats of this drafter, but has speculators, native; an MTP module lives inside its target, which "
        "must bring one, or be a Llama or a Qwen2 that gets a new one: take recipe=mtp_smollm2, or set "),
    "a single drafted token": ("drafter=eagle3 drafter.steps=1", "export.default_k (recipes/smoke.yaml): "
                               "must be 1, the only draft with drafter.steps=1, but is 2"),
    "more candidates than tokens": ("drafter=dflash2 export.default_k=3 drafter.selector_top_k=999",
                                    "must be at most"),
    "a choice without a choice": ("drafter=dflash2 export.default_k=3 drafter.selector_top_k=1",
                                  "drafter.selector_top_k (command line): must be"),
    "a choice that nothing teaches": ("drafter=dflash2 export.default_k=3 drafter.selector_weight=0",
                                      "drafter.selector_weight (command line): must be"),
    "a start of another width": ("drafter.start_layers=[1] drafter.intermediate_size=96",
                                 "must be null or 128 beside start_layers, as the target's MLPs are of that "
                                 "width and no other could begin with them, but is 96"),
    "keys and values from a folder": (f"{GEMMA4} target=tiny_gemma4", "must be in_process, since the drafter "
                                      "reads the last state of every token, the keys and values of full"),
    "keys and values from a server": (f"{GEMMA4} target=tiny_gemma4 hidden_states=online target_engine=vllm",
                                      "which the target gives in this process alone: no folder"),
    "keys and values of a Llama": (f"{GEMMA4} hidden_states=in_process", "the target's model_type is llama"),
    "a format that no server reads": ("drafter=gemma4_assistant target=tiny_gemma4 hidden_states=in_process",
                                      "export.formats (conf/export/vllm.yaml): must be among native, the "),
}


@pytest.mark.parametrize("case", CHECKED)
def test_what_check_finds_without_a_run(home: Home, capfd: pytest.CaptureFixture[str], case: str) -> None:
    given, expected = CHECKED[case]
    status, out, err = quick(home, capfd, *ALONE, "--check", *given.split())
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert status == 2 and lines and all(line.startswith("error: ") for line in lines), err
    assert expected in err and "right" not in out and not home.root.exists(), err


def test_check_shows_what_would_run_without_a_target(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Whose files are not here: what depends on them has no folder yet, and is named all the same."""
    absent = ["target=folder", "target.name=absent", "target.source.path=/absent", "target.mask_token=x",
              "target.tap_layers=[1,2]", "drafter.draft_vocab_size=null"]
    status, out, err = quick(home, capfd, *ALONE, "--check", *absent, "run=[prompts,responses,train,export]")
    first, prompts, *others = out.splitlines()
    assert status == 2 and "/absent" in err and first == "recipe smoke"
    assert prompts.split()[:2] == ["prompts", "run"] and str(home.root / "prompts") in prompts
    unnamed = "in a folder that is named by what is not here"
    assert others == [f"  responses      run       {unnamed}", f"  hidden_states  not in run=  {unnamed}",
                      f"  train          run       {unnamed}", f"  export         run       {unnamed}",
                      "note: train.steps=250 says how long training is; train.epochs=6 does nothing"]
    assert not home.root.exists()


def test_what_is_right_and_not_what_one_may_expect_is_remarked(home: Home,
                                                               capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = quick(home, capfd, *ALONE, "--check", "evaluate.prompts=500", "train.epochs=3")
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert status == 0 and not err and notes == [
        "note: train.steps=250 says how long training is; train.epochs=3 does nothing",
        "note: evaluate.prompts=500 is more than prompts.heldout=16; all that are held out are asked"]
    _, out, _ = quick(home, capfd, *ALONE, "--check", "train.steps=null", "evaluate.prompts=16")
    assert "note: " not in out


def test_a_root_that_nobody_can_write(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    home.root = Path("/proc")
    for flags in (["--check"], []):
        assert "run_root=/proc cannot be written" in told(*quick(home, capfd, *ALONE, *flags))


def test_check_tells_all_that_is_not_there(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Files, servers, what the target lacks: at once, also where no fingerprint can be had of a file."""
    missing = ["hidden_states.path=nowhere", "engine.python=/no/python", "target.mask_token=none"]
    told_of = ["hidden_states.path=nowhere", "target.mask_token", "engine.python=/no/python"]
    for first in (["prompts.source.path"], []):
        more = ["prompts=jsonl", "prompts.source.path=none.jsonl"] if first else []
        status, _, err = quick(home, capfd, *SMOKE, "--check", *missing, *more)
        assert status == 2 and [line.split()[1] for line in err.splitlines()] == first + told_of, err


def test_a_full_disk(home: Home, disk: Path) -> None:
    """What cannot fit is refused before it is begun; what fills the disk all the same loses nothing."""
    remount(disk, "size=500k")
    home.root = disk / "runs"
    settings = [*ALONE, *COMMITS, "prompts.limit=40", "prompts.heldout=8", "train.steps=20",
                "responses.sampling.max_new_tokens=24", "run=[prompts,responses,hidden_states,train]"]
    home.call(*settings, expected=2)
    line = told(2, home.out, home.err)
    assert "samples take" in line and "set hidden_states.storage=float8_e4m3fn" in line
    kept = (home.stage("responses") / "responses.jsonl").read_bytes()
    assert home.parts("hidden_states") == 0
    # room for the states, and none for a checkpoint
    remount(disk, "size=2300k")
    home.call(*settings, expected=2)
    line = told(2, home.out, home.err)
    assert "the disk is full: stage 'train'" in line and str(disk) in line
    remount(disk, "size=50m")
    check_went_on(home.call(*settings), "train")
    assert (home.stage("responses") / "responses.jsonl").read_bytes() == kept
