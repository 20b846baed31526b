"""Progress: lines in a log, a bar on a terminal, and figures that fit."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer import progress
from trainer.progress import Progress, clock, compact, exit_status

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that moves only when it is told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_lines_come_at_their_interval_and_at_the_end(capsys: pytest.CaptureFixture, tick: Callable) -> None:
    with Progress("responses", total=1000, unit="tokens", interval=10) as bar:
        for _ in range(5):
            tick(5)
            bar.advance(100, cut=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "responses: 200/1,000 tokens  20%  elapsed 0:10  20 tokens/s  eta 0:40  cut 2",
        "responses: 400/1,000 tokens  40%  elapsed 0:20  20 tokens/s  eta 0:30  cut 2",
        "responses: 500/1,000 tokens  50%  elapsed 0:25  20 tokens/s  eta 0:25  cut 2"]


def test_what_was_done_before_is_no_speed(tick: Callable) -> None:
    with Progress("train", total=100, start=80) as bar:
        tick(10)
        bar.advance(10, loss=2.34567)
        assert bar.rate() == 1.0
        assert bar.line() == "90/100 steps  90%  elapsed 0:10  1 steps/s  eta 0:10  loss 2.35"


def test_the_rate_follows_the_last_minute(tick: Callable) -> None:
    with Progress("train", total=100_000) as bar:
        for _ in range(100):  # a slow start: one a second
            tick(1)
            bar.advance()
        for _ in range(90):
            tick(1)
            bar.advance(50)
        assert bar.rate() == pytest.approx(50, rel=0.02)
        assert len(bar._samples) < 70


def test_the_last_line_gives_the_rate_of_the_whole(capsys: pytest.CaptureFixture, tick: Callable) -> None:
    with Progress("train", total=20) as bar:
        tick(90)
        bar.advance(10)
        tick(10)
        bar.advance(10)
    assert capsys.readouterr().out.splitlines()[-1] == "train: 20/20 steps  100%  elapsed 1:40  0.2 steps/s"


def test_a_warm_up_is_no_speed(capsys: pytest.CaptureFixture, tick: Callable) -> None:
    """The first step compiles: neither the rate nor the time left may know of it."""
    with Progress("train", total=20, warm_up=True) as bar:
        tick(40)
        bar.advance(1)
        for _ in range(6):
            tick(2)
            bar.advance(1)
        assert bar.rate() == 0.5
        tick(26)
        bar.advance(13)
    assert capsys.readouterr().out.splitlines() == [
        "train: 1/20 steps  5%  elapsed 0:40",
        "train: 6/20 steps  30%  elapsed 0:50  0.5 steps/s  eta 0:28",
        "train: 20/20 steps  100%  elapsed 1:18  0.5 steps/s",
        "train: 20/20 steps  100%  elapsed 1:18  0.5 steps/s"]


def test_an_interrupted_bar_says_so_and_lets_the_error_through(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), Progress("train", total=5) as bar:
        bar.advance()
        raise KeyboardInterrupt
    assert capsys.readouterr().out.splitlines()[-1].endswith("(stopped)")


def test_nothing_to_do_prints_nothing(capsys: pytest.CaptureFixture, tick: Callable) -> None:
    with Progress("empty", total=0, interval=0) as bar:
        tick(100)
        bar.advance(0)
    assert capsys.readouterr().out == ""


def test_many_threads_lose_no_count(capsys: pytest.CaptureFixture) -> None:
    with Progress("requests", total=8000, interval=60) as bar:
        def count() -> None:
            for _ in range(1000):
                bar.advance(1, last=1)

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bar.done == 8000
    assert "8,000/8,000" in capsys.readouterr().out


def test_a_terminal_gets_a_bar() -> None:
    code = ("from trainer.progress import Progress\n"
            "with Progress('train', total=2000, unit='rows', start=500) as bar:\n"
            "    bar.advance(1500, loss=1.5, note='[b]x')\n")
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=follower, cwd=PROJECT,
                          env=os.environ | {"COLUMNS": "140", "TERM": "xterm"}) as process:
        os.close(follower)
        shown = b""
        while process.poll() is None or not shown:
            try:
                shown += os.read(leader, 65536)
            except OSError:  # the other end is closed: all was read
                break
    os.close(leader)
    assert process.returncode == 0
    for text in ("train", "━", "2,000/2,000 rows", "100%", "rows/s", "loss 1.5", "note [b]x"):
        assert text.encode() in shown, shown


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (7, "7"), (12345, "12,345"), (1_234_567, "1.23M"), (3.2e9, "3.2B"), (5e15, "5.00e+15"),
    (3.14159, "3.14"), (999.4, "999"), (999.7, "1,000"), (0.0031234, "0.00312"), (3.1e-5, "3.1e-05"),
    (-2.5, "-2.5"), (999_600_000, "1B"), (float("nan"), "nan"), (float("-inf"), "-inf"), (True, "True"),
    ("2/3", "2/3"), (None, "None")])
def test_numbers_are_short(value: object, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3600, "1:00:00"), (11045, "3:04:05"),
    (183845, "2d 03:04:05")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize("call", [lambda home: (home / "a/b").mkdir(), lambda home: (home / "no").read_text(),
                                  lambda home: (home / ("x" * 300)).touch()])
def test_a_place_that_a_tool_cannot_use_is_one_line(capsys: pytest.CaptureFixture, tmp_path: Path,
                                                    call: Callable[[Path], None]) -> None:
    assert exit_status(lambda: call(tmp_path) or 0, goes_on=False) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: {tmp_path}/") and len(err.splitlines()) == 1
    assert "cannot be read or written (" in err and "; mend that, or name another place" in err
