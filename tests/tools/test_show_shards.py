"""`tools/show_shards.py` on caches as the stage leaves them, whole, copied, and spoilt."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import manifest_of, random_samples, states_of

from trainer.hidden_states.index import index_path
from trainer.hidden_states.shards import shard_path
from trainer.hidden_states.writer import ShardWriter
from trainer.target import Target

TOOL = Path(__file__).parents[2] / "tools/show_shards.py"
SAMPLES = random_samples((40, 23, 57, 31, 12))


@pytest.fixture(scope="module")
def made(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with ShardWriter(folder, manifest_of(tiny_target, [1, 3]), 60_000) as writer:
        for sample, states in zip(SAMPLES, states_of(tiny_target, SAMPLES, [1, 3]), strict=True):
            writer.append(sample, states)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy: nothing in a cache knows where it lies."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False,
                          cwd="/", env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_it_shows_what_is_there(folder: Path, tiny_target: Target) -> None:
    done = call(folder, "--verify")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for text in (tiny_target.identity, tiny_target.template_hash,
                 "1, 3 (residual stream after L decoder layers",
                 "supervised rows (after all layers, before the final norm)",
                 "float32, stored as native, 64 wide",
                 "163, of which 123 have their last state (75.5%)", "shard-00000.bin", "shard-00002.bin",
                 "nothing is wrong: 5 samples, all checksums compared"):
        assert text in done.stdout, text
    rows = {line.split("│")[1].strip(): [part.strip() for part in line.split("│")[2:-1]]
            for line in done.stdout.splitlines() if line.startswith("│")}
    assert rows["layer 1"] == rows["layer 3"] and rows["layer 1"][2] == "256.0"
    assert rows["last"] == ["30.8 KiB", rows["last"][1], f"{123 * 256 / 163:.1f}"]
    assert rows["tokens"][2] == "4.0" and rows["all"][1] == "100.0%"
    shares = [float(row[1].rstrip("%")) for name, row in rows.items() if len(row) == 3 and name != "all"
              and row[1].endswith("%") and not name.startswith("shard")]
    assert abs(sum(shares) - 100) < 0.5
    assert sum(int(row[0]) for name, row in rows.items() if name.startswith("shard-")) == 5


def test_without_verify_the_content_is_not_read(folder: Path) -> None:
    path = shard_path(folder, 1)
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    done = call(folder)
    assert done.returncode == 0 and "--verify compares every checksum" in done.stdout
    done = call(folder, "--verify")
    assert done.returncode == 1 and "nothing is wrong" not in done.stdout
    [line] = done.stderr.splitlines()
    assert re.fullmatch(f"bad: {path}, sample s[12]: section 'layer 1' is damaged: expected checksum "
                        f"[0-9a-f]{{16}}, "
                        "found [0-9a-f]{16}", line)


def test_every_bad_sample_is_named(folder: Path) -> None:
    for number in range(3):
        path = shard_path(folder, number)
        content = bytearray(path.read_bytes())
        for page in range(0, len(content), 4096):
            content[page + 300] ^= 1
        path.write_bytes(content)
    done = call(folder, "--verify")
    assert done.returncode == 1
    assert set(re.findall(r"sample (s\d):", done.stderr)) == {sample.id for sample in SAMPLES}


def test_lengths_are_looked_at_always(folder: Path) -> None:
    size = shard_path(folder, 0).stat().st_size
    os.truncate(shard_path(folder, 0), size - 1)
    shard_path(folder, 2).unlink()
    with index_path(folder).open("ab") as file:
        file.write(b"torn")
    done = call(folder)
    assert done.returncode == 1
    torn, cut, gone = done.stderr.splitlines()
    assert f"{index_path(folder)} ends in a torn record: expected a record of" in torn
    assert "found 4 bytes of one" in torn
    assert cut.endswith(f"shard-00000.bin is truncated: expected at least {size} bytes, found {size - 1}")
    assert "shard-00002.bin is truncated" in gone and gone.endswith("found 0") and "missing" in done.stdout


def test_what_is_no_cache_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    for path, said in ((tmp_path / "nothing", "is no folder of hidden states: it has no manifest"),
                       (folder, "is damaged")):
        if path is folder:
            content = bytearray(index_path(folder).read_bytes())
            content[3] ^= 1
            index_path(folder).write_bytes(content)
        done = call(path)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and said in done.stderr
        assert "Traceback" not in done.stderr


def test_a_cache_without_samples(tmp_path: Path, tiny_target: Target) -> None:
    """As one for online training, or one that was just begun."""
    manifest_of(tiny_target, [1, 3]).write(tmp_path)
    done = call(tmp_path, "--verify")
    assert done.returncode == 0 and "no sample is stored here" in done.stdout


def test_help_says_what_it_does() -> None:
    done = call("--help")
    assert done.returncode == 0 and "--verify" in done.stdout and "Exit status" in done.stdout
    assert call().returncode == 2


@pytest.mark.parametrize(("where", "code", "said"), [
    ("| true", 0, ""), ("> /dev/full", 2, "error: the output cannot be written (No space left on device)")])
def test_nobody_reads_or_can_take_the_output(folder: Path, where: str, code: int, said: str) -> None:
    line = f"{shlex.join([sys.executable, str(TOOL), str(folder)])} {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == code and len(done.stderr.splitlines()) <= 1 and said in done.stderr, done.stderr


def test_every_tool_lives_on_without_its_output() -> None:
    workers = {"verify_arms.py"}  # started by bench_verify, and says what it found in a file
    commands = [path for path in TOOL.parent.glob("*.py")
                if "__main__" in path.read_text() and path.name not in workers]
    assert len(commands) >= 6
    lasting = re.compile(r"^    (sys\.exit\(exit_status\(main, goes_on=|with lasting_output\()", re.MULTILINE)
    assert not [path.name for path in commands if not lasting.search(path.read_text())]
