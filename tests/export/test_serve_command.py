"""The printed line is the published one, flag by flag; nothing of a target is fetched for it."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import get_class
from tiny import make_dflash
from vllm_support import vllm_python

from trainer import pipeline
from trainer.architectures.mtp import Mtp
from trainer.errors import UserError
from trainer.export.serve_command import ServeCommand, ServingFacts
from trainer.target import Folder

PROJECT = Path(__file__).parents[2]
GEMMA = ("--tensor-parallel-size 2 --language-model-only --reasoning-parser gemma4 --enable-auto-tool-choice "
         "--tool-call-parser gemma4 --max-num-batched-tokens 16384 --max-model-len 32768")
TEMPLATE = "--chat-template /app/vllm/examples/tool_chat_template_gemma4.jinja"
TRITON = '"attention_backend":"triton_attn"'
SMALL = ("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B-it")
LARGE = "vllm serve google/gemma-4-31B-it"
EIGHT = "vllm serve Qwen/Qwen3-8B --trust-remote-code --max-model-len 4096 --gpu-memory-utilization 0.85"
TWO = "--tensor-parallel-size 2 --max-num-batched-tokens 32768"
BIG = ("vllm serve Qwen/Qwen3.5-122B-A10B --trust-remote-code --tensor-parallel-size 4 "
       "--max-num-batched-tokens 32768")
DENSE = "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve Qwen/Qwen3.6-27B"
EXPERTS = ("VLLM_ROCM_USE_AITER=1 vllm serve Qwen/Qwen3.6-35B-A3B --trust-remote-code "
           "--tensor-parallel-size 2 --reasoning-parser qwen3 --enable-auto-tool-choice "
           "--tool-call-parser qwen3_xml --mm-encoder-tp-mode data --max-num-batched-tokens 16384")
KIMI = ("VLLM_ROCM_USE_AITER=1 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 vllm serve moonshotai/Kimi-K2.5 "
        "--trust-remote-code --tensor-parallel-size 4 --language-model-only --reasoning-parser kimi_k2 "
        "--enable-auto-tool-choice --tool-call-parser kimi_k2")
MINIMAX = ("VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1 "
           "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 VLLM_USE_BREAKABLE_CUDAGRAPH=0 "
           "VLLM_ROCM_USE_AITER_MOE=1 vllm serve MiniMaxAI/MiniMax-M3-MXFP8 --tensor-parallel-size 8 "
           "--block-size 128 --attention_config.indexer_kv_dtype fp8 --linear-backend emulation "
           "--attention-backend TRITON_ATTN --language-model-only --reasoning-parser minimax_m3 "
           "--enable-auto-tool-choice --tool-call-parser minimax_m3")


def drafted(*words: str) -> str:
    """`words` of a line and, the last one, what is in the braces of its --speculative-config."""
    return " ".join([*words[:-1], "--speculative-config", f"'{{{words[-1]}}}'"])


ROCM = {  # as published, by target and method
    ("gemma4_26b_a4b", "none"): f"{SMALL[0]} --trust-remote-code {GEMMA} {TEMPLATE}",
    ("gemma4_26b_a4b", "mtp"): drafted(
        SMALL[0], GEMMA, TEMPLATE, f'"model":"{SMALL[1]}-assistant","num_speculative_tokens":4'),
    ("gemma4_26b_a4b", "eagle3"): drafted(
        SMALL[0], "--trust-remote-code", GEMMA, TEMPLATE, "--gpu-memory-utilization 0.8",
        '"model":"RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3","num_speculative_tokens":1,'
        '"method":"eagle3"'),
    ("gemma4_26b_a4b", "dflash"): drafted(
        SMALL[0], "--trust-remote-code", GEMMA, TEMPLATE, "--gpu-memory-utilization 0.8",
        "--attention-backend triton_attn",
        '"method":"dflash","model":"z-lab/gemma-4-26B-A4B-it-DFlash","num_speculative_tokens":15,' + TRITON),
    ("gemma4_31b", "none"): f"{LARGE} --trust-remote-code {GEMMA} {TEMPLATE}",
    ("gemma4_31b", "mtp"): drafted(LARGE, "--trust-remote-code", GEMMA, TEMPLATE,
                                   '"model":"google/gemma-4-31B-it-assistant","num_speculative_tokens":1'),
    ("gemma4_31b", "eagle3"): drafted(
        LARGE, "--trust-remote-code", GEMMA,
        '"model":"RedHatAI/gemma-4-31B-it-speculator.eagle3","num_speculative_tokens":3,"method":"eagle3"'),
    ("gemma4_31b", "dflash"): drafted(
        LARGE, "--trust-remote-code", GEMMA, "--attention-backend triton_attn",
        "--gpu-memory-utilization 0.85",
        '"method":"dflash","model":"z-lab/gemma-4-31B-it-DFlash","num_speculative_tokens":15,' + TRITON),
    ("gemma4_31b", "dspark"): drafted(
        LARGE, "--trust-remote-code", GEMMA, "--attention-backend triton_attn",
        "--gpu-memory-utilization 0.85",
        '"model":"RedHatAI/gemma-4-31B-it-speculator.dspark","num_speculative_tokens":7,"method":"dspark",'
        + TRITON),
    ("qwen3_8b", "none"): EIGHT,
    ("qwen3_8b", "eagle3"): drafted(
        EIGHT, '"model":"RedHatAI/Qwen3-8B-Thinking-speculator.eagle3","num_speculative_tokens":5,'
               '"method":"eagle3"'),
    ("qwen3_8b", "dflash"): drafted(
        EIGHT, "--max-num-batched-tokens 16384",
        '"model":"z-lab/Qwen3-8B-DFlash-b16","method":"dflash","num_speculative_tokens":7'),
    ("qwen3_8b", "dspark"): drafted(
        EIGHT, "--max-num-batched-tokens 16384",
        '"model":"deepseek-ai/dspark_qwen3_8b_block7","method":"dspark","num_speculative_tokens":11'),
    ("qwen3_5_27b", "none"): f"vllm serve Qwen/Qwen3.5-27B --trust-remote-code {TWO}",
    ("qwen3_5_27b", "mtp"): drafted("vllm serve Qwen/Qwen3.5-27B --trust-remote-code", TWO,
                                    '"method":"mtp","num_speculative_tokens":1'),
    ("qwen3_5_27b", "dflash"): drafted(
        "vllm serve Qwen/Qwen3.5-27B --trust-remote-code", TWO,
        '"method":"dflash","model":"z-lab/Qwen3.5-27B-DFlash","num_speculative_tokens":15'),
    ("qwen3_5_122b_a10b", "none"): BIG,
    ("qwen3_5_122b_a10b", "mtp"): drafted(BIG, '"method":"mtp","num_speculative_tokens":7'),
    ("qwen3_5_122b_a10b", "dflash"): drafted(
        BIG, '"method":"dflash","model":"z-lab/Qwen3.5-122B-A10B-DFlash","num_speculative_tokens":15'),
    ("qwen3_6_27b", "none"): f"{DENSE} --trust-remote-code {TWO}",
    ("qwen3_6_27b", "mtp"): drafted(DENSE, "--trust-remote-code", TWO,
                                    '"method":"mtp","num_speculative_tokens":3'),
    ("qwen3_6_27b", "dflash"): drafted(
        DENSE, TWO, '"method":"dflash","model":"z-lab/Qwen3.6-27B-DFlash","num_speculative_tokens":15'),
    ("qwen3_6_35b_a3b", "none"): EXPERTS,
    ("qwen3_6_35b_a3b", "mtp"): drafted(
        EXPERTS, '"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"'),
    ("qwen3_6_35b_a3b", "dflash"): drafted(
        EXPERTS, '"method":"dflash","model":"z-lab/Qwen3.6-35B-A3B-DFlash","num_speculative_tokens":15'),
    ("kimi_k2_5", "none"): KIMI,
    ("kimi_k2_5", "eagle3"): drafted(
        KIMI, '"model":"lightseekorg/kimi-k2.5-eagle3-mla","method":"eagle3","num_speculative_tokens":3'),
    ("kimi_k2_5", "dflash"): drafted(
        KIMI, '"model":"z-lab/Kimi-K2.5-DFlash","method":"dflash","num_speculative_tokens":7'),
    ("minimax_m3", "none"): MINIMAX,
    ("minimax_m3", "eagle3"): drafted(
        MINIMAX, '"method":"eagle3","model":"Inferact/MiniMax-M3-EAGLE3","num_speculative_tokens":3,'
                 '"attention_backend":"TRITON_ATTN"'),
}
ONE = "vllm serve Qwen/Qwen3.8-27B --tensor-parallel-size 1"
CUDA = {  # devices, drafters and K as measured on H200; that of Gemma is ROCm's without what is its own
    ("qwen3_6_35b_a3b", "mtp"): drafted(
        EXPERTS.removeprefix("VLLM_ROCM_USE_AITER=1 ").replace("size 2", "size 1"),
        '"method":"mtp","num_speculative_tokens":2'),
    ("gemma4_31b", "dflash"): drafted(
        LARGE, "--trust-remote-code", GEMMA, "--gpu-memory-utilization 0.85",
        '"method":"dflash","model":"z-lab/gemma-4-31B-it-DFlash","num_speculative_tokens":15'),
    ("qwen3_8_27b", "none"): ONE,
    ("qwen3_8_27b", "mtp"): drafted(ONE, '"method":"mtp","num_speculative_tokens":2'),
    ("qwen3_8_27b", "dflash"): drafted(
        ONE, '"method":"dflash","model":"incoai/Qwen3.8-27B-DFlash2","num_speculative_tokens":7'),
    ("qwen3_8_27b", "dspark"): drafted(
        ONE, '"method":"dspark","model":"RadixArk/Qwen3.8-27B-DSpark","num_speculative_tokens":7'),
    ("qwen3_8_27b", "ngram"): drafted(ONE, '"method":"ngram","num_speculative_tokens":3'),
    ("glm_5_3_flash", "mtp"): drafted("vllm serve zai-org/GLM-5.3-Flash --tensor-parallel-size 4",
                                      '"method":"mtp","num_speculative_tokens":3'),
}
NO_K = ("gpt_oss_120b", "eagle3")


def node(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((PROJECT / f"conf/{group}/{name}.yaml").read_text())


def stage(name: str, **changes: Any) -> ServeCommand:
    """The stage for a target and its serving facts, as conf/ has them."""
    target = pipeline.build(node("target", "qwen3_8b" if name == "plain" else name))
    made = {key: value for key, value in node("serve_command", "default").items()
            if key not in ("_target_", "serving", "target", "drafter")}
    return ServeCommand(**{**made, "serving": pipeline.build(node("serving", name)), "target": target,
                           "drafter": make_dflash(block_size=8), **changes})


def line(made: ServeCommand, out: Path, **inputs: Path) -> str:
    assert made.check({}) == {} and set(inputs) == set(made.after)
    out.mkdir(exist_ok=True)
    made.run(inputs, out)
    return json.loads((out / "serve_command.json").read_text())["command"]


def parts(text: str) -> dict[str, Any]:
    """Environment, model, flags and draft of a line."""
    words = shlex.split(text)
    start = words.index("vllm")
    found: dict[str, Any] = {"variables": sorted(words[:start]), "model": words[start + 2]}
    rest, flags = words[start + 3:], {}
    while rest:
        flag, value = rest.pop(0), rest.pop(0) if rest and not rest[0].startswith("--") else None
        assert flag.startswith("--") and flag not in flags, text
        flags[flag] = json.loads(str(value)) if flag == "--speculative-config" else value
    return {**found, "flags": flags}


@pytest.mark.parametrize(("platform", "name", "method", "expected"), [
    (platform, *key, text) for platform, lines in (("rocm", ROCM), ("cuda", CUDA))
    for key, text in lines.items()])
def test_the_line_is_the_published_one(platform: str, name: str, method: str, expected: str,
                                       tmp_path: Path) -> None:
    """But for the method, which is always said: two published lines leave it to vLLM to find out."""
    found, published = line(stage(name, method=method, platform=platform), tmp_path), parts(expected)
    if (draft := published["flags"].get("--speculative-config")) is not None:
        assert draft.setdefault("method", method) == method
    assert parts(found) == published and "\n" not in found


def test_every_published_pair_has_a_recipe_and_every_recipe_its_serving_facts() -> None:
    found = set()
    for path in sorted((PROJECT / "recipes").glob("*.yaml")):
        chosen = {key: value for entry in yaml.safe_load(path.read_text())["defaults"]
                  if isinstance(entry, dict) for key, value in entry.items()}
        target = chosen.get("override /target")
        if (PROJECT / f"conf/serving/{target}.yaml").exists():
            assert chosen["override /serving"] == target, path
            drafter = node("drafter", chosen["override /drafter"])
            found.add((target, get_class(drafter["_target_"]).method))
    assert found == {pair for pair in {*ROCM, *CUDA, NO_K} if pair[1] not in ("none", "ngram")}
    facts = {path.stem: node("serving", path.stem) for path in (PROJECT / "conf/serving").glob("*.yaml")}
    assert {(name, method) for name, each in facts.items() for method in each["methods"]} - {
        ("qwen3_8_27b", "ngram")} == found
    assert all(each["serves"] == node("target", name)["name"] for name, each in facts.items()
               if name != "plain")


def test_a_line_for_cuda_has_nothing_of_rocm_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, method in ROCM:
        made = stage(name, method=method, platform="cuda")
        found = line(made, tmp_path)
        assert not any(word in found.lower() for word in ("rocm", "triton", "aiter", "emulation")), found
        made.tell(tmp_path)
        note, told = capsys.readouterr().out.splitlines()
        assert told == found and note.startswith("note: published for rocm; ")
    stage(name, method=method).tell(tmp_path)
    assert capsys.readouterr().out.splitlines() == [found]


def test_a_published_drafter_and_k_may_be_others(tmp_path: Path) -> None:
    found = parts(line(stage("gemma4_31b", speculator="/a b/mine", k=3, arguments=["--seed", 1]), tmp_path))
    assert found["flags"]["--speculative-config"] == {
        "method": "dflash", "model": "/a b/mine", "num_speculative_tokens": 3,
        "attention_backend": "triton_attn"}
    assert found["flags"]["--seed"] == "1" and found["flags"]["--attention-backend"] == "triton_attn"
    found = parts(line(stage("plain", speculator="org/mine", k=4), tmp_path))
    assert found == {"variables": [], "model": "Qwen/Qwen3-8B", "flags": {"--speculative-config": {
        "method": "dflash", "model": "org/mine", "num_speculative_tokens": 4}}}


@pytest.mark.parametrize(("form", "model", "drafter"), [("native", "Qwen/Qwen3.5-27B", "{}/native"),
                                                        ("stitched", "{}/stitched", None)])
def test_our_drafter_takes_the_published_one_s_place(form: str, model: str, drafter: str | None,
                                                     tmp_path: Path) -> None:
    """`changes` come first and are no folder to serve."""
    method = "mtp" if form == "stitched" else "dflash"
    exported = tmp_path / "export"
    exported.mkdir()
    (exported / "export.json").write_text(json.dumps({
        "method": method, "formats": ["changes", form], "default_k": 2, "target": "Qwen/Qwen3.5-27B"}))
    made = stage("qwen3_5_27b", speculator="trained")
    made = replace(made, drafter=partial(Mtp, steps=3)) if method == "mtp" else made
    assert made.after == ("export",)
    found = parts(line(made, tmp_path / "out", export=exported))
    assert found["model"] == model.format(exported) and found["flags"]["--tensor-parallel-size"] == "2"
    expected = {"method": method, "num_speculative_tokens": 2}
    assert found["flags"]["--speculative-config"] == (
        expected | {"model": drafter.format(exported)} if drafter else expected)
    assert made.check({}) == {} and replace(made, method="none").after == ()
    assert "must lie between 1 and" in replace(made, k=30).check({})["serve_command.k"]
    (exported / "export.json").write_text(json.dumps({"formats": ["changes"]}))
    with pytest.raises(UserError, match="changes to the target alone.*put stitched among export.formats"):
        made.run({"export": exported}, tmp_path / "out")


@pytest.mark.parametrize(("k", "expected"), [
    (None, {"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 16, 2]]}),
    (3, {"num_speculative_tokens": 3})])
def test_a_tuned_drafter_drafts_by_its_schedule_unless_told_otherwise(k: int | None, expected: dict[str, Any],
                                                                      tmp_path: Path) -> None:
    exported = tmp_path / "export"
    exported.mkdir()
    (exported / "export.json").write_text(json.dumps({
        "method": "dflash", "formats": ["native"], "default_k": 2, "max_k": 5, "target": "Qwen/Qwen3.5-27B",
        "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 16, 2]]}))
    made = stage("qwen3_5_27b", speculator="trained", k=k)
    found = parts(line(made, tmp_path / "out", export=exported))["flags"]["--speculative-config"]
    assert found == {"method": "dflash", "model": f"{exported}/native", **expected}


def test_a_draft_length_that_no_server_takes_is_said(tmp_path: Path) -> None:
    """What the target's config.json decides stands in the exported folder; the target is not looked at."""
    facts = {"method": "mtp", "formats": ["stitched"], "default_k": 2, "max_k": 4, "possible_k": [1, 2, 4],
             "target": "Qwen/Qwen3.5-27B"}
    (tmp_path / "export.json").write_text(json.dumps(facts))
    made = replace(stage("qwen3_5_27b", speculator="trained", k=3), drafter=partial(Mtp, steps=4))
    assert made.check({}) == {}
    with pytest.raises(UserError, match="serve_command.k=3 is a draft length that no server takes of the "
                                        "drafter in .*; set it to one of 1, 2, 4"):
        made.run({"export": tmp_path}, tmp_path)
    replace(made, k=4).run({"export": tmp_path}, tmp_path)


def test_a_folder_of_ours_says_how_long_its_drafts_are(tmp_path: Path) -> None:
    facts = {"method": "dflash", "max_k": 5, "possible_k": [1, 2, 3, 4, 5], "default_k": 2}
    (tmp_path / "speculator.json").write_text(json.dumps(facts))
    made = stage("qwen3_5_27b", speculator=str(tmp_path))
    drafted = [parts(line(replace(made, k=k), tmp_path / "out"))["flags"]["--speculative-config"]
               for k in (None, 5)]
    assert drafted == [{"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": k}
                       for k in (2, 5)]
    with pytest.raises(UserError, match=f"k=6 is a draft length that no server takes of the drafter in "
                                        f"{tmp_path}; set it to one of 1, 2, 3, 4, 5"):
        replace(made, k=6).run({}, tmp_path)


@pytest.mark.parametrize("lengths", [{"default_k": 2, "max_k": 3, "formats": ["stitched", "changes"]}, None])
def test_a_target_with_its_drafter_inside_is_the_model(lengths: dict[str, Any] | None,
                                                       tmp_path: Path) -> None:
    """As exported, and as made by tools/apply_mtp.py, which says nothing of lengths."""
    if lengths:
        (tmp_path / "speculator.json").write_text(json.dumps({"method": "mtp", **lengths}))
    made = stage("qwen3_5_27b", speculator=str(tmp_path), method="mtp", k=None if lengths else 2)
    made = replace(made, drafter=partial(Mtp, steps=3))
    (tmp_path / "mtp.json").write_text("{}")
    found = parts(line(made, tmp_path / "out"))
    assert found["model"] == str(tmp_path)
    assert found["flags"]["--speculative-config"] == {"method": "mtp", "num_speculative_tokens": 2}
    (tmp_path / "mtp.json").unlink()
    if lengths:
        with pytest.raises(UserError, match="the changes to the target alone.*with tools/apply_mtp"):
            made.run({}, tmp_path)


def test_a_draft_longer_than_the_published_one_is_remarked(tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    for k, remarked in ((16, True), (15, False), (None, False)):
        made = stage("qwen3_5_27b", k=k)
        found = line(made, tmp_path)
        made.tell(tmp_path)
        *notes, told = capsys.readouterr().out.splitlines()
        assert told == found and bool(notes) is remarked
        assert all(note.startswith("note: published with 15 drafted tokens, and serve_command.k=16 is more")
                   for note in notes)


def test_a_target_that_is_a_folder_is_served_from_there(tiny_target: Any, tmp_path: Path) -> None:
    made = stage("plain", method="none", target=tiny_target)
    assert line(made, tmp_path) == f"vllm serve {tiny_target.folder}"
    assert Folder("/a").served == "/a"


@pytest.mark.parametrize(("name", "changes", "key", "told"), [
    ("qwen3_5_27b", {"method": "eagle3"}, "serve_command.method",
     "must be one of auto, none, mtp, dflash, the methods published for Qwen/Qwen3.5-27B, but is eagle3"),
    ("kimi_k2_5", {"drafter": partial(Mtp, steps=3)}, "serve_command.speculator",
     "must be trained, or a drafter's folder or name on the Hub, as no mtp drafter is published for "
     "moonshotai/Kimi-K2.5 (published: eagle3, dflash), but is published"),
    ("plain", {}, "serve_command.speculator",
     "must be trained, or a drafter's folder or name on the Hub, as no dflash drafter is published for "
     "Qwen/Qwen3-8B (published: none), but is published"),
    ("qwen3_5_27b", {"speculator": "trained", "method": "mtp"}, "serve_command.method",
     "must be auto for the trained drafter, but is mtp"),
])
def test_an_unknown_combination_is_one_sentence(name: str, changes: dict[str, Any], key: str,
                                                told: str) -> None:
    assert stage(name, **changes).check({}) == {key: told}


def test_facts_of_another_target_are_not_used() -> None:
    made = stage("qwen3_8b", serving=pipeline.build(node("serving", "kimi_k2_5")))
    assert made.check({}) == {"serving": "holds the facts of moonshotai/Kimi-K2.5, but the target is "
                                         "Qwen/Qwen3-8B; set serving= to the option of that target, or "
                                         "serving=plain"}


def test_a_k_that_nobody_published_is_asked_for(tmp_path: Path) -> None:
    made = stage(NO_K[0], method=NO_K[1])
    with pytest.raises(UserError, match="no draft length is published for nvidia/gpt-oss-120b-Eagle3-v3; set "
                                        "serve_command.k"):
        made.run({}, tmp_path)
    assert '"num_speculative_tokens": 5' in line(replace(made, k=5), tmp_path)


@pytest.mark.parametrize(("changes", "told"), [
    ({"rocm": {"flag": {}}}, "serving.rocm has flag, which nothing reads; it takes flags, variables, draft"),
    ({"methods": {"mtp": {"cuda": {"k": 1}}}}, "serving.methods.mtp.cuda has k, which nothing reads"),
    ({"methods": {"mtp": {"drafts": {}}}}, "serving.methods.mtp has drafts, .* draft, rocm, cuda"),
])
def test_a_typo_in_the_facts_is_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        ServingFacts(**{**{key: value for key, value in node("serving", "plain").items() if key[0] != "_"},
                        **changes})


ASK = """
import dataclasses, json, sys
from vllm.config import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
known = {each.name for each in dataclasses.fields(SpeculativeConfig)}
for words in json.load(sys.stdin):
    found = parser.parse_args(words)
    assert set(found.speculative_config or {}) <= known, words
    assert words[0] in (found.model, found.model_tag), words
"""


@pytest.mark.vllm
def test_vllm_knows_every_flag_of_every_line(tmp_path: Path) -> None:
    lines = [shlex.split(line(stage(name, method=method, platform=platform), tmp_path))
             for name, method in {**ROCM, **CUDA} for platform in ("rocm", "cuda")]
    asked = [words[words.index("serve") + 1:] for words in lines]
    done = subprocess.run([vllm_python(), "-c", ASK], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
