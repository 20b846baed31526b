"""README is held to what it describes: its commands are right, its tables and samples those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainer import pipeline
from trainer._paths import find
from trainer.check import check
from trainer.compose import compose_configuration
from trainer.evaluate.report import print_tables

PROJECT = Path(__file__).resolve().parents[1]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
LOOPS = {"$mode": "offline", "$storage": "native", "$seed": "0"}  # a value of each variable of a shell's loop
ROW = {"dataset": "heldout", "engine": "vllm", "per_position_acceptance": [0.3, 0.09], "users": 1,
       "num_speculative_tokens": 2, "mean_accepted_length": 1.39, "baseline_tok_s": 24.1, "tok_s": 27.0,
       "speedup": 1.12, "lossless": True}


def commands(program: str) -> list[list[str]]:
    """The words behind `python PROGRAM`, in blocks and inside of sentences."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in lines:
        for name, value in LOOPS.items():
            line = line.replace(name, value)
        if re.match(rf"python {program}", line):
            words = shlex.split(line, comments=True)[1:]
            found.append([word for word in words if word not in ("...", "…")])
    return found


TRAININGS = [words[2:] for words in commands("-m trainer")]
TOOLS = commands("tools/")


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_every_command_is_right(words: list[str]) -> None:
    """As `--check` sees it before it looks for files, servers and devices."""
    settings = [word for word in words if not word.startswith("-")]
    assert {*words} - {*settings} <= {"--check", "--help"}
    configuration, groups = compose_configuration(settings, find()), find().groups()
    assert check(configuration, groups, pipeline.Stage) == []
    assert pipeline.check(pipeline.completed(configuration.settings)) == {}


@pytest.mark.parametrize("words", TOOLS, ids=" ".join)
def test_every_tool_has_the_flags_that_are_named(words: list[str]) -> None:
    source = (PROJECT / words[0]).read_text(encoding="utf-8")
    for word in words[1:]:
        if word.startswith("-"):
            assert f'"{word}"' in source, f"{words[0]} has no {word}"


def test_commands_are_found() -> None:
    assert len(TRAININGS) > 30 and len(TOOLS) > 10
    assert ["--check", "recipe=dflash_qwen3_8b"] in TRAININGS
    assert any("target.tap_layers=[2,10,18]" in words for words in TRAININGS), "on several lines"


def test_the_table_of_recipes_has_every_recipe_and_no_other() -> None:
    table = README.partition("\n| recipe | what | runs on |\n")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {*find().groups()["recipe"]}


def test_the_list_of_contents_has_every_chapter_in_order() -> None:
    listed = re.findall(r"\[([^]]+)\]\(#([\w-]+)\)", README.partition("\n## ")[0])
    chapters = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert [name for name, _ in listed] == chapters
    assert [place for _, place in listed] == [name.lower().replace(" ", "-") for name in chapters]


def test_the_sample_of_a_run_has_the_columns_of_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables({"recipe": "demo", "verdict": "faster", "rows": [ROW], "mix": None, "gates": {},
                  "warnings": []})
    shown = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    titles = next(cells for cells in shown if cells[0] == "data")
    sample = README.partition("\n## What a run looks like\n")[2].partition("\n## ")[0]
    header, *rows = [re.split(r"\s{2,}", line.strip()) for line in sample.splitlines()
                     if line.startswith(("  data ", "  heldout"))]
    assert header == titles and rows[-1] == next(cells for cells in shown if cells[0] == "heldout")
    assert all(len(row) in (len(titles) - 3, len(titles)) for row in rows), "in process there is no speed"
