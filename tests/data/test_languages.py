"""The language of prompts that do not say it: found by the text, or told to be unknown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trainer.data import languages
from trainer.data.languages import Detection
from trainer.data.prompts import FACTS, Builtin, Jsonl, Prompts, read_prompts
from trainer.errors import UserError
from trainer.records import UNKNOWN, Prompt

CONF = Path(__file__).parents[2] / "conf/prompts"
LIKELY = 0.7  # as conf/prompts has it
TEXTS = {
    "en": "Could you explain to me how a bicycle stays upright while it is moving? Please keep it short.",
    "es": "¿Podrías explicarme cómo se prepara una buena tortilla de patatas para cuatro personas?",
    "fr": "Pourrais-tu m'expliquer comment les marées se forment et pourquoi elles changent chaque jour ?",
    "de": "Kannst du mir bitte erklären, warum der Himmel am Abend rot wird und am Tag blau ist?",
    "ru": "Объясни, пожалуйста, почему зимой дни короче, чем летом, и как это связано с наклоном оси Земли.",
    "zh": "请你用简单的话解释一下为什么天空是蓝色的，而日落的时候会变成红色。",
    "ja": "空が青く見える理由を、子どもにもわかるように簡単に説明してください。"}


def of(*turns: str) -> str:
    return Detection(LIKELY).of(Prompt("p", turns))


@pytest.mark.parametrize(("language", "text"), TEXTS.items())
def test_texts_of_a_sentence_are_told(language: str, text: str) -> None:
    assert of(text) == language == of(text), "the same again"
    assert of("ok", text) == language, "all turns count"


@pytest.mark.parametrize("text", [
    "", "?!", "2+2?", "42 + 17 = ", "x", "```python\nfor word in words:\n    print(word)\n```",
    "`sudo apt-get install`", "https://example.org/the/way/of/all/things"])
def test_texts_of_no_language_are_unknown(text: str) -> None:
    assert of(text) == UNKNOWN


def test_code_inside_a_text_says_nothing_of_it() -> None:
    code = "```python\n" + "for word in the_list_of_words: print(word)\n" * 20
    for text in (f"{TEXTS['es']}\n{code}```", f"{code}```\n{TEXTS['es']}", f"{TEXTS['es']}\n{code}"):
        assert of(text) == "es"


def test_a_higher_confidence_tells_fewer() -> None:
    texts = [text[:length] for text in TEXTS.values() for length in (6, 12, 24, 48)]
    told = [sum(Detection(least).of(Prompt("p", (text,))) != UNKNOWN for text in texts)
            for least in (0.0, 0.5, 0.9, 1.0)]
    assert told == sorted(told, reverse=True) and told[0] == len(texts) and told[-1] < told[0]


def stage(folder: Path, detection: Detection | None, *rows: dict) -> Prompts:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Prompts(Jsonl(str(path)), None, 1, 0.0, None, detection, None)


def test_only_rows_that_say_nothing_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"turns": [TEXTS["es"]]}, {"turns": [TEXTS["fr"]], "language": "x-mine"}, {"turns": ["2+2?"]},
            {"turns": [TEXTS["de"]], "language": None, "split": "heldout"}]
    record = stage(tmp_path, Detection(LIKELY), *rows).run({}, tmp_path)
    assert [prompt.language for prompt, _ in read_prompts(tmp_path)] == ["es", "x-mine", UNKNOWN, "de"]
    assert record["languages"] == {"es": 1, "x-mine": 1, UNKNOWN: 1}
    facts = json.loads((tmp_path / FACTS).read_text())
    assert facts["languages"] == {"said": 1, "detected": 2, "unknown": 1}
    assert capsys.readouterr().out == ("prompts: 3 of the 4 rows do not say their language; that of 2 was "
                                       "detected, that of 1 stays unknown\n")
    stage(tmp_path, None, *rows).run({}, tmp_path)
    assert [prompt.language for prompt, _ in read_prompts(tmp_path)] == [UNKNOWN, "x-mine", UNKNOWN, UNKNOWN]
    assert json.loads((tmp_path / FACTS).read_text())["languages"] == {"said": 1, "detected": 0, "unknown": 3}


def test_a_missing_package_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, said = {"turns": ["a"]}, {"turns": ["a"], "language": "en"}
    stage(tmp_path, Detection(LIKELY), silent).preflight()
    monkeypatch.setattr(languages, "PACKAGE", "no_such_package_of_languages")
    for call in (stage(tmp_path, Detection(LIKELY), said).preflight,
                 lambda: stage(tmp_path, Detection(LIKELY), silent, said).run({}, tmp_path)):
        with pytest.raises(UserError, match=r"^prompts\.languages finds .* with no_such_package_of_languages"
                                            r", which is not installed; install it .*, or set prompts\."):
            call()
    stage(tmp_path, None, silent).preflight()


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_all_but_the_built_in_prompts_are_looked_at(path: Path) -> None:
    found = yaml.safe_load(path.read_text())["languages"]
    assert (found is None) == (path.stem == "builtin")
    assert found is None or found["confidence"] == LIKELY


def test_of_the_built_in_prompts_most_are_found_and_none_wrongly() -> None:
    detection, rows = Detection(LIKELY), Builtin().all_rows()
    found = Counter(detection.of(prompt) if detection.of(prompt) in (prompt.language, UNKNOWN) else "wrong"
                    for prompt, _ in rows)
    assert found["wrong"] == 0 and found[UNKNOWN] < 0.2 * len(rows), found
    assert {language for language in found if found[language] > 10} == {"en", "es", "fr", UNKNOWN}
