"""`tools/compare_runs.py` on folders as the stages write them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

TOOL = Path(__file__).parents[2] / "tools/compare_runs.py"


def finish(root: Path, stage: str, name: str, settings: dict[str, Any], inputs: dict[str, str],
           record: dict[str, Any] | None = None) -> Path:
    folder = root / stage / name
    folder.mkdir(parents=True)
    (folder / "stage.json").write_text(json.dumps({
        "settings": settings, "inputs": {upstream: made.ljust(64, "0") for upstream, made in inputs.items()},
        "record": record or {}}))
    return folder


def training(root: Path, name: str, lr: float, estimate: float, weight: float = 1.0, seed: int = 0,
             states: str = "0" * 16) -> Path:
    final = {"step": 9, "estimate": 1.0, "heldout_estimate": estimate, "heldout_loss": 5.0}
    folder = finish(root, "train", name, {"_target_": "t", "optimizer": {"lr": lr}, "epochs": 1, "seed": seed,
                                          "drafter": {"seed": seed}, "runtime": {"log_every": name}},
                    {"hidden_states": states}, {"steps": 9, "train_seconds": 1.0, "final": final})
    (folder / "log.jsonl").write_text(json.dumps({"step": 9, "loss": weight, "grad_norm": 1.0}) + "\n")
    save_file({"w": torch.full((2,), weight)}, folder / "weights.safetensors")
    return folder


def evaluation(root: Path, train: str, length: float) -> None:
    finish(root, "export", f"ex{train}"[:16], {}, {"train": train})
    folder = finish(root, "evaluate", f"ev{train}"[:16], {}, {"export": f"ex{train}"[:16]})
    row = {"num_speculative_tokens": 3, "prompts": 24, "engine": "in_process", "mean_accepted_length": length}
    (folder / "rows.json").write_text(json.dumps([{**row, "dataset": "heldout"}, {
        **row, "dataset": "heldout/math", "mean_accepted_length": 9.0}]))


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_table_shows_what_differs_and_the_best_first(tmp_path: Path) -> None:
    training(tmp_path, "aaaa", 0.1, 1.2, 1.0)
    training(tmp_path, "bbbb", 0.2, 1.3, 2.0)
    training(tmp_path, "cccc.partial", 0.3, 1.4)
    done = call(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr" in done.stdout and "epochs" not in done.stdout and "log_every" not in done.stdout
    assert done.stdout.index("bbbb") < done.stdout.index("aaaa") and "cccc" not in done.stdout
    assert call(tmp_path / "nothing").returncode == 2


STORAGES = {"native": (1.45, 1.43, 1.48), "float8_e4m3fn": (1.44, 1.43, 1.45)}
LENGTHS = {"native": (1.52, 1.50, 1.55), "float8_e4m3fn": (1.51, 1.50, 1.54)}


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """Two storages, three seeds each, evaluated; one of the storages was adopted from elsewhere, so that its
    manifest knows better than the settings. Answers were made with a seed of their own."""
    answers = {"sampling": {"seed": 5}, "target": {"source": {"seed": 7}}}
    finish(tmp_path, "responses", "r" * 16, answers, {})
    for number, storage in enumerate(STORAGES):
        states = f"{number}" * 16
        folder = finish(tmp_path, "hidden_states", states, {"storage": "native", "path": None},
                        {"responses": "r" * 16})
        (folder / "manifest.json").write_text(json.dumps({"storage": storage, "dtype": "bfloat16"}))
        for seed, estimate in enumerate(STORAGES[storage]):
            name = f"{storage[:6]}{seed}".ljust(16, "0")
            training(tmp_path, name, 0.1, estimate, seed=seed, states=states)
            evaluation(tmp_path, name, LENGTHS[storage][seed])
    return tmp_path


def test_runs_that_differ_in_their_seeds_are_a_group(six: Path, tmp_path: Path) -> None:
    done = call(six, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "out/comparison.html"), "the folder was made"
    found = json.loads((tmp_path / "out/comparison.json").read_text())
    assert found["settings"] == ["hidden_states.storage"] and set(found["seeds"]) == {"seed"}
    assert [group["title"] for group in found["groups"]] == ["storage native", "storage float8_e4m3fn"]
    name = "accepted length, K=3, 24 prompts in process"
    for group, lengths in zip(found["groups"], LENGTHS.values(), strict=True):
        assert [run["seed"] for run in group["runs"]] == ["0", "1", "2"]
        assert [run["figures"][name] for run in group["runs"]] == list(lengths)
        assert group["figures"][name] == {"mean": statistics.fmean(lengths), "runs": 3,
                                          "spread": statistics.stdev(lengths)}
    [difference] = found["differences"]
    assert difference["reference"] == "storage native"
    native, eight = LENGTHS.values()
    pairs = [ours - theirs for ours, theirs in zip(eight, native, strict=True)]
    assert difference["figures"][name] == {
        "difference": pytest.approx(statistics.fmean(pairs)),
        "standard_error": pytest.approx(((statistics.variance(native) + statistics.variance(eight)) / 3)
                                        ** 0.5),
        "by_seed": {str(seed): pytest.approx(pair) for seed, pair in enumerate(pairs)},
        "paired_standard_error": pytest.approx(statistics.stdev(pairs) / 3 ** 0.5)}
    assert set(difference["figures"]) == {name, "held-out accepted length", "held-out loss",
                                          "training estimate"}
    assert f"{name}: -0.0067 ± 0.0189; seed by seed -0.0067 ± 0.0033" in done.stdout


def test_what_a_server_decoded_stands_for_both_in_the_table(six: Path) -> None:
    for path in six.glob("evaluate/*/rows.json"):
        rows = json.loads(path.read_text())
        path.write_text(json.dumps(rows + [{**rows[0], "engine": "vllm"}]))
    done = call(six)
    assert "24 prompts vLLM" in done.stdout and "in process" not in done.stdout
    figures = json.loads((six / "comparison.json").read_text())["groups"][0]["figures"]
    assert "accepted length, K=3, 24 prompts in process" in figures, "the file has all"


class Loads(HTMLParser):
    """Tags in order, and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("circle", "line"), "what closes itself here"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(six: Path) -> None:
    assert call(six).returncode == 0
    text = (six / "comparison.html").read_text()
    parsed = Loads(text)
    assert parsed.open == [] and parsed.loads == []
    for shown in ("6 trainings in 2 groups", "storage float8_e4m3fn", "-0.0067 ± 0.0189", "2: 1.5400"):
        assert shown in text
    assert text.count("<circle") == 4 * 6, "one dot a run and figure"


def test_single_runs_have_no_spread(six: Path) -> None:
    """And no error of a difference that would look like one; --only chooses the runs."""
    training(six, "other", 0.2, 1.1, states="f" * 16)  # of states that are gone
    done = call(six, "--only", "optimizer.lr=0.2")
    assert done.returncode == 0 and "groups" not in done.stdout
    call(six)
    found = json.loads((six / "comparison.json").read_text())
    assert len(found["groups"]) == 3 and found["groups"][2]["figures"]["held-out loss"]["spread"] is None
    figures = found["differences"][1]["figures"]["held-out accepted length"]
    assert figures["standard_error"] is None and figures["by_seed"] == {}
    done = call(six, "--only", "optimizer.lr=0.3")
    assert done.returncode == 2 and "optimizer.lr=0.3" in done.stderr


def test_a_seed_of_the_target_makes_another_target(tmp_path: Path) -> None:
    for seed in (1, 2):
        finish(tmp_path, "hidden_states", f"{seed}" * 16, {"target": {"source": {"seed": seed}}}, {})
        training(tmp_path, f"{seed}".ljust(4, "a"), 0.1, 1.2, states=f"{seed}" * 16)
    done = call(tmp_path)
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "comparison.json").exists()
    assert done.stderr.startswith("error: the trainings are for 2 different targets (")
    assert call(tmp_path, "--only", "hidden_states.target.source.seed=1").returncode == 0


@pytest.mark.parametrize(("identities", "same"), [
    (("a", "a"), True), (("a", "b"), False), (("a", None), False)])
def test_targets_are_known_by_what_their_files_hold(tmp_path: Path, identities: tuple[str | None, ...],
                                                    same: bool) -> None:
    """Where hidden states name them; else by what the settings say, here by two paths."""
    for number, identity in enumerate(identities):
        settings = {"target": {"name": f"mine{number}", "source": {"path": f"/models/{number}"}}}
        folder = finish(tmp_path, "hidden_states", f"{number}" * 16, settings, {})
        if identity is not None:
            (folder / "manifest.json").write_text(json.dumps({"target": identity}))
        train = training(tmp_path, f"{number}" * 4, 0.1, 1.2, states=f"{number}" * 16)
        record = json.loads((train / "stage.json").read_text())
        (train / "stage.json").write_text(json.dumps({**record, "settings": record["settings"] | settings}))
    done = call(tmp_path)
    assert done.returncode == (0 if same else 2), done.stderr
    assert same or "2 different targets (mine0: 0000; mine1: 1111), and are not compared" in done.stderr
    assert call(tmp_path, "--only", "target.name=mine1").returncode == 0


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    training(tmp_path, "aaaa", 0.1, 1.2)
    (tmp_path / "file").touch()
    done = call(tmp_path, "--out", tmp_path / "file")
    assert done.returncode == 2 and f"{tmp_path}/file cannot be written (File exists" in done.stderr


def test_bits_tells_equal_from_different(tmp_path: Path) -> None:
    one, two, other = (training(tmp_path, name, 0.1, 1.2, weight)
                       for name, weight in (("aaaa", 1.0), ("bbbb", 1.0), ("cccc", 1.5)))
    assert call("--bits", one, two).returncode == 0
    done = call("--bits", one, other)
    assert done.returncode == 1 and "w differs" in done.stdout
    done = call("--bits", one, tmp_path / "none")
    assert done.returncode == 2 and f"{tmp_path / 'none'} is no folder of a finished training" in done.stderr
