"""The report: numbers that reach both files, sections that vanish without their data, rows that contradict
themselves. The inputs are folders as finished stages leave them, written here."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trainer.errors import UserError
from trainer.evaluate import figures, html, slice_figures
from trainer.evaluate.doubts import Doubts, left_out, of_code, of_data, of_mix, of_slices, of_training
from trainer.evaluate.report import Report, headline, verdict

VOID = {"meta", "br", "img", "link", "input", "hr"}
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
STAGES = ("prompts", "responses", "hidden_states", "train", "export", "evaluate")
SERVE = 'vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --speculative-config \'{"method": "dflash"}\''


def make_row(rates: list[float], **changes: object) -> dict:
    row = {
        "model": TARGET, "method": "dflash", "dataset": "heldout", "engine": "vllm",
        "baseline_tok_s": 41.5, "tok_s": 50.2, "speedup": 50.2 / 41.5, "num_speculative_tokens": len(rates),
        "mean_accepted_length": 1 + sum(rates), "acceptance_rate": sum(rates) / max(len(rates), 1),
        "per_position_acceptance": rates, "lossless": True, "users": 1, "dtype": "float32", "prompts": 40,
        "output_tokens": 5120, "drafts": 3300,
    }  # fmt: skip
    return row | changes


def make_rows() -> list[dict]:
    rows = [
        make_row(
            rates,
            users=users,
            baseline_tok_s=41.5 * users**0.7,
            tok_s=41.5 * users**0.7 * speedup,
            speedup=speedup,
        )
        for users in (1, 4)
        for rates, speedup in (
            ([0.36], 1.12),
            ([0.36, 0.11, 0.05], 1.21),
            ([0.36, 0.11, 0.05, 0.02, 0.01, 0, 0], 0.97),
        )
    ]
    unmeasured = {"engine": "in_process", "baseline_tok_s": None, "tok_s": None, "speedup": None, "users": 1}
    rows.append(make_row([0.361, 0.112, 0.049], **unmeasured))
    for name, scale in (("chat", 0.8), ("math", 1.5), ("code", 1.2), ("tools", 1.1), ("language=de", 0.6),
                        ("language=en", 1.1), ("context=up_to_512", 1.0), ("turn=second", 0.9)):
        rates = [scale * 0.36, scale * 0.11, scale * 0.05]
        rows.append(make_row(rates, dataset=f"heldout/{name}", **unmeasured))
    return rows


def make_run(root: Path, rows: list[dict] | None = None, steps: int = 400) -> dict[str, Path]:
    folders = {name: root / name / f"{name[:2]}{7:014d}" for name in STAGES}
    for number, (name, folder) in enumerate(folders.items()):
        folder.mkdir(parents=True)
        record = {"tokens": 123_456, "folder": str(folder / "shards"), "gates": {}}
        if name == "hidden_states":
            record["gates"]["top1_agreement"] = make_gate(0.9987, 0.99, True)
        if name == "train":
            record |= {"before_training": 1.0172, "best_step": 350, "accepted_length": 1.4837}
        if name == "evaluate":
            record["gates"]["counters_agree"] = make_gate(0.035, 0.02, False, "<=")
        content = {"stage": name, "fingerprint": folder.name + "abcdef", "record": record, "settings": {},
                   "seconds": 12.5 * 4**number, "versions": {"torch": "2.13.0"}}  # fmt: skip
        (folder / "stage.json").write_text(json.dumps(content))
    (folders["evaluate"] / "rows.json").write_text(json.dumps(make_rows() if rows is None else rows))
    exported = {"method": "dflash", "max_k": 7, "default_k": 3, "formats": ["native"], "target": TARGET}
    exported["serve_commands"] = {"vllm": SERVE}
    (folders["export"] / "export.json").write_text(json.dumps(exported))
    (folders["train"] / "log.jsonl").write_text(
        "".join(json.dumps(make_entry(i)) + "\n" for i in range(1, steps + 1))
    )
    return folders


def make_gate(value: float, bound: float, passed: bool, comparison: str = ">=") -> dict:
    cause = "the two counted <different> prompts"
    return {"value": value, "bound": bound, "comparison": comparison, "passed": passed, "cause": cause}


def make_entry(step: int) -> dict:
    wave = 0.2 * math.sin(step * 12.9)
    entry = {"step": step, "tokens": 512 * step, "loss": 7 / step**0.25 + wave, "lr": 6e-4, "grad_norm": 0.7,
             "estimate": 1 + 0.6 * (1 - math.exp(-step / 150)) + wave / 4, "seconds": step * 1.2}  # fmt: skip
    if step % 50 == 0:
        entry |= {"heldout_loss": 7.2 / step**0.25, "measured": 1 + 0.5 * (1 - math.exp(-step / 150))}
        scales = {"chat": 0.4, "math": 0.7, "language=de": 0.25, "language=en": 0.6}
        entry |= {f"measured/{name}": 1 + scale * (1 - math.exp(-step / 150))
                  for name, scale in scales.items()}
    return entry


def make_report() -> Report:
    return Report(recipe="dflash_smollm2", serve_with="vllm", identity_tolerance=0.02, rise_tolerance=0.002,
                  files=False)


def run_report(folders: dict[str, Path], root: Path) -> tuple[dict, str, dict]:
    out = root / "report" / "0000.partial"
    out.mkdir(parents=True)
    record = make_report().run(folders, out)
    return json.loads((out / "report.json").read_text()), (out / "report.html").read_text(), record


class Page(HTMLParser):
    """Checks that every element is closed in order and gathers ids, references and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.references, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        assert tag in VOID or "svg" in self.open, f"<{tag}/> does not close itself in HTML"
        self._note(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data

    def _note(self, attributes: list) -> None:
        self.ids += [value for name, value in attributes if name == "id"]
        self.references += [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "action")
        ]


def test_report_json_holds_rows_gates_training_and_stages(tmp_path: Path) -> None:
    folders = make_run(tmp_path)
    report, _, record = run_report(folders, tmp_path)
    assert report["format"] == 1
    assert report["rows"] == make_rows()
    assert list(report["gates"]) == ["hidden_states/top1_agreement", "evaluate/counters_agree"]
    assert report["gates"]["hidden_states/top1_agreement"] == make_gate(0.9987, 0.99, True)
    assert report["verdict"] == "accepted length 1.52 at K=3, 1.21x plain decoding at 1 user, text identical"
    assert report["serve_command"] == SERVE
    assert (report["training"]["steps"], report["training"]["best_step"]) == (400, 350)
    assert report["training"]["tokens"] == 123_456
    assert (report["training"]["before_training"], report["training"]["accepted_length"]) == (1.0172, 1.4837)
    assert report["training"]["seconds"] == 12.5 * 4**3
    assert report["training"]["final"]["heldout_loss"] == make_entry(400)["heldout_loss"]
    assert report["stages"]["train"]["fingerprint"] == folders["train"].name + "abcdef"
    assert report["versions"] == {"torch": "2.13.0"}
    assert report["warnings"] == []
    assert (record["gates_passed"], record["gates_failed"], record["speedup"]) == (1, 1, 1.21)


def test_report_json_names_paths_relative_to_the_run_root(tmp_path: Path) -> None:
    folders = make_run(tmp_path)
    report, _, _ = run_report(folders, tmp_path)
    assert str(tmp_path) not in json.dumps(report)
    assert report["stages"]["export"]["record"]["folder"] == f"export/{folders['export'].name}/shards"
    assert report["stages"]["export"]["folder"] == f"export/{folders['export'].name}"


def test_page_is_sound_loads_nothing_and_shows_the_numbers(tmp_path: Path) -> None:
    _, text, _ = run_report(make_run(tmp_path), tmp_path)
    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{name}" for name in page.ids}
    assert not re.search(r"https?://|@import|<link|<iframe", text)
    assert text.count("<svg") == 5 + 9, "five of the run, nine of its rows as a sweep"
    for shown in (
        "dflash_smollm2", "1.52", "0.36", "1.21x", "heldout/math", "top1_agreement", "0.9987", "123,456",
        "torch", "1 of 2 gates failed", "the two counted <different> prompts", SERVE, "2.13.0", "Cumulative",
        "K=3", "held out, decoded", "best step", "before training", "1.017", "1.484",
    ):  # fmt: skip
        assert shown in page.text, shown


def test_slices_reach_both_files_and_the_console(tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of every kind, the newest figures of training, the user's own mix, what the vocabulary covers."""
    folders = make_run(tmp_path)
    weights = {"category": {"code": 3, "chat": 1}, "turn": {"second": 2}}
    covered = {"rows": 8192, "total": 49152, "covered": 0.9876, "distinct": 9000, "special": 2,
               "curve": {"16384": 0.9912}, "by_category": {"chat": 0.9911, "code": 0.7321}}
    trained = {"mix": 1.55, "mix_before": 1.2, "draft_vocabulary": covered}
    for name, record, settings in (("evaluate", {"mix": 1.6123}, {"weights": weights}),
                                   ("train", trained, {})):
        stage = json.loads((folders[name] / "stage.json").read_text())
        stage["record"] |= record
        (folders[name] / "stage.json").write_text(json.dumps(stage | {"settings": settings}))
    report, text, _ = run_report(folders, tmp_path)
    last = make_entry(400)
    assert report["mix"] == {"accepted_length": 1.6123, "weights": weights}
    assert report["training"]["slices"] == {
        "category": {name: last[f"measured/{name}"] for name in ("chat", "math")},
        "language": {name: last[f"measured/language={name}"] for name in ("de", "en")}}
    assert (report["training"]["mix"], report["training"]["mix_before"]) == (1.55, 1.2)
    shown = Page(text).text
    for part in ("heldout/language=de", "category: code 75 %, chat 25 %; turn: second 100 %, accepts 1.612",
                 "of your mix, at the best step", "1.550", "8,192 of the target's 49,152 tokens", "73.21 %",
                 "all, with 16,384 tokens", "99.12 %", "By slice, while training"):
        assert part in shown, part
    [poor] = report["warnings"]
    assert "The draft vocabulary covers 73.2% of the tokens of code that were trained on" in poor
    make_report().tell(tmp_path / "report/0000.partial")
    printed = capsys.readouterr().out
    assert "heldout/language=de" in printed and "accepted length 1.612 of your own mix of traff" in printed


def test_curves_of_slices_have_a_panel_a_kind() -> None:
    log = [make_entry(step) for step in range(1, 401)]
    drawn = slice_figures.curves(log)
    for name in ("category", "language", "chat", "math", "de", "en"):
        assert drawn.count(f">{name}</text>") == 1, name
    assert drawn.count(">accepted length</text>") == 2
    assert slice_figures.curves([make_entry(step) for step in range(1, 60)]) is None, "measured once"
    assert slice_figures.curves([]) is None


def test_a_slice_that_gains_least_is_told() -> None:
    slow = make_row([0.2, 0.05], dataset="heldout/language=de", drafts=60)
    whole = make_row([0.4, 0.2])
    [said] = of_slices([whole, slow])
    assert said.startswith("heldout/language=de, vLLM, K=2: the accepted length is 1.25 where that of all "
                           "prompts is 1.60, so traffic of this kind gains least; train on more of it")
    for rows in ([whole, slow | {"drafts": 49}], [whole, make_row([0.25, 0.06], dataset="heldout/x")], [slow],
                 [whole | {"engine": "in_process"}, slow], [make_row([0.02, 0.0]), make_row([0.0, 0.0])]):
        assert [*of_slices(rows)] == []


def test_absent_inputs_leave_their_sections_out(tmp_path: Path) -> None:
    folders = make_run(tmp_path, rows=[make_row([0.4, 0.2], baseline_tok_s=None, tok_s=None, speedup=None)])
    (folders["export"] / "export.json").unlink()
    (folders["train"] / "log.jsonl").unlink()
    del folders["hidden_states"]
    stage = json.loads((folders["train"] / "stage.json").read_text())
    (folders["train"] / "stage.json").write_text(json.dumps(stage | {"resumed": True}))
    report, text, _ = run_report(folders, tmp_path)
    assert text.count("since it was resumed") == 1
    assert {'id="heatmap"', 'id="rows"'} <= set(re.findall(r'id="\w+"', text))
    assert not re.search(r'<section id="(training|throughput|slices|serve|warnings)"', text)
    assert report["serve_command"] is None
    assert "final" not in report["training"]
    assert list(report["stages"]) == ["prompts", "responses", "train", "export", "evaluate"]
    assert report["target"] == TARGET
    assert report["verdict"] == "accepted length 1.60 at K=2, text identical"
    Page(text)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"rows\.json, which is missing"),
        ("[]", "holds no rows"),
        ("[{", "is not JSON"),
        (json.dumps([make_row([0.5]), {"model": "x"}]), r"Row 1 of .*rows\.json lacks method, dataset"),
    ],
)
def test_unusable_rows_are_one_clear_error(tmp_path: Path, content: str | None, expected: str) -> None:
    folders = make_run(tmp_path)
    path = folders["evaluate"] / "rows.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=f"{expected}.*; remove {folders['evaluate']} and run the same comm"):
        run_report(folders, tmp_path)


def warned(rows: list[dict], sound: bool = True, prompts: int | None = None) -> list[str]:
    return Doubts(0.02, 0.002, sound, prompts).warnings(rows)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            make_row([0.5, 0.3], mean_accepted_length=2.1),
            ["is 2.100 but 1 + the sum of acceptance by position is 1.800"],
        ),
        (make_row([0.5, 0.3, 0.4]), ["acceptance rises by 0.100"]),
        (make_row([0.5, 0.498, 0.497]), ["stays at 0.50 over all 3 positions"]),
        (make_row([0.5, 0.3], lossless=False), ["differs from the text without"]),
        (make_row([0.5, 0.3], drafts=199), ["only 199 drafts were counted"]),
        (make_row([0.0, 0.0], drafts=0), ["only 0 drafts were counted"]),
        (make_row([0.0, 0.0], drafts=50), ["next to no draft token was accepted", "only 50 drafts"]),
        (make_row([0.5, 0.3], mean_accepted_length=1.81), []),
        (make_row([0.5, 0.5]), []),
        (make_row([0.98, 0.98, 0.975]), []),
        (make_row([0.36, 0.11, 0.05, 0.0, 0.0]), []),
        (make_row([0.0, 0.0], dataset="heldout/math", drafts=20), []),
    ],
)
def test_rows_that_contradict_themselves_are_named(row: dict, expected: list[str]) -> None:
    found = warned([row])
    assert len(found) == len(expected)
    for text, part in zip(found, expected, strict=True):
        assert part in text
        assert text.startswith(f"heldout, vLLM, K={len(row['per_position_acceptance'])}, 1 user: ")


def test_a_drafter_that_is_not_accepted_is_first_of_all_a_poor_one() -> None:
    """As long as every gate holds; otherwise the folder or the layers are looked at first."""
    [sound] = warned([make_row([0.02, 0.0])])
    assert re.search(r"\(accepted length 1.02\); the likeliest cause is a drafter that is trained too little "
                     r"\(train.epochs, .*\), as all gates hold; then draft weights", sound)  # fmt: skip
    assert warned([make_row([0.02, 0.0])], prompts=8) == [sound]
    [few] = warned([make_row([0.02, 0.0])], prompts=3)
    assert "the likeliest cause is few prompts: 3 are too few to learn from (prompts.limit, or " in few
    [unsound] = warned([make_row([0.02, 0.0])], sound=False)
    assert re.search("the likeliest cause is draft weights .*; then a drafter that is trained too", unsound)


def test_rows_with_the_same_doubt_are_one_warning_an_engine() -> None:
    rows = [make_row([0.3, 0.3001, 0.3], dataset="a"), make_row([0.01, 0.0], users=4),
            make_row([0.0, 0.0], engine="in_process"), make_row([0.0, 0.0]), make_row([0.0, 0.0], users=2),
            make_row([0.0, 0.0], engine="in_process", dataset="heldout/math")]  # fmt: skip
    first, second, third = warned(rows)
    assert first.startswith("heldout, vLLM, K=2, 4 users (and 2 more rows): next to no draft")
    assert second.startswith("heldout, in process, K=2, 1 user: next to no draft")
    assert third.startswith("a, vLLM, K=3, 1 user: acceptance stays")


def test_code_of_the_target_s_files_is_named() -> None:
    trusting = {"settings": {"target": {"trust_remote_code": True}}}
    inside = {"settings": {"acceptance": {"engines": [{"trust_remote_code": True}]}}}
    plain = {"settings": {"target": {"trust_remote_code": False}}}
    assert of_code({"prompts": {}, "responses": plain}) == []
    [said] = of_code({"responses": trusting, "train": inside, "export": plain})
    assert said.startswith("trust_remote_code was true in responses, train: code from the target's files ran")


def test_what_was_left_out_is_warned_of() -> None:
    records = {"prompts": {"left_out": 2}, "responses": {"dropped": 0, "turns_without_room": 3},
               "evaluate": {"left_out": 4}, "train": {"left_out": 9}}  # fmt: skip
    finished = {name: {"record": record} for name, record in records.items()}
    assert left_out(finished) == [
        "2 prompts repeat a text that is held out and are not trained on.",
        "3 later turns do not fit into the longest sequence and are left out.",
        "4 held-out prompts leave no room for an answer and were not measured."]  # fmt: skip
    assert left_out({}) == []


def test_warnings_reach_both_files_and_the_console(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folders = make_run(tmp_path, rows=[make_row([0.3, 0.5])])
    stage = json.loads((folders["responses"] / "stage.json").read_text())
    stage["record"]["turns_without_room"] = 5
    (folders["responses"] / "stage.json").write_text(json.dumps(stage))
    report, text, record = run_report(folders, tmp_path)
    assert record["warnings"] == len(report["warnings"]) == 2
    folder = tmp_path / "report" / "0000.partial"
    make_report().tell(folder)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(folder / "report.html")
    for warning in report["warnings"]:
        assert warning in Page(text).text
        assert warning in printed
    assert "evaluate/counters_agree" in printed
    assert "1.80" in printed


ODD = "a[/b] [red]c :smile: $\\frac{x$ <i>"


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On the console, where brackets are markup and colons emoji, in figures, where dollars are formulas."""
    rows = [make_row([0.0, 0.0], dataset=name, engine="[/e]", drafts=9) for name in ("[h]", f"heldout/{ODD}")]
    out = tmp_path / "out"
    out.mkdir()
    report = Report(ODD, "vllm", 0.02, 0.002, files=False)
    report.run(make_run(tmp_path, rows=rows), out)
    report.tell(out)
    printed = capsys.readouterr().out
    assert f"{ODD}: accepted length 1.00 at K=2" in printed
    assert f"  heldout/{ODD}  " in printed
    assert "warning [h], [/e], K=2, 1 user: next to no draft" in printed
    shown = Page((out / "report.html").read_text()).text
    assert f"heldout/{ODD}, [/e], K=2" in shown, "in the figure"


def test_log_of_a_continued_run_counts_each_step_once(tmp_path: Path) -> None:
    folders = make_run(tmp_path, steps=3)
    entries = [make_entry(1), make_entry(2) | {"loss": 9.0}, make_entry(2) | {"loss": 5.0}]
    lines = [json.dumps(entry) for entry in entries]
    (folders["train"] / "log.jsonl").write_text("\n".join([*lines, lines[0][:20], ""]))
    report, _, _ = run_report(folders, tmp_path)
    assert report["training"]["steps"] == 2
    assert report["training"]["final"]["loss"] == 5.0
    assert "1 line(s) of the training log are torn" in report["warnings"][0]


def test_what_training_noticed_is_told() -> None:
    final = {"train_walk": 2.5, "heldout_walk": 1.4}
    record = {"steps": 70, "unmoved": ["fc.weight", "norm.weight"], "final": final | {"overfits": True},
              "dominating": [{"term": "kl", "share": 0.973, "step": 10}]}  # fmt: skip
    one, two, three = of_training({"train": {"record": record}})
    assert "2 trained tensors have not moved in 70 steps of training (fc.weight, norm.weight)" in one
    assert "loss term kl was 97% of the loss at step 10" in two
    assert "2.50 on those and 1.40 on others" in three
    [narrow] = of_training({"train": {"record": {"draft_vocabulary": {"covered": 0.5}}}})
    assert "covers 50.0% of the tokens" in narrow
    sound = {"steps": 70, "unmoved": [], "dominating": [], "final": final}
    sound["draft_vocabulary"] = {"covered": 0.99}
    assert of_training({"train": {"record": sound}}) == of_training({}) == []
    sound["draft_vocabulary"] |= {"by_category": {"chat": 0.99, "code": 0.79, "es": 0.5}}
    [narrow] = of_training({"train": {"record": sound}})
    assert "covers 50.0% of the tokens of es that" in narrow
    better = {"before_training": 2.31, "accepted_length": 2.32}
    assert of_training({"train": {"record": better}}) == []
    mixed = better | {"mix": 1.9, "mix_before": 1.95}
    [idle] = of_training({"train": {"record": mixed}})
    assert "the mix of train.acceptance.weights was accepted at 1.95 before" in idle
    assert of_training({"train": {"record": mixed | {"mix_before": 1.8, "accepted_length": 2.0}}}) == []
    [idle] = of_training({"train": {"record": better | {"accepted_length": 2.25}}})
    assert re.search(r"brought nothing: .* at 2\.31 before the first step and at 2\.25 at the best one", idle)


def test_languages_that_nobody_says_are_told() -> None:
    def told(**languages: int) -> list[str]:
        return [*of_data({"prompts": {"record": {"languages": languages}}})]

    [said] = told(unknown=60, en=40)
    assert said.startswith("The language of 60 of 100 training prompts is not known")
    assert told(unknown=40, en=60) == told(en=3) == told() == [*of_data({})] == []


def test_traffic_that_the_data_hardly_has_is_told() -> None:
    def told(**weights: float) -> list[str]:
        return [*of_mix({"evaluate": {"settings": {"weights": {"category": weights}}},
                         "responses": {"record": {"categories": {"chat": 80, "code": 20}}}})]

    assert told(chat=1, code=1) == told(code=0, chat=2) == told() == [*of_mix({})] == []
    [code, tools] = told(code=6, tools=2, chat=1)
    assert code.startswith("code is 67% of your mix of traffic (train.acceptance.weights) and 20% of the")
    assert tools.startswith("tools is 22% of your mix of traffic (train.acceptance.weights) and 0% of the")


def test_acceptance_that_was_not_measured_while_training_leaves_a_trace() -> None:
    def told(every: int | None, **record: object) -> list[str]:
        return of_training({"train": {"settings": {"acceptance": {"every": every}}, "record": record}})

    gate = {"measured_acceptance_gap": {"passed": True}}
    assert told(160, accepted_length=1.5, gates=gate) == []
    for found, why in ((told(None, gates={}), "not measured .*, as train.acceptance.every is null: no gate"),
                       (told(160, gates={}), r"not measured .*, as no held-out sample .*prompts\.heldout"),
                       (told(160, accepted_length=1.5, gates={}), "on a single held-out prompt, of which")):
        [line] = found
        assert re.search(why, line)


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_missing_extra_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    make_report().preflight()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}.*speculator-trainer\[report\]"):
        make_report().preflight()


def test_headline_prefers_the_server_at_the_default_k_with_one_user() -> None:
    rows = make_rows()
    assert headline(rows, 3) == make_row([0.36, 0.11, 0.05], tok_s=41.5 * 1.21, speedup=1.21)
    assert headline(rows, None)["num_speculative_tokens"] == 3  # the fastest, where no default is known
    in_process = [row for row in rows if row["engine"] == "in_process"]
    assert headline(in_process, 3)["dataset"] == "heldout"
    assert verdict([make_row([0.5], lossless=False, users=8)], 1).endswith("at 8 users, text differs")


def test_drafts_cut_by_confidence_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row, a cell and a label of their own; the headline stays that of whole drafts."""
    plain = make_row([0.4, 0.2, 0.1], engine="in_process", baseline_tok_s=None, tok_s=None, speedup=None)
    cut = plain | {"engine": "in process, confidence 0.4", "confidence": 0.4, "verified_tokens": 1.618,
                   "per_position_acceptance": [0.4, 0.15, 0.0], "mean_accepted_length": 1.55}
    folders, out = make_run(tmp_path, [plain, cut]), tmp_path / "out"
    exported = json.loads((folders["export"] / "export.json").read_text())
    exported["confidence"] = {"temperatures": [2.0] * 3, "error_before": 0.1566, "error_after": 0.054}
    (folders["export"] / "export.json").write_text(json.dumps(exported))
    out.mkdir()
    assert make_report().run(folders, out)["accepted_length"] == plain["mean_accepted_length"]
    make_report().tell(out)
    assert "in process, confidence 0.4" in (told := capsys.readouterr().out) and "1.62 of 3" in told
    page = (out / "report.html").read_text()
    assert "1.62 of 3" in page and "heldout, in process, confidence 0.4, K=3" in page
    assert "0.157" in page and "0.054" in page
    assert json.loads((out / "report.json").read_text())["export"]["confidence"] == exported["confidence"]


def test_no_speedup_is_claimed_that_was_not_told() -> None:
    few = make_row([0.5], speedup=None)
    assert verdict([few], 1).endswith(" at K=1, too few tokens timed to tell a speedup, text identical")
    poor = make_row([0.0], speedup=None)
    expected = "accepted length 1.00 at K=1, no speedup, as next to no draft is accepted, text identical"
    assert verdict([poor], 1) == verdict([poor | {"tok_s": None, "baseline_tok_s": None}], 1) == expected
    assert not re.search(r">\d\.\d\dx<", figures.draw([few], [])["throughput"])
    slow = make_row([0.5], speedup=None, tok_s=None, interpreted=True)
    assert "at K=1, no speed to tell, as vLLM's CPU build interprets" in verdict([slow], 1)
    assert figures.draw([slow], [])["throughput"] is None


def test_figures_follow_the_page_and_print_their_values() -> None:
    drawn = figures.draw(make_rows(), [make_entry(step) for step in range(1, 401)])
    assert all(
        svg.startswith("<svg") and "currentColor" in svg and figures.NEUTRAL not in svg
        for svg in drawn.values()
    )
    cells = re.findall(r">(0\.\d\d)</text>", drawn["heatmap"])
    rates = [rate for row in make_rows() if row["users"] == 1 for rate in row["per_position_acceptance"]]
    assert sorted(cells) == sorted(f"{rate:.2f}" for rate in rates)
    assert set(re.findall(r">(\d\.\d\dx)</text>", drawn["throughput"])) == {"1.12x", "1.21x", "0.97x"}
    assert drawn == figures.draw(make_rows(), [make_entry(step) for step in range(1, 401)])
    assert set(figures.draw([make_row([])], []).values()) - {None} == {
        figures.draw([make_row([])], [])["throughput"]
    }


def test_curves_of_few_points_have_marks_and_whole_steps() -> None:
    """A short run: two points of the loss, one measurement on held-out samples."""
    log = [make_entry(1) | {"step": 1}, make_entry(2) | {"step": 2, "heldout_loss": 6.5}]
    drawn = figures.draw([], log)["training"]
    assert "held out" in drawn
    steps = drawn[drawn.index("matplotlib.axis_1") : drawn.index("matplotlib.axis_2")]
    assert re.findall(r">([\d.]+)</text>", steps) == ["1", "2"]
    assert figures.draw([], log[:1])["training"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.99871, "0.9987"),
        (1.3e-6, "1.3e-06"),
        (123456, "123,456"),
        (True, "yes"),
        (2.0, "2"),
        (51234.7, "51,235"),
    ],
)
def test_compact_numbers(value: object, expected: str) -> None:
    assert html.compact(value) == expected


def test_durations() -> None:
    assert [html.duration(s) for s in (8.24, 250, 3900)] == ["8.2 s", "4 min 10 s", "1 h 05 min"]
