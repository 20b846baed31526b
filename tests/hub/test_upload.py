"""What goes onto the Hub arrives byte for byte, however the way there is disturbed, and nothing else goes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_support import REPO, TOKEN, Hub, place, stage
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from trainer.errors import UserError
from trainer.export.serve_command import ServingFacts
from trainer.export.stage import Export
from trainer.export.upload import Upload
from trainer.target import Target

ROWS = [{"dataset": dataset, "engine": engine, "method": "dflash", "num_speculative_tokens": 3,
         "users": users, "mean_accepted_length": 1.5, "per_position_acceptance": [0.3, 0.15, 0.05],
         "speedup": speedup}
        for dataset, engine, users, speedup in (("heldout", "in_process", None, None),
                                                ("heldout/math", "vllm", 4, 1.234))]


@pytest.fixture
def inputs(exported: Path, tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate/rows.json").write_text(json.dumps(ROWS))
    return {"export": exported, "evaluate": tmp_path / "evaluate"}


def run(made: Upload, inputs: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return made.run(inputs, out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")
            if path.is_file()}


def copy_of(exported: Path, tmp_path: Path, **tensors: torch.Tensor) -> Path:
    """A folder of one's own, with larger weights where there are some."""
    folder = Path(shutil.copytree(exported / "native", tmp_path / "mine"))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_arrives_with_a_card_of_what_was_measured(hub: Hub, tiny_target: Target, exported: Path,
                                                           inputs: dict[str, Path], tmp_path: Path,
                                                           capfd: pytest.CaptureFixture[str]) -> None:
    before, made = contents(exported), stage(tiny_target, license="apache-2.0")
    made.preflight()
    record = run(made, inputs, tmp_path)
    found = hub.files()
    given = contents(exported / "speculators") | {"README.md": (tmp_path / "out/README.md").read_bytes()}
    assert found == given and contents(exported) == before, "and nothing of the export is changed"
    assert {*found} == {"README.md", "config.json", "model.safetensors", "provenance.json",
                        "speculator.json"}
    repo = hub.repo()
    assert repo["private"] and repo["titles"] == ["initial commit", "Speculator for org/target (dflash)"]
    assert repo["refs"] == {"main": record["commit"], record["tag"]: record["commit"]}
    told = json.loads((tmp_path / "out/upload.json").read_text())
    assert told["files"]["model.safetensors"]["sha256"] == hashlib.sha256(
        given["model.safetensors"]).hexdigest()
    made.tell(tmp_path / "out")
    out, err = capfd.readouterr()
    assert f"uploaded: {hub.url}/{REPO} (private), commit {record['commit']}, tag {record['tag']}" in out
    assert "license is unknown" not in out and re.search(r"upload: [\d,]+/[\d,]+ KiB  100%", out), out
    card = ModelCard(found["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "org/target")
    for part in (f"vLLM on ROCm or CUDA:\n\n```bash\nvllm serve org/target --speculative-config '{{"
                 f'"method": "dflash", "model": "{REPO}", "num_speculative_tokens": 3}}',
                 f"```bash\nvllm serve {REPO}\n```",
                 "vllm (CPU build):\n\n```bash\nVLLM_CPU_KVCACHE_SPACE=2 vllm serve org/target --dtype ",
                 "| heldout | in process | 3 |  | 1.50 | 0.30 0.15 0.05 |  |",
                 "| heldout/math | vLLM | 3 | 4 | 1.50 | 0.30 0.15 0.05 | 1.23x |",
                 "| trained context | 30 tokens", "| trained modes | chat |", "| recipe | `some_recipe` |",
                 "python -m trainer recipe=some_recipe train.epochs=2"):
        assert part in card.text, part
    assert TOKEN not in out + err and not any(TOKEN.encode() in each for each in found.values())


def test_again_nothing_is_sent_and_nothing_changes(hub: Hub, tiny_target: Target, inputs: dict[str, Path],
                                                   tmp_path: Path) -> None:
    first = run(stage(tiny_target), inputs, tmp_path)
    sent = hub.asked("PUT", "/lfs/")
    assert run(stage(tiny_target), inputs, tmp_path) == first
    assert hub.asked("PUT", "/lfs/") == sent and len(hub.repo()["titles"]) == 2


def test_a_branch_for_each_checkpoint(hub: Hub, tiny_target: Target, exported: Path, inputs: dict[str, Path],
                                      tmp_path: Path) -> None:
    main = run(stage(tiny_target), inputs, tmp_path)
    other = run(stage(tiny_target, branch="step-100", format="native"), inputs, tmp_path)
    run(stage(tiny_target, branch="step-100", format="native"), inputs, tmp_path)
    refs = hub.repo()["refs"]
    assert refs == {"main": main["commit"], main["tag"]: main["commit"], "step-100": other["commit"],
                    other["tag"]: other["commit"]} and len(refs) == 4
    assert hub.files("step-100")["config.json"] == (exported / "native/config.json").read_bytes()
    assert hub.files(main["tag"])["config.json"] == (exported / "speculators/config.json").read_bytes()


def test_weights_of_an_earlier_upload_do_not_stay_beside_others(
        hub: Hub, tiny_target: Target, exported: Path, inputs: dict[str, Path], tmp_path: Path) -> None:
    mine = copy_of(exported, tmp_path)
    (mine / "notes.txt").write_text("kept")
    (mine / "model.safetensors").rename(mine / "model-00001-of-00001.safetensors")
    (mine / ".secret").write_text("not sent")
    run(stage(tiny_target, folder=str(mine)), {}, tmp_path)
    first = {*hub.files()}
    assert {"notes.txt", "model-00001-of-00001.safetensors"} <= first and ".secret" not in first
    run(stage(tiny_target), inputs, tmp_path)
    assert {*hub.files()} == {"README.md", "config.json", "model.safetensors", "notes.txt",
                              "provenance.json", "speculator.json"}


@pytest.mark.parametrize("fault", [
    {"method": "POST", "path": "/api/repos/create", "status": 500},
    {"method": "POST", "path": "/preupload/", "status": 503},
    {"method": "POST", "path": "/objects/batch", "status": 500},
    {"method": "PUT", "path": "/lfs/", "status": 500},
    {"method": "PUT", "path": "/lfs/", "cut": 1000},
    {"method": "POST", "path": "/lfs/.*/verify", "cut": 0},
    {"method": "POST", "path": "/commit/", "status": 500},
    {"method": "POST", "path": "/commit/", "status": 409, "message": "another commit is being made"},
    {"method": "POST", "path": "/commit/", "cut": 100},
    {"method": "POST", "path": "/commit/", "lost": 504},
    {"method": "POST", "path": "/tag/", "lost": 502},
    {"method": "GET", "path": "/api/models/", "status": 429},
], ids=lambda fault: "-".join(str(each) for each in fault.values()).replace("/", ""))
def test_what_heals_is_waited_for(hub: Hub, tiny_target: Target, exported: Path, inputs: dict[str, Path],
                                  tmp_path: Path, fault: dict[str, Any]) -> None:
    hub.order(fault)
    record = run(stage(tiny_target), inputs, tmp_path)
    assert hub.files(record["tag"]) == contents(exported / "speculators") | {
        "README.md": (tmp_path / "out/README.md").read_bytes()}
    assert len(hub.repo()["titles"]) == 2, "one commit, even where the answer to the first was lost"


def test_an_interrupted_transfer_goes_on_where_it_was(hub: Hub, tiny_target: Target, exported: Path,
                                                      tmp_path: Path) -> None:
    """Two large files, in parts: the one that arrived is not sent a second time."""
    mine = copy_of(exported, tmp_path)
    drawn = torch.Generator().manual_seed(0)
    for name in ("model.safetensors", "more.safetensors"):
        save_file({name: torch.randint(0, 256, (3_000_000,), generator=drawn).byte()}, mine / name)
    first, second = (hashlib.sha256((mine / name).read_bytes()).hexdigest()
                     for name in ("model.safetensors", "more.safetensors"))
    hub.order({"method": "PUT", "path": f"/lfs/{second}", "status": 403, "times": 1})
    with pytest.raises(UserError, match="the token may not write there"):
        run(stage(tiny_target, folder=str(mine)), {}, tmp_path)
    assert len(hub.asked("PUT", first)) == 3 and hub.repo()["titles"] == ["initial commit"]
    run(stage(tiny_target, folder=str(mine)), {}, tmp_path)
    assert len(hub.asked("PUT", first)) == 3 and hub.files() == contents(mine)


FAULTS = {
    401: ("GET", "whoami", r"the Hub does not accept the token \(401: .*\); log in again with `hf auth "
                           "login`, or set HF_TOKEN to a token that may write to tester"),
    403: ("POST", "repos/create", r"the token may not write there \(403: no rights\); give it the right "
                                  "to, take another one, or name a repository of yours"),
    409: ("POST", "/commit/", r"somebody else is changing it, 3 times now \(409: no rights\); run the "
                              "same command again"),
    500: ("POST", "/commit/", r"the Hub answers 500 \(no rights\), asked 3 times; later run the same "),
    413: ("POST", "/commit/", r"the Hub answers 413 \(no rights\); later run the same"),
}


@pytest.mark.parametrize("status", FAULTS)
def test_what_does_not_heal_is_a_sentence(hub: Hub, tiny_target: Target, inputs: dict[str, Path],
                                          tmp_path: Path, status: int) -> None:
    method, path, said = FAULTS[status]
    hub.order({"method": method, "path": path, "status": status, "message": "no rights", "times": 9})
    made = stage(tiny_target)
    with pytest.raises(UserError, match=f"^export.hub.repo={REPO}: {said}") as told:
        made.preflight()
        run(made, inputs, tmp_path)
    assert "\n" not in str(told.value)


def test_a_card_that_the_hub_rejects_is_told_before_anything_is_sent_in_full(
        hub: Hub, tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'the Hub refuses the card \("license" must be one of \[apache-.*; '
                                        r"set export.hub.license to an identifier that it knows, or mend"):
        run(stage(tiny_target, license="mine-alone"), inputs, tmp_path)
    assert hub.repo()["titles"] == ["initial commit"] and not hub.asked("PUT", "/lfs/")


@pytest.mark.parametrize(("token", "repo", "said"), [
    ("hf_reads", REPO, "the token of tester may read the Hub alone, and export.hub.repo=tester/drafter is "),
    (TOKEN, "nobody/drafter", "export.hub.repo=nobody/drafter is of nobody, but the token for the Hub is of "
                              "tester, lab; name a repository there, or set HF_TOKEN to another"),
    ("hf_unknown", REPO, r"does not accept the token \(401: Invalid credentials in .* \(\*\*\*\)\); log "),
    (None, REPO, "needs a token for the Hub, and there is none; log in with `hf auth login`, or set HF")])
def test_a_token_that_will_not_do_is_told_before_the_run(
        hub: Hub, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, token: str | None, repo: str,
        said: str) -> None:
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=said) as told:
        stage(tiny_target, repo=repo).preflight()
    assert not token or token not in str(told.value)


def test_an_organisation_of_the_user_will_do(hub: Hub, tiny_target: Target, inputs: dict[str, Path],
                                             tmp_path: Path) -> None:
    made = stage(tiny_target, repo="lab/drafter", private=False)
    made.preflight()
    run(made, inputs, tmp_path)
    assert not hub.repo("lab/drafter")["private"]


def test_a_public_repository_gets_nothing_that_is_to_be_private(
        hub: Hub, tiny_target: Target, inputs: dict[str, Path], tmp_path: Path) -> None:
    run(stage(tiny_target, private=False), inputs, tmp_path)
    with pytest.raises(UserError, match="is public, and export.hub.private=true; make it private on the Hub"):
        run(stage(tiny_target), inputs, tmp_path)


def test_a_hub_that_is_not_there_is_told(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the Hub \(http://127.0.0.1:9\) cannot be reached \(.*\), asked 3 "
                                        "times; check the network and HF_ENDPOINT, then run the same"):
        stage(tiny_target).preflight()


def pickled(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"x")


def linked(folder: Path) -> None:
    (folder.parent / "private.key").write_text("secret")
    (folder / "notes.txt").symlink_to(folder.parent / "private.key")


def by_path(folder: Path) -> None:
    facts = json.loads((folder / "speculator.json").read_text())
    (folder / "speculator.json").write_text(json.dumps({**facts, "target": "/models/mine"}))


SPOILT = {pickled: "has optimizer.pt, which may run code when they are opened and are not uploaded",
          linked: "notes.txt is a link to .*private.key, out of the folder that is uploaded; put a copy",
          by_path: "says that its target is '/models/mine', expected its name on the Hub; export again",
          shutil.rmtree: "is no folder of an exported drafter: it has no speculator.json, or no"}


@pytest.mark.parametrize("change", SPOILT)
def test_a_folder_that_should_not_travel_stays(hub: Hub, tiny_target: Target, exported: Path, tmp_path: Path,
                                               change: Any) -> None:
    mine = copy_of(exported, tmp_path)
    change(mine)
    made = stage(tiny_target, folder=str(mine))
    with pytest.raises(UserError, match=SPOILT[change]):
        made.preflight()
        run(made, {}, tmp_path)
    assert hub.ask("/_repos") == {}


def test_what_was_not_measured_is_said(hub: Hub, tiny_target: Target, exported: Path, tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    run(stage(tiny_target), {"export": exported}, tmp_path)
    assert "Nothing was measured yet." in hub.files()["README.md"].decode()
    out = capsys.readouterr().out
    assert "upload: nothing was measured with these settings" in out and "license is unknown" in out


def test_a_sweep_stands_in_for_the_evaluation(hub: Hub, tiny_target: Target, exported: Path,
                                              tmp_path: Path) -> None:
    swept = [{**ROWS[1], "num_speculative_tokens": k, "users": users, "dataset": f"math{k}x{users}"}
             for k in (1, 3) for users in (1, 4)]
    (tmp_path / "rows.json").write_text(json.dumps([*swept, {**swept[0], "method": "ngram", "users": 1}]))
    run(stage(tiny_target), {"export": exported, "sweep": tmp_path}, tmp_path)
    lines = [line for line in hub.files()["README.md"].decode().splitlines() if line.startswith("| math")]
    assert len(lines) == 1 and lines[0].startswith("| math3x1 |")


def test_each_platform_has_its_line_where_they_differ(hub: Hub, tiny_target: Target, exported: Path,
                                                      tmp_path: Path) -> None:
    serving = ServingFacts(None, "rocm", {"max-model-len": 4096},
                           {}, {"variables": {"VLLM_ROCM_USE_AITER": 1},
                                "draft": {"attention_backend": "TRITON"}}, {}, {})
    run(stage(tiny_target, serving=serving), {"export": exported}, tmp_path)
    card = hub.files()["README.md"].decode()
    assert ("vLLM on ROCm:\n\n```bash\nVLLM_ROCM_USE_AITER=1 vllm serve org/target --max-model-len 4096"
            in card)
    assert '"attention_backend": "TRITON"' in card.partition("vLLM on CUDA:")[0]
    assert "TRITON" not in card.partition("vLLM on CUDA:")[2]


def test_settings_that_do_not_go_together_are_told(tiny_target: Target, exported: Path) -> None:
    export = Export(target=tiny_target, drafter=None, source=None, formats=["native"], dtype="float32",
                    default_k=3, target_name=None, cpu_server=None, max_context=None, trained_modes=[],
                    probe_rows=1,
                    calibration_drafts=2, recipe=None, command=None, hub=place(repo=None))
    found = stage(tiny_target, repo=None, format="speculators",
                  serving=ServingFacts("other", None, {}, {}, {}, {}, {})).check({"export": export})
    assert {key: text.partition(",")[0] for key, text in found.items()} == {
        "export.hub.repo": "must name a repository on the Hub",
        "upload.format": "must be among export.formats (native)",
        "export.target_name": "must be the target's name on the Hub",
        "serving": "holds the facts of other"}
    assert export.brings == () and stage(tiny_target, folder=str(exported / "native")).check({}) == {}
