"""Stage `sweep` on joined servers, which are small HTTP servers with vLLM's counters: cells, rows, refusals.
The same on real vLLM servers that it starts: tests/vllm/test_sweep_served.py."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import copied, make_dflash, make_small, write_responses
from vllm_support import small_server

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from peer import Peer, until

from trainer.data.chat import Chat
from trainer.data.prompts import Builtin, Jsonl, Prompts
from trainer.errors import UserError
from trainer.evaluate.finished_stages import ROW_FIELDS
from trainer.evaluate.questions import asked
from trainer.evaluate.sweep import Sweep
from trainer.evaluate.sweep_cells import Cells
from trainer.evaluate.traffic import tune
from trainer.records import Prompt, Sample
from trainer.target import Target

LONG = "x" * 80  # the peers answer with as many tokens as they are asked with
ROWS = [{"id": f"{kind}{number}", "turns": [f"{kind} {number}? {LONG}"], "category": kind, "split": "heldout"}
        for number in range(3) for kind in ("chat", "math", "art")] + [{"turns": ["train"], "split": "train"}]


class Counting(Peer):
    """Counts as vLLM does: four drafts a request, of which one is lost at every position; `k` 0: none."""

    def __init__(self, folder: Path, k: int) -> None:
        super().__init__(folder, max_model_len=512)
        self.k, self.others, self.counts = k, 0, True
        self.metrics = self.told
        self.act = lambda number, body: time.sleep(0.02)  # so that users meet

    def told(self) -> str:
        requests, lines = len(self.seen), []
        if self.counts:
            lines = [f'vllm:num_requests_running{{engine="0"}} {self.now + self.others}.0',
                     'vllm:num_requests_waiting{engine="0"} 0.0']
        by_position = [(3 - place) * requests for place in range(self.k)]
        for name, value in (("drafts", 4 * requests), ("draft_tokens", 4 * requests * self.k),
                            ("accepted_tokens", sum(by_position))) if self.k else ():
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0')
        lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} '
                  f"{value}.0" for place, value in enumerate(by_position)]
        return "\n".join([*lines, ""])


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counting]]:
    """Plain, K = 1 and K = 2; nobody waits for others."""
    monkeypatch.setattr("trainer.evaluate.serving.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("trainer.engines.vllm_client.IDLE_SECONDS", 0.0)
    with ExitStack() as stack:
        yield [stack.enter_context(Counting(tmp_path, k)) for k in (0, 1, 2)]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("prompts", "export", "out"):
        (tmp_path / name).mkdir()
    Prompts(Jsonl(str(source)), None, 9, 0.0, None, None, None).run({}, tmp_path / "prompts")
    (tmp_path / "export/export.json").write_text(json.dumps({"method": "dflash", "max_k": 4, "target": "t"}))
    return {"prompts": tmp_path / "prompts", "export": tmp_path / "export"}


def stage(target: Target, peers: list[Counting] | tuple[()] = (), **changes: Any) -> Sweep:
    return Sweep(**{"target": target, "drafter": make_dflash(), "server": small_server(max_model_len=512),
                    "urls": [peer.url for peer in peers], "dtype": "float32", "format": "speculators",
                    "k": [1, 2], "also": [], "users": [1, 2], "temperatures": [0.0], "files": [],
                    "categories": ["chat", "math", "document"], "prompts": 3, "max_new_tokens": 64,
                    "top_p": 1.0, "seed": 0, "too_long": "error", "warmup": 1, "repeats": 3,
                    "together": True, **changes})


def run(sweep: Sweep, inputs: dict[str, Path]) -> list[dict[str, Any]]:
    sweep.run(inputs, inputs["prompts"].parent / "out")
    return json.loads((inputs["prompts"].parent / "out/rows.json").read_text())


def test_a_row_for_every_length_and_class(tiny_target: Target, peers: list[Counting],
                                          inputs: dict[str, Path]) -> None:
    """Which the tuner takes as they are."""
    rows = run(stage(tiny_target, peers, categories=["document", "chat"]), inputs)
    assert [(row["num_speculative_tokens"], row["users"], row["dataset"]) for row in rows] == [
        (k, users, "chat") for k in (1, 2) for users in (1, 2)]
    for row in rows:
        k = row["num_speculative_tokens"]
        assert set(ROW_FIELDS) < set(row) and row["method"] == "dflash" and row["model"] == "tiny"
        assert row["per_position_acceptance"] == [0.75, 0.5][:k]
        assert row["mean_accepted_length"] == 1 + sum(row["per_position_acceptance"])
        assert row["acceptance_rate"] == pytest.approx(sum(row["per_position_acceptance"]) / k)
        assert (row["prompts"], row["requests"]) == (3, 3 if row["users"] == 1 else 4)
        assert row["drafts"] == 4 * 3 * row["requests"], "neither warm-up nor other cells are counted"
        assert row["output_tokens"] == 3 * row["requests"] * 64
        for speed in ("tok_s", "baseline_tok_s"):
            repeats = sorted(row[f"{speed}_repeats"])
            assert len(repeats) == 3 and row[speed] == repeats[1], "the median"
        assert row["speedup"] == pytest.approx(row["tok_s"] / row["baseline_tok_s"], abs=2e-3)
        assert row["lossless"] is True and row["differing"] == 0 and row["interleaved"]
        assert (row["engine"], row["vllm"], row["attention_backend"]) == ("vllm", "0.32.0", "unknown")
        assert row["ms_per_token"] > 0 and row["dtype"] is None, "a joined server has its own"
    assert [peer.peak for peer in peers] == [2, 2, 2]
    tuning = tune(rows)
    assert tuning["left_out"] == {} and [own["measured_k"] for own in tuning["drafters"][0]["classes"]] == [
        [1, 2]] * 2


def test_no_user_is_idle(tiny_target: Target, peers: list[Counting], inputs: dict[str, Path]) -> None:
    for peer in peers:
        peer.act = lambda number, body, peer=peer: until(lambda: peer.peak == 5)
    [row] = run(stage(tiny_target, peers[:2], k=[1], users=[5], categories=["art"], repeats=1, warmup=0),
                inputs)
    assert (row["prompts"], row["requests"], peers[1].peak) == (3, 5, 5)
    asked_of = Counter(tuple(each["prompt"]) for each in peers[1].seen)
    assert sorted(asked_of.values()) == [1, 2, 2], "as many as there are users, some of them again"


def test_texts_that_differ_are_counted_when_greedy(tiny_target: Target, peers: list[Counting],
                                                   inputs: dict[str, Path],
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """What is sampled differs without a fault, and is drawn anew in every repeat."""
    def spoil(answer: dict[str, Any]) -> None:
        answer["choices"][0]["token_ids"][-1] = 0

    peers[1].change = spoil
    sweep = stage(tiny_target, peers[:2], k=[1], users=[1], categories=["chat"], temperatures=[0.0, 0.7])
    greedy, sampled = run(sweep, inputs)
    assert (greedy["lossless"], greedy["differing"]) == (False, 9)
    assert (sampled["lossless"], sampled["differing"]) == (None, None)
    seeds = [each["seed"] for each in peers[1].seen if each["temperature"]]
    assert len(seeds) == 9 == len({*seeds}), "the servers were warm"
    sweep.tell(inputs["prompts"].parent / "out")
    out = capsys.readouterr().out
    assert "Greedy texts differ with the drafter (chat at 1 user, K=1: 9 of 9 answers)" in out
    assert "chat" in out and "1 user, T=0.7" in out


@pytest.mark.parametrize("together", [True, False])
def test_a_killed_sweep_goes_on_with_the_next_cell(tiny_target: Target, peers: list[Counting],
                                                   inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str],
                                                   together: bool) -> None:
    sweep, out = stage(tiny_target, peers, categories=["chat"], together=together), inputs["prompts"].parent
    add = Cells.add

    def killed(cells: Cells, *given: Any) -> None:
        add(cells, *given)
        if len(cells.cells) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Cells, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            run(sweep, inputs)
    file = out / "out/cells.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    before = [len(peer.seen) for peer in peers]
    capsys.readouterr()
    rows = run(sweep, inputs)
    assert f"sweep: 3 of {4 if together else 6} cells are measured already" in capsys.readouterr().out
    assert len(rows) == 4 and file.read_bytes().startswith(whole), "what was measured is kept"
    assert {row["interleaved"] for row in rows} == {together} and all(row["lossless"] for row in rows)
    asked_again = [len(peer.seen) - seen for peer, seen in zip(peers, before, strict=True)]
    # together: K = 2 with two users, and the warm-up; apart: all that is missing of K = 1, and K = 2
    assert asked_again == ([14, 0, 14] if together else [0, 14, 24])


def test_a_finished_cell_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text('{"dataset": "chat"}\n')
    with pytest.raises(UserError, match=r"cells\.jsonl, line 1: is no cell of a sweep .* remove this line"):
        Cells(tmp_path / "cells.jsonl")


def test_one_prompt_is_measured_and_said_to_tell_little(tiny_target: Target, peers: list[Counting],
                                                        inputs: dict[str, Path]) -> None:
    rows = run(stage(tiny_target, peers[:2], k=[1], users=[1], categories=None, prompts=1, repeats=1), inputs)
    assert [(row["dataset"], row["prompts"], row["speedup"]) for row in rows] == [
        (kind, 1, None) for kind in ("chat", "math", "art")]
    page = (inputs["prompts"].parent / "out/sweep.md").read_text()
    assert "One prompt of art, chat, math was measured: how figures vary from prompt to prompt cannot" in page
    assert "no spread can be told" in page and "3 rows have less than 500 timed tokens" in page


def test_files_are_kinds_of_prompts(tiny_target: Target, peers: list[Counting], inputs: dict[str, Path],
                                    tmp_path: Path) -> None:
    for name in ("gsm8k", "mbpp"):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"id": f"{name}{number}", "turns": [f"{name} {number}"]}) + "\n"
            for number in range(4)))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("gsm8k", "mbpp")]
    sweep = stage(tiny_target, peers[:2], k=[1], users=[1], files=files)
    before = sweep.external()
    assert [(row["dataset"], row["prompts"]) for row in run(sweep, inputs)] == [("gsm8k", 3), ("mbpp", 3)]
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["another"]}\n')
    assert sweep.external() != before, "the content of a file decides the result"
    with pytest.raises(UserError, match=r"sweep\.files .*nowhere\.jsonl cannot be read"):
        stage(tiny_target, files=[str(tmp_path / "nowhere.jsonl")]).external()


def test_what_was_trained_on_is_not_measured(tiny_target: Target, peers: list[Counting],
                                             inputs: dict[str, Path], tmp_path: Path) -> None:
    chat = asked(Chat.of(tiny_target), [Prompt(row["id"], tuple(row["turns"])) for row in ROWS[:9:3]])
    samples = [Sample(each.id, (*each.ids, 5), (False,) * len(each.ids) + (True,)) for each in chat]
    sweep = stage(tiny_target, peers[:2], k=[1], users=[1], categories=["chat"])
    [row] = run(sweep, {**inputs, "responses": write_responses(tmp_path / "some", samples[:1])})
    assert row["prompts"] == 2
    with pytest.raises(UserError, match="all 3 prompts of chat were trained on"):
        sweep.foresee({**inputs, "responses": write_responses(tmp_path / "all", samples)})


def test_no_prompts_of_the_kinds(tiny_target: Target, inputs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"no held-out prompt is of sweep\.categories=\['code'\] \(there: "
                                        r"chat, math, art\); set it to null"):
        stage(tiny_target, categories=["code"]).foresee(inputs)


def test_a_prompt_without_room(tiny_target: Target, inputs: dict[str, Path]) -> None:
    server = small_server(max_model_len=140)
    with pytest.raises(UserError, match=r"prompt of chat chat0 has \d+ tokens, which leaves no room for an "
                                        r"answer of sweep\.max_new_tokens=64 within engine\.max_model_len=140"
                                        r" .*sweep\.too_long=drop"):
        stage(tiny_target, server=server).foresee(inputs)


def test_servers_that_cannot_be_measured(tiny_target: Target, peers: list[Counting]) -> None:
    """Before any stage runs."""
    plain, one, two = peers
    stage(tiny_target, peers).preflight()
    one.others = 2
    with pytest.raises(UserError, match=f"the server at {one.url} has 2 requests of others to answer"):
        stage(tiny_target, peers).preflight()
    one.others, one.counts = 0, False
    with pytest.raises(UserError, match=r"does not count its requests in /metrics .*vLLM 0\.32 or later"):
        stage(tiny_target, peers).preflight()
    one.counts, one.k = True, 0
    with pytest.raises(UserError, match=r"counts no drafts in its /metrics where 1 were expected: .*"
                                        "num_speculative_tokens=1, and without --disable-log-stats"):
        stage(tiny_target, peers).preflight()
    with pytest.raises(UserError, match=f"{two.url} drafts 2 tokens a step where plain decoding was"):
        stage(tiny_target, [two, one, plain]).preflight()


def test_what_was_measured_beside_others_is_not_kept(tiny_target: Target, peers: list[Counting],
                                                     inputs: dict[str, Path]) -> None:
    """They came while a cell was measured, and are still there."""
    def busy(number: int, body: dict[str, Any]) -> None:
        peers[0].others = 1

    peers[1].act = busy
    with pytest.raises(UserError, match="has 1 requests of others to answer"):
        run(stage(tiny_target, peers), inputs)
    assert not (inputs["prompts"].parent / "out/cells.jsonl").exists()


def test_a_server_that_others_begin_to_use_stops_the_sweep(tiny_target: Target, peers: list[Counting],
                                                           inputs: dict[str, Path],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was measured before on the disk."""
    add = Cells.add

    def busy(cells: Cells, *given: Any) -> None:
        add(cells, *given)
        peers[0].others = 1

    monkeypatch.setattr(Cells, "add", busy)
    with pytest.raises(UserError, match="has 1 requests of others to answer"):
        run(stage(tiny_target, peers), inputs)
    assert len(Cells(inputs["prompts"].parent / "out/cells.jsonl").cells) == 1


def judged(sweep: Sweep, heldout: int = 9) -> dict[str, str]:
    return sweep.check({"prompts": Prompts(Builtin(), None, heldout, 0.0, None, None, None),
                        "export": SimpleNamespace(formats=["speculators"])})


def test_settings_that_need_each_other(tiny_target: Target) -> None:
    assert judged(stage(tiny_target)) == {}
    assert judged(stage(tiny_target, k=[2, 5])) == {
        "sweep.k.1": "must lie between 1 and 4, the longest draft with drafter.block_size=5, but is 5"}
    assert judged(stage(tiny_target, users=[4, 8])) == {
        "sweep.users.1": "must be at most engine.max_num_seqs=4, the requests that the server decodes "
                         "together, but is 8"}
    assert judged(stage(tiny_target, urls=["http://a", "http://b"], users=[8])) == {
        "sweep.urls": "must name 3 servers, for plain, dflash K=1, dflash K=2, but has 2"}
    assert list(judged(stage(tiny_target, server=small_server(url="http://a")))) == ["sweep.urls"]
    assert judged(stage(tiny_target, format="native")) == {
        "sweep.format": "must be one of export.formats (speculators), but is native"}
    inside = {"drafter": make_small("mtp"), "format": "changes"}
    changes = {"prompts": Prompts(Builtin(), None, 9, 0.0, None, None, None),
               "export": SimpleNamespace(formats=["changes"])}
    assert stage(tiny_target, **inside, urls=[]).check(changes)["sweep.format"].startswith(
        "must be a format that a server loads (stitched), but is changes, ")
    assert list(judged(stage(tiny_target), heldout=0)) == ["prompts.heldout"]
    files = ["a/x.jsonl", "b/x.jsonl"]
    assert list(judged(stage(tiny_target, files=files), heldout=0)) == ["sweep.files"]


def test_the_lengths_that_are_measured_unless_told(tiny_target: Target) -> None:
    def lengths(**changes: Any) -> list[str]:
        return [str(each) for each in stage(tiny_target, k=None, **changes).variants]

    assert lengths() == ["plain", "dflash K=1", "dflash K=2", "dflash K=3", "dflash K=4"]
    assert lengths(drafter=make_dflash(block_size=16))[-1] == "dflash K=7"
    assert len(lengths(drafter=make_small("dflash2", block_size=16))) == 2, "whole blocks alone"
    assert lengths(also=["ngram"])[5:] == ["ngram K=1", "ngram K=2", "ngram K=3", "ngram K=4"]


def test_lengths_that_no_server_takes(tiny_target: Target, tmp_path: Path) -> None:
    """A target with two MTP layers: at most 2, or a multiple of it."""
    other = copied(tiny_target, tmp_path / "other",
                   config={"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2})
    drafter = make_small("mtp", start="own")
    with pytest.raises(UserError, match=r"^sweep\.k\.1=3 must be at most 2 or a multiple of it"):
        stage(other, drafter=drafter, k=[2, 3], urls=[]).preflight()
    assert {each.k for each in stage(other, drafter=drafter, k=None).variants} == {0, 1, 2, 4}
